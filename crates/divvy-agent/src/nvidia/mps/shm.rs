//! Mounts the memory that the processes of MPS share (`mps-control-daemon mount-shm`).

use std::ffi::CString;
use std::path::Path;

use rustix::mount::{MountFlags, mount};
use tracing::{info, warn};

use crate::{Error, files};

/// The size if the machine's memory is not known, as NVIDIA's program has it.
const FALLBACK: &str = "65536k";

/// What the directory for connections may take: some files and sockets for each client. A client is a pod that Divvy does not trust.
const PIPE: &str = "size=1m,nr_inodes=4096,mode=0755";

/// Mount a tmpfs at `directory`, with half of the machine's memory as its limit, unless it is mounted already. `proc` is the directory `/proc`.
///
/// # Errors
/// Fails if the directory cannot be created, or if the system refuses the mount.
pub(crate) fn mount_shm(directory: &Path, proc: &Path) -> Result<(), Error> {
    let memory = files::read_kernel(&proc.join("meminfo")).inspect_err(|error| warn!("failed to open /proc/meminfo: {error}"));
    mount_tmpfs(directory, proc, &format!("size={}", size(&memory.unwrap_or_default())))
}

/// Mount a small tmpfs at the directory for connections, so that clients cannot fill the node's `/run` through it.
///
/// # Errors
/// The same as for [`mount_shm`].
pub(crate) fn mount_pipe(directory: &Path, proc: &Path) -> Result<(), Error> {
    mount_tmpfs(directory, proc, PIPE)
}

/// Mount a tmpfs with these options, unless one is mounted: clients that run hold files in it, so it is not replaced.
fn mount_tmpfs(directory: &Path, proc: &Path, options: &str) -> Result<(), Error> {
    let mounts = files::read_kernel(&proc.join("self/mountinfo")).unwrap_or_default();
    if is_mounted(&mounts, &directory.display().to_string()) {
        info!("{} is mounted already", directory.display());
        return Ok(());
    }
    let refused = |what: &str, error: &dyn std::fmt::Display| {
        Error::Mps(format!(
            "error {what} {}: {error}; the container needs the capability SYS_ADMIN (privileged: true)",
            directory.display()
        ))
    };
    files::make_directory(directory, 0o755).map_err(|error| refused("creating directory", &error))?;
    let set = CString::new(options).map_err(|error| refused("mounting", &error))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RELATIME;
    mount("shm", directory, "tmpfs", flags, set.as_c_str()).map_err(|error| refused("mounting as tmpfs", &error))?;
    info!("mounted a tmpfs with {options} at {}", directory.display());
    Ok(())
}

/// Report whether `/proc/self/mountinfo` lists a tmpfs at this directory (proc(5): the mount point is the fifth field, and the
/// type follows a hyphen).
fn is_mounted(mountinfo: &str, directory: &str) -> bool {
    let is_here = |line: &&str| line.split(' ').nth(4) == Some(directory);
    // The last mount hides the others.
    let last = mountinfo.lines().rfind(is_here).and_then(|line| line.split_once(" - "));
    last.is_some_and(|(_, rest)| rest.split(' ').next() == Some("tmpfs"))
}

/// Return half of the machine's memory as a mount option, from the text of `/proc/meminfo`.
fn size(meminfo: &str) -> String {
    let mut lines = meminfo.lines();
    let total = lines
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .map(str::split_whitespace);
    let half = total.and_then(|mut words| {
        let number: u64 = words.next()?.parse().ok()?;
        let unit = words.next().and_then(|unit| unit.chars().next());
        Some(format!("{}{}", number / 2, unit.map_or_else(String::new, String::from)))
    });
    half.unwrap_or_else(|| FALLBACK.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_half_of_the_memory() {
        for (meminfo, expected) in [
            ("MemTotal:       16318480 kB\nMemFree: 1 kB\n", "8159240k"),
            ("MemFree: 1 kB\nMemTotal: 7 kB", "3k"),
            ("MemTotal: 4096", "2048"),
            ("MemTotal: many kB", FALLBACK),
            ("", FALLBACK),
        ] {
            assert_eq!(size(meminfo), expected, "{meminfo}");
        }
    }

    /// The test runs itself in a mount namespace, and this variable gives it the directory.
    const IN_NAMESPACE: &str = "DIVVY_TEST_PIPE";

    #[test]
    fn no_client_fills_run_through_the_pipe_directory() {
        if let Some(directory) = std::env::var_os(IN_NAMESPACE) {
            return a_full_directory_is_small(Path::new(&directory));
        }
        if !divvy_skip::root("mount a file system") {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let output = std::process::Command::new("unshare")
            .args(["-m", "--propagation", "private"])
            .arg(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "nvidia::mps::shm::tests::no_client_fills_run_through_the_pipe_directory",
            ])
            .env(IN_NAMESPACE, directory.path().join("shares/pipe"))
            .output()
            .expect("unshare runs");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if said.starts_with("unshare") {
            return divvy_skip::skipped("nothing can be mounted in a mount namespace: that takes root");
        }
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    fn a_full_directory_is_small(directory: &Path) {
        // The second one finds the first.
        for _ in 0..2 {
            mount_pipe(directory, Path::new("/proc")).expect("mounted");
        }
        let full = std::fs::write(directory.join("control"), vec![1; 2 << 20]).expect_err("2 MiB in 1 MiB");
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        let files = (0..8192).map(|index| std::fs::write(directory.join(index.to_string()), ""));
        assert!(files.filter(Result::is_ok).count() < 4096);
        rustix::mount::unmount(directory, rustix::mount::UnmountFlags::empty()).expect("it was mounted once");
        assert_eq!(
            std::fs::read_dir(directory).expect("listed").count(),
            0,
            "nothing is on the disk"
        );
    }

    #[test]
    fn only_a_tmpfs_at_this_directory_counts_as_mounted() {
        let here = "36 35 98:0 / /mps/shm rw,noatime shared:1 - tmpfs shm rw,size=1k";
        for (mounts, expected) in [
            (here.to_owned(), true),
            (
                format!("30 25 0:26 / /mps rw - ext4 /dev/sda1 rw\n{here}\n40 25 0:26 / /mps/shm/x rw - ext4 y rw"),
                true,
            ),
            (here.replace("/mps/shm", "/mps/shm2"), false),
            (here.replace(" - tmpfs", " - ext4"), false),
            (format!("{here}\n{}", here.replace(" - tmpfs", " - ext4")), false),
            (String::new(), false),
        ] {
            assert_eq!(is_mounted(&mounts, "/mps/shm"), expected, "{mounts}");
        }
    }
}
