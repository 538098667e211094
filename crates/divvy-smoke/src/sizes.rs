//! How much of the GPU a run uses.

/// A mebibyte.
pub const MIB: u64 = 1 << 20;
/// The most memory that a run allocates, besides its context.
pub const MOST: u64 = 256 * MIB;
/// The least memory with which the steps prove something.
pub const LEAST: u64 = 4 * MIB;
/// What a run is to have in addition to its context.
pub const WANTED: u64 = 64 * MIB;
/// No context takes more. What is in use beyond that belongs to other processes.
pub const LARGEST_CONTEXT: u64 = 1024 * MIB;
/// The elements of the vectors in CUDA's sample vectorAdd.
pub const ELEMENTS: u32 = 50_000;

/// The sizes of all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The elements of each of the three vectors.
    pub elements: u32,
    /// The bytes that are filled, compared, and copied; a multiple of 64.
    pub bytes: u64,
    /// The rows of the matrices of f32; a multiple of 16.
    pub rows: u32,
    /// The rows of the matrices of f64; a multiple of 16.
    pub rows64: u32,
    /// How often each tensor core multiplies.
    pub loops: u32,
    /// How many warps of each multiprocessor do that.
    pub warps: u32,
    /// How often each copy is measured.
    pub copies: u32,
}

/// Why a share is too small for a run. The amounts are in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TooSmall {
    /// The context takes too much of the share.
    #[error("a context alone takes {used} MiB, and the share has {share} MiB, of which {free} MiB are free then")]
    Context {
        /// What the context takes.
        used: u64,
        /// The share.
        share: u64,
        /// What is free after the context was made.
        free: u64,
    },
    /// Other processes hold too much of the share.
    #[error("{free} of {share} MiB are free after a context was made, and other processes hold the rest")]
    Others {
        /// The share.
        share: u64,
        /// What is free after the context was made.
        free: u64,
    },
}

impl Sizes {
    /// Return the sizes for a share of which so many bytes are free after the context was made.
    ///
    /// The run uses at most half of the share and at most 256 MiB, so that it may run next to other programs.
    pub fn within(share: u64, free: u64) -> Result<Sizes, TooSmall> {
        // Small allocations have pages of their own.
        let bytes = (share / 2).min(MOST).min(free.saturating_sub(free / 4)) / MIB * MIB;
        if bytes < LEAST {
            let (used, share, free) = (share.saturating_sub(free).div_ceil(MIB), share / MIB, free / MIB);
            return Err(if used <= LARGEST_CONTEXT / MIB {
                TooSmall::Context { used, share, free }
            } else {
                TooSmall::Others { share, free }
            });
        }
        // The three matrices may take a quarter of the bytes; the largest are 1,024 rows.
        let rows = [1024_u32, 512, 256].into_iter();
        let rows = rows
            .clone()
            .find(|rows| 12 * u64::from(*rows).pow(2) <= bytes / 4)
            .unwrap_or(256);
        Ok(Sizes {
            elements: ELEMENTS,
            // The vectors and matrices are freed before; the results of the comparison take one more page.
            bytes,
            rows,
            rows64: 64,
            loops: u32::try_from(bytes / (64 << 10)).unwrap_or(4096).min(4096),
            warps: 4,
            copies: 10,
        })
    }
}

/// Return what a share must have for a run to be possible, in MiB, if a context takes so many bytes.
pub fn needed_mib(context: u64) -> u64 {
    context.saturating_add(WANTED).div_ceil(MIB)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_follow_the_share() {
        let table = [
            // share, free: bytes, rows, loops
            (81_559, 81_000, 256, 1024, 4096),
            (2048, 1500, 256, 1024, 4096),
            (200, 180, 100, 1024, 1600),
            (100, 16, 12, 512, 192),
            (10, 10, 5, 256, 80),
        ];
        for (share, free, bytes, rows, loops) in table {
            let sizes = Sizes::within(share * MIB, free * MIB).expect("large enough");
            assert_eq!(
                (sizes.bytes / MIB, sizes.rows, sizes.loops),
                (bytes, rows, loops),
                "{share} {free}"
            );
        }
    }

    /// The message says how much memory a context takes.
    #[test]
    fn a_too_small_share_is_refused() {
        let refused = Sizes::within(100 * MIB, 3 * MIB).expect_err("too small");
        assert_eq!(
            refused.to_string(),
            "a context alone takes 97 MiB, and the share has 100 MiB, of which 3 MiB are free then"
        );
        let full = Sizes::within(81_559 * MIB, 3 * MIB).expect_err("full");
        assert_eq!(
            full.to_string(),
            "3 of 81559 MiB are free after a context was made, and other processes hold the rest"
        );
        assert_eq!(needed_mib(550 * MIB), 614);
    }

    proptest! {
        /// A run also uses at most 256 MiB and at most the memory that is free.
        #[test]
        fn a_run_uses_at_most_half_the_share(share in 0_u64..1 << 40, part in 0_u64..1 << 40) {
            let free = part.min(share);
            if let Ok(sizes) = Sizes::within(share, free) {
                prop_assert!(sizes.bytes <= share / 2 && sizes.bytes <= MOST && sizes.bytes <= free);
                prop_assert!(12 * u64::from(sizes.rows).pow(2) <= sizes.bytes && sizes.bytes % 64 == 0);
            }
        }
    }
}
