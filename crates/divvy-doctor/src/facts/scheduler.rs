//! How kube-scheduler is started on this machine, and its configuration: as a static pod of any kind, as a part of k3s, k0s, and MicroK8s, or as a
//! process of the machine.

use serde_json::Value;

use super::Facts;

/// The directories of static pods without a kubelet that names another one: kubeadm's and kops', and rke2's.
const MANIFESTS: [&str; 2] = ["/etc/kubernetes/manifests", "/var/lib/rancher/rke2/agent/pod-manifests"];
/// Distributions whose server has a list `kube-scheduler-arg`: the directory of `config.yaml`, and a directory of servers only
/// (`pkg/configfilearg` in k3s).
const RANCHER: [(&str, &str, &str); 2] = [
    ("k3s", "/etc/rancher/k3s", "/var/lib/rancher/k3s/server"),
    ("rke2", "/etc/rancher/rke2", "/var/lib/rancher/rke2/server"),
];
const K0S: &str = "/etc/k0s/k0s.yaml";
const MICROK8S: &str = "/var/snap/microk8s/current";

/// The way in which kube-scheduler is started on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckedScheduler {
    /// The distribution, as a value of `divvy scheduler-config --for`.
    pub distribution: &'static str,
    /// The file that has kube-scheduler's flags.
    pub started_by: String,
    /// The version from the image tag, such as `v1.31.2`.
    pub version: Option<String>,
    /// The path that `--config` names, as seen by kube-scheduler.
    pub config: Option<String>,
    /// The path of the same file on the machine. `None` if no hostPath volume contains the file, or if a relative path starts in an unknown directory.
    pub on_host: Option<String>,
    /// The type of the hostPath volume, such as `FileOrCreate`.
    pub volume_type: Option<String>,
    /// Whether a `--policy-config…` flag is given. Kubernetes 1.23 removed these flags.
    pub policy_flag: bool,
    /// What kube-scheduler sees of the machine's files.
    sees: Sees,
}

/// What a process sees of the machine's files.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Sees {
    /// A container's process: only these host directories.
    Container(Vec<SchedulerMount>),
    /// A process outside of any container: all. Relative paths start in its directory, if that is known.
    Process { directory: Option<String> },
}

impl Default for Sees {
    fn default() -> Sees {
        Sees::Process { directory: None }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SchedulerMount {
    at: Vec<String>,
    host: String,
    kind: Option<String>,
}

/// One entry of `extenders`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extending {
    /// `urlPrefix`.
    pub url: String,
    /// `managedResources[].name`.
    pub resources: Vec<String>,
    /// `ignorable`: whether kube-scheduler schedules pods without this extender while the extender does not answer.
    pub ignorable: bool,
}

fn parts(path: &str) -> Vec<String> {
    path.split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .map(str::to_owned)
        .collect()
}

impl CheckedScheduler {
    fn of(distribution: &'static str, started_by: String, words: &[String], sees: Sees) -> CheckedScheduler {
        let mut scheduler = CheckedScheduler {
            distribution,
            started_by,
            config: super::engine::told(words, &["--config"]),
            policy_flag: words.iter().any(|word| word.starts_with("--policy-config")),
            sees,
            ..CheckedScheduler::default()
        };
        let found = scheduler.config.as_deref().and_then(|config| scheduler.host_path(config));
        (scheduler.on_host, scheduler.volume_type) = found.map_or((None, None), |(path, kind)| (Some(path), kind));
        scheduler
    }

    /// Return the path on the machine for a path that kube-scheduler sees, with the type of the volume: of several mounts, the deepest counts.
    /// `None` if no volume contains the path.
    pub(crate) fn host_path(&self, inside: &str) -> Option<(String, Option<String>)> {
        let mounts = match &self.sees {
            Sees::Container(mounts) => mounts,
            Sees::Process { .. } if inside.starts_with('/') => return Some((inside.to_owned(), None)),
            Sees::Process { directory } => return Some((format!("{}/{inside}", directory.as_ref()?), None)),
        };
        let inside = parts(inside);
        let deepest = mounts
            .iter()
            .filter(|mount| inside.starts_with(&mount.at))
            .max_by_key(|mount| mount.at.len())?;
        let mut path = parts(&deepest.host);
        path.extend_from_slice(&inside[deepest.at.len()..]);
        Some((format!("/{}", path.join("/")), deepest.kind.clone()))
    }

