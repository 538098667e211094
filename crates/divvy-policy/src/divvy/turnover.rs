/// Whether pods end, from how much GPU is given back for how much is taken: what is right while a cluster only fills up is wrong when its
/// room is used again and again (research/placement.md section 6).
#[derive(Debug, Default)]
pub(crate) struct Turnover {
    /// Thousandths of GPUs that the nodes have.
    pub(crate) capacity_milli: u64,
    /// Thousandths of GPUs, in which what is long ago fades.
    taken: u64,
    given_back: u64,
    pods_end: bool,
    /// What somebody said, whatever is seen.
    pub(crate) said: Option<bool>,
}

impl Turnover {
    pub(crate) fn pods_end(&self) -> bool {
        self.said.unwrap_or(self.pods_end)
    }

    /// True if another answer is right from now on.
    pub(crate) fn taken(&mut self, milli: u64) -> bool {
        self.taken += milli;
        // As much as half of the cluster is remembered.
        if self.taken > self.capacity_milli / 2 {
            self.taken /= 2;
            self.given_back /= 2;
        }
        let (before, answered) = (self.pods_end, self.pods_end());
        // A twentieth, and to go back less than a fortieth, so that it does not waver.
        self.pods_end = match before {
            false => self.given_back * 20 >= self.taken,
            true => self.given_back * 40 >= self.taken,
        };
        self.pods_end() != answered
    }

    pub(crate) fn given_back(&mut self, milli: u64) {
        self.given_back += milli;
    }
}
