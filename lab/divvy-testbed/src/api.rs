//! The embedded API server: an axum [`Router`](axum::Router) over an in-memory store with revisions.
//!
//! The clients are real: kube-rs in this process ([`ApiServer::client`]), and kube-rs or kubectl in other processes over a port of the
//! loopback address ([`ApiServer::listen`]). The server imitates those parts of kube-apiserver 1.36 that such clients can observe:
//!
//! - one revision for all commits; conflicts when an update names an old revision; no commit for an update that changes nothing
//! - lists, and watches with selectors (an object that begins or ceases to match is ADDED or DELETED), bookmarks, and 410 after a compaction
//! - create, update, patch (merge, strategic, JSON, apply), delete, deletecollection, dry run; preconditions
//! - pods: defaults, validation of extended resources, update rules, graceful deletion, and `pods/binding` in one transaction
//! - discovery, server-side tables, and health: enough for kubectl
//! - [`Faults`] on request, and a [history](ApiServer::history) of all commits on pods and nodes for auditors
//!
//! - [`Rights`] on request, and the reviews that report them; the proxies for Services and pods, with connection upgrades
//!
//! Simplifications, which make these subjects untestable here: users are in no groups, and rights are not read from Roles. There is no
//! admission beyond namespaces. Any token names its user. Server-side apply has no field managers. Lists are never split into pages.
//! Objects of kinds other than pods, nodes, and leases are not checked against a schema. There is no garbage collection by owner, and
//! finalizers hold nothing back.
//! `metadata.generation` and managed fields are not kept. The modules describe further simplifications.

mod checks;
mod clock;
mod discovery;
mod error;
mod events;
mod faults;
mod http;
mod include;
mod listen;
mod ownership;
mod patch;
mod pods;
mod proxy;
mod registry;
mod render;
mod resources;
mod reviews;
mod rights;
mod selector;
mod set_or_remove;
mod store;
mod table;
mod watch;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderValue;
use serde_json::{Value, json};

pub use clock::Clock;
pub use error::ApiError;
pub use faults::{Effect, FaultRule, Faults, Match, RuleId};
pub use listen::Listening;
pub(crate) use pods::is_dns_subdomain;
pub use registry::{DeleteOptions, Deleted, PatchKind};
pub use resources::ServedResource;
pub use rights::{Right, Rights};
pub use store::{EventKind, StoreEvent};

use registry::{ApiRegistry, WriteOptions};
use resources::{RequestTarget, ServedResources};
use store::{ApiStore, StoreContent};

/// The settings of an [`ApiServer`].
#[derive(Debug, Clone)]
pub struct ApiServerOptions {
    /// The server's clock.
    pub clock: Clock,
    /// The seed of uids and generated names. Without a seed they differ between runs.
    pub seed: Option<u64>,
    /// The interval between bookmarks on a quiet watch.
    pub bookmark_interval: Duration,
    /// The number of changes remembered per resource. A watch that starts before them gets 410.
    pub watch_history: usize,
    /// Whether to keep every commit on pods and nodes for [`ApiServer::history`], which grows without bound.
    pub audit: bool,
    /// The token that requests must carry, if any: as a bearer token or, for kubectl, as the prefix `/t/<token>` of the request's path.
    pub token: Option<String>,
    /// Resources in addition to the built-in ones.
    pub resources: Vec<ServedResource>,
}

