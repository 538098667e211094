//! Makes text from other programs safe to show on a terminal.

use std::borrow::Cow;

/// Escape what a terminal would interpret: control characters other than line feeds, and characters that change the writing direction, become
/// escapes such as `\u{1b}`. Tabs become spaces.
pub fn plain(text: &str) -> Cow<'_, str> {
    let is_order = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(is_order) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\t' => shown.push(' '),
            c if is_order(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Do the same as [`plain`], and escape line feeds as well, so that the result is one line.
pub fn plain_line(text: impl IntoIterator<Item = char>) -> String {
    let text: String = text.into_iter().collect();
    plain(&text).replace('\n', "\\u{a}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_moves_no_cursor() {
        for (text, expected) in [
            ("as it is: ü → \n", "as it is: ü → \n"),
            ("a\tb\r\u{1b}[2J\u{7f}\u{9b}", "a b\\u{d}\\u{1b}[2J\\u{7f}\\u{9b}"),
            ("\u{202e}gpj.exe", "\\u{202e}gpj.exe"),
        ] {
            assert_eq!(plain(text), expected);
        }
        assert_eq!(plain_line("a\nb\u{1b}".chars()), "a\\u{a}b\\u{1b}");
    }
}
