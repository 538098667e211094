//! A real Kubernetes on this machine, started by `e2e/up.sh`, with Divvy installed.
//!
//! `e2e/program.sh` stops and starts programs. The reports of containers are read from the kubelet's log files. Whether containers run is read
//! from the kernel (their cgroups and processes), not from any component under test.

mod cgroups;
mod gpu_programs;
mod logs;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use divvy_model::MemoryUnit;
use divvy_model::machine::{MachineNode, Machines};
use divvy_testbed::scenario::{
    Cluster, ClusterProgram, End, NodeConfigs, PluginSetup, SelfReport, TestbedMachine, WholeOffer, Witness, write_node_configs,
};
use divvy_testbed::simulated_driver;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::process::Command;

/// The cluster whose state is in a directory.
#[derive(Clone)]
pub(crate) struct Real {
    directory: PathBuf,
    client: kube::Client,
    divvy: PathBuf,
    machines: Machines,
    nodes: Vec<String>,
    port_base: u16,
    cgroup_prefix: String,
}

/// Where Divvy is installed, and the port at which the chart lets agents answer.
const NAMESPACE: &str = "divvy-system";
const METRICS_PORT: u16 = 9400;

impl Real {
    /// Open the running cluster with its state in this directory. The error is `NotFound` if none is running or Divvy is not installed on it.
    pub(crate) async fn open(directory: &Path) -> io::Result<Real> {
        let settings = settings(&directory.join("settings"), "cargo xtask cluster up --nodes 3 --rbac")?;
        let divvy = settings_of_divvy(directory)?;
        let of = |from: &BTreeMap<String, String>, key: &str| {
            from.get(key)
                .cloned()
                .ok_or_else(|| io::Error::other(format!("{key} is missing in {}", directory.display())))
        };
        let machines = std::fs::read_to_string(of(&divvy, "MACHINES")?)?;
        let machines = Machines::parse(&machines).map_err(io::Error::other)?;
        let kubeconfig = Kubeconfig::read_from(directory.join("admin.kubeconfig")).map_err(io::Error::other)?;
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = kube::Client::try_from(config.map_err(io::Error::other)?).map_err(io::Error::other)?;
        let mut nodes = Vec::new();
        for entry in std::fs::read_dir(directory.join("pids"))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            nodes.extend(name.strip_suffix(".holder").map(str::to_owned));
        }
        nodes.sort();
        Ok(Real {
            directory: directory.to_owned(),
            client,
            divvy: PathBuf::from(of(&divvy, "DIVVY_BIN")?).join("divvy"),
            machines,
            nodes,
            port_base: of(&settings, "PORT_BASE")?.parse().map_err(io::Error::other)?,
            cgroup_prefix: format!("divvy-test-{}", of(&settings, "PORT_BASE")?),
        })
    }

    /// Return the directory of the files for the programs under NVIDIA's names on a node.
    fn nvidia_directory(&self, node: &str) -> PathBuf {
        self.directory.join(node).join("nvidia")
    }

    async fn part(&self, args: &[&str]) -> io::Result<()> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/program.sh");
        let output = Command::new("bash")
            .arg(script)
            .args(args)
            .env("CLUSTER_DIR", &self.directory)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(io::Error::other(format!("program.sh {}: {said}", args.join(" "))))
    }
}

/// Parse the lines `: "${NAME:=value}"`.
fn settings(path: &Path, remedy: &str) -> io::Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let text = format!("could not read {} ({error}); {remedy}", path.display());
        io::Error::new(error.kind(), text)
    })?;
    let pairs = text.lines().filter_map(|line| {
        let inner = line.strip_prefix(": \"${")?.strip_suffix("}\"")?;
        inner.split_once(":=")
    });
    Ok(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
}

fn settings_of_divvy(directory: &Path) -> io::Result<BTreeMap<String, String>> {
    settings(&directory.join("divvy.settings"), "cargo xtask cluster divvy")
}

/// Return the name that the scripts use for a program.
fn name_of(part: ClusterProgram<'_>) -> String {
    match part {
        ClusterProgram::ApiServer => "kube-apiserver".to_owned(),
        ClusterProgram::Scheduler => "kube-scheduler".to_owned(),
        ClusterProgram::Extender => "divvy-extender".to_owned(),
        ClusterProgram::Agent(node) => format!("{node}.agent"),
        ClusterProgram::Plugin(node) => format!("{node}.nvidia-device-plugin"),
        ClusterProgram::MpsControlDaemon(node) => format!("{node}.mps-control-daemon"),
        ClusterProgram::Kubelet(node) => format!("{node}.kubelet"),
        ClusterProgram::Runtime(node) => format!("{node}.containerd"),
    }
}

