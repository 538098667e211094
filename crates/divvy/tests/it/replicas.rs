//! Two extenders as processes, one of them the leader. They are killed, stopped, and frozen while pods are bound.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use divvy_testbed::api::{ApiServer, ApiServerOptions, DeleteOptions, PatchKind};
use divvy_testbed::programs::ChildProgram;
use divvy_testkit::dice::Dice;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::cluster::programs;

const NODES: [&str; 2] = ["n1", "n2"];
const GPUS: u64 = 2;
const UNITS: u64 = 16;

/// An extender with its own address, which stays the same when it restarts.
struct Replica {
    name: &'static str,
    address: SocketAddr,
    program: Option<ChildProgram>,
}

impl Replica {
    fn start(&mut self, directory: &Path) {
        let kubeconfig = directory.join("kubeconfig").display().to_string();
        let listen = self.address.to_string();
        let args = [
            "extender",
            "--exit-with-stdin",
            "--kubeconfig",
            &kubeconfig,
            "--listen",
            &listen,
            "--leader-elect",
            "--lease-duration",
            "3s",
            "--replica",
            self.name,
        ];
        let program = ChildProgram::start(self.name, &programs().divvy, &args, &[], &directory.join("logs"));
        self.program = Some(program.expect("it starts"));
    }

    fn signal(&self, signal: Signal) {
        let pid = self.program.as_ref().and_then(ChildProgram::pid).expect("it runs");
        kill_process(Pid::from_raw(pid.cast_signed()).expect("a pid"), signal).expect("a signal");
    }

    /// Send a bind request, and return the `Error` of the response. `None` if there is no response, which can also happen to
    /// kube-scheduler.
    async fn bind(&self, pod: &Value, node: &str) -> Option<String> {
        let meta = &pod["metadata"];
        let body = json!({"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"], "Node": node}).to_string();
        let answer = tokio::time::timeout(Duration::from_secs(5), post(self.address, &body))
            .await
            .ok()?
            .ok()?;
        let answer: Value = serde_json::from_str(&answer).ok()?;
        Some(answer["Error"].as_str()?.to_owned())
    }
}

async fn post(address: SocketAddr, body: &str) -> std::io::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    let head = format!(
        "POST /gpushare-scheduler/bind HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned())
        .unwrap_or_default())
}

fn holder(api: &ApiServer) -> String {
    let lease = api.get("leases.coordination.k8s.io", "divvy-system", "divvy-extender").ok();
    let holder = lease.and_then(|lease| Some(lease["spec"]["holderIdentity"].as_str()?.to_owned()));
    holder.unwrap_or_default()
}

fn leads(api: &ApiServer, replica: &Replica) -> bool {
    holder(api).starts_with(&format!("{}_", replica.name))
}

