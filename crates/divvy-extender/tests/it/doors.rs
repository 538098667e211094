//! Hostile clients against the server of `divvy extender`, with its real limits. Each test waits for the server's reaction.

use std::time::Duration;

use divvy_extender::ExtenderSurroundings;
use divvy_extender::tls::CertificateSource;
use divvy_extender::tls::certificate::{Pair, Roots};
use divvy_extender::tls::plan::{SecretData, keys};
use divvy_testbed::api::ApiServer;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use crate::server::create_pod;
use crate::tls::{
    NAME, Running, Tls, as_nobody, as_scheduler, ask, cluster, connect, filter_request, get, made, request, secret_source,
    start_with, time_s, until_made, until_ready,
};

/// A time that is longer than every timeout of the server.
const PATIENCE: Duration = Duration::from_secs(60);

/// Read until the server ends the connection in any way.
async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes))
        .await
        .expect("the server ends the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn tcp(running: &Running, from: [u8; 4]) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((from, 0).into()).expect("an address of the loopback");
    socket.connect(running.address).await.expect("a connection")
}

async fn tls(running: &Running, from: [u8; 4], config: rustls::ClientConfig) -> std::io::Result<Tls> {
    let name = ServerName::try_from(NAME).expect("a name");
    TlsConnector::from(Arc::new(config))
        .connect(name, tcp(running, from).await)
        .await
}

async fn extender(api: &ApiServer, webhook: bool) -> (Running, SecretData) {
    let surroundings = ExtenderSurroundings {
        tls: Some(secret_source(3_600)),
        webhook,
        ..ExtenderSurroundings::default()
    };
    let running = start_with(api, surroundings).await;
    let data = until_made(api).await;
    until_ready(&running, &data).await;
    (running, data)
}

