//! A node moves from the vendor's device plugin to Divvy's agent and back, while pods run.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_kubelet::plugin::{Answer, Device, DeviceNode, Options, Plugin, PluginServer, Refusal, Settings, Status};
use divvy_testbed::builders::{PodBuilder, pod};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::bed::Bed;

const RESOURCE: &str = "nvidia.com/gpu";

/// A device plugin that offers whole GPUs as NVIDIA's does, with device nodes.
struct Theirs {
    /// The minor number of each GPU, by UUID.
    gpus: BTreeMap<String, usize>,
    devices: watch::Sender<Arc<Vec<Device>>>,
}

impl Theirs {
    /// Run the plugin on a node until the token is cancelled.
    fn start(bed: &Bed, node: &str) -> CancellationToken {
        let directory = bed.node(node).paths().kubelet_dir.join("device-plugins");
        let uuids = bed.uuids(node);
        let devices = uuids.iter().map(|uuid| Device {
            id: uuid.clone(),
            healthy: true,
            numa: None,
        });
        let plugin = Theirs {
            devices: watch::Sender::new(Arc::new(devices.collect())),
            gpus: uuids.into_iter().zip(0..).collect(),
        };
        let (settings, stop) = (Settings::new(directory, "nvidia-gpu"), CancellationToken::new());
        let status = watch::Sender::new(Status::default());
        tokio::spawn(PluginServer::run(Arc::new(plugin), settings, stop.clone(), status));
        stop
    }
}

impl Plugin for Theirs {
    fn resource_name(&self) -> &str {
        RESOURCE
    }

    fn options(&self) -> Options {
        Options::default()
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<Device>>> {
        self.devices.subscribe()
    }

    fn allocate(&self, ids: &[String]) -> Result<Answer, Refusal> {
        let node = |id: &String| format!("/dev/nvidia{}", self.gpus[id]);
        Ok(Answer {
            devices: ids
                .iter()
                .map(|id| DeviceNode {
                    container_path: node(id),
                    host_path: node(id),
                    permissions: "rw".to_owned(),
                })
                .collect(),
            ..Answer::default()
        })
    }
}

fn whole(name: &str) -> PodBuilder {
    pod(name).limit(RESOURCE, "1")
}

/// Return the GPUs that a running pod's container sees.
async fn gpus(bed: &Bed, name: &str) -> Vec<String> {
    let containers = bed.running(name).await;
    let devices = containers.into_iter().flat_map(|container| container.devices);
    let minor = |path: &String| {
        path.strip_prefix("/dev/nvidia")
            .is_some_and(|minor| minor.parse::<u32>().is_ok())
    };
    devices.filter(minor).collect()
}

/// Wait until the node's object says how many whole GPUs are offered.
async fn offers(bed: &Bed, gpus: u64) {
    bed.until("the node to offer whole GPUs", async |bed: &Bed| {
        let node = bed.api().get("nodes", "", "n1").map_err(|error| error.message)?;
        let offered = node["status"]["allocatable"][RESOURCE].clone();
        match offered == *gpus.to_string() {
            true => Ok(()),
            false => Err(offered.to_string()),
        }
    })
    .await;
}

#[tokio::test]
async fn a_node_moves_from_nvidias_plugin_to_divvy_and_back_while_pods_run() {
    let mut bed = Bed::new(&[&[4, 4, 4]]).await;
    bed.cluster.stop_agent("n1").await.expect("it ends");
    let theirs = Theirs::start(&bed, "n1");
    offers(&bed, 3).await;

    // The extender leaves the pod to kube-scheduler and NVIDIA's plugin.
    let before = bed.create(&whole("before"));
    let first = gpus(&bed, "before").await;
    assert_eq!((first.len(), bed.allocation("before")), (1, None));

    theirs.cancel();
    bed.offer_whole().await;
    offers(&bed, 3).await;
    assert_eq!(gpus(&bed, "before").await, first, "it runs on");
    let ours = bed.create(&whole("ours"));
    bed.create(&pod("share").gpu_mem(4));
    let (second, third) = (gpus(&bed, "ours").await, gpus(&bed, "share").await);
    let mut all = [first.clone(), second.clone(), third].concat();
    all.sort();
    assert_eq!(
        all,
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"],
        "each has a GPU of its own"
    );
    assert!(bed.allocation("ours").is_some() && bed.allocation("share").is_some());
    bed.create(&whole("waits"));
    bed.unschedulable("waits", "no free NVIDIA GPU").await;
    bed.delete("waits");
    bed.gone("waits").await;

    bed.delete("share");
    bed.gone("share").await;
    bed.cluster.stop_agent("n1").await.expect("it ends");
    let theirs = Theirs::start(&bed, "n1");
    offers(&bed, 3).await;
    assert!(bed.runs(&before, "main") && bed.runs(&ours, "main"), "they run on");
    bed.create(&whole("after"));
    let last = gpus(&bed, "after").await;
    assert!(
        last.len() == 1 && last != first && bed.allocation("after").is_none(),
        "{last:?}"
    );
    for name in ["before", "ours", "after"] {
        bed.delete(name);
        bed.gone(name).await;
    }
    theirs.cancel();
    bed.cluster.start_agent("n1").await.expect("it starts");
    bed.end().await;
}
