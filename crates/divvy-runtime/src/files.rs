//! The files that this program reads and writes.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use divvy_cdi::{FoundSpec, Registry, is_spec_file};
use divvy_oci::runtime::bundle::{HostDevice, NoDevice};
use divvy_oci::runtime::settings::{self, OciRuntimeSettings};
use rustix::fs::OFlags;

use crate::error::Error;

/// The maximum size in bytes of a file that another program writes. A `config.json` with a thousand mounts has about a tenth of
/// this size.
const MOST: u64 = 16 * 1024 * 1024;

/// The environment variable that names another `config.toml`.
const BY_VARIABLE: &str = "NVIDIA_CTK_CONFIG_FILE_PATH";

/// Read the settings from `config.toml`. Return the defaults if the file does not exist.
pub(crate) fn settings() -> Result<OciRuntimeSettings, Error> {
    let by_variable = std::env::var_os(BY_VARIABLE).map(PathBuf::from);
    let of_user = std::env::var_os("XDG_CONFIG_HOME").map(|home| Path::new(&home).join("nvidia-container-runtime/config.toml"));
    let of_user = of_user.filter(|path| path.exists());
    let path = by_variable.or(of_user).unwrap_or_else(|| PathBuf::from(settings::PATH));
    match settings_of(path) {
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(OciRuntimeSettings::default()),
        settings => settings,
    }
}

/// Read the settings as NVIDIA's hook does. If a flag or a variable names the file, the file must exist.
pub(crate) fn settings_of_hook(by_flag: Option<PathBuf>) -> Result<OciRuntimeSettings, Error> {
    let by_variable = || {
        std::env::var_os(BY_VARIABLE)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    by_flag.or_else(by_variable).map_or_else(settings, settings_of)
}

fn settings_of(path: PathBuf) -> Result<OciRuntimeSettings, Error> {
    match read(&path) {
        Ok(text) => OciRuntimeSettings::parse(&text).map_err(|source| Error::Settings { path, source }),
        Err(source) => Err(Error::File {
            what: "read",
            path,
            source,
        }),
    }
}

/// Return the path of another program in this program's directory.
pub(crate) fn beside(name: &str) -> Result<PathBuf, Error> {
    let own = std::env::current_exe().map_err(|source| Error::File {
        what: "found",
        path: PathBuf::from("/proc/self/exe"),
        source,
    })?;
    let path = own.with_file_name(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(Error::NotBeside(path))
    }
}

/// Read a text file up to the size limit. A named pipe is refused, because opening it would wait for a writer, and the
/// container's start would wait as well.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let file = File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("it is a pipe, not a file"));
    }
    read_all(file, &mut text)?;
    Ok(text)
}

/// Read to the end. The result is an error if the input exceeds the size limit.
pub(crate) fn read_all(from: impl io::Read, text: &mut String) -> io::Result<()> {
    from.take(MOST + 1).read_to_string(text)?;
    if text.len() as u64 > MOST {
        Err(io::Error::other(format!("it is larger than {} MiB", MOST >> 20)))
    } else {
        Ok(())
    }
}

/// Replace a file atomically. The new file keeps the mode and the owner of the old one.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let old = fs::metadata(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".divvy-{}", std::process::id()));
    let beside = path.with_file_name(name);
    let written = (|| {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(text.as_bytes())?;
        std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
        file.set_permissions(fs::Permissions::from_mode(old.permissions().mode()))?;
        fs::rename(&beside, path)
    })();
    if written.is_err() {
        // The temporary file does no harm, but no other program would remove it.
        let _ = fs::remove_file(&beside);
    }
    written
}

/// Read the CDI specs in these directories, in order of increasing priority. A directory that does not exist is skipped.
pub(crate) fn specs(directories: &[String]) -> Result<Registry, Error> {
    let mut found = Vec::new();
    for (priority, directory) in directories.iter().enumerate() {
        let unread = |source| Error::File {
            what: "read",
            path: PathBuf::from(directory),
            source,
        };
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.map_err(unread)?,
        };
        for entry in entries {
            let path = entry.map_err(unread)?.path();
            let is_spec = path.file_name().is_some_and(|name| is_spec_file(&name.to_string_lossy()));
            if is_spec {
                found.push(FoundSpec::of(path.display().to_string(), priority, read(&path)));
            }
        }
    }
    Ok(Registry::new(found))
}

/// Return the device node at a path, without following a symbolic link.
pub(crate) fn device(path: &str) -> Result<HostDevice, NoDevice> {
    let found = fs::symlink_metadata(path)?;
    let kind = found.file_type();
    let kind = match () {
        () if kind.is_char_device() => 'c',
        () if kind.is_block_device() => 'b',
        () if kind.is_fifo() => 'p',
        () => return Err(NoDevice::OtherFile),
    };
    let number = found.rdev();
    // The same bits as in glibc's gnu_dev_major and gnu_dev_minor.
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & 0xffff_f000);
    let minor = (number & 0xff) | ((number >> 12) & 0xffff_ff00);
    Ok(HostDevice {
        kind,
        major: u32::try_from(major).unwrap_or(u32::MAX),
        minor: u32::try_from(minor & 0xffff_ffff).unwrap_or(u32::MAX),
        mode: found.permissions().mode() & 0o777,
    })
}
