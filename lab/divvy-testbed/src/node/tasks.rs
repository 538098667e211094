//! The tasks of one run of the kubelet.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A group of tasks that end together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Tasks {
    pub(crate) fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Run a task until it ends or the group is stopped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let token = self.token.clone();
        self.tracker.spawn(async move {
            let _ = token.run_until_cancelled(task).await;
        });
    }

    /// Run a task that must end on its own when the group's token is canceled.
    pub(crate) fn spawn_to_its_end(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(task);
    }

    pub(crate) async fn stop(&self) {
        self.token.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}
