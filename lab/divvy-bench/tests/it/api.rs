use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use divvy_bench::api::{FIRST, RenderedApi};
use divvy_bench::ask::HttpConnection;
use divvy_bench::cluster::{ClusterSize, Form, NAMESPACE, pod_name};
use serde_json::{Value, json};

const CLUSTER: ClusterSize = ClusterSize {
    nodes: 20,
    gpus: 8,
    pods: 100,
    waiting: 2,
    form: Form::Gpushare,
};

/// Run the server on a separate thread, which ends with the test's process.
fn served() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    listener.set_nonblocking(true).expect("a mode of the socket");
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            RenderedApi::new(CLUSTER).serve(listener).await
        })
    });
    address
}

fn get(address: &str, path: &str) -> (u16, Value) {
    let (status, text) = HttpConnection::open(address)
        .and_then(|mut it| it.get(path))
        .expect("an answer");
    (status, serde_json::from_str(&text).unwrap_or_default())
}

#[test]
fn a_list_comes_whole_and_in_chunks_whatever_the_limit() {
    let address = served();
    for (path, kind, count) in [
        ("/api/v1/pods?limit=5", "PodList", 102),
        ("/api/v1/nodes?limit=5&resourceVersion=0", "NodeList", 20),
        (
            "/api/v1/pods?fieldSelector=spec.nodeName%3Dgpu-node-00003.cluster.example",
            "PodList",
            5,
        ),
        (
            "/api/v1/nodes?fieldSelector=metadata.name%3Dgpu-node-00003.cluster.example",
            "NodeList",
            1,
        ),
        ("/api/v1/namespaces/kube-system/configmaps", "ConfigMapList", 0),
    ] {
        let (status, list) = get(&address, path);
        assert_eq!((status, &list["kind"]), (200, &json!(kind)), "{path}");
        assert_eq!(list["metadata"], json!({"resourceVersion": FIRST.to_string()}), "{path}");
        assert_eq!(list["items"].as_array().map(Vec::len), Some(count), "{path}");
    }
    let mut stream = TcpStream::connect(&address).expect("a connection");
    write!(
        stream,
        "GET /api/v1/pods HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let head = answer.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase();
    assert!(
        head.contains("transfer-encoding: chunked") && !head.contains("content-encoding"),
        "{head}"
    );
}

#[test]
fn a_single_object_is_that_of_the_list() {
    let address = served();
    let (_, list) = get(&address, "/api/v1/pods");
    let (status, pod) = get(&address, &format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", pod_name(7)));
    assert_eq!((status, &pod["kind"]), (200, &json!("Pod")));
    assert_eq!(pod["metadata"], list["items"][7]["metadata"]);
    let (status, refusal) = get(&address, "/api/v1/namespaces/team-a/pods/nobody");
    assert_eq!(
        (status, &refusal["reason"], &refusal["details"]["name"]),
        (404, &json!("NotFound"), &json!("nobody"))
    );
    assert_eq!(get(&address, "/api/v1/pods?watch=1&sendInitialEvents=true").0, 422);
    assert_eq!(get(&address, "/api/v1/pods?labelSelector=a%3Db").0, 400);
}

/// The Binding also reaches a watch that starts at the version of the list.
#[test]
fn a_binding_reaches_every_earlier_watch() {
    let address = served();
    let watch = || {
        let mut stream = TcpStream::connect(&address).expect("a connection");
        write!(
            stream,
            "GET /api/v1/pods?watch=true&resourceVersion={FIRST} HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        .expect("sent");
        BufReader::new(stream)
    };
    let event = |mut watch: BufReader<TcpStream>| loop {
        let mut line = String::new();
        watch.read_line(&mut line).expect("a line");
        if line.starts_with("{\"type\"") {
            break serde_json::from_str::<Value>(&line).expect("an event");
        }
    };
    let before = watch();
    let waits = pod_name(CLUSTER.pods);
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{waits}/binding");
    let binding = json!({"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_IDX": "3"}}, "target": {"name": ClusterSize::name(4)}})
        .to_string();
    let mut connection = HttpConnection::open(&address).expect("a connection");
    assert_eq!(connection.post(&path, &binding).expect("an answer").0, 201);
    assert_eq!(
        connection.post(&path, &binding).expect("an answer").0,
        409,
        "a binding is final"
    );
    for watch in [before, watch()] {
        let event = event(watch);
        assert_eq!(event["type"], json!("MODIFIED"));
        let object = &event["object"];
        assert_eq!(object["metadata"]["name"], json!(waits));
        assert_eq!(object["metadata"]["resourceVersion"], json!((FIRST + 1).to_string()));
        assert_eq!(object["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"], json!("3"));
        assert_eq!(object["spec"]["nodeName"], json!(ClusterSize::name(4)));
    }
}
