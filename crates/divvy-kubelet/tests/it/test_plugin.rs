//! A plugin whose devices and answers a test chooses, and its running server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use divvy_kubelet::Result;
use divvy_kubelet::plugin::{
    AllocateAnswer, CallRefusal, Plugin, PluginDevice, PluginOptions, PluginServer, PluginSettings, PluginStatus,
};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::DEADLINE;

pub(crate) const RESOURCE: &str = "vendor.example/memory";

#[derive(Debug)]
pub(crate) struct TestPlugin {
    pub(crate) devices: watch::Sender<Arc<Vec<PluginDevice>>>,
    /// The permits for starts of containers. Each start consumes one.
    pub(crate) starts: Semaphore,
    pub(crate) starting: watch::Sender<usize>,
}

impl Default for TestPlugin {
    fn default() -> Self {
        Self {
            devices: watch::Sender::new(Arc::new(devices(4))),
            starts: Semaphore::new(Semaphore::MAX_PERMITS),
            starting: watch::Sender::new(0),
        }
    }
}

pub(crate) fn devices(count: usize) -> Vec<PluginDevice> {
    (0..count)
        .map(|slot| PluginDevice {
            id: format!("GPU-01234567-89ab-cdef-0123-456789abcdef::m{slot}"),
            healthy: true,
            numa: Some(0),
        })
        .collect()
}

impl Plugin for TestPlugin {
    fn resource_name(&self) -> &str {
        RESOURCE
    }

    fn options(&self) -> PluginOptions {
        PluginOptions {
            pre_start_required: true,
            preferred_allocation: true,
        }
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.devices.subscribe()
    }

    fn allocate(&self, ids: &[String]) -> Result<AllocateAnswer, CallRefusal> {
        let known = self.devices.borrow();
        if let Some(unknown) = ids.iter().find(|id| known.iter().all(|device| device.id != **id)) {
            return Err(CallRefusal::invalid(format!(
                "{unknown:?} is not a device of {RESOURCE}; nothing was allocated"
            )));
        }
        Ok(AllocateAnswer {
            cdi_devices: vec![format!("vendor.example/class={}", ids.len())],
            ..AllocateAnswer::default()
        })
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), CallRefusal> {
        self.starting.send_modify(|count| *count += 1);
        self.starts
            .acquire()
            .await
            .map_err(|_| CallRefusal::failed("no more starts"))?
            .forget();
        match ids.as_slice() {
            [] => Err(CallRefusal::not_yet("memory still held by default/other:\n3 MiB – wait")),
            _ => Ok(()),
        }
    }
}

/// A running plugin server.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) plugin: Arc<TestPlugin>,
    pub(crate) stop: CancellationToken,
    pub(crate) status: watch::Receiver<PluginStatus>,
    task: JoinHandle<Result<()>>,
}

impl Running {
    pub(crate) fn start(directory: &Path) -> Self {
        Self::with(TestPlugin::default(), PluginSettings::new(directory, "test-memory"))
    }

    pub(crate) fn with(plugin: TestPlugin, settings: PluginSettings) -> Self {
        let plugin = Arc::new(plugin);
        let stop = CancellationToken::new();
        let (sender, status) = watch::channel(PluginStatus::default());
        let task = tokio::spawn(PluginServer::run(Arc::clone(&plugin), settings, stop.clone(), sender));
        Self {
            plugin,
            stop,
            status,
            task,
        }
    }

    pub(crate) async fn wait(&mut self, what: &str, condition: impl FnMut(&PluginStatus) -> bool) -> PluginStatus {
        let last = self.status.clone();
        match tokio::time::timeout(DEADLINE, self.status.wait_for(condition)).await {
            Ok(status) => status.expect("the server runs").clone(),
            Err(_) => panic!("not within {DEADLINE:?}: {what}; {:?}", *last.borrow()),
        }
    }

    pub(crate) async fn wait_ready(&mut self) -> PluginStatus {
        self.wait("ready", PluginStatus::is_ready).await
    }

    /// Stop the server, and return how long that took.
    pub(crate) async fn stop(self) -> Duration {
        let started = std::time::Instant::now();
        self.stop.cancel();
        tokio::time::timeout(DEADLINE, self.task)
            .await
            .expect("ends in time")
            .expect("no panic")
            .expect("no error");
        started.elapsed()
    }
}