/// A client with a certificate of this CA for another name.
fn as_client(data: &SecretData, common_name: &str, alternative: Option<&str>) -> rustls::ClientConfig {
    let key = std::str::from_utf8(&data[keys::CA_KEY]).expect("PEM");
    let mut authority = CertificateParams::default();
    authority.distinguished_name = DistinguishedName::new();
    authority.distinguished_name.push(DnType::CommonName, "Divvy extender CA");
    let issuer = Issuer::new(authority, KeyPair::from_pem(key).expect("a key"));
    let mut params = CertificateParams::new(alternative.map(str::to_owned).into_iter().collect::<Vec<_>>()).expect("names");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("signed");
    Pair::read(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
        .expect("a pair")
        .client(&Roots::read(&data[keys::CA]).expect("roots"))
        .expect("a client")
}

#[tokio::test]
async fn a_certificate_with_another_name_is_treated_as_no_certificate() {
    let api = cluster();
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    // A CA that also signs certificates for others: another program maintains its files.
    let data = made(time_s());
    for key in [keys::SERVER, keys::SERVER_KEY, keys::CA] {
        std::fs::write(path(key), &data[key]).expect("written");
    }
    let files = || CertificateSource::Files {
        certificate: path(keys::SERVER),
        key: path(keys::SERVER_KEY),
        client_ca: path(keys::CA),
        server_name: NAME.to_owned(),
    };
    let surroundings = |names: &[&str]| ExtenderSurroundings {
        tls: Some(files()),
        client_names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..ExtenderSurroundings::default()
    };
    let running = start_with(&api, surroundings(&[])).await;
    until_ready(&running, &data).await;
    let pod = create_pod(&api, "p", 4);
    let bind = json!({"PodName": "p", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "n1"}).to_string();
    let bind = request("POST", "/gpushare-scheduler/bind", &bind);

    let webshop = || as_client(&data, "webshop.tenant-a.svc", Some("webshop.tenant-a.svc"));
    let mut stream = connect(&running, webshop()).await.expect("a connection");
    for text in [&filter_request(&pod), &bind] {
        let (status, body) = ask(&mut stream, text).await.expect("an answer");
        assert!(
            status.contains("200") && body.contains("webshop.tenant-a.svc") && body.contains("--client-name"),
            "{status} {body}"
        );
    }
    let (status, body) = ask(&mut stream, &request("GET", "/gpushare-scheduler/inspect", ""))
        .await
        .expect("an answer");
    assert!(status.contains("403") && !body.contains("n1"), "{status} {body}");
    let (status, _) = ask(&mut stream, &request("GET", "/healthz", "")).await.expect("an answer");
    assert!(status.contains("200"), "{status}");
    assert_eq!(
        api.get("pods", "default", "p").expect("there")["spec"]["nodeName"],
        Value::Null
    );
    let (_, metrics) = get(&running, as_nobody(&data), "/metrics").await.expect("an answer");
    assert!(
        metrics.contains("refused_clients_total{reason=\"other_name\"} 1\n"),
        "{metrics}"
    );

    // Clients with one of the names, in any field of the certificate, and a replica.
    for client in [
        as_scheduler(&data),
        as_client(&data, "x", Some("kube-scheduler")),
        as_client(&data, "divvy-extender", Some(NAME)),
    ] {
        let (status, _) = get(&running, client, "/gpushare-scheduler/inspect").await.expect("an answer");
        assert!(status.contains("200"), "{status}");
    }

    // Names that are set by flag replace the default.
    let running = start_with(&api, surroundings(&["webshop.tenant-a.svc"])).await;
    until_ready(&running, &data).await;
    for (client, expected) in [
        (webshop(), "200"),
        (as_scheduler(&data), "403"),
        (as_client(&data, "y", Some(NAME)), "200"),
    ] {
        let (status, body) = get(&running, client, "/gpushare-scheduler/inspect").await.expect("an answer");
        assert!(status.contains(expected), "{status} {body}");
    }
}

/// This holds if the webhook is off.
#[tokio::test]
async fn no_large_body_is_read_without_a_certificate() {
    let api = cluster();
    let (running, data) = extender(&api, false).await;
    for path in ["/mutate/divvy-scheduler", "/healthz", "/gpushare-scheduler/filter"] {
        let mut stream = connect(&running, as_nobody(&data)).await.expect("a connection");
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("sent");
        let text = rest(&mut stream).await;
        assert!(text.starts_with("HTTP/1.1 413 "), "{path}: {text}");
    }
    let mut stream = connect(&running, as_nobody(&data)).await.expect("a connection");
    let (status, body) = ask(&mut stream, &request("POST", "/mutate/divvy-scheduler", "{}"))
        .await
        .expect("an answer");
    assert!(
        status.contains("404") && body.contains("extender.webhook=true"),
        "{status} {body}"
    );
}

#[tokio::test]
async fn stalled_reviews_do_not_block_the_api_servers_review() {
    let api = cluster();
    let (running, data) = extender(&api, true).await;
    let head = format!(
        "POST /mutate/divvy-scheduler HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        3 << 20
    );
    let begin = "x".repeat((3 << 20) - 1);
    let mut stalled = Vec::new();
    for _ in 0..16 {
        let mut stream = tls(&running, [127, 0, 0, 2], as_nobody(&data)).await.expect("a connection");
        stream.write_all(head.as_bytes()).await.expect("sent");
        stalled.push(tokio::spawn({
            let begin = begin.clone();
            async move {
                // A client that is not read yet, or was turned away, cannot send everything.
                let _ = stream.write_all(begin.as_bytes()).await;
                rest(&mut stream).await
            }
        }));
    }
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE",
            "object": {"spec": {"containers": []}}
        }
    })
    .to_string();
    let mut stream = tls(&running, [127, 0, 0, 1], as_nobody(&data)).await.expect("a connection");
    let review = request("POST", "/mutate/divvy-scheduler", &review);
    let answer = ask(&mut stream, &review);
    // Not 503, which is the answer if a review gets no turn within 2 s; the API server waits 3 s.
    let (status, _) = tokio::time::timeout(PATIENCE, answer)
        .await
        .expect("in time")
        .expect("an answer");
    assert!(status.contains("200"), "{status}");
    for stalled in stalled {
        let text = stalled.await.expect("no panic");
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 408 ") || text.starts_with("HTTP/1.1 503 "),
            "{text}"
        );
    }
}

