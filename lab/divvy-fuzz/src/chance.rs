//! Random changes of an input.

use serde_json::Value;

use super::json;

/// Words that have a meaning in some format.
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

/// The greatest number of bytes that one change adds.
pub const MOST: usize = 32 * 1024;

/// An xorshift64* generator.
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

    /// Return a word of some format.
    pub fn word(&mut self) -> &'static str {
        WORDS[self.below(WORDS.len())]
    }

    /// Change an input in one place. In two of three cases, JSON remains JSON: most inputs are JSON, and hardly any change of their bytes gets
    /// past the parser.
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
            // Rare, because it slows down everything that follows: many copies of one thing.
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
