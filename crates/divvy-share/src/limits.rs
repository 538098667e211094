//! The file `limits`: what a pod may use of one GPU.
//!
//! The file holds two copies, each with a generation and a checksum. The writer replaces the older copy, so one copy is complete at every moment, even if
//! the writer is killed while it writes. A reader takes the newer complete copy, and never waits.
//!
//! The words are in the machine's byte order, because the file never leaves the machine.

/// `DIVVYLIM`, in the order of bytes of a little-endian machine.
const MAGIC: u64 = u64::from_le_bytes(*b"DIVVYLIM");
/// The version of the layout. A later version keeps the first two words, so that an older reader can tell.
pub const VERSION: u64 = 1;
/// Words of one copy.
const COPY: usize = 16;
/// The word of a copy that has its generation.
const GENERATION: usize = 2;
/// Words of the file.
pub const WORDS: usize = 2 * COPY;
/// The words of which one changes whenever the content changes: the versions and the checksums of the copies.
pub const MARK: [usize; 4] = [1, COPY - 1, COPY + 1, WORDS - 1];
/// What is at [`MARK`].
pub type LimitsMark = [u64; MARK.len()];
/// Bytes of the file.
pub const SIZE: usize = WORDS * 8;

/// Return the offset, in bytes, of the 32 bits that change when the copy of this generation is written. A process that waits for the copy calls futex(2) with
/// this address. The writer wakes all waiting processes after it has written.
#[must_use]
pub fn bell(generation: u64) -> usize {
    let copy = if generation.is_multiple_of(2) { 0 } else { COPY * 8 };
    // The low half of the generation.
    copy + GENERATION * 8 + if cfg!(target_endian = "big") { 4 } else { 0 }
}

/// The memory that the driver gives an allocation with its own pages is a multiple of this.
const PAGE: u64 = 2 << 20;

/// A whole GPU, in nanoseconds per second.
pub const WHOLE: u64 = 1_000_000_000;

/// A pod's compute time, as the agent writes it after each measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeAccount {
    /// The GPU time that the pod had left, in nanoseconds. It is negative if the pod has used more than its rate.
    pub balance: i64,
    /// When that was, in nanoseconds of `CLOCK_MONOTONIC`, which all containers of a machine share.
    pub at: u64,
    /// The launches of all processes until then ([`crate::compute::launches`]).
    pub launches: u64,
    /// The GPU time that a launch of this pod usually takes, in nanoseconds. 0: not known yet.
    pub launch_ns: u64,
}

/// What a pod may use of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareLimits {
    /// The pod's share of the memory, in bytes.
    pub bytes: u64,
    /// Memory in bytes that the driver reports for the pod and that is in no process's slot.
    pub overhead: u64,
    /// Memory in bytes with which each context of the pod's processes is charged. It can change while they run, and applies to all of them then.
    pub context: u64,
    /// GPU time that the pod may use, in nanoseconds per second. 0 means no limit.
    pub rate: u64,
    /// Of two pods that wait for the GPU, the one with the higher value runs first. Nothing reads it: pods do not wait for each other, but for their own
    /// balance.
    pub priority: u64,
    /// What the pod has left of its compute time.
    pub account: ComputeAccount,
    /// Whether managed memory is refused. Otherwise it is charged as if it were on the GPU.
    pub refuse_managed: bool,
    /// Whether the agent stops pods on this node (`--on-escape throttle`). If so, processes look at the limits before they launch, also without a rate.
    pub may_stop: bool,
    /// Whether all launches of the pod wait until this is false again, because a program of the pod avoids its limits.
    pub is_stopped: bool,
}

/// Why no limits could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableLimits {
    /// The file is not a file of limits.
    #[error("the file does not begin like a file of limits; the agent must write it again")]
    Foreign,
    /// An agent of a later version wrote the file.
    #[error(
        "the file has layout version {0}, which this version of Divvy does not know; restart the pod to get the matching guard"
    )]
    Newer(u64),
    /// Neither copy is complete. Either both were replaced during the read, so that another read helps, or the file is damaged.
    #[error("neither copy in the file is complete; the agent must write it again")]
    Torn,
}

