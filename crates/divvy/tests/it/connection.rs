//! kubectl's connection flags, and the errors if there is no connection.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::cli::{beside, stderr};

const KUBECONFIG: &str = "\
apiVersion: v1
kind: Config
current-context: one
contexts:
- {name: one, context: {cluster: first, user: anna, namespace: ml}}
clusters:
- {name: first, cluster: {server: 'http://127.0.0.1:FIRST'}}
- {name: second, cluster: {server: 'http://127.0.0.1:SECOND'}}
users:
- {name: anna, user: {token: of-anna}}
- {name: berta, user: {token: of-berta}}
";

/// Receive one request, refuse it, and return the head of the request.
async fn refused(listener: &TcpListener) -> String {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let head = head(&mut stream).await;
    let body = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"not you","reason":"Forbidden","code":403}"#;
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await.expect("answered");
    head
}

async fn head(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    while !read.ends_with(b"\r\n\r\n") {
        let mut part = [0; 1024];
        let length = stream.read(&mut part).await.expect("a request");
        assert!(length > 0, "{}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&part[..length]);
    }
    String::from_utf8_lossy(&read).to_lowercase()
}

async fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

fn kubeconfig(directory: &std::path::Path, first: u16, second: u16) -> String {
    let path = directory.join("kubeconfig");
    let text = KUBECONFIG
        .replace("FIRST", &first.to_string())
        .replace("SECOND", &second.to_string());
    std::fs::write(&path, text).expect("written");
    path.display().to_string()
}

#[tokio::test]
async fn flags_of_the_connection_mean_what_they_mean_to_kubectl() {
    let directory = tempfile::tempdir().expect("a directory");
    // SERVER stands for the address of the second server.
    let cases: &[(&[&str], bool, &[&str])] = &[
        (&[], false, &["authorization: bearer of-anna"]),
        (&["--user", "berta"], false, &["authorization: bearer of-berta"]),
        (&["--cluster", "second"], true, &["authorization: bearer of-anna"]),
        (&["-s", "SERVER"], true, &["authorization: bearer of-anna"]),
        (
            &["--server", "SERVER", "--token", "typed"],
            true,
            &["authorization: bearer typed"],
        ),
        (
            &["--as", "jane", "--as-group", "dev", "--as-group", "ops"],
            false,
            &[
                "authorization: bearer of-anna",
                "impersonate-user: jane",
                "impersonate-group: dev",
                "impersonate-group: ops",
            ],
        ),
    ];
    for (flags, to_second, expected) in cases {
        let ((first, first_port), (second, second_port)) = (listener().await, listener().await);
        let path = kubeconfig(directory.path(), first_port, second_port);
        let server = format!("http://127.0.0.1:{second_port}");
        let flags = flags.iter().map(|flag| if *flag == "SERVER" { &server } else { *flag });
        let args: Vec<&str> = ["audit", "--kubeconfig", &path].into_iter().chain(flags).collect();
        let listener = if *to_second { &second } else { &first };
        let (head, output) = tokio::join!(refused(listener), beside(&args, &[]));
        for line in *expected {
            assert!(head.contains(line), "{args:?}: {head}");
        }
        assert!(stderr(&output).contains("not you"), "{args:?}: {}", stderr(&output));
    }
    // As in kubectl, an address is enough.
    let (only, port) = listener().await;
    let server = format!("http://127.0.0.1:{port}");
    let args = ["audit", "--server", &server];
    let (head, _) = tokio::join!(refused(&only), beside(&args, &[]));
    assert!(!head.contains("authorization"), "{head}");
}

#[tokio::test]
async fn a_refused_connection_names_the_address_and_its_source() {
    let directory = tempfile::tempdir().expect("a directory");
    // The port is closed again.
    let port = listener().await.1;
    let path = kubeconfig(directory.path(), port, port);
    let address = format!("no connection to the API server at http://127.0.0.1:{port}: Connection refused");
    for command in [&["inspect", "gpushare"][..], &["why"], &["audit"], &["doctor", "--cluster"]] {
        let output = beside(&[command, &["--kubeconfig", &path]].concat(), &[]).await;
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
        assert!(said.contains(&address), "{command:?}: {said}");
        assert!(
            said.contains(&format!(
                "(from the kubeconfig {path}; --kubeconfig and --context choose another)"
            )),
            "{command:?}: {said}"
        );
    }
    let server = format!("http://127.0.0.1:{port}");
    let output = beside(&["why", "--kubeconfig", &path, "-s", &server], &[]).await;
    assert!(stderr(&output).contains("(from --server)"), "{}", stderr(&output));
}

#[tokio::test]
async fn the_flag_limits_the_wait_for_a_silent_api_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let (silent, port) = listener().await;
    let path = kubeconfig(directory.path(), port, port);
    let args = ["why", "--kubeconfig", &path, "--request-timeout", "1"];
    let accepted = async {
        let mut all = Vec::new();
        loop {
            all.push(silent.accept().await.expect("a connection"));
        }
    };
    let output = tokio::select! {
        output = tokio::time::timeout(Duration::from_secs(60), beside(&args, &[])) => output.expect("it ends"),
        () = accepted => unreachable!("it accepts connections without end"),
    };
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains(&format!(
            "the API server at http://127.0.0.1:{port} did not answer within 1 s"
        )),
        "{}",
        stderr(&output)
    );
}

#[tokio::test]
async fn what_a_kubeconfig_does_not_have_is_said_with_what_it_has() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = kubeconfig(directory.path(), 1, 1);
    for (flags, expected) in [
        (&["--context", "two"][..], "it has no context \"two\", only: one"),
        (&["--cluster", "third"], "it has no cluster \"third\", only: first, second"),
        (&["--user", "clara"], "it has no user \"clara\", only: anna, berta"),
        (&["-s", "localhost:8080"], "write https://HOST:PORT"),
        (&["--as-group", "dev"], "--as <USER>"),
        (&["--request-timeout", "soon"], "write 10s, 1m, or 0"),
    ] {
        let output = beside(&[&["why", "--kubeconfig", &path][..], flags].concat(), &[]).await;
        assert!(stderr(&output).contains(expected), "{flags:?}: {}", stderr(&output));
    }
}

/// A DaemonSet's command line may name a kubeconfig, but an agent never impersonates a user.
#[test]
fn agents_and_extenders_have_no_flags_for_people() {
    for command in ["agent", "extender"] {
        let help = crate::cli::stdout(&crate::cli::divvy(&[command, "--help"], &[]));
        assert!(help.contains("--kubeconfig") && !help.contains("--as-group"), "{help}");
    }
}
