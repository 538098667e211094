//! The choice of the cluster and the client for it: from `--kubeconfig`, `KUBECONFIG` (several paths, merged as kubectl merges
//! them), `~/.kube/config`, or the pod's service account, in this order.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::config::{AuthInfo, InClusterError, KubeConfigOptions, Kubeconfig};
use serde::{Deserialize, Serialize};
use tower::util::MapErrLayer;
use tower::{BoxError, Layer as _, ServiceExt as _};

use crate::Error;
use crate::unanswered::Unanswered;

/// The user's choice of a cluster: the values of flags with kubectl's names and kubectl's meaning.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ClusterChoice {
    /// `--kubeconfig`: one path, or several separated as in `KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`.
    pub context: Option<String>,
    /// `--cluster`: a cluster of the kubeconfig, instead of the context's.
    pub cluster: Option<String>,
    /// `--user`: a user of the kubeconfig, instead of the context's.
    pub user: Option<String>,
    /// `--server`: the API server's address, instead of the cluster's.
    #[serde(with = "server")]
    pub server: Option<http::Uri>,
    /// `--token`: a bearer token, instead of the user's credentials.
    pub token: Option<BearerToken>,
    /// `--as`: the user to impersonate.
    pub impersonate: Option<String>,
    /// `--as-group`: the groups to impersonate.
    pub impersonate_groups: Vec<String>,
    /// `--request-timeout`; zero means no timeout.
    pub request_timeout: Option<Duration>,
}

/// A bearer token. Its `Debug` output does not show the token.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BearerToken(String);

