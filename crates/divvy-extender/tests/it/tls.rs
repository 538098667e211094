//! TLS between kube-scheduler and the extender: which certificates are made when, and real connections.

use std::sync::Arc;
use std::time::Duration;

use divvy_extender::tls::CertificateSource;
use divvy_extender::tls::certificate::{Pair, Roots};
use divvy_extender::tls::make::carry_out;
use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, SecretPart, keys, next_s, plan};
use divvy_extender::{ExtenderSurroundings, run_with};
use divvy_testbed::api::{ApiServer, ApiServerOptions, Effect, FaultRule, Match, PatchKind};
use futures::StreamExt as _;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::server::{create_node, create_pod, settings};

pub(crate) const NAME: &str = "divvy-extender.divvy-system.svc";
const NOW: i64 = 1_800_000_000;
const DAY: i64 = 86_400;

pub(crate) fn made(now_s: i64) -> SecretData {
    let plan = plan(&SecretData::new(), NAME, now_s, CertificateLifetimes::default()).expect("an empty one is ours");
    carry_out(&plan, &SecretData::new(), NAME, now_s, CertificateLifetimes::default()).expect("made")
}

fn parts(data: &SecretData, name: &str, now_s: i64) -> Vec<SecretPart> {
    let plan = plan(data, name, now_s, CertificateLifetimes::default()).expect("ours");
    plan.make.into_iter().map(|(part, _)| part).collect()
}

#[test]
fn what_is_made_follows_from_what_is_there_and_the_time() {
    use SecretPart::{Authority, Client, Server};
    let data = made(NOW);
    let without = |key: &str| {
        let mut data = data.clone();
        data.remove(key);
        data
    };
    let with = |key: &str, value: &[u8]| {
        let mut data = data.clone();
        data.insert(key.to_owned(), value.to_vec());
        data
    };
    let other = made(NOW);
    let lifetime = CertificateLifetimes::default().server_s;
    let end = NOW + CertificateLifetimes::default().authority_s;
    let all = vec![Authority, Server, Client];
    for (what, data, name, now_s, expected) in [
        ("nothing", SecretData::new(), NAME, NOW, all.clone()),
        (
            "keys without values",
            SecretData::from([(keys::CA.to_owned(), Vec::new())]),
            NAME,
            NOW,
            all.clone(),
        ),
        ("all is there", data.clone(), NAME, NOW, vec![]),
        (
            "on a machine whose clock is half an hour behind",
            data.clone(),
            NAME,
            NOW - 1_800,
            vec![],
        ),
        ("a third is left", data.clone(), NAME, NOW + lifetime - lifetime / 3, vec![]),
        (
            "a moment less than a third is left",
            data.clone(),
            NAME,
            NOW + lifetime - lifetime / 3 + 1,
            vec![Server],
        ),
        ("it has ended", data.clone(), NAME, NOW + lifetime + DAY, vec![Server]),
        ("from the future", data.clone(), NAME, NOW - DAY, vec![Server, Client]),
        ("another name", data.clone(), "divvy-extender.other.svc", NOW, vec![Server]),
        ("no certificate", without(keys::SERVER), NAME, NOW, vec![Server]),
        ("no key", without(keys::SERVER_KEY), NAME, NOW, vec![Server]),
        ("nonsense", with(keys::SERVER, b"x"), NAME, NOW, vec![Server]),
        (
            "another's key",
            with(keys::SERVER_KEY, &other[keys::SERVER_KEY]),
            NAME,
            NOW,
            vec![Server],
        ),
        ("no client", without(keys::CLIENT), NAME, NOW, vec![Client]),
        ("the authority has ended", data.clone(), NAME, end + 1, all),
    ] {
        // With a clock that is a day behind, the CA is not valid yet either; no new CA is made because of that.
        assert_eq!(parts(&data, name, now_s), expected, "{what}");
    }
    let mut foreign = data.clone();
    for key in [keys::CA, keys::CA_KEY] {
        foreign.insert(key.to_owned(), other[key].clone());
    }
    assert_eq!(parts(&foreign, NAME, NOW), [Server, Client], "signed by another authority");
    assert_eq!(
        next_s(&data, CertificateLifetimes::default()),
        Some(NOW + lifetime - lifetime / 3)
    );
}

