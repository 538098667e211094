//! Where the driver's library is, and how a program is started that can load it.
//!
//! The library loads others by their names, `libnvidia-ptxjitcompiler.so.1` above all. So its directory must be in the search path of the loader
//! when a process starts. A container may have no `ld.so.cache`, because with CDI it may not have been written.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The library's name, which is the same for every driver version.
pub(crate) const SONAME: &str = "libcuda.so.1";

/// Where distributions, device plugins, and WSL have the library.
const DIRECTORIES: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
];

/// The path of glibc's loader for this architecture. A machine may have the loader of another one, too.
const LOADER: &str = if cfg!(target_arch = "aarch64") {
    "lib/ld-linux-aarch64.so.1"
} else {
    "lib64/ld-linux-x86-64.so.2"
};

/// `e_machine` of this architecture (elf.h).
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Why a file cannot be the driver's library.
#[derive(Debug, thiserror::Error)]
enum UnfitLibrary {
    #[error("it is a stub for linking")]
    Stub,
    #[error("the link leads nowhere")]
    BrokenLink,
    #[error("{0}")]
    Unreadable(std::io::Error),
    #[error("it is no library")]
    NoLibrary,
    #[error("it has 32 bits")]
    Bits32,
    #[error("it is for another architecture (ELF machine {0})")]
    OtherMachine(u16),
}

/// Return the directories to search below a root, in this order; the last ones are those of `LD_LIBRARY_PATH`.
pub(crate) fn directories(root: &Path, library_path: Option<&OsStr>) -> Vec<PathBuf> {
    let usual = DIRECTORIES
        .iter()
        .map(|directory| root.join(directory.trim_start_matches('/')));
    let named = library_path.map(std::env::split_paths).into_iter().flatten();
    usual.chain(named.filter(|path| !path.as_os_str().is_empty())).collect()
}

/// Return the first usable library, and why those before it are not usable.
pub(crate) fn library(directories: &[PathBuf]) -> (Option<PathBuf>, Vec<String>) {
    let mut refused = Vec::new();
    for directory in directories {
        let file = directory.join(SONAME);
        match usable(&file) {
            Ok(true) => return (Some(file), refused),
            Ok(false) => {}
            Err(reason) => refused.push(format!("{}: {reason}", file.display())),
        }
    }
    (None, refused)
}

/// Report whether a file exists. Fail if it cannot be the driver's library.
fn usable(file: &Path) -> Result<bool, UnfitLibrary> {
    if file.parent().is_some_and(|directory| directory.ends_with("stubs")) && file.exists() {
        return Err(UnfitLibrary::Stub);
    }
    let mut head = [0; 20];
    let opened = match File::open(file) {
        Ok(mut opened) => opened.read_exact(&mut head),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !file.is_symlink() => return Ok(false),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(UnfitLibrary::BrokenLink),
        Err(error) => return Err(UnfitLibrary::Unreadable(error)),
    };
    if opened.is_err() || !head.starts_with(b"\x7fELF") {
        return Err(UnfitLibrary::NoLibrary);
    }
    if head[4] != 2 {
        return Err(UnfitLibrary::Bits32);
    }
    match u16::from_le_bytes([head[18], head[19]]) {
        MACHINE => Ok(true),
        other => Err(UnfitLibrary::OtherMachine(other)),
    }
}

/// How to start this program again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StartCommand {
    pub(crate) program: PathBuf,
    /// The arguments before those of this program.
    pub(crate) arguments: Vec<OsString>,
    /// Set if there is no loader, which would take it as an option.
    pub(crate) library_path: Option<OsString>,
}

/// Return how to start a program so that it can load the library.
///
/// The loader is the machine's own. If there is another one in the program's directory, as in a container of a foreign image into which the program
/// and its libraries were mounted, `runs` decides: it tries a start with the machine's loader. A C library that is older than the program refuses it.
pub(crate) fn start(
    program: &Path,
    root: &Path,
    library: &Path,
    library_path: Option<&OsStr>,
    runs: impl FnOnce(&StartCommand) -> bool,
) -> StartCommand {
    let own = program.parent().unwrap_or(Path::new("/"));
    let existing = |loader: PathBuf| loader.exists().then_some(loader);
    let carried = Path::new(LOADER).file_name().and_then(|name| existing(own.join(name)));
    let machines = existing(root.join(LOADER));
    let with = |loader, carried| with_loader(program, loader, carried, library, library_path);
    match (machines, carried) {
        (machines, None) => with(machines, None),
        (None, carried) => with(carried, Some(own)),
        (machines, carried) => {
            let start = with(machines, None);
            if runs(&start) { start } else { with(carried, Some(own)) }
        }
    }
}

/// Return how to start a program with this loader. `carried` is the directory of libraries that come with the loader.
fn with_loader(
    program: &Path,
    loader: Option<PathBuf>,
    carried: Option<&Path>,
    library: &Path,
    library_path: Option<&OsStr>,
) -> StartCommand {
    let named = library_path.map(std::env::split_paths).into_iter().flatten();
    let own = carried.map(Path::to_owned).into_iter();
    let paths = own.chain(library.parent().map(Path::to_owned)).chain(named);
    let mut path = OsString::new();
    for part in paths.filter(|part| !part.as_os_str().is_empty()) {
        if !path.is_empty() {
            path.push(":");
        }
        path.push(part);
    }
    match loader {
        Some(loader) => StartCommand {
            arguments: vec!["--library-path".into(), path, program.into()],
            program: loader,
            library_path: None,
        },
        None => StartCommand {
            program: program.to_owned(),
            arguments: Vec::new(),
            library_path: Some(path),
        },
    }
}

