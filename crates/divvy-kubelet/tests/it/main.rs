//! Tests of a real plugin server with a fake kubelet, over real Unix sockets in a temporary directory.

mod fake_kubelet;
mod plugin_calls;
mod plugin_lifecycle;
mod test_plugin;

use std::time::Duration;

/// A deadline far longer than any step here takes.
const DEADLINE: Duration = Duration::from_secs(10);
