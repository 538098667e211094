//! A complete device plugin: pods that request `example.com/fuse` get `/dev/fuse`, without being privileged.
//!
//! ```text
//! sudo target/debug/examples/fuse_plugin                    on a node
//! target/debug/examples/fuse_plugin DIRECTORY               with another directory that contains kubelet.sock
//! ```

#![allow(clippy::print_stdout, reason = "a program for a terminal")]

use std::sync::Arc;

use divvy_kubelet::plugin::{Answer, Device, DeviceNode, Options, Plugin, PluginServer, Refusal, Settings, Status};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const RESOURCE: &str = "example.com/fuse";

struct Fuse {
    devices: watch::Sender<Arc<Vec<Device>>>,
}

impl Plugin for Fuse {
    fn resource_name(&self) -> &str {
        RESOURCE
    }

    fn options(&self) -> Options {
        Options::default()
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<Device>>> {
        self.devices.subscribe()
    }

    fn allocate(&self, _ids: &[String]) -> Result<Answer, Refusal> {
        let node = DeviceNode {
            container_path: "/dev/fuse".to_owned(),
            host_path: "/dev/fuse".to_owned(),
            permissions: "rw".to_owned(),
        };
        Ok(Answer {
            devices: vec![node],
            ..Answer::default()
        })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> divvy_kubelet::Result<()> {
    let directory = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "/var/lib/kubelet/device-plugins".to_owned());
    // The number of devices is the number of containers that may use the file at the same time.
    let devices = (0..100).map(|slot| Device {
        id: format!("fuse-{slot}"),
        healthy: true,
        numa: None,
    });
    let plugin = Fuse {
        devices: watch::Sender::new(Arc::new(devices.collect())),
    };
    let (status, mut changes) = watch::channel(Status::default());
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
    let settings = Settings::new(directory, "fuse");
    PluginServer::run(Arc::new(plugin), settings, CancellationToken::new(), status).await
}
