//! Random numbers that are determined by a step: the same `luck` and the same text yield the same outcome, whatever happened
//! before.

use divvy_testkit::dice::{Dice, hash};

/// Create a generator from a step's `luck` and from the text that identifies its subject.
pub fn of_step(luck: u8, about: &str) -> Dice {
    Dice::new(hash(about) ^ (u64::from(luck) << 32))
}

/// Create a generator from a history's number. Adjacent numbers yield dissimilar sequences.
pub fn of_history(number: u64) -> Dice {
    Dice::new(number).fork()
}
