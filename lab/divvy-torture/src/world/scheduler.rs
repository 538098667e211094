//! The parts of kube-scheduler that decide between pods: sums, nominations, and preemption (`pkg/scheduler/framework/preemption`,
//! `plugins/defaultpreemption`, `RunFilterPluginsWithNominatedPods`). Also the controllers that replace evicted pods.

use std::collections::BTreeMap;

use divvy_extender::core::Eviction;
use divvy_model::{Phase, Pod, PodRequest};

use super::World;
use crate::Violation;
use crate::story::ensure;

/// The maximum number of rounds of evictions for one pod. More rounds are an error.
const MOST_EVICTIONS: u32 = 8;

/// What the scheduler and the controllers remember.
#[derive(Debug, Default)]
pub struct SimScheduler {
    /// For each UID: how many times other pods were evicted for this pod.
    pub rounds: BTreeMap<String, u32>,
    /// The evicted pods for which controllers create replacements once the pods are gone.
    evicted: Vec<Evicted>,
}

#[derive(Debug)]
struct Evicted {
    uid: String,
    name: String,
    request: PodRequest,
    priority: i32,
}

fn units(pod: &Pod) -> u64 {
    pod.request.effective_units().unwrap()
}

fn whole_gpus(pod: &Pod) -> u64 {
    crate::whole::gpus(&pod.request)
}

impl World {
    /// Filter and then bind a pod, or preempt other pods if it fits nowhere.
    pub fn schedule(&mut self, replica: usize, pod: &Pod, choice: u8) -> Result<(), Violation> {
        if self.extenders[replica].frozen {
            self.story.tell(|| format!("no extender answers for {}", pod.uid));
            return Ok(());
        }
        let passed = self.filter(replica, pod)?;
        let fit: Vec<usize> = passed.into_iter().filter(|node| self.resources_fit(pod, *node)).collect();
        // The nominated node is tried first.
        let promised = fit
            .iter()
            .find(|node| pod.nominated.as_deref() == Some(&*self.nodes[**node].name));
        let node = promised.or_else(|| fit.get(usize::from(choice) % fit.len().max(1))).copied();
        match node {
            Some(node) => self.bind(replica, pod, node),
            None => {
                self.story.tell(|| format!("{} fits nowhere", pod.uid));
                self.preempt(replica, pod)
            }
        }
    }

    /// Report whether a pod passes NodeResourcesFit on a node: the number of healthy ids, minus the requests of pods that are not
    /// in a terminal phase and of nominated pods of equal or higher priority, must suffice.
    fn resources_fit(&self, pod: &Pod, node: usize) -> bool {
        self.sums_fit(pod, node, &[])
    }

    fn sums_fit(&self, pod: &Pod, node: usize, without: &[&Pod]) -> bool {
        let name = &self.nodes[node].name;
        let requested = self.api.pods.values().filter(|other| self.counts(other, name, without));
        let promised = self.api.nominated().filter(|other| other.nominated.as_deref() == Some(name));
        let promised = promised.filter(|other| other.uid != pod.uid && other.priority >= pod.priority);
        let others: Vec<&Pod> = requested.chain(promised).collect();
        let fits = |amount: fn(&Pod) -> u64, healthy: u64| {
            amount(pod) == 0 || others.iter().map(|other| amount(other)).sum::<u64>() + amount(pod) <= healthy
        };
        fits(units, self.api.nodes[name].allocatable_units) && fits(whole_gpus, self.nodes[node].allocatable_whole)
    }

    fn counts(&self, pod: &Pod, node: &str, without: &[&Pod]) -> bool {
        pod.node.as_deref() == Some(node)
            && !matches!(pod.phase, Phase::Succeeded | Phase::Failed)
            && without.iter().all(|gone| gone.uid != pod.uid)
    }

