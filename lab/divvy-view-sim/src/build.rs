//! Machines, and the pods on them.

use std::collections::BTreeMap;

use divvy_model::usage::{ContainerUsage, EscapeKind, GpuUsage, Usage};
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, GpuShare, Health, Held, Inventory, MiB, Node, Partition, Pod, PodRequest,
    Vendor, WholeContainer, WholeKind, WholeRequest,
};
use divvy_view::NoUsage;

const MIB: u64 = 1 << 20;

/// A node with its GPUs and its pods.
#[derive(Debug, Clone)]
pub struct ViewSimNode {
    /// The node's name.
    pub name: String,
    gpus: Vec<ViewSimGpu>,
    /// The GPUs of which some of `gpus` are parts.
    divided: Vec<ViewSimGpu>,
    pods: Vec<ViewSimShare>,
    trouble: Option<String>,
    silent: Option<String>,
    measured: bool,
}

#[derive(Debug, Clone)]
struct ViewSimGpu {
    uuid: String,
    index: u32,
    model: String,
    gib: u64,
    health: Health,
    reason: Option<String>,
    parent: Option<Partition>,
    held: u64,
    watts: u64,
}

/// A pod's share of a GPU.
#[derive(Debug, Clone)]
pub struct ViewSimShare {
    namespace: String,
    name: String,
    gpu: usize,
    gib: u64,
    whole: bool,
    used: u64,
    busy: u32,
    escapes: Vec<EscapeKind>,
    denied: Option<u64>,
}

impl ViewSimShare {
    /// A pod with so many GiB of the GPU at this position.
    pub fn new(namespace: &str, name: &str, gpu: usize, gib: u64) -> ViewSimShare {
        ViewSimShare {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            gpu,
            gib,
            whole: false,
            used: 0,
            busy: 0,
            escapes: Vec::new(),
            denied: None,
        }
    }

    /// A pod that has the whole GPU.
    pub fn whole(namespace: &str, name: &str, gpu: usize) -> ViewSimShare {
        ViewSimShare {
            whole: true,
            ..ViewSimShare::new(namespace, name, gpu, 0)
        }
    }

    /// What it uses: MiB, and percent of the time.
    #[must_use]
    pub fn uses(self, mib: u64, busy: u64) -> ViewSimShare {
        ViewSimShare {
            used: mib,
            busy: u32::try_from(busy.min(100)).unwrap_or(100),
            ..self
        }
    }

    /// It uses more than its share, and does so in a way that the agent has noticed.
    #[must_use]
    pub fn escapes(self, kind: EscapeKind, denied: u64) -> ViewSimShare {
        ViewSimShare {
            escapes: vec![kind],
            denied: Some(denied),
            ..self
        }
    }

    fn uid(&self) -> String {
        format!("uid-{}-{}", self.namespace, self.name)
    }
}

impl ViewSimNode {
    /// A machine with equal GPUs.
    pub fn new(name: impl Into<String>, model: &str, gib: u64, gpus: u32) -> ViewSimNode {
        let name = name.into();
        let gpu = |index: u32| ViewSimGpu {
            uuid: format!("GPU-{name}-{index}"),
            index,
            model: model.to_owned(),
            gib,
            health: Health::Ok,
            reason: None,
            parent: None,
            held: 0,
            watts: 60 + u64::from(index) * 3,
        };
        ViewSimNode {
            gpus: (0..gpus).map(gpu).collect(),
            divided: Vec::new(),
            name,
            pods: Vec::new(),
            trouble: None,
            silent: None,
            measured: true,
        }
    }

    /// Divide the GPU at this position into MIG devices: `(profile, GiB)`.
    #[must_use]
    pub fn divided(mut self, at: usize, parts: &[(&str, u64)]) -> ViewSimNode {
        let mut whole = self.gpus.remove(at);
        whole.gib = parts.iter().map(|(_, gib)| gib).sum();
        let part = |(number, (profile, gib)): (usize, &(&str, u64))| ViewSimGpu {
            uuid: format!("MIG-{}-{number}", whole.uuid),
            index: (whole.index + 1) * 100 + u32::try_from(number).unwrap_or(0),
            model: format!("{} MIG {profile}", whole.model),
            gib: *gib,
            parent: Some(Partition {
                parent: whole.uuid.clone(),
                profile: (*profile).to_owned(),
            }),
            ..whole.clone()
        };
        let parts: Vec<ViewSimGpu> = parts.iter().enumerate().map(part).collect();
        self.gpus.splice(at..at, parts);
        self.divided.push(whole);
        self
    }

