//! Input of Divvy's own programs: configuration files, Secrets, reviews, traces, and the kubelet's calls.

use std::collections::BTreeMap;

use divvy::scheduler_config::merge::{ExtenderAddressSource, WantedSettings, merge};
use divvy::scheduler_config::{Stanza, Tls};
use divvy_agent::AgentSettings;
use divvy_extender::admission;
use divvy_extender::election::{Election, ElectionStep, LeaseRecord, Rules};
use divvy_extender::tls::make::carry_out;
use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, next_s, plan};
use divvy_kubelet::api::v1beta1;
use divvy_labels::{LabeledMachine, PciDevice, labels, pci_name};
use divvy_model::legacy::unhealthy_gpus;
use divvy_model::machine::Machines;
use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};
use divvy_simulator::{Order, Trace};
use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, TestedGpu};
use prost::Message;
use serde_json::Value;

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget::new("the agent's configuration", agent, &[AGENT]),
        FuzzTarget::new("NVIDIA's configuration", nvidia, &[NVIDIA]).refusing(&["version: v2"]),
        FuzzTarget::new("a description of machines", machines, &[divvy_testbed::scenario::BUILT_IN]),
        FuzzTarget::new("a review of a new pod", review, &[REVIEW]).refusing(&[OTHERS_REVIEW, NO_REVIEW]),
        FuzzTarget::new(
            "the Lease",
            lease,
            &["a_1@http://10.0.0.1:1 15 5 5 3\n 0 0 0 0\nb 2147483647 -9 -9 2147483647"],
        )
        .refusing(&["", "me 15 5 5 3"]),
        FuzzTarget {
            accepted: vec![secret()],
            ..FuzzTarget::new("the Secret with certificates", certificates, &[])
        },
        FuzzTarget::new("a trace and an order", trace, &[TRACE]),
        FuzzTarget::new("kube-scheduler's configuration", scheduler, &[SCHEDULER, OLD_SCHEDULER]),
        FuzzTarget {
            accepted: smoke_reports(),
            ..FuzzTarget::new("a report of divvy-smoke", smoke_report, &[])
        }
        .refusing(&["{}", "{\"version\":\"9.9.9\",\"steps\":[],\"result\":\"PASS\"}"]),
        FuzzTarget::new("the unhealthy GPUs in a ConfigMap", unhealthy, &["0,2", " 1 "]),
        FuzzTarget {
            accepted: vec![allocate()],
            ..FuzzTarget::new("the kubelet's messages", messages, &[])
        },
    ]
}

const AGENT: &str = "node-name = \"n1\"\nmemory-unit = \"256MiB\"\nreserve-memory = \"512MiB\"\nprobe = \"unix:/run/p.sock\"\nmetrics = \"127.0.0.1:9400\"\nhealth-recovery = \"2m\"\ndriver-root = \"/run/nvidia/driver\"\ndriver-spec = \"off\"\n";
const NVIDIA: &str = "version: v1\nflags:\n  migStrategy: mixed\n  plugin: {deviceListStrategy: [envvar, cdi-cri], passDeviceSpecs: true}\n  gfd: {sleepInterval: 1m30s}\nresources:\n  gpus: [{pattern: '*A100*', name: a100}, {pattern: '*', name: gpu}]\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    resources: [{name: a100, replicas: 2, devices: [0, '1', '0:2', GPU-1]}]\nimex: {channelIDs: [0]}\n";
const REVIEW: &str = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u-1","kind":{"group":"","version":"v1","kind":"Pod"},"operation":"CREATE","subResource":"","object":{"spec":{"schedulerName":"default-scheduler","containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"3"}}}]}}}}"#;
const OTHERS_REVIEW: &str = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u-1","kind":{"group":"","version":"v1","kind":"Pod"},"operation":"CREATE","subResource":"","object":{"spec":{"schedulerName":"another","containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"3"}}}]}}}}"#;
const NO_REVIEW: &str = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{}}"#;
const TRACE: &str = "sn,cpu_milli,memory_mib,gpu,model\nn-1,64000,262144,2,T4\nn-2,96000,524288,8,A100\n\u{1e}name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\np-1,1000,1024,1,500,T4|A100,0,9\np-2,1000,1024,2,1000,,5,7\n\u{1e}1 0\n7 3\n";
const SCHEDULER: &str = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n# why\nclientConnection:\n  kubeconfig: /etc/kubernetes/scheduler.conf\nprofiles:\n- schedulerName: default-scheduler\n  plugins: {score: {disabled: [{name: NodeResourcesFit}]}}\nextenders:\n- urlPrefix: http://127.0.0.1:32766/gpushare-scheduler\n  filterVerb: filter\n  managedResources: [{name: aliyun.com/gpu-mem}]\n- urlPrefix: https://other\n  httpTimeout: 5s\n  weight: 3\n";
const OLD_SCHEDULER: &str = "{\"apiVersion\": \"kubescheduler.config.k8s.io/v1beta2\", \"kind\": \"KubeSchedulerConfiguration\", \"percentageOfNodesToScore\": 50, \"leaderElection\": {\"leaderElect\": true}}";

