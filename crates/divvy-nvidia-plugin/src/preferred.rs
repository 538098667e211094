//! The choice of the devices that suit a container best.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use divvy_nvidia_config::SharedDevicesPolicy;

use crate::OfferedResource;
use crate::offer::Unit;

impl OfferedResource {
    /// Return `size` of the available device ids, including all of `must`. Whole GPUs are chosen by how well they are connected.
    /// Replicas and MIG devices are chosen by `policy`, first among GPUs and then among the MIG devices of a GPU. The list is
    /// empty if no such choice is possible; then the kubelet chooses.
    pub fn preferred(&self, policy: SharedDevicesPolicy, available: &[String], must: &[String], size: usize) -> Vec<String> {
        let offered: Vec<(&String, &Unit)> = available.iter().filter_map(|id| Some((id, self.unit(id)?))).collect();
        let ids: BTreeSet<&String> = offered.iter().map(|(id, _)| *id).collect();
        if size == 0 || size > offered.len() || must.len() > size || !must.iter().all(|id| ids.contains(id)) {
            return Vec::new();
        }
        if self.units.iter().all(|unit| !unit.is_mig && unit.replicas.is_none()) {
            self.aligned(&offered, must, size)
        } else {
            self.balanced(policy, &offered, must, size)
        }
    }

    fn aligned(&self, offered: &[(&String, &Unit)], must: &[String], size: usize) -> Vec<String> {
        let positions: Vec<usize> = offered.iter().map(|(_, unit)| unit.gpu).collect();
        let must: Vec<usize> = (offered.iter().filter(|(id, _)| must.contains(id)))
            .map(|(_, unit)| unit.gpu)
            .collect();
        let chosen = self.topology.choose_divided(&positions, &must, size).unwrap_or_default();
        let id_at = |position: usize| offered.iter().find(|(_, unit)| unit.gpu == position);
        chosen
            .into_iter()
            .filter_map(|position| id_at(position).map(|(id, _)| (*id).clone()))
            .collect()
    }

    /// Choose one device after the other: from the GPU with the fewest (distributed) or the most (packed) allocated devices, and
    /// within that GPU, from the MIG device with the fewest or the most. On a tie, choose from the GPU or MIG device that has
    /// given this container the fewest devices.
    fn balanced(&self, policy: SharedDevicesPolicy, offered: &[(&String, &Unit)], must: &[String], size: usize) -> Vec<String> {
        let mut chosen: Vec<String> = must.to_vec();
        let must: BTreeSet<&String> = must.iter().collect();
        let free: Vec<(&String, &Unit)> = offered.iter().filter(|(id, _)| !must.contains(id)).copied().collect();
        let mut gpus = self.loads(&free, |unit| unit.gpu.to_string());
        let mut parts = self.loads(&free, |unit| unit.uuid.clone());
        // The replicas of a GPU or MIG device are alike, so only the first free one of each is compared. There may be thousands.
        let mut replicas: BTreeMap<&str, VecDeque<(usize, &String, &Unit)>> = BTreeMap::new();
        for (position, (id, unit)) in free.into_iter().enumerate() {
            replicas.entry(&unit.uuid).or_default().push_back((position, id, unit));
        }
        while chosen.len() < size {
            let rank = |unit: &Unit| {
                let of = |loads: &BTreeMap<String, GpuLoad>, key: &str| loads.get(key).copied().unwrap_or_default().rank(policy);
                (of(&gpus, &unit.gpu.to_string()), of(&parts, &unit.uuid))
            };
            let first =
                |queue: &VecDeque<(usize, &String, &Unit)>| queue.front().map(|(position, _, unit)| (rank(unit), *position));
            let best = replicas
                .values_mut()
                .filter(|queue| !queue.is_empty())
                .min_by_key(|queue| first(queue));
            let Some((_, id, unit)) = best.and_then(VecDeque::pop_front) else {
                break;
            };
            for load in [gpus.get_mut(&unit.gpu.to_string()), parts.get_mut(&unit.uuid)]
                .into_iter()
                .flatten()
            {
                load.allocated += 1;
                load.picked += 1;
            }
            chosen.push(id.clone());
        }
        chosen
    }

    /// Count, for each group, the devices that are not free.
    fn loads(&self, free: &[(&String, &Unit)], group: impl Fn(&Unit) -> String) -> BTreeMap<String, GpuLoad> {
        let mut loads: BTreeMap<String, GpuLoad> = BTreeMap::new();
        for unit in &self.units {
            loads.entry(group(unit)).or_default().allocated += i64::from(unit.replicas.unwrap_or(1));
        }
        for (_, unit) in free {
            if let Some(load) = loads.get_mut(&group(unit)) {
                load.allocated -= 1;
            }
        }
        loads
    }
}

/// How much of a GPU or a MIG device is in use.
#[derive(Debug, Clone, Copy, Default)]
struct GpuLoad {
    /// The number of allocated devices.
    allocated: i64,
    /// The number of devices that this request has chosen.
    picked: i64,
}

impl GpuLoad {
    /// Return the rank by the policy. The lowest rank is chosen.
    fn rank(self, policy: SharedDevicesPolicy) -> (i64, i64) {
        match policy {
            SharedDevicesPolicy::Distributed => (self.allocated, self.picked),
            SharedDevicesPolicy::Packed => (-self.allocated, self.picked),
        }
    }
}
