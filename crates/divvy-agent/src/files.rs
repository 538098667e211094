//! Files that must be complete or absent. A file is written under a temporary name, synced, and renamed. Reads have a size limit and never
//! follow a symbolic link.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::OFlags;

/// The size limit in bytes for reading the agent's own files and CDI specs.
pub(crate) const LIMIT: u64 = 64 * 1024;

/// A failed operation on a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct FileError {
    /// What was attempted, such as `read`.
    pub action: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system's error, with its number.
    pub source: io::Error,
}

fn error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { action, path, source }
}

fn no_follow() -> i32 {
    // O_NONBLOCK: opening a FIFO would otherwise wait for a writer. O_CLOEXEC is the standard library's default.
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()
}

/// Replace `directory/name` by a file with this content. A reader sees either the old or the new file, even after a power failure. The
/// temporary name begins with a dot and has no suffix that a CDI reader accepts.
///
/// # Errors
/// The error has the path and the system's error. The old file is then unchanged.
pub(crate) fn write_atomic(directory: &Path, name: &str, content: &[u8], mode: u32) -> Result<(), FileError> {
    // Temporary names must differ between several writers in one process (two agents in a test), and from leftovers of a killed
    // process.
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = directory.join(format!(".{name}.{}.{counter}.tmp", std::process::id()));
    let target = directory.join(name);
    let options = || {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(mode).custom_flags(no_follow());
        options
    };
    let file = match options().open(&temporary) {
        // A leftover of an earlier process with the same PID.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            std::fs::remove_file(&temporary).map_err(error("remove", &temporary))?;
            options().open(&temporary)
        }
        other => other,
    };
    let write = |mut file: File| {
        file.write_all(content)?;
        file.sync_all()
    };
    let written = file.and_then(write).map_err(error("write", &temporary));
    let renamed = written.and_then(|()| std::fs::rename(&temporary, &target).map_err(error("write", &target)));
    if renamed.is_err() {
        // The first error counts. The next start removes a leftover.
        drop(std::fs::remove_file(&temporary));
    }
    renamed?;
    sync_directory(directory)
}

/// Remove a file. A missing file is not an error.
///
/// # Errors
/// The error has the path and the system's error.
pub(crate) fn remove(directory: &Path, name: &str) -> Result<(), FileError> {
    let path = directory.join(name);
    match std::fs::remove_file(&path) {
        Ok(()) => sync_directory(directory),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(error("remove", &path)(e)),
    }
}

fn sync_directory(directory: &Path) -> Result<(), FileError> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(error("sync", directory))
}

/// Open a regular file for reading. Symbolic links are not followed.
///
/// # Errors
/// The error is the system's, or says that it is not a regular file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(no_follow()).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"))
    }
}

/// Remove the content of a regular file that another program writes.
pub(crate) fn empty(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).custom_flags(no_follow()).open(path)?;
    if file.metadata()?.is_file() {
        file.set_len(0)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"))
    }
}

/// Create an empty file, in place of an earlier one or of a link, which is not followed.
///
/// # Errors
/// The error has the path and the system's error.
pub(crate) fn create(path: &Path) -> Result<File, FileError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(error("remove", path)(e)),
        _ => {}
    }
    // `create_new` does not follow a link either.
    let created = OpenOptions::new().write(true).create_new(true).open(path);
    created.map_err(error("create", path))
}

/// Return a regular file's text of at most `limit` bytes, or `None` if the file does not exist. Symbolic links are not followed.
///
/// # Errors
/// The error has the path and the reason: not readable, not a regular file, larger than `limit`, or not UTF-8.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<String>, FileError> {
    let file = match open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error("read", path)(e)),
    };
    let refuse = |text: String| Err(error("read", path)(io::Error::new(io::ErrorKind::InvalidData, text)));
    // Without the capacity, it is read in many small parts.
    let size = file.metadata().map_or(0, |metadata| metadata.len().min(limit));
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0) + 1);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(error("read", path))?;
    if bytes.len() as u64 > limit {
        return refuse(format!("it is larger than {limit} bytes"));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(_) => refuse("it is not UTF-8 text".to_owned()),
    }
}