#[test]
fn what_somebody_else_put_there_is_not_overwritten() {
    let data = made(NOW);
    for keep in [vec![keys::CA], vec![keys::CA_KEY], vec![keys::SERVER, keys::SERVER_KEY]] {
        let data: SecretData = data
            .clone()
            .into_iter()
            .filter(|(key, _)| keep.contains(&key.as_str()))
            .collect();
        let why = plan(&data, NAME, NOW, CertificateLifetimes::default())
            .expect_err("not ours")
            .to_string();
        assert!(why.contains("does not overwrite it"), "{why}");
    }
    let mut broken = data.clone();
    broken.insert(keys::CA.to_owned(), b"-----BEGIN".to_vec());
    let why = plan(&broken, NAME, NOW, CertificateLifetimes::default())
        .expect_err("unreadable")
        .to_string();
    assert!(why.contains("ca.crt") && why.contains("made again"), "{why}");
}

#[test]
fn before_the_authority_ends_its_administrator_is_told() {
    let data = made(NOW);
    let end = NOW + CertificateLifetimes::default().authority_s;
    let warning = |now_s| {
        plan(&data, NAME, now_s, CertificateLifetimes::default())
            .expect("ours")
            .warning
    };
    assert_eq!(warning(NOW), None);
    assert!(warning(end - 100 * DAY).is_some_and(|text| text.contains("expires in 100 days")));
    assert!(warning(end + 1).is_some_and(|text| text.contains("a new one was made")));
    // The extender's own certificate never outlives the CA, and is not renewed repeatedly near the CA's end.
    let late = carry_out(
        &plan(&data, NAME, end - DAY, CertificateLifetimes::default()).expect("ours"),
        &data,
        NAME,
        end - DAY,
        CertificateLifetimes::default(),
    )
    .expect("made");
    assert_eq!(parts(&late, NAME, end - DAY / 2), []);
}

#[test]
fn a_renewed_certificate_is_taken_by_clients_of_the_first_hour() {
    let data = made(NOW);
    let later = NOW + 25 * DAY;
    let due = plan(&data, NAME, later, CertificateLifetimes::default()).expect("ours");
    let renewed = carry_out(&due, &data, NAME, later, CertificateLifetimes::default()).expect("made");
    for key in [keys::CA, keys::CA_KEY, keys::CLIENT, keys::CLIENT_KEY] {
        assert_eq!(data[key], renewed[key], "kube-scheduler has {key} since its start");
    }
    let roots = Roots::read(&data[keys::CA]).expect("the authority");
    let server = Pair::read(&renewed[keys::SERVER], &renewed[keys::SERVER_KEY]).expect("a pair");
    server.serves(&roots, NAME, later + 20 * DAY).expect("it is valid");
    assert!(server.serves(&roots, "other.name", later).is_err());
    assert!(
        server
            .serves(&Roots::read(&made(NOW)[keys::CA]).expect("another"), NAME, later)
            .is_err()
    );
    let client = Pair::read(&data[keys::CLIENT], &data[keys::CLIENT_KEY]).expect("a pair");
    client.identifies(&roots, NOW + 3_000 * DAY).expect("it is valid");
    assert!(
        client.serves(&roots, NAME, NOW).is_err(),
        "kube-scheduler's certificate serves nobody"
    );
}

pub(crate) struct Running {
    pub(crate) address: std::net::SocketAddr,
    _stop: DropGuard,
}

impl Running {
    pub(crate) fn new(address: std::net::SocketAddr, stop: CancellationToken) -> Running {
        Running {
            address,
            _stop: stop.drop_guard(),
        }
    }
}

