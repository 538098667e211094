use divvy_placement::Standing;

use super::{ExtenderAction, ExtenderCore, Got, Now, check_resurfaced};

impl ExtenderCore {
    /// Release the memory of departed pods whose time is over, and return checks for reservations that no event has resolved: binds without an
    /// answer, and pods whose own event never comes (created, bound, and deleted while the watch was broken). Evict pods again whose eviction was
    /// refused. The host calls this every few seconds.
    pub fn sweep(&mut self, now: Now) -> Vec<ExtenderAction> {
        self.age_departed(now);
        self.guess_reasons();
        let mut actions = self.look_up_unseen(now, self.timing.unseen_ns);
        let resurfaced = self.resurfaced.iter();
        actions.extend(resurfaced.map(|(uid, pod)| check_resurfaced(uid, pod.key())));
        actions.extend(self.evictions(now));
        actions
    }

    /// Return checks after a new list of pods. A pod that came and went while the watch was broken has no events anymore, so every reservation
    /// whose pod has not been seen is checked at once.
    pub(super) fn sweep_after_list(&mut self, now: Now) -> Vec<ExtenderAction> {
        self.look_up_unseen(now, 0)
    }

    fn look_up_unseen(&mut self, now: Now, unseen_ns: u64) -> Vec<ExtenderAction> {
        let ledger = self.index.ledger();
        let looked = &self.looked;
        let due: Vec<ExtenderAction> = ledger
            .reservations()
            .filter(|(uid, node, reservation)| {
                let key = ((*uid).to_owned(), (*node).to_owned());
                let last = looked.get(&key).copied().unwrap_or(0).max(reservation.since_ns);
                let age = now.monotonic_ns.saturating_sub(last);
                !self.busy_with(uid)
                    && match reservation.standing {
                        Standing::Doubt => true,
                        Standing::InFlight | Standing::Bound => age >= unseen_ns,
                    }
            })
            .map(|(uid, node, reservation)| ExtenderAction::Check {
                uid: uid.to_owned(),
                node: node.to_owned(),
                pod: reservation.pod.clone(),
            })
            .collect();
        let live: std::collections::BTreeSet<(String, String)> = ledger
            .reservations()
            .map(|(uid, node, _)| (uid.to_owned(), node.to_owned()))
            .collect();
        self.looked.retain(|key, _| live.contains(key));
        for action in &due {
            if let ExtenderAction::Check { uid, node, .. } = action {
                self.looked.insert((uid.clone(), node.clone()), now.monotonic_ns);
            }
        }
        due
    }

    /// Handle the outcome of an [`ExtenderAction::Check`].
    pub fn checked(&mut self, uid: &str, node: &str, outcome: Got, now: Now) {
        if self.index.ledger().is_buried(uid) {
            self.checked_resurfaced(uid, outcome);
            return;
        }
        // A bind that has begun in the meantime has newer information.
        if self.busy_with(uid) {
            return;
        }
        let Some(reservation) = self.index.ledger().reservation(uid, node) else {
            return;
        };
        let (standing, since_ns) = (reservation.standing, reservation.since_ns);
        match outcome {
            Got::NotFound => self.bury(uid),
            Got::Found(pod) if pod.uid != uid => self.bury(uid),
            Got::Found(pod) => match pod.node.as_deref() {
                Some(bound) => {
                    let ours = bound == node && reservation.possible().any(|held| *held == pod.held);
                    if !(ours && standing == Standing::Bound) {
                        self.found_bound(uid, bound, &pod.held, now);
                    }
                }
                None => {
                    let age = now.monotonic_ns.saturating_sub(since_ns);
                    if standing != Standing::Bound && age >= self.timing.doubt_ns {
                        self.index.ledger_mut().release(uid, node);
                    }
                }
            },
            Got::Unreadable(_) | Got::Failed(_) => {}
        }
    }

    /// Record the API server's answer that the pod with this UID is gone. If the watch has shown the pod as bound, either the
    /// watch's deletion event is still to come or the answer was wrong. No later event would correct a wrong answer, so the next
    /// sweep reads the pod again.
    pub(super) fn bury(&mut self, uid: &str) {
        let ledger = self.index.ledger_mut();
        if let Some(pod) = ledger.pod(uid).filter(|pod| pod.node.is_some()) {
            self.resurfaced.insert(uid.to_owned(), pod.clone());
        }
        ledger.bury_pod(uid);
    }

    /// Record the API server's answer that the pod exists. If an earlier answer said that the pod was gone, the pod counts again:
    /// in the state that the watch showed last or, if the watch has not shown it, from its next event on. The state in the answer
    /// is not used. It may be older than the watch's and lack the binding that the watch has shown, and no later event would
    /// correct that.
    pub(super) fn is_there(&mut self, uid: &str) {
        let ledger = self.index.ledger_mut();
        if ledger.is_buried(uid) {
            ledger.unbury_pod(uid);
            if let Some(pod) = self.resurfaced.remove(uid) {
                ledger.apply_pod(pod);
            }
        }
    }

    /// Handle the outcome of a check of a pod that was reported as gone but that the watch has shown again.
    fn checked_resurfaced(&mut self, uid: &str, outcome: Got) {
        if !self.resurfaced.contains_key(uid) {
            return;
        }
        match outcome {
            Got::Found(pod) if pod.uid == uid => self.is_there(uid),
            Got::Found(_) | Got::NotFound => {}
            // The next sweep reads the pod again.
            Got::Unreadable(_) | Got::Failed(_) => return,
        }
        self.resurfaced.remove(uid);
    }
}
