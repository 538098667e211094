//! Converts texts so that Kubernetes accepts them in labels (k8s.io/apimachinery, pkg/util/validation).

/// The maximum length of a value, and of the part of a key after the slash.
const LENGTH: usize = 63;

fn is_allowed(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
}

/// Convert a text to the value of a label. Characters that are not allowed are removed, and whitespace becomes a dash.
pub(crate) fn value(text: &str) -> String {
    let words = text
        .split_whitespace()
        .map(|word| word.chars().filter(|character| is_allowed(*character)).collect::<String>());
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    cut(&words.join("-"), LENGTH)
}

/// Cut a value, or a part of a key, to at most this length, so that it begins and ends with a letter or a digit.
pub(crate) fn cut(text: &str, length: usize) -> String {
    let trimmed = |text: &str| {
        text.trim_matches(|character: char| !character.is_ascii_alphanumeric())
            .to_owned()
    };
    let text = trimmed(text);
    match text.get(..length) {
        Some(start) => trimmed(start),
        None => text,
    }
}

/// Return the key `nvidia.com/` followed by `head`, `middle`, and `tail`. `middle` is cut as far as necessary.
pub(crate) fn key(head: &str, middle: &str, tail: &str) -> String {
    let left = LENGTH.saturating_sub(head.len() + tail.len());
    format!("nvidia.com/{head}{}{tail}", cut(middle, left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_sanitized_and_cut() {
        for (text, expected) in [
            ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
            ("  Tesla   T4 ", "Tesla-T4"),
            ("A/B (C)", "AB-C"),
            ("", ""),
            ("***", ""),
            ("-x-", "x"),
            ("ü", ""),
        ] {
            assert_eq!(value(text), expected, "{text}");
        }
        let long = format!("{} {}", "a".repeat(62), "b".repeat(10));
        assert_eq!(value(&long), "a".repeat(62), "a dash is not the last character");
        assert_eq!(value(&"a".repeat(100)).len(), 63);
    }

    #[test]
    fn keys_are_cut_in_the_middle() {
        assert_eq!(key("model.", "Tesla-T4", ".count"), "nvidia.com/model.Tesla-T4.count");
        let long = key("model.", &"a".repeat(100), ".count");
        assert_eq!(long.len(), "nvidia.com/".len() + 63);
        assert!(long.ends_with("a.count"));
    }
}
