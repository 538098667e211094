//! The manifests of a second kube-scheduler, for clusters whose control plane cannot be changed (EKS, GKE, AKS). It is
//! Kubernetes' own program under another name, with Divvy's configuration. A further object ([`mutation`]) assigns the pods
//! that request GPU memory to this scheduler, so users need not change the manifests of their pods.

pub mod mutation;

use super::{Inline, SchedulerConfigError, Stanza, WholeConfig};
use mutation::Mutation;

/// The default `schedulerName` of the second scheduler.
pub const NAME: &str = "divvy-scheduler";
/// The default version. A kube-scheduler may be one minor version older than the API server, but not newer.
pub const DEFAULT_VERSION: KubernetesVersion = KubernetesVersion {
    major: 1,
    minor: 36,
    patch: 3,
};
/// The name of the Secret that contains the certificates of an installed extender.
pub const SECRET_NAME: &str = "divvy-scheduler-tls";
/// The directory in the scheduler's container at which the Secret with the certificates is mounted.
pub const TLS_DIRECTORY: &str = "/etc/divvy/tls";

/// A version of Kubernetes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion {
    /// The major version, always 1.
    pub major: u32,
    /// The minor version, such as 36.
    pub minor: u32,
    /// The patch version, such as 3.
    pub patch: u32,
}

impl std::fmt::Display for KubernetesVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "v{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl std::str::FromStr for KubernetesVersion {
    type Err = SchedulerConfigError;

    /// Parse `1.36.3`, `v1.36.3`, or a distribution's version: `v1.31.4-eks-abc`, `v1.30.5-gke.1014001`, `v1.33.1+k3s1`.
    fn from_str(text: &str) -> Result<KubernetesVersion, SchedulerConfigError> {
        let wrong = || SchedulerConfigError::Version(text.to_owned());
        let plain = text.strip_prefix('v').unwrap_or(text);
        let plain = plain.split(['-', '+']).next().unwrap_or_default();
        let mut parts = plain.split('.').map(|part| part.parse::<u32>().map_err(|_| wrong()));
        let mut next = || parts.next().unwrap_or_else(|| Err(wrong()));
        let version = KubernetesVersion {
            major: next()?,
            minor: next()?,
            patch: next()?,
        };
        if parts.next().is_some() || version.major != 1 {
            return Err(wrong());
        }
        Ok(version)
    }
}

/// The parameters of the manifests.
#[derive(Debug, Clone)]
pub struct SecondScheduler<'a> {
    /// Divvy's entry. Its address is the one by which a pod reaches the extender.
    pub stanza: &'a Stanza,
    /// The namespace of the scheduler.
    pub namespace: &'a str,
    /// The name of the scheduler's objects, and the `schedulerName` of the pods that it schedules.
    pub name: &'a str,
    /// The cluster's version.
    pub version: KubernetesVersion,
    /// The name of the Secret with `ca.crt` (and `tls.crt`, `tls.key`), for an extender that uses HTTPS.
    pub tls_secret: Option<&'a str>,
    /// The content of that Secret. With `None`, the Secret exists already, and the manifests do not contain it.
    pub certificates: Option<&'a Inline>,
    /// The object that assigns pods to the scheduler.
    pub mutation: &'a Mutation,
}

impl SecondScheduler<'_> {
    /// Return the manifests, for `kubectl apply -f -`. Fails if the mutation is not possible on this version, or with this
    /// scheduler name.
    pub fn text(&self) -> Result<String, SchedulerConfigError> {
        let mutation = self.mutation.text(self.version, self.name)?;
        let configuration = WholeConfig {
            stanza: self.stanza,
            kubeconfig: None,
            profile: self.name,
            lease: Some((self.name, self.namespace)),
        }
        .text();
        let indented: String = configuration.lines().map(|line| format!("    {line}\n")).collect();
        let (mount, volume) = match self.tls_secret {
            Some(secret) => (
                format!("        - name: tls\n          mountPath: {TLS_DIRECTORY}\n          readOnly: true\n"),
                format!("      - name: tls\n        secret:\n          secretName: {secret}\n"),
            ),
            None => Default::default(),
        };
        let secret = match (self.tls_secret, self.certificates) {
            (Some(name), Some(Inline { ca, cert, key })) => SECRET
                .replace("{secret}", name)
                .replace("{ca}", ca)
                .replace("{cert}", cert)
                .replace("{key}", key),
            _ => String::new(),
        };
        Ok(MANIFESTS
            .replace("{secret}", &secret)
            .replace("{mount}", &mount)
            .replace("{volume}", &volume)
            .replace("{configuration}", &indented)
            .replace("{mutation}", &mutation)
            .replace("{ns}", self.namespace)
            .replace("{name}", self.name)
            .replace("{version}", &self.version.to_string()))
    }
}

