//! Which cluster to talk to: `--kubeconfig`, `KUBECONFIG` (several paths, merged as kubectl merges them),
//! `~/.kube/config`, else the pod's service account.

use std::path::{Path, PathBuf};

use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::Error;

/// What a user can say about the cluster.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// `--kubeconfig`: one path, or several as in `KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`.
    pub context: Option<String>,
}

/// A client, and the namespace that its context names.
#[derive(Clone)]
pub struct Connection {
    /// The client.
    pub client: kube::Client,
    /// Namespace of the context, `default` when it names none.
    pub namespace: String,
    /// The API server's address.
    pub address: String,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Reads the configuration and makes a client. No request is sent yet.
pub async fn connect(choice: &Choice) -> Result<Connection, Error> {
    let config = config(choice).await?;
    let (namespace, address) = (config.default_namespace.clone(), config.cluster_url.to_string());
    let client =
        kube::Client::try_from(config).map_err(|source| Error::api("no client could be made from the configuration", source))?;
    Ok(Connection {
        client,
        namespace,
        address,
    })
}

async fn config(choice: &Choice) -> Result<kube::Config, Error> {
    let from_env = std::env::var_os("KUBECONFIG")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from);
    let (paths, explicit) = match (&choice.kubeconfig, from_env) {
        (Some(paths), _) => (paths.clone(), true),
        (None, Some(paths)) => (paths, false),
        (None, None) => match home_config() {
            Some(path) => (path, false),
            None => {
                let mut config = kube::Config::incluster().map_err(|error| Error::NoCluster { text: error.to_string() })?;
                set_timeouts(&mut config);
                return Ok(config);
            }
        },
    };
    let merged = read_merged(&paths, explicit)?;
    let options = KubeConfigOptions {
        context: choice.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut config = kube::Config::from_custom_kubeconfig(merged, &options)
        .await
        .map_err(|error| Error::Kubeconfig {
            origin: paths.display().to_string(),
            text: error.to_string(),
        })?;
    set_timeouts(&mut config);
    Ok(config)
}

/// A request that gets no answer must end; watches end and are taken up again by themselves.
fn set_timeouts(config: &mut kube::Config) {
    config.connect_timeout = Some(std::time::Duration::from_secs(5));
}

/// kubectl's rule: of a list of paths those that exist count, and one at least must; a single path must exist.
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
