//! Where each distribution keeps its container engine's files, and which systemd units run the engine.

use serde::Deserialize;

use super::target::EngineTarget;
use super::{Error, TextFiles, containerd, crio, docker, glob};

/// A container engine, or a Kubernetes distribution that brings its own containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Docker Engine.
    Docker,
    /// A stand-alone containerd, from a distribution's package or installed as kubeadm's guide describes.
    Containerd,
    /// CRI-O.
    Crio,
    /// The containerd of k3s.
    K3s,
    /// The containerd of rke2.
    Rke2,
    /// The containerd of k0s.
    K0s,
    /// The containerd of `MicroK8s`.
    Microk8s,
}

/// The user's choices that override an engine's default files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WantedFiles {
    /// The engine's main file; `None` selects the distribution's.
    pub config: Option<String>,
    /// The drop-in; `None` selects the distribution's, and an empty string writes everything into the main file.
    pub drop_in: Option<String>,
    /// The output of `containerd --version`.
    pub containerd: Option<String>,
}

/// The base name of divvy's drop-ins. Engines read drop-ins in alphabetical order, so this one comes after those that start with a number.
const DROP_IN: &str = "zz-divvy";
const MICROK8S: &str = "/var/snap/microk8s/current/args";

impl Engine {
    /// All engines, in the order in which `divvy configure --detect` tries them.
    pub const ALL: [Engine; 7] = [
        Engine::Docker,
        Engine::Containerd,
        Engine::Crio,
        Engine::K3s,
        Engine::Rke2,
        Engine::K0s,
        Engine::Microk8s,
    ];

