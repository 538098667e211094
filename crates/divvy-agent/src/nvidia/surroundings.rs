//! What the programs find on their node, and how patient they are. NVIDIA's programs have no flags for this.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_hardware::client::Timing;
use divvy_nvidia_plugin::mps::Intervals;
use divvy_program::values::duration;

use crate::Error;

/// The directory of the plugins' sockets. As with NVIDIA's plugin, `--kubelet-socket` does not change it.
const SOCKETS: &str = "var/lib/kubelet/device-plugins";
/// The directory for CDI specs.
const SPECS: &str = "var/run/cdi";
/// Names the directory that stands for the node's root: on the embedded cluster, several nodes share one machine.
const ROOT: &str = "DIVVY_NODE_ROOT";

/// Where the control daemons' files and the driver's programs are, and how patient the program is.
#[derive(Debug, Clone)]
pub struct Mps {
    /// The directory of the control daemons' files.
    pub root: PathBuf,
    /// The root directory that contains `/sys`.
    pub system: PathBuf,
    /// The directories in which `nvidia-smi` and `nvidia-cuda-mps-control` are looked for, as in the variable `PATH`.
    pub path: OsString,
    /// The time in which `nvidia-cuda-mps-control` must end. `nvidia-smi` has three times as much.
    pub deadline: Duration,
    /// The time in which all daemons must end and all GPUs must be open again: less than the kubelet's grace period, which is 30 s.
    pub end_limit: Duration,
    /// The intervals of the supervision.
    pub intervals: Intervals,
    /// The time between two counts of what containers use.
    pub count: Duration,
}

impl Mps {
    /// Return the settings for a program that runs in a pod and finds the node's files below this root.
    pub(super) fn below(root: &Path) -> Mps {
        Mps {
            root: root.join("mps"),
            system: root.to_owned(),
            path: std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()),
            deadline: Duration::from_secs(10),
            end_limit: Duration::from_secs(25),
            intervals: Intervals::default(),
            count: Duration::from_secs(10),
        }
    }

    /// Return the directory of the memory that the processes of MPS share.
    pub(super) fn shm(&self) -> PathBuf {
        self.root.join("shm")
    }
}

/// The paths that the programs use on their node, and their pace.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// The program `divvy-probe`.
    pub probe: PathBuf,
    /// A private directory for the probe's socket.
    pub probe_dir: PathBuf,
    /// The directory of the plugins' sockets.
    pub sockets: PathBuf,
    /// The directory for CDI specs.
    pub cdi_dir: PathBuf,
    /// The root directory that contains `/dev`.
    pub root: PathBuf,
    /// Where MPS is.
    pub mps: Mps,
    /// How often the driver is asked, and how patient the program is with a GPU that failed.
    pub pace: Pace,
}

/// How often the driver is asked, and how patient the program is with a GPU that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The time between two snapshots of the driver.
    pub interval: Duration,
    /// How long a GPU that failed must run without a new error before it is healthy again.
    pub recovery: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            interval: Timing::default().poll,
            recovery: Duration::from_secs(30),
        }
    }
}

impl Pace {
    /// Return the pace that the variables of `divvy agent` ask for. `variable` returns the value of an environment variable.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Pace, Error> {
        let read = |name: &str, default: Duration| match variable(name) {
            Some(text) => duration(&text).map_err(|error| Error::Plugin(format!("{name}: {error}"))),
            None => Ok(default),
        };
        let default = Pace::default();
        Ok(Pace {
            interval: read("DIVVY_PROBE_INTERVAL", default.interval)?,
            recovery: read("DIVVY_HEALTH_RECOVERY", default.recovery)?,
        })
    }

    pub(super) fn timing(self) -> Timing {
        Timing {
            poll: self.interval,
            ..Timing::default()
        }
    }
}

/// Return the directory that stands for the node's root, if it is not `/`. Such a program belongs to an embedded cluster, so it ends when
/// its standard input is closed.
pub(super) fn other_root() -> Option<PathBuf> {
    std::env::var_os(ROOT).map(PathBuf::from)
}

impl Surroundings {
    /// Return the paths for a program that runs in a pod. `divvy-probe` is in the directory of this program.
    ///
    /// # Errors
    /// Fails if the program cannot find its own path, or cannot create the directory for temporary files, or if a variable has no
    /// duration.
    pub fn of_pod() -> Result<Surroundings, Error> {
        let own = std::env::current_exe().map_err(|error| Error::Ended {
            part: "the search for divvy-probe",
            text: error.to_string(),
        })?;
        // The image has no directory for temporary files.
        let temporary = std::env::temp_dir();
        std::fs::create_dir_all(&temporary).map_err(|error| Error::Ended {
            part: "the directory for temporary files",
            text: format!("{}: {error}", temporary.display()),
        })?;
        let root = other_root().unwrap_or_else(|| Path::new("/").to_owned());
        Ok(Surroundings {
            probe: own.with_file_name("divvy-probe"),
            probe_dir: temporary.join(format!("divvy-nvidia-{}", std::process::id())),
            sockets: root.join(SOCKETS),
            cdi_dir: root.join(SPECS),
            mps: Mps::below(&root),
            pace: Pace::of(|name| std::env::var(name).ok())?,
            root,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_that_of_the_agents_variables_and_a_wrong_one_is_named() {
        assert_eq!(Pace::of(|_| None).expect("the default"), Pace::default());
        let given = Pace::of(|name| (name == "DIVVY_HEALTH_RECOVERY").then(|| "2s".to_owned())).expect("a duration");
        let expected = Pace {
            recovery: Duration::from_secs(2),
            ..Pace::default()
        };
        assert_eq!(given, expected);
        let error = Pace::of(|name| (name == "DIVVY_PROBE_INTERVAL").then(|| "soon".to_owned())).expect_err("no duration");
        assert_eq!(
            error.to_string(),
            "error starting plugins: DIVVY_PROBE_INTERVAL: \"soon\" is not a duration; write 30s or 5m"
        );
    }
}
