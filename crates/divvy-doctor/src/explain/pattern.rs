//! Patterns of error texts: `*` is a part of one word, `<n>` a number, `...` any text. A pattern begins and ends where words do, and does not
//! begin within a path.

/// Return the text as patterns see it, because loggers differ: in lower case, without quotes, with single spaces for white space of any
/// kind (also if it is written `\n`), in ASCII, and without the ending of NVIDIA's programs under the GPU operator (`nvidia-container-cli.real`).
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut is_escaped = false;
    for character in text.chars() {
        let space = character.is_whitespace() || character.is_control() || (is_escaped && matches!(character, 'n' | 't' | 'r'));
        is_escaped = character == '\\';
        match character {
            _ if space => {
                if !plain.ends_with(' ') {
                    plain.push(' ');
                }
            }
            '"' | '\'' | '`' | '\\' | '\u{2018}' | '\u{2019}' | '\u{201c}' | '\u{201d}' => (),
            other if other.is_ascii() => plain.push(other.to_ascii_lowercase()),
            _ => plain.push('?'),
        }
    }
    if plain.contains(".real:") {
        plain.replace(".real:", ":")
    } else {
        plain
    }
}

/// What may stand before a literal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gap {
    /// Any text.
    Any,
    /// Text without a space.
    Word,
    /// Digits.
    Number,
}

/// A pattern: literals, each with what may stand before it.
#[derive(Debug)]
pub(super) struct TextPattern {
    parts: Vec<(Gap, String)>,
    /// Whether the pattern begins with a wildcard.
    begins_anywhere: bool,
    /// Whether the pattern ends with a wildcard.
    ends_anywhere: bool,
}

/// The largest number of places at which the literals of a pattern are tried in a line, so that no line takes long.
const PLACES: usize = 256;

impl TextPattern {
    /// Parse a pattern that [`plain`] has normalized.
    pub(super) fn new(text: &str) -> TextPattern {
        let mut parts = Vec::new();
        let (mut gap, mut rest) = (Gap::Any, text);
        loop {
            let wildcards = [("...", Gap::Any), ("*", Gap::Word), ("<n>", Gap::Number)];
            let next = wildcards.iter().filter_map(|(sign, gap)| Some((rest.find(sign)?, sign, gap)));
            let Some((at, sign, after)) = next.min_by_key(|(at, ..)| *at) else {
                break;
            };
            parts.push((gap, rest[..at].to_owned()));
            (gap, rest) = (*after, &rest[at + sign.len()..]);
        }
        let ends_anywhere = rest.is_empty();
        if !ends_anywhere {
            parts.push((gap, rest.to_owned()));
        }
        let begins_anywhere = parts.first().is_some_and(|(_, literal)| literal.is_empty());
        if begins_anywhere {
            parts.remove(0);
        }
        for (gap, literal) in &mut parts {
            // `a ... b` also matches `a b`.
            if *gap == Gap::Any {
                *literal = literal.trim_start().to_owned();
            }
        }
        TextPattern {
            parts,
            begins_anywhere,
            ends_anywhere,
        }
    }

    /// Return the longest literal. A line without it does not match.
    pub(super) fn longest(&self) -> &str {
        let literals = self.parts.iter().map(|(_, literal)| literal.as_str());
        literals.max_by_key(|literal| literal.len()).unwrap_or_default()
    }

    /// Return how specific the pattern is: the number of characters that are not wildcards.
    pub(super) fn length(&self) -> usize {
        self.parts.iter().map(|(_, literal)| literal.trim().len()).sum()
    }

    /// Return where the pattern begins in a line that [`plain`] has normalized. `None` if it does not match.
    pub(super) fn find(&self, line: &str) -> Option<usize> {
        let (_, first) = self.parts.first()?;
        let begins_a_word = !self.begins_anywhere && first.starts_with(is_word);
        let mut places = PLACES;
        line.match_indices(first.as_str()).take(PLACES).map(|(at, _)| at).find(|at| {
            let before = line[..*at].chars().next_back();
            let is_inside = before.is_some_and(|c| is_word(c) || matches!(c, '_' | '/' | '-'));
            !(begins_a_word && is_inside) && self.follows(1, line, at + first.len(), &mut places)
        })
    }

    /// Report whether the literals from `index` on follow in the line from `at` on.
    fn follows(&self, index: usize, line: &str, at: usize, places: &mut usize) -> bool {
        let rest = &line[at..];
        let Some((gap, literal)) = self.parts.get(index) else {
            let ends_a_word = self.parts.last().is_some_and(|(_, literal)| literal.ends_with(is_word));
            return self.ends_anywhere || !(ends_a_word && rest.starts_with(|c| is_word(c) || c == '_'));
        };
        let (least, most) = match gap {
            Gap::Any => (0, rest.len()),
            Gap::Word => (0, rest.find(' ').unwrap_or(rest.len())),
            Gap::Number => {
                let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                if digits == 0 {
                    return false;
                }
                (digits, digits)
            }
        };
        let window = &rest[least..rest.len().min(most + literal.len())];
        for (offset, _) in window.match_indices(literal.as_str()) {
            *places = places.saturating_sub(1);
            if *places == 0 || (*gap == Gap::Number && offset > 0) {
                return false;
            }
            if self.follows(index + 1, line, at + least + offset + literal.len(), places) {
                return true;
            }
        }
        false
    }
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_whole_words_and_not_parts_of_paths() {
        let check = |pattern: &str, line: &str, expected: bool| {
            let found = TextPattern::new(&plain(pattern)).find(&plain(line));
            assert_eq!(found.is_some(), expected, "{pattern} on {line}");
        };
        check("overlay", "mount of overlay: no such device", true);
        check("overlay", "/var/lib/docker/overlay2/x: no such device", false);
        check("overlay", "/var/lib/overlay: no such device", false);
        check("error <n>:", "Error 803: system has", true);
        check("error <n>:", "Error x: system has", false);
        check("open *libcuda.so", "open /usr/lib/libcuda.so.1: no such file", true);
        check("open *libcuda.so", "open a file; libcuda.so", false);
        check("open...libcuda.so", "open a file; libcuda.so", true);
        check("nvidia-container-cli: mount", "nvidia-container-cli.real:  Mount error", true);
        check("no runtime for nvidia", r#"no runtime for \\\"nvidia\\\" is"#, true);
        check("nvidia-container-cli: mount", r"legacy'\\nnvidia-container-cli: mount", true);
        check("a*b...c<n>", "xa axxb c cx c7", true);
        check("a*b...c<n>", "axx b c7", false);
        check("hip error*", "HIP errors", true);
        check("hip error", "HIP errors", false);
        check("didnt match", "didn\u{2019}t match", true);
    }
}
