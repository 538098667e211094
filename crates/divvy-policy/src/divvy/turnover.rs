/// Detects whether pods end, by comparing how much GPU capacity is released with how much is taken. The answer selects one of the
/// policy's two settings. The constants that are best while a cluster only fills up would waste 8-GPU nodes when capacity is used
/// again and again, because a node that is in use hardly ever becomes empty again.
#[derive(Debug, Default)]
pub(crate) struct TurnoverDetector {
    /// The capacity of all nodes, in thousandths of a GPU.
    pub(crate) capacity_milli: u64,
    /// The amount taken, in thousandths of a GPU. Old amounts fade in `taken` and in `given_back`.
    taken: u64,
    given_back: u64,
    pods_end: bool,
    /// The answer set by hand, which overrides the measured one.
    pub(crate) said: Option<bool>,
}

impl TurnoverDetector {
    pub(crate) fn pods_end(&self) -> bool {
        self.said.unwrap_or(self.pods_end)
    }

    /// Record a placement, and report whether this has changed the answer of [`TurnoverDetector::pods_end`].
    pub(crate) fn taken(&mut self, milli: u64) -> bool {
        self.taken += milli;
        // Only placements worth half of the cluster are remembered.
        if self.taken > self.capacity_milli / 2 {
            self.taken /= 2;
            self.given_back /= 2;
        }
        let (before, answered) = (self.pods_end, self.pods_end());
        // The answer becomes true when the released amount reaches a twentieth of the taken amount, and false when it falls below
        // a fortieth. The gap keeps the answer from flipping back and forth.
        self.pods_end = if before {
            self.given_back * 40 >= self.taken
        } else {
            self.given_back * 20 >= self.taken
        };
        self.pods_end() != answered
    }

    pub(crate) fn given_back(&mut self, milli: u64) {
        self.given_back += milli;
    }
}
