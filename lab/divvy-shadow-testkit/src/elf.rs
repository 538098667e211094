//! What a library is, as a file.

use object::read::elf::{Dyn as _, ElfFile64, FileHeader as _, Sym as _};
use object::{Object as _, ObjectSection as _, elf};

/// A library.
#[derive(Debug)]
pub struct Elf<'a> {
    bytes: &'a [u8],
    file: ElfFile64<'a>,
}

impl<'a> Elf<'a> {
    /// Read a library.
    pub fn of(bytes: &'a [u8]) -> Self {
        let file = ElfFile64::parse(bytes).unwrap();
        Self { bytes, file }
    }

    fn symbols(&self, defined: bool) -> Vec<&'a str> {
        let endian = self.file.endian();
        let sections = self.file.elf_header().sections(endian, self.bytes).unwrap();
        let table = sections.symbols(endian, self.bytes, elf::SHT_DYNSYM).unwrap();
        let symbols = table.iter().skip(1).filter(|symbol| symbol.is_undefined(endian) != defined);
        let mut names: Vec<&str> = symbols
            .map(|symbol| std::str::from_utf8(symbol.name(endian, table.strings()).unwrap()).unwrap())
            .collect();
        // For Arm, the linker has one without a name for each section of some kinds.
        names.retain(|name| !name.is_empty());
        names.sort_unstable();
        names
    }

    /// The names of the symbols that it has for others.
    pub fn exports(&self) -> Vec<&'a str> {
        self.symbols(true)
    }

    /// The names of all symbols that it takes from others.
    pub fn undefined(&self) -> Vec<&'a str> {
        self.symbols(false)
    }

    /// The names of the symbols that it takes from others, without what the compiler puts in place of loops over bytes.
    pub fn imports(&self) -> Vec<&'a str> {
        const LOOPS: [&str; 5] = ["memcpy", "memmove", "memset", "memcmp", "bcmp"];
        let mut names = self.undefined();
        names.retain(|name| !LOOPS.contains(name));
        names
    }

    /// The values of a tag of the dynamic section, as strings.
    fn dynamic(&self, tag: i64) -> Vec<String> {
        let endian = self.file.endian();
        let sections = self.file.elf_header().sections(endian, self.bytes).unwrap();
        // A static program has none.
        let Some((entries, strings)) = sections.dynamic(endian, self.bytes).unwrap() else {
            return Vec::new();
        };
        let strings = sections.strings(endian, self.bytes, strings).unwrap();
        let tagged = entries.iter().filter(|entry| entry.tag32(endian).map(i64::from) == Some(tag));
        tagged
            .map(|entry| String::from_utf8(entry.string(endian, strings).unwrap().to_vec()).unwrap())
            .collect()
    }

    /// The names that it has.
    pub fn names(&self) -> Vec<String> {
        self.dynamic(elf::DT_SONAME)
    }

    /// The libraries that it needs.
    pub fn needed(&self) -> Vec<String> {
        self.dynamic(elf::DT_NEEDED)
    }

    /// Check that it asks for no version of a symbol and runs no code at loading. A version would make it fail with an older C library, and code would run in
    /// programs that never call it.
    pub fn assert_loads_anywhere(&self) {
        let names: Vec<&str> = self.file.sections().filter_map(|section| section.name().ok()).collect();
        for name in [
            ".gnu.version",
            ".gnu.version_r",
            ".init_array",
            ".init",
            ".fini_array",
            ".fini",
            ".tdata",
            ".tbss",
            ".interp",
        ] {
            assert!(!names.contains(&name), "{name}: {names:?}");
        }
        assert!(names.contains(&".dynsym"), "{names:?}");
    }
}
