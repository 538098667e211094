use std::collections::BTreeMap;

use super::Demand;

/// How often each class of pods is asked for. Pods that differ in main memory only are of one class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mix {
    counts: BTreeMap<Demand, u64>,
    total: u64,
}

impl Mix {
    /// No pod was seen.
    pub fn new() -> Mix {
        Mix::default()
    }

    /// One more.
    pub fn add(&mut self, demand: &Demand) {
        *self.counts.entry(demand.class()).or_default() += 1;
        self.total += 1;
    }

    /// All pods.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The classes and how many pods each has, in the order of their demands.
    pub fn classes(&self) -> impl Iterator<Item = (&Demand, u64)> {
        self.counts.iter().map(|(demand, count)| (demand, *count))
    }

    /// The classes that FGD calls typical: the most frequent, of equals the larger first, until they are 95 % of all pods
    /// (research/fgd.md section 1).
    pub fn typical(&self) -> Mix {
        let classes = self.by_frequency();
        let mut typical = Mix::new();
        for (demand, count) in classes {
            if typical.total * 100 >= self.total * 95 {
                break;
            }
            typical.counts.insert(demand, count);
            typical.total += count;
        }
        typical
    }

    /// So many classes at most: the most frequent, of equals the larger.
    pub fn most_frequent(self, classes: usize) -> Mix {
        match self.counts.len() > classes {
            true => self.by_frequency().into_iter().take(classes).collect(),
            false => self,
        }
    }

    fn by_frequency(&self) -> Vec<(Demand, u64)> {
        let mut classes: Vec<(Demand, u64)> = self.classes().map(|(demand, count)| (*demand, count)).collect();
        classes.sort_by(|(a, at), (b, bt)| (bt, size(b)).cmp(&(at, size(a))));
        classes
    }
}

fn size(demand: &Demand) -> (u8, u64, u32) {
    let share = match demand.share {
        super::Share::Milli(milli) => u64::from(milli),
        super::Share::Memory(memory) => u64::from(memory),
    };
    (demand.gpus, share, demand.cpu_milli)
}

impl FromIterator<(Demand, u64)> for Mix {
    fn from_iter<I: IntoIterator<Item = (Demand, u64)>>(classes: I) -> Mix {
        let mut mix = Mix::new();
        for (demand, count) in classes {
            *mix.counts.entry(demand.class()).or_default() += count;
            mix.total += count;
        }
        mix
    }
}

impl<'a> FromIterator<&'a Demand> for Mix {
    fn from_iter<I: IntoIterator<Item = &'a Demand>>(demands: I) -> Mix {
        let mut mix = Mix::new();
        demands.into_iter().for_each(|demand| mix.add(demand));
        mix
    }
}