    /// The GPU at this position does not work.
    #[must_use]
    pub fn broken(mut self, at: usize, health: Health, reason: &str) -> ViewSimNode {
        self.gpus[at].health = health;
        self.gpus[at].reason = Some(reason.to_owned());
        self
    }

    /// Pods that have ended still hold so many MiB of the GPU at this position.
    #[must_use]
    pub fn held(mut self, at: usize, mib: u64) -> ViewSimNode {
        self.gpus[at].held = mib;
        self
    }

    /// Containers get no driver libraries.
    #[must_use]
    pub fn trouble(self, text: &str) -> ViewSimNode {
        ViewSimNode {
            trouble: Some(text.to_owned()),
            ..self
        }
    }

    /// The agent gives no answer.
    #[must_use]
    pub fn silent(self, why: &str) -> ViewSimNode {
        ViewSimNode {
            silent: Some(why.to_owned()),
            ..self
        }
    }

    /// The agent was not asked.
    #[must_use]
    pub fn not_asked(self) -> ViewSimNode {
        ViewSimNode { measured: false, ..self }
    }

    /// Add a pod.
    #[must_use]
    pub fn pod(mut self, pod: ViewSimShare) -> ViewSimNode {
        self.pods.push(pod);
        self
    }

    pub(crate) fn node(&self) -> Node {
        let gpu = r#"{"uuid":"GPU","index":0,"minor":0,"model":"","totalMiB":0,"units":0,"health":"ok"}"#;
        let text = format!(r#"{{"v":1,"agent":"0.1.0","driver":"570.86.15","unitMiB":1024,"gpus":[{gpu}]}}"#);
        let mut inventory = Inventory::parse(&text).expect("an inventory");
        let template = inventory.gpus.remove(0);
        inventory.gpus = self
            .gpus
            .iter()
            .map(|gpu| divvy_model::Gpu {
                uuid: gpu.uuid.clone(),
                index: gpu.index,
                model: gpu.model.clone(),
                total: MiB(gpu.gib * 1024),
                units: gpu.gib,
                partition: gpu.parent.clone(),
                whole: Some(WholeKind::Gpu(Vendor::Nvidia)).filter(|_| self.pods.iter().any(|pod| pod.whole)),
                health: gpu.health,
                reason: gpu.reason.clone(),
                held: MiB(gpu.held),
                ..template.clone()
            })
            .collect();
        inventory.driver_trouble.clone_from(&self.trouble);
        let units = self.gpus.iter().map(|gpu| gpu.gib).sum();
        Node {
            name: self.name.clone(),
            capacity_units: units,
            allocatable_units: units,
            allocatable_gpus: self.gpus.len() as u64,
            inventory: Some(Ok(inventory)),
            ..Node::default()
        }
    }

    pub(crate) fn pods(&self) -> impl Iterator<Item = Pod> {
        self.pods.iter().map(|pod| {
            let gpu = &self.gpus[pod.gpu];
            let share = GpuShare {
                uuid: gpu.uuid.clone(),
                memory: MiB(if pod.whole { gpu.gib } else { pod.gib } * 1024),
                cores: 0,
                whole: pod.whole,
                enforcement: None,
            };
            let container = ContainerRequest {
                name: "main".to_owned(),
                kind: ContainerKind::App,
                units: pod.gib,
                gpu_count: 0,
            };
            let whole = WholeRequest {
                kind: WholeKind::Gpu(Vendor::Nvidia),
                containers: vec![WholeContainer {
                    name: "main".to_owned(),
                    kind: ContainerKind::App,
                    gpus: 1,
                }],
            };
            Pod {
                uid: pod.uid(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                node: Some(self.name.clone()),
                held: Held::Allocation(Allocation {
                    v: 1,
                    gpus: vec![share],
                    containers: BTreeMap::new(),
                }),
                request: PodRequest {
                    containers: if pod.whole { Vec::new() } else { vec![container] },
                    whole: pod.whole.then(|| Box::new(whole)),
                    ..PodRequest::default()
                },
                ..Pod::default()
            }
        })
    }

    pub(crate) fn answer(&self, at: u64) -> Option<Result<Usage, NoUsage>> {
        if let Some(why) = &self.silent {
            return Some(Err(NoUsage::Other(why.clone())));
        }
        self.measured.then(|| Ok(self.usage(at)))
    }

    fn usage(&self, now: u64) -> Usage {
        let on = |at: usize| self.pods.iter().filter(move |pod| pod.gpu == at);
        let gpu = |(at, gpu): (usize, &ViewSimGpu)| GpuUsage {
            uuid: gpu.uuid.clone(),
            memory_bytes: Some(gpu.gib * 1024 * MIB),
            used_bytes: Some((450 + gpu.held + on(at).map(|pod| pod.used).sum::<u64>()) * MIB),
            busy_percent: Some(on(at).map(|pod| pod.busy).sum::<u32>().min(100)),
            ..GpuUsage::default()
        };
        let with_chip = |gpu: &ViewSimGpu, of: GpuUsage| {
            let busy = of.busy_percent.unwrap_or(0);
            GpuUsage {
                power_milliwatts: Some((gpu.watts + u64::from(busy) * 3) * 1000),
                temperature_celsius: Some(31 + busy * 4 / 10),
                sm_clock_mhz: Some(1410),
                ..of
            }
        };
        // NVML measures no GPU that has fallen off the bus.
        let mut gpus: Vec<GpuUsage> = Vec::new();
        for (at, of) in self.gpus.iter().enumerate().filter(|(_, of)| of.health == Health::Ok) {
            let measured = gpu((at, of));
            gpus.push(match of.parent {
                Some(_) => measured,
                None => with_chip(of, measured),
            });
        }
        for whole in &self.divided {
            let is_part = |gpu: &ViewSimGpu| gpu.parent.as_ref().is_some_and(|of| of.parent == whole.uuid);
            let parts: Vec<GpuUsage> = self.gpus.iter().enumerate().filter(|(_, of)| is_part(of)).map(gpu).collect();
            let busy: u32 = parts.iter().filter_map(|part| part.busy_percent).sum();
            let of = GpuUsage {
                uuid: whole.uuid.clone(),
                memory_bytes: Some(whole.gib * 1024 * MIB),
                used_bytes: Some(parts.iter().filter_map(|part| part.used_bytes).sum()),
                busy_percent: u32::try_from(parts.len()).ok().and_then(|count| busy.checked_div(count)),
                ..GpuUsage::default()
            };
            gpus.push(with_chip(whole, of));
        }
        // NVML measures how busy a MIG device of an H100 is, and not how busy each process keeps it.
        let busy = |pod: &ViewSimShare| Some(pod.busy).filter(|_| self.gpus[pod.gpu].parent.is_none());
        let container = |pod: &ViewSimShare| ContainerUsage {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            uid: pod.uid(),
            container: Some("main".to_owned()),
            gpu: self.gpus[pod.gpu].uuid.clone(),
            limit_bytes: Some(if pod.whole { self.gpus[pod.gpu].gib } else { pod.gib } * 1024 * MIB),
            used_bytes: Some(pod.used * MIB),
            peak_bytes: Some((pod.used + 900) * MIB),
            busy_percent: busy(pod),
            last_busy: busy(pod).map(|busy| if busy == 0 { now.saturating_sub(8000) } else { now }),
            denied: pod.denied,
            escapes: pod.escapes.iter().copied().collect(),
            ..ContainerUsage::default()
        };
        Usage {
            v: 1,
            sample: 1,
            gpus,
            containers: self.pods.iter().map(container).collect(),
        }
    }
}
