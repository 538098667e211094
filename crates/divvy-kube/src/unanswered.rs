//! Why no API server answered.

use std::time::Duration;

/// Why the API server gave no answer. This error replaces the client's error, which does not name the API server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unanswered {
    /// No connection could be made.
    #[error("no connection to the API server at {address}: {cause}. {} ({origin})", check(cause))]
    Unreachable { address: String, origin: String, cause: String },
    /// The answer took longer than `--request-timeout`.
    #[error("the API server at {address} did not answer within {} s; set a longer --request-timeout", .limit.as_secs_f32())]
    Late { address: String, limit: Duration },
}

/// Return the advice for a failed connection: what the user should check first.
fn check(cause: &str) -> &'static str {
    if cause.contains("certificate") {
        "Check that this is the cluster's address, and that certificate-authority-data in the kubeconfig belongs to this cluster"
    } else {
        "Check that the API server is running and that this is its address"
    }
}