impl Cluster for Real {
    fn client(&self) -> kube::Client {
        self.client.clone()
    }

    fn node_of(&self, machine: TestbedMachine) -> Option<String> {
        // The names are those of e2e/machines.toml.
        let name = match machine {
            TestbedMachine::Laptop => "n1",
            TestbedMachine::Mixed => "n2",
            TestbedMachine::Instinct => "n3",
            TestbedMachine::CpuOnly => "n4",
        };
        self.nodes.iter().find(|node| *node == name).cloned()
    }

    async fn join(&mut self, node: &str) -> io::Result<()> {
        if self.nodes.iter().any(|known| known == node) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("this cluster has no node {node}; run: cargo xtask cluster up --nodes 3"),
        ))
    }

    fn has_gpus(&self, node: &str) -> bool {
        self.machines.node(node).is_some_and(MachineNode::has_gpus)
    }

    async fn report(&self, pod_uid: &str, container: &str) -> io::Result<Option<SelfReport>> {
        for node in &self.nodes {
            if let Some(report) = logs::newest(&self.directory.join(node), pod_uid, container)? {
                let running = cgroups::is_populated(&self.cgroup_prefix, node, pod_uid, &report.id);
                // The last line shows that the report is complete. A program that has ended prints no more.
                if !report.whole && running {
                    return Ok(None);
                }
                return Ok(Some(SelfReport {
                    id: report.id,
                    env: report.env,
                    devices: report.devices,
                    mounts: report.mounts,
                    running,
                }));
            }
        }
        Ok(None)
    }

    fn place(&self, node: &str, path: &str, content: Option<&[u8]>) -> io::Result<()> {
        simulated_driver::place(&self.directory.join(node), path, content)
    }

    fn agents_path(&self, _: &str, path: &str) -> String {
        if self.agents_are_pods() {
            format!("/host{path}")
        } else {
            path.to_owned()
        }
    }

    fn has_cgroups_v2(&self) -> bool {
        Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
    }

    async fn agents_address(&self, node: &str) -> io::Result<SocketAddr> {
        if !self.agents_are_pods() {
            // As in e2e/divvy.sh.
            let number: u16 = node.trim_start_matches('n').parse().map_err(io::Error::other)?;
            return Ok(([127, 0, 0, 1], self.port_base + 10 * number + 2).into());
        }
        let pods = Api::<Pod>::namespaced(self.client.clone(), NAMESPACE);
        let of = ListParams::default()
            .labels("app.kubernetes.io/component=agent")
            .fields(&format!("spec.nodeName={node}"));
        let pods = pods.list(&of).await.map_err(io::Error::other)?;
        let running = pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let address = running.filter_map(|pod| pod.status?.pod_ip).next();
        let address = address.ok_or_else(|| io::Error::other(format!("{node} has no agent with an address")))?;
        Ok((address.parse::<IpAddr>().map_err(io::Error::other)?, METRICS_PORT).into())
    }

    fn nvml(&self, node: &str) -> PathBuf {
        self.directory.join(node).join("nvml.sock")
    }

    async fn divide(&mut self, node: &str, gpus: &[u32], profiles: Option<&[u32]>) -> io::Result<()> {
        let files = simulated_driver::mig_files(gpus, profiles.map_or(0, <[u32]>::len));
        let nodes: Vec<String> = files.nodes.iter().map(u32::to_string).collect();
        let (directories, nodes) = (files.directories.join(" "), nodes.join(" "));
        self.part(&["mig-files", node, &files.minors, &directories, &nodes]).await?;
        for gpu in gpus {
            simulated_driver::divide(&self.nvml(node), *gpu, profiles).await?;
        }
        Ok(())
    }

    async fn run_plugin(&mut self, node: &str, plugin: Option<PluginSetup<'_>>) -> io::Result<()> {
        let directory = self.nvidia_directory(node);
        let (config, new) = (directory.join("config.yaml"), directory.join("config.new"));
        let runs = config.exists();
        let Some(plugin) = plugin else {
            if !runs {
                return Ok(());
            }
            self.part(&["plugin", node, "off"]).await?;
            return std::fs::remove_file(config);
        };
        std::fs::create_dir_all(directory.join("bin"))?;
        std::fs::write(&new, plugin.config)?;
        std::fs::rename(&new, &config)?;
        if runs {
            return Ok(());
        }
        divvy_testkit::mps::install(&directory.join("bin"))?;
        let programs = if plugin.with_mps { "with-mps" } else { "alone" };
        self.part(&["plugin", node, programs]).await
    }

    fn has_plugin(&self) -> bool {
        self.agents_are_pods()
    }

    fn mps_calls(&self, node: &str) -> io::Result<Vec<String>> {
        divvy_testkit::mps::calls(&self.nvidia_directory(node).join("bin"))
    }

    fn agents_are_pods(&self) -> bool {
        self.directory.join("install.objects.yaml").exists()
    }

    async fn stop(&mut self, part: ClusterProgram<'_>, end: End) -> io::Result<()> {
        let how = match end {
            End::Stopped => "stop",
            End::Killed => "kill",
        };
        self.part(&[how, &name_of(part)]).await
    }

    async fn start(&mut self, part: ClusterProgram<'_>) -> io::Result<()> {
        self.part(&["start", &name_of(part)]).await
    }

    async fn power_off(&mut self, node: &str) -> io::Result<()> {
        self.part(&["power-off", node]).await
    }

    async fn roll(&mut self) -> io::Result<()> {
        self.part(&["roll"]).await
    }

    async fn change_unit(&mut self, unit: MemoryUnit) -> io::Result<()> {
        self.part(&["unit", &unit.to_string()]).await
    }

    async fn offer_whole(&mut self, whole: WholeOffer) -> io::Result<()> {
        self.part(&["whole", &whole.is_offered().to_string(), whole.mig_strategy()])
            .await
    }

    async fn use_mps(&mut self, mps: bool) -> io::Result<()> {
        let with_nvidia = self.machines.nodes.iter().filter(|node| !node.gpus.is_empty());
        let names: Vec<String> = with_nvidia.map(|node| node.name.clone()).collect();
        let mps = mps.to_string();
        let mut words = vec!["mps", mps.as_str()];
        for node in &names {
            let programs = self.nvidia_directory(node).join("bin");
            std::fs::create_dir_all(&programs)?;
            divvy_testkit::mps::install(&programs)?;
            words.push(node);
        }
        self.part(&words).await
    }

    async fn configure_nodes(&mut self, configs: &NodeConfigs) -> io::Result<()> {
        // Agents that do not run in pods read these files.
        write_node_configs(&self.directory.join("node-configs"), configs)?;
        let json = serde_json::to_string(configs).map_err(io::Error::other)?;
        self.part(&["node-configs", &json]).await
    }

    fn extender_url(&self) -> Option<String> {
        // In an installed Divvy, kube-scheduler calls a Service, with certificates.
        let of_scheduler = settings(&self.directory.join("settings"), "").ok()?.remove("EXTENDER_URL");
        of_scheduler.filter(|url| !self.agents_are_pods() && url.starts_with("http"))
    }

    fn witness(&self) -> Witness {
        let mut living = cgroups::Inspector::new(&self.directory, &self.cgroup_prefix);
        Box::new(move || living.inspect())
    }

    fn grants(&self, node: &str) -> io::Result<Vec<String>> {
        let node = self.directory.join(node);
        let mut names = simulated_driver::names(&node.join("var/lib/kubelet/plugins/divvy.dev/grants"))?;
        names.extend(simulated_driver::grant_specs(&node.join("run/cdi"))?);
        Ok(names)
    }

    fn divvy(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.divvy);
        command
            .args(args)
            .env("KUBECONFIG", self.directory.join("admin.kubeconfig"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_settings_are_read_as_they_write_them() {
        let directory = std::env::temp_dir().join(format!("divvy-e2e-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("settings");
        std::fs::write(&path, ": \"${NODES:=2}\"\n: \"${EXTENDER_URL:=http://127.0.0.1:1/x}\"\n").expect("written");
        let found = settings(&path, "").expect("read");
        std::fs::remove_dir_all(&directory).expect("removed");
        let expected = [("EXTENDER_URL", "http://127.0.0.1:1/x"), ("NODES", "2")];
        assert_eq!(
            found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<Vec<_>>(),
            expected
        );
        let missing = settings(&path, "cargo xtask cluster up").expect_err("gone");
        assert!(missing.to_string().contains("cargo xtask cluster up"), "{missing}");
    }
}