async fn start(api: &ApiServer, source: CertificateSource) -> Running {
    let surroundings = ExtenderSurroundings {
        tls: Some(source),
        ..ExtenderSurroundings::default()
    };
    start_with(api, surroundings).await
}

pub(crate) async fn start_with(api: &ApiServer, surroundings: ExtenderSurroundings) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let stop = CancellationToken::new();
    tokio::spawn(run_with(listener, api.client(), settings(), surroundings, stop.clone()));
    Running {
        address,
        _stop: stop.drop_guard(),
    }
}

pub(crate) fn cluster() -> ApiServer {
    let api = ApiServer::new(ApiServerOptions {
        seed: Some(1),
        ..ApiServerOptions::default()
    });
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .expect("a namespace");
    api.create("secrets", json!({"metadata": {"name": "tls", "namespace": "divvy-system"}}))
        .expect("a secret");
    create_node(&api, "n1", 16, 1);
    api
}

pub(crate) fn secret_source(lifetime_s: u64) -> CertificateSource {
    CertificateSource::Secret {
        namespace: "divvy-system".to_owned(),
        name: "tls".to_owned(),
        server_name: NAME.to_owned(),
        lifetime: Duration::from_secs(lifetime_s),
    }
}

pub(crate) fn stored(api: &ApiServer) -> SecretData {
    use k8s_openapi::api::core::v1::Secret;
    let object = api.get("secrets", "divvy-system", "tls").expect("there");
    let secret: Secret = serde_json::from_value(object).expect("a Secret");
    secret
        .data
        .unwrap_or_default()
        .into_iter()
        .map(|(key, value)| (key, value.0))
        .collect()
}

/// Wait for a condition, for at most 20 seconds.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn until_made(api: &ApiServer) -> SecretData {
    until("the certificates are made", async || {
        Some(stored(api)).filter(|data| data.len() == 6)
    })
    .await
}

pub(crate) fn request(method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Send one request on a connection that stays open. Return the status line and the body.
pub(crate) async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &str) -> std::io::Result<(String, String)> {
    stream.write_all(text.as_bytes()).await?;
    let mut answer = Vec::new();
    loop {
        let mut part = [0; 4096];
        let read = stream.read(&mut part).await?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&part[..read]);
        let text = String::from_utf8_lossy(&answer).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            if length.is_some_and(|length| body.len() >= length) {
                return Ok((head.lines().next().unwrap_or_default().to_owned(), body.to_owned()));
            }
        }
    }
}

pub(crate) type Tls = tokio_rustls::client::TlsStream<TcpStream>;

