//! What comes from the cluster: annotations, objects of the API server, kubectl's output, the requests of kube-scheduler.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use divvy_cluster::objects::{NodeObject, PodObject};
use divvy_cluster::{convert, dump};
use divvy_extender::{Served, Settings, serve};
use divvy_model::{Allocation, DeviceId, GpuRules, GrantRecord, Held, Inventory, MemoryUnit, MiB, names};
use divvy_testbed::api::{ApiServer, Options, PatchKind};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt;

use super::{Target, text};

pub(crate) fn targets() -> Vec<Target> {
    let mut targets = vec![
        Target::new("a node's inventory", inventory, &[INVENTORY]),
        Target::new("a pod's allocation", allocation, &[ALLOCATION]),
        Target::new("a grant's record", record, &[RECORD]),
        Target::new("a pod's annotations", annotations, &[ANNOTATIONS, GPUSHARE]),
        Target::new(
            "a device's id or an amount",
            words,
            &["GPU-0::m17", "GPU-0::c", "16GiB", "1048576", "2Gi"],
        ),
        Target::new("a pod", pod, &[POD]),
        Target::new("a node", node, &[NODE]),
        Target::new("kubectl's output", output, &[OUTPUT]),
    ];
    for (verb, good) in [("filter", ASK), ("prioritize", ASK), ("bind", BIND), ("preempt", PREEMPT)] {
        let asked = Asked::new(verb);
        targets.push(Target::new(asked.what, move |bytes| asked.read(bytes), &[good]));
    }
    targets
}

const INVENTORY: &str = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[{"index":0,"uuid":"GPU-0","minor":0,"model":"T4","totalMiB":15360,"units":15,"health":"ok","heldMiB":1024,"links":[["GPU-1","nvlink",12]]},{"index":1,"uuid":"GPU-1","minor":1,"model":"T4","totalMiB":15360,"units":15,"health":"failed"}]}"#;
const ALLOCATION: &str =
    r#"{"v":1,"gpus":[{"uuid":"GPU-0","memMiB":4096,"cores":30}],"containers":{"c":[{"uuid":"GPU-0","memMiB":2048}]}}"#;
const RECORD: &str = r#"{"v":1,"namespace":"d","name":"p","uid":"0f-1","container":"c","cdi":"0123456789abcdef0123456789abcdef","unitMiB":1024,"gpus":[{"uuid":"GPU-0","memMiB":4096,"cores":30}],"containerGpus":[{"uuid":"GPU-0","memMiB":2048}],"bootId":"b"}"#;
const ANNOTATIONS: &str = r#"{"divvy.dev/allocation":"{\"v\":1,\"gpus\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}]}","divvy.dev/gpu-model":"T4,A100","divvy.dev/gpu-memory":">=16GiB","divvy.dev/gpu-prefer":"large"}"#;
const GPUSHARE: &str = r#"{"ALIYUN_COM_GPU_MEM_IDX":"0","ALIYUN_COM_GPU_MEM_POD":"4","ALIYUN_COM_GPU_MEM_DEV":"15","scheduler.framework.gpushare.allocation":"{\"c\":{\"0\":4}}"}"#;
const POD: &str = r#"{"metadata":{"name":"p","namespace":"d","uid":"u","annotations":{"a":"b"}},"spec":{"nodeName":"n","priority":5,"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"4","cpu":"1500m","memory":"1Gi"}}}],"initContainers":[{"name":"i","restartPolicy":"Always"}],"overhead":{"cpu":"10m"}},"status":{"phase":"Running","containerStatuses":[{"name":"c","state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}]}}"#;
const NODE: &str = r#"{"metadata":{"name":"n","uid":"u","annotations":{"divvy.dev/inventory":"{}"}},"spec":{"unschedulable":true},"status":{"capacity":{"aliyun.com/gpu-mem":"32","aliyun.com/gpu-count":"2","cpu":"64","memory":"256Gi"},"allocatable":{"cpu":"63500m"},"addresses":[{"type":"InternalIP","address":"10.0.0.1"}]}}"#;
const OUTPUT: &str = r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Node","metadata":{"name":"n"},"spec":{}},{"kind":"Pod","metadata":{"name":"p"},"spec":{"containers":[]}}]}{"kind":"PodList","items":[{"metadata":{"name":"q"},"spec":{"containers":[]}}]}"#;
const ASK: &str = r#"{"Pod":{"metadata":{"name":"p","namespace":"default","uid":"u"},"spec":{"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"4"}}}]}},"Nodes":null,"NodeNames":["n1","n2"]}"#;
const BIND: &str = r#"{"PodName":"p","PodNamespace":"default","PodUID":"u","Node":"n1"}"#;
const PREEMPT: &str = r#"{"Pod":{"metadata":{"name":"p","namespace":"default","uid":"u"},"spec":{"priority":9,"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"4"}}}]}},"NodeNameToVictims":{"n1":{"Pods":[{"metadata":{"uid":"v","name":"v"}}],"NumPDBViolations":0}},"NodeNameToMetaVictims":{"n1":{"Pods":[{"UID":"v"}],"NumPDBViolations":1}}}"#;

