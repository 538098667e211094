//! Requests to the programs' HTTP endpoints, and the formats of their metrics.

use std::net::SocketAddr;

use divvy_exposition::MetricsFormat;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Send one request with these further headers, and return the answer's head and body.
pub(crate) async fn exchange(address: SocketAddr, path: &str, headers: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.to_owned(), body.to_owned()))
}

/// Check that each client gets the format that it asks for. `family` is the name of a family in the text format.
pub(crate) async fn serves_both_formats(address: SocketAddr, family: &str) {
    let open_metrics = "accept: text/plain;q=0.5\r\naccept: application/openmetrics-text;version=1.0.0\r\n";
    for (headers, format, end) in [
        ("", MetricsFormat::Text, false),
        ("accept: */*\r\n", MetricsFormat::Text, false),
        (open_metrics, MetricsFormat::OpenMetrics, true),
    ] {
        let (head, body) = exchange(address, "/metrics", headers).await.expect("an answer");
        let kind = format!("\r\ncontent-type: {}\r\n", format.content_type());
        assert!(head.contains(&kind), "{head}");
        assert_eq!(body.ends_with("\n# EOF\n"), end, "{body}");
        let name = family.strip_suffix("_total").filter(|_| end).unwrap_or(family);
        assert!(body.contains(&format!("# TYPE {name} ")), "{body}");
        assert!(body.contains(&format!("\n{family}")), "{body}");
    }
}
