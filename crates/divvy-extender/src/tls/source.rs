//! Keeps the credentials up to date: reads them, has certificates made if necessary, and publishes new credentials.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::certificate::LARGEST_PEM;
use super::plan::{CertificateLifetimes, PlanError, SecretData, keys, plan};
use super::{CertificateSource, Credentials, CredentialsError, Current, make};
use crate::error::AskError;

/// The longest pause between two reads of the Secret. Another replica may have renewed the certificates in it.
const LOOK: Duration = Duration::from_secs(30);
/// Pause between two reads of the files. The kubelet takes about a minute to update a mounted Secret.
const LOOK_AT_FILES: Duration = Duration::from_secs(2);
/// Pause after a failure.
const AGAIN: Duration = Duration::from_secs(2);
/// Timeout of a request to the API server.
const ANSWER: Duration = Duration::from_secs(10);

/// Start the task that keeps the credentials up to date until `stop`. Failures are logged once per distinct text, and tried again.
pub(crate) fn keep(source: CertificateSource, client: kube::Client, stop: CancellationToken) -> Current {
    let (sender, receiver) = watch::channel(None);
    tokio::spawn(async move {
        let mut keeper = Keeper {
            source,
            client,
            sender,
            seen: None,
            said: None,
            warned: None,
        };
        loop {
            let pause = keeper.update().await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    });
    receiver
}

/// Why there are no new certificates.
// No `source`: the texts already contain the causes, and an error chain would print them twice.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error("{flag} {}: could not be read: {error}", path.display())]
    File {
        flag: &'static str,
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("the Secret {secret}: {error}")]
    Secret { secret: String, error: SecretError },
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
}

/// Why the Secret has no certificates that can be used.
#[derive(Debug, thiserror::Error)]
enum SecretError {
    #[error(transparent)]
    Read(AskError),
    #[error("it does not exist; create it empty: kubectl -n {namespace} create secret generic {name}")]
    Missing { namespace: String, name: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("a certificate could not be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("it could not be written: {0}")]
    Write(AskError),
    #[error("it was changed at each of five attempts to write it; perhaps another program writes it")]
    Contended,
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
}

struct Keeper {
    source: CertificateSource,
    client: kube::Client,
    sender: watch::Sender<Option<Credentials>>,
    /// The PEM data in use: certificate, key, CA.
    seen: Option<[Vec<u8>; 3]>,
    said: Option<String>,
    /// The last warning that was logged. The same warning may recur for months.
    warned: Option<String>,
}

impl Keeper {
    /// Read the source once, and return the pause before the next read.
    async fn look(&mut self) -> Result<Duration, KeepError> {
        match self.source.clone() {
            CertificateSource::Files {
                certificate,
                key,
                client_ca,
                ..
            } => {
                let ca = read("--client-ca-file", client_ca).await?;
                let key = read("--tls-private-key-file", key).await?;
                let certificate = read("--tls-cert-file", certificate).await?;
                self.take([certificate, key, ca], ["--tls-cert-file", "--client-ca-file"])?;
                Ok(LOOK_AT_FILES)
            }
            CertificateSource::Secret {
                namespace,
                name,
                server_name,
                lifetime,
            } => {
                let lifetimes = CertificateLifetimes {
                    server_s: i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX),
                    ..CertificateLifetimes::default()
                };
                let made = self.secret(&namespace, &name, &server_name, lifetimes).await;
                made.map_err(|error| KeepError::Secret {
                    secret: format!("{namespace}/{name}"),
                    error,
                })?;
                // Read often enough to renew in time, whatever the lifetime is.
                Ok(LOOK.min(lifetime / 12).max(Duration::from_millis(500)))
            }
        }
    }

    /// Read the source once, log a failure, and return the pause before the next read.
    async fn update(&mut self) -> Duration {
        match self.look().await {
            Ok(pause) => {
                self.said = None;
                pause
            }
            Err(error) => {
                let why = error.to_string();
                if self.said.as_ref() != Some(&why) {
                    let state = match &*self.sender.borrow() {
                        Some(_) => "the previous certificates stay in use",
                        None => "no request is answered until there are certificates",
                    };
                    tracing::error!(%state, "the certificates cannot be read: {why}");
                    self.said = Some(why);
                }
                AGAIN
            }
        }
    }

    /// Read the Secret, make the certificates that are due, and write the Secret back. If another replica wrote it first, read it again.
    async fn secret(
        &mut self,
        namespace: &str,
        name: &str,
        server_name: &str,
        lifetimes: CertificateLifetimes,
    ) -> Result<(), SecretError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        // A conflict means that another replica has written the Secret; the next read finds the certificates that it made.
        for _ in 0..5 {
            let found = answered(api.get(name)).await.map_err(SecretError::Read)?;
            let mut secret = found.ok_or_else(|| SecretError::Missing {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            })?;
            let data: SecretData = secret
                .data
                .take()
                .unwrap_or_default()
                .into_iter()
                .map(|(key, value)| (key, value.0))
                .collect();
            let now_s = now_s();
            let plan = plan(&data, server_name, now_s, lifetimes)?;
            // The warning contains a number of days, so it changes, and is logged, once a day.
            if let Some(warning) = &plan.warning
                && self.warned.as_ref() != Some(warning)
            {
                tracing::warn!("{warning}");
                self.warned = Some(warning.clone());
            }
            if plan.make.is_empty() {
                let part = |key: &str| data.get(key).cloned().unwrap_or_default();
                let parts = [part(keys::SERVER), part(keys::SERVER_KEY), part(keys::CA)];
                return Ok(self.take(parts, [keys::SERVER, keys::CA])?);
            }
            let made = make::carry_out(&plan, &data, server_name, now_s, lifetimes)?;
            secret.data = Some(made.into_iter().map(|(key, value)| (key, ByteString(value))).collect());
            match answered(api.replace(name, &PostParams::default(), &secret)).await {
                Ok(Some(_)) => {
                    for (part, why) in &plan.make {
                        tracing::info!(?part, %why, secret = %format!("{namespace}/{name}"), "a certificate was made");
                    }
                }
                // After a 404 or 409, the next read shows what happened.
                Ok(None) => {}
                Err(error) => return Err(SecretError::Write(error)),
            }
        }
        Err(SecretError::Contended)
    }

