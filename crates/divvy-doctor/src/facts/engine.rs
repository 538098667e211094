//! The container engine and its configuration.

use std::collections::BTreeMap;

use divvy_engines::containerd::Merge;
use divvy_engines::{self as engines, Configuration, Runtime, containerd, crio, docker};

use super::{Asked, Facts};
use crate::check::Stop;

/// The kinds of engines, which differ in the format of their configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// containerd, either separate or part of a Kubernetes distribution.
    Containerd,
    /// CRI-O.
    Crio,
    /// Docker, through cri-dockerd.
    Docker,
}

/// A container engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// The format of the configuration.
    pub kind: Kind,
    /// The name for `divvy configure`. `k3s` stands for the containerd that k3s contains.
    pub name: &'static str,
    /// The systemd unit that must be restarted after a change of the configuration.
    pub service: &'static str,
    /// The path of the configuration file.
    pub file: String,
}

impl Engine {
    /// Return the `divvy configure` command for this engine with these flags.
    pub(crate) fn configure(&self, flags: &str) -> String {
        let gap = if flags.is_empty() { "" } else { " " };
        format!("divvy configure {}{gap}{flags} --restart", self.name)
    }
}

/// The engines, each with its configuration file and with a part of its socket's path. Kubernetes distributions write their
/// configuration file again at each start.
const KNOWN: [(engines::Engine, &str, &str); 7] = [
    (
        engines::Engine::K3s,
        "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        "/run/k3s/",
    ),
    (
        engines::Engine::Rke2,
        "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        "/run/k3s/",
    ),
    (engines::Engine::K0s, "/run/k0s/containerd-cri.toml", "/run/k0s/"),
    (
        engines::Engine::Microk8s,
        "/var/snap/microk8s/current/args/containerd.toml",
        "/var/snap/microk8s/",
    ),
    (engines::Engine::Containerd, containerd::CONFIG, "containerd"),
    (engines::Engine::Crio, crio::CONFIG, "crio"),
    (engines::Engine::Docker, docker::CONFIG, "docker"),
];

fn known((engine, file, _): (engines::Engine, &str, &str)) -> Engine {
    Engine {
        kind: match engine {
            engines::Engine::Docker => Kind::Docker,
            engines::Engine::Crio => Kind::Crio,
            _ => Kind::Containerd,
        },
        name: engine.as_str(),
        service: engine.units().first().copied().unwrap_or(engine.as_str()),
        file: file.to_owned(),
    }
}

