//! Hashes that are the same on every machine and in every version, because decisions depend on them.

/// Return a node's rank among nodes of equal cost: a hash of its name (FNV-1a, then the last step of SplitMix64). Nodes with
/// similar names mostly have similar hardware; the hash spreads them, so that they do not fill up one after another.
pub fn rank(name: &str) -> u64 {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(fnv)
}

/// Return the last step of SplitMix64: each bit of the result depends on each bit of the value.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