async fn until(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds().await {
        assert!(Instant::now() < deadline, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Check that in the API server's whole history no GPU was ever overcommitted. Return the number of bindings.
fn audit(api: &ApiServer) -> usize {
    let mut held: BTreeMap<String, (String, u64)> = BTreeMap::new();
    let mut bindings = 0;
    for event in api.history().iter().filter(|event| &*event.resource == "pods") {
        let meta = &event.object["metadata"];
        let uid = meta["uid"].as_str().expect("a uid").to_owned();
        let note = |name: &str| meta["annotations"][format!("ALIYUN_COM_GPU_MEM_{name}")].as_str();
        let gone = format!("{:?}", event.kind).contains("Delet");
        match (gone, event.object["spec"]["nodeName"].as_str(), note("IDX"), note("POD")) {
            (false, Some(node), Some(index), Some(units)) => {
                let gpu = format!("{node}/{index}");
                bindings += usize::from(held.insert(uid, (gpu, units.parse().expect("a number"))).is_none());
            }
            (false, Some(node), ..) => panic!("bound to {node} without an allocation: {meta}"),
            _ => {
                held.remove(&uid);
            }
        }
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for (gpu, units) in held.values() {
            *sums.entry(gpu).or_default() += units;
        }
        assert!(sums.values().all(|sum| *sum <= UNITS), "a GPU was given twice: {sums:?}");
    }
    bindings
}

async fn pair(api: &ApiServer, directory: &Path) -> [Replica; 2] {
    for node in NODES {
        api.create("nodes", json!({"metadata": {"name": node}})).expect("a node");
        let amounts = json!({"aliyun.com/gpu-mem": (UNITS * GPUS).to_string(), "aliyun.com/gpu-count": GPUS.to_string()});
        let status = json!({"status": {"capacity": amounts, "allocatable": amounts}});
        api.patch("nodes/status", "", node, PatchKind::Merge, &status)
            .expect("a status");
    }
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .expect("a namespace");
    let mut replicas = ["a", "b"].map(|name| Replica {
        name,
        address: std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port"),
        program: None,
    });
    for replica in &mut replicas {
        replica.start(directory);
    }
    replicas
}

fn new_pod(api: &ApiServer, name: &str, units: usize) -> Value {
    let limits = json!({"aliyun.com/gpu-mem": units.to_string()});
    let spec = json!({"containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]});
    api.create(
        "pods",
        json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec}),
    )
    .expect("a pod")
}

async fn server(directory: &Path) -> (ApiServer, divvy_testbed::api::Listening) {
    let api = ApiServer::new(ApiServerOptions {
        seed: Some(1),
        ..ApiServerOptions::default()
    });
    let listening = api.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("it listens");
    std::fs::write(directory.join("kubeconfig"), api.kubeconfig(listening.addr())).expect("written");
    (api, listening)
}

/// The test kills, ends, and freezes leaders.
#[tokio::test]
async fn no_gpu_is_given_twice_while_leaders_fail() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening) = server(directory.path()).await;
    let mut replicas = pair(&api, directory.path()).await;
    let mut dice = Dice::new(7);
    let mut waiting: Vec<Value> = Vec::new();
    let mut frozen: Option<(usize, Instant)> = None;
    let mut changes = 0;
    for round in 0..2 {
        for fault in [Signal::KILL, Signal::TERM, Signal::STOP] {
            let leader = async |replicas: &[Replica; 2]| {
                until("one leads", Duration::from_secs(20), async || {
                    replicas.iter().any(|replica| leads(&api, replica))
                })
                .await;
                replicas.iter().position(|replica| leads(&api, replica)).expect("one leads")
            };
            let before = leader(&replicas).await;
            // Send binds to both replicas until this leader has carried some out. The fault then hits in the middle of others.
            let (mut done, mut tried) = (0, 0);
            let began = Instant::now();
            let mut hit = false;
            while began.elapsed() < Duration::from_secs(15) {
                if let Some((i, since)) = frozen
                    && since.elapsed() > Duration::from_secs(5)
                {
                    replicas[i].signal(Signal::CONT);
                    frozen = None;
                }
                waiting.push(new_pod(
                    &api,
                    &format!("p{round}-{}-{tried}", fault.as_raw()),
                    1 + dice.below(9),
                ));
                tried += 1;
                if waiting.len() > 6 {
                    // The pod's owner gives up and deletes the pod. Its binding goes with it, and its memory is free.
                    let pod = waiting.remove(dice.below(3));
                    let now = DeleteOptions {
                        grace_period_s: Some(0),
                        ..DeleteOptions::default()
                    };
                    api.delete("pods", "default", pod["metadata"]["name"].as_str().expect("a name"), &now)
                        .expect("deleted");
                }
                let binds = waiting.iter().enumerate().map(|(i, pod)| {
                    let (replica, node) = ((i + tried) % 2, NODES[(i / 2 + tried) % 2]);
                    let replica = &replicas[replica];
                    async move { replica.bind(pod, node).await }
                });
                if !hit && done > 0 && began.elapsed() > Duration::from_millis(1_200) {
                    // While the binds are in progress.
                    let all = futures::future::join_all(binds);
                    let strike = async {
                        tokio::time::sleep(Duration::from_micros(300 * dice.below(20) as u64)).await;
                        replicas[before].signal(fault);
                    };
                    tokio::join!(all, strike);
                    hit = true;
                    match fault {
                        Signal::STOP => frozen = Some((before, Instant::now())),
                        _ => {
                            let mut ended = replicas[before].program.take().expect("it ran");
                            until("it ends", Duration::from_secs(10), async || ended.ended().expect("asked")).await;
                            replicas[before].start(directory.path());
                        }
                    }
                    continue;
                }
                done += futures::future::join_all(binds)
                    .await
                    .iter()
                    .filter(|error| error.as_deref() == Some(""))
                    .count();
                let after = replicas.iter().position(|replica| leads(&api, replica));
                if hit && frozen.is_none() && after.is_some_and(|after| after != before || fault != Signal::STOP) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
            assert!(hit, "nothing was bound in round {round} before {fault:?}");
            changes += 1;
            audit(&api);
        }
    }
    assert_eq!(changes, 6);
    let lease = api
        .get("leases.coordination.k8s.io", "divvy-system", "divvy-extender")
        .expect("there");
    let transitions = lease["spec"]["leaseTransitions"].as_i64().unwrap_or_default();
    assert!(transitions >= 4, "the leader changed: {lease}");
    let bindings = audit(&api);
    assert!(bindings >= 20, "only {bindings} bindings");
}
