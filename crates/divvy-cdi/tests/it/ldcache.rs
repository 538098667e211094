//! `ld.so.cache`: both formats, and files that have neither.

use divvy_cdi::generate::ldcache::{CachedLibrary, LdCacheError, flags_of, parse, with};
use proptest::prelude::*;

use divvy_testkit::machine::{ld_so_cache, ld_so_cache_with_flags, old_cache};

const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1"),
    ("libz.so.1", "/lib/x86_64-linux-gnu/libz.so.1"),
];

fn pairs(bytes: &[u8]) -> Result<Vec<(&str, &str)>, LdCacheError> {
    parse(bytes).map(|libraries| libraries.iter().map(|library| (library.name, library.path)).collect())
}

#[test]
fn each_format_gives_its_libraries() {
    assert_eq!(pairs(&ld_so_cache(&LIBRARIES)), Ok(LIBRARIES.to_vec()));
    assert_eq!(pairs(&old_cache(&LIBRARIES, b"")), Ok(LIBRARIES.to_vec()));
    assert_eq!(pairs(&ld_so_cache(&[])), Ok(Vec::new()));
}

#[test]
fn case_35_a_the_new_format_behind_an_old_one_counts() {
    let new = ld_so_cache(&LIBRARIES);
    for before in 0..3 {
        let old: Vec<(&str, &str)> = [("libold.so.1", "/old"); 3][..before].to_vec();
        assert_eq!(
            pairs(&old_cache(&old, &new)),
            Ok(LIBRARIES.to_vec()),
            "{before} entries before it"
        );
    }
}

#[test]
fn the_flags_tell_64_bits_of_two_processors_from_the_rest() {
    let bytes = ld_so_cache_with_flags(&[
        ("a", "/a", 0x0303),
        ("b", "/b", 0x0a03),
        ("c", "/c", 0x0003),
        ("d", "/d", 0x0803),
    ]);
    let found: Vec<bool> = parse(&bytes)
        .expect("a cache")
        .iter()
        .map(|library| library.is_64_bit())
        .collect();
    assert_eq!(found, [true, true, false, false]);
}

#[test]
fn case_35_b_what_is_no_cache_is_refused_with_the_reason() {
    let cache = ld_so_cache(&LIBRARIES);
    let with = |at: usize, bytes: &[u8]| {
        let mut cache = cache.clone();
        cache[at..at + bytes.len()].copy_from_slice(bytes);
        cache
    };
    for (name, bytes, error) in [
        ("nothing", Vec::new(), LdCacheError::NotACache),
        ("another file", b"\x7fELF".to_vec(), LdCacheError::NotACache),
        ("only a header", cache[..30].to_vec(), LdCacheError::Truncated),
        ("too many entries", with(20, &u32::MAX.to_le_bytes()), LdCacheError::Truncated),
        (
            "an old header that announces too many",
            b"ld.so-1.7.0\0\xff\xff\xff\xff".to_vec(),
            LdCacheError::Truncated,
        ),
        ("big-endian", with(28, &[3]), LdCacheError::BigEndian),
        (
            "a name beyond the end",
            with(52, &u32::MAX.to_le_bytes()),
            LdCacheError::Entry(0),
        ),
        (
            "a path beyond the end",
            with(48 + 24 + 8, &9999_u32.to_le_bytes()),
            LdCacheError::Entry(1),
        ),
        ("no end of a text", cache[..cache.len() - 1].to_vec(), LdCacheError::Entry(1)),
        ("no text", with(cache.len() - 3, &[0xff]), LdCacheError::Entry(1)),
    ] {
        assert_eq!(parse(&bytes), Err(error), "{name}");
    }
}

proptest! {
    #[test]
    fn case_35_c_no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse(&bytes);
        let _ = parse(&[b"glibc-ld.so.cache1.1", &bytes[..]].concat());
        let _ = parse(&[b"ld.so-1.7.0\0", &bytes[..]].concat());
    }

    #[test]
    fn no_change_of_a_good_one_makes_it_panic(at in any::<prop::sample::Index>(), to in any::<[u8; 4]>(), end in any::<prop::sample::Index>()) {
        for mut cache in [ld_so_cache(&LIBRARIES), old_cache(&LIBRARIES, b""), old_cache(&LIBRARIES, &ld_so_cache(&LIBRARIES))] {
            let at = at.index(cache.len() - 4);
            cache[at..at + 4].copy_from_slice(&to);
            let _ = parse(&cache);
            let _ = parse(&cache[..end.index(cache.len())]);
        }
    }

    #[test]
    fn what_was_written_is_read(libraries in proptest::collection::vec(("[a-z]{1,9}\\.so\\.[0-9]", "/[a-z/]{1,30}"), 0..20)) {
        let libraries: Vec<(&str, &str)> = libraries.iter().map(|(name, path)| (name.as_str(), path.as_str())).collect();
        for cache in [ld_so_cache(&libraries), old_cache(&libraries, b"")] {
            prop_assert_eq!(pairs(&cache), Ok(libraries.clone()));
        }
    }
}

fn library<'a>(name: &'a str, path: &'a str) -> CachedLibrary<'a> {
    CachedLibrary {
        name,
        path,
        flags: 0x0303,
        os_version: 0,
        hwcap: 0,
    }
}

