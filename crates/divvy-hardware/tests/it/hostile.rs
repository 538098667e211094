//! Neither side trusts the other.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use divvy_hardware::FailureCode;
use divvy_hardware::client::{ProbeClient, ProbeSource, ProbeTiming};
use serde_json::{Value, json};

use crate::support::{Lines, Machine, TWO, connect, eventually, fast, snapshot, unavailable};

/// Answers requests with `answer`, which returns the bytes and whether the connection continues.
fn serve(stream: UnixStream, answer: impl Fn(u64, &str) -> Option<Vec<u8>>) {
    let mut writer = stream.try_clone().expect("clone");
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let question: Value = serde_json::from_str(&line).expect("the client speaks JSON");
        let id = question["id"].as_u64().expect("id");
        let Some(bytes) = answer(id, question["op"].as_str().expect("op")) else {
            return;
        };
        // The client may have closed the connection, as it should.
        if writer.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn good(id: u64, op: &str) -> Option<Vec<u8>> {
    let ok = match op {
        "hello" => json!({"v": 1, "probe": "9", "instance": "x", "seq": 0}),
        "snapshot" => json!({"v": 2, "gpus": [], "new": true}),
        _ => json!({}),
    };
    Some(format!("{}\n", json!({"id": id, "ok": ok})).into_bytes())
}

/// The client hears the honest probe that takes the place of the hostile one.
#[tokio::test]
async fn a_hostile_probe_is_left_for_an_honest_one() {
    type Answer = fn(u64, &str) -> Option<Vec<u8>>;
    let cases: [(&str, Answer, FailureCode); 15] = [
        (
            "garbage",
            |_, _| Some(b"\0\x01 not json {{{\n".to_vec()),
            FailureCode::Protocol,
        ),
        ("not UTF-8", |_, _| Some(b"\xff\xfe\n".to_vec()), FailureCode::Protocol),
        ("a line of 2 MiB", |_, _| Some(vec![b'x'; 2 << 20]), FailureCode::Protocol),
        (
            "an end in the middle of a line",
            |id, _| (id == 1).then(|| b"{\"id\":1,".to_vec()),
            FailureCode::ProbeUnreachable,
        ),
        ("an immediate end", |_, _| None, FailureCode::ProbeUnreachable),
        (
            "answers to other questions",
            |id, _| Some(format!("{{\"id\":{},\"ok\":{{}}}}\n", id + 77).into_bytes()),
            FailureCode::Timeout,
        ),
        ("silence", |_, _| Some(Vec::new()), FailureCode::Timeout),
        (
            "only unknown events",
            |_, _| Some(b"{\"event\":\"new\"}\n".repeat(1000)),
            FailureCode::Timeout,
        ),
        (
            "both answers",
            |id, _| Some(format!("{{\"id\":{id},\"ok\":1,\"err\":{{\"code\":\"x\",\"text\":\"\"}}}}\n").into_bytes()),
            FailureCode::Protocol,
        ),
        (
            "a deep value",
            |id, _| Some(format!("{{\"id\":{id},\"ok\":{}\n", "[".repeat(100_000)).into_bytes()),
            FailureCode::Protocol,
        ),
        (
            "the wrong kind of answer",
            |id, _| Some(format!("{{\"id\":{id},\"ok\":[1,2]}}\n").into_bytes()),
            FailureCode::Protocol,
        ),
        (
            "a GPU that is a path",
            |id, op| match op {
                "snapshot" => {
                    let gpu = json!({"uuid": "../../etc/passwd", "index": 0, "minor": 0, "totalMiB": 1});
                    let ok = json!({"v": 2, "gpus": [gpu]});
                    Some(format!("{}\n", json!({"id": id, "ok": ok})).into_bytes())
                }
                _ => good(id, op),
            },
            FailureCode::Protocol,
        ),
        (
            "a snapshot of an older format",
            |id, op| match op {
                "snapshot" => {
                    let ok = json!({"v": 1, "driver": "1", "gpus": []});
                    Some(format!("{}\n", json!({"id": id, "ok": ok})).into_bytes())
                }
                _ => good(id, op),
            },
            FailureCode::Protocol,
        ),
        (
            "a past fault without a name",
            |id, op| match op {
                "hello" => {
                    let past = json!({"agoMs": 1, "seq": 1, "vendor": "amd", "uuid": null, "code": 1, "fatal": true, "name": ""});
                    let ok = json!({"v": 1, "probe": "9", "instance": "x", "seq": 1, "recent": [past]});
                    Some(format!("{}\n", json!({"id": id, "ok": ok})).into_bytes())
                }
                _ => good(id, op),
            },
            FailureCode::Protocol,
        ),
        (
            "a number that does not fit",
            |id, op| {
                match op {
                "snapshot" => Some(format!("{{\"id\":{id},\"ok\":{{\"v\":2,\"gpus\":[{{\"uuid\":\"GPU-a\",\"index\":0,\"minor\":0,\"totalMiB\":1e300}}]}}}}\n").into_bytes()),
                _ => good(id, op),
            }
            },
            FailureCode::Protocol,
        ),
    ];
    for (name, hostile, code) in cases {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).expect("listen");
        std::thread::spawn(move || {
            for (i, stream) in listener.incoming().enumerate() {
                match (i, stream) {
                    (0, Ok(stream)) => serve(stream, hostile),
                    (_, Ok(stream)) => serve(stream, good),
                    (_, Err(_)) => return,
                }
            }
        });
        let timing = ProbeTiming {
            answer: Duration::from_millis(200),
            first_answer: Duration::from_millis(200),
            ..fast()
        };
        let mut client = ProbeClient::start(ProbeSource::Socket(path), timing);
        let failure = unavailable(&mut client).await;
        assert_eq!(failure.code, code, "{name}: {failure}");
        snapshot(&mut client, name, |seen| seen.gpus.is_empty()).await;
    }
}

