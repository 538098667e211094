//! Errors: `meta/v1` Status objects with the reasons, codes, and texts of apimachinery's `pkg/api/errors`.

use serde_json::{Map, Value, json};

/// A refused request. It is sent as a `Status` object with this HTTP code.
///
/// `reason` is the machine-readable word on which clients branch (`NotFound`, `Conflict`, `AlreadyExists`, …).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status code.
    pub code: u16,
    /// `Status.reason`.
    pub reason: &'static str,
    /// `Status.message`, the text for people.
    pub message: String,
    /// Boxed to keep results small.
    details: Option<Box<Value>>,
}

/// An error in one field, formatted as apimachinery's `field.Error`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FieldError {
    reason: &'static str,
    field: String,
    message: String,
}

impl FieldError {
    pub(crate) fn required(field: impl Into<String>, detail: &str) -> FieldError {
        let message = if detail.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {detail}")
        };
        FieldError {
            reason: "FieldValueRequired",
            field: field.into(),
            message,
        }
    }

    pub(crate) fn invalid(field: impl Into<String>, value: &Value, detail: &str) -> FieldError {
        FieldError {
            reason: "FieldValueInvalid",
            field: field.into(),
            message: format!("Invalid value: {value}: {detail}"),
        }
    }

    pub(crate) fn duplicate(field: impl Into<String>, value: &Value) -> FieldError {
        FieldError {
            reason: "FieldValueDuplicate",
            field: field.into(),
            message: format!("Duplicate value: {value}"),
        }
    }

    pub(crate) fn too_long(field: impl Into<String>, limit: usize) -> FieldError {
        FieldError {
            reason: "FieldValueTooLong",
            field: field.into(),
            message: format!("Too long: may not be more than {limit} bytes"),
        }
    }

    pub(crate) fn forbidden(field: impl Into<String>, detail: &str) -> FieldError {
        FieldError {
            reason: "FieldValueForbidden",
            field: field.into(),
            message: format!("Forbidden: {detail}"),
        }
    }
}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            code,
            reason,
            message: message.into(),
            details: None,
        }
    }

    /// Name in `Status.details` the object that the error is about. `resource` is for example `pods` or
    /// `leases.coordination.k8s.io`.
    fn about(mut self, resource: &str, name: &str) -> ApiError {
        let (plural, group) = resource.split_once('.').unwrap_or((resource, ""));
        let mut details = Map::new();
        details.insert("name".into(), name.into());
        if !group.is_empty() {
            details.insert("group".into(), group.into());
        }
        details.insert("kind".into(), plural.into());
        self.details = Some(Box::new(Value::Object(details)));
        self
    }

    pub(crate) fn not_found(resource: &str, name: &str) -> ApiError {
        ApiError::new(404, "NotFound", format!("{resource} {name:?} not found")).about(resource, name)
    }

    /// Return the error for a path that is not served: an unknown resource or subresource.
    pub(crate) fn no_such_path() -> ApiError {
        ApiError::new(404, "NotFound", "the server could not find the requested resource")
    }

    /// Return the error for a request that only a real container could answer.
    pub(crate) fn simulated(pod: &str, subresource: &str) -> ApiError {
        let lacks = match subresource {
            "log" => "it has no logs",
            "portforward" => "nothing listens in it",
            "ephemeralcontainers" => "none is added to it",
            _ => "no command runs in it",
        };
        ApiError::new(
            501,
            "NotImplemented",
            format!(
                "this cluster is simulated (divvy demo): the container of pod {pod:?} runs no image, and {lacks}; kubectl describe pod {pod} shows its events, \
                 divvy why {pod} its GPU"
            ),
        )
        .about("pods", pod)
    }

    pub(crate) fn already_exists(resource: &str, name: &str) -> ApiError {
        ApiError::new(409, "AlreadyExists", format!("{resource} {name:?} already exists")).about(resource, name)
    }

    pub(crate) fn conflict(resource: &str, name: &str, why: &str) -> ApiError {
        ApiError::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {resource} {name:?}: {why}"),
        )
        .about(resource, name)
    }

    /// Return the error for an apply that would change fields of other managers. A conflict is the manager, as upstream prints it,
    /// and the path of the field (apimachinery `managedfields/internal/conflict.go`).
    pub(crate) fn apply_conflict(conflicts: &[(String, String)]) -> ApiError {
        let message = match conflicts {
            [(manager, field)] => format!("Apply failed with 1 conflict: conflict with {manager}: {field}"),
            many => {
                let mut managers: Vec<&str> = many.iter().map(|(manager, _)| manager.as_str()).collect();
                managers.sort_unstable();
                managers.dedup();
                let mut lines = Vec::new();
                for manager in managers {
                    lines.push(format!("conflicts with {manager}:"));
                    let fields = many.iter().filter(|(of, _)| of == manager);
                    lines.extend(fields.map(|(_, field)| format!("- {field}")));
                }
                format!("Apply failed with {} conflicts: {}", many.len(), lines.join("\n"))
            }
        };
        let causes: Vec<Value> = (conflicts.iter())
            .map(|(manager, field)| {
                json!({"reason": "FieldManagerConflict", "message": format!("conflict with {manager}"), "field": field})
            })
            .collect();
        let mut error = ApiError::new(409, "Conflict", message);
        error.details = Some(Box::new(json!({"causes": causes})));
        error
    }

    pub(crate) fn bad_request(why: impl Into<String>) -> ApiError {
        ApiError::new(400, "BadRequest", why)
    }

    pub(crate) fn method_not_allowed() -> ApiError {
        ApiError::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    pub(crate) fn expired(why: impl Into<String>) -> ApiError {
        ApiError::new(410, "Expired", why)
    }

    /// Return a 422 error with one cause per field.
    pub(crate) fn invalid(group: &str, kind: &str, name: &str, errors: &[FieldError]) -> ApiError {
        let printed: Vec<String> = errors.iter().map(|e| format!("{}: {}", e.field, e.message)).collect();
        let list = match printed.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let qualified = if group.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind}.{group}")
        };
        let mut error = ApiError::new(422, "Invalid", format!("{qualified} {name:?} is invalid: {list}"));
        let causes: Vec<Value> = errors
            .iter()
            .map(|e| json!({"reason": e.reason, "message": e.message, "field": e.field}))
            .collect();
        error.details = Some(Box::new(
            json!({"name": name, "group": group, "kind": kind, "causes": causes}),
        ));
        error
    }

    /// Return the error for a read at a future revision.
    pub(crate) fn revision_too_large(asked: u64, current: u64) -> ApiError {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut error = ApiError::new(504, "Timeout", message);
        error.details = Some(Box::new(json!({
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1
        })));
        error
    }

    /// Return the `Status` object as it is sent.
    pub fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": self.message, "reason": self.reason,
        });
        if let Value::Object(map) = &mut status {
            if let Some(details) = &self.details {
                map.insert("details".into(), (**details).clone());
            }
            map.insert("code".into(), self.code.into());
        }
        status
    }
}
