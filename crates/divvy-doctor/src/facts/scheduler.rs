//! kube-scheduler's static pod and its configuration, read from the files of a control plane.

use serde_json::Value;

use super::Facts;

/// The path of the static pod's manifest for kube-scheduler in clusters that kubeadm and similar tools set up.
const MANIFEST: &str = "/etc/kubernetes/manifests/kube-scheduler.yaml";

/// The way in which kube-scheduler is started on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scheduler {
    /// The version from the image tag, such as `v1.31.2`.
    pub version: Option<String>,
    /// The path that `--config` names, as seen inside the pod.
    pub config: Option<String>,
    /// The path of the same file on the machine. `None` if no hostPath volume contains the file.
    pub on_host: Option<String>,
    /// The type of the hostPath volume, such as `FileOrCreate`.
    pub volume_type: Option<String>,
    /// Whether a `--policy-config…` flag is given. Kubernetes 1.23 removed these flags.
    pub policy_flag: bool,
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

impl Facts<'_> {
    /// Return how kube-scheduler is started, or `None` if this machine has no static pod for it.
    pub(crate) fn scheduler(&self) -> Option<Scheduler> {
        let pod: Value = serde_saphyr::from_str(&self.text(MANIFEST)?).ok()?;
        let spec = &pod["spec"];
        let container = &spec["containers"][0];
        let words: Vec<&str> = ["command", "args"]
            .iter()
            .filter_map(|key| container[key].as_array())
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let config = words
            .iter()
            .find_map(|word| word.strip_prefix("--config="))
            .map(str::to_owned);
        let image = container["image"].as_str().unwrap_or_default();
        let mut scheduler = Scheduler {
            version: image.rsplit_once(':').map(|(_, tag)| tag.to_owned()),
            policy_flag: words.iter().any(|word| word.starts_with("--policy-config")),
            config,
            ..Scheduler::default()
        };
        let inside = scheduler.config.clone().unwrap_or_default();
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let (Some(at), Some(name)) = (mount["mountPath"].as_str(), mount["name"].as_str()) else {
                continue;
            };
            let Some(rest) = inside
                .strip_prefix(at)
                .filter(|rest| rest.is_empty() || rest.starts_with('/'))
            else {
                continue;
            };
            let mut volumes = spec["volumes"].as_array().into_iter().flatten();
            let volume = volumes.find(|volume| volume["name"].as_str() == Some(name));
            if let Some(host) = volume.and_then(|volume| volume["hostPath"]["path"].as_str()) {
                scheduler.on_host = Some(format!("{host}{rest}"));
                scheduler.volume_type = volume
                    .and_then(|volume| volume["hostPath"]["type"].as_str())
                    .map(str::to_owned);
            }
        }
        Some(scheduler)
    }

    /// Return kube-scheduler's configuration if the file is valid YAML.
    pub(crate) fn scheduler_configuration(&self, scheduler: &Scheduler) -> Option<Value> {
        serde_saphyr::from_str(&self.text(scheduler.on_host.as_ref()?)?).ok()
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
