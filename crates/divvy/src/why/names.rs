//! The names that `divvy why` accepts: `train-0`, `pod/train-0`, `ml/train-0`, `deploy/train`.

use std::fmt;

/// A pod or a workload that the user named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhyTarget {
    /// A single pod.
    Pod {
        /// The pod's namespace. `None` means the command's namespace.
        namespace: Option<String>,
        /// The pod's name.
        name: String,
    },
    /// All pods of a workload.
    Workload {
        /// The workload's kind.
        kind: Workload,
        /// The workload's name.
        name: String,
    },
}

/// A kind of object that creates pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// `apps/v1`
    Deployment,
    /// `apps/v1`
    ReplicaSet,
    /// `apps/v1`
    StatefulSet,
    /// `apps/v1`
    DaemonSet,
    /// `batch/v1`
    Job,
}

impl Workload {
    /// Return the API group, version, kind, and plural.
    pub fn api(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Workload::Deployment => ("apps", "v1", "Deployment", "deployments"),
            Workload::ReplicaSet => ("apps", "v1", "ReplicaSet", "replicasets"),
            Workload::StatefulSet => ("apps", "v1", "StatefulSet", "statefulsets"),
            Workload::DaemonSet => ("apps", "v1", "DaemonSet", "daemonsets"),
            Workload::Job => ("batch", "v1", "Job", "jobs"),
        }
    }

    /// Parse a kind as kubectl does: singular, plural, or short name, with or without the group.
    fn parse(word: &str) -> Option<Workload> {
        let word = word.to_ascii_lowercase();
        let word = word.split_once('.').map_or(word.as_str(), |(word, _)| word);
        Some(match word {
            "deploy" | "deployment" | "deployments" => Workload::Deployment,
            "rs" | "replicaset" | "replicasets" => Workload::ReplicaSet,
            "sts" | "statefulset" | "statefulsets" => Workload::StatefulSet,
            "ds" | "daemonset" | "daemonsets" => Workload::DaemonSet,
            "job" | "jobs" => Workload::Job,
            _ => return None,
        })
    }
}

impl fmt::Display for WhyTarget {
    /// Write the name in a form that the user can type again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyTarget::Pod { namespace: None, name } => f.write_str(name),
            WhyTarget::Pod {
                namespace: Some(namespace),
                name,
            } => write!(f, "{namespace}/{name}"),
            WhyTarget::Workload { kind, name } => write!(f, "{}/{name}", kind.api().2.to_lowercase()),
        }
    }
}

/// A text is not the name of a pod or a workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the name of a pod; write NAME, pod/NAME, NAMESPACE/NAME, or deploy/NAME (also sts, rs, ds, job)")]
pub struct NoName(String);

impl std::str::FromStr for WhyTarget {
    type Err = NoName;

    /// Parse a name. If the part before the slash is a kind that kubectl knows, it is taken as a kind, even if a namespace has
    /// the same name.
    fn from_str(text: &str) -> Result<WhyTarget, NoName> {
        let pod = |namespace: Option<&str>, name: &str| WhyTarget::Pod {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        };
        let parts: Vec<&str> = text.split('/').collect();
        let found = match parts.as_slice() {
            [name] => pod(None, name),
            ["pod" | "pods" | "po", name] => pod(None, name),
            ["pod" | "pods" | "po", namespace, name] => pod(Some(namespace), name),
            [kind, name] => match Workload::parse(kind) {
                Some(kind) => WhyTarget::Workload {
                    kind,
                    name: (*name).to_owned(),
                },
                None => pod(Some(kind), name),
            },
            _ => return Err(NoName(text.to_owned())),
        };
        if parts.iter().any(|part| part.is_empty()) {
            Err(NoName(text.to_owned()))
        } else {
            Ok(found)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_and_workloads_are_named_as_in_kubectl_and_why() {
        let pod = |namespace: Option<&str>, name: &str| WhyTarget::Pod {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        };
        let of = |kind| WhyTarget::Workload {
            kind,
            name: "db".to_owned(),
        };
        for (text, expected) in [
            ("db-0", pod(None, "db-0")),
            ("pod/db-0", pod(None, "db-0")),
            ("pods/db-0", pod(None, "db-0")),
            ("walk/db-0", pod(Some("walk"), "db-0")),
            ("pod/walk/db-0", pod(Some("walk"), "db-0")),
            ("deploy/db", of(Workload::Deployment)),
            ("deployments.apps/db", of(Workload::Deployment)),
            ("sts/db", of(Workload::StatefulSet)),
            ("ReplicaSet/db", of(Workload::ReplicaSet)),
            ("job.batch/db", of(Workload::Job)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in ["", "/", "a/", "/a", "a/b/c", "pod/"] {
            assert!(text.parse::<WhyTarget>().is_err(), "{text:?}");
        }
    }
}
