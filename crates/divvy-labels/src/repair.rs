//! When to repair labels that another program removes or overwrites. Times are in ms, from any start.

/// The pause after the first repair. It doubles with each further one.
const FIRST: u64 = 1_000;
/// The longest pause.
const LONGEST: u64 = 300_000;
/// The time after which an undisturbed repair is forgotten.
const QUIET: u64 = 2 * LONGEST;

/// The repairs so far. Without pauses, a program that always removes a label would make this one write to the API server in a loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Repairs {
    last: Option<u64>,
    pause: u64,
}

impl Repairs {
    /// Return the time at which to repair what is found undone at `now`: at once the first time, and never more than 5 min later.
    pub fn due(&self, now: u64) -> u64 {
        self.last.map_or(now, |last| now.max(last.saturating_add(self.pause)))
    }

    /// Note a repair. Report whether it is the second one in a row, so that the operator should hear of the other program.
    pub fn made(&mut self, now: u64) -> bool {
        let is_in_a_row = self.last.is_some_and(|last| now.saturating_sub(last) < QUIET);
        let is_second = is_in_a_row && self.pause == FIRST;
        self.pause = if is_in_a_row {
            self.pause.saturating_mul(2).min(LONGEST)
        } else {
            FIRST
        };
        self.last = Some(now);
        is_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Play a program that undoes each repair after `delay`, and return the times of the repairs within `duration`.
    fn repairs(delay: u64, duration: u64) -> Vec<u64> {
        let (mut repairs, mut now, mut times) = (Repairs::default(), 0, Vec::new());
        while now < duration {
            now = repairs.due(now);
            repairs.made(now);
            times.push(now);
            now += delay;
        }
        times
    }

    const DAY: u64 = 86_400_000;

    /// A fight over a label costs one write every five minutes.
    #[test]
    fn the_first_repair_is_immediate() {
        let times = repairs(1, DAY);
        assert_eq!(times[..5], [0, 1_000, 3_000, 7_000, 15_000]);
        let pauses = times.windows(2).map(|pair| pair[1] - pair[0]);
        assert_eq!(pauses.clone().max(), Some(LONGEST));
        assert!(pauses.is_sorted() && times.len() < 300, "{} repairs", times.len());
    }

    /// A rare repair does not wait.
    #[test]
    fn a_repair_waits_five_minutes_at_most() {
        for delay in [0, 1, 999, 1_000, 60_000, LONGEST - 1, LONGEST, QUIET - 1, QUIET, DAY] {
            let times = repairs(delay, 30 * DAY);
            for pair in times.windows(2) {
                let waited = pair[1] - pair[0] - delay;
                assert!(waited <= LONGEST, "{delay}: {waited}");
                assert!(waited == 0 || delay < LONGEST, "{delay}: {waited}");
            }
        }
    }

    /// Each fight is reported once.
    #[test]
    fn a_fight_starts_anew_after_a_quiet_time() {
        let mut repairs = Repairs::default();
        for fight in [0, DAY, 2 * DAY] {
            let mut now = fight;
            let mut told = 0;
            assert_eq!(repairs.due(now), now);
            for _ in 0..20 {
                now = repairs.due(now);
                told += u32::from(repairs.made(now));
            }
            assert_eq!(told, 1);
        }
    }

    #[test]
    fn no_clock_makes_it_overflow() {
        let mut repairs = Repairs::default();
        repairs.made(u64::MAX);
        repairs.made(u64::MAX);
        assert_eq!((repairs.due(u64::MAX), repairs.due(0)), (u64::MAX, u64::MAX));
    }
}