/// Rules: the names in an accepted configuration are ones that Kubernetes accepts, and so are the values of the labels made from
/// it. The bytes also serve as the PCI configuration space of a virtual GPU, and as the database of PCI devices.
fn nvidia(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let invocation = Invocation::parse(NvidiaProgram::DevicePlugin, "1", &[], &Environment::new()).expect("no arguments");
    let Ok((config, _)) = invocation.config(Some(text)) else {
        return false;
    };
    let shared = config.sharing.resources.iter();
    let names = shared.flat_map(|shared| std::iter::once(&shared.name).chain(&shared.rename));
    let patterns = config.resources.gpus.iter().chain(&config.resources.mig);
    for name in names.chain(patterns.map(|pattern| &pattern.name)) {
        let is_name = name
            .split_once('/')
            .is_some_and(|(_, own)| own.len() <= 63 && !own.contains(char::is_whitespace));
        assert!(is_name, "{name}");
    }
    let machine = LabeledMachine {
        driver: "550.54".to_owned(),
        gpus: vec![divvy_labels::LabeledGpu {
            model: pci_name(text, 0x20b0).unwrap_or_default().to_owned(),
            ..divvy_labels::LabeledGpu::default()
        }],
        pci: vec![PciDevice { config: bytes.to_vec() }],
        ..LabeledMachine::default()
    };
    let found = labels(&machine, &config).map(|found| found.labels).unwrap_or_default();
    assert!(found.values().all(|value| value.len() <= 63), "{found:?}");
    true
}

/// Rule: an error names the file.
fn agent(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    match AgentSettings::parse("--config f.toml", text) {
        Ok(file) => {
            let flags = AgentSettings {
                node_name: Some("n".to_owned()),
                ..AgentSettings::default()
            };
            divvy_agent::AgentConfig::merged(flags, file).check().is_ok()
        }
        Err(error) => {
            assert!(error.to_string().starts_with("--config f.toml: "), "{error}");
            false
        }
    }
}

fn machines(bytes: &[u8]) -> bool {
    let Some(machines) = text(bytes).and_then(|text| Machines::parse(text).ok()) else {
        return false;
    };
    let mut uuids = std::collections::BTreeSet::new();
    for node in &machines.nodes {
        for index in 0..node.gpus.len() {
            assert!(uuids.insert(node.gpu_uuid(index)), "two GPUs of one UUID");
            let _ = (node.gpu_minor(index), node.gpu_pci(index));
        }
    }
    true
}

