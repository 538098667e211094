//! Parsers of values that several programs take: durations, names of Kubernetes objects.

use std::time::Duration;

/// Why a text is not such a value, and what to write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// It is no number of seconds or minutes.
    #[error("{0:?} is not a duration; write 30s or 5m")]
    Duration(String),
    /// It has no slash.
    #[error("write NAMESPACE/NAME, such as divvy-system/divvy-extender-tls")]
    Namespaced,
    /// The API server would not accept it as a name.
    #[error("a name consists of lower-case letters, digits, - and ., and starts and ends with a letter or digit")]
    Name,
}

/// Parse a duration in seconds or minutes: `30s`, `5m`.
pub fn duration(text: &str) -> Result<Duration, ValueError> {
    let wrong = || ValueError::Duration(text.to_owned());
    let (number, factor) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(number), _) => (number, 1),
        (_, Some(number)) => (number, 60),
        _ => return Err(wrong()),
    };
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

/// Parse `NAMESPACE/NAME`. Fail if the API server would not accept one of the parts as a name.
pub fn namespaced(text: &str) -> Result<(String, String), ValueError> {
    let (namespace, name) = text.split_once('/').ok_or(ValueError::Namespaced)?;
    Ok((object_name(namespace)?, object_name(name)?))
}

/// Check that the API server would accept a name (an RFC 1123 subdomain). The name goes into manifests and shell commands, so nothing else
/// may pass.
pub fn object_name(text: &str) -> Result<String, ValueError> {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let inside = text
        .bytes()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.');
    if text.len() <= 253 && inside && edge(text.chars().next()) && edge(text.chars().last()) {
        Ok(text.to_owned())
    } else {
        Err(ValueError::Name)
    }
}
