//! A real plugin server against a kubelet of our own, over real Unix sockets in a temporary directory.

mod fake_kubelet;
mod plugin_calls;
mod plugin_lifecycle;
mod podresources;
mod test_plugin;

use std::time::Duration;

/// Far beyond what anything here takes.
const DEADLINE: Duration = Duration::from_secs(10);
