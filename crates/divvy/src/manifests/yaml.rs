//! Values as Go's YAML library (go.yaml.in/yaml/v2, which Helm's `toYaml` uses) writes them: block style, sorted keys, lists not indented below
//! their key, and quotes where a reader of YAML 1.1 would take a text for something else. Held against Helm for some 120 texts; other than there
//! are control characters beside tab and line breaks: the same values, other escapes.

use std::cmp::Ordering;

use serde_json::Value;

/// The text, without a line break at its end.
pub fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => block_map(map, 0, &mut out),
        Value::Array(list) if !list.is_empty() => block_list(list, 0, &mut out),
        other => scalar(other, 0, &mut out),
    }
    out.trim_end_matches('\n').to_owned()
}

fn block_map(map: &serde_json::Map<String, Value>, indent: usize, out: &mut String) {
    let mut keys: Vec<&String> = map.keys().collect();
    // Go's order of keys is none for some (a1b, a01, a10 go in a circle), at which the library's own sort may panic.
    keys.sort();
    for nth in 1..keys.len() {
        let mut at = nth;
        while at > 0 && compare_keys(keys[at], keys[at - 1]) == Ordering::Less {
            keys.swap(at, at - 1);
            at -= 1;
        }
    }
    for (nth, key) in keys.into_iter().enumerate() {
        if nth > 0 {
            pad(indent, out);
        }
        self::key(key, out);
        out.push(':');
        let value = map.get(key).unwrap_or(&Value::Null);
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                out.push('\n');
                pad(indent + 2, out);
                block_map(inner, indent + 2, out);
            }
            Value::Array(inner) if !inner.is_empty() => {
                out.push('\n');
                pad(indent, out);
                block_list(inner, indent, out);
            }
            other => {
                out.push(' ');
                scalar(other, indent + 2, out);
                out.push('\n');
            }
        }
    }
}

fn block_list(list: &[Value], indent: usize, out: &mut String) {
    for (nth, value) in list.iter().enumerate() {
        if nth > 0 {
            pad(indent, out);
        }
        out.push_str("- ");
        match value {
            Value::Object(inner) if !inner.is_empty() => block_map(inner, indent + 2, out),
            Value::Array(inner) if !inner.is_empty() => block_list(inner, indent + 2, out),
            other => {
                scalar(other, indent + 2, out);
                out.push('\n');
            }
        }
    }
}

fn pad(indent: usize, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
}

/// A key is always on one line.
fn key(text: &str, out: &mut String) {
    let style = if text.contains('\n') { Style::Double } else { style(text) };
    flow(text, style, None, out);
}

fn scalar(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(bool) => out.push_str(&bool.to_string()),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::String(text) => match style(text) {
            Style::Literal => literal(text, indent, out),
            style => flow(text, style, Some(indent), out),
        },
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Plain,
    Single,
    Double,
    Literal,
}

fn style(text: &str) -> Style {
    let printable = text.chars().all(|c| c == '\n' || !c.is_control());
    if text.contains('\n') {
        // A space before a break needs quotes.
        let literal = printable && !text.contains(" \n") && !text.ends_with(' ');
        return if literal { Style::Literal } else { Style::Double };
    }
    if !printable || is_other_than_text(text) {
        Style::Double
    } else if text.starts_with(' ') || text.ends_with(' ') || has_indicators(text) {
        Style::Single
    } else {
        Style::Plain
    }
}

fn literal(text: &str, indent: usize, out: &mut String) {
    let body = text.trim_end_matches('\n');
    let (chomp, lines) = match text.len() - body.len() {
        0 => ("-", body),
        1 => ("", body),
        _ => ("+", &text[..text.len() - 1]),
    };
    out.push('|');
    if text.starts_with([' ', '\n']) {
        // Else the reader would take the text's own spaces for the indentation.
        out.push('2');
    }
    out.push_str(chomp);
    for line in lines.split('\n') {
        out.push('\n');
        if !line.is_empty() {
            pad(indent, out);
            out.push_str(line);
        }
    }
}

/// A text on one line; with an indent, its spaces beyond column 80 become line breaks.
fn flow(text: &str, style: Style, indent: Option<usize>, out: &mut String) {
    let quote = match style {
        Style::Plain | Style::Literal => "",
        Style::Single => "'",
        Style::Double => "\"",
    };
    out.push_str(quote);
    let characters: Vec<char> = text.chars().collect();
    let mut after_space = false;
    for (at, c) in characters.iter().copied().enumerate() {
        if c != ' ' {
            escape(c, style, out);
            after_space = false;
            continue;
        }
        let space_follows = characters.get(at + 1) == Some(&' ');
        let inside = at > 0 && at + 1 < characters.len();
        let may_break = match style {
            Style::Double => inside,
            Style::Single => inside && !space_follows,
            Style::Plain | Style::Literal => !space_follows,
        };
        match indent {
            Some(indent) if may_break && !after_space && column(out) > 80 => {
                out.push('\n');
                pad(indent, out);
                if style == Style::Double && space_follows {
                    out.push('\\');
                }
            }
            _ => out.push(' '),
        }
        after_space = true;
    }
    out.push_str(quote);
}

