//! Writes the simulated driver library of a CUDA version: a copy that has only the symbols of that version, and lacks those that are named.

mod names;

use std::collections::HashSet;
use std::fs;

use anyhow::{Context as _, Result, bail};
use divvy_gpu_sim::parse_version;

const USAGE: &str = "usage: divvy-cuda-sim VERSION LIBRARY OUTPUT [MISSING SYMBOL...], such as: divvy-cuda-sim 12.4 libdivvy_cuda_sim.so libcuda.so.1";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [version, library, output, missing @ ..] = arguments.as_slice() else {
        bail!(USAGE)
    };
    let version = parse_version(version).with_context(|| format!("{version:?} is not a version like \"12.4\"; {USAGE}"))?;
    let mut bytes = fs::read(library).with_context(|| format!("{library} cannot be read"))?;
    let mut hidden = newer_than(version);
    for symbol in missing {
        let known = names::TABLE.iter().find(|(_, _, known, _)| known == symbol);
        let (_, _, known, _) = known.with_context(|| format!("{symbol} is no symbol of the library; {USAGE}"))?;
        hidden.insert(known.as_bytes());
    }
    hide(&mut bytes, &hidden);
    fs::write(output, bytes).with_context(|| format!("{output} cannot be written"))
}

/// Return the symbols that a driver of this version does not have.
fn newer_than(version: i32) -> HashSet<&'static [u8]> {
    let symbols = |newer: bool| {
        let rows = names::TABLE.iter().filter(move |(_, since, ..)| (*since > version) == newer);
        rows.map(|(_, _, symbol, _)| symbol.as_bytes()).collect::<HashSet<_>>()
    };
    &symbols(true) - &symbols(false)
}

/// Rename symbols where an ELF file has their names, which end with a zero byte. The hash table of symbols still has the hashes of the old names, so
/// the dynamic linker finds neither the old nor the new ones.
fn hide(bytes: &mut [u8], symbols: &HashSet<&'static [u8]>) {
    for text in bytes.split_mut(|byte| *byte == 0) {
        if symbols.contains(&*text) {
            text[0] = b'-';
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_names_of_newer_symbols_are_hidden() {
        let newer = newer_than(11010);
        assert!(newer.contains(b"cuMemAllocAsync".as_slice()) && !newer.contains(b"cuMemAlloc_v2".as_slice()));
        let mut bytes = *b"\0cuMemAlloc_v2\0cuMemAllocAsync\0xcuMemAllocAsync\0";
        hide(&mut bytes, &newer);
        assert_eq!(&bytes, b"\0cuMemAlloc_v2\0-uMemAllocAsync\0xcuMemAllocAsync\0");
    }
}
