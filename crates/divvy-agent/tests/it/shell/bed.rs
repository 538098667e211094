//! The agent's surroundings: an embedded API server, an emulated node, and a probe with scripted answers.

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use divvy_model::cgroup::pod_uid;

use super::*;

/// What the probe answers: each GPU's memory in MiB, and the XIDs so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Machine {
    pub(super) gpus: Vec<u64>,
    pub(super) xids: Vec<(usize, u64)>,
    /// MIG devices of the last GPU, if MIG mode is on.
    pub(super) mig: Option<Vec<MigDevice>>,
    /// The GPU instance and the compute instance that the XIDs name.
    pub(super) instances: Option<(u32, u32)>,
    /// The number of AMD GPUs.
    pub(super) amd: usize,
    /// Whether the driver can limit the memory of pods.
    pub(super) has_limits: bool,
    /// Whether the answers to requests for limits wait.
    pub(super) holds_limits: bool,
    /// Why the driver sets no limit.
    pub(super) refuses_limits: Option<String>,
    /// Why the driver sets no limit on the cgroups of containers.
    pub(super) refuses_container_limits: Option<String>,
    /// The requests for limits so far.
    pub(super) limits: Arc<Mutex<Vec<Value>>>,
    /// The UID of the pod that keeps the first GPU busy, and for which part of the time, in percent.
    pub(super) busy: Option<(String, u32)>,
    /// Why the driver does not say how busy processes keep GPUs.
    pub(super) refuses_samples: Option<String>,
    /// The number of requests for samples so far.
    pub(super) sampled: Arc<Mutex<usize>>,
    /// What the driver measures of the GPUs.
    pub(super) gauges: Vec<Value>,
    /// The UID of the pod whose process 4711 uses the first GPU until it is killed.
    pub(super) process_of: Option<String>,
    /// The UUID of the device that it uses in place of the first GPU.
    pub(super) process_on: Option<String>,
    /// The requests to kill a process so far.
    pub(super) killed: Arc<Mutex<Vec<Value>>>,
}