fn column(out: &str) -> usize {
    out.rsplit('\n').next().unwrap_or(out).chars().count()
}

fn escape(c: char, style: Style, out: &mut String) {
    match (style, c) {
        (Style::Single, '\'') => out.push_str("''"),
        (Style::Double, '"') => out.push_str("\\\""),
        (Style::Double, '\\') => out.push_str("\\\\"),
        (Style::Double, '\n') => out.push_str("\\n"),
        (Style::Double, '\t') => out.push_str("\\t"),
        (Style::Double, '\r') => out.push_str("\\r"),
        (Style::Double, c) if c.is_control() => out.push_str(&format!("\\x{:02X}", u32::from(c))),
        (_, c) => out.push(c),
    }
}

/// What a plain text must not have where it has it: `yaml_emitter_analyze_scalar`.
fn has_indicators(string: &str) -> bool {
    if string.starts_with("---") || string.starts_with("...") {
        return true;
    }
    let blank_after = |rest: &str| rest.is_empty() || rest.starts_with([' ', '\t']);
    let mut before_is_blank = true;
    for (at, c) in string.char_indices() {
        let rest = &string[at + c.len_utf8()..];
        let indicates = match c {
            '#' => before_is_blank,
            ':' => blank_after(rest),
            ',' | '[' | ']' | '{' | '}' | '&' | '*' | '!' | '|' | '>' | '\'' | '"' | '%' | '@' | '`' => at == 0,
            '?' | '-' => at == 0 && blank_after(rest),
            _ => false,
        };
        if indicates {
            return true;
        }
        before_is_blank = c == ' ' || c == '\t';
    }
    false
}

/// Would YAML 1.1 read it as a boolean, null, number or time? (`resolve` and `isBase60Float`)
fn is_other_than_text(string: &str) -> bool {
    const WORDS: [&str; 11] = ["y", "yes", "true", "on", "n", "no", "false", "off", "null", ".nan", ".inf"];
    let written_as = |word: &str| {
        let capital = word.char_indices().map(|(at, c)| {
            if at == usize::from(word.starts_with('.')) {
                c.to_ascii_uppercase()
            } else {
                c
            }
        });
        string == word || string == word.to_ascii_uppercase() || string == capital.collect::<String>()
    };
    if string.is_empty() || matches!(string, "~" | ".NaN") || WORDS.iter().any(|word| written_as(word)) {
        return true;
    }
    let unsigned = string.strip_prefix(['+', '-']).unwrap_or(string);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") {
        return true;
    }
    match string.chars().next() {
        Some('.') => string.parse::<f64>().is_ok(),
        Some('0'..='9' | '+' | '-') => is_time(string) || is_number(string) || is_base_60(unsigned),
        _ => false,
    }
}

fn is_number(string: &str) -> bool {
    let plain = string.replace('_', "");
    let unsigned = plain.strip_prefix(['+', '-']).unwrap_or(&plain);
    let digits_of = |prefixes: [&str; 2], radix: u32| {
        prefixes.iter().any(|prefix| {
            unsigned
                .strip_prefix(prefix)
                .is_some_and(|digits| !digits.is_empty() && digits.chars().all(|c| c.is_digit(radix)))
        })
    };
    if digits_of(["0x", "0X"], 16) || digits_of(["0o", "0O"], 8) || digits_of(["0b", "0B"], 2) {
        return true;
    }
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let all_digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mantissa_fits = all_digits(whole) && all_digits(fraction) && !(whole.is_empty() && fraction.is_empty());
    mantissa_fits && !exponent.is_empty() && all_digits(exponent)
}

/// `2006-1-2`, and with a time after `T`, `t` or a space.
fn is_time(string: &str) -> bool {
    let (date, time) = string
        .find(['T', 't', ' '])
        .map_or((string, None), |at| (&string[..at], Some(&string[at + 1..])));
    let parts: Vec<&str> = date.split('-').collect();
    let number =
        |text: &str, longest: usize| !text.is_empty() && text.len() <= longest && text.bytes().all(|b| b.is_ascii_digit());
    let at_most = |text: &str, most: u32| text.parse().is_ok_and(|number: u32| (1..=most).contains(&number));
    let is_date = matches!(parts.as_slice(), [year, month, day] if year.len() == 4 && number(year, 4) && number(month, 2) && number(day, 2)
            && at_most(month, 12) && at_most(day, 31));
    is_date && time.is_none_or(|time| time.contains(':') && time.starts_with(|c: char| c.is_ascii_digit()))
}