    fn take(&mut self, parts: [Vec<u8>; 3], names: [&'static str; 2]) -> Result<(), CredentialsError> {
        if self.seen.as_ref() == Some(&parts) {
            return Ok(());
        }
        let [certificate, key, ca] = &parts;
        let new = Credentials::new(certificate, key, ca, names)?;
        let until =
            jiff::Timestamp::from_second(new.not_after_s).map_or_else(|_| new.not_after_s.to_string(), |at| at.to_string());
        tracing::info!(%until, "a new certificate is in use; existing connections go on");
        self.sender.send_replace(Some(new));
        self.seen = Some(parts);
        Ok(())
    }
}

/// Await a request with a timeout. `Ok(None)` means 404 or 409.
async fn answered<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<Option<T>, AskError> {
    match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(object)) => Ok(Some(object)),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(None),
        Ok(Err(error)) => Err(error.into()),
        Err(_elapsed) => Err(AskError::ApiServerLate(ANSWER)),
    }
}

async fn read(flag: &'static str, path: PathBuf) -> Result<Vec<u8>, KeepError> {
    use tokio::io::AsyncReadExt as _;
    let read = async {
        let mut bytes = Vec::new();
        let file = tokio::fs::File::open(&path).await?;
        file.take(LARGEST_PEM as u64 + 1).read_to_end(&mut bytes).await?;
        Ok(bytes)
    };
    read.await.map_err(|error| KeepError::File { flag, path, error })
}

fn now_s() -> i64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(passed.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn three_empty_files_are_no_credentials() {
        let config = kube::Config::new("http://127.0.0.1:1".parse().expect("an address"));
        let mut keeper = Keeper {
            source: CertificateSource::Files {
                certificate: PathBuf::new(),
                key: PathBuf::new(),
                client_ca: PathBuf::new(),
                server_name: "extender".to_owned(),
            },
            client: kube::Client::try_from(config).expect("a client"),
            sender: watch::channel(None).0,
            seen: None,
            said: None,
            warned: None,
        };
        let taken = keeper.take(Default::default(), ["--tls-cert-file", "--client-ca-file"]);
        let error = taken.expect_err("nothing was given").to_string();
        assert!(error.starts_with("--client-ca-file holds no certificate in PEM"), "{error}");
    }
}
