//! Changes by chance.

use serde_json::Value;

use super::json;

/// What a format makes something of.
const WORDS: [&str; 24] = [
    "null",
    "{}",
    "[]",
    "\"",
    "\\u0000",
    "\\ud800",
    "1e999",
    "-0",
    "18446744073709551616",
    "true",
    "&a ",
    "*a",
    "<<: *a",
    "!!binary ",
    "- ",
    ": ",
    "|\n",
    "'''",
    "\n",
    "=",
    "[[",
    "..",
    "\u{202e}",
    "all,none,void",
];

/// Bytes that one change adds at most.
pub const MOST: usize = 32 * 1024;

/// xorshift64*
#[derive(Debug)]
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap_or(0) % end.max(1)
    }

    /// A word of some format.
    pub fn word(&mut self) -> &'static str {
        WORDS[self.below(WORDS.len())]
    }

    /// Changes an input in one place. JSON stays JSON two times out of three: most of what is read is JSON, and hardly any change of its bytes
    /// gets beyond the parser.
    pub fn change(&mut self, input: &mut Vec<u8>) {
        if self.below(3) > 0
            && matches!(input.first(), Some(b'{' | b'['))
            && let Ok(mut value) = serde_json::from_slice::<Value>(input)
        {
            json::change(self, &mut value);
            *input = value.to_string().into_bytes();
            return;
        }
        let at = self.below(input.len());
        match self.below(17) {
            // Seldom, since it makes all that follows slower: many of one thing.
            16 if input.len() < MOST => {
                let end = (at + 1 + self.below(40)).min(input.len());
                let piece = input[at.min(end)..end].to_vec();
                let times = self.below(MOST / piece.len().max(1));
                input.splice(at..at, piece.repeat(times));
            }
            change => self.small(change / 2, at, input),
        }
    }

    fn small(&mut self, change: usize, at: usize, input: &mut Vec<u8>) {
        match change {
            0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            1 if !input.is_empty() => input[at] = [0, 1, 0x7f, 0xff, b'"', b'\n', b' ', b'9'][self.below(8)],
            2 => input.truncate(at),
            3 => {
                let end = (at + self.below(40)).min(input.len());
                input.drain(at.min(end)..end);
            }
            4 => {
                let end = (at + self.below(60)).min(input.len());
                let piece = input[at.min(end)..end].to_vec();
                let to = self.below(input.len());
                input.splice(to..to, piece);
            }
            5 if input.len() >= 4 => {
                let at = at.min(input.len() - 4);
                let number = [0, 1, u32::MAX, 0x7fff_ffff, u32::try_from(input.len()).unwrap_or(0)][self.below(5)];
                input[at..at + 4].copy_from_slice(&number.to_le_bytes());
            }
            _ => {
                let word = self.word();
                input.splice(at..at, word.bytes());
            }
        }
    }
}
