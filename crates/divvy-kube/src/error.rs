use std::path::PathBuf;

use crate::in_words;
use crate::list::pages::ListFailure;

/// An error between Divvy and an API server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The named kubeconfig file does not exist.
    #[error("there is no kubeconfig file at {path}; name one with --kubeconfig or KUBECONFIG")]
    KubeconfigMissing {
        /// The path of the missing file.
        path: PathBuf,
    },
    /// A kubeconfig file could not be used.
    #[error("the kubeconfig {origin} cannot be used: {text}")]
    Kubeconfig {
        /// The path of the kubeconfig.
        origin: String,
        /// What is wrong with the kubeconfig.
        text: String,
    },
    /// There is no kubeconfig, and the program does not run in a pod.
    #[error(
        "no cluster to connect to: KUBECONFIG is not set, there is no ~/.kube/config, and this is not a pod; name a kubeconfig with --kubeconfig"
    )]
    NoCluster,
    /// There is no kubeconfig, and the pod's service account cannot be used.
    #[error(
        "no cluster to connect to: there is no kubeconfig, and the service account of this pod cannot be used: {text}; is automountServiceAccountToken false?"
    )]
    NoServiceAccount {
        /// Why the service account cannot be used.
        text: String,
    },
    /// The API server refused or did not answer.
    // No `source`: the message already contains it, and an error chain would print it twice.
    #[error("{what}: {}", in_words(answer))]
    Api {
        /// What failed, such as "the pods could not be listed".
        what: String,
        /// The client's error.
        answer: Box<kube::Error>,
    },
    /// The API server's answer is not a list, or is incomplete.
    #[error("{what}: {text}")]
    List {
        /// What failed, such as "the pods could not be listed".
        what: String,
        /// What is wrong with the answer.
        text: String,
    },
    /// The API server did not answer in time.
    #[error("{what}: {text}")]
    Late {
        /// What failed.
        what: String,
        /// How long the program waited.
        text: String,
    },
    /// The user has no token to send to the explainer.
    #[error("{text}")]
    NoToken {
        /// Why there is no token.
        text: String,
    },
    /// The explainer could not be reached.
    #[error("{text}")]
    Explainer {
        /// What failed.
        text: String,
    },
}

impl Error {
    /// Wrap a client error with a sentence that says what failed.
    pub fn api(what: impl Into<String>, source: kube::Error) -> Error {
        Error::Api {
            what: what.into(),
            answer: Box::new(source),
        }
    }
}

impl Error {
    /// Report whether the API server answered that the user lacks the right (403).
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Error::Api { answer, .. } if matches!(&**answer, kube::Error::Api(status) if status.code == 403))
    }

    /// Report whether the API server answered that the object does not exist (404).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Api { answer, .. } if matches!(&**answer, kube::Error::Api(status) if status.code == 404))
    }

    pub(crate) fn list(what: impl Into<String>, failure: ListFailure) -> Error {
        match failure {
            ListFailure::Api(source) => Error::api(what, source),
            failure => Error::List {
                what: what.into(),
                text: failure.to_string(),
            },
        }
    }
}
