//! The served resources, and the meaning of a request path.

use std::borrow::Cow;
use std::sync::Arc;

/// A served resource of one group and version.
///
/// [`Options::resources`](super::Options::resources) accepts additional ones, as CustomResourceDefinitions would add them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// The API group, empty for the core group.
    pub group: Cow<'static, str>,
    /// The version within the group, such as `v1`.
    pub version: Cow<'static, str>,
    /// The lower-case plural, as in paths.
    pub plural: Cow<'static, str>,
    /// The kind, as in objects.
    pub kind: Cow<'static, str>,
    /// Whether objects are in namespaces.
    pub namespaced: bool,
    /// The short names that kubectl accepts (`po`).
    pub short_names: Cow<'static, [&'static str]>,
    /// Whether `/status` is written separately.
    pub status: bool,
    /// Whether PUT on an absent object creates it (`AllowCreateOnUpdate` of the upstream strategy).
    pub create_on_update: bool,
}

impl Resource {
    /// Create a resource without short names and with a status subresource, as a CustomResourceDefinition would.
    pub fn custom(group: &str, version: &str, plural: &str, kind: &str, namespaced: bool) -> Resource {
        Resource {
            group: group.to_owned().into(),
            version: version.to_owned().into(),
            plural: plural.to_owned().into(),
            kind: kind.to_owned().into(),
            namespaced,
            short_names: Cow::Borrowed(&[]),
            status: true,
            create_on_update: false,
        }
    }

    /// Return the API version, `v1` or `apps/v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_string()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// Return `pods` or `leases.coordination.k8s.io`, the name in Status messages.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_string()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// Return the name under which objects are stored. As upstream, the two event resources are two views of the same objects.
    pub(crate) fn storage(&self) -> String {
        if self.is_events_k8s_io() {
            "events".to_owned()
        } else {
            self.qualified()
        }
    }

    pub(crate) fn is_events_k8s_io(&self) -> bool {
        self.group == "events.k8s.io" && self.plural == "events"
    }

    pub(crate) fn is_core(&self, plural: &str) -> bool {
        self.group.is_empty() && self.plural == plural
    }

    /// Return the subresources other than `status`.
    pub(crate) fn subresources(&self) -> &'static [Subresource] {
        if self.is_core("pods") {
            &[
                Subresource {
                    name: "binding",
                    group: "",
                    version: "v1",
                    kind: "Binding",
                },
                Subresource {
                    name: "eviction",
                    group: "policy",
                    version: "v1",
                    kind: "Eviction",
                },
            ]
        } else {
            &[]
        }
    }
}

/// A subresource that accepts POST with its own kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subresource {
    pub(crate) name: &'static str,
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) kind: &'static str,
}

type Row = (
    &'static str,            // group
    &'static str,            // version
    &'static str,            // plural
    &'static str,            // kind
    bool,                    // namespaced
    &'static [&'static str], // short names
    bool,                    // status
    bool,                    // create on update
);

const TABLE: &[Row] = &[
    ("", "v1", "configmaps", "ConfigMap", true, &["cm"], false, false),
    ("", "v1", "endpoints", "Endpoints", true, &["ep"], false, true),
    ("", "v1", "events", "Event", true, &["ev"], false, true),
    ("", "v1", "namespaces", "Namespace", false, &["ns"], true, false),
    ("", "v1", "nodes", "Node", false, &["no"], true, false),
    (
        "",
        "v1",
        "persistentvolumeclaims",
        "PersistentVolumeClaim",
        true,
        &["pvc"],
        true,
        false,
    ),
    ("", "v1", "persistentvolumes", "PersistentVolume", false, &["pv"], true, false),
    ("", "v1", "pods", "Pod", true, &["po"], true, false),
    ("", "v1", "resourcequotas", "ResourceQuota", true, &["quota"], true, false),
    ("", "v1", "secrets", "Secret", true, &[], false, false),
    ("", "v1", "serviceaccounts", "ServiceAccount", true, &["sa"], false, false),
    ("", "v1", "services", "Service", true, &["svc"], true, false),
    (
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicies",
        "ValidatingAdmissionPolicy",
        false,
        &[],
        true,
        false,
    ),
    (
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
        false,
        &[],
        false,
        false,
    ),
    (
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        false,
        &["crd", "crds"],
        true,
        false,
    ),
    ("apps", "v1", "daemonsets", "DaemonSet", true, &["ds"], true, false),
    ("apps", "v1", "deployments", "Deployment", true, &["deploy"], true, false),
    ("apps", "v1", "replicasets", "ReplicaSet", true, &["rs"], true, false),
    ("apps", "v1", "statefulsets", "StatefulSet", true, &["sts"], true, false),
    ("batch", "v1", "cronjobs", "CronJob", true, &["cj"], true, false),
    ("batch", "v1", "jobs", "Job", true, &[], true, false),
    ("coordination.k8s.io", "v1", "leases", "Lease", true, &[], false, true),
    ("events.k8s.io", "v1", "events", "Event", true, &["ev"], false, true),
    (
        "node.k8s.io",
        "v1",
        "runtimeclasses",
        "RuntimeClass",
        false,
        &[],
        false,
        false,
    ),
    (
        "policy",
        "v1",
        "poddisruptionbudgets",
        "PodDisruptionBudget",
        true,
        &["pdb"],
        true,
        false,
    ),
    (
        "rbac.authorization.k8s.io",
        "v1",
        "clusterrolebindings",
        "ClusterRoleBinding",
        false,
        &[],
        false,
        true,
    ),
    (
        "rbac.authorization.k8s.io",
        "v1",
        "clusterroles",
        "ClusterRole",
        false,
        &[],
        false,
        true,
    ),
    (
        "rbac.authorization.k8s.io",
        "v1",
        "rolebindings",
        "RoleBinding",
        true,
        &[],
        false,
        true,
    ),
    ("rbac.authorization.k8s.io", "v1", "roles", "Role", true, &[], false, true),
    (
        "resource.k8s.io",
        "v1",
        "deviceclasses",
        "DeviceClass",
        false,
        &[],
        false,
        false,
    ),
    (
        "resource.k8s.io",
        "v1",
        "resourceclaims",
        "ResourceClaim",
        true,
        &[],
        true,
        false,
    ),
    (
        "resource.k8s.io",
        "v1",
        "resourceclaimtemplates",
        "ResourceClaimTemplate",
        true,
        &[],
        false,
        false,
    ),
    (
        "resource.k8s.io",
        "v1",
        "resourceslices",
        "ResourceSlice",
        false,
        &[],
        false,
        false,
    ),
    (
        "scheduling.k8s.io",
        "v1",
        "priorityclasses",
        "PriorityClass",
        false,
        &["pc"],
        false,
        false,
    ),
];

