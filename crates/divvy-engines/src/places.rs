//! Where the engines of distributions have their files, and what makes them read those again.

use serde::Deserialize;

use super::plan::Target;
use super::{Error, Files, containerd, crio, docker, glob};

/// Engines, and the distributions of Kubernetes that bring their own containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Docker.
    Docker,
    /// containerd of a distribution's package or of kubeadm's guide.
    Containerd,
    /// CRI-O.
    Crio,
    /// k3s's containerd.
    K3s,
    /// rke2's containerd.
    Rke2,
    /// k0s's containerd.
    K0s,
    /// `MicroK8s`' containerd.
    Microk8s,
}

/// What a person may say of places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The engine's file [default: the distribution's].
    pub config: Option<String>,
    /// The drop-in [default: the distribution's]; empty: none, all goes into the file.
    pub drop_in: Option<String>,
    /// What `containerd --version` says.
    pub containerd: Option<String>,
}

/// The name of our drop-ins: read after all others that are named with numbers.
const DROP_IN: &str = "zz-divvy";
const MICROK8S: &str = "/var/snap/microk8s/current/args";

impl Engine {
    /// All of them.
    pub const ALL: [Engine; 7] = [
        Engine::Docker,
        Engine::Containerd,
        Engine::Crio,
        Engine::K3s,
        Engine::Rke2,
        Engine::K0s,
        Engine::Microk8s,
    ];

    /// The name that is typed.
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

    /// By what an engine is known on a machine: files of its own, the first that is there.
    pub fn evidence(self, files: &dyn Files) -> Option<String> {
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

    /// The systemd units that run it, the likeliest first.
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

    /// Its files on this machine.
    ///
    /// # Errors
    /// A file that says which they are cannot be read.
    pub fn target(self, files: &dyn Files, wanted: &Wanted) -> Result<Target, Error> {
        let config = |default: &str| wanted.config.clone().unwrap_or_else(|| default.to_owned());
        let drop_in = |default: String| match wanted.drop_in.as_deref() {
            None => Some(default),
            Some("") => None,
            Some(given) => Some(given.to_owned()),
        };
        Ok(match self {
            Engine::Docker => Target::Docker {
                config: config(docker::CONFIG),
            },
            Engine::Crio => {
                let config = config(crio::CONFIG);
                let drop_in = drop_in(format!("{}/{DROP_IN}.conf", crio::drop_ins(&config)));
                Target::Crio { config, drop_in }
            }
            Engine::Containerd => {
                let config = config(containerd::CONFIG);
                let drop_in = drop_in(format!("{}/conf.d/{DROP_IN}.toml", glob::folder(&config)));
                let release = wanted.containerd.as_deref().and_then(containerd::release);
                Target::Containerd {
                    config,
                    drop_in,
                    merge: wanted.containerd.as_deref().and_then(containerd::Merge::of),
                    version: if release.is_some_and(|release| release >= (2, 0)) {
                        3
                    } else {
                        2
                    },
                }
            }
            Engine::K3s | Engine::Rke2 => self.rancher(files, wanted)?,
            Engine::K0s => Target::Containerd {
                // k0s puts these files and its own together, key by key, whatever its containerd does.
                config: wanted
                    .drop_in
                    .clone()
                    .filter(|drop_in| !drop_in.is_empty())
                    .unwrap_or_else(|| format!("/etc/k0s/containerd.d/{DROP_IN}.toml")),
                drop_in: None,
                merge: Some(containerd::Merge::Keys),
                version: version(files, &config("/etc/k0s/containerd.toml"))?.unwrap_or(2),
            },
            Engine::Microk8s => Target::Containerd {
                config: config(&format!("{MICROK8S}/containerd-template.toml")),
                drop_in: wanted.drop_in.clone().filter(|drop_in| !drop_in.is_empty()),
                merge: Some(containerd::Merge::Sections),
                version: 2,
            },
        })
    }

    /// k3s and rke2 write containerd's file at each start. Newer ones have it import a folder; for the others there is a template.
    fn rancher(self, files: &dyn Files, wanted: &Wanted) -> Result<Target, Error> {
        let folder = format!("/var/lib/rancher/{}/agent/etc/containerd", self.as_str());
        let generated = format!("{folder}/config.toml");
        let version = version(files, &generated)?.unwrap_or(3);
        let drop_in = wanted
            .drop_in
            .clone()
            .unwrap_or_else(|| format!("{folder}/config-v3.toml.d/{DROP_IN}.toml"));
        let read = containerd::read(files, &generated, containerd::Merge::Keys)?;
        if version >= 3 && read.imports.iter().any(|import| glob::matches(import, &drop_in)) {
            return Ok(Target::Containerd {
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
        Ok(Target::Template {
            config: wanted.config.clone().unwrap_or_else(|| format!("{folder}/{template}")),
            generated,
            version,
        })
    }

    /// Whether the kubelet's cgroup driver is systemd, and which file says so; none where none does.
    ///
    /// # Errors
    /// A file that is there cannot be read, or says something that the kubelet does not know.
    pub fn kubelet_driver(self, files: &dyn Files) -> Result<Option<(bool, String)>, Error> {
        let path = match self {
            // Their kubelets are told on the command line, and their templates know.
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
                let read: Kubelet = serde_saphyr::from_str(&text).map_err(|error| Error::Unreadable {
                    path: path.to_owned(),
                    why: format!("it is no configuration of a kubelet: {error}; --cgroup-driver does without it"),
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
                    "cgroupDriver is {other:?}, where the kubelet knows systemd and cgroupfs; --cgroup-driver does without it"
                ),
            }),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kubelet {
    #[serde(default)]
    cgroup_driver: Option<String>,
}

fn is_there(files: &dyn Files, path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    files.names(glob::folder(path)).iter().any(|there| there == name)
}

fn version(files: &dyn Files, path: &str) -> Result<Option<i64>, Error> {
    Ok(containerd::load(files, path, containerd::Merge::Keys)?
        .first()
        .and_then(|file| file.version))
}

/// The RuntimeClass by which a pod asks for the runtime.
pub fn runtime_class(name: &str) -> String {
    format!("apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata:\n  name: {name}\nhandler: {name}\n")
}