/// Read a file of the kernel (sysfs, cgroups, procfs), whose path may contain symbolic links.
///
/// # Errors
/// The error is the system's.
pub(crate) fn read_kernel(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

/// Return the names in a directory, sorted. The result is empty if the directory does not exist. Names that are not UTF-8 are left out.
///
/// # Errors
/// The error has the path and the system's error.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>, FileError> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(error("list", directory)(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(error("list", directory))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Create a directory and its missing parents with this mode.
///
/// # Errors
/// The error has the path and the system's error.
pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<(), FileError> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(error("create the directory", path))
}

/// Remove the temporary files of [`write_atomic`] that a killed process left behind.
///
/// # Errors
/// The error has the path and the system's error.
pub(crate) fn remove_temporary(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Result<(), FileError> {
    for name in names(directory)? {
        let inner = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
        let base = inner.and_then(|inner| {
            let mut parts = inner.rsplitn(3, '.');
            let digits = |part: Option<&str>| part.is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
            (digits(parts.next()) && digits(parts.next())).then(|| parts.next()).flatten()
        });
        if base.is_some_and(&is_ours) {
            remove(directory, &name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().expect("temp dir");
        for content in ["one", "two"] {
            write_atomic(dir.path(), "a.json", content.as_bytes(), 0o600).expect("written");
            assert_eq!(
                read(&dir.path().join("a.json"), LIMIT).expect("read").as_deref(),
                Some(content)
            );
        }
        assert_eq!(names(dir.path()).expect("listed"), ["a.json"]);
        let mode = std::fs::metadata(dir.path().join("a.json"))
            .expect("there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        remove(dir.path(), "a.json").expect("removed");
        remove(dir.path(), "a.json").expect("removed already");
    }

    #[test]
    fn an_unwritable_directory_is_named_with_the_error_number() {
        // The test uses a missing directory rather than a read-only one, because root may write anywhere.
        let dir = tempfile::tempdir().expect("temp dir");
        let text = write_atomic(&dir.path().join("gone"), "a.json", b"x", 0o600)
            .expect_err("no directory")
            .to_string();
        assert!(text.contains("gone/.a.json") && text.contains("os error 2"), "{text}");
    }

    #[test]
    fn a_target_that_cannot_be_replaced_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().expect("temp dir");
        std::fs::create_dir_all(dir.path().join("a.json/x")).expect("a directory in the way");
        assert!(write_atomic(dir.path(), "a.json", b"x", 0o600).is_err());
        assert_eq!(names(dir.path()).expect("listed"), ["a.json"]);
    }

    #[test]
    fn links_fifos_directories_and_large_files_are_not_read() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("target"), "x").expect("written");
        std::os::unix::fs::symlink(path("target"), path("link")).expect("linked");
        std::fs::create_dir(path("dir")).expect("made");
        std::fs::write(path("large"), vec![b'x'; 100]).expect("written");
        std::fs::write(path("binary"), [0xff, 0xfe]).expect("written");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .expect("made");
        for name in ["link", "dir", "large", "binary", "fifo"] {
            assert!(read(&path(name), 99).is_err(), "{name}");
        }
        assert_eq!(read(&path("absent"), 99).expect("absent"), None);
    }

    #[test]
    fn leftovers_of_a_killed_process_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().expect("temp dir");
        for name in [".a.json.17.0.tmp", ".b.json.17.0.tmp", ".a.json.tmp", "a.json", ".hidden"] {
            std::fs::write(dir.path().join(name), "x").expect("written");
        }
        remove_temporary(dir.path(), |name| name == "a.json").expect("cleaned");
        assert_eq!(
            names(dir.path()).expect("listed"),
            [".a.json.tmp", ".b.json.17.0.tmp", ".hidden", "a.json"]
        );
    }
}
