use std::path::PathBuf;

use crate::client::Unanswered;
use crate::list::pages::Failure;

/// What can go wrong between Divvy and an API server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kubeconfig file was named and is not there.
    #[error("there is no kubeconfig file at {path}; name one with --kubeconfig or KUBECONFIG")]
    KubeconfigMissing {
        /// The path that was looked at.
        path: PathBuf,
    },
    /// A kubeconfig file could not be used.
    #[error("the kubeconfig {origin} cannot be used: {text}")]
    Kubeconfig {
        /// Where it came from.
        origin: String,
        /// What is wrong with it.
        text: String,
    },
    /// Neither a kubeconfig nor a pod.
    #[error(
        "no cluster to talk to: KUBECONFIG is not set, there is no ~/.kube/config, and this is not a pod; name a kubeconfig with --kubeconfig"
    )]
    NoCluster,
    /// No kubeconfig, and a pod whose service account cannot be used.
    #[error(
        "no cluster to talk to: there is no kubeconfig, and the service account of this pod cannot be used: {text}; is automountServiceAccountToken false?"
    )]
    NoServiceAccount {
        /// Why.
        text: String,
    },
    /// The API server refused or did not answer.
    // No `source`: the message already says all of it, and a chain would say it twice.
    #[error("{what}: {}", in_words(answer))]
    Api {
        /// What was tried.
        what: String,
        /// The answer.
        answer: Box<kube::Error>,
    },
    /// The API server's answer is not a list, or broke off.
    #[error("{what}: {text}")]
    List {
        /// What was tried.
        what: String,
        /// What is wrong with the answer.
        text: String,
    },
    /// The user has no token that others could be shown.
    #[error("{text}")]
    NoToken {
        /// Why.
        text: String,
    },
    /// The explainer could not be asked.
    #[error("{text}")]
    Desk {
        /// What is wrong.
        text: String,
    },
}

impl Error {
    /// Wraps a client error with what was tried.
    pub fn api(what: impl Into<String>, source: kube::Error) -> Error {
        Error::Api {
            what: what.into(),
            answer: Box::new(source),
        }
    }
}

impl Error {
    /// Whether the API server said that the user has no right to it (403).
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Error::Api { answer, .. } if matches!(&**answer, kube::Error::Api(status) if status.code == 403))
    }

    /// Whether the API server said that there is no such object (404).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Api { answer, .. } if matches!(&**answer, kube::Error::Api(status) if status.code == 404))
    }

    pub(crate) fn list(what: impl Into<String>, failure: Failure) -> Error {
        match failure {
            Failure::Api(source) => Error::api(what, source),
            failure => Error::List {
                what: what.into(),
                text: failure.to_string(),
            },
        }
    }
}

/// A client error as a user can use it: the server's own message where there is one.
pub fn in_words(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{} ({} {})", status.message, status.code, status.reason),
        kube::Error::Service(error) if error.is::<Unanswered>() => error.to_string(),
        other => {
            let mut text = other.to_string();
            let mut source = std::error::Error::source(other);
            while let Some(cause) = source {
                let cause_text = cause.to_string();
                if !text.contains(&cause_text) {
                    text = format!("{text}: {cause_text}");
                }
                source = cause.source();
            }
            text
        }
    }
}