impl ShareLimits {
    /// Return the number of bytes with which the processes of the pod together may be charged.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.bytes.saturating_sub(self.overhead)
    }

    /// Return the number of bytes with which so many contexts are charged: whole pages each.
    #[must_use]
    pub fn contexts(&self, count: u64) -> u64 {
        let each = self.context.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        each.saturating_mul(count)
    }

    /// Report whether the pod's compute time is limited. No pod can use more than the whole GPU.
    #[must_use]
    pub fn limits_compute(&self) -> bool {
        self.rate > 0 && self.rate < WHOLE
    }

    /// Report whether the processes of the pod must look at the limits before they launch.
    #[must_use]
    pub fn holds_launches(&self) -> bool {
        self.limits_compute() || self.may_stop || self.is_stopped
    }

    /// Return one copy for the file, and its position in bytes. A writer increases the generation by one each time.
    #[must_use]
    pub fn copy(&self, generation: u64) -> (u64, [u8; COPY * 8]) {
        let mut words = [0; COPY];
        words[0] = MAGIC;
        words[1] = VERSION;
        words[GENERATION] = generation;
        words[3] = self.bytes;
        words[4] = self.overhead;
        words[5] = self.context;
        words[6] = self.rate;
        words[7] = self.priority;
        words[8] = flags([self.refuse_managed, self.may_stop, self.is_stopped]);
        words[9] = self.account.balance.cast_unsigned();
        words[10] = self.account.at;
        words[11] = self.account.launches;
        words[12] = self.account.launch_ns;
        words[COPY - 1] = checksum(&words);
        let mut bytes = [0; COPY * 8];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        (if generation.is_multiple_of(2) { 0 } else { COPY as u64 * 8 }, bytes)
    }

    /// Return a new file: both copies, with the generations 0 and 1.
    #[must_use]
    pub fn file(&self) -> [u8; SIZE] {
        let mut file = [0; SIZE];
        for (generation, half) in file.chunks_exact_mut(COPY * 8).enumerate() {
            half.copy_from_slice(&self.copy(generation as u64).1);
        }
        file
    }

    /// Read the limits and their generation from a file's words.
    ///
    /// # Errors
    ///
    /// Fails if the file has no complete copy of this version.
    pub fn parse(words: &[u64; WORDS]) -> Result<(u64, Self), UnreadableLimits> {
        Self::parse_marked(words).map(|(limits, _)| limits)
    }

    /// Read the limits and their generation from a file's words, and the mark by which a reader knows later that the file has not changed: what is at
    /// [`MARK`] if both copies are complete. The mark is `None` while a copy is being replaced, because its words can become visible in any order.
    ///
    /// # Errors
    ///
    /// Fails if the file has no complete copy of this version.
    pub fn parse_marked(words: &[u64; WORDS]) -> Result<((u64, Self), Option<LimitsMark>), UnreadableLimits> {
        let (first, second) = words.split_at(COPY);
        let result = match (copy(first), copy(second)) {
            (Ok(first), Ok(second)) => {
                let newer = if first.0 > second.0 { first } else { second };
                return Ok((newer, Some(MARK.map(|at| words[at]))));
            }
            (Ok(whole), Err(UnreadableLimits::Torn)) | (Err(UnreadableLimits::Torn), Ok(whole)) => Ok(whole),
            // A part of a later version may look like this version.
            (Err(newer @ UnreadableLimits::Newer(_)), _) | (_, Err(newer @ UnreadableLimits::Newer(_))) => Err(newer),
            (Err(UnreadableLimits::Foreign), _) | (_, Err(UnreadableLimits::Foreign)) => Err(UnreadableLimits::Foreign),
            (Err(UnreadableLimits::Torn), Err(UnreadableLimits::Torn)) => Err(UnreadableLimits::Torn),
        };
        result.map(|limits| (limits, None))
    }

    /// Read the limits and their generation from a file's bytes.
    ///
    /// # Errors
    ///
    /// Fails if the file is shorter than [`SIZE`] or has no complete copy of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<(u64, Self), UnreadableLimits> {
        let mut words = [0; WORDS];
        let bytes = bytes.get(..SIZE).ok_or(UnreadableLimits::Foreign)?;
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self::parse(&words)
    }
}

fn copy(words: &[u64]) -> Result<(u64, ShareLimits), UnreadableLimits> {
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
        balance,
        at,
        launches,
        launch_ns,
        ..,
        sum,
    ] = words
    else {
        return Err(UnreadableLimits::Foreign);
    };
    if magic != MAGIC {
        return Err(UnreadableLimits::Foreign);
    }
    if version > VERSION {
        return Err(UnreadableLimits::Newer(version));
    }
    if version != VERSION || sum != checksum(words) {
        return Err(UnreadableLimits::Torn);
    }
    let limits = ShareLimits {
        bytes,
        overhead,
        context,
        rate,
        priority,
        refuse_managed: flags & 1 != 0,
        may_stop: flags & 2 != 0,
        is_stopped: flags & 4 != 0,
        account: ComputeAccount {
            balance: balance.cast_signed(),
            at,
            launches,
            launch_ns,
        },
    };
    Ok((generation, limits))
}

/// One bit for each flag, from the lowest.
fn flags(flags: [bool; 3]) -> u64 {
    flags.into_iter().rev().fold(0, |bits, flag| bits << 1 | u64::from(flag))
}

/// Distinguishes a complete copy from one that is partly old and partly new. It is no protection against attacks; only root can write the file.
fn checksum(words: &[u64]) -> u64 {
    let body = words.split_last().map_or(words, |(_, body)| body);
    body.iter().fold(MAGIC, |sum, word| {
        (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}
