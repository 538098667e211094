use std::collections::BTreeMap;

use super::Demand;

/// How often each class of pods occurs. Pods that differ only in main memory belong to the same class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mix {
    counts: BTreeMap<Demand, u64>,
    total: u64,
}

impl Mix {
    /// Create an empty mix.
    pub fn new() -> Mix {
        Mix::default()
    }

    /// Add one pod.
    pub fn add(&mut self, demand: &Demand) {
        *self.counts.entry(demand.class()).or_default() += 1;
        self.total += 1;
    }

    /// Return the number of pods.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Return the classes with their numbers of pods, sorted by demand.
    pub fn classes(&self) -> impl Iterator<Item = (&Demand, u64)> {
        self.counts.iter().map(|(demand, count)| (demand, *count))
    }

    /// Return the classes that FGD calls typical: the most frequent classes that together make up 95 % of all pods; on a tie, the
    /// larger class comes first (`GetTypicalPods` in the simulator that was published with FGD,
    /// github.com/hkust-adsl/kubernetes-scheduler-simulator).
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

    /// Return the most frequent classes, at most `classes` of them; on a tie, the larger class is kept.
    pub fn most_frequent(self, classes: usize) -> Mix {
        if self.counts.len() > classes {
            self.by_frequency().into_iter().take(classes).collect()
        } else {
            self
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
        super::DemandShare::Milli(milli) => u64::from(milli),
        super::DemandShare::Memory(memory) => u64::from(memory),
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
