use divvy_model::MiB;
use divvy_placement::Overbooked;

use super::{ExtenderAction, ExtenderCore};

impl ExtenderCore {
    /// Find GPUs on which more memory is allocated than they have. Return one warning for each pod that has to wait; each pod is
    /// warned about only once.
    ///
    /// There are two possible causes. Either another extender sent a Binding, just before it was killed or after this one took
    /// over, and the API server carried the Binding out after this extender had already allocated the memory. The settle second
    /// ([`CoreTiming::settle_ns`](super::CoreTiming::settle_ns)) makes this rare; only a compare-and-swap write per node would make it
    /// impossible. Or a GPU offers less memory than before.
    ///
    /// The node's agent still prevents any double use of the memory: it starts the containers for which there is room, and
    /// refuses the other containers while these run. Only a pod's owner may delete the pod, so the owner must be informed.
    pub fn promised_twice(&mut self) -> Vec<ExtenderAction> {
        let ledger = self.index.ledger();
        if !self.told.is_empty() {
            self.told.retain(|uid| ledger.pod(uid).is_some());
        }
        let found = ledger.overbooked_since(self.looked_at);
        self.looked_at = ledger.version();
        let mut actions = Vec::new();
        for gpu in &found {
            // Subtract what becomes free without a new warning: pods that are being deleted, and pods that were warned and have not started.
            let mut beyond = gpu.promised.saturating_sub(gpu.capacity);
            for promise in &gpu.pods {
                if promise.deleting || (!promise.running && self.told.contains(&promise.uid)) {
                    beyond = beyond.saturating_sub(promise.memory);
                }
            }
            // A pod with a running container has the memory. Of the other pods, those that were bound last have to wait.
            for promise in gpu.pods.iter().rev() {
                if beyond == MiB::ZERO {
                    break;
                }
                if promise.running || promise.deleting || !self.told.insert(promise.uid.clone()) {
                    continue;
                }
                beyond = beyond.saturating_sub(promise.memory);
                self.counts.promised_twice += 1;
                actions.push(ExtenderAction::Warn {
                    pod: promise.pod.clone(),
                    uid: promise.uid.clone(),
                    action: "Binding",
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
        "GPU {} of node {} has {} to share, but pods were allocated {} of it. This pod was bound last, and its {memory} are also allocated \
         to other pods. This happens when the extender is killed during a bind, or when a GPU offers less memory than before. No memory is \
         used twice: this pod's containers do not start until the other pods end, which may never happen. Delete this pod; its \
         controller creates another one, which is placed where there is room",
        gpu.index, gpu.node, gpu.capacity, gpu.promised
    )
}