impl Default for ApiServerOptions {
    fn default() -> ApiServerOptions {
        ApiServerOptions {
            clock: Clock::system(),
            seed: None,
            bookmark_interval: Duration::from_secs(5),
            watch_history: 4096,
            audit: true,
            token: None,
            resources: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct ApiServerState {
    options: ApiServerOptions,
    registry: Arc<ApiRegistry>,
    faults: Faults,
    rights: Rights,
    endpoints: proxy::Endpoints,
}

/// An API server. Clones are handles to the same server.
#[derive(Debug, Clone)]
pub struct ApiServer(Arc<ApiServerState>);

impl ApiServer {
    /// Create a server that has only the namespaces of every cluster.
    pub fn new(options: ApiServerOptions) -> ApiServer {
        let seed = options.seed.unwrap_or_else(arbitrary_seed);
        let registry = Arc::new(ApiRegistry {
            store: ApiStore::new(seed, options.watch_history, options.audit),
            resources: ServedResources::new(&options.resources),
            clock: options.clock.clone(),
        });
        let api = ApiServer(Arc::new(ApiServerState {
            options,
            faults: Faults::new(registry.clone()),
            rights: Rights::default(),
            endpoints: proxy::Endpoints::default(),
            registry,
        }));
        for namespace in ["default", "kube-node-lease", "kube-public", "kube-system"] {
            api.create("namespaces", json!({"metadata": {"name": namespace}}))
                .expect("a namespace with a legal name, in an empty store");
        }
        api
    }

    pub(crate) fn options(&self) -> &ApiServerOptions {
        &self.0.options
    }

    pub(crate) fn registry(&self) -> &ApiRegistry {
        &self.0.registry
    }

    /// Return the server as a service: `kube::Client::new(api.router(), "default")`. A connection that a fault breaks appears as 504 here;
    /// see [`client`](ApiServer::client).
    pub fn router(&self) -> axum::Router {
        axum::Router::new().fallback(http::handle).with_state(self.clone())
    }

    /// Return a kube-rs client of this server in this process.
    pub fn client(&self) -> kube::Client {
        self.client_as("")
    }

    /// Return a [`client`](ApiServer::client) with a user name that [`Match::client`] can match.
    pub fn client_as(&self, user: &str) -> kube::Client {
        let bearer = HeaderValue::try_from(format!("Bearer {}", self.bearer(user))).ok();
        kube::Client::new(listen::Breaking::new(self, bearer), "default")
    }

    /// Serve HTTP/1.1 on an address until the result is dropped.
    ///
    /// # Errors
    /// Fails if the server cannot bind the address.
    pub async fn listen(&self, addr: SocketAddr) -> io::Result<Listening> {
        listen::listen(self, addr).await
    }

    /// Return a kubeconfig (YAML) for a server that listens at `addr`.
    pub fn kubeconfig(&self, addr: SocketAddr) -> String {
        self.kubeconfig_for(addr, "admin")
    }

    /// Return a [`kubeconfig`](ApiServer::kubeconfig) with a user name that [`Match::client`] can match.
    pub fn kubeconfig_for(&self, addr: SocketAddr, user: &str) -> String {
        let server = match &self.0.options.token {
            Some(_) => format!("http://{addr}/t/{}", self.bearer(user)),
            None => format!("http://{addr}"),
        };
        // JSON strings are valid YAML strings.
        let (name, token) = (json!(user), json!(self.bearer(user)));
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: divvy\n\
             clusters:\n- name: divvy\n  cluster: {{server: \"{server}\"}}\n\
             contexts:\n- name: divvy\n  context: {{cluster: divvy, user: {name}, namespace: default}}\n\
             users:\n- name: {name}\n  user: {{token: {token}}}\n"
        )
    }

    fn bearer(&self, user: &str) -> String {
        match (&self.0.options.token, user) {
            (None, user) => user.to_owned(),
            (Some(token), "") => token.clone(),
            (Some(token), user) => format!("{token}~{user}"),
        }
    }

    /// Return the handle to this server's faults.
    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }

    /// Return the handle to the users' rights.
    pub fn rights(&self) -> &Rights {
        &self.0.rights
    }

    /// Set the address at which the service proxy reaches a Service.
    pub fn reach(&self, namespace: &str, service: &str, address: SocketAddr) {
        self.0.endpoints.set(proxy::ProxyTarget::Service, namespace, service, address);
    }

    /// Set the address at which the pod proxy reaches a pod.
    pub fn reach_pod(&self, namespace: &str, pod: &str, address: SocketAddr) {
        self.0.endpoints.set(proxy::ProxyTarget::Pod, namespace, pod, address);
    }

    pub(crate) fn endpoints(&self) -> &proxy::Endpoints {
        &self.0.endpoints
    }

    /// Return the user of a token, or `None` if it is not valid.
    pub(crate) fn user_of(&self, bearer: &str) -> Option<String> {
        if self.rights().is_revoked(bearer) {
            return None;
        }
        match &self.0.options.token {
            None => Some(bearer.to_owned()),
            Some(token) => match bearer.strip_prefix(token.as_str())? {
                "" => Some(String::new()),
                rest => rest.strip_prefix('~').map(str::to_owned),
            },
        }
    }

    /// Return every commit on pods and nodes so far, in order; nothing if [`ApiServerOptions::audit`] is off.
    pub fn history(&self) -> Vec<StoreEvent> {
        self.registry().store.read(StoreContent::history)
    }

    /// Return the revision of the last commit.
    pub fn revision(&self) -> u64 {
        self.registry().store.read(StoreContent::revision)
    }
}

/// Direct access for setting up and inspecting a cluster: the API's rules apply, but not HTTP, faults, or authentication.
///
/// `resource` is for example `pods` or `leases.coordination.k8s.io`. Where a method supports a subresource, it can also be
/// `pods/status` or `pods/binding`. `namespace` is empty for cluster-scoped objects.
impl ApiServer {
    fn target(&self, resource: &str, namespace: &str, name: &str) -> Result<RequestTarget, ApiError> {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let resource = self
            .registry()
            .resources
            .by_name(resource)
            .ok_or_else(ApiError::no_such_path)?;
        Ok(RequestTarget {
            resource: resource.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }

    /// Return one object.
    ///
    /// # Errors
    /// 404 if the object does not exist.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Result<Value, ApiError> {
        let target = self.target(resource, namespace, name)?;
        let key = (namespace.to_owned(), name.to_owned());
        let found = self
            .registry()
            .store
            .read(|inner| inner.get(&target.resource.storage(), &key));
        let found = found.ok_or_else(|| ApiError::not_found(resource, name))?;
        Ok(events::to_view(&target.resource, &found).into_owned())
    }

    /// Return all objects of a resource in one namespace, or in all namespaces if it is empty, sorted by namespace and name.
    ///
    /// # Errors
    /// 404 for an unknown resource.
    pub fn list(&self, resource: &str, namespace: &str) -> Result<Vec<Value>, ApiError> {
        let target = self.target(resource, namespace, "")?;
        let snapshot = self.registry().store.read(|inner| inner.snapshot(&target.resource.storage()));
        let chosen = snapshot
            .objects
            .iter()
            .filter(|((have, _), _)| namespace.is_empty() || have == namespace);
        Ok(chosen
            .map(|(_, object)| events::to_view(&target.resource, object).into_owned())
            .collect())
    }

    /// Create an object in the namespace that it names, or in `default`. With `pods/binding`, carry out the Binding and return the bound pod.
    ///
    /// # Errors
    /// The API's errors: 409 if the object exists, 422 if it is invalid, …
    pub fn create(&self, resource: &str, object: Value) -> Result<Value, ApiError> {
        let mut target = self.target(resource, "", "")?;
        if target.resource.namespaced {
            target.namespace = object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        }
        let stored = if target.subresource == "binding" {
            target.name = object["metadata"]["name"].as_str().unwrap_or("").to_owned();
            self.registry().bind(&target, &object, false)?
        } else {
            self.registry().create(&target, object, &direct())?
        };
        Ok(events::to_view(&target.resource, &stored).into_owned())
    }

    /// Patch an object, or with `pods/status` its status.
    ///
    /// # Errors
    /// The API's errors: 404, 409, 422, …
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, kind: PatchKind, patch: &Value) -> Result<Value, ApiError> {
        let target = self.target(resource, namespace, name)?;
        let (stored, _) = self.registry().patch(&target, kind, patch, &direct())?;
        Ok(events::to_view(&target.resource, &stored).into_owned())
    }

    /// Delete an object, gracefully where the API does so.
    ///
    /// # Errors
    /// The API's errors: 404, 409 if a precondition fails.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str, options: &DeleteOptions) -> Result<Deleted, ApiError> {
        let target = self.target(resource, namespace, name)?;
        self.registry().delete(&target, options, false)
    }

    /// Call `look` now and after every commit until it returns a value. Return `None` after `limit`.
    pub async fn until<T>(&self, limit: Duration, mut look: impl FnMut(&ApiServer) -> Option<T>) -> Option<T> {
        let mut commits = self.registry().store.subscribe();
        let search = async {
            loop {
                commits.mark_unchanged();
                if let Some(found) = look(self) {
                    return Some(found);
                }
                commits.changed().await.ok()?;
            }
        };
        tokio::time::timeout(limit, search).await.ok().flatten()
    }
}

/// The options of writes through the methods of [`ApiServer`].
fn direct() -> WriteOptions {
    WriteOptions {
        manager: "testbed".to_owned(),
        ..WriteOptions::default()
    }
}

fn arbitrary_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
