use super::{Demand, MOST_GPUS, NodeShape};

impl NodeShape {
    /// Return the free amounts of an empty node with this shape.
    pub fn empty(&self) -> FreeOnNode {
        let mut gpus = [0; MOST_GPUS];
        gpus.iter_mut()
            .take(usize::from(self.gpus))
            .for_each(|left| *left = self.gpu_size);
        FreeOnNode {
            cpu_milli: self.cpu_milli,
            memory_mib: self.memory_mib,
            gpus,
            kinds: [0; MOST_GPUS + 1],
        }
    }
}

/// A set of GPUs of one node: bit i stands for the GPU at position i.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuSet(pub u16);

impl GpuSet {
    /// Return the positions in ascending order.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..MOST_GPUS).filter(move |position| self.has(*position))
    }

    pub(crate) fn has(self, position: usize) -> bool {
        self.0 >> position & 1 == 1
    }

    fn add(&mut self, position: usize) {
        self.0 |= 1 << position;
    }
}

/// What is free on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FreeOnNode {
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Main memory in MiB.
    pub memory_mib: u32,
    /// The free amount of each GPU, by position, in the unit of [`NodeShape::gpu_size`]; 0 after the last GPU.
    pub gpus: [u32; MOST_GPUS],
    /// The number of pods on the node by kind: index 0 counts pods with a part of a GPU, index n counts pods with n GPUs. Only
    /// the policy `gpu-clustering` uses it.
    pub kinds: [u16; MOST_GPUS + 1],
}

impl FreeOnNode {
    /// Report whether the pod fits, including main memory.
    pub fn fits(&self, shape: &NodeShape, demand: &Demand) -> bool {
        self.memory_mib >= demand.memory_mib
            && demand
                .amount(shape)
                .is_some_and(|amount| fits(self.cpu_milli, &self.gpus, demand, amount))
    }

    /// Return the GPUs for a pod by best fit: those with the least free capacity that still suffices; on a tie, the first ones.
    /// With `level`, only GPUs with exactly this free amount are considered. The result is `None` if there are fewer GPUs than
    /// the pod requests.
    pub fn gpus_for(&self, demand: &Demand, amount: u32, level: Option<u32>) -> Option<GpuSet> {
        let mut chosen = GpuSet::default();
        for _ in 0..demand.gpus {
            let fitting = self.gpus.iter().enumerate().filter(|(position, left)| {
                **left >= amount && level.is_none_or(|level| **left == level) && !chosen.has(*position)
            });
            let (position, _) = fitting.min_by_key(|(_, left)| **left)?;
            chosen.add(position);
        }
        Some(chosen)
    }

    /// Place a pod on these GPUs. If the pod does not fit, change nothing and return false.
    pub fn take(&mut self, shape: &NodeShape, demand: &Demand, gpus: GpuSet) -> bool {
        let Some(amount) = demand.amount(shape) else {
            return false;
        };
        let as_many = gpus.0.count_ones() == u32::from(demand.gpus);
        let room = gpus.positions().all(|position| self.gpus[position] >= amount);
        if !as_many || !room || self.cpu_milli < demand.cpu_milli || self.memory_mib < demand.memory_mib {
            return false;
        }
        self.cpu_milli -= demand.cpu_milli;
        self.memory_mib -= demand.memory_mib;
        gpus.positions().for_each(|position| self.gpus[position] -= amount);
        if let Some(kind) = demand.kind(shape, amount) {
            self.kinds[kind] = self.kinds[kind].saturating_add(1);
        }
        true
    }

    /// Remove a pod that was placed here. The free amounts never exceed what the node has.
    pub fn give_back(&mut self, shape: &NodeShape, demand: &Demand, gpus: GpuSet) {
        let Some(amount) = demand.amount(shape) else {
            return;
        };
        self.cpu_milli = self.cpu_milli.saturating_add(demand.cpu_milli).min(shape.cpu_milli);
        self.memory_mib = self.memory_mib.saturating_add(demand.memory_mib).min(shape.memory_mib);
        for position in gpus.positions().filter(|position| *position < usize::from(shape.gpus)) {
            self.gpus[position] = self.gpus[position].saturating_add(amount).min(shape.gpu_size);
        }
        if let Some(kind) = demand.kind(shape, amount) {
            self.kinds[kind] = self.kinds[kind].saturating_sub(1);
        }
    }

