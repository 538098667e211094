//! The container engine and its configuration.

use std::collections::BTreeMap;

use divvy_engines::containerd::Merge;
use divvy_engines::{self as engines, Configuration, OciRuntime, containerd, crio, docker};

use super::{Asked, Facts};
use crate::check::CheckStop;

/// The kinds of engines, which differ in the format of their configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// containerd, either separate or part of a Kubernetes distribution.
    Containerd,
    /// CRI-O.
    Crio,
    /// Docker, through cri-dockerd.
    Docker,
}

/// A container engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFacts {
    /// The format of the configuration.
    pub kind: EngineKind,
    /// The name for `divvy configure`. `k3s` stands for the containerd that k3s contains.
    pub name: &'static str,
    /// The systemd unit that must be restarted after a change of the configuration. `None` if no unit runs the engine.
    pub unit: Option<String>,
    /// The path of the configuration file.
    pub file: String,
    /// The path of the file that a person edits. It differs from `file` if a distribution generates `file` at each start.
    pub edited: String,
    /// The PID, if the engine runs.
    pub process: Option<u32>,
    /// Whether `file` is known to be the file of the engine that runs pods.
    pub is_certain: bool,
    /// The operating system that writes the engine's files itself.
    pub written_by: Option<&'static str>,
}

impl EngineFacts {
    /// Return the `divvy configure` command for this engine with these flags. If the engine's file is unknown, or is not for people to edit,
    /// return a sentence without a command.
    pub(crate) fn configure(&self, flags: &str) -> String {
        if !self.is_editable() {
            return self.by_hand("add the runtime for GPUs");
        }
        let gap = if flags.is_empty() { "" } else { " " };
        let usual = self.edited != self.file || USUAL.contains(&self.file.as_str());
        let config = if usual {
            String::new()
        } else {
            format!(" --config {}", self.file)
        };
        format!("divvy configure {}{config}{gap}{flags} --restart", self.name)
    }

    fn is_editable(&self) -> bool {
        self.is_certain && self.written_by.is_none() && !self.edited.starts_with("/usr/")
    }

    /// Return a sentence for a change that a person makes in the engine's own file.
    pub(crate) fn by_hand(&self, change: &str) -> String {
        self.by_hand_in(change, &self.file)
    }

    /// Return a sentence for a change that a person makes in this file of the engine.
    pub(crate) fn by_hand_in(&self, change: &str, file: &str) -> String {
        let restart = self.restart();
        if !self.is_certain {
            return format!(
                "{change} in the file that the {} of the kubelet's endpoint reads (ps -ef shows its --config), then {restart}",
                self.name
            );
        }
        let file = if file == self.file { &self.edited } else { file };
        match self.written_by {
            Some(system) => format!("{change} in {file} with the settings of {system}, which writes that file, then {restart}"),
            None if file.starts_with("/usr/") => format!(
                "{change} in a copy of {file} below /etc, name the copy with --config in a drop-in of the systemd unit, then {restart}"
            ),
            None => format!("{change} in {file}, then {restart}"),
        }
    }

