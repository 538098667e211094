//! A real server on the loopback address, and misbehaving clients. The timeouts are short, and each test waits for the server's reaction: an
//! answer, or the end of the connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use divvy_serve::{CallerLimits, Door, OpenedConnection, Plain, ServerLimits, TurnedAway, serve};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A timeout that a test waits for.
const SHORT: Duration = Duration::from_millis(100);
/// A timeout that must not expire in the test.
const LONG: Duration = Duration::from_secs(60);
const PROBE: [u8; 4] = [127, 0, 0, 1];
const OTHER: [u8; 4] = [127, 0, 0, 2];

fn limits() -> ServerLimits {
    let share = CallerLimits {
        connections: 8,
        per_address: 6,
        idle: LONG,
        body_bytes: 1 << 20,
    };
    ServerLimits {
        known: share,
        unknown: share,
        handshakes: 8,
        handshakes_per_address: 4,
        first_byte: LONG,
        handshake: LONG,
        header: LONG,
        body: LONG,
        request: LONG,
        header_bytes: 16 << 10,
        bodies_bytes: 2 << 20,
    }
}

struct Server {
    address: SocketAddr,
    /// Permits to answer requests for `/wait`.
    go_on: Arc<Notify>,
    /// Notified when a request for `/wait` has arrived.
    waiting: mpsc::UnboundedReceiver<()>,
    task: tokio::task::JoinHandle<()>,
    stop: CancellationToken,
    _stop: DropGuard,
}

async fn start(limits: ServerLimits) -> Server {
    start_with(limits, Plain { known: false }).await
}

async fn start_with(limits: ServerLimits, door: impl Door) -> Server {
    let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let (go_on, (sender, waiting)) = (Arc::new(Notify::new()), mpsc::unbounded_channel());
    let wait = get({
        let go_on = go_on.clone();
        move || async move {
            let _ = sender.send(());
            go_on.notified().await;
            "waited"
        }
    });
    let router = Router::new()
        .route("/", get(|| async { "ok" }))
        .route("/wait", wait)
        .route("/length", post(|body: Bytes| async move { body.len().to_string() }))
        .route("/frames", post(frames))
        .route("/endless", get(|| async { Body::from_stream(Endless) }));
    let stop = CancellationToken::new();
    let task = tokio::spawn(serve(listener, door, router, limits, stop.clone()));
    Server {
        address: ([127, 0, 0, 1], port).into(),
        go_on,
        waiting,
        task,
        _stop: stop.clone().drop_guard(),
        stop,
    }
}

/// The number of pieces in which a body reaches a handler.
async fn frames(body: Body) -> String {
    use tokio_stream::StreamExt as _;
    let mut stream = body.into_data_stream();
    let (mut frames, mut bytes) = (0, 0);
    while let Some(Ok(frame)) = stream.next().await {
        frames += 1;
        bytes += frame.len();
    }
    format!("{bytes} bytes in {frames}")
}

struct Endless;

impl tokio_stream::Stream for Endless {
    type Item = Result<Bytes, std::io::Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(Some(Ok(Bytes::from_static(&[b'x'; 4096]))))
    }
}

async fn connect(server: &Server, from: [u8; 4]) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((from, 0).into()).expect("an address of the loopback");
    socket.connect(server.address).await.expect("a connection")
}

async fn send(server: &Server, from: [u8; 4], text: &str) -> TcpStream {
    let mut stream = connect(server, from).await;
    stream.write_all(text.as_bytes()).await.expect("sent");
    stream
}

/// Read until the server ends the connection; a reset is also fine.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = tokio::time::timeout(LONG / 2, stream.read_to_end(&mut bytes))
        .await
        .expect("the server ends the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Read the status line and body of one answer on a connection that stays open.
async fn answer(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    loop {
        let mut part = [0; 4096];
        let read = tokio::time::timeout(LONG / 2, stream.read(&mut part))
            .await
            .expect("in time")
            .expect("read");
        assert!(read > 0, "the connection ended: {text}");
        text.push_str(&String::from_utf8_lossy(&part[..read]));
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            if length == Some(body.len()) {
                return text;
            }
        }
    }
}

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
const WAIT: &str = "GET /wait HTTP/1.1\r\nhost: a\r\n\r\n";

