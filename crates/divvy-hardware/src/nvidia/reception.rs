//! Whether the driver's events arrive, for each GPU.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::{GpuFacts, NoEvents};

/// Whether events arrive. The event thread writes it, and snapshots report it. It outlives the driver's being opened again, so that this does
/// not shorten the time for which no event arrived.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reception(Arc<Mutex<ReceptionState>>);

#[derive(Debug, Default)]
struct ReceptionState {
    /// Why no event of any GPU arrives.
    all: Option<Silence>,
    /// Why no event of these GPUs arrives, by UUID.
    gpus: BTreeMap<String, Silence>,
}

#[derive(Debug)]
struct Silence {
    since: Instant,
    error: String,
}

impl Reception {
    fn lock(&self) -> MutexGuard<'_, ReceptionState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Record that no event set could be created, or that waiting for events failed.
    pub(super) fn fails(&self, now: Instant, error: String) {
        let all = &mut self.lock().all;
        let since = all.as_ref().map_or(now, |silence| silence.since);
        *all = Some(Silence { since, error });
    }

    /// Record that an event set works: a wait has ended without an error. That an event set could be created is not enough.
    pub(super) fn works(&self) {
        self.lock().all = None;
    }

    /// Record the GPUs that could not be registered with a new event set, with the error. All others could be registered, or never report events.
    pub(super) fn registered(&self, now: Instant, failed: BTreeMap<String, String>) {
        let gpus = &mut self.lock().gpus;
        let silences = failed.into_iter().map(|(uuid, error)| {
            let since = gpus.get(&uuid).map_or(now, |silence| silence.since);
            (uuid, Silence { since, error })
        });
        *gpus = silences.collect();
    }

    /// Add to each GPU why and for how long none of its events arrived.
    pub(super) fn add(&self, now: Instant, gpus: &mut [GpuFacts]) {
        let state = self.lock();
        for gpu in gpus {
            let silence = state.all.as_ref().or_else(|| state.gpus.get(&gpu.uuid));
            gpu.no_events = silence.map(|silence| NoEvents {
                error: silence.error.clone(),
                ms: now
                    .saturating_duration_since(silence.since)
                    .as_millis()
                    .try_into()
                    .unwrap_or(u64::MAX),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The time without events begins with the first error.
    #[test]
    fn time_without_events_ends_when_an_event_set_works() {
        let reception = Reception::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let found = |seconds| {
            let mut gpus = ["GPU-a", "GPU-b"].map(|uuid| GpuFacts {
                uuid: uuid.to_owned(),
                ..GpuFacts::default()
            });
            reception.add(at(seconds), &mut gpus);
            gpus.map(|gpu| gpu.no_events.map(|no_events| (no_events.ms / 1000, no_events.error)))
        };
        let failed = |error: &str| BTreeMap::from([("GPU-b".to_owned(), error.to_owned())]);
        let told = |seconds, error: &str| Some((seconds, error.to_owned()));
        assert_eq!(found(0), [None, None]);
        reception.fails(at(1), "no set".to_owned());
        reception.fails(at(5), "no wait".to_owned());
        assert_eq!(found(9), [told(8, "no wait"), told(8, "no wait")]);
        reception.registered(at(10), failed("x"));
        assert_eq!(found(11)[0], told(10, "no wait"), "a new event set is not enough");
        reception.works();
        assert_eq!(found(12), [None, told(2, "x")]);
        reception.registered(at(20), failed("y"));
        assert_eq!(found(21), [None, told(11, "y")]);
        reception.registered(at(30), BTreeMap::new());
        assert_eq!(found(31), [None, None]);
        reception.registered(at(40), failed("z"));
        assert_eq!(found(41), [None, told(1, "z")]);
    }
}