    /// Return how the engine is restarted.
    pub(crate) fn restart(&self) -> String {
        match &self.unit {
            Some(unit) => format!("systemctl restart {unit}"),
            None => format!("restart {}", self.name),
        }
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
/// The files that `divvy configure` edits without `--config`.
const USUAL: [&str; 3] = [containerd::CONFIG, crio::CONFIG, docker::CONFIG];
/// The configuration of the containerd that Docker starts.
const OF_DOCKER: &str = "/var/run/docker/containerd/containerd.toml";
/// The socket at which containerd listens by default, and that of CRI-O.
const SOCKETS: [(&str, &str); 2] = [
    ("containerd", "/run/containerd/containerd.sock"),
    ("crio", "/run/crio/crio.sock"),
];
/// The directories of systemd's units; a file in a later one replaces the file of that name in an earlier one.
const UNITS: [&str; 3] = ["/lib/systemd/system", "/usr/lib/systemd/system", "/etc/systemd/system"];
/// Operating systems that write an engine's files from their own settings, by their `ID` in os-release.
const OWNERS: [(&str, &str); 2] = [("talos", "Talos"), ("bottlerocket", "Bottlerocket")];

/// Return the value of a flag that is written as one word with `=`, or as two.
pub(super) fn told(words: &[String], names: &[&str]) -> Option<String> {
    words.iter().enumerate().find_map(|(i, word)| {
        let rest = names.iter().find_map(|name| word.strip_prefix(name))?;
        match rest.strip_prefix('=') {
            Some(value) => Some(value.to_owned()),
            None if rest.is_empty() => words.get(i + 1).cloned(),
            None => None,
        }
    })
}

fn same_socket(one: &str, other: &str) -> bool {
    let plain = |path: &str| path.strip_prefix("/var").unwrap_or(path).to_owned();
    plain(one) == plain(other)
}

impl Facts<'_> {
    /// Describe an engine by its configuration file.
    fn known(&self, engine: engines::Engine, file: String) -> EngineFacts {
        let directory = file.rsplit_once('/').map_or("", |(directory, _)| directory);
        let generated_by = |names: [&str; 2]| {
            let there = names.map(|name| format!("{directory}/{name}"));
            there.iter().find(|path| self.exists(path)).cloned()
        };
        let target = || engine.target(&self.root, &engines::WantedFiles::default()).ok();
        let edited = match engine {
            engines::Engine::K3s | engines::Engine::Rke2 => generated_by(["config-v3.toml.tmpl", "config.toml.tmpl"])
                .or_else(|| target().map(|target| target.written().to_owned()))
                .or_else(|| Some(format!("{directory}/config-v3.toml.tmpl"))),
            engines::Engine::K0s | engines::Engine::Microk8s => target().map(|target| target.written().to_owned()),
            _ => None,
        };
        let owner = |(id, _): &&(&str, &str)| self.is_like(id);
        EngineFacts {
            kind: match engine {
                engines::Engine::Docker => EngineKind::Docker,
                engines::Engine::Crio => EngineKind::Crio,
                _ => EngineKind::Containerd,
            },
            name: engine.as_str(),
            unit: Some(engine.units().first().copied().unwrap_or(engine.as_str()).to_owned()),
            edited: edited.unwrap_or_else(|| file.clone()),
            file,
            process: None,
            is_certain: true,
            written_by: OWNERS.iter().find(owner).map(|(_, name)| *name),
        }
    }

    /// Describe an engine by its usual configuration file, or by the file that its systemd unit names.
    fn usual(&self, (engine, file, _): (engines::Engine, &str, &str)) -> EngineFacts {
        let of_unit = || match engine {
            engines::Engine::Containerd | engines::Engine::Crio => self.config_of_unit(engine.as_str()),
            _ => None,
        };
        self.known(engine, of_unit().unwrap_or_else(|| file.to_owned()))
    }

    /// Return the file that `--config` names in a systemd unit: in the last `ExecStart=` of the unit and its drop-ins, with the variables of
    /// `Environment=` (`systemd.service(5)`).
    fn config_of_unit(&self, unit: &str) -> Option<String> {
        let unit = format!("{unit}.service");
        let main = UNITS.iter().rev().map(|directory| format!("{directory}/{unit}"));
        let mut files: Vec<String> = main.filter(|path| self.exists(path)).take(1).collect();
        let mut drop_ins: BTreeMap<String, String> = BTreeMap::new();
        for directory in UNITS.map(|directory| format!("{directory}/{unit}.d")) {
            let names = self.root.names(&directory).into_iter().filter(|name| name.ends_with(".conf"));
            drop_ins.extend(names.map(|name| (name.clone(), format!("{directory}/{name}"))));
        }
        files.extend(drop_ins.into_values());
        let (mut command, mut variables) = (String::new(), Vec::new());
        for text in files.iter().filter_map(|file| self.text(file)) {
            for line in text.replace("\\\n", " ").lines().map(str::trim) {
                if let Some(line) = line.strip_prefix("ExecStart=") {
                    command = line.to_owned();
                } else if let Some(line) = line.strip_prefix("Environment=") {
                    let words = line.split_whitespace().map(|word| word.trim_matches('"'));
                    variables.extend(
                        words
                            .filter_map(|word| word.split_once('='))
                            .map(|(name, value)| (name.to_owned(), value.to_owned())),
                    );
                }
            }
        }
        for (name, value) in variables.iter().rev() {
            command = command
                .replace(&format!("${{{name}}}"), value)
                .replace(&format!("${name}"), value);
        }
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        told(&words, &["--config", "-c"]).filter(|file| file.starts_with('/'))
    }

    /// Return the engines that have a configuration on this machine, in the order of [`KNOWN`].
    pub(crate) fn engines(&self) -> Vec<EngineFacts> {
        KNOWN
            .into_iter()
            .map(|known| self.usual(known))
            .filter(|engine| {
                let drop_ins = engine.kind == EngineKind::Crio && !self.root.names(&crio::drop_ins(&engine.file)).is_empty();
                self.exists(&engine.file) || drop_ins
            })
            .collect()
    }

    /// Return the running containerds and CRI-Os, each with the socket at which it listens, if that is known.
    pub(crate) fn running(&self) -> Vec<(Option<String>, EngineFacts)> {
        let mut running = Vec::new();
        for (name, socket) in SOCKETS {
            for (process, arguments) in self.processes(name) {
                let words = arguments.get(1..).unwrap_or_default();
                let file = told(words, &["--config", "-c"]);
                let usual = if name == "crio" { crio::CONFIG } else { containerd::CONFIG };
                let path = file.clone().unwrap_or_else(|| usual.to_owned());
                let text = self.text(&path);
                let is_unread = file.is_some() && text.is_none();
                let address = told(words, &["--address", "-a", "--listen"])
                    .or_else(|| written_address(&text?.parse().ok()?))
                    .or_else(|| (!is_unread).then(|| socket.to_owned()));
                let engine = match path.as_str() {
                    _ if name == "crio" => engines::Engine::Crio,
                    path if path.contains("/rke2/") => engines::Engine::Rke2,
                    path if path.ends_with("/agent/etc/containerd/config.toml") => engines::Engine::K3s,
                    path if path.contains("/k0s/") => engines::Engine::K0s,
                    path if path.starts_with("/var/snap/microk8s/") => engines::Engine::Microk8s,
                    _ => engines::Engine::Containerd,
                };
                let mut engine = self.known(engine, path);
                engine.process = Some(process);
                if let Some(group) = self.text(&format!("/proc/{process}/cgroup")) {
                    let units = group.split(['/', '\n']).rev();
                    engine.unit = units
                        .filter_map(|part| part.strip_suffix(".service"))
                        .next()
                        .map(str::to_owned);
                }
                running.push((address, engine));
            }
        }
        running
    }

    /// Return the engine that runs pods: the process that listens at the kubelet's endpoint, otherwise the engine whose socket the endpoint
    /// looks like, and without an endpoint the first engine that is running or configured.
    pub fn engine(&self) -> Result<EngineFacts, CheckStop> {
        let mut running = self.running();
        if let Some(endpoint) = self.kubelet().and_then(|kubelet| kubelet.endpoint) {
            let listens = |(address, _): &&(Option<String>, EngineFacts)| {
                address.as_ref().is_some_and(|address| same_socket(address, &endpoint))
            };
            if let Some((_, engine)) = running.iter().find(listens) {
                return Ok(engine.clone());
            }
            let named: Vec<EngineFacts> = KNOWN
                .into_iter()
                .filter(|known| endpoint.contains(known.2))
                .map(|known| self.usual(known))
                .collect();
            let found = named.iter().find(|engine| self.exists(&engine.file)).or(named.first());
            if let Some(found) = found {
                let mut found = found.clone();
                let of_that_kind =
                    |(_, other): &&(Option<String>, EngineFacts)| other.name == found.name && other.file != OF_DOCKER;
                match running.iter().find(of_that_kind) {
                    Some((None, engine)) => found = engine.clone(),
                    Some(_) => found.is_certain = false,
                    None => {}
                }
                return Ok(found);
            }
        }
        // The containerd that Docker starts does not run pods.
        running.retain(|(_, engine)| engine.file != OF_DOCKER);
        if !self.processes("dockerd").is_empty() {
            running.retain(|(_, engine)| self.exists(&engine.file));
        }
        if running.len() > 1 {
            let usual = |(address, _): &(Option<String>, EngineFacts)| {
                let known = SOCKETS.iter().any(|(_, socket)| address.as_deref() == Some(socket));
                !known
            };
            running.sort_by_key(usual);
            running[0].1.is_certain = false;
        }
        if let Some((_, engine)) = running.into_iter().next() {
            return Ok(engine);
        }
        let configured = self.engines().into_iter().find(|engine| engine.kind != EngineKind::Docker);
        configured.ok_or_else(|| CheckStop::Skip("neither containerd nor CRI-O is here".to_owned()))
    }

    /// Return the PID of an engine. The containerd that Docker starts with its own configuration file is ignored.
    pub fn process_of(&self, engine: &EngineFacts) -> Option<u32> {
        match engine.kind {
            EngineKind::Docker => self.processes("dockerd").first().map(|(number, _)| *number),
            _ => engine.process,
        }
    }

    /// Return the release of the containerd that runs pods. The sources are, in this order: the package, the dumped configuration, and the Node
    /// objects. It is unknown which Node object describes this machine. The Node objects are therefore used only if all nodes have containerd
    /// before 2.0, or all nodes have containerd 2.0 or later; the result is then the oldest.
    pub(crate) fn containerd_version(&self, engine: &EngineFacts) -> Option<containerd::ContainerdRelease> {
        // Distributions such as k3s contain their own containerd, so the package does not count for them.
        let started = engine
            .process
            .and_then(|process| self.root.link(&format!("/proc/{process}/exe")));
        let is_packaged =
            engine.name == engines::Engine::Containerd.as_str() && started.is_none_or(|path| path.starts_with("/usr/bin/"));
        let packages = ["containerd.io", "containerd", "moby-containerd", "containerd2"];
        let mut package = packages.iter().filter(|_| is_packaged).filter_map(|name| self.package(name));
        if let Some(release) = package.find_map(|version| containerd::release(version.rsplit(':').next().unwrap_or_default())) {
            return Some(release);
        }
        if let Asked::Answer(dump) = &self.containerd
            && let Ok(table) = dump.parse::<toml::Table>()
            && let Some(version) = table.get("version").and_then(toml::Value::as_integer)
        {
            // containerd prints its configuration in the newest format version that it supports: 3 since containerd 2.0, 4 since 2.3.
            return Some(match version {
                4.. => NEWEST,
                3 => (2, 0, 0),
                _ => (1, 0, 0),
            });
        }
        let cluster = self.cluster.answer()?;
        let versions = cluster
            .nodes
            .iter()
            .map(|node| &node.status.node_info.container_runtime_version)
            .map(|version| version.strip_prefix("containerd://").and_then(containerd::release));
        let versions: Vec<containerd::ContainerdRelease> = versions.collect::<Option<_>>()?;
        let oldest = versions.iter().min().copied()?;
        versions
            .iter()
            .all(|other| (other.0 >= 2) == (oldest.0 >= 2))
            .then_some(oldest)
    }

    /// Return the configuration of the engine: what the running engine prints, if available, and otherwise the content of its
    /// files.
    pub(crate) fn configuration(&self, engine: &EngineFacts) -> Result<Configuration, CheckStop> {
        let read = match (engine.kind, &self.containerd) {
            (EngineKind::Containerd, Asked::Answer(dump)) => {
                let files = BTreeMap::from([(engine.file.clone(), dump.clone())]);
                containerd::read(&files, &engine.file, Merge::Keys)
            }
            (EngineKind::Containerd, _) => {
                containerd::effective(&self.root, &engine.file, self.containerd_version(engine).unwrap_or(NEWEST))
            }
            (EngineKind::Crio, _) => crio::read(&self.root, &engine.file),
            (EngineKind::Docker, _) => return Err(CheckStop::Skip("pods run on Docker (R07)".to_owned())),
        };
        read.map_err(|error| {
            CheckStop::Blind(format!(
                "the configuration of {} could not be read (R08): {}",
                engine.name,
                error.found()
            ))
        })
    }
}

/// The release whose rules are used if the release is unknown: it uses the most of the files.
pub(crate) const NEWEST: containerd::ContainerdRelease = (2, 3, 7);

/// Return the address of the socket in containerd's main file, up to version 3 and in version 4, or in CRI-O's.
fn written_address(file: &toml::Table) -> Option<String> {
    let places: [&[&str]; 3] = [
        &["grpc", "address"],
        &["plugins", "io.containerd.server.v1.grpc", "address"],
        &["crio", "api", "listen"],
    ];
    places.into_iter().find_map(|keys| {
        let mut value = file.get(keys[0])?;
        for key in &keys[1..] {
            value = value.get(key)?;
        }
        Some(value.as_str()?.to_owned())
    })
}

/// Report whether a runtime gives GPUs to containers. This is decided by its program, or, if it has none, by its name.
pub(crate) fn is_for_gpus(name: &str, runtime: &OciRuntime) -> bool {
    match &runtime.path {
        Some(path) => {
            let program = path.rsplit('/').next().unwrap_or_default();
            program.starts_with("nvidia-container-runtime") || program.starts_with("divvy-runtime")
        }
        None => matches!(name, "nvidia" | "divvy"),
    }
}

/// Return the runtimes that give GPUs to containers.
pub(crate) fn for_gpus(configuration: &Configuration) -> Vec<(&String, &OciRuntime)> {
    let runtimes = configuration.runtimes.iter();
    runtimes.filter(|(name, runtime)| is_for_gpus(name, runtime)).collect()
}
