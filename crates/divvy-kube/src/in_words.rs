//! A client error as a sentence.

use crate::unanswered::Unanswered;

/// Format a client error for users: the server's own message if there is one, else the error with its causes.
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
