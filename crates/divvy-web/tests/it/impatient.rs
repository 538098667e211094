//! Readers that take nothing.

use std::time::Duration;

use divvy_view_sim::mixed;
use divvy_web::Impatient;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

use crate::site::{HOST, Site, scene};

/// The reader loses its connection, too.
#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_loses_its_place() {
    let site = Site::new();
    // Like a socket whose buffers hold 4 KiB.
    let (mut client, server) = duplex(4 << 10);
    let service = TowerToHyperService::new(site.router.clone());
    let io = TokioIo::new(Impatient::new(server, Duration::from_secs(30)));
    let connection = tokio::spawn(http1::Builder::new().serve_connection(io, service));
    let page = crate::site::text(site.get("/").await).await;
    let between = |start: &str| {
        page.split_once(start)
            .and_then(|(_, rest)| rest.split_once('"'))
            .expect("an attribute")
            .0
            .replace("&amp;", "&")
    };
    let address = format!("{}&since={}", between("data-events=\""), between("data-since=\""));
    let request = format!("GET {address} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer a-token\r\n\r\n");
    client.write_all(request.as_bytes()).await.expect("written");
    let mut first = [0; 12];
    client.read_exact(&mut first).await.expect("an answer");
    assert_eq!(&first, b"HTTP/1.1 200");
    tokio::time::advance(Duration::from_secs(120)).await;
    assert_eq!(site.hub.wanted().len(), 12, "the stream is open");

    for step in 1..50 {
        site.hub.show(scene(mixed(step)));
        tokio::task::yield_now().await;
    }
    let started = tokio::time::Instant::now();
    let ended = tokio::time::timeout(Duration::from_secs(300), connection)
        .await
        .expect("the connection ends");
    let ended = ended.expect("no panic").expect_err("the connection was closed");
    assert!(format!("{ended:?}").contains("TimedOut"), "{ended:?}");
    assert!(started.elapsed() <= Duration::from_secs(31), "{:?}", started.elapsed());
    assert!(site.hub.wanted().is_empty(), "the stream is gone");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_a_little_at_a_time_keeps_its_connection() {
    let (mut client, server) = duplex(64);
    let mut server = Impatient::new(server, Duration::from_secs(30));
    let sent = tokio::spawn(async move { server.write_all(&[7; 4096]).await });
    let mut received = Vec::new();
    while received.len() < 4096 {
        tokio::time::sleep(Duration::from_secs(29)).await;
        let mut bytes = [0; 64];
        let count = client.read(&mut bytes).await.expect("read");
        received.extend_from_slice(&bytes[..count]);
    }
    sent.await.expect("no panic").expect("all was written");
}
