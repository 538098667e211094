//! The API server's answers about users: the owner of a token, and a user's rights. Reviews are answered but not stored.

use serde_json::{Value, json};

use super::ApiServer;
use super::error::{ApiError, FieldError};
use super::rights::Attributes;

/// A review, identified by its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReviewKind {
    Token,
    Access,
    Myself,
    MyAccess,
}

impl ReviewKind {
    /// Return the review that a path's segments name.
    pub(crate) fn of(segments: &[&str]) -> Option<ReviewKind> {
        match segments {
            ["apis", "authentication.k8s.io", "v1", "tokenreviews"] => Some(ReviewKind::Token),
            ["apis", "authentication.k8s.io", "v1", "selfsubjectreviews"] => Some(ReviewKind::Myself),
            ["apis", "authorization.k8s.io", "v1", "subjectaccessreviews"] => Some(ReviewKind::Access),
            ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"] => Some(ReviewKind::MyAccess),
            _ => None,
        }
    }

    /// Answer a review that `user` posted.
    pub(crate) fn answer(self, api: &ApiServer, user: &str, body: &[u8]) -> Result<Value, ApiError> {
        let mut review: Value =
            serde_json::from_slice(body).map_err(|why| ApiError::bad_request(format!("the body is not JSON ({why})")))?;
        // Every user may post these reviews: the cluster role system:basic-user.
        let right = match self {
            ReviewKind::Token => Some(("authentication.k8s.io", "tokenreviews")),
            ReviewKind::Access => Some(("authorization.k8s.io", "subjectaccessreviews")),
            ReviewKind::Myself | ReviewKind::MyAccess => None,
        };
        if let Some((group, plural)) = right {
            let attributes = Attributes {
                verb: "create",
                group,
                plural,
                subresource: "",
                namespace: "",
                name: "",
            };
            api.rights().check(user, &attributes)?;
        }
        let spec = review["spec"].take();
        review["status"] = match self {
            ReviewKind::Token => token(api, &spec)?,
            ReviewKind::Myself => json!({"userInfo": info(user)}),
            ReviewKind::MyAccess => access(api, user, &spec)?,
            ReviewKind::Access => {
                let of = spec["user"].as_str().unwrap_or_default();
                if of.is_empty() && spec["groups"].as_array().is_none_or(Vec::is_empty) {
                    let error = FieldError::invalid("spec.user", &Value::Null, "at least one of user or group must be specified");
                    return Err(ApiError::invalid("authorization.k8s.io", "SubjectAccessReview", "", &[error]));
                }
                access(api, of, &spec)?
            }
        };
        review["spec"] = spec;
        Ok(review)
    }
}

/// Return a user's info. Each user is in a separate group, so that rights can be granted to groups.
fn info(user: &str) -> Value {
    json!({"username": user, "groups": [format!("group-of-{user}"), "system:authenticated"]})
}

fn token(api: &ApiServer, spec: &Value) -> Result<Value, ApiError> {
    let token = spec["token"].as_str().unwrap_or_default();
    if token.is_empty() {
        let error = FieldError::required("spec.token", "");
        return Err(ApiError::invalid("authentication.k8s.io", "TokenReview", "", &[error]));
    }
    Ok(match api.user_of(token) {
        Some(user) if !user.is_empty() => json!({"authenticated": true, "user": info(&user), "audiences": spec["audiences"]}),
        _ => json!({"authenticated": false, "error": "invalid bearer token", "user": {}}),
    })
}

fn access(api: &ApiServer, user: &str, spec: &Value) -> Result<Value, ApiError> {
    let attributes = &spec["resourceAttributes"];
    if !attributes.is_object() {
        return Err(ApiError::bad_request("this API server reviews resourceAttributes only"));
    }
    let text = |name: &str| attributes[name].as_str().unwrap_or_default();
    let attributes = Attributes {
        verb: text("verb"),
        group: text("group"),
        plural: text("resource"),
        subresource: text("subresource"),
        namespace: text("namespace"),
        name: text("name"),
    };
    let rights = api.rights();
    let of_group = |group: &Value| group.as_str().is_some_and(|group| rights.grants(group, &attributes));
    let groups = spec["groups"].as_array().into_iter().flatten();
    Ok(json!({"allowed": rights.allows(user, &attributes) || groups.into_iter().any(of_group)}))
}