/// What can be read is printed so that the same is read, and promises no more than there is.
fn inventory(bytes: &[u8]) -> bool {
    let Some(inventory) = text(bytes).and_then(|text| Inventory::parse(text).ok()) else {
        return false;
    };
    assert_eq!(Inventory::parse(&inventory.to_json()).as_ref(), Ok(&inventory));
    for gpu in &inventory.gpus {
        assert!(inventory.unit.memory(gpu.units).is_some_and(|offered| offered <= gpu.total));
    }
    true
}

fn allocation(bytes: &[u8]) -> bool {
    let Some(allocation) = text(bytes).and_then(|text| Allocation::parse(text).ok()) else {
        return false;
    };
    assert_eq!(Allocation::parse(&allocation.to_json()).as_ref(), Ok(&allocation));
    true
}

/// Its file's name never leads out of its folder.
fn record(bytes: &[u8]) -> bool {
    let Some(record) = text(bytes).and_then(|text| GrantRecord::parse(text).ok()) else {
        return false;
    };
    assert_eq!(GrantRecord::parse(&record.to_json()).as_ref(), Ok(&record));
    let name = record.file_name();
    assert!(!name.contains('/') && !name.starts_with('.'), "{name}");
    true
}

fn annotations(bytes: &[u8]) -> bool {
    let Ok(annotations) = serde_json::from_slice::<BTreeMap<String, String>>(bytes) else {
        return false;
    };
    let ours = annotations
        .get(names::ALLOCATION)
        .is_some_and(|text| Allocation::parse(text).is_ok());
    assert_eq!(matches!(Held::from_annotations(&annotations), Held::Allocation(_)), ours);
    let _ = GpuRules::from_annotations(&annotations);
    true
}

fn words(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let id = text.parse::<DeviceId>();
    if let Ok(id) = &id {
        assert_eq!(id.to_string().parse::<DeviceId>().as_ref(), Ok(id));
    }
    let unit = text.parse::<MemoryUnit>();
    if let Ok(unit) = &unit {
        assert_eq!(unit.to_string().parse::<MemoryUnit>().as_ref(), Ok(unit));
    }
    let value = divvy_model::quantity_value(text);
    if let (Ok(value), Ok(milli)) = (&value, divvy_model::quantity_milli(text)) {
        assert!(
            milli >= *value || milli == u64::MAX,
            "{text}: {value} and {milli} thousandths"
        );
    }
    id.is_ok() | unit.is_ok() | value.is_ok() | text.parse::<MiB>().is_ok()
}

fn pod(bytes: &[u8]) -> bool {
    let Ok(object) = serde_json::from_slice::<PodObject>(bytes) else {
        return false;
    };
    convert::pod(&object).is_ok()
}

fn node(bytes: &[u8]) -> bool {
    let Ok(object) = serde_json::from_slice::<NodeObject>(bytes) else {
        return false;
    };
    convert::node(&object);
    true
}

fn output(bytes: &[u8]) -> bool {
    dump::read(bytes).is_ok()
}

/// A verb of an extender that knows two nodes.
struct Asked {
    what: &'static str,
    path: String,
    // Made in the thread that asks.
    extender: OnceCell<Extender>,
}

struct Extender {
    runtime: Runtime,
    served: Served,
    _api: ApiServer,
    _stop: DropGuard,
}

impl Asked {
    fn new(verb: &str) -> Asked {
        Asked {
            what: match verb {
                "filter" => "kube-scheduler's filter",
                "prioritize" => "kube-scheduler's prioritize",
                "bind" => "kube-scheduler's bind",
                _ => "kube-scheduler's preempt",
            },
            path: format!("/gpushare-scheduler/{verb}"),
            extender: OnceCell::new(),
        }
    }

    /// Whatever is asked is answered, in JSON.
    fn read(&self, bytes: &[u8]) -> bool {
        let extender = self.extender.get_or_init(Extender::start);
        let (status, text) = extender.ask("POST", &self.path, bytes);
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        assert!(
            matches!(
                status,
                StatusCode::OK | StatusCode::BAD_REQUEST | StatusCode::SERVICE_UNAVAILABLE
            ),
            "{status}: {answer}"
        );
        status == StatusCode::OK
    }
}

impl Extender {
    fn start() -> Extender {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let entered = runtime.enter();
        let api = ApiServer::new(Options {
            seed: Some(1),
            ..Options::default()
        });
        for name in ["n1", "n2"] {
            let amounts = json!({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"});
            let status = json!({"status": {"capacity": amounts, "allocatable": amounts}});
            api.create("nodes", json!({"metadata": {"name": name}})).expect("a node");
            api.patch("nodes/status", "", name, PatchKind::Merge, &status)
                .expect("a status");
        }
        let stop = CancellationToken::new();
        let served = serve(api.client(), Settings::new(MemoryUnit::GIB), stop.clone());
        drop(entered);
        let extender = Extender {
            runtime,
            served,
            _api: api,
            _stop: stop.drop_guard(),
        };
        while extender.ask("GET", "/readyz", b"").0 != StatusCode::OK {
            extender
                .runtime
                .block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        }
        extender
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> (StatusCode, String) {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_vec()));
        let router = self.served.router.clone();
        self.runtime.block_on(async {
            let response = router
                .oneshot(request.expect("a request"))
                .await
                .expect("a router cannot fail");
            let status = response.status();
            let bytes = response.into_body().collect().await.expect("a body").to_bytes();
            (status, String::from_utf8(bytes.to_vec()).expect("UTF-8"))
        })
    }
}