    /// Return the node's state as the policies see it. `shape` is the number of the node's shape.
    pub(crate) fn state(&self, shape: u32, view: StateView) -> PolicyNodeState {
        let mut left = self.gpus;
        let mut kinds = 0;
        if !view.positions {
            left.sort_unstable_by(|a, b| b.cmp(a));
        }
        if view.kinds {
            let there = self.kinds.iter().enumerate().filter(|(_, count)| **count > 0);
            kinds = there.fold(0, |set, (kind, _)| set | 1 << kind);
        }
        PolicyNodeState {
            shape,
            kinds,
            cpu_milli: self.cpu_milli,
            left,
        }
    }
}

/// What a policy must see of a node in addition to the free amounts of its GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StateView {
    /// Whether the policy must know which GPU has how much free. If false, the GPUs are sorted by free amount, the fullest last.
    pub(crate) positions: bool,
    /// Whether the policy must know which kinds of pods are on the node.
    pub(crate) kinds: bool,
}

/// A node as a policy sees it. Nodes in equal states have equal costs. Main memory is not part of a state, because no policy
/// uses it. If it were part, fewer nodes would share a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PolicyNodeState {
    /// The number of the node's [`NodeShape`].
    pub(crate) shape: u32,
    pub(crate) kinds: u32,
    pub(crate) cpu_milli: u32,
    pub(crate) left: [u32; MOST_GPUS],
}

impl PolicyNodeState {
    pub(crate) fn fits(&self, demand: &Demand, amount: u32) -> bool {
        fits(self.cpu_milli, &self.left, demand, amount)
    }

    /// Return the sum of the free amounts of all GPUs.
    pub(crate) fn total(&self) -> u64 {
        self.left.iter().map(|left| u64::from(*left)).sum()
    }

    /// Return the number of completely free GPUs.
    pub(crate) fn whole(&self, shape: &NodeShape) -> u32 {
        let gpus = &self.left[..usize::from(shape.gpus).min(MOST_GPUS)];
        let whole = gpus.iter().filter(|left| **left == shape.gpu_size).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    /// Return the state after a placement: on GPUs whose free amount is exactly `level`; without `level`, by best fit, on those
    /// with the least free capacity that still suffices. The pod must fit.
    pub(crate) fn after(&self, demand: &Demand, amount: u32, level: Option<u32>) -> PolicyNodeState {
        let mut after = *self;
        after.cpu_milli = self.cpu_milli.saturating_sub(demand.cpu_milli);
        let fitting = |left: u32| left >= amount && level.is_none_or(|level| left == level);
        if demand.gpus == 1 {
            let fitting = self.left.iter().enumerate().filter(|(_, left)| fitting(**left));
            if let Some((position, left)) = fitting.min_by_key(|(_, left)| **left) {
                after.left[position] = left.saturating_sub(amount);
            }
            return after;
        }
        // Take all GPUs at once: those with the least left, and on a tie the first.
        let mut gpus = [(u32::MAX, MOST_GPUS); MOST_GPUS];
        let mut count = 0;
        for (position, left) in self.left.iter().enumerate().filter(|(_, left)| fitting(**left)) {
            gpus[count] = (*left, position);
            count += 1;
        }
        gpus[..count].sort_unstable();
        for (left, position) in &gpus[..count.min(usize::from(demand.gpus))] {
            after.left[*position] = left.saturating_sub(amount);
        }
        after
    }

    /// Return the state with the GPUs sorted by free amount, the fullest last.
    pub(crate) fn sorted(mut self) -> PolicyNodeState {
        // Insertion sort: the GPUs are nearly sorted already.
        for end in 1..MOST_GPUS {
            let mut at = end;
            while at > 0 && self.left[at - 1] < self.left[at] {
                self.left.swap(at - 1, at);
                at -= 1;
            }
        }
        self
    }

    /// Return the distinct free amounts of the GPUs that have at least `amount`, in the order of the GPUs' positions.
    pub(crate) fn levels(&self, amount: u32) -> impl Iterator<Item = u32> {
        self.left
            .iter()
            .enumerate()
            .filter(move |(position, left)| **left >= amount && **left > 0 && !self.left[..*position].contains(*left))
            .map(|(_, left)| *left)
    }
}

fn fits(cpu_milli: u32, gpus: &[u32; MOST_GPUS], demand: &Demand, amount: u32) -> bool {
    cpu_milli >= demand.cpu_milli
        && (demand.gpus == 0 || gpus.iter().filter(|left| **left >= amount).count() >= usize::from(demand.gpus))
}