/// `1:30`, `190:20:30.15`: numbers to base 60 in YAML 1.1.
fn is_base_60(unsigned: &str) -> bool {
    let mut parts = unsigned.split(':');
    let first = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '_');
    let sixties = |text: &str| matches!(text.as_bytes(), [b'0'..=b'9'] | [b'0'..=b'5', b'0'..=b'9']);
    !first.is_empty()
        && digits(first)
        && !rest.is_empty()
        && rest.iter().enumerate().all(|(nth, part)| {
            let whole = if nth + 1 == rest.len() {
                part.split('.').next().unwrap_or(part)
            } else {
                part
            };
            sixties(whole)
                && part[whole.len()..]
                    .chars()
                    .all(|c| c.is_ascii_digit() || c == '_' || c == '.')
        })
}

/// Numbers in keys count as numbers, and letters come after everything else (`keyList.Less`).
fn compare_keys(a: &str, b: &str) -> Ordering {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    for i in 0..a.len().min(b.len()) {
        let (left, right) = (a[i], b[i]);
        if left == right {
            continue;
        }
        return match (left.is_alphabetic(), right.is_alphabetic()) {
            (true, true) => left.cmp(&right),
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => numbers_at(&a, &b, i).unwrap_or_else(|| left.cmp(&right)),
        };
    }
    a.len().cmp(&b.len())
}

fn numbers_at(a: &[char], b: &[char], at: usize) -> Option<Ordering> {
    let mut start = 0_u128;
    if a[at] == '0' || b[at] == '0' {
        let digits = a[..at].iter().rev().take_while(|c| c.is_ascii_digit());
        start = u128::from(digits.into_iter().any(|c| *c != '0'));
    }
    let number = |text: &[char]| {
        let digits: Vec<u32> = text[at..].iter().map_while(|c| c.to_digit(10)).collect();
        let value = digits
            .iter()
            .fold(start, |sum, digit| sum.saturating_mul(10).saturating_add(u128::from(*digit)));
        (value, digits.len())
    };
    let ((left, left_length), (right, right_length)) = (number(a), number(b));
    let order = left.cmp(&right).then(left_length.cmp(&right_length));
    (order != Ordering::Equal).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_are_quoted_where_go_quotes_them() {
        // As `helm template` (v3.19.0) prints {{ toYaml .Values.x }}.
        for (value, expected) in [
            ("plain", "plain"),
            ("two words", "two words"),
            ("", r#""""#),
            ("true", r#""true""#),
            ("No", r#""No""#),
            ("nO", "nO"),
            ("1", r#""1""#),
            ("0x1F", r#""0x1F""#),
            ("1e3", r#""1e3""#),
            ("1.5", r#""1.5""#),
            ("12345678901234567890123", r#""12345678901234567890123""#),
            ("16Mi", "16Mi"),
            ("0:30", r#""0:30""#),
            ("127.0.0.1", "127.0.0.1"),
            ("2001-12-14", r#""2001-12-14""#),
            ("~", r#""~""#),
            ("a: b", "'a: b'"),
            ("a:b", "a:b"),
            ("a #b", "'a #b'"),
            ("#b", "'#b'"),
            ("it's", "it's"),
            ("'x", "'''x'"),
            ("*", "'*'"),
            ("$(NODE_NAME)", "$(NODE_NAME)"),
            ("-x", "-x"),
            ("--flag=a,b", "--flag=a,b"),
            ("- x", "'- x'"),
            (" x", "' x'"),
            ("a\tb", r#""a\tb""#),
            ("a\nb", "|-\n  a\n  b"),
            ("a\nb\n", "|\n  a\n  b"),
            ("größer", "größer"),
            ("<<", "<<"),
            (".NaN", "\".NaN\""),
            ("9999-99-99", "9999-99-99"),
            ("1:60", "1:60"),
            ("08", "\"08\""),
            (" x\ny", "|2-\n   x\n  y"),
            ("x \ny", "\"x \\ny\""),
            (
                "a text that is so long that a library which folds its lines at eighty columns would fold it",
                "a text that is so long that a library which folds its lines at eighty columns would\n  fold it",
            ),
        ] {
            let text = to_yaml(&json!({"k": value}));
            assert_eq!(text, format!("k: {expected}"), "{value:?}");
        }
    }

    #[test]
    fn maps_are_sorted_and_lists_are_not_indented() {
        let value = json!({"b": [{"z": 1, "a": {"x": []}}, "s", [1, 2]], "a10": {}, "a2": null, "a/b": 1.5});
        let expected = "a/b: 1.5\na2: null\na10: {}\nb:\n- a:\n    x: []\n  z: 1\n- s\n- - 1\n  - 2";
        assert_eq!(to_yaml(&value), expected);
    }
}