    /// Return whether kube-scheduler runs in a container.
    pub(crate) fn in_container(&self) -> bool {
        matches!(self.sees, Sees::Container(_))
    }

    /// Return how kube-scheduler is made to read its configuration again.
    pub(crate) fn restart(&self) -> &'static str {
        match self.distribution {
            "k3s" => "systemctl restart k3s",
            "rke2" => "systemctl restart rke2-server",
            "k0s" => "systemctl restart k0scontroller",
            "microk8s" => "snap restart microk8s.daemon-kubelite",
            _ if !self.in_container() => "systemctl restart kube-scheduler",
            _ => "restart kube-scheduler (move its manifest out of the directory and back)",
        }
    }
}

impl Facts<'_> {
    /// Return how kube-scheduler is started, or `None` if this machine has no kube-scheduler.
    pub fn scheduler(&self) -> Option<CheckedScheduler> {
        self.static_pod()
            .or_else(|| self.of_rancher())
            .or_else(|| self.of_k0s())
            .or_else(|| {
                let path = format!("{MICROK8S}/args/kube-scheduler");
                let text = self.text(&path)?.replace("${SNAP_DATA}", MICROK8S);
                let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
                Some(CheckedScheduler::of("microk8s", path, &words, Sees::default()))
            })
            .or_else(|| {
                let (process, words) = self.processes("kube-scheduler").into_iter().next()?;
                let directory = self.root.link(&format!("/proc/{process}/cwd"));
                let started_by = format!("/proc/{process}/cmdline");
                Some(CheckedScheduler::of(
                    "kubeadm",
                    started_by,
                    &words,
                    Sees::Process { directory },
                ))
            })
    }

    fn static_pod(&self) -> Option<CheckedScheduler> {
        let of_kubelet = self.kubelet().and_then(|kubelet| kubelet.static_pods);
        let directories = of_kubelet.into_iter().chain(MANIFESTS.map(str::to_owned));
        directories.into_iter().find_map(|directory| {
            let names = self.root.names(&directory).into_iter().filter(|name| !name.starts_with('.'));
            names.into_iter().find_map(|name| {
                let path = format!("{directory}/{name}");
                let pod: Value = serde_saphyr::from_str(&self.text(&path)?).ok()?;
                let distribution = if path.starts_with("/var/lib/rancher/rke2/") {
                    "rke2"
                } else {
                    "kubeadm"
                };
                of_pod(&pod, path, distribution)
            })
        })
    }

    fn of_rancher(&self) -> Option<CheckedScheduler> {
        RANCHER.into_iter().find_map(|(distribution, directory, server)| {
            let more = format!("{directory}/config.yaml.d");
            let drop_ins = self.root.names(&more).into_iter().filter(|name| name.ends_with(".yaml"));
            let mut files = vec![format!("{directory}/config.yaml")];
            files.extend(drop_ins.map(|name| format!("{more}/{name}")));
            let (mut words, mut mounts, mut started_by) = (Vec::new(), Vec::new(), files[0].clone());
            for file in files {
                let Some(text) = self.text(&file) else { continue };
                let Ok(settings) = serde_saphyr::from_str::<Value>(&text) else {
                    continue;
                };
                for key in ["kube-scheduler-arg", "kube-scheduler-arg+"] {
                    let list = strings(&settings[key]);
                    if list.is_empty() {
                        continue;
                    }
                    // A later file replaces the list, unless its key ends with a plus sign.
                    if !key.ends_with('+') {
                        words.clear();
                    }
                    words.extend(list.iter().map(|word| format!("--{}", word.trim_start_matches('-'))));
                    started_by.clone_from(&file);
                }
                for mount in strings(&settings["kube-scheduler-extra-mount"]) {
                    let mut ends = mount.split(':');
                    if let (Some(host), Some(at)) = (ends.next(), ends.next()) {
                        mounts.push(SchedulerMount {
                            at: parts(at),
                            host: host.to_owned(),
                            kind: None,
                        });
                    }
                }
            }
            let is_here = !words.is_empty() || self.exists(server);
            let sees = match distribution {
                "rke2" => Sees::Container(mounts),
                _ => Sees::default(),
            };
            is_here.then(|| CheckedScheduler::of(distribution, started_by, &words, sees))
        })
    }

    fn of_k0s(&self) -> Option<CheckedScheduler> {
        let settings: Value = serde_saphyr::from_str(&self.text(K0S)?).ok()?;
        let arguments = settings["spec"]["scheduler"]["extraArgs"]
            .as_object()
            .cloned()
            .unwrap_or_default();
        let words = arguments
            .iter()
            .filter_map(|(name, value)| Some(format!("--{name}={}", value.as_str()?)));
        Some(CheckedScheduler::of(
            "k0s",
            K0S.to_owned(),
            &words.collect::<Vec<_>>(),
            Sees::default(),
        ))
    }

    /// Return kube-scheduler's configuration if the file is valid YAML.
    pub fn scheduler_configuration(&self, scheduler: &CheckedScheduler) -> Option<Value> {
        serde_saphyr::from_str(&self.text(scheduler.on_host.as_ref()?)?).ok()
    }

    /// Return the text of kube-scheduler's configuration, and its path on the machine.
    pub fn scheduler_file(&self) -> Option<(String, String)> {
        let path = self.scheduler()?.on_host?;
        Some((self.text(&path)?, path))
    }

    /// Return the extenders in kube-scheduler's configuration on this machine.
    pub fn extenders(&self) -> Vec<Extending> {
        let configuration = self
            .scheduler()
            .and_then(|scheduler| self.scheduler_configuration(&scheduler));
        let configuration = configuration.unwrap_or_default();
        let extenders = configuration["extenders"].as_array().cloned().unwrap_or_default();
        extenders
            .iter()
            .map(|extender| Extending {
                url: extender["urlPrefix"].as_str().unwrap_or_default().to_owned(),
                resources: extender["managedResources"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|resource| resource["name"].as_str().map(str::to_owned))
                    .collect(),
                ignorable: extender["ignorable"].as_bool().unwrap_or(false),
            })
            .collect()
    }
}

