//! A cluster for tests that force a particular interleaving of events. The bed records everything that runs on its nodes from the
//! first moment. [`Bed::end`] audits the record: which memory containers really held, which allocations existed at every commit,
//! and that nothing is left.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use divvy_audit::FindingLevel;
use divvy_model::{Allocation, Inventory, names};
use divvy_testbed::api::{ApiServer, Clock, DeleteOptions, Effect, FaultRule, Match, RuleId};
use divvy_testbed::builders::{PodBuilder, pod};
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::node::{ContainerView, NodeDescription, TestbedNode};
use divvy_testbed::scenario::{Cluster as _, WholeOffer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::cluster::programs;
use crate::record::{Record, Recorder};

/// The time limit for an expected event. Only a test that fails waits that long.
const PATIENCE: Duration = Duration::from_secs(20);

/// The name of a scheduler that does not run: the test itself binds the pods that name it.
pub(crate) const BY_HAND: &str = "by-hand";

/// A cluster with nodes `n1`, `n2`, ….
pub(crate) struct Bed {
    pub(crate) cluster: Embedded,
    nodes: Vec<String>,
    recorder: Recorder,
    /// The findings that the audit must have, because the test causes them.
    expected: BTreeSet<&'static str>,
}

/// A fault in which the agent of a node receives no more changes of pods. [`CutOff::heal`] ends the fault.
#[must_use]
pub(crate) struct CutOff {
    watch: RuleId,
    rules: Vec<RuleId>,
}

fn machines(nodes: &[&[u64]]) -> String {
    let mut text = "v = 1\n".to_owned();
    for (i, gpus) in nodes.iter().enumerate() {
        text.push_str(&format!("[[node]]\nname = \"n{}\"\n", i + 1));
        for gib in *gpus {
            text.push_str(&format!(
                "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = {}\n",
                gib * 1024
            ));
        }
    }
    text
}

/// Return a pod that ends only by SIGKILL, after this grace period in seconds.
pub(crate) fn stubborn(name: &str, units: u64, grace_s: u64) -> PodBuilder {
    pod(name)
        .gpu_mem(units)
        .args(&["run", "--ignore-term"])
        .grace_seconds(grace_s)
}

/// Short timings of a node, to keep the tests fast.
fn quick(spec: &mut NodeDescription) {
    spec.timings.status_period = Duration::from_millis(20);
    spec.timings.pods_after = Duration::ZERO;
    spec.timings.forced_after = Duration::from_millis(100);
    spec.timings.start_retry.first = Duration::from_millis(40);
    spec.timings.start_retry.max = Duration::from_millis(150);
    spec.timings.restart_backoff.first = Duration::from_millis(10);
    spec.timings.restart_backoff.max = Duration::from_millis(50);
}

impl Bed {
    /// Make a cluster whose nodes have GPUs of these sizes in GiB.
    pub(crate) async fn new(nodes: &[&[u64]]) -> Bed {
        Bed::with(nodes, |_| {}).await
    }

    /// Make a cluster as [`Bed::new`] does. `tune` changes the settings of each node.
    pub(crate) async fn with(nodes: &[&[u64]], tune: impl Fn(&mut NodeDescription)) -> Bed {
        Bed::at(nodes, Clock::system(), tune).await
    }

    /// Make a cluster as [`Bed::with`] does. Its API server takes the time from `clock`.
    pub(crate) async fn at(nodes: &[&[u64]], clock: Clock, tune: impl Fn(&mut NodeDescription)) -> Bed {
        Bed::of(machines(nodes), nodes.len(), clock, tune).await
    }

    /// Make a cluster as [`Bed::new`] does. The last node also has these numbers of GPUs of other vendors, which are offered as a whole.
    pub(crate) async fn with_others(nodes: &[&[u64]], amd: usize, intel: usize) -> Bed {
        let of_amd = "[[node.amd]]\nmodel = \"AMD Instinct MI210\"\nmemory_mib = 65520\n";
        let of_intel = "[[node.intel]]\ndevice = \"0xe211\"\nmemory_mib = 24480\n";
        let text = machines(nodes) + &of_amd.repeat(amd) + &of_intel.repeat(intel);
        Bed::of(text, nodes.len(), Clock::system(), |_| {}).await
    }

    async fn of(machines: String, nodes: usize, clock: Clock, tune: impl Fn(&mut NodeDescription)) -> Bed {
        let settings = EmbeddedSettings {
            clock,
            ..EmbeddedSettings::new(machines, programs())
        };
        let cluster = Embedded::start(settings).await.expect("the cluster comes up");
        let mut bed = Bed {
            cluster,
            nodes: Vec::new(),
            recorder: Recorder::default(),
            expected: BTreeSet::new(),
        };
        for i in 1..=nodes {
            let name = format!("n{i}");
            let tuned = |spec: &mut NodeDescription| {
                quick(spec);
                tune(spec);
            };
            bed.cluster.join_as(&name, tuned).await.expect("the node joins");
            bed.recorder.listen(bed.cluster.node(&name).expect("the node has joined"));
            bed.nodes.push(name);
        }
        bed.all_offered().await;
        bed
    }

    /// Let the agents offer NVIDIA's GPUs as a whole as well.
    pub(crate) async fn offer_whole(&mut self) {
        self.cluster.offer_whole(WholeOffer::Mixed).await.expect("the agents restart");
        self.all_offered().await;
    }

    /// Give the agents settings that node labels choose.
    pub(crate) async fn configure_nodes(&mut self, configs: Value) {
        let configs = serde_json::from_value(configs).expect("settings by name");
        self.cluster.configure_nodes(&configs).await.expect("the agents restart");
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.recorder.record()
    }

    pub(crate) fn api(&self) -> &ApiServer {
        self.cluster.api()
    }

    pub(crate) fn node(&self, name: &str) -> &TestbedNode {
        self.cluster.node(name).expect("the node has joined")
    }

    /// Wait until `look` succeeds. An error of `look` says what it sees instead. The message of a failed test contains this
    /// error.
    pub(crate) async fn until<T, E: Display>(&self, what: &str, mut look: impl AsyncFnMut(&Bed) -> Result<T, E>) -> T {
        let began = Instant::now();
        loop {
            match look(self).await {
                Ok(found) => return found,
                Err(seen) if began.elapsed() > PATIENCE => {
                    let logs: Vec<String> = self.nodes.iter().map(|node| self.cluster.agent_log(node)).collect();
                    panic!("waited in vain for {what}; there is: {seen}\n{}", logs.join("\n"));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(3)).await,
            }
        }
    }

    /// Check for a while that something does not change.
    pub(crate) async fn stays(&self, what: &str, time: Duration, look: impl Fn(&Bed) -> bool) {
        let began = Instant::now();
        while began.elapsed() < time {
            assert!(look(self), "{what}: no longer after {:?}", began.elapsed());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn units(&self, node: &str) -> u64 {
        let machine = self.cluster.machines().node(node).expect("a machine");
        machine.gpus.iter().map(|gpu| gpu.memory_mib / 1024).sum()
    }

    /// Wait until kubelet, API server, and extender agree on the GPUs of each node.
    pub(crate) async fn all_offered(&self) {
        for node in &self.nodes {
            self.offered(node).await;
        }
    }

    /// Wait until kubelet, API server, and extender agree on the GPUs of one node.
    pub(crate) async fn offered(&self, node: &str) {
        let units = self.units(node);
        self.until(&format!("node {node} to offer {units} units"), async |bed: &Bed| {
            let object = bed.api().get("nodes", "", node).map_err(|error| error.message)?;
            let allocatable = object["status"]["allocatable"][names::GPU_MEM].clone();
            let known = bed.inspect(node).await;
            if allocatable == *units.to_string() && known["totalGPU"] == units {
                Ok(())
            } else {
                Err(format!("allocatable {allocatable}, the extender knows {known}"))
            }
        })
        .await;
    }

    /// Return the extender's view of a node, as gpushare's `inspect` endpoint reports it.
    pub(crate) async fn inspect(&self, node: &str) -> Value {
        let path = format!("/gpushare-scheduler/inspect/{node}");
        let (_, body) = self
            .cluster
            .ask_extender("GET", &path, "")
            .await
            .expect("the extender answers");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["nodes"][0].clone()
    }

    /// Create a pod, and return its UID.
    pub(crate) fn create(&self, pod: &PodBuilder) -> String {
        self.create_object(pod.build())
    }

    /// Create a pod for [`BY_HAND`], and return its UID.
    pub(crate) fn create_by_hand(&self, pod: &PodBuilder) -> String {
        let mut object = pod.build();
        object["spec"]["schedulerName"] = BY_HAND.into();
        self.create_object(object)
    }

    pub(crate) fn create_object(&self, object: Value) -> String {
        let pod = self.api().create("pods", object).expect("the pod is created");
        pod["metadata"]["uid"].as_str().expect("a UID").to_owned()
    }

    /// Bind a pod through the extender, as kube-scheduler does after it has chosen a node. Return the `Error` in the extender's
    /// response, which is empty on success.
    pub(crate) async fn bind(&self, name: &str, uid: &str, node: &str) -> String {
        let args = json!({"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node}).to_string();
        let asked = self.cluster.ask_extender("POST", "/gpushare-scheduler/bind", &args);
        let (status, body) = asked.await.expect("the extender answers");
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["Error"].as_str().expect("Error").to_owned()
    }

    /// Bind a pod as [`Bed::bind`] does, but first wait until the extender's watch has received the pod.
    pub(crate) async fn bind_known(&self, name: &str, uid: &str, node: &str) -> String {
        self.until("the extender to know the pod", async |bed: &Bed| {
            match bed.bind(name, uid, node).await {
                error if error.contains("is not known yet") => Err(error),
                error => Ok(error),
            }
        })
        .await
    }

    /// Stop the kubelet, and delay the agent's report that it has stopped until the returned rule is removed. A pod that is
    /// bound in the meantime is like a pod whose binding was under way when the kubelet stopped.
    pub(crate) async fn kubelet_stops_unsaid(&self, node: &str, hard: bool) -> RuleId {
        let unsaid = self.agent_says_nothing(node);
        self.node(node).stop_kubelet(hard).await;
        unsaid
    }

    /// Delay what the agent reports about its node until the returned rule is removed.
    pub(crate) fn agent_says_nothing(&self, node: &str) -> RuleId {
        let patches = Match::any().verb("patch").resource("nodes").client(&format!("agent-{node}"));
        self.api().faults().add(FaultRule::new(patches, Effect::Hang))
    }

    /// Wait until the extender binds a pod without first reading it from the API server. It does read pods for a while after it
    /// has listed them. During that time, it makes no reservations, and its answers are true only at the moment of the answer.
    pub(crate) async fn settled(&self) {
        let uid = self.create_by_hand(&pod("settled"));
        assert_eq!(self.bind_known("settled", &uid, "n1").await, "");
        self.delete("settled");
        self.gone("settled").await;
    }

    /// Return the pod's current object, or Null if the pod is gone.
    pub(crate) fn pod(&self, name: &str) -> Value {
        self.api().get("pods", "default", name).unwrap_or(Value::Null)
    }

    pub(crate) fn is_bound(&self, name: &str) -> bool {
        self.pod(name)["spec"]["nodeName"].is_string()
    }

    /// Return the pod's allocation from its annotation.
    pub(crate) fn allocation(&self, name: &str) -> Option<Allocation> {
        let pod = self.pod(name);
        let text = pod["metadata"]["annotations"][names::ALLOCATION].as_str()?;
        Some(Allocation::parse(text).expect("a legal allocation"))
    }

    /// Return the index of the pod's only GPU, according to its allocation.
    pub(crate) fn gpu_of(&self, name: &str) -> usize {
        let allocation = self.allocation(name).expect("an allocation");
        let pod = self.pod(name);
        let node = pod["spec"]["nodeName"].as_str().expect("bound");
        let machine = self.cluster.machines().node(node).expect("a machine");
        let [share] = allocation.gpus.as_slice() else {
            panic!("one GPU expected: {allocation:?}");
        };
        (0..machine.gpus.len())
            .find(|index| machine.gpu_uuid(*index) == share.uuid)
            .expect("a GPU of its node")
    }

    /// Return the latest run of a container.
    pub(crate) fn container(&self, uid: &str, name: &str) -> Option<ContainerView> {
        let containers = self.nodes.iter().flat_map(|node| self.node(node).containers());
        containers
            .filter(|view| view.pod_uid == uid && view.container == name)
            .max_by_key(|view| (view.attempt, view.started_at))
    }

    pub(crate) fn runs(&self, uid: &str, name: &str) -> bool {
        self.container(uid, name).is_some_and(|view| view.is_running())
    }

    /// Return the number of containers of a pod that ever ran. Each restart counts.
    pub(crate) fn ever_ran(&self, uid: &str) -> usize {
        self.record().runs.values().filter(|(_, view)| view.pod_uid == uid).count()
    }

    /// Wait until the pod and all its app containers run. Return the containers in order.
    pub(crate) async fn running(&self, name: &str) -> Vec<ContainerView> {
        self.until(&format!("pod {name} to run"), async |bed: &Bed| {
            let pod = bed.pod(name);
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
            if pod["status"]["phase"] != "Running" {
                return Err(pod["status"].to_string());
            }
            let containers = pod["spec"]["containers"].as_array().cloned().unwrap_or_default();
            let views = containers.iter().map(|container| {
                let view = bed.container(uid, container["name"].as_str().unwrap_or_default());
                view.filter(ContainerView::is_running)
                    .ok_or_else(|| format!("{} does not run", container["name"]))
            });
            views.collect::<Result<Vec<_>, _>>()
        })
        .await
    }

    /// Wait for an event of a pod with this reason and with a message that contains `part`.
    pub(crate) async fn event(&self, pod: &str, reason: &str, part: &str) -> String {
        self.until(&format!("event {reason} about {pod} with {part:?}"), async |bed: &Bed| {
            let events = bed.api().list("events", "default").map_err(|error| error.message)?;
            let of_pod = events.iter().filter(|event| event["involvedObject"]["name"] == pod);
            let told: Vec<(String, String)> = of_pod
                .map(|event| {
                    let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
                    (text("reason"), text("message"))
                })
                .collect();
            let found = told.iter().find(|(is, text)| is == reason && text.contains(part));
            found.map(|(_, text)| text.clone()).ok_or_else(|| format!("{told:#?}"))
        })
        .await
    }

    /// Wait until the start of one of the pod's containers is refused with a message that contains `part`, and return the
    /// message.
    pub(crate) async fn start_refused(&self, pod: &str, part: &str) -> String {
        self.until(&format!("a refused start of {pod} with {part:?}"), async |bed: &Bed| {
            let refused = bed.refused_starts(pod);
            let found = refused.iter().find(|text| text.contains(part));
            found
                .cloned()
                .ok_or_else(|| format!("{refused:#?}, {}", bed.pod(pod)["status"]))
        })
        .await
    }

    pub(crate) fn refused_starts(&self, pod: &str) -> Vec<String> {
        let record = self.record();
        let of_pod = record.refused_starts.iter().filter(|(name, ..)| name == pod);
        of_pod.map(|(_, _, text)| text.clone()).collect()
    }

    /// Return the pods that the kubelet refused at admission: name, reason, message.
    pub(crate) fn refused_pods(&self) -> Vec<(String, String, String)> {
        self.record().refused_pods.clone()
    }

    pub(crate) fn delete(&self, name: &str) {
        self.delete_within(name, None);
    }

    /// Delete a pod as `kubectl delete --force --grace-period=0` does.
    pub(crate) fn force_delete(&self, name: &str) {
        self.delete_within(name, Some(0));
    }

    fn delete_within(&self, name: &str, grace_period_s: Option<i64>) {
        let options = DeleteOptions {
            grace_period_s,
            ..DeleteOptions::default()
        };
        self.api()
            .delete("pods", "default", name, &options)
            .expect("the pod was there");
    }

    pub(crate) async fn gone(&self, name: &str) {
        self.until(&format!("pod {name} to be gone"), async |bed: &Bed| match bed.pod(name) {
            Value::Null => Ok(()),
            pod => Err(pod["status"].to_string()),
        })
        .await;
    }

    pub(crate) async fn bound(&self, name: &str) {
        self.until(&format!("pod {name} to be bound"), async |bed: &Bed| {
            if bed.is_bound(name) {
                Ok(())
            } else {
                Err(bed.pod(name)["status"].to_string())
            }
        })
        .await;
    }

    pub(crate) async fn phase(&self, name: &str, phase: &str) -> Value {
        self.until(&format!("pod {name} to be {phase}"), async |bed: &Bed| {
            let pod = bed.pod(name);
            if pod["status"]["phase"] == phase {
                return Ok(pod);
            }
            Err(pod["status"].to_string())
        })
        .await
    }

    /// Wait until the extender refuses a node for a pod with a message that contains `part`. Return the scheduler's message.
    pub(crate) async fn unschedulable(&self, name: &str, part: &str) -> String {
        self.until(&format!("pod {name} to be unschedulable, {part:?}"), async |bed: &Bed| {
            let pod = bed.pod(name);
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let messages = conditions.iter().filter_map(|condition| condition["message"].as_str());
            let found = messages.map(str::to_owned).find(|text| text.contains(part));
            found.ok_or_else(|| pod["status"].to_string())
        })
        .await
    }

    /// Return the device ids of `aliyun.com/gpu-mem` that the kubelet has allocated to a pod, by container.
    pub(crate) fn ids(&self, node: &str, uid: &str) -> BTreeMap<String, BTreeSet<String>> {
        let holders = self.node(node).device_manager().holders;
        let of_pod = holders
            .into_iter()
            .filter(|(holder, _)| holder.pod == uid && holder.resource == names::GPU_MEM);
        of_pod.map(|(holder, ids)| (holder.container, ids)).collect()
    }

    /// Wait until the kubelet has allocated devices to `containers` of the pod's containers.
    pub(crate) async fn admitted(&self, node: &str, uid: &str, containers: usize) {
        self.until(
            &format!("{containers} containers of {uid} to have devices"),
            async |bed: &Bed| match bed.ids(node, uid).len() {
                has if has >= containers => Ok(()),
                has => Err(format!("{has}; refused: {:?}", bed.refused_pods())),
            },
        )
        .await;
    }

    /// Return the file names of the records on a node: `<pod uid>_<container>.json`.
    pub(crate) fn grants(&self, node: &str) -> BTreeSet<String> {
        files(&self.node(node).paths().root.join("state/grants"))
    }

    /// Return the file names of the grants' CDI specs on a node.
    pub(crate) fn specs(&self, node: &str) -> BTreeSet<String> {
        let mut specs = files(&self.node(node).paths().cdi_dir);
        specs.retain(|name| name.starts_with("divvy.dev-grant_"));
        specs
    }

    pub(crate) fn has_grant(&self, node: &str, uid: &str) -> bool {
        self.grants(node).iter().any(|name| name.starts_with(uid))
    }

    /// Return the inventory from the node's annotation.
    pub(crate) fn inventory(&self, node: &str) -> Inventory {
        let object = self.api().get("nodes", "", node).expect("the node's object");
        let text = object["metadata"]["annotations"][names::INVENTORY]
            .as_str()
            .expect("an inventory");
        Inventory::parse(text).expect("a legal inventory")
    }

    /// Return the memory in MiB that containers of departed pods hold, according to the node's annotation.
    pub(crate) fn held_mib(&self, node: &str) -> u64 {
        self.inventory(node).gpus.iter().map(|gpu| gpu.held.0).sum()
    }

    /// Wait until the node's annotation says that containers of departed pods hold this many MiB.
    pub(crate) async fn held(&self, node: &str, mib: u64) {
        self.until("the inventory to say what is held", async |bed: &Bed| {
            match bed.held_mib(node) {
                held if held == mib => Ok(()),
                held => Err(format!("{held} MiB")),
            }
        })
        .await;
    }

    /// Wait until the container `main` of a pod has ended. Panic if `is_taken` says that its memory is in use before.
    pub(crate) async fn ends_before(&self, uid: &str, is_taken: impl Fn(&Bed) -> bool) {
        self.until("the old container to end", async |bed: &Bed| {
            // Look in this order: if the memory is taken and the old container runs after that, it was taken too early.
            let early = is_taken(bed);
            match bed.runs(uid, "main") {
                true if early => panic!("the memory was taken while the old container ran"),
                true => Err("it runs".to_owned()),
                false => Ok(()),
            }
        })
        .await;
    }

    /// Freeze a node's agent if `frozen`. If not, let it continue.
    pub(crate) fn freeze(&self, node: &str, frozen: bool) {
        let pid = self.cluster.agent_pid(node).and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).expect("the agent runs");
        let signal = if frozen { Signal::STOP } else { Signal::CONT };
        kill_process(pid, signal).expect("the agent runs");
    }

    /// Kill a node's agent, start it again, and wait until it has registered.
    pub(crate) async fn restart_agent(&mut self, node: &str) {
        self.cluster.kill_agent(node).await.expect("killed");
        // Until the kubelet has noticed, its devices look as if the new agent had registered.
        self.until("the kubelet to notice that the agent is gone", async |bed: &Bed| {
            let resources = bed.node(node).device_manager().resources;
            match resources.get(names::GPU_MEM) {
                Some((_, healthy @ 1..)) => Err(format!("{healthy} devices")),
                _ => Ok(()),
            }
        })
        .await;
        self.cluster.start_agent(node).await.expect("started");
        self.registered(node).await;
    }

    /// Wait until the kubelet knows the agent's devices.
    pub(crate) async fn registered(&self, node: &str) {
        let units = usize::try_from(self.units(node)).expect("few");
        self.until("the agent to have registered", async |bed: &Bed| {
            let resources = bed.node(node).device_manager().resources;
            match resources.get(names::GPU_MEM) {
                Some((capacity, healthy)) if *capacity == units && *healthy == units => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }

    /// Cut a node's agent off from changes of pods: its watch breaks, and its lists hang.
    pub(crate) async fn cut_off_agent(&self, node: &str) -> CutOff {
        let faults = self.api().faults();
        let of_agent = || Match::any().resource("pods").client(&format!("agent-{node}"));
        let watch = faults.add(FaultRule::new(of_agent().verb("watch"), Effect::Hang));
        let reads = faults.add(FaultRule::new(of_agent().verb("list").verb("get"), Effect::Hang));
        faults.cut_watches();
        let cut = CutOff {
            watch,
            rules: vec![watch, reads],
        };
        self.until("the agent to be cut off", async |bed: &Bed| {
            match bed.api().faults().fired(watch) {
                0 => Err("its watch is still open".to_owned()),
                _ => Ok(()),
            }
        })
        .await;
        cut
    }

    /// Wait until every pod, container, grant, spec, and reservation is gone.
    async fn all_free(&self) {
        self.until("everything to be free", async |bed: &Bed| {
            let pods = bed.api().list("pods", "").map_err(|error| error.message)?;
            if !pods.is_empty() {
                let names: Vec<String> = pods.iter().map(|pod| pod["metadata"]["name"].to_string()).collect();
                return Err(format!("pods {}", names.join(" ")));
            }
            for node in &bed.nodes {
                let (grants, specs, held) = (bed.grants(node), bed.specs(node), bed.held_mib(node));
                let used = bed.inspect(node).await["usedGPU"].clone();
                let running = bed.node(node).containers().iter().filter(|view| view.is_running()).count();
                if !grants.is_empty() || !specs.is_empty() || held != 0 || used != 0 || running != 0 {
                    return Err(format!(
                        "on {node}: {running} containers, grants {grants:?}, specs {specs:?}, {held} MiB held, {used} units used"
                    ));
                }
            }
            Ok(())
        })
        .await;
    }

    /// Delete every pod, wait until all memory is free, audit the history, and end the cluster.
    pub(crate) async fn end(self) {
        for pod in self.api().list("pods", "").expect("a list") {
            let name = pod["metadata"]["name"].as_str().expect("a name");
            if pod["metadata"]["deletionTimestamp"].is_null() {
                self.delete(name);
            }
        }
        self.all_free().await;
        self.audit();
        self.cluster.shutdown().await;
    }

    /// Expect a finding with this id, because the test causes it.
    pub(crate) fn expect(&mut self, finding: &'static str) {
        self.expected.insert(finding);
    }

    /// Panic if a container ever ran on a wrong GPU, or a GPU was ever overcommitted.
    pub(crate) fn audit(&self) {
        let audited = self.record().audit(&self.api().history(), self.cluster.machines());
        let mut outcome = audited.unwrap_or_else(|error| panic!("{error:#}"));
        // The API server's history does not show when a container of a vanished pod ended, but the record knows it.
        outcome.findings.retain(|finding| finding.what.level() == FindingLevel::Fault);
        let found: Vec<String> = outcome
            .findings
            .iter()
            .filter(|finding| !self.expected.contains(&finding.what.id()))
            .map(|finding| format!("revision {:?}: {}: {}", finding.at.revision, finding.what.id(), finding.what))
            .collect();
        assert!(found.is_empty(), "{found:#?}");
        for id in &self.expected {
            assert!(
                outcome.findings.iter().any(|finding| finding.what.id() == *id),
                "the audit missed {id}"
            );
        }
    }
}

impl CutOff {
    /// Wait until a read of pods, other than the watch, hangs.
    pub(crate) async fn waited_for(&self, bed: &Bed) {
        let reads: Vec<RuleId> = self.rules.iter().copied().filter(|rule| *rule != self.watch).collect();
        bed.until("the agent to ask for pods", async |bed: &Bed| {
            let asked: u64 = reads.iter().map(|rule| bed.api().faults().fired(*rule)).sum();
            if asked > 0 { Ok(()) } else { Err("it did not".to_owned()) }
        })
        .await;
    }

    /// End the fault, so that the agent receives changes of pods again.
    pub(crate) fn heal(self, bed: &Bed) {
        for rule in self.rules {
            bed.api().faults().remove(rule);
        }
    }
}

fn files(directory: &std::path::Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).expect("the directory is there");
    entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect()
}