    /// Return the engine's name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Engine::Docker => "docker",
            Engine::Containerd => "containerd",
            Engine::Crio => "crio",
            Engine::K3s => "k3s",
            Engine::Rke2 => "rke2",
            Engine::K0s => "k0s",
            Engine::Microk8s => "microk8s",
        }
    }

    /// Return the first existing path that shows that the engine is installed, or `None` if there is no sign of it.
    pub fn evidence(self, files: &dyn TextFiles) -> Option<String> {
        let paths: &[&str] = match self {
            Engine::Docker => &[
                "/usr/bin/dockerd",
                "/usr/sbin/dockerd",
                "/usr/local/bin/dockerd",
                docker::CONFIG,
            ],
            Engine::Containerd => &["/usr/bin/containerd", "/usr/local/bin/containerd", containerd::CONFIG],
            Engine::Crio => &["/usr/bin/crio", "/usr/local/bin/crio", crio::CONFIG],
            Engine::K3s => &["/var/lib/rancher/k3s/agent", "/usr/local/bin/k3s"],
            Engine::Rke2 => &["/var/lib/rancher/rke2/agent", "/usr/local/bin/rke2"],
            Engine::K0s => &["/usr/local/bin/k0s", "/etc/k0s"],
            Engine::Microk8s => &[MICROK8S],
        };
        paths.iter().find(|path| is_there(files, path)).map(|path| (*path).to_owned())
    }

    /// Return the systemd units that may run the engine, the most likely first.
    pub fn units(self) -> &'static [&'static str] {
        match self {
            Engine::Docker => &["docker"],
            Engine::Containerd => &["containerd"],
            Engine::Crio => &["crio"],
            Engine::K3s => &["k3s", "k3s-agent"],
            Engine::Rke2 => &["rke2-agent", "rke2-server"],
            Engine::K0s => &["k0sworker", "k0scontroller"],
            Engine::Microk8s => &["snap.microk8s.daemon-containerd"],
        }
    }

    /// Find the engine's files on this machine.
    ///
    /// # Errors
    /// Fails if a file that decides which files the engine reads cannot be read or parsed.
    pub fn target(self, files: &dyn TextFiles, wanted: &WantedFiles) -> Result<EngineTarget, Error> {
        let config = |default: &str| wanted.config.clone().unwrap_or_else(|| default.to_owned());
        let drop_in = |default: String| match wanted.drop_in.as_deref() {
            None => Some(default),
            Some("") => None,
            Some(given) => Some(given.to_owned()),
        };
        Ok(match self {
            Engine::Docker => EngineTarget::Docker {
                config: config(docker::CONFIG),
            },
            Engine::Crio => {
                let config = config(crio::CONFIG);
                let drop_in = drop_in(format!("{}/{DROP_IN}.conf", crio::drop_ins(&config)));
                EngineTarget::Crio { config, drop_in }
            }
            Engine::Containerd => {
                let config = config(containerd::CONFIG);
                let drop_in = drop_in(format!("{}/conf.d/{DROP_IN}.toml", glob::directory(&config)));
                let release = wanted.containerd.as_deref().and_then(containerd::release);
                EngineTarget::Containerd {
                    config,
                    drop_in,
                    merge: wanted.containerd.as_deref().and_then(containerd::Merge::of),
                    version: if release.is_some_and(|release| release >= (2, 0, 0)) {
                        3
                    } else {
                        2
                    },
                }
            }
            Engine::K3s | Engine::Rke2 => self.rancher(files, wanted)?,
            Engine::K0s => EngineTarget::Containerd {
                // k0s itself merges these files with its own, key by key, for every version of containerd.
                config: wanted
                    .drop_in
                    .clone()
                    .filter(|drop_in| !drop_in.is_empty())
                    .unwrap_or_else(|| format!("/etc/k0s/containerd.d/{DROP_IN}.toml")),
                drop_in: None,
                merge: Some(containerd::Merge::Keys),
                version: version(files, &config("/etc/k0s/containerd.toml"))?.unwrap_or(2),
            },
            Engine::Microk8s => EngineTarget::Containerd {
                config: config(&format!("{MICROK8S}/containerd-template.toml")),
                drop_in: wanted.drop_in.clone().filter(|drop_in| !drop_in.is_empty()),
                merge: Some(containerd::Merge::Sections),
                version: 2,
            },
        })
    }

    /// Find the files of k3s or rke2, which generate containerd's file at each start. In newer releases the generated file
    /// imports a directory of drop-ins; in older releases only the template of the generated file can be edited.
    fn rancher(self, files: &dyn TextFiles, wanted: &WantedFiles) -> Result<EngineTarget, Error> {
        let directory = format!("/var/lib/rancher/{}/agent/etc/containerd", self.as_str());
        let generated = format!("{directory}/config.toml");
        let version = version(files, &generated)?.unwrap_or(3);
        let drop_in = wanted
            .drop_in
            .clone()
            .unwrap_or_else(|| format!("{directory}/config-v3.toml.d/{DROP_IN}.toml"));
        let read = containerd::read(files, &generated, containerd::Merge::Keys)?;
        if version >= 3 && read.imports.iter().any(|import| glob::matches(import, &drop_in)) {
            return Ok(EngineTarget::Containerd {
                config: generated,
                drop_in: Some(drop_in),
                merge: Some(containerd::Merge::Keys),
                version,
            });
        }
        let template = if version >= 3 {
            "config-v3.toml.tmpl"
        } else {
            "config.toml.tmpl"
        };
        Ok(EngineTarget::Template {
            config: wanted.config.clone().unwrap_or_else(|| format!("{directory}/{template}")),
            generated,
            version,
        })
    }

    /// Return whether the kubelet's cgroup driver is systemd, and the file that sets it; `None` if no file sets it.
    ///
    /// # Errors
    /// Fails if the kubelet's file exists but cannot be read, or if it has a cgroup driver that the kubelet does not accept.
    pub fn kubelet_driver(self, files: &dyn TextFiles) -> Result<Option<(bool, String)>, Error> {
        let path = match self {
            // k3s and rke2 pass the driver on the kubelet's command line, and their templates set the same driver for runc.
            Engine::Docker | Engine::K3s | Engine::Rke2 => return Ok(None),
            Engine::Containerd | Engine::Crio => "/var/lib/kubelet/config.yaml",
            Engine::K0s => "/var/lib/k0s/kubelet-config.yaml",
            Engine::Microk8s => "/var/snap/microk8s/current/args/kubelet",
        };
        let Some(text) = super::text::text(files, path)? else {
            return Ok(None);
        };
        let said = match self {
            Engine::Microk8s => text
                .split_whitespace()
                .filter_map(|word| word.strip_prefix("--cgroup-driver="))
                .next_back()
                .map(str::to_owned),
            _ => {
                let read: KubeletConfig = serde_saphyr::from_str(&text).map_err(|error| Error::Unreadable {
                    path: path.to_owned(),
                    why: format!("it is not a kubelet configuration: {error}; set --cgroup-driver to continue without this file"),
                })?;
                read.cgroup_driver
            }
        };
        match said.as_deref() {
            None | Some("") => Ok(None),
            Some("systemd") => Ok(Some((true, path.to_owned()))),
            Some("cgroupfs") => Ok(Some((false, path.to_owned()))),
            Some(other) => Err(Error::Unreadable {
                path: path.to_owned(),
                why: format!(
                    "cgroupDriver is {other:?}, but the kubelet accepts only systemd and cgroupfs; set --cgroup-driver to continue without this file"
                ),
            }),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KubeletConfig {
    #[serde(default)]
    cgroup_driver: Option<String>,
}

fn is_there(files: &dyn TextFiles, path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    files.names(glob::directory(path)).iter().any(|there| there == name)
}

fn version(files: &dyn TextFiles, path: &str) -> Result<Option<i64>, Error> {
    Ok(containerd::load(files, path, containerd::Merge::Keys)?
        .first()
        .and_then(|file| file.version))
}

/// Return the manifest of a RuntimeClass, in YAML, through which a pod selects the runtime `name`.
pub fn runtime_class(name: &str) -> String {
    format!("apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata:\n  name: {name}\nhandler: {name}\n")
}