/// Rules: every pod is allowed, and the response names the review that it answers. Accepted: the pod is given to the scheduler.
fn review(bytes: &[u8]) -> bool {
    match admission::review(bytes, "divvy-scheduler") {
        Ok(answer) => {
            let said = serde_json::to_value(&answer).expect("JSON");
            // A value that the webhook ignores may be anything in quotes.
            if let Ok(asked) = serde_json::from_slice::<Value>(bytes) {
                assert_eq!(said["response"]["uid"], asked["request"]["uid"]);
            }
            assert_eq!(said["response"]["allowed"], true);
            assert_eq!(said["response"].get("patch").is_some(), answer.gives());
            answer.gives()
        }
        Err(why) => {
            assert!(!why.to_string().is_empty());
            false
        }
    }
}

/// The input is what other replicas write to the Lease, one after the other, a second apart. Rule: the replica waits exactly as
/// long as the Lease of another holder is valid, counted from the last change.
fn lease(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let rules = Rules::of(std::time::Duration::from_secs(15));
    let mut election = Election::new("me".to_owned(), rules);
    let mut before: Option<(LeaseRecord, u64)> = None;
    let mut waited = false;
    for (second, line) in (1_u64..).zip(text.lines().take(100)) {
        let mut words = line.split(' ');
        let holder = words.next().unwrap_or_default().to_owned();
        let mut number = || words.next().and_then(|word| word.parse::<i64>().ok()).unwrap_or_default();
        let short = |number: i64| i32::try_from(number).unwrap_or(i32::MAX);
        let record = LeaseRecord {
            holder,
            lease_s: short(number()),
            acquired_us: number(),
            renewed_us: number(),
            transitions: short(number()),
        };
        let now = second * 1_000_000_000;
        let since = match &before {
            Some((known, since)) if *known == record => *since,
            _ => now,
        };
        let step = election.read(Some((record.clone(), second.to_string())), now, 7);
        let others = !record.holder.is_empty() && record.holder != "me";
        assert!(
            !others || step == ElectionStep::Wait || now - since >= rules.lease_ns,
            "{record:?}: {step:?}"
        );
        assert!(others || step != ElectionStep::Wait, "{record:?}");
        waited |= step == ElectionStep::Wait;
        before = Some((record, since));
    }
    waited
}

const NOW_S: i64 = 1_800_000_000;

fn secret() -> Vec<u8> {
    let none = SecretData::new();
    let lifetimes = CertificateLifetimes::default();
    let all = plan(&none, "divvy", NOW_S, lifetimes).expect("a plan");
    let made = carry_out(&all, &none, "divvy", NOW_S, lifetimes).expect("made");
    let text: BTreeMap<_, _> = made.iter().map(|(key, value)| (key, text(value).expect("PEM"))).collect();
    serde_json::to_vec(&text).expect("JSON")
}

/// Rule: a Secret with foreign content is refused and not replaced.
fn certificates(bytes: &[u8]) -> bool {
    let Ok(said) = serde_json::from_slice::<BTreeMap<String, String>>(bytes) else {
        return false;
    };
    let data: SecretData = said.into_iter().map(|(key, value)| (key, value.into_bytes())).collect();
    let _ = next_s(&data, CertificateLifetimes::default());
    match plan(&data, "divvy", NOW_S, CertificateLifetimes::default()) {
        Ok(plan) => {
            let empty = data.values().all(Vec::is_empty);
            assert!(empty || plan.make.len() < 3 || plan.warning.is_some(), "{plan:?}");
            plan.make.is_empty() && plan.warning.is_none()
        }
        Err(why) => {
            assert!(!why.to_string().is_empty());
            false
        }
    }
}

