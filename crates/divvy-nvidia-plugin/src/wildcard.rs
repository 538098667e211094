/// Report whether the whole text matches a pattern. `*` stands for any text, and every other character for itself.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut rest) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = tail.split('*');
    let Some(last) = parts.next_back() else {
        return rest.ends_with(tail);
    };
    for part in parts {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text_and_the_whole_text_must_match() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "NVIDIA A100", true),
            ("A100", "A100", true),
            ("A100", "NVIDIA A100", false),
            ("*A100", "NVIDIA A100", true),
            ("*A100", "NVIDIA A100-SXM4", false),
            ("*A100*", "NVIDIA A100-SXM4", true),
            ("NVIDIA*40GB", "NVIDIA A100-SXM4-40GB", true),
            ("NVIDIA*80GB", "NVIDIA A100-SXM4-40GB", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("a*a", "a", false),
            ("*a*a*", "aa", true),
            ("**", "x", true),
            ("a.c", "abc", false),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }
}