/// Connect for one request, as a kubelet's probe does.
async fn probe(server: &Server, from: [u8; 4]) {
    let mut stream = send(server, from, "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
    let text = rest(&mut stream).await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("ok"), "{text}");
}

#[tokio::test]
async fn a_connection_whose_headers_do_not_end_is_closed() {
    let server = start(ServerLimits {
        header: SHORT,
        ..limits()
    })
    .await;
    for begin in ["", "GET", "GET / HTTP/1.1\r\nhost: a\r\n"] {
        let mut stream = send(&server, PROBE, begin).await;
        assert_eq!(rest(&mut stream).await, "", "{begin:?}");
    }
    // This also holds for the second request of a connection; the time between two requests is not limited by it.
    let mut stream = send(&server, PROBE, GET).await;
    answer(&mut stream).await;
    tokio::time::sleep(2 * SHORT).await;
    stream.write_all(GET.as_bytes()).await.expect("sent");
    answer(&mut stream).await;
    stream.write_all(b"GET /").await.expect("sent");
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn headers_sent_one_byte_at_a_time_get_no_extra_time() {
    let server = start(ServerLimits {
        header: 3 * SHORT,
        ..limits()
    })
    .await;
    let mut stream = connect(&server, PROBE).await;
    let (mut reading, mut writing) = stream.split();
    let drip = async {
        loop {
            if writing.write_all(b"G").await.is_err() {
                return;
            }
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    let mut bytes = Vec::new();
    tokio::select! {
        () = drip => {}
        ended = tokio::time::timeout(LONG / 2, reading.read_to_end(&mut bytes)) => { let _ = ended.expect("it ends"); }
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let mut short = limits();
    short.unknown.idle = SHORT;
    let server = start(short).await;
    let mut stream = send(&server, PROBE, GET).await;
    answer(&mut stream).await;
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn a_known_caller_may_keep_an_unused_connection_open() {
    let server = start_with(
        ServerLimits {
            header: SHORT,
            ..limits()
        },
        Plain { known: true },
    )
    .await;
    let mut stream = connect(&server, PROBE).await;
    tokio::time::sleep(3 * SHORT).await;
    stream.write_all(GET.as_bytes()).await.expect("sent");
    assert!(answer(&mut stream).await.ends_with("ok"));
}

#[tokio::test]
async fn a_body_that_stalls_is_answered_with_408() {
    let server = start(ServerLimits { body: SHORT, ..limits() }).await;
    for begin in [
        "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nabc",
        "POST /length HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc",
    ] {
        let text = rest(&mut send(&server, PROBE, begin).await).await;
        assert!(text.starts_with("HTTP/1.1 408 "), "{text}");
        assert!(
            text.contains("did not arrive within 100ms") && text.contains("connection: close"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_connection_whose_response_is_not_read_is_closed() {
    let server = start(ServerLimits {
        request: 3 * SHORT,
        ..limits()
    })
    .await;
    let mut stream = send(&server, PROBE, "GET /endless HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut first = [0; 16];
    stream.read_exact(&mut first).await.expect("it begins");
    // The client reads nothing until the server has given up. Then the data in the operating system's buffer is followed by the end.
    stream.ready(tokio::io::Interest::READABLE).await.expect("readable");
    tokio::time::sleep(6 * SHORT).await;
    let text = rest(&mut stream).await;
    assert!(text.len() < 64 << 20, "{}", text.len());
}

#[tokio::test]
async fn a_head_or_a_body_that_is_too_large_is_refused() {
    let mut small = limits();
    small.unknown.body_bytes = 1_000;
    let server = start(small).await;
    let head = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}", "x".repeat(32 << 10));
    let text = rest(&mut send(&server, PROBE, &head).await).await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 431 "), "{text}");
    for (what, request) in [
        (
            "declared",
            "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n".to_owned(),
        ),
        (
            "declared, by far",
            format!("POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", u64::MAX - 2),
        ),
        (
            "in chunks",
            format!(
                "POST /length HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n{}\r\n",
                "x".repeat(1001)
            ),
        ),
    ] {
        let text = rest(&mut send(&server, PROBE, &request).await).await;
        assert!(
            text.starts_with("HTTP/1.1 413 ") && text.contains("larger than 1000 bytes"),
            "{what}: {text}"
        );
    }
    let mut fits = send(
        &server,
        PROBE,
        &format!(
            "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{}",
            "x".repeat(1000)
        ),
    )
    .await;
    assert!(answer(&mut fits).await.ends_with("1000"));
}

#[tokio::test]
async fn all_bodies_share_a_limit_that_does_not_affect_small_ones() {
    let server = start(limits()).await;
    // 2 MiB for all bodies, and 0.75 MiB for each: two fit.
    let large = format!(
        "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{}",
        1 << 20,
        "x".repeat((1 << 20) - 1)
    );
    // Which body is refused depends on how much the server has read of each.
    let mut held = Vec::new();
    let mut first = [0; 12];
    let mut refused = loop {
        held.push(send(&server, OTHER, &large).await);
        let mut answered = None;
        for (position, stream) in held.iter().enumerate() {
            if tokio::time::timeout(SHORT, stream.peek(&mut first)).await.is_ok() {
                answered = Some(position);
            }
        }
        if let Some(position) = answered {
            break held.remove(position);
        }
    };
    refused.read_exact(&mut first).await.expect("an answer");
    let text = String::from_utf8_lossy(&first).into_owned();
    assert_eq!(text, "HTTP/1.1 503");
    let small = format!(
        "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{}",
        200 << 10,
        "x".repeat(200 << 10)
    );
    let text = rest(&mut send(&server, PROBE, &small).await).await;
    assert!(text.ends_with("204800"), "{text}");
    // The memory is released when the request ends.
    for stream in &mut held {
        stream.write_all(b"x").await.expect("sent");
        assert!(answer(stream).await.ends_with("1048576"));
    }
    let mut again = send(&server, PROBE, &large).await;
    again.write_all(b"x").await.expect("sent");
    assert!(answer(&mut again).await.ends_with("1048576"));
}

#[tokio::test]
async fn chunks_of_one_byte_are_kept_as_few_pieces() {
    let server = start(limits()).await;
    let body = "1\r\nx\r\n".repeat(20_000);
    let request = format!("POST /frames HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{body}0\r\n\r\n");
    let text = answer(&mut send(&server, PROBE, &request).await).await;
    assert!(text.ends_with("20000 bytes in 1"), "{text}");
}

#[tokio::test]
async fn a_full_address_loses_its_own_oldest_connection() {
    let server = start(limits()).await;
    let mut idle = Vec::new();
    for _ in 0..6 {
        let mut stream = send(&server, OTHER, GET).await;
        answer(&mut stream).await;
        idle.push(stream);
    }
    probe(&server, OTHER).await;
    assert_eq!(rest(&mut idle[0]).await, "", "the oldest went");
    for stream in &mut idle[1..] {
        stream.write_all(GET.as_bytes()).await.expect("sent");
        answer(stream).await;
    }
}

#[tokio::test]
async fn a_probe_is_answered_despite_full_connections() {
    let mut server = start(limits()).await;
    let mut held = Vec::new();
    for from in [[127, 0, 0, 2], [127, 0, 0, 3]] {
        for request in ["", "GET", WAIT, WAIT, WAIT, WAIT, WAIT, WAIT] {
            held.push(send(&server, from, request).await);
            probe(&server, PROBE).await;
        }
    }
    // Six connections of one address and two of the other: all eight wait for an answer.
    server.waiting.recv().await.expect("asked");
    for _ in 0..20 {
        probe(&server, PROBE).await;
    }
}

#[tokio::test]
async fn an_equal_caller_cuts_no_request_in_progress() {
    let mut one = limits();
    one.unknown.connections = 1;
    let mut server = start(one).await;
    let mut busy = send(&server, OTHER, WAIT).await;
    server.waiting.recv().await.expect("asked");
    // The place was taken over: this connection gets no answer.
    assert_eq!(rest(&mut send(&server, PROBE, GET).await).await, "");
    server.go_on.notify_one();
    assert!(answer(&mut busy).await.ends_with("waited"));
}

/// A handshake of one byte, which identifies the caller.
struct OneByte(mpsc::UnboundedSender<(TurnedAway, SocketAddr)>);

impl Door for OneByte {
    type Io = TcpStream;
    type Peer = ();
    const HANDSHAKE: bool = true;

    async fn open(&self, mut stream: TcpStream, _: SocketAddr) -> Option<OpenedConnection<TcpStream, ()>> {
        let mut bytes = [0; 2];
        stream.read_exact(&mut bytes).await.ok()?;
        Some(OpenedConnection {
            io: stream,
            known: bytes[0] == b'k',
            peer: (),
        })
    }

    fn turned_away(&self, why: TurnedAway, address: SocketAddr) {
        let _ = self.0.send((why, address));
    }
}

#[tokio::test]
async fn silent_clients_and_stalled_handshakes_are_disconnected() {
    for (limits, begin) in [
        (
            ServerLimits {
                first_byte: SHORT,
                ..limits()
            },
            "",
        ),
        (
            ServerLimits {
                handshake: SHORT,
                ..limits()
            },
            "k",
        ),
    ] {
        let (sender, mut away) = mpsc::unbounded_channel();
        let server = start_with(limits, OneByte(sender)).await;
        let mut stream = send(&server, PROBE, begin).await;
        assert_eq!(rest(&mut stream).await, "");
        let (why, from) = away.recv().await.expect("it is noticed");
        assert_eq!((why, from), (TurnedAway::TooSlow, stream.local_addr().expect("bound")));
    }
}

#[tokio::test]
async fn hundreds_of_silent_connections_do_not_block_handshakes() {
    let (sender, _away) = mpsc::unbounded_channel();
    let server = start_with(limits(), OneByte(sender)).await;
    let mut silent = Vec::new();
    for at in 0..300 {
        silent.push(connect(&server, OTHER).await);
        // From the same address.
        if at % 50 == 49 {
            for from in [PROBE, OTHER] {
                let mut stream = send(&server, from, "u\n").await;
                stream.write_all(GET.as_bytes()).await.expect("sent");
                answer(&mut stream).await;
            }
        }
    }
    // All but the last four, which the address may keep, are closed long before their timeout.
    for stream in &mut silent[..296] {
        assert_eq!(rest(stream).await, "");
    }
}

#[tokio::test]
async fn unknown_callers_do_not_crowd_out_known_ones() {
    let (sender, _away) = mpsc::unbounded_channel();
    let mut server = start_with(limits(), OneByte(sender)).await;
    let mut held = Vec::new();
    for from in [[127, 0, 0, 2], [127, 0, 0, 3], [127, 0, 0, 4]] {
        for _ in 0..6 {
            held.push(send(&server, from, &format!("u\n{WAIT}")).await);
        }
    }
    server.waiting.recv().await.expect("asked");
    let mut known = send(&server, OTHER, &format!("k\n{GET}")).await;
    answer(&mut known).await;
    held.push(send(&server, [127, 0, 0, 5], &format!("u\n{GET}")).await);
    known.write_all(GET.as_bytes()).await.expect("sent");
    answer(&mut known).await;
}

/// The server closes all other connections.
#[tokio::test]
async fn a_stopping_server_answers_requests_in_progress() {
    let mut server = start(limits()).await;
    let mut idle = send(&server, PROBE, GET).await;
    answer(&mut idle).await;
    let mut silent = connect(&server, PROBE).await;
    let mut half = send(&server, PROBE, "GET").await;
    let mut busy = send(&server, PROBE, WAIT).await;
    server.waiting.recv().await.expect("asked");
    server.stop.cancel();
    for stream in [&mut idle, &mut silent, &mut half] {
        assert_eq!(rest(stream).await, "");
    }
    server.go_on.notify_one();
    assert!(rest(&mut busy).await.ends_with("waited"));
    tokio::time::timeout(LONG / 2, server.task)
        .await
        .expect("it ends")
        .expect("no panic");
}