/// The input has nodes, pods, and an order of the pods.
fn trace(bytes: &[u8]) -> bool {
    let mut parts = bytes.split(|byte| *byte == 0x1e);
    let (nodes, pods, order) = (
        parts.next(),
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    let Ok(trace) = Trace::read(nodes.unwrap_or_default(), pods) else {
        return false;
    };
    let whole: u64 = trace.nodes.iter().map(|node| u64::from(node.shape.gpus) * 1000).sum();
    assert_eq!(trace.capacity_milli(), whole);
    for pod in &trace.pods {
        let _ = pod.gpu_milli();
    }
    match Order::read(order, &trace) {
        Ok(order) => {
            assert!(order.arrivals.iter().all(|row| *row < trace.pods.len()) && order.ranks.len() == trace.nodes.len());
            if order.arrivals.len() < 100 && trace.nodes.len() < 20 {
                let name = divvy_policy::Policy::default();
                let _ = divvy_simulator::inflate(&trace, &order, name);
            }
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// Rule: merging a merged configuration again changes nothing, and the result has Divvy's extender once.
fn scheduler(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let url = "http://127.0.0.1:32766/gpushare-scheduler";
    let wanted = WantedSettings {
        stanza: Stanza::new(url, Tls::default()).expect("an extender"),
        address: ExtenderAddressSource::Flag,
        kubeconfig: None,
        default_kubeconfig: "/etc/kubernetes/scheduler.conf".to_owned(),
        profile: None,
    };
    let Ok(merged) = merge(text, "FILE", &wanted) else {
        return false;
    };
    let again = merge(&merged.text, "FILE", &wanted).expect("what was merged can be merged");
    assert_eq!(again.text, merged.text, "{:?}", again.notes);
    let read: Value = serde_saphyr::from_str(&merged.text).expect("YAML");
    let ours = read["extenders"].as_array().into_iter().flatten();
    assert_eq!(
        ours.filter(|extender| extender["urlPrefix"] == url).count(),
        1,
        "{}",
        merged.text
    );
    true
}

fn unhealthy(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let found = unhealthy_gpus(text);
    let written: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(unhealthy_gpus(&written.join(",")), found);
    !found.is_empty()
}

fn smoke_reports() -> Vec<Vec<u8>> {
    let gpu = TestedGpu {
        uuid: "GPU-00000000-0000-4000-8000-000000000000".to_owned(),
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: 80 << 30,
        ..TestedGpu::default()
    };
    let steps = vec![
        SmokeStep::pass(StepId::S02, "50000 sums compared", 200_000),
        SmokeStep::skip(StepId::S05, "the GPU is shared"),
        SmokeStep::warn(StepId::S06, "12 GB/s", "slow\tlinks", "look at the slot"),
        SmokeStep::fail(StepId::S03, "a wrong word", "wrong results", "drain the GPU"),
    ];
    let nothing = SmokeReport::new(None, Vec::new());
    let cut = SmokeReport {
        node: Some("n1".to_owned()),
        cut: 3,
        ..SmokeReport::new(Some(gpu), steps)
    };
    [nothing, cut].map(|report| report.json().into_bytes()).to_vec()
}

/// Rules: a report that is accepted is read back as it was after it was written, and its text moves no terminal's cursor.
fn smoke_report(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    match SmokeReport::read(text) {
        Ok(report) => {
            assert_eq!(SmokeReport::read(&report.json()).as_ref(), Ok(&report));
            let shown = report.text();
            assert!(shown.chars().all(|c| c == '\n' || !c.is_control()), "{shown:?}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

fn allocate() -> Vec<u8> {
    let ids = vec!["GPU-0::m0".to_owned(), "GPU-0::m1".to_owned()];
    let container_requests = vec![v1beta1::ContainerAllocateRequest { devices_ids: ids }];
    v1beta1::AllocateRequest { container_requests }.encode_to_vec()
}

/// Decode the requests of the kubelet as tonic does.
fn messages(bytes: &[u8]) -> bool {
    v1beta1::AllocateRequest::decode(bytes).is_ok()
        | v1beta1::PreferredAllocationRequest::decode(bytes).is_ok()
        | v1beta1::PreStartContainerRequest::decode(bytes).is_ok()
}
