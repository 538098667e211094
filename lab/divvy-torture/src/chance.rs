//! Random numbers that are determined by a step: the same `luck` and the same text yield the same outcome, whatever happened
//! before.

/// A SplitMix64 generator (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Create a generator from a step's `luck` and from the text that identifies its subject.
    pub fn new(luck: u8, about: &str) -> Chance {
        // FNV-1a, so that the number depends only on the text.
        let hash = about.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Chance(hash ^ (u64::from(luck) << 32))
    }

    /// Create a generator from a history's number.
    ///
    /// Adjacent numbers yield dissimilar sequences. The number is mixed first, because SplitMix64 only adds a constant for each
    /// draw.
    pub fn from_seed(seed: u64) -> Chance {
        Chance(Chance(seed).number())
    }

    /// Return a random number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Return a random number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let number = self.number();
        if bound == 0 {
            0
        } else {
            usize::try_from(number % bound as u64).unwrap_or(0)
        }
    }

    /// Return true once in `n` calls, on average.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Shuffle the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
