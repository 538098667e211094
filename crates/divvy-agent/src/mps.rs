//! Where the agent and the MPS control daemon meet: a directory of the node.

use std::path::{Path, PathBuf};

use divvy_agent_core::Mps;
use divvy_hardware::GpuProcesses;
use divvy_nvidia_plugin::mps::{SHARES, STARTED};
use tracing::debug;

use crate::files;

/// The directory of the control daemons' files on the node, the same as with NVIDIA's chart.
pub(crate) const DIRECTORY: &str = "/run/nvidia/mps";

/// The maximum size of the control daemon's marker: it has a UID.
const BYTES: u64 = 256;

/// Return the directory for the connections of the agent's pods, as a program sees it whose view of the node's root is `root`.
pub(crate) fn pipe(root: &Path) -> PathBuf {
    below(root).join(SHARES).join("pipe")
}

/// Return the files of the control daemon for the agent's pods.
pub(crate) fn files() -> Mps {
    Mps {
        pipe: pipe(Path::new("/")).display().to_string(),
        shm: format!("{DIRECTORY}/shm"),
    }
}

/// Return the UID of the pod whose control daemon serves the node's GPUs; empty if the pod is not known. `None` if no daemon serves: it writes the file when
/// its GPUs are ready, and removes it before it ends. Containers cannot write it.
pub(crate) fn server(sys_root: &Path) -> Option<String> {
    let read = files::read(&below(sys_root).join(SHARES).join(STARTED), BYTES);
    read.unwrap_or_else(|error| {
        debug!("whether the MPS control daemon serves is not known: {error}");
        None
    })
}

/// Return the directory of the control daemons' files as a program sees it whose view of the node's root is `root`.
pub(crate) fn below(root: &Path) -> PathBuf {
    root.join(DIRECTORY.trim_start_matches('/'))
}

/// Let the processes of the server's pod count as the host's own: all clients use the GPU through them, and their pod has no share.
pub(crate) fn disown(gpus: &mut [GpuProcesses], server: &str) {
    let processes = gpus.iter_mut().flat_map(|gpu| &mut gpu.processes);
    let own = processes.filter(|process| process.pod.as_deref() == Some(server));
    own.for_each(|process| process.pod = None);
}

#[cfg(test)]
mod tests {
    use divvy_hardware::GpuProcess;
    use divvy_model::MiB;

    use super::*;

    #[test]
    fn only_the_servers_processes_are_the_hosts() {
        let process = |pod: Option<&str>| GpuProcess {
            pid: 1,
            used: MiB(1),
            pod: pod.map(str::to_owned),
            container: None,
            own_pid: None,
            kind: None,
            program: None,
        };
        let mut gpus = [GpuProcesses {
            uuid: "GPU-0".to_owned(),
            processes: vec![process(Some("server")), process(Some("client")), process(None)],
            error: None,
        }];
        disown(&mut gpus, "server");
        let pods: Vec<_> = gpus[0].processes.iter().map(|process| process.pod.as_deref()).collect();
        assert_eq!(pods, [None, Some("client"), None]);
        // A daemon outside of a pod has none.
        disown(&mut gpus, "");
        assert_eq!(gpus[0].processes[1].pod.as_deref(), Some("client"));
    }

    #[test]
    fn a_marker_that_is_no_small_file_is_no_daemon() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = below(root.path()).join(SHARES);
        let marker = directory.join(STARTED);
        std::fs::create_dir_all(&directory).expect("created");
        assert_eq!(server(root.path()), None);
        std::fs::write(&marker, "uid").expect("written");
        assert_eq!(server(root.path()), Some("uid".to_owned()));
        std::fs::write(&marker, "u".repeat(300)).expect("written");
        assert_eq!(server(root.path()), None);
    }
}
