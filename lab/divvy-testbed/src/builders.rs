//! Builders of pod manifests as users write them: `pod("train").gpu_mem(3).build()`.

use serde_json::{Value, json};

/// Start a pod manifest in the namespace `default` with one container, `main`.
pub fn pod(name: &str) -> PodBuilder {
    PodBuilder {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![ContainerBuilder::new("main")],
        init: Vec::new(),
        grace_seconds: None,
        restart_policy: None,
        node: None,
        selector: None,
        priority_class: None,
        annotations: Vec::new(),
        host_directory: None,
        is_confined: false,
    }
}

/// A pod manifest under construction.
#[derive(Debug, Clone)]
pub struct PodBuilder {
    name: String,
    namespace: String,
    containers: Vec<ContainerBuilder>,
    init: Vec<ContainerBuilder>,
    grace_seconds: Option<u64>,
    restart_policy: Option<&'static str>,
    node: Option<String>,
    selector: Option<String>,
    priority_class: Option<String>,
    annotations: Vec<(String, String)>,
    /// A directory of the node, and where all containers have it.
    host_directory: Option<(String, String)>,
    /// Whether all containers are root without capabilities.
    is_confined: bool,
}

/// A container of the manifest.
#[derive(Debug, Clone)]
pub struct ContainerBuilder {
    name: String,
    limits: Vec<(String, String)>,
    env: Vec<(String, String)>,
    args: Vec<String>,
    always: bool,
}

impl ContainerBuilder {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            limits: Vec::new(),
            env: Vec::new(),
            args: vec!["run".to_owned()],
            always: false,
        }
    }

    fn build(&self) -> Value {
        let limits: serde_json::Map<String, Value> = self.limits.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
        let env: Vec<Value> = self
            .env
            .iter()
            .map(|(name, value)| json!({"name": name, "value": value}))
            .collect();
        let mut container = json!({"name": self.name, "image": "divvy.test/probe:1", "args": self.args, "resources": {"limits": limits}, "env": env});
        if self.always {
            container["restartPolicy"] = "Always".into();
        }
        container
    }
}

impl PodBuilder {
    /// Set the pod's namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.to_owned();
        self
    }

    /// Add a container that asks for this many units. The calls that follow apply to this container.
    pub fn container(mut self, name: &str, units: u64) -> Self {
        self.containers.push(ContainerBuilder::new(name));
        self.gpu_mem(units)
    }

    /// Add an init container that asks for this many units, prints its environment, and ends at once.
    pub fn init(mut self, name: &str, units: u64) -> Self {
        let mut container = ContainerBuilder::new(name);
        container
            .limits
            .push((divvy_model::names::GPU_MEM.to_owned(), units.to_string()));
        container.args = vec!["env".to_owned()];
        self.init.push(container);
        self
    }

    /// Add a sidecar (an init container that is always restarted).
    pub fn sidecar(mut self, name: &str, units: u64) -> Self {
        let mut container = ContainerBuilder::new(name);
        container
            .limits
            .push((divvy_model::names::GPU_MEM.to_owned(), units.to_string()));
        container.always = true;
        self.init.push(container);
        self
    }

    fn last(&mut self) -> &mut ContainerBuilder {
        self.containers.last_mut().expect("a pod has a container from the start")
    }

    /// Set the last container's limit of shared GPU memory, in units.
    pub fn gpu_mem(self, units: u64) -> Self {
        self.limit(divvy_model::names::GPU_MEM, &units.to_string())
    }

    /// Let the last container's program also list this directory.
    pub fn listing(mut self, directory: &str) -> Self {
        self.last().args = vec!["run".to_owned(), directory.to_owned()];
        self
    }

    /// Set the last container's limit of whole GPUs of a vendor, and let its program list `/dev/dri` as well.
    pub fn whole(self, vendor: divvy_model::Vendor, gpus: u64) -> Self {
        self.listing("/dev/dri").limit(vendor.whole_resource(), &gpus.to_string())
    }

    /// Set a limit of the last container.
    pub fn limit(mut self, resource: &str, quantity: &str) -> Self {
        self.last().limits.push((resource.to_owned(), quantity.to_owned()));
        self
    }

    /// Set an environment variable of the last container.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.last().env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Set the last container's arguments. [`crate::node`] lists the programs that the simulated runtime knows.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.last().args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    /// Set `terminationGracePeriodSeconds`.
    pub fn grace_seconds(mut self, seconds: u64) -> Self {
        self.grace_seconds = Some(seconds);
        self
    }

    /// Set `restartPolicy: Never`.
    pub fn once(mut self) -> Self {
        self.restart_policy = Some("Never");
        self
    }

    /// Set `spec.nodeName`, which bypasses the scheduler.
    pub fn on_node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    /// Select this node by its host name. The pod still passes through the scheduler, which finds no other node.
    pub fn select(mut self, node: &str) -> Self {
        self.selector = Some(node.to_owned());
        self
    }

    /// Set `spec.priorityClassName`.
    pub fn priority_class(mut self, name: &str) -> Self {
        self.priority_class = Some(name.to_owned());
        self
    }

    /// Add an annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Mount a directory of the node in the pod's containers.
    pub fn host_directory(mut self, directory: &str, at: &str) -> Self {
        self.host_directory = Some((directory.to_owned(), at.to_owned()));
        self
    }

    /// Let all containers be root without capabilities, with the runtime's seccomp profile, as clusters allow it to tenants.
    pub fn confined(mut self) -> Self {
        self.is_confined = true;
        self
    }

    /// Return the manifest as JSON.
    pub fn build(&self) -> Value {
        let annotations: serde_json::Map<String, Value> =
            self.annotations.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
        let containers: Vec<Value> = self.containers.iter().map(ContainerBuilder::build).collect();
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace, "annotations": annotations},
            "spec": {"containers": containers},
        });
        let spec = &mut pod["spec"];
        if !self.init.is_empty() {
            spec["initContainers"] = self.init.iter().map(ContainerBuilder::build).collect();
        }
        if let Some((directory, at)) = &self.host_directory {
            spec["volumes"] = json!([{"name": "directory", "hostPath": {"path": directory}}]);
            for container in spec["containers"].as_array_mut().into_iter().flatten() {
                container["volumeMounts"] = json!([{"name": "directory", "mountPath": at}]);
            }
        }
        if self.is_confined {
            // The container may give its files to this group.
            spec["securityContext"] = json!({"supplementalGroups": [1000]});
            for container in spec["containers"].as_array_mut().into_iter().flatten() {
                container["securityContext"] = json!({
                    "runAsUser": 0,
                    "allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                });
            }
        }
        if let Some(seconds) = self.grace_seconds {
            spec["terminationGracePeriodSeconds"] = seconds.into();
        }
        if let Some(policy) = self.restart_policy {
            spec["restartPolicy"] = policy.into();
        }
        if let Some(node) = &self.selector {
            spec["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        }
        if let Some(name) = &self.priority_class {
            spec["priorityClassName"] = name.clone().into();
        }
        if let Some(node) = &self.node {
            spec["nodeName"] = node.clone().into();
        }
        pod
    }
}