impl Facts<'_> {
    /// Return the engines that have a configuration on this machine, in the order of [`KNOWN`].
    pub(crate) fn engines(&self) -> Vec<Engine> {
        KNOWN
            .into_iter()
            .map(known)
            .filter(|engine| {
                let drop_ins = engine.kind == Kind::Crio && !self.root.names(&crio::drop_ins(&engine.file)).is_empty();
                self.exists(&engine.file) || drop_ins
            })
            .collect()
    }

    /// Return the engine that runs pods: the engine at the kubelet's endpoint, or otherwise the first engine that is configured
    /// or running.
    pub fn engine(&self) -> Result<Engine, Stop> {
        let endpoint = self.kubelet().and_then(|kubelet| kubelet.endpoint);
        let mut engines = self.engines();
        if let Some(endpoint) = endpoint {
            let mut named = KNOWN.into_iter().filter(|known| endpoint.contains(known.2));
            let first = named.clone().next();
            let there = named.find(|known| engines.iter().any(|engine| engine.file == known.1));
            if let Some(found) = there.or(first) {
                return Ok(known(found));
            }
        }
        // The containerd that Docker starts does not run pods.
        let docker = !self.processes("dockerd").is_empty();
        if !docker && engines.is_empty() && !self.processes("containerd").is_empty() {
            return Ok(known(KNOWN[4]));
        }
        engines.retain(|engine| engine.kind != Kind::Docker);
        match engines.is_empty() {
            true => Err(Stop::Skip("neither containerd nor CRI-O is here".to_owned())),
            false => Ok(engines.remove(0)),
        }
    }

    /// Return the PID of an engine. The containerd that Docker starts with its own configuration file is ignored.
    pub fn process_of(&self, engine: &Engine) -> Option<u32> {
        if engine.kind != Kind::Containerd {
            let name = if engine.kind == Kind::Crio { "crio" } else { "dockerd" };
            return self.processes(name).first().map(|(number, _)| *number);
        }
        let told = |arguments: &[String]| {
            let mut words = arguments.iter().skip(1);
            let joined = words
                .clone()
                .find_map(|word| word.strip_prefix("--config=").map(str::to_owned));
            joined.or_else(|| {
                words.find(|word| *word == "--config" || *word == "-c")?;
                words.next().cloned()
            })
        };
        let processes = self.processes("containerd").into_iter();
        let mut own = processes.filter(|(_, arguments)| match told(arguments) {
            Some(file) => file == engine.file,
            None => engine.file == containerd::CONFIG,
        });
        own.next().map(|(number, _)| number)
    }

    /// Return the major and minor version of the containerd that runs pods. The sources are, in this order: the dumped
    /// configuration, the package, and the Node objects. It is unknown which Node object describes this machine. The Node
    /// objects are therefore used only if all nodes have containerd before 2.0, or all nodes have containerd 2.0 or later.
    pub(crate) fn containerd_version(&self, engine: &Engine) -> Option<(u32, u32)> {
        if let Asked::Answer(dump) = &self.containerd
            && let Ok(table) = dump.parse::<toml::Table>()
            && let Some(version) = table.get("version").and_then(toml::Value::as_integer)
        {
            // containerd prints its configuration in the newest format version that it supports: 3 or later since containerd 2.0.
            return Some(if version >= 3 { (2, 0) } else { (1, 0) });
        }
        let packages = ["containerd.io", "containerd"];
        // Distributions such as k3s contain their own containerd, so the package does not count for them.
        let is_packaged = engine.file == containerd::CONFIG;
        let package = packages.iter().filter(|_| is_packaged).find_map(|name| self.package(name));
        if let Some(version) = package {
            return containerd::release(&version);
        }
        let cluster = self.cluster.answer()?;
        let mut versions = cluster
            .nodes
            .iter()
            .map(|node| &node.status.node_info.container_runtime_version)
            .map(|version| version.strip_prefix("containerd://").and_then(containerd::release));
        let first = versions.next()??;
        versions
            .all(|other| other.is_some_and(|other| (other.0 >= 2) == (first.0 >= 2)))
            .then_some(first)
    }

    /// Return the configuration of the engine: what the running engine prints, if available, and otherwise the content of its
    /// files.
    pub(crate) fn configuration(&self, engine: &Engine) -> Result<Configuration, Stop> {
        let read = match (engine.kind, &self.containerd) {
            (Kind::Containerd, Asked::Answer(dump)) => {
                let files = BTreeMap::from([(engine.file.clone(), dump.clone())]);
                containerd::read(&files, &engine.file, Merge::Keys)
            }
            (Kind::Containerd, _) => containerd::read(&self.root, &engine.file, Merge::Keys),
            (Kind::Crio, _) => crio::read(&self.root, &engine.file),
            (Kind::Docker, _) => return Err(Stop::Skip("pods run on Docker (R07)".to_owned())),
        };
        read.map_err(|error| {
            Stop::Blind(format!(
                "the configuration of {} could not be read (R08): {error}",
                engine.name
            ))
        })
    }
}

/// Report whether a runtime gives GPUs to containers. This is decided by its program, or, if it has none, by its name.
pub(crate) fn is_for_gpus(name: &str, runtime: &Runtime) -> bool {
    match &runtime.path {
        Some(path) => {
            let program = path.rsplit('/').next().unwrap_or_default();
            program.starts_with("nvidia-container-runtime") || program.starts_with("divvy-runtime")
        }
        None => matches!(name, "nvidia" | "divvy"),
    }
}

/// Return the runtimes that give GPUs to containers.
pub(crate) fn for_gpus(configuration: &Configuration) -> Vec<(&String, &Runtime)> {
    let runtimes = configuration.runtimes.iter();
    runtimes.filter(|(name, runtime)| is_for_gpus(name, runtime)).collect()
}