/// Return the path of this program. If a loader was started with it, the process's executable is the loader. Without `/proc`, the executable is unknown.
pub(crate) fn own_program(executable: &Path, first_argument: Option<&OsStr>) -> PathBuf {
    let is_loader = executable
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("ld-"));
    match first_argument {
        Some(argument) if is_loader || executable.as_os_str().is_empty() => argument.into(),
        _ => executable.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Return the start of an ELF file.
    fn elf(class: u8, machine: u16) -> Vec<u8> {
        let mut head = b"\x7fELF".to_vec();
        head.extend([class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0]);
        head.extend(machine.to_le_bytes());
        head
    }

    /// Libraries that cannot be used are named with the reason.
    #[test]
    fn the_first_usable_library_is_taken() {
        let root = tempfile::tempdir().expect("a directory");
        let directories = directories(root.path(), Some(OsStr::new("/none::/opt/cuda/lib64/stubs")));
        assert_eq!(directories.len(), 9);
        assert_eq!(directories[8], Path::new("/opt/cuda/lib64/stubs"));
        assert_eq!(library(&directories[..7]), (None, vec![]));
        let contents = [
            elf(1, MACHINE),
            elf(2, if MACHINE == 62 { 183 } else { 62 }),
            b"INPUT(libcuda.so)".to_vec(),
            b"\x7fEL".to_vec(),
        ];
        for (directory, content) in directories.iter().zip(contents) {
            fs::create_dir_all(directory).expect("created");
            fs::write(directory.join(SONAME), content).expect("written");
        }
        fs::create_dir_all(&directories[4]).expect("created");
        symlink("nowhere", directories[4].join(SONAME)).expect("linked");
        let stubs = root.path().join("stubs");
        fs::create_dir_all(&stubs).expect("created");
        fs::write(stubs.join(SONAME), elf(2, MACHINE)).expect("written");
        let good = &directories[6];
        fs::create_dir_all(good).expect("created");
        fs::write(good.join(SONAME), elf(2, MACHINE)).expect("written");
        let mut searched = vec![stubs];
        searched.extend_from_slice(&directories[..7]);
        let (found, refused) = library(&searched);
        assert_eq!(found, Some(good.join(SONAME)));
        let reasons: Vec<&str> = refused.iter().filter_map(|text| Some(text.split_once(": ")?.1)).collect();
        let other = if MACHINE == 62 { 183 } else { 62 };
        assert_eq!(
            reasons,
            [
                "it is a stub for linking",
                "it has 32 bits",
                &format!("it is for another architecture (ELF machine {other})"),
                "it is no library",
                "it is no library",
                "the link leads nowhere"
            ]
        );
    }

    /// An unfit loader is the machine's own loader if it does not run the program.
    #[test]
    fn the_carried_loader_replaces_an_unfit_one() {
        let root = tempfile::tempdir().expect("a directory");
        let (bin, library) = (root.path().join("bin"), Path::new("/usr/lib64/libcuda.so.1"));
        let program = bin.join("divvy-smoke");
        let named = Some(OsStr::new("/a::/b"));
        let never = |start: &StartCommand| -> bool { panic!("there is no choice: {start:?}") };
        let without = start(&program, root.path(), library, named, never);
        assert_eq!(
            (without.program, without.library_path),
            (program.clone(), Some("/usr/lib64:/a:/b".into()))
        );
        let with = |loader: &Path, path: &str| StartCommand {
            program: loader.to_owned(),
            arguments: vec!["--library-path".into(), path.into(), program.clone().into()],
            library_path: None,
        };
        let make = |loader: &Path| {
            fs::create_dir_all(loader.parent().expect("a directory")).expect("created");
            fs::write(loader, "").expect("written");
        };
        let machines = root.path().join(LOADER);
        make(&machines);
        let machines = with(&machines, "/usr/lib64:/a:/b");
        assert_eq!(start(&program, root.path(), library, named, never), machines);
        let carried = bin.join(Path::new(LOADER).file_name().expect("a name"));
        make(&carried);
        let carried = with(&carried, &format!("{}:/usr/lib64:/a:/b", bin.display()));
        assert_eq!(
            start(&program, root.path(), library, named, |start| *start == machines),
            machines
        );
        assert_eq!(start(&program, root.path(), library, named, |_| false), carried);
        fs::remove_file(&machines.program).expect("removed");
        assert_eq!(start(&program, root.path(), library, named, never), carried);
    }

    #[test]
    fn the_loader_of_another_architecture_is_left_alone() {
        let root = tempfile::tempdir().expect("a directory");
        let other = if cfg!(target_arch = "aarch64") {
            "lib64/ld-linux-x86-64.so.2"
        } else {
            "lib/ld-linux-aarch64.so.1"
        };
        let foreign = root.path().join(other);
        fs::create_dir_all(foreign.parent().expect("a directory")).expect("created");
        fs::write(foreign, "").expect("written");
        let (program, library) = (Path::new("/bin/divvy-smoke"), Path::new("/usr/lib/libcuda.so.1"));
        assert_eq!(start(program, root.path(), library, None, |_| true).program, program);
    }

    #[test]
    fn a_program_that_a_loader_started_knows_its_own_path() {
        let own = |executable: &str| own_program(Path::new(executable), Some(OsStr::new("/run/divvy/bin/divvy-smoke")));
        assert_eq!(own("/lib64/ld-linux-x86-64.so.2"), Path::new("/run/divvy/bin/divvy-smoke"));
        assert_eq!(own("/usr/bin/divvy-smoke"), Path::new("/usr/bin/divvy-smoke"));
        assert_eq!(own(""), Path::new("/run/divvy/bin/divvy-smoke"));
    }
}
