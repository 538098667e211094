//! Hashes that are the same on every machine and in every version: decisions hang on them.

/// A node's place in the order of nodes that are worth the same: spread over all numbers by its name (FNV-1a, then SplitMix64's
/// last step), so that nodes with like names, which are mostly alike, do not stand together.
pub fn rank(name: &str) -> u64 {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(fnv)
}

/// SplitMix64's last step: each bit of the answer hangs on each bit of the question.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