/// Connect with this client certificate and this trusted CA.
pub(crate) async fn connect(running: &Running, config: rustls::ClientConfig) -> std::io::Result<Tls> {
    let stream = TcpStream::connect(running.address).await?;
    let name = ServerName::try_from(NAME).expect("a name");
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

pub(crate) fn as_scheduler(data: &SecretData) -> rustls::ClientConfig {
    let pair = Pair::read(&data[keys::CLIENT], &data[keys::CLIENT_KEY]).expect("a pair");
    pair.client(&Roots::read(&data[keys::CA]).expect("roots")).expect("a client")
}

pub(crate) fn as_nobody(data: &SecretData) -> rustls::ClientConfig {
    use rustls::pki_types::pem::PemObject as _;
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(rustls::pki_types::CertificateDer::from_pem_slice(&data[keys::CA]).expect("PEM"))
        .expect("an authority");
    rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

pub(crate) async fn get(running: &Running, config: rustls::ClientConfig, path: &str) -> std::io::Result<(String, String)> {
    ask(&mut connect(running, config).await?, &request("GET", path, "")).await
}

pub(crate) async fn until_ready(running: &Running, data: &SecretData) {
    until("it is ready", async || {
        let (status, _) = get(running, as_nobody(data), "/readyz").await.ok()?;
        status.contains("200").then_some(())
    })
    .await;
}

pub(crate) fn filter_request(pod: &Value) -> String {
    request(
        "POST",
        "/gpushare-scheduler/filter",
        &json!({"Pod": pod, "NodeNames": ["n1"]}).to_string(),
    )
}

#[tokio::test]
async fn placing_pods_needs_a_certificate_of_the_authority() {
    let api = cluster();
    let running = start(&api, secret_source(3_600)).await;
    let data = until_made(&api).await;
    until_ready(&running, &data).await;
    let pod = create_pod(&api, "p", 4);
    let bind = json!({"PodName": "p", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "n1"}).to_string();
    let bind = request("POST", "/gpushare-scheduler/bind", &bind);
    let refused = |(status, body): (String, String)| {
        assert!(
            status.contains("200"),
            "kube-scheduler shows the text of no other status: {status}"
        );
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["Error"].as_str().unwrap_or_default().to_owned()
    };

    // TLS, but no certificate.
    let mut nobody = connect(&running, as_nobody(&data)).await.expect("a connection");
    for text in [&filter_request(&pod), &bind] {
        let error = refused(ask(&mut nobody, text).await.expect("an answer"));
        assert!(
            error.contains("presented none") && error.contains("divvy scheduler-config"),
            "{error}"
        );
    }
    let (status, body) = ask(&mut nobody, &request("GET", "/gpushare-scheduler/inspect", ""))
        .await
        .expect("an answer");
    assert!(status.contains("403"), "{status} {body}");
    for path in ["/healthz", "/readyz", "/metrics", "/version"] {
        let (status, _) = ask(&mut nobody, &request("GET", path, "")).await.expect("an answer");
        assert!(status.contains("200"), "{path}: {status}");
    }
    // Plain HTTP.
    let mut plain = TcpStream::connect(running.address).await.expect("a connection");
    let error = refused(ask(&mut plain, &bind).await.expect("an answer"));
    assert!(error.contains("plain HTTP") && error.contains("https://"), "{error}");
    // A certificate of another CA; the client trusts the extender's CA.
    let other = made(time_s());
    let foreign = Pair::read(&other[keys::CLIENT], &other[keys::CLIENT_KEY]).expect("a pair");
    let foreign = foreign
        .client(&Roots::read(&data[keys::CA]).expect("roots"))
        .expect("a client");
    let told = async { ask(&mut connect(&running, foreign).await?, &bind).await };
    assert!(told.await.is_err(), "no connection for another authority's certificate");
    assert!(
        connect(&running, as_scheduler(&other)).await.is_err(),
        "and no trust in ours for who has another"
    );
    assert_eq!(
        api.get("pods", "default", "p").expect("there")["spec"]["nodeName"],
        Value::Null,
        "nothing was bound"
    );

    // kube-scheduler.
    let mut scheduler = connect(&running, as_scheduler(&data)).await.expect("a connection");
    let (_, passed) = ask(&mut scheduler, &filter_request(&pod)).await.expect("an answer");
    assert!(passed.contains(r#""NodeNames":["n1"]"#), "{passed}");
    assert_eq!(refused(ask(&mut scheduler, &bind).await.expect("an answer")), "");
    assert_eq!(api.get("pods", "default", "p").expect("there")["spec"]["nodeName"], "n1");

    let (_, metrics) = get(&running, as_nobody(&data), "/metrics").await.expect("an answer");
    for (reason, count) in [
        ("plain_http", 1),
        ("foreign_certificate", 1),
        ("untrusted_by_client", 1),
        ("no_certificate", 3),
    ] {
        let line = format!("divvy_extender_refused_clients_total{{reason=\"{reason}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    assert!(metrics.contains("divvy_extender_certificate_expiry_timestamp_seconds 1") || metrics.contains("_seconds 2"));
}

/// The caller is the API server, which asks whether a pod is assigned to a scheduler.
#[tokio::test]
async fn the_webhook_needs_no_certificate_of_its_caller() {
    let api = cluster();
    let surroundings = ExtenderSurroundings {
        tls: Some(secret_source(3_600)),
        webhook: true,
        ..ExtenderSurroundings::default()
    };
    let running = start_with(&api, surroundings).await;
    let data = until_made(&api).await;
    until_ready(&running, &data).await;
    let review = |resource: &str| {
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "705ab4f5", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE",
                "object": {"spec": {"schedulerName": "default-scheduler", "containers": [{"resources": {"limits": {resource: "3"}}}]}}
            }
        })
        .to_string()
    };
    // The API server presents no certificate, and appends its own timeout to the URL.
    let mut nobody = connect(&running, as_nobody(&data)).await.expect("a connection");
    let mut post = async |path: &str, body: &str| {
        let (status, body) = ask(&mut nobody, &request("POST", path, body)).await.expect("an answer");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        (status, body)
    };
    let (status, given) = post("/mutate/divvy-scheduler?timeout=3s", &review("aliyun.com/gpu-mem")).await;
    assert!(status.contains("200"), "{status}");
    assert_eq!(given["response"]["uid"], "705ab4f5");
    assert_eq!(
        given["response"]["patch"],
        // [{"op":"add","path":"/spec/schedulerName","value":"divvy-scheduler"}]
        "W3sib3AiOiJhZGQiLCJwYXRoIjoiL3NwZWMvc2NoZWR1bGVyTmFtZSIsInZhbHVlIjoiZGl2dnktc2NoZWR1bGVyIn1d"
    );
    let (_, left) = post("/mutate/divvy-scheduler", &review("cpu")).await;
    assert_eq!(left["response"], json!({"uid": "705ab4f5", "allowed": true}));

    for (path, body, expected, part) in [
        ("/mutate/divvy-scheduler", "x".to_owned(), "400", "not an AdmissionReview"),
        ("/mutate/a%20b", review("cpu"), "400", "cannot be the name of a scheduler"),
        ("/mutate/a.b", review("cpu"), "400", "cannot be the name of a scheduler"),
        ("/mutate", review("cpu"), "404", "/mutate/SCHEDULER"),
        (
            "/mutate/divvy-scheduler",
            " ".repeat((3 << 20) + 1),
            "413",
            "larger than 3145728 bytes",
        ),
    ] {
        let (status, answer) = post(path, &body).await;
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(status.contains(expected) && error.contains(part), "{path}: {status} {error}");
    }
    // A client that may call the webhook may not call the verbs that place pods.
    let mut nobody = connect(&running, as_nobody(&data)).await.expect("a connection");
    let pod = create_pod(&api, "p", 4);
    let (_, body) = ask(&mut nobody, &filter_request(&pod)).await.expect("an answer");
    assert!(body.contains("presented none"), "{body}");
}

pub(crate) fn time_s() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |passed| passed.as_secs().cast_signed())
}

#[tokio::test]
async fn the_certificate_is_renewed_while_it_serves() {
    let api = cluster();
    let running = start(&api, secret_source(6)).await;
    let first = until_made(&api).await;
    until_ready(&running, &first).await;
    let mut open = connect(&running, as_scheduler(&first)).await.expect("a connection");
    let pod = create_pod(&api, "p", 4);
    let renewed = until("it is renewed", async || {
        // Pods are placed all the time, over a connection that stays open and over new connections.
        let (_, passed) = ask(&mut open, &filter_request(&pod)).await.expect("an answer");
        assert!(passed.contains(r#""NodeNames":["n1"]"#), "{passed}");
        let mut new = connect(&running, as_scheduler(&first)).await.expect("a new connection");
        ask(&mut new, &filter_request(&pod)).await.expect("an answer");
        Some(stored(&api)).filter(|data| data[keys::SERVER] != first[keys::SERVER])
    })
    .await;
    assert_eq!(renewed[keys::CA], first[keys::CA]);
    let leaf = |data: &SecretData| {
        use rustls::pki_types::pem::PemObject as _;
        rustls::pki_types::CertificateDer::from_pem_slice(&data[keys::SERVER]).expect("PEM")
    };
    until("new connections are shown the new one", async || {
        let new = connect(&running, as_scheduler(&first)).await.expect("a connection");
        let shown = new.get_ref().1.peer_certificates().expect("shown")[0].clone();
        // It may already be the one after the next.
        (shown != leaf(&first)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn replicas_that_start_at_once_end_with_one_authority() {
    let api = cluster();
    // All replicas read the empty Secret before one of them has written it.
    api.faults().add(FaultRule::new(
        Match::any().verb("update").resource("secrets"),
        Effect::Latency(Duration::from_millis(200)),
    ));
    let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> = kube::Api::namespaced(api.client(), "divvy-system");
    let seen = secrets
        .get("tls")
        .await
        .expect("there")
        .metadata
        .resource_version
        .unwrap_or_default();
    let writes = secrets
        .watch(&kube::api::WatchParams::default(), &seen)
        .await
        .expect("a watch");
    let mut writes = std::pin::pin!(writes);
    let mut replicas = Vec::new();
    for _ in 0..3 {
        replicas.push(start(&api, secret_source(3_600)).await);
    }
    let data = until_made(&api).await;
    for replica in &replicas {
        until_ready(replica, &data).await;
        let (status, _) = get(replica, as_scheduler(&data), "/gpushare-scheduler/inspect")
            .await
            .expect("an answer");
        assert!(status.contains("200"), "{status}");
    }
    assert_eq!(stored(&api), data, "and it stays");
    let mut written = 0;
    while let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(200), writes.next()).await {
        written += usize::from(matches!(event, Ok(kube::api::WatchEvent::Modified(_))));
    }
    assert_eq!(written, 1, "nobody's authority was overwritten, not for a moment either");
}

/// An invalid file does not replace the certificate in use.
#[tokio::test]
async fn certificate_files_are_read_again() {
    let api = cluster();
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let write = |data: &SecretData| {
        for key in [keys::SERVER, keys::SERVER_KEY, keys::CA] {
            std::fs::write(path(key), &data[key]).expect("written");
        }
    };
    let (first, second) = (made(time_s()), made(time_s()));
    write(&first);
    let source = CertificateSource::Files {
        certificate: path(keys::SERVER),
        key: path(keys::SERVER_KEY),
        client_ca: path(keys::CA),
        server_name: NAME.to_owned(),
    };
    let running = start(&api, source).await;
    until_ready(&running, &first).await;
    let mut open = connect(&running, as_scheduler(&first)).await.expect("a connection");
    std::fs::write(path(keys::SERVER), "half a file").expect("written");
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    connect(&running, as_scheduler(&first))
        .await
        .expect("what was there before is in use");
    write(&second);
    until("the new ones are in use", async || {
        connect(&running, as_scheduler(&second)).await.ok()
    })
    .await;
    ask(&mut open, &request("GET", "/healthz", ""))
        .await
        .expect("the connection goes on");
}

#[tokio::test]
async fn a_secret_that_is_filled_later_is_enough() {
    let api = cluster();
    api.delete("secrets", "divvy-system", "tls", &Default::default())
        .expect("deleted");
    let running = start(&api, secret_source(24)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    api.create("secrets", json!({"metadata": {"name": "tls", "namespace": "divvy-system"}}))
        .expect("a secret");
    let data = until_made(&api).await;
    until_ready(&running, &data).await;
    // A part of the Secret is damaged: the part is repaired, and the CA stays.
    api.patch(
        "secrets",
        "divvy-system",
        "tls",
        PatchKind::Merge,
        &json!({"data": {"client.crt": "eA=="}}),
    )
    .expect("patched");
    let mended = until("it is mended", async || {
        Some(stored(&api)).filter(|data| Pair::read(&data[keys::CLIENT], &data[keys::CLIENT_KEY]).is_ok())
    })
    .await;
    assert_eq!(mended[keys::CA], data[keys::CA]);
}
