//! Why a question is not answered.

use axum::http::StatusCode;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) struct AnswerRefusal {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
}

impl AnswerRefusal {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> AnswerRefusal {
        AnswerRefusal {
            status,
            text: text.into(),
        }
    }

    pub(crate) fn unavailable(text: impl Into<String>) -> AnswerRefusal {
        AnswerRefusal::new(StatusCode::SERVICE_UNAVAILABLE, text)
    }
}
