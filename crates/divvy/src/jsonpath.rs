//! The templates of kubectl's `-o jsonpath=`, which are texts with paths in braces, and the paths of `--sort-by`. `{range}` is
//! not supported.

use std::str::FromStr;

use jsonpath_rust::parser::model::JpQuery;
use jsonpath_rust::parser::parse_json_path;
use jsonpath_rust::query::js_path_process;
use serde_json::Value;

/// A path in kubectl's notation: `.nodes[0].name`, `{.nodes[0].name}`, or `$.nodes[0].name`.
#[derive(Debug, Clone)]
pub struct KubectlPath(JpQuery);

/// A template: a sequence of literal texts and paths.
#[derive(Debug, Clone)]
pub struct Template(Vec<TemplatePart>);

#[derive(Debug, Clone)]
enum TemplatePart {
    Text(String),
    Path(KubectlPath),
}

/// Why a text is not a path or a template.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// It is not a path.
    #[error("{0:?} is not a path; write, for example, {{.nodes[*].name}}")]
    Path(String),
    /// An opening brace has no closing one.
    #[error("a {{ has no }}")]
    Open,
    /// A text in quotes has a syntax error.
    #[error("{text}: {source}")]
    Quoted {
        /// The text with its quotes.
        text: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// It has a part that kubectl knows, and Divvy does not.
    #[error("{{{0}}} is not supported; {{.nodes[*].name}} prints all values in one line, and -o json | jq can do the rest")]
    Unsupported(String),
}

impl KubectlPath {
    /// Return the values that the path selects, if any.
    pub fn find<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let found = js_path_process(&self.0, value).unwrap_or_default();
        found.into_iter().map(|found| found.val()).collect()
    }
}

impl FromStr for KubectlPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<KubectlPath, PathError> {
        let inner = text.trim();
        let inner = inner
            .strip_prefix('{')
            .and_then(|text| text.strip_suffix('}'))
            .unwrap_or(inner);
        let path = inner.trim().trim_start_matches(['$', '@']);
        let path = match path {
            "" | "." => "$".to_owned(),
            path if path.starts_with(['.', '[']) => format!("${path}"),
            path => format!("$.{path}"),
        };
        parse_json_path(&path)
            .map(KubectlPath)
            .map_err(|_| PathError::Path(text.to_owned()))
    }
}

impl FromStr for Template {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Template, PathError> {
        if !text.contains('{') {
            return Ok(Template(vec![TemplatePart::Path(text.parse()?)]));
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, after)) = rest.split_once('{') {
            if !before.is_empty() {
                parts.push(TemplatePart::Text(before.to_owned()));
            }
            let end = end_of_braces(after).ok_or(PathError::Open)?;
            parts.push(part(&after[..end])?);
            rest = &after[end + 1..];
        }
        if !rest.is_empty() {
            parts.push(TemplatePart::Text(rest.to_owned()));
        }
        Ok(Template(parts))
    }
}

/// Return the position of the closing brace of a path. Braces within quotes are ignored.
fn end_of_braces(text: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match (c, quote) {
            _ if escaped => escaped = false,
            ('\\', Some(_)) => escaped = true,
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => quote = Some(c),
            ('}', None) => return Some(at),
            _ => {}
        }
    }
    None
}

fn part(inner: &str) -> Result<TemplatePart, PathError> {
    let inner = inner.trim();
    if inner.starts_with('"') {
        return serde_json::from_str(inner)
            .map(TemplatePart::Text)
            .map_err(|source| PathError::Quoted {
                text: inner.to_owned(),
                source,
            });
    }
    if inner == "end" || inner.starts_with("range ") {
        return Err(PathError::Unsupported(inner.to_owned()));
    }
    inner.parse().map(TemplatePart::Path)
}

impl Template {
    /// Fill in the template, and end the text with a newline. Strings are printed unquoted, all other values as JSON, and several values are
    /// separated by spaces.
    pub fn render(&self, value: &Value) -> String {
        let one = |value: &&Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let mut text: String = self
            .0
            .iter()
            .map(|part| match part {
                TemplatePart::Text(text) => text.clone(),
                TemplatePart::Path(path) => path.find(value).iter().map(one).collect::<Vec<_>>().join(" "),
            })
            .collect();
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_template_is_read_as_kubectl_reads_it() {
        let value = json!({"unit": "GiB", "nodes": [
            {"name": "n1", "total": 16, "pods": ["a", "b"]},
            {"name": "n2", "total": 40, "pods": []},
        ]});
        for (template, expected) in [
            (".unit", "GiB\n"),
            ("unit", "GiB\n"),
            ("{.unit}", "GiB\n"),
            ("{$.unit}", "GiB\n"),
            ("{.nodes[*].name}", "n1 n2\n"),
            ("{.nodes[0].pods}", "[\"a\",\"b\"]\n"),
            ("{..total}", "16 40\n"),
            ("{.nodes[?(@.total>20)].name}", "n2\n"),
            ("{.nodes[?(@.name==\"n1\")].total} of {.unit}", "16 of GiB\n"),
            ("{.nodes[0].name}{\"\\t\"}{.unit}{\"\\n\"}", "n1\tGiB\n"),
            ("{.nodes[0]['name']}", "n1\n"),
            ("{.missing.at.all}", "\n"),
            ("{\"}\"}{.unit}", "}GiB\n"),
        ] {
            let read: Template = template.parse().expect(template);
            assert_eq!(read.render(&value), expected, "{template}");
        }
        for wrong in ["{.unit", "{range .nodes[*]}{.name}{end}", "{\"}", "{.nodes[}"] {
            assert!(wrong.parse::<Template>().is_err(), "{wrong}");
        }
    }
}
