//! Has the containers of limited pods limited as soon as they have cgroups.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::agent::Agent;
use crate::limits::{Containers, Next};

/// The least time between two looks at the containers. It bounds what a container costs that makes cgroups without end.
const PAUSE: Duration = Duration::from_millis(100);

impl Agent {
    /// Limit the containers of limited pods as soon as they have cgroups.
    pub(crate) async fn keep_limiting_containers(self: &Arc<Self>) {
        let mut containers = Containers::new(self.sys_root());
        loop {
            tokio::select! {
                () = self.limited.notified() => containers.follow(self.limited_pods()),
                () = containers.changed() => {}
            }
            let Some(probe) = self.probe() else { continue };
            loop {
                let next = containers.limit(probe, |is_set| self.metrics.limited_container(is_set)).await;
                sleep(PAUSE).await;
                if next == Next::AtChange {
                    break;
                }
            }
        }
    }
}