/// Incomplete requests do not block a probe or the scheduler either.
#[tokio::test]
async fn idle_connections_block_no_probe_or_scheduler() {
    let api = cluster();
    let (running, data) = extender(&api, false).await;
    let pod = create_pod(&api, "p", 4);
    let mut scheduler = connect(&running, as_scheduler(&data)).await.expect("a connection");
    ask(&mut scheduler, &filter_request(&pod)).await.expect("an answer");
    let mut held = Vec::new();
    for at in 0..60 {
        let mut stream = tls(&running, [127, 0, 0, 2 + at % 3], as_nobody(&data))
            .await
            .expect("a connection");
        let begin = ["", "GET /metrics HTTP/1.1\r\nhost: x\r\n"][usize::from(at) % 2];
        stream.write_all(begin.as_bytes()).await.expect("sent");
        held.push(stream);
    }
    let mut probe = tls(&running, [127, 0, 0, 1], as_nobody(&data)).await.expect("a connection");
    let (status, _) = ask(&mut probe, &request("GET", "/healthz", "")).await.expect("an answer");
    assert!(status.contains("200"), "{status}");
    let (_, passed) = ask(&mut scheduler, &filter_request(&pod))
        .await
        .expect("the connection goes on");
    assert!(passed.contains(r#""NodeNames":["n1"]"#), "{passed}");
    // Each connection ends: there are 32 places in total, and 5 s for headers.
    for mut stream in held {
        assert_eq!(rest(&mut stream).await, "");
    }
    let (_, metrics) = get(&running, as_nobody(&data), "/metrics").await.expect("an answer");
    let count = |reason: &str| -> u64 {
        let begin = format!("refused_clients_total{{reason=\"{reason}\"}} ");
        metrics
            .lines()
            .find_map(|line| line.split_once(&begin)?.1.parse().ok())
            .unwrap_or_default()
    };
    assert!(count("too_many") >= 28 && count("too_slow") >= 1, "{metrics}");
}

#[tokio::test]
async fn silent_connections_do_not_block_handshakes_of_others() {
    let api = cluster();
    let (running, data) = extender(&api, false).await;
    let mut silent = Vec::new();
    for at in 0..350 {
        silent.push(tcp(&running, [127, 0, 0, 2]).await);
        if at % 70 == 69 {
            let mut probe = tls(&running, [127, 0, 0, 1], as_nobody(&data)).await.expect("a connection");
            ask(&mut probe, &request("GET", "/healthz", "")).await.expect("an answer");
        }
    }
    for mut stream in silent {
        assert_eq!(rest(&mut stream).await, "");
    }
}

#[tokio::test]
async fn large_headers_are_refused_with_and_without_a_certificate() {
    let api = cluster();
    let (running, data) = extender(&api, false).await;
    let head = format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx: {}", "x".repeat(384 << 10));
    for client in [as_nobody(&data), as_scheduler(&data)] {
        let mut stream = connect(&running, client).await.expect("a connection");
        // The server may have ended it before all is sent.
        let _ = stream.write_all(head.as_bytes()).await;
        let text = rest(&mut stream).await;
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 431 "), "{text}");
    }
}

#[tokio::test]
async fn readyz_shows_errors_of_the_api_server_to_known_callers_only() {
    use divvy_testbed::api::{Effect, FaultRule, Match};
    let api = cluster();
    api.faults()
        .add(FaultRule::new(Match::any().resource("nodes"), Effect::Refuse(403)));
    let surroundings = ExtenderSurroundings {
        tls: Some(secret_source(3_600)),
        ..ExtenderSurroundings::default()
    };
    let running = start_with(&api, surroundings).await;
    let data = until_made(&api).await;
    // Without certificates the extender accepts no connections.
    let of = async |client| {
        get(&running, client, "/readyz")
            .await
            .map(|(_, text)| text)
            .unwrap_or_default()
    };
    let known = tokio::time::timeout(PATIENCE, async {
        loop {
            let text = of(as_scheduler(&data)).await;
            if text.contains("the watch is broken: ") {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let known = known.await.expect("the watch breaks");
    let (_, why) = known.split_once("the watch is broken: ").expect("just seen");
    let why = why.lines().next().unwrap_or_default();
    assert!(why.len() > 10, "{known}");
    let unknown = of(as_nobody(&data)).await;
    assert!(unknown.contains("nodes: not listed yet; the watch is broken\n"), "{unknown}");
    assert!(!unknown.contains(why), "{unknown}");
}
