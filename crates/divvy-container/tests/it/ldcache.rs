//! `ld.so.cache`: both formats, and what is neither.

use divvy_container::cdi::generate::ldcache::{Error, parse};
use proptest::prelude::*;

use crate::machine::{ld_so_cache, ld_so_cache_with_flags, old_cache};

const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1"),
    ("libz.so.1", "/lib/x86_64-linux-gnu/libz.so.1"),
];

fn pairs(bytes: &[u8]) -> Result<Vec<(&str, &str)>, Error> {
    parse(bytes).map(|libraries| libraries.iter().map(|library| (library.name, library.path)).collect())
}

#[test]
fn each_format_gives_its_libraries() {
    assert_eq!(pairs(&ld_so_cache(&LIBRARIES)), Ok(LIBRARIES.to_vec()));
    assert_eq!(pairs(&old_cache(&LIBRARIES, b"")), Ok(LIBRARIES.to_vec()));
    assert_eq!(pairs(&ld_so_cache(&[])), Ok(Vec::new()));
}

#[test]
fn the_new_format_behind_an_old_one_counts() {
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
fn what_is_no_cache_is_refused_with_the_reason() {
    let cache = ld_so_cache(&LIBRARIES);
    let with = |at: usize, bytes: &[u8]| {
        let mut cache = cache.clone();
        cache[at..at + bytes.len()].copy_from_slice(bytes);
        cache
    };
    for (name, bytes, error) in [
        ("nothing", Vec::new(), Error::NotACache),
        ("another file", b"\x7fELF".to_vec(), Error::NotACache),
        ("a header alone", cache[..30].to_vec(), Error::Truncated),
        ("too many entries", with(20, &u32::MAX.to_le_bytes()), Error::Truncated),
        (
            "an old header that announces too many",
            b"ld.so-1.7.0\0\xff\xff\xff\xff".to_vec(),
            Error::Truncated,
        ),
        ("big-endian", with(28, &[3]), Error::BigEndian),
        ("a name beyond the end", with(52, &u32::MAX.to_le_bytes()), Error::Entry(0)),
        (
            "a path beyond the end",
            with(48 + 24 + 8, &9999_u32.to_le_bytes()),
            Error::Entry(1),
        ),
        ("no end of a text", cache[..cache.len() - 1].to_vec(), Error::Entry(1)),
        ("no text", with(cache.len() - 3, &[0xff]), Error::Entry(1)),
    ] {
        assert_eq!(parse(&bytes), Err(error), "{name}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
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
