//! Tests of a real plugin server with a fake kubelet, over real Unix sockets in a temporary directory.

mod fake_kubelet;
mod plugin_calls;
mod plugin_lifecycle;
mod test_plugin;

use std::time::Duration;

use divvy_kubelet::plugin::PluginSettings;
use fake_kubelet::Kubelet;
use tempfile::TempDir;
use test_plugin::{Running, TestPlugin};

/// A deadline far longer than any step here takes.
const DEADLINE: Duration = Duration::from_secs(10);

/// Start a kubelet, and a plugin that registers with it. Return their directory as well.
async fn registered() -> (TempDir, Kubelet, Running) {
    registered_with(TestPlugin::default()).await
}

/// Start a kubelet as [`registered`] does, with this plugin.
async fn registered_with(plugin: TestPlugin) -> (TempDir, Kubelet, Running) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let running = Running::with(plugin, PluginSettings::new(dir.path(), "test-memory"));
    kubelet.wait_registered(1).await;
    (dir, kubelet, running)
}