/// A scripted probe that speaks the probe's protocol (`docs/design/formats.md`).
pub(super) async fn probe(listener: UnixListener, machine: watch::Receiver<Machine>, root: PathBuf) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { return };
        let (mut machine, root) = (machine.clone(), root.clone());
        tokio::spawn(async move {
            let (read, mut write) = stream.into_split();
            let mut lines = BufReader::new(read).lines();
            let mut told = 0;
            loop {
                let line = tokio::select! {
                    line = lines.next_line() => line,
                    changed = machine.changed() => {
                        if changed.is_err() { return }
                        let Machine { xids, instances, .. } = machine.borrow_and_update().clone();
                        for (seq, (gpu, xid)) in xids.iter().enumerate().skip(told) {
                            let event = json!({
                                "event": "fault", "seq": seq + 1, "vendor": "nvidia", "uuid": format!("GPU-{gpu}"), "code": xid,
                                "fatal": xid::is_fatal(*xid, ""), "name": format!("XID {xid}"), "partition": instances,
                            });
                            if write.write_all(format!("{event}\n").as_bytes()).await.is_err() { return }
                        }
                        told = xids.len();
                        continue;
                    }
                };
                let Ok(Some(line)) = line else { return };
                let request: Value = serde_json::from_str(&line).expect("a request");
                let Machine {
                    gpus,
                    mig,
                    amd,
                    has_limits,
                    ..
                } = machine.borrow().clone();
                let ok = match request["op"].as_str() {
                    Some("hello") => json!({"v": 1, "probe": "test", "instance": "one", "seq": 0}),
                    Some("snapshot") => {
                        let mut gpus: Vec<Value> = gpus
                            .iter()
                            .enumerate()
                            .map(|(i, mib)| {
                                json!({"uuid": format!("GPU-{i}"), "index": i, "minor": i, "nodes": [format!("nvidia{i}")], "model": "NVIDIA T4", "totalMiB": mib, "memoryLimit": has_limits})
                            })
                            .collect();
                        if let Some((gpu, mig)) = gpus.last_mut().zip(mig) {
                            gpu["mig"] = json!([true, true]);
                            gpu["migDevices"] = json!(mig);
                        }
                        let mut drivers = serde_json::Map::new();
                        if amd == 0 || !gpus.is_empty() {
                            drivers.insert("nvidia".to_owned(), json!({"version": "550.54.15"}));
                        }
                        if amd > 0 {
                            drivers.insert("amd".to_owned(), json!({"version": "6.10.5"}));
                        }
                        gpus.extend((0..amd).map(|i| {
                            json!({"vendor": "amd", "uuid": format!("0x{i}"), "index": i, "nodes": [format!("dri/renderD{}", 128 + i)],
                                "pci": format!("0000:0{i}:00.0"), "model": "AMD Instinct MI210", "totalMiB": 65520})
                        }));
                        json!({"v": 2, "drivers": drivers, "gpus": gpus})
                    }
                    Some("driver") => {
                        let question: DriverQuestion = serde_json::from_value(request.clone()).expect("a question");
                        let tree = Files::below(&root);
                        json!(DriverFiles {
                            basis: Basis::read(&tree, "/", &question.version, &question.gpus),
                            looked_at: "/".to_owned(),
                            missing: driver_spec::missing(&tree, &question.paths),
                        })
                    }
                    Some("driverSpec") => {
                        let basis: Basis = serde_json::from_value(request["basis"].clone()).expect("a basis");
                        match basis.spec(&Files::below(&root)) {
                            Ok((spec, notes)) => json!(DriverSpec { spec, notes }),
                            Err(error) => json!({"err": {"code": "driver_files", "text": error.to_string()}}),
                        }
                    }
                    Some("limit") => {
                        machine.borrow().limits.lock().expect("no panic").push(request.clone());
                        if machine.wait_for(|machine| !machine.holds_limits).await.is_err() {
                            return;
                        }
                        let Machine {
                            refuses_limits,
                            refuses_container_limits,
                            ..
                        } = &*machine.borrow();
                        let refuses = if is_of_pod(&request) {
                            refuses_limits
                        } else {
                            refuses_container_limits
                        };
                        match refuses {
                            Some(text) => json!({"err": {"code": "no_permission", "text": text}}),
                            None => json!({"usedMiB": 0}),
                        }
                    }
                    Some("utilization") => {
                        let Machine {
                            busy,
                            refuses_samples,
                            sampled,
                            ..
                        } = &*machine.borrow();
                        *sampled.lock().expect("no panic") += 1;
                        let gpus = request["gpus"].as_array().expect("a list").iter();
                        let gpus = gpus.map(|gpu| samples(gpu, busy.as_ref(), refuses_samples.as_ref()));
                        json!(gpus.collect::<Vec<_>>())
                    }
                    Some("metrics") => json!(machine.borrow().gauges),
                    Some("processes") => {
                        let Machine {
                            process_of,
                            process_on,
                            killed,
                            ..
                        } = &*machine.borrow();
                        let lives = killed.lock().expect("no panic").is_empty();
                        let process = |pod: &String| json!({"pid": 4711, "usedMiB": 300, "pod": pod, "ownPid": 12});
                        let processes: Vec<Value> = process_of.iter().filter(|_| lives).map(process).collect();
                        let uuid = process_on.as_deref().unwrap_or("GPU-0");
                        json!([{"uuid": uuid, "processes": processes}])
                    }
                    Some("kill") => {
                        machine.borrow().killed.lock().expect("no panic").push(request.clone());
                        json!({})
                    }
                    _ => json!({}),
                };
                let answer = match ok.get("err") {
                    Some(err) => json!({"id": request["id"], "err": err}),
                    None => json!({"id": request["id"], "ok": ok}),
                };
                if write.write_all(format!("{answer}\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// Report whether a request for a limit concerns the cgroup of a pod, and not that of a container.
fn is_of_pod(limit: &Value) -> bool {
    let cgroup = limit["cgroup"].as_str().expect("a path");
    cgroup.rsplit('/').next().and_then(pod_uid).is_some()
}

/// What a driver says that takes a sample each 100 ms.
fn samples(gpu: &Value, busy: Option<&(String, u32)>, refused: Option<&String>) -> Value {
    let since = gpu["since"].as_u64().expect("a time");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let at = now.as_micros() as u64 / 100_000 * 100_000;
    let samples = match busy {
        Some((pod, percent)) if at > since && gpu["uuid"] == "GPU-0" => {
            json!([{"pid": 7, "pod": pod, "atUs": at, "percent": percent}])
        }
        _ => json!([]),
    };
    match refused {
        Some(text) => json!({"uuid": gpu["uuid"], "samples": [], "err": {"code": "not_supported", "text": text}}),
        None => json!({"uuid": gpu["uuid"], "samples": samples}),
    }
}

pub(super) struct Bed {
    pub(super) api: ApiServer,
    pub(super) node: TestbedNode,
    pub(super) config: AgentConfig,
    pub(super) machine: watch::Sender<Machine>,
    pub(super) agent: Option<(JoinHandle<Result<(), Error>>, CancellationToken)>,
    pub(super) _listening: Listening,
    pub(super) _directory: tempfile::TempDir,
}

pub(super) fn free_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound")
}

impl Bed {
    pub(super) async fn new(gpus: &[u64]) -> Bed {
        Bed::with(gpus, |_| {}).await
    }

    pub(super) async fn with(gpus: &[u64], change: impl FnOnce(&mut NodeDescription)) -> Bed {
        let feature = ServedResource::custom("nfd.k8s-sigs.io", "v1alpha1", "nodefeatures", "NodeFeature", true);
        let api = ApiServer::new(ApiServerOptions {
            resources: vec![feature],
            ..ApiServerOptions::default()
        });
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("listening");
        let directory = tempfile::tempdir().expect("temp dir");
        let kubeconfig = directory.path().join("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig_for(listening.addr(), "agent")).expect("written");
        let mut spec = NodeDescription::new("n1", directory.path());
        spec.gpu_minors = (0..).take(gpus.len()).collect();
        spec.timings.status_period = Duration::from_millis(10);
        spec.timings.start_retry.first = Duration::from_millis(50);
        spec.timings.restart_backoff.first = Duration::from_millis(50);
        change(&mut spec);
        let paths = spec.paths();
        let node = TestbedNode::start(api.client(), spec).await.expect("a node");
        let socket: PathBuf = directory.path().join("probe.sock");
        let machine = watch::Sender::new(Machine {
            gpus: gpus.to_vec(),
            ..Machine::default()
        });
        tokio::spawn(probe(
            UnixListener::bind(&socket).expect("bound"),
            machine.subscribe(),
            paths.sys_root.clone(),
        ));
        let config = AgentConfig {
            kubeconfig: Some(kubeconfig),
            kubelet_dir: paths.kubelet_dir,
            cdi_dir: paths.cdi_dir,
            sys_root: paths.sys_root,
            probe: Some(ProbeChoice::Socket(socket)),
            metrics: Some(free_port()),
            health_recovery: Duration::from_millis(100),
            probe_interval: Duration::from_millis(100),
            ..AgentConfig::new("n1")
        };
        let mut bed = Bed {
            api,
            node,
            config,
            machine,
            agent: None,
            _listening: listening,
            _directory: directory,
        };
        bed.start_agent();
        bed
    }

    pub(super) fn start_agent(&mut self) {
        let stop = CancellationToken::new();
        let agent = tokio::spawn(divvy_agent::run(self.config.clone(), stop.clone()));
        self.agent = Some((agent, stop));
    }

    pub(super) async fn stop_agent(&mut self) {
        let (agent, stop) = self.agent.take().expect("running");
        stop.cancel();
        let outcome = tokio::time::timeout(LIMIT, agent)
            .await
            .expect("ends in time")
            .expect("no panic");
        outcome.expect("it stops without an error");
    }

    /// Wait until the node's `(capacity, allocatable)` of gpu-mem has these values.
    pub(super) async fn memory_is(&self, capacity: u64, allocatable: u64) {
        let found = self
            .api
            .until(LIMIT, |api| {
                let node = api.get("nodes", "", "n1").ok()?;
                let is = |kind: &str| node["status"][kind][names::GPU_MEM].as_str()?.parse::<u64>().ok();
                (is("capacity") == Some(capacity) && is("allocatable") == Some(allocatable)).then_some(())
            })
            .await;
        let node = self.api.get("nodes", "", "n1").expect("there");
        assert!(found.is_some(), "{capacity} and {allocatable} expected: {}", node["status"]);
    }

    /// Return the requests for limits of pods so far.
    pub(super) fn pod_limits(&self) -> Vec<Value> {
        let mut limits = self.machine.borrow().limits.lock().expect("no panic").clone();
        limits.retain(is_of_pod);
        limits
    }

    /// Return the requests for limits of containers and sandboxes so far.
    pub(super) fn container_limits(&self) -> Vec<Value> {
        let mut limits = self.machine.borrow().limits.lock().expect("no panic").clone();
        limits.retain(|limit| !is_of_pod(limit));
        limits
    }

    /// Wait until `look` accepts the inventory.
    pub(super) async fn inventory(&self, look: impl Fn(&Inventory) -> bool) -> Inventory {
        let read = |api: &ApiServer| {
            let node = api.get("nodes", "", "n1").ok()?;
            Inventory::parse(node["metadata"]["annotations"][names::INVENTORY].as_str()?).ok()
        };
        let found = self
            .api
            .until(LIMIT, |api| read(api).filter(|inventory| look(inventory)))
            .await;
        found.unwrap_or_else(|| panic!("not as expected: {:?}", read(&self.api)))
    }

    /// Create a pod with one container that is already bound. Without `gpu`, the pod looks as if no extender had handled it.
    pub(super) fn create(&self, name: &str, gpu: Option<u32>, units: u64) -> String {
        self.create_with(name, gpu, units, &[])
    }

    /// Create a pod as [`Bed::create`] does, with these annotations.
    pub(super) fn create_with(&self, name: &str, gpu: Option<u32>, units: u64, annotations: &[(&str, &str)]) -> String {
        let uuid = gpu.map(|gpu| format!("GPU-{gpu}"));
        self.create_annotated(name, uuid, units, annotations)
    }

    /// Create a pod as [`Bed::create`] does, on the device with this UUID.
    pub(super) fn create_on(&self, name: &str, uuid: Option<String>, units: u64) -> String {
        self.create_annotated(name, uuid, units, &[])
    }

    /// Create a pod as [`Bed::create`] does, on the device with this UUID and with these annotations.
    pub(super) fn create_annotated(&self, name: &str, uuid: Option<String>, units: u64, annotations: &[(&str, &str)]) -> String {
        let mut pod = builders::pod(name).gpu_mem(units).build();
        pod["spec"]["nodeName"] = "n1".into();
        if let Some(uuid) = uuid {
            let memory = MiB(units * 1024);
            let allocation = Allocation {
                v: 1,
                gpus: vec![GpuShare {
                    uuid: uuid.clone(),
                    memory,
                    cores: 0,
                    whole: false,
                    enforcement: None,
                }],
                containers: [("main".to_owned(), vec![ContainerShare { uuid, memory, cores: 0 }])].into(),
            };
            pod["metadata"]["annotations"][names::ALLOCATION] = allocation.to_json().into();
        }
        for (key, value) in annotations {
            pod["metadata"]["annotations"][*key] = (*value).into();
        }
        let pod = self.api.create("pods", pod).expect("created");
        pod["metadata"]["uid"].as_str().expect("has one").to_owned()
    }

    /// Wait until the kubelet that runs now has this many ids of gpu-mem, all of them healthy.
    pub(super) async fn kubelet_has(&self, count: usize) {
        let look = || {
            let view = self.node.device_manager();
            (view.resources.get(names::GPU_MEM) == Some(&(count, count))).then_some(())
        };
        self.eventually("the kubelet has the ids", look).await;
    }

    pub(super) async fn eventually<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(tokio::time::Instant::now() < deadline, "{what}: {:?}", self.node.containers());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(super) async fn running(&self, pod: &str) -> ContainerView {
        let look = || self.node.containers().into_iter().find(|c| c.pod == pod && c.is_running());
        self.eventually(pod, look).await
    }

    pub(super) async fn get(&self, path: &str) -> Option<(u16, String)> {
        let (head, body) = exchange(self.config.metrics?, path, "").await?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body))
    }

    pub(super) async fn ready_is(&self, code: u16, contains: &str) {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let found = self.get("/readyz").await;
            if found
                .as_ref()
                .is_some_and(|(status, text)| *status == code && text.contains(contains))
            {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "{code} {contains} expected: {found:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(super) fn sockets(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.config.device_plugin_dir()).expect("listed");
        let names = entries.map(|entry| entry.expect("entry").file_name().into_string().expect("text"));
        names
            .filter(|name| name.starts_with("divvy") && name.ends_with(".sock"))
            .collect()
    }
}

pub(super) fn env(container: &ContainerView, key: &str) -> String {
    container.env.get(key).cloned().unwrap_or_default()
}