#[test]
fn what_is_added_comes_before_what_has_its_name_and_once() {
    let image = ld_so_cache(&[
        ("libz.so.1", "/lib/libz.so.1"),
        ("libcuda.so.1", "/opt/stubs/libcuda.so.1"),
        ("liba.so.2", "/lib/liba.so.2"),
        ("liba.so.10", "/lib/liba.so.10"),
    ]);
    let added = [library("libcuda.so.1", "/usr/lib64/libcuda.so.1")];
    let once = with(Some(&image), &added).expect("written");
    let expected = [
        ("libz.so.1", "/lib/libz.so.1"),
        ("libcuda.so.1", "/usr/lib64/libcuda.so.1"),
        ("libcuda.so.1", "/opt/stubs/libcuda.so.1"),
        ("liba.so.10", "/lib/liba.so.10"),
        ("liba.so.2", "/lib/liba.so.2"),
    ];
    assert_eq!(pairs(&once), Ok(expected.to_vec()));
    assert_eq!(with(Some(&once), &added).expect("written"), once);
    assert_eq!(pairs(&with(None, &added).expect("written")), Ok(vec![expected[1]]));
    assert_eq!(with(Some(b"no cache"), &added), Err(LdCacheError::NotACache));
}

/// glibc's own program reads a cache that divvy wrote, made from this machine's real cache with its extensions.
#[test]
fn ldconfig_prints_what_was_written() {
    let printed = |path: &std::path::Path| {
        let output = std::process::Command::new("/sbin/ldconfig")
            .args(["-p", "-C"])
            .arg(path)
            .output();
        output.map(|output| (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let own = std::path::Path::new("/etc/ld.so.cache");
    let (Ok(bytes), Ok((true, before))) = (std::fs::read(own), printed(own)) else {
        return divvy_skip::skipped("this machine has no ldconfig of glibc, or no /etc/ld.so.cache");
    };
    let lines = |text: &str| {
        text.lines()
            .filter(|line| line.starts_with('\t'))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let file = std::env::temp_dir().join(format!("divvy-ld.so.cache-{}", std::process::id()));
    let same = with(Some(&bytes), &[]).expect("written");
    std::fs::write(&file, &same).expect("written");
    let (fine, again) = printed(&file).expect("it runs");
    assert!(fine, "{again}");
    assert_eq!(lines(&again), lines(&before));
    let more = with(Some(&bytes), &[library("libcuda.so.1", "/usr/lib64/libcuda.so.1")]).expect("written");
    std::fs::write(&file, &more).expect("written");
    let (fine, again) = printed(&file).expect("it runs");
    std::fs::remove_file(&file).expect("removed");
    assert!(fine, "{again}");
    assert!(
        again.contains("\tlibcuda.so.1 (libc6,x86-64) => /usr/lib64/libcuda.so.1\n"),
        "{again}"
    );
    assert_eq!(lines(&again).len(), lines(&before).len() + 1);
}

#[test]
fn a_library_is_known_by_its_first_bytes() {
    let header = |class: u8, machine: u8| [b"\x7fELF".as_slice(), &[class], &[0; 13], &[machine, 0]].concat();
    for (bytes, expected) in [
        (header(2, 0x3e), Some(0x0303)),
        (header(2, 0xb7), Some(0x0a03)),
        (header(1, 0x3e), None),
        (header(2, 0x28), None),
        (b"#!/bin/sh and more of it".to_vec(), None),
        (b"\x7fELF\x02".to_vec(), None),
        (Vec::new(), None),
    ] {
        assert_eq!(flags_of(&bytes), expected, "{bytes:?}");
    }
}

proptest! {
    /// The entries have arbitrary `hwcap` values, some of which refer to the extension after the entries.
    #[test]
    fn a_cache_that_is_written_is_read_and_written_the_same(
        libraries in proptest::collection::vec(("[a-z]{1,9}\\.so\\.[0-9]{1,3}", "/[a-z/]{1,30}", any::<i32>(), any::<u64>()), 0..20),
        cut in any::<prop::sample::Index>(),
    ) {
        let libraries: Vec<CachedLibrary<'_>> = libraries
            .iter()
            .map(|(name, path, flags, hwcap)| CachedLibrary { flags: *flags, hwcap: *hwcap, ..library(name, path) })
            .collect();
        let bytes = with(None, &libraries).expect("written");
        let mut found = parse(&bytes).expect("read");
        prop_assert_eq!(with(Some(&bytes), &[]), Ok(bytes.clone()));
        let by_all = |library: &CachedLibrary<'_>| (library.name.to_owned(), library.path.to_owned(), library.flags, library.hwcap);
        found.sort_by_key(by_all);
        let mut expected = libraries;
        expected.sort_by_key(by_all);
        prop_assert_eq!(found, expected);
        let _ = with(Some(&bytes[..cut.index(bytes.len())]), &[]);
    }

    #[test]
    fn no_change_of_this_machines_cache_makes_the_writer_panic(at in any::<prop::sample::Index>(), to in any::<[u8; 4]>()) {
        if let Ok(mut bytes) = std::fs::read("/etc/ld.so.cache") {
            // Overwrite 4 bytes in the header, the first entries, or the extensions at the end.
            let from = at.index(200);
            let at = if from < 100 { from } else { bytes.len().saturating_sub(from) };
            if let Some(place) = bytes.get_mut(at..at + 4) {
                place.copy_from_slice(&to);
            }
            let _ = with(Some(&bytes), &[library("a", "/a")]);
        }
    }
}
