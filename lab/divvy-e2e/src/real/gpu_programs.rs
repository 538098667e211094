//! Programs that use a GPU in the containers of the real cluster.
//!
//! They are started by `kubectl exec`, and load the simulated driver's libraries, which are in the place of the driver's libraries on the node. The image of
//! the test pods has no C library, so the program, its loader, and its libraries are in a directory that the pods mount, next to what the simulated driver has
//! in the place of a kernel module.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use divvy_gpu_sim::GpuLedger;
use divvy_host::{Files, Root};
use divvy_kube::objects::PodObject;
use divvy_testbed::builders::PodBuilder;
use divvy_testbed::cuda_program::CudaProgram;
use divvy_testbed::scenario::{Cluster as _, DRIVER_STATE, RunsGpuPrograms, TestbedMachine, driver_variables};
use kube::Api;
use kube::api::ListParams;
use tokio::process::Command;

use super::Real;

/// The driver's libraries, and those that simulate them.
const LIBRARIES: [(&str, &str); 2] = [("libcuda", "libdivvy_cuda_sim.so"), ("libnvidia-ml", "libdivvy_nvml_sim.so")];
const DRIVER_ROOT: &str = "run/nvidia/driver";
/// Where a container has the driver's libraries.
const IN_CONTAINER: &str = "/usr/lib/x86_64-linux-gnu";
const PROGRAM: &str = "divvy-cuda-program";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// The C library, and where distributions have it.
const C_LIBRARY: [&str; 4] = [LOADER, "libc.so.6", "libgcc_s.so.1", "libm.so.6"];
const DIRECTORIES: [&str; 4] = ["/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"];
/// How long a program may take to start.
const PATIENCE: Duration = Duration::from_secs(20);

impl Real {
    fn driver_state(&self) -> PathBuf {
        self.directory.join("sim")
    }

    fn programs(&self) -> PathBuf {
        self.driver_state().join("programs")
    }

    fn built(&self) -> &Path {
        self.divvy.parent().unwrap_or(Path::new("."))
    }

    /// Return the namespace and the name of a pod.
    async fn pod_named(&self, uid: &str) -> io::Result<(String, String)> {
        let pods = Api::<PodObject>::all_with(self.client.clone(), &divvy_kube::objects::pods());
        let pods = pods.list(&ListParams::default()).await.map_err(io::Error::other)?;
        let found = pods.into_iter().find(|pod| pod.metadata.uid.as_deref() == Some(uid));
        let name = found.and_then(|pod| Some((pod.metadata.namespace?, pod.metadata.name?)));
        name.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("there is no pod with the UID {uid}")))
    }
}

/// Return the PIDs of the programs in a pod.
fn programs_in(pod_uid: &str) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end at any time.
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let (command, cgroups) = (read("cmdline"), read("cgroup"));
        let in_pod = String::from_utf8_lossy(&cgroups).contains(pod_uid);
        if in_pod && String::from_utf8_lossy(&command).contains(PROGRAM) {
            found.insert(pid);
        }
    }
    Ok(found)
}

/// Return the file of one of the driver's libraries, to which the links below the driver's root lead.
fn library_in(root: &Path, name: &str) -> io::Result<PathBuf> {
    let link = format!("{IN_CONTAINER}/{name}.so.1");
    let files = Files::below(root);
    let found = Root::open(&files, "/").and_then(|root| root.resolve(&link));
    let found = found.map(|(file, _)| root.join(file.trim_start_matches('/')));
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{} has no {link}", root.display())))
}

impl RunsGpuPrograms for Real {
    fn provide_cuda(&self, node: &str, provide: bool) -> io::Result<()> {
        let root = self.directory.join(node).join(DRIVER_ROOT);
        for (name, library) in LIBRARIES {
            let file = library_in(&root, name)?;
            let file_name = file.file_name().unwrap_or_default().to_string_lossy();
            let next = file.with_file_name(format!("{file_name}.next"));
            if provide {
                std::fs::copy(self.built().join(library), &next).map(drop)?
            } else {
                // As e2e/lib.sh writes it.
                std::fs::write(&next, file_name.replacen(".so.", " of ", 1) + "\n")?
            }
            std::fs::rename(next, file)?;
        }
        std::fs::create_dir_all(self.programs())?;
        std::fs::copy(self.built().join(PROGRAM), self.programs().join(PROGRAM))?;
        for name in C_LIBRARY {
            let mut places = DIRECTORIES.iter().map(|directory| Path::new(directory).join(name));
            let found = places.find(|path| path.exists());
            let found = found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("this machine has no {name}")))?;
            std::fs::copy(found, self.programs().join(name))?;
        }
        Ok(())
    }

    fn for_programs(&self, pod: PodBuilder, node: &str) -> PodBuilder {
        let pod = pod.host_directory(&self.driver_state().display().to_string(), DRIVER_STATE);
        driver_variables(node)
            .iter()
            .fold(pod, |pod, (name, value)| pod.env(name, value))
    }

    fn guard_libraries(&self) -> io::Result<PathBuf> {
        Ok(self.built().to_owned())
    }

    async fn start_cuda_program(&self, pod_uid: &str, container: &str, library: &str) -> io::Result<CudaProgram> {
        let (namespace, name) = self.pod_named(pod_uid).await?;
        let before = programs_in(pod_uid)?;
        let programs = format!("{DRIVER_STATE}/programs");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/kubectl.sh");
        let mut command = Command::new("bash");
        command.arg(script).env("CLUSTER_DIR", &self.directory);
        command.args(["exec", "-i", "-n", &namespace, &name, "-c", container, "--"]);
        command.args([&format!("{programs}/{LOADER}"), "--library-path"]);
        command.args([
            &format!("{programs}:{IN_CONTAINER}"),
            &format!("{programs}/{PROGRAM}"),
            library,
        ]);
        let mut program = CudaProgram::start(command)?;
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(pid) = programs_in(pod_uid)?.difference(&before).next() {
                program.set_pid(*pid);
                return Ok(program);
            }
            if program.has_ended()? || Instant::now() > end {
                return Err(program.failed().await);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn held(&self, gpu: &str) -> io::Result<BTreeMap<u32, u64>> {
        let usage = GpuLedger::open(&self.driver_state().join("ledger"), gpu).and_then(|mut ledger| ledger.usage());
        let usage = usage.map_err(io::Error::other)?;
        Ok(usage.into_iter().map(|of| (of.pid, of.bytes)).collect())
    }

    fn gpu_machine(&self) -> io::Result<(String, u64)> {
        let node = self.node_of(TestbedMachine::Laptop);
        let node = node.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "this cluster has no node with one GPU"))?;
        Ok((node, TestbedMachine::Laptop.units()))
    }

    fn rounding_mib(&self) -> u64 {
        0
    }

    fn has_seccomp(&self) -> bool {
        true
    }
}