/// The API server's address as text.
mod server {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(server: &Option<http::Uri>, to: S) -> Result<S::Ok, S::Error> {
        server.as_ref().map(ToString::to_string).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<http::Uri>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

impl BearerToken {
    /// Return the header value `Bearer …`, marked as sensitive; `None` if the token has characters that a header cannot contain.
    pub fn header(&self) -> Option<http::HeaderValue> {
        let mut value = http::HeaderValue::try_from(format!("Bearer {}", self.0)).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl From<String> for BearerToken {
    fn from(text: String) -> BearerToken {
        BearerToken(text)
    }
}

impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A client with the address and default namespace of its cluster.
#[derive(Clone)]
pub struct Connection {
    /// The client for the API server.
    pub client: kube::Client,
    /// The context's namespace, or `default` if the context does not name one.
    pub namespace: String,
    /// The API server's address.
    pub address: String,
    config: kube::Config,
}

impl Connection {
    /// Return the token by which the API server identifies the user. As in requests to the API server, the token may come from a
    /// file or a program that the kubeconfig names.
    ///
    /// # Errors
    /// Fails if the user has no token, because a client certificate or impersonation (`--as`) is used.
    pub async fn token(&self) -> Result<BearerToken, Error> {
        let none = |text: &str| Error::NoToken { text: text.to_owned() };
        if self.config.auth_info.impersonate.is_some() {
            return Err(none("with --as there is no token of the user that you impersonate"));
        }
        let failed = |error: String| Error::NoToken {
            text: format!("your token could not be read: {error}"),
        };
        let layer = self.config.auth_layer().map_err(|error| failed(error.to_string()))?;
        let layer = layer.ok_or_else(|| {
            none("your kubeconfig has no token (it has a client certificate or no credentials), but the explainer identifies users by their tokens")
        })?;
        let header = |request: http::Request<Body>| {
            let header = request.headers().get(http::header::AUTHORIZATION).cloned();
            std::future::ready(Ok::<_, BoxError>(http::Response::new(header)))
        };
        let service = layer.layer(tower::service_fn(header));
        let header = service.oneshot(http::Request::new(Body::empty())).await;
        let header = header.map_err(|error| failed(error.to_string()))?.into_body();
        let text = header.as_ref().and_then(|header| header.to_str().ok()).unwrap_or_default();
        match text.strip_prefix("Bearer ") {
            Some(token) => Ok(BearerToken(token.to_owned())),
            None => Err(none(
                "your kubeconfig has a password and no token, but the explainer identifies users by their tokens",
            )),
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Read the configuration and make a client. This sends no request yet.
pub async fn connect(choice: &ClusterChoice) -> Result<Connection, Error> {
    let (config, origin) = config(choice).await?;
    let (namespace, address, kept) = (
        config.default_namespace.clone(),
        config.cluster_url.to_string(),
        config.clone(),
    );
    let (tried, limit) = (address.trim_end_matches('/').to_owned(), config.read_timeout);
    let builder =
        ClientBuilder::try_from(config).map_err(|source| Error::api("no client could be made from the configuration", source))?;
    let name_it = MapErrLayer::new(
        move |error: BoxError| match unanswered(error.as_ref(), limit, &tried, &origin) {
            Some(named) => Box::new(named),
            None => error,
        },
    );
    Ok(Connection {
        client: builder.with_layer(&name_it).build(),
        namespace,
        address,
        config: kept,
    })
}

/// Return the error to show if a client error was caused by the connection; `None` for other errors.
fn unanswered(
    error: &(dyn std::error::Error + Send + Sync + 'static),
    limit: Option<Duration>,
    address: &str,
    origin: &str,
) -> Option<Unanswered> {
    let first: &(dyn std::error::Error + 'static) = error;
    let chain = || std::iter::successors(Some(first), |&error| error.source());
    let address = address.to_owned();
    let connecting = chain()
        .filter_map(|error| error.downcast_ref::<hyper_util::client::legacy::Error>())
        .any(hyper_util::client::legacy::Error::is_connect);
    let late = chain()
        .filter_map(|error| error.downcast_ref::<std::io::Error>())
        .any(|error| error.kind() == std::io::ErrorKind::TimedOut);
    match (connecting, limit.filter(|_| late)) {
        (true, _) => Some(Unanswered::Unreachable {
            address,
            origin: origin.to_owned(),
            cause: if late {
                "the connection timed out".to_owned()
            } else {
                chain().last().unwrap_or(first).to_string()
            },
        }),
        (false, Some(limit)) => Some(Unanswered::Late { address, limit }),
        (false, None) => None,
    }
}

/// Return the chosen configuration, and a phrase that says where the address comes from.
async fn config(choice: &ClusterChoice) -> Result<(kube::Config, String), Error> {
    let (mut config, mut origin) = base(choice).await?;
    if let Some(server) = &choice.server {
        config.cluster_url.clone_from(server);
        // As in kubectl: the tls-server-name of the kubeconfig belongs to the replaced address.
        config.tls_server_name = None;
        origin = "from --server".to_owned();
    }
    if let Some(BearerToken(token)) = &choice.token {
        // Drop the other credentials: a client certificate would take precedence over the token.
        config.auth_info = AuthInfo {
            token: Some(token.clone().into()),
            impersonate: config.auth_info.impersonate,
            impersonate_groups: config.auth_info.impersonate_groups,
            ..AuthInfo::default()
        };
    }
    if choice.impersonate.is_some() {
        config.auth_info.impersonate.clone_from(&choice.impersonate);
        config.auth_info.impersonate_groups = Some(choice.impersonate_groups.clone()).filter(|groups| !groups.is_empty());
    }
    // A request without an answer must end. Watches end regularly and are resumed automatically.
    config.connect_timeout = Some(Duration::from_secs(5));
    if let Some(limit) = choice.request_timeout.filter(|limit| !limit.is_zero()) {
        config.connect_timeout = Some(limit.min(Duration::from_secs(5)));
        config.read_timeout = Some(limit);
        config.reset_reader_on_write = true;
    }
    Ok((config, origin))
}

/// Return the configuration, without the flags that the caller then applies: `--server`, `--token`, `--as`, `--as-group`, and
/// `--request-timeout`.
async fn base(choice: &ClusterChoice) -> Result<(kube::Config, String), Error> {
    let from_env = std::env::var_os("KUBECONFIG")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from);
    let (paths, explicit) = match (&choice.kubeconfig, from_env) {
        (Some(paths), _) => (paths.clone(), true),
        (None, Some(paths)) => (paths, false),
        (None, None) => match (home_config(), &choice.server) {
            (Some(path), _) => (path, false),
            (None, Some(server)) => return Ok((kube::Config::new(server.clone()), String::new())),
            (None, None) => {
                let config = kube::Config::incluster().map_err(|error| no_cluster(&error))?;
                return Ok((config, "from this pod's environment".to_owned()));
            }
        },
    };
    let unusable = |text: String| Error::Kubeconfig {
        origin: paths.display().to_string(),
        text,
    };
    let merged = read_merged(&paths, explicit)?;
    names_are_there(&merged, choice).map_err(|error| unusable(error.to_string()))?;
    let options = KubeConfigOptions {
        context: choice.context.clone(),
        cluster: choice.cluster.clone(),
        user: choice.user.clone(),
    };
    let config = kube::Config::from_custom_kubeconfig(merged, &options)
        .await
        .map_err(|error| unusable(error.to_string()))?;
    Ok((
        config,
        format!(
            "from the kubeconfig {}; --kubeconfig and --context choose another",
            paths.display()
        ),
    ))
}

/// Return the error for a missing or unusable in-cluster configuration. The kubelet sets the environment variables with the API server's
/// address in every pod, so without them this process does not run in a pod.
fn no_cluster(error: &InClusterError) -> Error {
    match error {
        InClusterError::ReadEnvironmentVariable(_) => Error::NoCluster,
        other => Error::NoServiceAccount { text: other.to_string() },
    }
}

/// The maximum number of names that an error lists.
const MOST_NAMES: usize = 10;

/// What a kubeconfig lacks, and what it has.
#[derive(Debug, thiserror::Error)]
enum NotThere {
    #[error("it has no current context; choose one with --context: {known}")]
    CurrentContext { known: String },
    #[error("it has no {kind} {name:?}, only: {known}")]
    Name {
        kind: &'static str,
        name: String,
        known: String,
    },
}

/// Check that the kubeconfig has the context, cluster, and user that the flags name. kube ignores a user that does not exist.
fn names_are_there(config: &Kubeconfig, choice: &ClusterChoice) -> Result<(), NotThere> {
    let contexts = || config.contexts.iter().map(|named| named.name.as_str()).collect();
    let clusters = || config.clusters.iter().map(|named| named.name.as_str()).collect();
    let users = || config.auth_infos.iter().map(|named| named.name.as_str()).collect();
    if choice.context.is_none() && config.current_context.as_deref().is_none_or(str::is_empty) {
        let known: Vec<&str> = contexts();
        return Err(NotThere::CurrentContext { known: listed(&known) });
    }
    let check = |kind: &'static str, asked: &Option<String>, known: Vec<&str>| match asked {
        Some(name) if !known.contains(&name.as_str()) => Err(NotThere::Name {
            kind,
            name: name.clone(),
            known: listed(&known),
        }),
        _ => Ok(()),
    };
    check("context", &choice.context, contexts())?;
    check("cluster", &choice.cluster, clusters())?;
    check("user", &choice.user, users())
}

fn listed(names: &[&str]) -> String {
    match names {
        [] => "(it has none)".to_owned(),
        names if names.len() > MOST_NAMES => format!("{} and {} more", names[..MOST_NAMES].join(", "), names.len() - MOST_NAMES),
        names => names.join(", "),
    }
}

/// Read and merge kubeconfig files by kubectl's rule: a single path must exist; in a list of paths, at least one must exist, and the others are
/// skipped.
fn read_merged(paths: &Path, explicit: bool) -> Result<Kubeconfig, Error> {
    let mut merged: Option<Kubeconfig> = None;
    let list: Vec<PathBuf> = std::env::split_paths(paths)
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    for path in &list {
        if !path.exists() {
            if explicit && list.len() == 1 {
                return Err(Error::KubeconfigMissing { path: path.clone() });
            }
            continue;
        }
        let origin = || path.display().to_string();
        let next = Kubeconfig::read_from(path).map_err(|error| Error::Kubeconfig {
            origin: origin(),
            text: error.to_string(),
        })?;
        merged = Some(match merged {
            None => next,
            Some(earlier) => earlier.merge(next).map_err(|error| Error::Kubeconfig {
                origin: origin(),
                text: error.to_string(),
            })?,
        });
    }
    merged.ok_or_else(|| Error::KubeconfigMissing {
        path: paths.to_path_buf(),
    })
}

fn home_config() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("HOME")?).join(".kube/config");
    path.exists().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_certificate_is_not_taken_for_a_server_that_is_away() {
        let said = |cause: &str| {
            Unanswered::Unreachable {
                address: "https://10.0.0.1:6443".to_owned(),
                origin: "from --server".to_owned(),
                cause: cause.to_owned(),
            }
            .to_string()
        };
        assert!(said("invalid peer certificate: UnknownIssuer").contains("certificate-authority-data"));
        assert!(said("Connection refused (os error 111)").contains("Check that the API server is running"));
    }

    #[test]
    fn without_a_kubeconfig_it_is_said_whether_this_is_a_pod() {
        let outside = no_cluster(&InClusterError::ReadEnvironmentVariable(std::env::VarError::NotPresent)).to_string();
        assert!(
            outside.contains("there is no ~/.kube/config, and this is not a pod") && !outside.contains("environment variable"),
            "{outside}"
        );
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        let inside = no_cluster(&InClusterError::ReadCertificateBundle(missing)).to_string();
        assert!(
            inside.contains("the service account of this pod cannot be used: failed to read a certificate bundle"),
            "{inside}"
        );
    }

    #[test]
    fn a_token_is_not_printed() {
        let choice = ClusterChoice {
            token: Some("secret".to_owned().into()),
            ..ClusterChoice::default()
        };
        assert!(!format!("{choice:?}").contains("secret"));
    }
}