const MANIFESTS: &str = "\
# A second kube-scheduler next to the cluster's own, for control planes that cannot be changed. Made by `divvy scheduler-config
# --as-second-scheduler`; apply it with  kubectl apply -f -  and check it with  divvy scheduler-config --check
# Pods must reach the extender through its Service, as the chart installs it (--from-cluster reads its address and certificates).
# Both schedulers place pods on the same nodes without seeing each other's latest choice. Sometimes the kubelet refuses a pod (OutOfcpu), and the
# pod's owner creates it again. This does not affect GPU memory, because only this scheduler's pods get GPU memory.
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {name}
  namespace: {ns}
---
# The same permissions as the cluster's own scheduler.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {name}-as-kube-scheduler
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: system:kube-scheduler
subjects:
- kind: ServiceAccount
  name: {name}
  namespace: {ns}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {name}-as-volume-scheduler
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: system:volume-scheduler
subjects:
- kind: ServiceAccount
  name: {name}
  namespace: {ns}
---
# To authenticate clients that request its metrics.
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {name}-authentication-reader
  namespace: kube-system
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: extension-apiserver-authentication-reader
subjects:
- kind: ServiceAccount
  name: {name}
  namespace: {ns}
---
# system:kube-scheduler may use only the lease kube-scheduler, and this scheduler has another lease.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {name}-lease
  namespace: {ns}
rules:
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{name}]
  verbs: [get, list, watch, update]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {name}-lease
  namespace: {ns}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {name}-lease
subjects:
- kind: ServiceAccount
  name: {name}
  namespace: {ns}
---
{secret}# The scheduler reads this only when it starts: after a change, run  kubectl -n {ns} rollout restart deployment {name}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  namespace: {ns}
data:
  config.yaml: |
{configuration}---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  namespace: {ns}
  labels:
    app.kubernetes.io/name: {name}
spec:
  # Two replicas: one works, the other waits for the lease.
  replicas: 2
  selector:
    matchLabels:
      app.kubernetes.io/name: {name}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {name}
    spec:
      serviceAccountName: {name}
      priorityClassName: system-cluster-critical
      nodeSelector:
        kubernetes.io/os: linux
      containers:
      - name: kube-scheduler
        # The cluster's version: never newer than its API server, at most one minor version older. Change it when you upgrade the cluster.
        image: registry.k8s.io/kube-scheduler:{version}
        command:
        - kube-scheduler
        - --config=/etc/divvy/scheduler/config.yaml
        - --secure-port=10259
        - --v=2
        livenessProbe:
          httpGet: {path: /healthz, port: 10259, scheme: HTTPS}
          initialDelaySeconds: 15
          timeoutSeconds: 15
          failureThreshold: 8
        readinessProbe:
          httpGet: {path: /healthz, port: 10259, scheme: HTTPS}
        resources:
          requests: {cpu: 100m, memory: 64Mi}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          runAsNonRoot: true
          runAsUser: 65532
          capabilities: {drop: [ALL]}
          seccompProfile: {type: RuntimeDefault}
        volumeMounts:
        - name: config
          mountPath: /etc/divvy/scheduler
          readOnly: true
{mount}      volumes:
      - name: config
        configMap:
          name: {name}
{volume}---
{mutation}";

const SECRET: &str = "\
# The certificate that the scheduler presents to the extender.
apiVersion: v1
kind: Secret
metadata:
  name: {secret}
  namespace: {ns}
type: Opaque
data:
  ca.crt: {ca}
  tls.crt: {cert}
  tls.key: {key}
