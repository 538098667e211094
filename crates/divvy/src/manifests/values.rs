//! What the user chose: `--set` and `--values` as Helm reads them, laid over the chart's own values, and checked against its schema (the part of
//! JSON Schema that the chart's uses; another word in it is an error of the chart).

use serde_json::{Map, Value};

use super::{Chart, Error};

/// A file of `--values`, at most this large.
const LIMIT: u64 = 1 << 20;

/// The most maps within maps.
const DEEPEST: usize = 32;

/// Reads a file of `--values`.
///
/// # Errors
/// It cannot be read, or is not a map in YAML.
pub fn read(path: &std::path::Path) -> Result<Value, Error> {
    let wrong = |text: String| Error::Values {
        origin: format!("--values {}", path.display()),
        text,
    };
    let size = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if size > LIMIT {
        return Err(wrong(format!("it has {size} bytes, and values have at most {LIMIT}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    parse(&text).map_err(wrong)
}

/// Reads values as YAML. Nothing at all is an empty map.
///
/// # Errors
/// It is not YAML, or not a map.
pub fn parse(text: &str) -> Result<Value, String> {
    let value: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    match value {
        Value::Object(_) => Ok(value),
        Value::Null => Ok(Value::Object(Map::new())),
        _ => Err("it is not a map; write keys and values, as in the chart's values.yaml".to_owned()),
    }
}

/// Reads an argument of `--set`: `a.b=c,d={e,f}`. A backslash takes a dot's or comma's meaning away.
///
/// # Errors
/// With the argument and an example.
pub fn set(argument: &str) -> Result<Value, Error> {
    let wrong = |text: &str| Error::Values {
        origin: format!("--set {argument}"),
        text: format!("{text}; write KEY=VALUE, such as --set agent.reserveMemory=512MiB, or use --values FILE"),
    };
    let mut root = Value::Object(Map::new());
    for part in split(argument, ',') {
        let Some((key, text)) = part.split_once('=') else {
            return Err(wrong("there is no = in it"));
        };
        let path: Vec<String> = split(key, '.').iter().map(|name| unescaped(name)).collect();
        if path.iter().any(|name| name.is_empty() || name.contains(['[', ']'])) {
            return Err(wrong("its key is not understood (places in a list are not either)"));
        }
        if path.len() > DEEPEST {
            return Err(wrong(&format!(
                "its key has {} parts, and at most {DEEPEST} are understood",
                path.len()
            )));
        }
        let mut value = typed(text);
        if let Some(list) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
            let items = split(list, ',');
            value = Value::Array(items.iter().filter(|item| !item.is_empty()).map(|item| typed(item)).collect());
        }
        for name in path.into_iter().rev() {
            value = Value::Object(Map::from_iter([(name, value)]));
        }
        lay_over(&mut root, value, false);
    }
    Ok(root)
}

/// At each `mark` that no backslash precedes and that is not in braces.
fn split(text: &str, mark: char) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut escaped, mut braces) = (0, false, 0_usize);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => {}
            '{' => braces += 1,
            '}' => braces = braces.saturating_sub(1),
            c if c == mark && braces == 0 => {
                parts.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
        escaped = c == '\\' && !escaped;
    }
    parts.push(&text[start..]);
    parts
}

fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut escaped = false;
    for c in text.chars() {
        if c == '\\' && !escaped {
            escaped = true;
            continue;
        }
        escaped = false;
        out.push(c);
    }
    out
}

/// As Helm types it (strvals, `typedVal`): a number that begins with 0 is a text.
fn typed(text: &str) -> Value {
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        "null" => Value::Null,
        "0" => Value::from(0),
        _ if text.starts_with('0') => Value::String(unescaped(text)),
        _ => text
            .parse::<i64>()
            .map_or_else(|_| Value::String(unescaped(text)), Value::from),
    }
}

/// The chart's values with what was chosen on top, checked.
pub(super) fn complete(chart: &Chart, chosen: &[Value]) -> Result<Value, Error> {
    let mut top = Value::Object(Map::new());
    for value in chosen {
        lay_over(&mut top, value.clone(), false);
    }
    let mut faults = Vec::new();
    check(&top, chart.schema(), "", DEEPEST, &mut faults)?;
    if !faults.is_empty() {
        return Err(Error::Schema(faults));
    }
    let mut values = chart.values().clone();
    lay_over(&mut values, top, true);
    // Also what is left: a null may have taken something away.
    check(&values, chart.schema(), "", DEEPEST, &mut faults)?;
    if faults.is_empty() {
        Ok(values)
    } else {
        Err(Error::Schema(faults))
    }
}

/// Maps are merged, everything else is replaced; with `remove` a null takes away what is there.
fn lay_over(below: &mut Value, above: Value, remove: bool) {
    match (below, above) {
        (Value::Object(below), Value::Object(above)) => {
            for (key, value) in above {
                if remove && value.is_null() {
                    below.shift_remove(&key);
                } else if let Some(there) = below.get_mut(&key) {
                    lay_over(there, value, remove);
                } else {
                    below.insert(key, value);
                }
            }
        }
        (below, above) => *below = above,
    }
}

/// The texts of the schema's `pattern`, what they match, and how to say it. A regular expression engine would be larger than all of this.
type Pattern = (&'static str, fn(&str) -> bool, &'static str);
const PATTERNS: [Pattern; 6] = [
    (
        "^(GiB|MiB|[1-9][0-9]*(MiB|GiB))$",
        is_unit,
        "GiB, MiB, or a chunk such as 256MiB",
    ),
    ("^[0-9]+(MiB|GiB)$", is_amount, "an amount such as 512MiB or 2GiB"),
    (
        "^(sha256:[0-9a-f]{64})?$",
        is_digest,
        "sha256: with 64 hexadecimal digits, or empty",
    ),
    (
        "^(/|/.*[^/])?$",
        |text| matches!(text, "" | "/") || is_folder(text),
        "an absolute path without / at its end, or empty",
    ),
    ("^/.*[^/]$", is_folder, "an absolute path without / at its end"),
    ("^/", is_absolute, "an absolute path"),
];

