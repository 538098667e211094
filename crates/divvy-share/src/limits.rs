//! The file `limits`: what a pod may use of one GPU.
//!
//! The file holds two copies, each with a generation and a checksum. The writer replaces the older copy, so one copy is whole at each moment,
//! also when the writer was killed in the middle. A reader takes the newer whole copy and waits for nobody.
//!
//! The words are in the machine's byte order: the file never leaves the machine.

/// `DIVVYLIM`, in the order of bytes of a little-endian machine.
const MAGIC: u64 = u64::from_le_bytes(*b"DIVVYLIM");
/// The version of the layout. A later version keeps the first two words, so that an older reader can tell.
pub const VERSION: u64 = 1;
/// Words of one copy.
const COPY: usize = 16;
/// Words of the file.
pub const WORDS: usize = 2 * COPY;
/// Bytes of the file.
pub const SIZE: usize = WORDS * 8;

/// What a pod may use of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The pod's share of the memory, in bytes.
    pub bytes: u64,
    /// Memory that the driver reports for the pod and that no process has in its slot, in bytes.
    pub overhead: u64,
    /// What one context takes on this model of GPU, in bytes.
    pub context: u64,
    /// GPU time that the pod may use, in nanoseconds per second; 0 is without a limit. No guard reads it yet.
    pub rate: u64,
    /// Of two pods that wait for the GPU, the one with the higher value is first. No guard reads it yet.
    pub priority: u64,
    /// Managed memory is refused. Otherwise it is charged as if it were on the GPU.
    pub refuse_managed: bool,
}

/// Why no limits could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The file is something else.
    #[error("the file does not start as a file of limits does; the agent has to write it again")]
    Foreign,
    /// An agent of a later version wrote the file.
    #[error(
        "the file has layout version {0}, which this version of Divvy does not know; restart the pod to get the matching guard"
    )]
    Newer(u64),
    /// Neither copy is whole. Either both were replaced during the read, and a second read helps, or the file is damaged.
    #[error("neither copy in the file is whole; the agent has to write it again")]
    Torn,
}

impl Limits {
    /// What the processes of the pod may have charged together.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.bytes.saturating_sub(self.overhead)
    }

    /// One copy for the file, and the byte where it belongs. A writer increases the generation by one each time.
    #[must_use]
    pub fn copy(&self, generation: u64) -> (u64, [u8; COPY * 8]) {
        let mut words = [0; COPY];
        words[0] = MAGIC;
        words[1] = VERSION;
        words[2] = generation;
        words[3] = self.bytes;
        words[4] = self.overhead;
        words[5] = self.context;
        words[6] = self.rate;
        words[7] = self.priority;
        words[8] = u64::from(self.refuse_managed);
        words[COPY - 1] = checksum(&words);
        let mut bytes = [0; COPY * 8];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        (if generation.is_multiple_of(2) { 0 } else { COPY as u64 * 8 }, bytes)
    }

    /// A new file: both copies, with the generations 0 and 1.
    #[must_use]
    pub fn file(&self) -> [u8; SIZE] {
        let mut file = [0; SIZE];
        for (generation, half) in file.chunks_exact_mut(COPY * 8).enumerate() {
            half.copy_from_slice(&self.copy(generation as u64).1);
        }
        file
    }

    /// The limits in a file's words, and their generation.
    ///
    /// # Errors
    ///
    /// If the file has no copy that is whole and of this version.
    pub fn parse(words: &[u64; WORDS]) -> Result<(u64, Self), Unreadable> {
        let (first, second) = words.split_at(COPY);
        match (copy(first), copy(second)) {
            (Ok(first), Ok(second)) => Ok(if first.0 > second.0 { first } else { second }),
            (Ok(whole), Err(Unreadable::Torn)) | (Err(Unreadable::Torn), Ok(whole)) => Ok(whole),
            // A later version may begin with a part that looks like ours.
            (Err(newer @ Unreadable::Newer(_)), _) | (_, Err(newer @ Unreadable::Newer(_))) => Err(newer),
            (Err(Unreadable::Foreign), _) | (_, Err(Unreadable::Foreign)) => Err(Unreadable::Foreign),
            (Err(Unreadable::Torn), Err(Unreadable::Torn)) => Err(Unreadable::Torn),
        }
    }

    /// The limits in a file's bytes, and their generation.
    ///
    /// # Errors
    ///
    /// If the file is shorter than [`SIZE`] or has no copy that is whole and of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<(u64, Self), Unreadable> {
        let mut words = [0; WORDS];
        let bytes = bytes.get(..SIZE).ok_or(Unreadable::Foreign)?;
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self::parse(&words)
    }
}

fn copy(words: &[u64]) -> Result<(u64, Limits), Unreadable> {
    let &[
        magic,
        version,
        generation,
        bytes,
        overhead,
        context,
        rate,
        priority,
        flags,
        ..,
        sum,
    ] = words
    else {
        return Err(Unreadable::Foreign);
    };
    if magic != MAGIC {
        return Err(Unreadable::Foreign);
    }
    if version > VERSION {
        return Err(Unreadable::Newer(version));
    }
    if version != VERSION || sum != checksum(words) {
        return Err(Unreadable::Torn);
    }
    let limits = Limits {
        bytes,
        overhead,
        context,
        rate,
        priority,
        refuse_managed: flags & 1 != 0,
    };
    Ok((generation, limits))
}

/// Tells a copy that is partly old and partly new from a whole one. It protects against nobody: only root can write the file.
fn checksum(words: &[u64]) -> u64 {
    let body = words.split_last().map_or(words, |(_, body)| body);
    body.iter().fold(MAGIC, |sum, word| {
        (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}
