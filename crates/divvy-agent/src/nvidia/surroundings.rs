//! What the programs find on their node, and how patient they are. NVIDIA's programs have no flags for this.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_hardware::client::ProbeTiming;
use divvy_nvidia_plugin::mps::Intervals;
use divvy_program::values::duration;

use crate::Error;

/// The directory of the plugins' sockets. As with NVIDIA's plugin, `--kubelet-socket` does not change it.
const SOCKETS: &str = "var/lib/kubelet/device-plugins";
/// The directory for CDI specs.
const SPECS: &str = "var/run/cdi";
/// The token of the pod's service account, if it has one.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
/// Names the directory that stands for the node's root: on the embedded cluster, several nodes share one machine.
const ROOT: &str = "DIVVY_NODE_ROOT";

/// Where the driver's root directory is mounted, as for NVIDIA's device plugin (`--container-driver-root`).
const DRIVER_ROOT: &str = "/driver-root";
/// If this variable is `true`, `mps-control-daemon` serves the pods of `divvy agent --mps`: it runs one control daemon for all GPUs, and sets no limits.
const FOR_SHARES: &str = "DIVVY_MPS_SHARES";

/// Where the control daemons' files and the driver's programs are, and how patient the program is.
#[derive(Debug, Clone)]
pub struct MpsSurroundings {
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
    /// How long the start of a container waits for its daemon: less than the kubelet waits, which is 30 s. The kubelet tries again.
    pub patience: Duration,
    /// The intervals of the supervision.
    pub intervals: Intervals,
    /// The time between two counts of what containers use.
    pub count: Duration,
    /// Whether the daemon is for pods of `divvy agent --mps`, and not for the resources of NVIDIA's configuration.
    pub for_shares: bool,
    /// The UID of the pod that runs this program. Empty if it is not known.
    pub pod: String,
    /// The driver's root directory in this container, which may be missing.
    pub driver_root: PathBuf,
    /// This program, which runs the driver's programs in the driver's root directory if no directory of `path` has them.
    pub own: PathBuf,
}

impl MpsSurroundings {
    /// Return the settings for a program that runs in a pod and finds the node's files below this root. `variable` returns the value of an environment
    /// variable.
    ///
    /// # Errors
    /// Fails if the variable [`FOR_SHARES`] has another value than `true` and `false`.
    pub(super) fn of_pod(root: &Path, variable: impl Fn(&str) -> Option<String>) -> Result<MpsSurroundings, Error> {
        let mps = MpsSurroundings::below(root);
        match variable(FOR_SHARES).as_deref() {
            None | Some("" | "false") => Ok(mps),
            Some("true") => Ok(MpsSurroundings {
                for_shares: true,
                pod: variable("POD_UID").unwrap_or_default(),
                // NVIDIA's pods mount the directory at /mps. Here it is where it is on the node, so that the driver's programs find it in the driver's
                // root directory, too.
                root: crate::mps::below(root),
                ..mps
            }),
            Some(other) => Err(Error::Plugin(format!(
                "{FOR_SHARES}: {other:?} was found; write true or false"
            ))),
        }
    }

    /// Return the settings of NVIDIA's pods.
    pub(super) fn below(root: &Path) -> MpsSurroundings {
        MpsSurroundings {
            root: root.join("mps"),
            system: root.to_owned(),
            path: std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()),
            deadline: Duration::from_secs(10),
            end_limit: Duration::from_secs(25),
            patience: Duration::from_secs(25),
            intervals: Intervals::default(),
            count: Duration::from_secs(10),
            for_shares: false,
            pod: String::new(),
            driver_root: DRIVER_ROOT.into(),
            own: "/proc/self/exe".into(),
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
    pub mps: MpsSurroundings,
    /// How often the driver is asked, and how patient the program is with a GPU that failed.
    pub pace: Pace,
    /// The address on which the device plugin serves `/healthz`, `/readyz`, and `/metrics`. `None` serves nothing.
    pub metrics: Option<SocketAddr>,
    /// Where the device plugin posts events. `None` posts none.
    pub events: Option<OnNode>,
}

/// The node whose events tell about its GPUs, and the cluster to which it belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnNode {
    /// The kubeconfig file. `None` means the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The node's name.
    pub node: String,
}

/// How often the driver is asked, and how patient the program is with a GPU that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The time between two snapshots of the driver.
    pub interval: Duration,
    /// How long a GPU that failed must run without a new error before it is healthy again.
    pub recovery: Duration,
    /// How long the driver may be silent before all GPUs count as failed.
    pub silence: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            interval: ProbeTiming::default().poll,
            recovery: Duration::from_secs(30),
            silence: Duration::from_secs(60),
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
            silence: default.silence,
        })
    }

    pub(super) fn timing(self) -> ProbeTiming {
        ProbeTiming {
            poll: self.interval,
            ..ProbeTiming::default()
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
            mps: MpsSurroundings::of_pod(&root, variable)?,
            pace: Pace::of(variable)?,
            metrics: metrics(variable)?,
            events: events(variable, Path::new(TOKEN).exists()),
            root,
        })
    }
}

pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Return the address that the variable of `divvy agent --metrics` has.
fn metrics(variable: impl Fn(&str) -> Option<String>) -> Result<Option<SocketAddr>, Error> {
    let Some(text) = variable("DIVVY_METRICS").filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let address = text.parse().map_err(|_| {
        Error::Plugin(format!(
            "DIVVY_METRICS: {text:?} is not an address and a port; write, for example, 0.0.0.0:9400"
        ))
    })?;
    Ok(Some(address))
}

/// Return where events are posted: on the pod's node, if its name is known and the pod may talk to the API server.
fn events(variable: impl Fn(&str) -> Option<String>, has_token: bool) -> Option<OnNode> {
    let node = variable("NODE_NAME").filter(|name| !name.is_empty())?;
    let is_in_cluster = has_token && variable("KUBERNETES_SERVICE_HOST").is_some();
    is_in_cluster.then_some(OnNode { kubeconfig: None, node })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The agent names a variable with a wrong value.
    #[test]
    fn the_agents_variables_set_the_pace() {
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

    #[test]
    fn metrics_are_served_only_on_an_address_that_is_set() {
        let of = |text: Option<&str>| metrics(|name| text.filter(|_| name == "DIVVY_METRICS").map(str::to_owned));
        assert_eq!(of(None).expect("unset"), None);
        assert_eq!(of(Some("")).expect("empty"), None);
        assert_eq!(of(Some("0.0.0.0:9400")).expect("an address"), "0.0.0.0:9400".parse().ok());
        assert_eq!(
            of(Some("9400")).expect_err("no address").to_string(),
            "error starting plugins: DIVVY_METRICS: \"9400\" is not an address and a port; write, for example, 0.0.0.0:9400"
        );
    }

    #[test]
    fn events_need_the_nodes_name_and_a_token() {
        let of = |names: &'static [&'static str], has_token| {
            let variable = move |name: &str| names.contains(&name).then(|| "x".to_owned());
            events(variable, has_token).map(|on| on.node)
        };
        let both = &["NODE_NAME", "KUBERNETES_SERVICE_HOST"];
        assert_eq!(of(both, true), Some("x".to_owned()));
        assert_eq!(of(both, false), None);
        assert_eq!(of(&["NODE_NAME"], true), None);
        assert_eq!(of(&["KUBERNETES_SERVICE_HOST"], true), None);
    }
}
