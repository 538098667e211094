//! A complete device plugin: pods that request `example.com/fuse` get `/dev/fuse`, without being privileged.
//!
//! ```text
//! sudo target/debug/examples/fuse_plugin                    on a node
//! target/debug/examples/fuse_plugin DIRECTORY               with another directory that contains kubelet.sock
//! ```

#![allow(clippy::print_stdout, reason = "a program for a terminal")]

use std::sync::Arc;

use divvy_kubelet::plugin::{
    AllocateAnswer, CallRefusal, Plugin, PluginDevice, PluginDeviceNode, PluginOptions, PluginServer, PluginSettings,
    PluginStatus,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const RESOURCE: &str = "example.com/fuse";

struct Fuse {
    devices: watch::Sender<Arc<Vec<PluginDevice>>>,
}

impl Plugin for Fuse {
    fn resource_name(&self) -> &str {
        RESOURCE
    }

    fn options(&self) -> PluginOptions {
        PluginOptions::default()
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.devices.subscribe()
    }

    fn allocate(&self, _ids: &[String]) -> Result<AllocateAnswer, CallRefusal> {
        let node = PluginDeviceNode {
            container_path: "/dev/fuse".to_owned(),
            host_path: "/dev/fuse".to_owned(),
            permissions: "rw".to_owned(),
        };
        Ok(AllocateAnswer {
            devices: vec![node],
            ..AllocateAnswer::default()
        })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> divvy_kubelet::Result<()> {
    let directory = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "/var/lib/kubelet/device-plugins".to_owned());
    // The number of devices is the number of containers that may use the file at the same time.
    let devices = (0..100).map(|slot| PluginDevice {
        id: format!("fuse-{slot}"),
        healthy: true,
        numa: None,
    });
    let plugin = Fuse {
        devices: watch::Sender::new(Arc::new(devices.collect())),
    };
    let (status, mut changes) = watch::channel(PluginStatus::default());
    tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            let now = changes.borrow_and_update().clone();
            match now.last_error {
                _ if now.is_ready() => println!("the kubelet has the devices of {RESOURCE}"),
                Some(error) => println!("not registered: {error}"),
                None => {}
            }
        }
    });
    let settings = PluginSettings::new(directory, "fuse");
    PluginServer::run(Arc::new(plugin), settings, CancellationToken::new(), status).await
}
