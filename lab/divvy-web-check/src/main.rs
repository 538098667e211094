//! Serves a made-up cluster, for a look at the pages and for `cargo xtask web-check`.
//!
//! `cargo run -p divvy-web-check` prints the address. Lines on standard input change what happens: `step` moves the cluster on, `cut` closes all
//! connections, `gone NODE` removes a node, `expire` has the token expire, `away` has tokens not be checked at all, and `valid` ends both. With `--moving` the
//! cluster moves on every 2 seconds. With `--plain` it has no hostile texts, for pictures.

#![allow(clippy::print_stdout, reason = "what the program is for")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use divvy_page::{ClusterScene, MeasuredUsage};
use divvy_view_sim::{HOSTILE, mixed};
use divvy_web::{Gate, Hosts, Impatient, LocalToken, PageHub, TokenRefusal, router};
use futures::future::BoxFuture;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// The gate of `divvy web`, whose token can expire.
struct Expiring {
    local: LocalToken,
    state: Arc<AtomicU8>,
}

impl Gate for Expiring {
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<(), TokenRefusal>> {
        let why = "The API server gave no answer.".to_owned();
        match self.state.load(Ordering::SeqCst) {
            0 => self.local.check(token),
            1 => Box::pin(std::future::ready(Err(TokenRefusal::Unknown))),
            _ => Box::pin(std::future::ready(Err(TokenRefusal::Unavailable { why }))),
        }
    }

    fn how(&self) -> &str {
        self.local.how()
    }
}

/// The cluster, and what happened to it.
struct CheckStory {
    step: u64,
    gone: BTreeSet<String>,
    plain: bool,
}

impl CheckStory {
    fn scene(&self) -> ClusterScene {
        let mut cluster = mixed(self.step);
        cluster.view.nodes.retain(|node| !self.gone.contains(&node.name));
        let at = cluster.at;
        let measured = |usage| MeasuredUsage { at, usage };
        let mut scene = ClusterScene {
            at,
            view: cluster.view,
            answers: cluster
                .usage
                .into_iter()
                .map(|(node, usage)| (node, measured(usage)))
                .collect(),
            waiting: cluster.waiting,
            notices: vec![format!("You may not read the file {HOSTILE}, so its contents are not known.")],
        };
        if self.plain {
            scene.notices.clear();
            for node in scene.view.nodes.iter_mut().filter(|node| node.name == "gpu-l40s-01") {
                let node = std::sync::Arc::make_mut(node);
                node.driver_trouble = None;
                node.gpus
                    .iter_mut()
                    .for_each(|gpu| gpu.model = Some("NVIDIA L40S".to_owned()));
            }
            scene
                .waiting
                .iter_mut()
                .for_each(|pod| pod.why = pod.why.replace(HOSTILE, "NVIDIA H200"));
        }
        scene
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let moving = has("--moving");
    let mut story = CheckStory {
        step: 0,
        gone: BTreeSet::new(),
        plain: has("--plain"),
    };
    let hub = Arc::new(PageHub::new());
    // The last hour.
    for step in 0..=75 {
        story.step = step;
        hub.show(story.scene());
    }
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let state = Arc::new(AtomicU8::new(0));
    let local = LocalToken::random()?;
    println!("http://127.0.0.1:{port}/?token={}", local.text());
    let gate = Expiring {
        local,
        state: state.clone(),
    };
    let router = router(hub.clone(), Arc::new(gate), Hosts::loopback(port));
    let connections = Arc::new(Mutex::new(JoinSet::new()));
    tokio::spawn({
        let connections = connections.clone();
        async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(router.clone());
                let io = TokioIo::new(Impatient::new(stream, Duration::from_secs(30)));
                let mut connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
                while connections.try_join_next().is_some() {}
                connections.spawn(http1::Builder::new().serve_connection(io, service));
            }
        }
    });
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut clock = tokio::time::interval(Duration::from_secs(2));
    loop {
        tokio::select! {
            line = lines.next_line() => {
                let Some(line) = line? else { return Ok(()) };
                match line.split_once(' ').unwrap_or((&line, "")) {
                    ("step", _) => story.step += 1,
                    ("gone", node) => drop(story.gone.insert(node.to_owned())),
                    ("cut", _) => connections.lock().unwrap_or_else(PoisonError::into_inner).abort_all(),
                    ("expire", _) => state.store(1, Ordering::SeqCst),
                    ("away", _) => state.store(2, Ordering::SeqCst),
                    ("valid", _) => state.store(0, Ordering::SeqCst),
                    _ => println!("unknown: {line}"),
                }
                hub.show(story.scene());
                println!("done {line}");
            }
            _ = clock.tick(), if moving => {
                story.step += 1;
                hub.show(story.scene());
            }
        }
    }
}
