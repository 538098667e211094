//! Authorization. By default, a user may do everything. Once a user is limited, the user may do only what was granted, in the
//! form of a Role or ClusterRole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::ApiError;

/// A rule of a Role (in one namespace) or of a ClusterRole (everywhere).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    verbs: Vec<String>,
    resource: String,
    namespace: Option<String>,
    name: Option<String>,
}

impl Right {
    /// Create a rule for verbs on a `resource`, for example `pods`, `services/proxy`, or `daemonsets.apps`.
    pub fn new(verbs: &[&str], resource: &str) -> Right {
        Right {
            verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
            resource: resource.to_owned(),
            namespace: None,
            name: None,
        }
    }

    /// Restrict the rule to this namespace.
    #[must_use]
    pub fn in_namespace(mut self, namespace: &str) -> Right {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Restrict the rule to the object of this name (`resourceNames`).
    #[must_use]
    pub fn named(mut self, name: &str) -> Right {
        self.name = Some(name.to_owned());
        self
    }

    fn covers(&self, attributes: &Attributes<'_>) -> bool {
        self.verbs.iter().any(|verb| verb == attributes.verb)
            && self.resource == attributes.resource()
            && self
                .namespace
                .as_deref()
                .is_none_or(|namespace| namespace == attributes.namespace)
            && self.name.as_deref().is_none_or(|name| name == attributes.name)
    }
}

/// The attributes of a request that an authorizer sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attributes<'a> {
    pub(crate) verb: &'a str,
    pub(crate) group: &'a str,
    pub(crate) plural: &'a str,
    pub(crate) subresource: &'a str,
    /// The namespace; empty for a cluster-scoped request or for all namespaces.
    pub(crate) namespace: &'a str,
    /// The object's name; empty if the request names none.
    pub(crate) name: &'a str,
}

impl Attributes<'_> {
    /// Return the resource in the form `pods/status` or `daemonsets.apps`.
    fn resource(&self) -> String {
        let group = if self.group.is_empty() {
            String::new()
        } else {
            format!(".{}", self.group)
        };
        let sub = if self.subresource.is_empty() {
            String::new()
        } else {
            format!("/{}", self.subresource)
        };
        format!("{}{group}{sub}", self.plural)
    }
}

/// A handle to the rights of a server's users.
#[derive(Debug, Clone, Default)]
pub struct Rights(Arc<Mutex<RightsState>>);

#[derive(Debug, Default)]
struct RightsState {
    limited: BTreeMap<String, Vec<Right>>,
    revoked: BTreeSet<String>,
}

impl Rights {
    fn known(&self) -> MutexGuard<'_, RightsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limit this user to the rights granted from now on.
    pub fn limit(&self, user: &str) {
        self.known().limited.entry(user.to_owned()).or_default();
    }

    /// Grant a right to a user. This limits a user who was not limited before.
    pub fn grant(&self, user: &str, right: Right) {
        self.known().limited.entry(user.to_owned()).or_default().push(right);
    }

    /// Make this token invalid from now on.
    pub fn revoke_token(&self, token: &str) {
        self.known().revoked.insert(token.to_owned());
    }

    pub(crate) fn is_revoked(&self, token: &str) -> bool {
        self.known().revoked.contains(token)
    }

    pub(crate) fn allows(&self, user: &str, attributes: &Attributes<'_>) -> bool {
        let known = self.known();
        known
            .limited
            .get(user)
            .is_none_or(|rights| rights.iter().any(|right| right.covers(attributes)))
    }

    /// Report whether a group or user has a right that covers the request.
    pub(crate) fn grants(&self, group: &str, attributes: &Attributes<'_>) -> bool {
        let known = self.known();
        let rights = known.limited.get(group);
        rights.is_some_and(|rights| rights.iter().any(|right| right.covers(attributes)))
    }

    /// Check a request. The error has the text of apiserver's `pkg/endpoints/handlers/responsewriters/errors.go`.
    pub(crate) fn check(&self, user: &str, attributes: &Attributes<'_>) -> Result<(), ApiError> {
        if self.allows(user, attributes) {
            return Ok(());
        }
        let qualified = Attributes {
            subresource: "",
            ..*attributes
        }
        .resource();
        let about = match attributes.name {
            "" => qualified,
            name => format!("{qualified} {name:?}"),
        };
        let sub = if attributes.subresource.is_empty() {
            String::new()
        } else {
            format!("/{}", attributes.subresource)
        };
        let place = match attributes.namespace {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {namespace:?}"),
        };
        let text = format!(
            "{about} is forbidden: User {user:?} cannot {} resource \"{}{sub}\" in API group {:?} {place}",
            attributes.verb, attributes.plural, attributes.group
        );
        Err(ApiError::new(403, "Forbidden", text))
    }
}