    /// Evict pods, as PostFilter does. No pod is evicted while earlier victims for this pod are still ending.
    fn preempt(&mut self, replica: usize, pod: &Pod) -> Result<(), Violation> {
        let ends = |other: &&Pod| other.deleting && other.priority < pod.priority && other.node.is_some();
        let mut ending = self.api.pods.values().filter(ends);
        if pod.nominated.is_some() && ending.any(|other| other.node.as_deref() == pod.nominated.as_deref()) {
            return Ok(());
        }
        let proposed: Vec<Eviction> = (0..self.nodes.len())
            .filter_map(|node| {
                Some(Eviction {
                    node: self.nodes[node].name.clone(),
                    victims: self.victims(pod, node)?,
                    pdb_violations: 0,
                })
            })
            .collect();
        if proposed.is_empty() {
            self.forget(pod);
            return Ok(());
        }
        let answered = self.extenders[replica].core.preempt(pod, proposed)?;
        let price = |eviction: &Eviction| {
            let pods = eviction.victims.iter().filter_map(|uid| self.api.pod(uid));
            let priorities: Vec<i64> = pods.map(|pod| i64::from(pod.priority)).collect();
            (
                priorities.iter().max().copied(),
                priorities.iter().sum::<i64>(),
                priorities.len(),
            )
        };
        let Some(chosen) = answered.iter().min_by_key(|eviction| price(eviction)).cloned() else {
            self.forget(pod);
            return Ok(());
        };
        self.story
            .tell(|| format!("{} preempts {:?} on {}", pod.uid, chosen.victims, chosen.node));
        for uid in &chosen.victims {
            let Some(victim) = self.api.pod(uid).cloned() else { continue };
            ensure!(
                victim.priority < pod.priority,
                "{uid} (priority {}) is to be evicted for {} (priority {})",
                victim.priority,
                pod.uid,
                pod.priority
            );
            if victim.deleting {
                continue;
            }
            self.api.delete(uid);
            self.scheduler.evicted.push(Evicted {
                uid: uid.clone(),
                name: victim.name,
                request: victim.request,
                priority: victim.priority,
            });
        }
        let rounds = self.scheduler.rounds.entry(pod.uid.clone()).or_default();
        *rounds += 1;
        ensure!(
            *rounds <= MOST_EVICTIONS,
            "pods were evicted {rounds} times for {}, which still waits",
            pod.uid
        );
        // Less important pods with a nomination to the same room must be scheduled again.
        let others = self
            .api
            .nominated()
            .filter(|other| other.nominated.as_deref() == Some(&*chosen.node));
        let others: Vec<String> = others
            .filter(|other| other.priority < pod.priority)
            .map(|other| other.uid.clone())
            .collect();
        for uid in others {
            self.api.nominate(&uid, None);
        }
        self.api.nominate(&pod.uid, Some(&chosen.node));
        Ok(())
    }

    /// Clear the pod's nomination, because preemption does not help.
    fn forget(&mut self, pod: &Pod) {
        self.api.nominate(&pod.uid, None);
    }

    /// Return the pods of lower priority that must leave according to the sums, starting with the least important. `None` if
    /// their leaving does not help, or if no pod must leave.
    fn victims(&self, pod: &Pod, node: usize) -> Option<Vec<String>> {
        let name = &self.nodes[node].name;
        let here = self.api.pods.values().filter(|other| self.counts(other, name, &[]));
        let mut lower: Vec<&Pod> = here.filter(|other| other.priority < pod.priority).collect();
        lower.sort_by_key(|other| (other.priority, &other.uid));
        let fits = |gone: &[&Pod]| self.sums_fit(pod, node, gone);
        if lower.is_empty() || !fits(&lower) {
            return None;
        }
        // The most important pods are spared first.
        let mut gone = lower.clone();
        for other in lower.iter().rev() {
            let fewer: Vec<&Pod> = gone.iter().filter(|pod| pod.uid != other.uid).copied().collect();
            if fits(&fewer) {
                gone = fewer;
            }
        }
        (!gone.is_empty()).then(|| gone.iter().map(|pod| pod.uid.clone()).collect())
    }

    /// Let controllers create a replacement for each evicted pod, once it is gone and its name is free.
    pub fn replace_evicted(&mut self) {
        let evicted = std::mem::take(&mut self.scheduler.evicted);
        for pod in evicted {
            if self.api.pod(&pod.uid).is_some() {
                self.scheduler.evicted.push(pod);
            } else if let Some(uid) = self.api.create(&pod.name, pod.request, pod.priority) {
                self.story.tell(|| format!("{uid} is created in place of {}", pod.uid));
            }
        }
    }

    /// Drop all pending replacements, so that controllers create no more pods. Used at the end of a history.
    pub fn replace_nobody(&mut self) {
        self.scheduler.evicted.clear();
    }
}