/// Return the texts of a value that is a list of texts, or one text.
fn strings(value: &Value) -> Vec<String> {
    let one = value.as_str().into_iter();
    let list = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    one.chain(list).map(str::to_owned).collect()
}

/// Return the scheduler that a pod's manifest starts. `None` if the pod is another program's.
fn of_pod(pod: &Value, path: String, distribution: &'static str) -> Option<CheckedScheduler> {
    let spec = &pod["spec"];
    let container = spec["containers"].as_array()?.iter().find(|container| {
        let image = container["image"].as_str().unwrap_or_default();
        container["name"].as_str() == Some("kube-scheduler") || image.contains("kube-scheduler")
    })?;
    // A command can be one text for a shell.
    let words = ["command", "args"].iter().flat_map(|key| strings(&container[*key]));
    let words: Vec<String> = words
        .flat_map(|word| word.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let volumes = spec["volumes"].as_array().cloned().unwrap_or_default();
    let mounts = container["volumeMounts"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|mount| {
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"])?;
            let host = volume["hostPath"]["path"].as_str()?;
            Some(SchedulerMount {
                at: parts(mount["mountPath"].as_str()?),
                host: format!("{host}/{}", mount["subPath"].as_str().unwrap_or_default()),
                kind: volume["hostPath"]["type"].as_str().map(str::to_owned),
            })
        });
    let image = container["image"].as_str().unwrap_or_default();
    let image = image.split('@').next().unwrap_or_default();
    Some(CheckedScheduler {
        version: image.rsplit_once(':').map(|(_, tag)| tag.to_owned()),
        ..CheckedScheduler::of(distribution, path, &words, Sees::Container(mounts.collect()))
    })
}
