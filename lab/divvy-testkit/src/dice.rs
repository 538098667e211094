//! Random numbers that a seed determines, so that a run can be repeated. They are not for secrets.

/// A SplitMix64 generator (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Dice(u64);

/// What is added to the state for each number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Dice {
    /// Create a generator. The same seed yields the same numbers.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Create one of a run's several generators, chosen by name.
    pub fn named(seed: u64, name: &str) -> Dice {
        // The seed is mixed first, because adjacent seeds and similar names differ in the same few bits.
        Dice(Dice(seed).number() ^ hash(name))
    }

    /// Create another generator that is independent of this generator's later numbers.
    pub fn fork(&mut self) -> Dice {
        Dice(self.number())
    }

    /// Return the number at a position of the sequence that begins with the seed 0.
    pub fn at(position: u64) -> u64 {
        Dice(position.wrapping_mul(STEP)).number()
    }

    /// Return the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Return a number below `bound`, or 0 if `bound` is 0. The tiny bias of the remainder does not matter here.
    pub fn below(&mut self, bound: usize) -> usize {
        let number = self.number().checked_rem(bound as u64).unwrap_or(0);
        usize::try_from(number).unwrap_or(0)
    }

    /// Return a number from `low` to `high`, inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.number() % (high - low + 1)
    }

    /// Return true once in `n` calls, on average.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Return true in so many of 100 calls, on average.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.number() % 100 < chance
    }

    /// Return one of the items.
    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Shuffle the items (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Return `digits` hexadecimal digits.
    pub fn hex(&mut self, digits: usize) -> String {
        let mut text = String::with_capacity(digits + 16);
        while text.len() < digits {
            text.push_str(&format!("{:016x}", self.number()));
        }
        text.truncate(digits);
        text
    }
}

/// Return a number that depends only on the text (FNV-1a).
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::Dice;

    #[test]
    fn neighbours_with_neighbouring_seeds_make_different_choices() {
        let names = ["n0", "n1", "n2", "n3", "a-node-with-a-name-of-many-letters.example.com"];
        let seeds = (0..8).flat_map(|seed| names.map(|name| Dice::named(seed, name).hex(64)));
        let different: std::collections::BTreeSet<String> = seeds.collect();
        assert_eq!(different.len(), 8 * names.len());
    }

    #[test]
    fn the_same_seed_gives_the_same_run() {
        let (mut a, mut b) = (Dice::new(7), Dice::new(7));
        let mut first: Vec<u32> = (0..50).collect();
        let mut second = first.clone();
        a.shuffle(&mut first);
        b.shuffle(&mut second);
        assert_eq!(first, second);
        assert_ne!(first, (0..50).collect::<Vec<_>>());
        assert_eq!(a.hex(64).len(), 64);
    }
}
