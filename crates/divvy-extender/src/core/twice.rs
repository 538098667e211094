use divvy_model::MiB;
use divvy_placement::Overbooked;

use super::{Action, Core};

impl Core {
    /// Finds GPUs that were promised twice, and says whom to tell: each pod once.
    ///
    /// It takes a Binding that another extender sent before it was killed, or after this one took over, and that the API server
    /// carries out when this one has promised the memory already ([`Timing::settle_ns`](super::Timing::settle_ns) makes that rare,
    /// and only a compare-and-swap on the node would make it impossible: research/reliability.md section 2.6, L2), or a GPU
    /// that offers less than before. The node's agent keeps the memory itself right: it starts the containers for which there is room
    /// and refuses the rest for as long as the others live. Nobody but the owner may end a pod, so the owner has to hear of it.
    pub fn promised_twice(&mut self) -> Vec<Action> {
        let ledger = self.index.ledger();
        if !self.told.is_empty() {
            self.told.retain(|uid| ledger.pod(uid).is_some());
        }
        let found = ledger.overbooked_since(self.looked_at);
        self.looked_at = ledger.version();
        let mut actions = Vec::new();
        for gpu in &found {
            // What comes back without anybody being told: those who were told, unless they have started since, and those who go.
            let mut beyond = gpu.promised.saturating_sub(gpu.capacity);
            for promise in &gpu.pods {
                if promise.deleting || (!promise.running && self.told.contains(&promise.uid)) {
                    beyond = beyond.saturating_sub(promise.memory);
                }
            }
            // Who has a container running has the memory. Of the others the last ones wait for it.
            for promise in gpu.pods.iter().rev() {
                if beyond == MiB::ZERO {
                    break;
                }
                if promise.running || promise.deleting || !self.told.insert(promise.uid.clone()) {
                    continue;
                }
                beyond = beyond.saturating_sub(promise.memory);
                self.counts.promised_twice += 1;
                actions.push(Action::Warn {
                    pod: promise.pod.clone(),
                    uid: promise.uid.clone(),
                    reason: "GpuPromisedTwice",
                    text: text(gpu, promise.memory),
                });
            }
        }
        actions
    }
}

fn text(gpu: &Overbooked, memory: MiB) -> String {
    format!(
        "GPU {} of node {} has {} to give, but {} of it were promised: this pod was bound last, and the {memory} that it was promised are \
         promised to others, too. That happens when the extender is killed in the middle of a bind, or when a GPU offers less than \
         before. No memory is used twice: this pod's containers are not started until the others end, which may be never. Delete this pod; \
         its controller makes another, which is placed where there is room",
        gpu.index, gpu.node, gpu.capacity, gpu.promised
    )
}
