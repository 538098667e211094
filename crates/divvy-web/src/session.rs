//! The token of a request.

use http::{HeaderMap, HeaderValue, header};

/// The maximum size of a token in bytes. Browsers keep cookies up to 4 KiB.
const BYTES: usize = 4000;

/// Return a request's token: that of the header `Authorization`, else that of the cookie with this name.
pub(crate) fn token<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    match headers.get(header::AUTHORIZATION) {
        Some(value) => {
            let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
            scheme
                .eq_ignore_ascii_case("bearer")
                .then(|| token.trim())
                .filter(|token| is_token(token))
        }
        None => {
            let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
            let mut pairs = lines
                .flat_map(|line| line.split(';'))
                .filter_map(|pair| pair.trim().split_once('='));
            let (_, token) = pairs.find(|(known, _)| *known == name)?;
            Some(token).filter(|token| is_token(token))
        }
    }
}

/// Report whether a text can be a token, and with that the value of a cookie (RFC 6750, section 2.1: `b68token`).
pub(crate) fn is_token(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    (1..=BYTES).contains(&text.len()) && text.bytes().all(allowed)
}

/// Return the header that stores a token in the cookie with this name, or removes it.
pub(crate) fn cookie(name: &str, token: Option<&str>, tls: bool) -> Option<HeaderValue> {
    let secure = if tls { "; Secure" } else { "" };
    let age = if token.is_some() { "" } else { "; Max-Age=0" };
    let text = format!(
        "{name}={}; Path=/; HttpOnly; SameSite=Strict{secure}{age}",
        token.unwrap_or_default()
    );
    let mut value = HeaderValue::from_str(&text).ok()?;
    value.set_sensitive(true);
    Some(value)
}