/// All served resources.
#[derive(Debug)]
pub(crate) struct Resources {
    all: Vec<Arc<Resource>>,
}

impl Resources {
    pub(crate) fn new(more: &[Resource]) -> Resources {
        let built_in = TABLE.iter().map(|row| Resource {
            group: row.0.into(),
            version: row.1.into(),
            plural: row.2.into(),
            kind: row.3.into(),
            namespaced: row.4,
            short_names: row.5.into(),
            status: row.6,
            create_on_update: row.7,
        });
        Resources {
            all: built_in.chain(more.iter().cloned()).map(Arc::new).collect(),
        }
    }

    pub(crate) fn all(&self) -> &[Arc<Resource>] {
        &self.all
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.all
            .iter()
            .find(|r| r.group == group && r.version == version && r.plural == plural)
    }

    /// Return the resource with a name such as `pods` or `leases.coordination.k8s.io`.
    pub(crate) fn by_name(&self, qualified: &str) -> Option<&Arc<Resource>> {
        self.all.iter().find(|r| r.qualified() == qualified)
    }
}

/// The object or collection that a request path under `/api` or `/apis` names.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) resource: Arc<Resource>,
    /// The namespace, empty for cluster-scoped objects and for a list over all namespaces.
    pub(crate) namespace: String,
    /// The object's name, empty for a collection.
    pub(crate) name: String,
    /// The subresource: empty, `status`, `binding`, …
    pub(crate) subresource: String,
}

/// The meaning of a path.
#[derive(Debug, Clone)]
pub(crate) enum Path {
    Resource(Target),
    /// A path outside of resources: discovery, health, version.
    Other,
    /// A path under `/api` or `/apis` that is not served.
    Unknown,
}

impl Resources {
    /// Parse a path as `RequestInfoFactory.NewRequestInfo` does (apiserver `pkg/endpoints/request`). `segments` are percent-decoded.
    pub(crate) fn resolve(&self, segments: &[String]) -> Path {
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (group, version, rest) = match segments.as_slice() {
            ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
            _ => return Path::Other,
        };
        // A path is `namespaces/NAME/RESOURCE/…`, but `namespaces`, `namespaces/NAME`, and `namespaces/NAME/status` name namespaces themselves.
        let (namespace, rest) = match rest {
            ["namespaces", namespace, plural, tail @ ..]
                if !(group.is_empty() && tail.is_empty() && matches!(*plural, "status" | "finalize")) =>
            {
                (*namespace, &rest[rest.len() - tail.len() - 1..])
            }
            _ => ("", rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, subresource] => (*plural, *name, *subresource),
            _ => return Path::Unknown,
        };
        let Some(resource) = self.find(group, version, plural) else {
            return Path::Unknown;
        };
        let known = subresource.is_empty()
            || (subresource == "status" && resource.status)
            || resource.subresources().iter().any(|s| s.name == subresource);
        if !known || (!resource.namespaced && !namespace.is_empty()) {
            return Path::Unknown;
        }
        // The path of a named object of a namespaced resource contains the namespace.
        if resource.namespaced && namespace.is_empty() && !name.is_empty() {
            return Path::Unknown;
        }
        Path::Resource(Target {
            resource: resource.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }
}
