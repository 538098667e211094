//! `divvy web`, with an API server and agents in this process.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use divvy_testbed::api::ApiServer;
use divvy_testbed::builders::pod;
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::{beside, command, stderr};
use crate::top::Cluster;

/// How long a change may take to be on the page. It comes at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The running program.
struct Web {
    child: Child,
    host: String,
    token: String,
}

impl Web {
    fn start(args: &[&str]) -> Web {
        let mut child = command(&[&["web"], args].concat(), &[])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        output.read_line(&mut line).expect("the address");
        let address = line.trim().strip_prefix("http://").expect("an address");
        let (host, token) = address.split_once("/?token=").expect("a token");
        Web {
            child,
            host: host.to_owned(),
            token: token.to_owned(),
        }
    }

    fn ask(&self, path: &str, token: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.host).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n",
            self.host
        );
        stream.write_all(request.as_bytes()).expect("sent");
        stream
    }

    fn get(&self, path: &str) -> String {
        let mut text = String::new();
        self.ask(path, &self.token).read_to_string(&mut text).expect("an answer");
        text
    }

    /// Get a page until it has these texts.
    fn until(&self, path: &str, texts: &[&str]) -> String {
        let began = Instant::now();
        loop {
            let page = self.get(path);
            let Some(missing) = texts.iter().find(|text| !page.contains(**text)) else {
                return page;
            };
            assert!(began.elapsed() < PATIENCE, "not {missing:?} in {page}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Send a signal, and wait for the end. A browser may still follow the changes of a page.
    fn end(mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        self.child.wait().expect("it ends")
    }
}

/// Run blocking code on another thread: the API server runs on this one.
async fn blocking(code: impl FnOnce() + Send + 'static) {
    if let Err(error) = tokio::task::spawn_blocking(code).await {
        std::panic::resume_unwind(error.into_panic());
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        // It fails if the program has ended.
        let _ = self.child.kill();
    }
}

#[tokio::test]
async fn the_page_shows_the_cluster_and_every_change_of_it() {
    let cluster = Cluster::new().await;
    let (api, kubeconfig) = (cluster.api.clone(), cluster.kubeconfig(None));
    blocking(move || follow(&api, &kubeconfig)).await;
}

fn follow(api: &ApiServer, kubeconfig: &str) {
    let web = Web::start(&["--kubeconfig", kubeconfig]);
    let page = web.until("/", &["gpu-a", "gpu-b", ">1 pod<", "on 1 of 2 nodes"]);
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    assert!(web.until("/pods/ml/train", &["6 GiB"]).contains("61"));
    web.until("/waiting", &["large", "It asks for 16 GiB on one GPU"]);

    // The script follows the events from the version of the page on.
    let attribute = |name: &str| {
        let rest = page.split(&format!("{name}=\"")).nth(1).expect(name);
        rest.split('"').next().expect("an end").replace("&amp;", "&")
    };
    let events = format!("{}&since={}", attribute("data-events"), attribute("data-since"));
    let mut lines = BufReader::new(web.ask(&events, &web.token)).lines();
    api.create("pods", pod("another").namespace("ml").gpu_mem(20).build())
        .expect("a pod");
    let began = Instant::now();
    let mut heard = Vec::new();
    // A stream without changes has comments now and then.
    while !heard.iter().any(|line: &String| line.contains("2 pods")) {
        assert!(began.elapsed() < PATIENCE, "no event about the pod that waits now: {heard:?}");
        heard.push(lines.next().expect("it goes on").expect("text"));
    }
    web.until("/waiting", &["another", "It asks for 20 GiB on one GPU"]);

    let mut refused = String::new();
    web.ask("/", "wrong").read_to_string(&mut refused).expect("an answer");
    assert!(refused.starts_with("HTTP/1.1 401") && !refused.contains("gpu-a"), "{refused}");
    assert_eq!(web.end(Signal::TERM).code(), Some(0));
}

#[tokio::test]
async fn what_cannot_be_shown_is_an_error_that_says_what_to_do() {
    let cluster = Cluster::new().await;
    cluster.api.rights().limit("stranger");
    let (admin, stranger) = (cluster.kubeconfig(None), cluster.kubeconfig(Some("stranger")));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("bound").port().to_string();
    for (args, parts) in [
        (&["--kubeconfig", &stranger][..], &["list", "nodes"][..]),
        (
            &["--kubeconfig", &admin, "--port", &taken],
            &[&taken, "choose another one with --port"],
        ),
    ] {
        let output = beside(&[&["web"], args].concat(), &[]).await;
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{args:?}: no {part:?} in {text}");
        }
    }
}
