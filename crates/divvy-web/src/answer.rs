//! Answers: their headers, and their compression.

use std::io::Write as _;

use axum::body::Body;
use axum::response::Response;
use divvy_page::{MessagePage, message};
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

/// The headers of every answer.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; \
         base-uri 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
];

/// A text that is smaller is not compressed.
const SMALL: usize = 1024;

pub(crate) const HTML: &str = "text/html; charset=utf-8";
pub(crate) const CSS: &str = "text/css; charset=utf-8";
pub(crate) const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Add the headers of every answer.
pub(crate) fn protected(mut response: Response) -> Response {
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Return a text, compressed if the client can read that.
pub(crate) fn text(request: &HeaderMap, status: StatusCode, kind: &'static str, text: String) -> Response {
    let compressed = (text.len() >= SMALL && reads_gzip(request)).then(|| gzip(&text)).flatten();
    let is_compressed = compressed.is_some();
    let mut response = Response::new(compressed.map_or_else(|| Body::from(text), Body::from));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if is_compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

fn gzip(text: &str) -> Option<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::best());
    encoder.write_all(text.as_bytes()).ok()?;
    encoder.finish().ok()
}

/// Report whether the client reads gzip (RFC 9110, section 12.5.3).
fn reads_gzip(request: &HeaderMap) -> bool {
    let lines = request
        .get_all(header::ACCEPT_ENCODING)
        .iter()
        .filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let refused = |weight: &str| weight.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok()) == Some(0.0);
        is_gzip && !parts.any(refused)
    })
}

/// Return a page with a message.
pub(crate) fn says(request: &HeaderMap, status: StatusCode, title: &str, sentences: &[&str], sign_in: bool) -> Response {
    let page = message(&MessagePage {
        title: title.to_owned(),
        sentences: sentences.iter().map(|sentence| (*sentence).to_owned()).collect(),
        sign_in,
    });
    text(request, status, HTML, page)
}

/// Send the client to another address of this server.
pub(crate) fn see(address: &str) -> Response {
    let mut response = Response::new(Body::empty());
    // A browser reads a backslash as a slash, and leaves out control characters: the address could become that of another server.
    let is_plain = !address.contains(|c: char| c == '\\' || c.is_control());
    match HeaderValue::from_str(address) {
        Ok(address) if is_plain => {
            *response.status_mut() = StatusCode::SEE_OTHER;
            response.headers_mut().insert(header::LOCATION, address);
        }
        _ => *response.status_mut() = StatusCode::BAD_REQUEST,
    }
    response
}