#[tokio::test]
async fn measurements_that_no_driver_takes_are_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).expect("listen");
    let (answers, next) = std::sync::mpsc::channel::<Value>();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("the client");
        serve(stream, |id, op| match op {
            "metrics" => Some(format!("{{\"id\":{id},\"ok\":{}}}\n", next.recv().ok()?).into_bytes()),
            _ => good(id, op),
        });
    });
    let mut client = ProbeClient::start(ProbeSource::Socket(path), fast());
    snapshot(&mut client, "snapshot", |_| true).await;
    let gpu = |values: Value| json!([{"uuid": "GPU-a", "values": values}]);
    for (answer, is_valid) in [
        (json!([]), true),
        (gpu(json!({"gpuPercent": 100, "new": [1]})), true),
        (json!([{"uuid": "GPU-a", "error": "lost"}]), true),
        (gpu(json!({"gpuPercent": 101})), false),
        (gpu(json!({"gpuPercent": -1})), false),
        (gpu(json!({"gpuPercent": 1.5})), false),
        (gpu(json!({"powerMilliwatts": 1e300})), false),
        (gpu(json!({"memory": {"total": 1, "used": 2, "free": 0}})), false),
        (gpu(json!({"memory": {"total": u64::MAX, "used": 2, "free": 0}})), false),
        (gpu(json!({"gpm": {"smActive": 1_000_001}})), false),
        (gpu(json!({"gpm": {"pcieTxBytes": u64::MAX}})), false),
        (gpu(json!("none")), false),
        (json!({}), false),
        (json!([{"uuid": "../x"}]), false),
        (json!([{"uuid": "GPU-a"}, {"uuid": "GPU-a"}]), false),
        (json!([{"uuid": "GPU-a", "error": "a\nb"}]), false),
        ((0..300).map(|i| json!({"uuid": format!("GPU-{i}")})).collect(), false),
    ] {
        answers.send(answer.clone()).expect("the probe runs");
        let found = client.handle().metrics().await;
        match (found, is_valid) {
            (Ok(_), true) => {}
            (Err(failure), false) => assert_eq!(failure.code, FailureCode::Protocol, "{answer}"),
            (found, _) => panic!("{answer}: {found:?}"),
        }
    }
}

/// The other clients do not notice.
#[test]
fn a_hostile_client_is_told_why_and_disconnected() {
    let machine = Machine::new(TWO);
    let _probe = machine.listening("s", &[]);
    let mut honest = Lines::new(connect(&machine.path("s")));
    let ping = "{\"v\":1,\"id\":1,\"op\":\"ping\"}";
    let mut honest_is_served = || assert_eq!(honest.ask(ping), json!({"id": 1, "ok": {}}));

    // A line that is not a request is refused, and the connection continues.
    let mut client = Lines::new(connect(&machine.path("s")));
    for line in [
        "",
        "nonsense",
        "[1]",
        "{\"id\":3}",
        "{\"v\":1,\"id\":-3,\"op\":\"ping\"}",
        "{\"v\":9,\"id\":3,\"op\":\"ping\"}",
    ] {
        assert_eq!(client.ask(line)["err"]["code"], "protocol", "{line}");
    }
    assert_eq!(client.ask(ping), json!({"id": 1, "ok": {}}));
    honest_is_served();

    // Data that is not a line ends the connection.
    for bytes in [b"\xff\xff\n".to_vec(), vec![b'x'; (1 << 20) + 2]] {
        let mut client = Lines::new(connect(&machine.path("s")));
        client.send(&bytes);
        assert_eq!(client.next().expect("a reason")["err"]["code"], "protocol");
        assert_eq!(client.next(), None);
        honest_is_served();
    }

    // A client that sends requests and never reads does not delay other clients.
    let mut deaf = connect(&machine.path("s"));
    deaf.set_write_timeout(Some(Duration::from_millis(200))).expect("timeout");
    let question = "{\"v\":1,\"id\":1,\"op\":\"snapshot\"}\n".repeat(100);
    let mut sent = 0;
    while sent < 1000 && deaf.write_all(question.as_bytes()).is_ok() {
        sent += 1;
    }
    assert!(sent < 1000, "the probe reads on for a client that takes no answers");
    honest_is_served();
    drop(deaf);

    // Surplus clients are refused until others leave.
    let mut crowd: Vec<Lines> = (0..40).map(|_| Lines::new(connect(&machine.path("s")))).collect();
    let busy = crowd.last_mut().and_then(Lines::next).expect("a reason");
    assert_eq!(busy["err"]["code"], "busy");
    honest_is_served();
    drop(crowd);
    eventually("there is room again", || {
        let mut client = Lines::new(connect(&machine.path("s")));
        client.send(format!("{ping}\n").as_bytes());
        client.next().is_some_and(|answer| answer.get("ok").is_some())
    });
}