fn is_unit(text: &str) -> bool {
    matches!(text, "GiB" | "MiB") || !text.starts_with('0') && is_amount(text)
}
fn is_amount(text: &str) -> bool {
    let number = text.strip_suffix("MiB").or_else(|| text.strip_suffix("GiB"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}
fn is_digest(text: &str) -> bool {
    let hex = |text: &str| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    text.is_empty() || text.strip_prefix("sha256:").is_some_and(hex)
}
fn is_folder(text: &str) -> bool {
    is_absolute(text) && text.len() > 1 && !text.ends_with('/')
}
fn is_absolute(text: &str) -> bool {
    text.starts_with('/')
}

/// Adds what is wrong with a value. A null is always right: it takes away.
fn check(value: &Value, schema: &Value, at: &str, depth: usize, faults: &mut Vec<String>) -> Result<(), Error> {
    let broken = |text: &str| Error::Chart(format!("values.schema.json: {at:?}: {text}"));
    let Value::Object(schema) = schema else {
        return Err(broken("not a map"));
    };
    if depth == 0 {
        faults.push(format!("{at}: there are too many maps within maps"));
        return Ok(());
    }
    if value.is_null() {
        return Ok(());
    }
    let place = if at.is_empty() { "the values" } else { at };
    for (word, rule) in schema {
        match (word.as_str(), value) {
            ("$schema" | "title" | "properties", _) => {}
            ("type", _) => {
                let types: Vec<&str> = match rule {
                    Value::String(one) => vec![one],
                    Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
                    _ => return Err(broken("type")),
                };
                if !types.iter().any(|name| is_of_type(value, name)) {
                    let named: Vec<&str> = types
                        .iter()
                        .filter(|name| **name != "null")
                        .map(|name| article(name))
                        .collect();
                    faults.push(format!("{place}: {value} is not {}", named.join(" or ")));
                    return Ok(());
                }
            }
            ("enum", _) => {
                let allowed = rule.as_array().ok_or_else(|| broken("enum"))?;
                if !allowed.contains(value) {
                    let allowed: Vec<String> = allowed
                        .iter()
                        .map(|one| one.as_str().unwrap_or_default().to_owned())
                        .collect();
                    faults.push(format!("{place}: {value} is not one of {}", allowed.join(", ")));
                }
            }
            ("minimum", Value::Number(number)) if number.as_f64() < rule.as_f64() => {
                faults.push(format!("{place}: {value} is less than {rule}"));
            }
            ("maximum", Value::Number(number)) if number.as_f64() > rule.as_f64() => {
                faults.push(format!("{place}: {value} is more than {rule}"));
            }
            ("minimum" | "maximum", _) => {}
            ("pattern", _) => {
                let known = PATTERNS.iter().find(|(pattern, ..)| rule == pattern);
                let (_, matches, words) = known.ok_or_else(|| broken("an unknown pattern"))?;
                if let Value::String(text) = value
                    && !matches(text)
                {
                    faults.push(format!("{place}: {value} is not {words}"));
                }
            }
            ("items", Value::Array(list)) => {
                for (nth, item) in list.iter().enumerate() {
                    check(item, rule, &format!("{at}[{nth}]"), depth - 1, faults)?;
                }
            }
            ("items", _) => {}
            ("required", Value::Object(map)) => {
                let names = rule
                    .as_array()
                    .ok_or_else(|| broken("required"))?
                    .iter()
                    .filter_map(Value::as_str);
                faults.extend(
                    names
                        .filter(|name| !map.contains_key(*name))
                        .map(|name| format!("{place}: {name} is missing")),
                );
            }
            ("required", _) => {}
            ("additionalProperties", _) => {}
            (other, _) => return Err(broken(&format!("the word {other} is not understood"))),
        }
    }
    let Value::Object(map) = value else { return Ok(()) };
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    for (key, value) in map {
        let below = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        match (properties.get(key), schema.get("additionalProperties")) {
            (Some(schema), _) => check(value, schema, &below, depth - 1, faults)?,
            (None, Some(Value::Bool(false))) => {
                let near = nearest(key, properties.keys().map(String::as_str));
                let known: Vec<&str> = properties
                    .keys()
                    .map(String::as_str)
                    .filter(|name| *name != "global")
                    .collect();
                faults.push(match near {
                    Some(near) => format!(
                        "{below}: there is no such value; did you mean {}?",
                        below.replace(key.as_str(), near)
                    ),
                    None => format!("{below}: there is no such value; {place} may have {}", known.join(", ")),
                });
            }
            (None, Some(schema @ Value::Object(_))) => check(value, schema, &below, depth - 1, faults)?,
            (None, _) => {}
        }
    }
    Ok(())
}

fn is_of_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        _ => false,
    }
}

fn article(name: &str) -> &str {
    match name {
        "object" => "a map",
        "array" => "a list",
        "string" => "a text (in YAML, quotes make one: \"1\")",
        "boolean" => "true or false",
        "integer" => "a whole number",
        other => other,
    }
}

/// The name that was meant, most likely.
fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let lower = name.to_ascii_lowercase();
    known
        .map(|candidate| (distance(&lower, &candidate.to_ascii_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 2.max(candidate.len() / 3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Letters to add, remove or change (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let change = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}