---
";

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::{SERVICE_URL, Tls};
    use super::*;

    fn manifests(version: &str, tls_secret: Option<&str>) -> (String, Vec<Value>) {
        let stanza = Stanza::new(SERVICE_URL, Tls::default()).expect("an address");
        let text = SecondScheduler {
            stanza: &stanza,
            namespace: "kube-system",
            name: NAME,
            version: version.parse().expect("a version"),
            tls_secret,
            certificates: None,
            mutation: &Mutation::Policy,
        }
        .text()
        .expect("this version has it");
        let documents = text
            .split("\n---\n")
            .map(|document| serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{error}\n{document}")))
            .filter(|value: &Value| !value.is_null())
            .collect();
        (text, documents)
    }

    /// The configuration has its own name and lease.
    #[test]
    fn the_map_has_a_whole_configuration() {
        let (text, documents) = manifests("1.36.3", None);
        let map = documents
            .iter()
            .find(|document| document["kind"] == "ConfigMap")
            .expect("a ConfigMap");
        let inner: Value = serde_saphyr::from_str(map["data"]["config.yaml"].as_str().expect("text")).expect("YAML");
        assert_eq!(inner["profiles"][0]["schedulerName"], NAME);
        assert_eq!(inner["leaderElection"]["resourceName"], NAME);
        assert_eq!(inner["leaderElection"]["resourceNamespace"], "kube-system");
        assert_eq!(inner.get("clientConnection"), None);
        assert_eq!(inner["extenders"][0]["urlPrefix"], SERVICE_URL);
        assert!(text.contains("image: registry.k8s.io/kube-scheduler:v1.36.3"));
    }

    #[test]
    fn certificates_are_mounted_when_there_are_any() {
        let (_, documents) = manifests("1.36.3", Some("divvy-scheduler-tls"));
        let deployment = documents
            .iter()
            .find(|document| document["kind"] == "Deployment")
            .expect("a Deployment");
        let pod = &deployment["spec"]["template"]["spec"];
        assert_eq!(pod["volumes"][1]["secret"]["secretName"], "divvy-scheduler-tls");
        assert_eq!(pod["containers"][0]["volumeMounts"][1]["mountPath"], TLS_DIRECTORY);
    }

    #[test]
    fn the_extenders_certificates_are_a_secret_and_not_in_the_map() {
        let certificates = Inline {
            ca: "Y2E=".to_owned(),
            cert: "Y3J0".to_owned(),
            key: "a2V5".to_owned(),
        };
        let stanza = Stanza::new(SERVICE_URL, Tls::default()).expect("an address");
        let text = SecondScheduler {
            stanza: &stanza,
            namespace: "kube-system",
            name: NAME,
            version: DEFAULT_VERSION,
            tls_secret: Some(SECRET_NAME),
            certificates: Some(&certificates),
            mutation: &Mutation::Policy,
        }
        .text()
        .expect("this version has it");
        let documents: Vec<Value> = text
            .split("\n---\n")
            .map(|document| serde_saphyr::from_str(document).expect("YAML"))
            .collect();
        let secret = documents
            .iter()
            .find(|document| document["kind"] == "Secret")
            .expect("a Secret");
        assert_eq!(secret["metadata"]["namespace"], "kube-system");
        assert_eq!(
            secret["data"],
            serde_json::json!({"ca.crt": "Y2E=", "tls.crt": "Y3J0", "tls.key": "a2V5"})
        );
        assert_eq!(text.matches("a2V5").count(), 1, "the key is nowhere else");
    }

    #[test]
    fn versions_are_read_as_clouds_write_them() {
        let check = |text: &str, expected: Option<&str>| {
            let found = text.parse::<KubernetesVersion>().ok().map(|version| version.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        };
        check("1.36.3", Some("v1.36.3"));
        check("v1.31.4-eks-1a2b3c", Some("v1.31.4"));
        check("v1.30.5-gke.1014001", Some("v1.30.5"));
        check("v1.33.1+k3s1", Some("v1.33.1"));
        check("1.36", None);
        check("2.0.0", None);
        check("1.36.3.1", None);
        check("latest", None);
    }

    #[test]
    fn the_manifests_are_these() {
        insta::assert_snapshot!(manifests("1.36.3", None).0);
    }
}
