//! The served resources, and the meaning of a request path.

use std::borrow::Cow;
use std::sync::Arc;

/// A served resource of one group and version.
///
/// [`ApiServerOptions::resources`](super::ApiServerOptions::resources) accepts additional ones, as CustomResourceDefinitions would add them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedResource {
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

impl ServedResource {
    /// Create a resource without short names and with a status subresource, as a CustomResourceDefinition would.
    pub fn custom(group: &str, version: &str, plural: &str, kind: &str, namespaced: bool) -> ServedResource {
        ServedResource {
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

/// The built-in resources, all of version `v1`: group (`-` for the core group), plural, kind, short names (`-` for none), and what is true of
/// them.
const TABLE: &str = "\
- configmaps ConfigMap cm namespaced
- endpoints Endpoints ep namespaced create-on-update
- events Event ev namespaced create-on-update
- namespaces Namespace ns status
- nodes Node no status
- persistentvolumeclaims PersistentVolumeClaim pvc namespaced status
- persistentvolumes PersistentVolume pv status
- pods Pod po namespaced status
- resourcequotas ResourceQuota quota namespaced status
- secrets Secret - namespaced
- serviceaccounts ServiceAccount sa namespaced
- services Service svc namespaced status
admissionregistration.k8s.io validatingadmissionpolicies ValidatingAdmissionPolicy - status
admissionregistration.k8s.io validatingadmissionpolicybindings ValidatingAdmissionPolicyBinding -
apiextensions.k8s.io customresourcedefinitions CustomResourceDefinition crd,crds status
apps daemonsets DaemonSet ds namespaced status
apps deployments Deployment deploy namespaced status
apps replicasets ReplicaSet rs namespaced status
apps statefulsets StatefulSet sts namespaced status
batch cronjobs CronJob cj namespaced status
batch jobs Job - namespaced status
coordination.k8s.io leases Lease - namespaced create-on-update
events.k8s.io events Event ev namespaced create-on-update
node.k8s.io runtimeclasses RuntimeClass -
policy poddisruptionbudgets PodDisruptionBudget pdb namespaced status
rbac.authorization.k8s.io clusterrolebindings ClusterRoleBinding - create-on-update
rbac.authorization.k8s.io clusterroles ClusterRole - create-on-update
rbac.authorization.k8s.io rolebindings RoleBinding - namespaced create-on-update
rbac.authorization.k8s.io roles Role - namespaced create-on-update
resource.k8s.io deviceclasses DeviceClass -
resource.k8s.io resourceclaims ResourceClaim - namespaced status
resource.k8s.io resourceclaimtemplates ResourceClaimTemplate - namespaced
resource.k8s.io resourceslices ResourceSlice -
scheduling.k8s.io priorityclasses PriorityClass pc";

/// Read a line of [`TABLE`].
fn built_in(line: &'static str) -> Option<ServedResource> {
    let mut words = line.split(' ');
    let mut word = || words.next();
    let (group, plural, kind, short_names) = (word()?, word()?, word()?, word()?);
    let given = |text: &'static str| if text == "-" { "" } else { text };
    let traits: Vec<&str> = words.collect();
    Some(ServedResource {
        group: given(group).into(),
        version: "v1".into(),
        plural: plural.into(),
        kind: kind.into(),
        namespaced: traits.contains(&"namespaced"),
        short_names: given(short_names).split(',').filter(|name| !name.is_empty()).collect(),
        status: traits.contains(&"status"),
        create_on_update: traits.contains(&"create-on-update"),
    })
}

/// All served resources.
#[derive(Debug)]
pub(crate) struct ServedResources {
    all: Vec<Arc<ServedResource>>,
}

impl ServedResources {
    pub(crate) fn new(more: &[ServedResource]) -> ServedResources {
        ServedResources {
            all: TABLE
                .lines()
                .filter_map(built_in)
                .chain(more.iter().cloned())
                .map(Arc::new)
                .collect(),
        }
    }

    pub(crate) fn all(&self) -> &[Arc<ServedResource>] {
        &self.all
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<ServedResource>> {
        self.all
            .iter()
            .find(|r| r.group == group && r.version == version && r.plural == plural)
    }

    /// Return the resource with a name such as `pods` or `leases.coordination.k8s.io`.
    pub(crate) fn by_name(&self, qualified: &str) -> Option<&Arc<ServedResource>> {
        self.all.iter().find(|r| r.qualified() == qualified)
    }
}

/// The object or collection that a request path under `/api` or `/apis` names.
#[derive(Debug, Clone)]
pub(crate) struct RequestTarget {
    pub(crate) resource: Arc<ServedResource>,
    /// The namespace, empty for cluster-scoped objects and for a list over all namespaces.
    pub(crate) namespace: String,
    /// The object's name, empty for a collection.
    pub(crate) name: String,
    /// The subresource: empty, `status`, `binding`, …
    pub(crate) subresource: String,
}

/// The meaning of a path.
#[derive(Debug, Clone)]
pub(crate) enum ApiPath {
    Resource(RequestTarget),
    /// A path outside of resources: discovery, health, version.
    Other,
    /// A path under `/api` or `/apis` that is not served.
    Unknown,
}

impl ServedResources {
    /// Parse a path as `RequestInfoFactory.NewRequestInfo` does (apiserver `pkg/endpoints/request`). `segments` are percent-decoded.
    pub(crate) fn resolve(&self, segments: &[String]) -> ApiPath {
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (group, version, rest) = match segments.as_slice() {
            ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
            _ => return ApiPath::Other,
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
            _ => return ApiPath::Unknown,
        };
        let Some(resource) = self.find(group, version, plural) else {
            return ApiPath::Unknown;
        };
        let known = subresource.is_empty()
            || (subresource == "status" && resource.status)
            || resource.subresources().iter().any(|s| s.name == subresource);
        if !known || (!resource.namespaced && !namespace.is_empty()) {
            return ApiPath::Unknown;
        }
        // The path of a named object of a namespaced resource contains the namespace.
        if resource.namespaced && namespace.is_empty() && !name.is_empty() {
            return ApiPath::Unknown;
        }
        ApiPath::Resource(RequestTarget {
            resource: resource.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }
}
