//! The meaning of the API server's answers: pure functions of an HTTP status code and a body.
//!
//! Load balancers, ingress controllers, and API servers that are still starting also answer, with the same codes. Only a `Status`
//! object (`meta/v1`, apimachinery `types.go`) is the API server's own answer, and only a `Status` that names the pod proves that the
//! pod is gone. With anything else the outcome is unknown: the extender keeps the reservation and reads the pod.

use divvy_kube::convert;
use divvy_kube::objects::PodObject;
use divvy_model::{PodKey, names};
use kube::core::Status;
use kube::core::response::StatusSummary;

use super::{Got, Posted};

/// The maximum size in bytes of an answer's body. A pod in etcd has at most 1.5 MiB.
pub const MOST_BYTES: usize = 4 << 20;

/// The maximum number of characters that an error quotes from a body that is not the API server's.
const QUOTED: usize = 100;

/// A request does not name a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request does not name a pod: send a namespace and a name of lower-case letters, digits, - and .")]
pub struct NotAPodName;

/// Return the URL path of a pod. Fails if the namespace or the name is not a valid name (RFC 1123), because both come from a
/// request.
pub fn path(pod: &PodKey) -> Result<String, NotAPodName> {
    if !names::is_name(&pod.namespace) || !names::is_name(&pod.name) {
        return Err(NotAPodName);
    }
    Ok(format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name))
}

/// Interpret the answer to the POST of a Binding or an Eviction.
pub fn posted(code: u16, body: &[u8], pod: &PodKey) -> Posted {
    let Some(status) = status_of(body) else {
        return match code {
            // The API server rejects excess load in plain text, before any handler runs (apiserver `maxinflight.go`).
            429 => Posted::Refused(foreign(code, body)),
            _ => Posted::Unknown(foreign(code, body)),
        };
    };
    let text = format!("{} ({code} {})", status.message, status.reason);
    match code {
        200..=299 if status.status == Some(StatusSummary::Success) => Posted::Created,
        404 if names_pod(&status, pod) => Posted::NotFound(text),
        404 => Posted::Unknown(text),
        409 => Posted::Conflict(text),
        // Not 408: the server gave up while it handled the request.
        400..=407 | 410..=499 => Posted::Refused(text),
        _ => Posted::Unknown(text),
    }
}

/// Interpret the answer to the GET of a pod.
pub fn got(code: u16, body: &[u8], pod: &PodKey) -> Got {
    if !(200..=299).contains(&code) {
        return match status_of(body) {
            Some(status) if code == 404 && names_pod(&status, pod) => Got::NotFound,
            Some(status) => Got::Failed(format!("{} ({code} {})", status.message, status.reason)),
            None => Got::Failed(foreign(code, body)),
        };
    }
    let Ok(object) = serde_json::from_slice::<PodObject>(body) else {
        return Got::Failed(foreign(code, body));
    };
    let meta = &object.metadata;
    let asked_for = meta.name.as_deref() == Some(&*pod.name) && meta.namespace.as_deref() == Some(&*pod.namespace);
    if !asked_for || meta.uid.as_deref().unwrap_or_default().is_empty() {
        return Got::Failed(foreign(code, body));
    }
    match convert::pod(&object) {
        Ok(pod) => Got::Found(Box::new(pod)),
        Err(error) => Got::Unreadable(error.to_string()),
    }
}

fn status_of(body: &[u8]) -> Option<Status> {
    #[derive(serde::Deserialize)]
    struct StatusKind {
        kind: String,
    }
    let kind: StatusKind = serde_json::from_slice(body).ok()?;
    if kind.kind != "Status" {
        return None;
    }
    serde_json::from_slice(body).ok()
}

/// Report whether a Status means `pods "q" not found` for this pod: its `details` name the pod (apimachinery `errors.NewNotFound`).
fn names_pod(status: &Status, pod: &PodKey) -> bool {
    let details = status.details.as_ref();
    status.reason == "NotFound" && details.is_some_and(|details| details.kind == "pods" && details.name == pod.name)
}

fn foreign(code: u16, body: &[u8]) -> String {
    // A character has at most four bytes.
    let start = String::from_utf8_lossy(body.get(..4 * QUOTED).unwrap_or(body));
    let start: String = start.chars().filter(|c| !c.is_control()).take(QUOTED).collect();
    format!("HTTP {code} with a body that is not from an API server; is there a proxy in between? The body begins with {start:?}")
}

#[cfg(test)]
mod tests {
    use divvy_model::Phase;

    use super::*;

    fn pod() -> PodKey {
        PodKey {
            namespace: "ml".to_owned(),
            name: "q".to_owned(),
        }
    }

    fn not_found(kind: &str, name: &str) -> String {
        format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{kind} \"{name}\" not found","reason":"NotFound","details":{{"name":"{name}","kind":"{kind}"}},"code":404}}"#
        )
    }

    #[test]
    fn a_pod_is_gone_only_when_the_api_server_says_so_of_this_pod() {
        let theirs = not_found("pods", "q");
        let said = "pods \"q\" not found (404 NotFound)".to_owned();
        assert_eq!(posted(404, theirs.as_bytes(), &pod()), Posted::NotFound(said));
        assert_eq!(got(404, theirs.as_bytes(), &pod()), Got::NotFound);
        for body in [
            "404 page not found\n",
            "<html>nginx</html>",
            "",
            "{}",
            "null",
            r#"{"message":"no route","reason":"NotFound"}"#,
            r#"{"kind":"Status","status":"Failure","reason":"NotFound","code":404}"#,
            r#"{"kind":"Status","status":"Failure","reason":"NotFound","details":{"kind":"pods","#,
            &not_found("pods", "other"),
            &not_found("namespaces", "ml"),
            &not_found("pods", "q").replace("\"reason\":\"NotFound\"", "\"reason\":\"\""),
        ] {
            let outcome = posted(404, body.as_bytes(), &pod());
            assert!(matches!(outcome, Posted::Unknown(_)), "{body}: {outcome:?}");
            let outcome = got(404, body.as_bytes(), &pod());
            assert!(matches!(outcome, Got::Failed(_)), "{body}: {outcome:?}");
        }
    }

    /// A foreign answer is one that no API server sends.
    #[test]
    fn a_foreign_answer_leaves_a_binding_unknown() {
        let ok = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}"#;
        assert_eq!(posted(201, ok.as_bytes(), &pod()), Posted::Created);
        for (code, body) in [
            (200, "<html>login</html>"),
            (200, "{}"),
            (201, ""),
            (201, "{\"kind\":\"Status\",\"status\":\"Suc"),
            (302, ""),
            (400, "Bad Request: Client sent an HTTP request to an HTTPS server"),
            (403, "<html>forbidden</html>"),
            (502, "<html>502 Bad Gateway</html>"),
            (503, ""),
            (504, &"x".repeat(1 << 20)),
        ] {
            let outcome = posted(code, body.as_bytes(), &pod());
            let Posted::Unknown(text) = &outcome else {
                panic!("{code} {body:.40}: {outcome:?}");
            };
            assert!(text.len() < 300 && text.contains(&code.to_string()), "{text}");
        }
        let refused = |code, body: &str| assert!(matches!(posted(code, body.as_bytes(), &pod()), Posted::Refused(_)), "{code}");
        refused(429, "Too many requests, please try again later.");
        refused(
            403,
            r#"{"kind":"Status","status":"Failure","message":"no","reason":"Forbidden","code":403}"#,
        );
        let conflict = r#"{"kind":"Status","status":"Failure","message":"bound","reason":"Conflict","code":409}"#;
        assert_eq!(
            posted(409, conflict.as_bytes(), &pod()),
            Posted::Conflict("bound (409 Conflict)".to_owned())
        );
        assert!(matches!(posted(409, b"proxy", &pod()), Posted::Unknown(_)));
        let failed = r#"{"kind":"Status","status":"Failure","message":"etcd","reason":"InternalError","code":500}"#;
        assert_eq!(
            posted(500, failed.as_bytes(), &pod()),
            Posted::Unknown("etcd (500 InternalError)".to_owned())
        );
    }

    #[test]
    fn a_pod_is_found_only_when_it_is_the_one_that_was_asked_for() {
        let object = |name: &str, uid: &str| {
            format!(
                r#"{{"kind":"Pod","metadata":{{"namespace":"ml","name":"{name}","uid":"{uid}"}},"spec":{{}},"status":{{"phase":"Running"}}}}"#
            )
        };
        match got(200, object("q", "u").as_bytes(), &pod()) {
            Got::Found(found) => assert_eq!((found.uid.as_str(), found.phase), ("u", Phase::Running)),
            other => panic!("{other:?}"),
        }
        let failed = |code, body: &str| {
            let outcome = got(code, body.as_bytes(), &pod());
            assert!(matches!(outcome, Got::Failed(_)), "{code} {body}: {outcome:?}");
        };
        failed(200, &object("other", "u"));
        failed(200, &object("q", ""));
        failed(200, "<html>login</html>");
        failed(200, "{}");
        failed(200, &object("q", "u")[..60]);
        failed(502, "");
        let unreadable = r#"{"metadata":{"namespace":"ml","name":"q","uid":"u"},"spec":{"containers":[{"name":"a","resources":{"limits":{"aliyun.com/gpu-mem":"3 GiB"}}}]}}"#;
        assert!(matches!(got(200, unreadable.as_bytes(), &pod()), Got::Unreadable(_)));
    }

    #[test]
    fn a_name_that_could_be_another_path_is_not_sent() {
        assert_eq!(path(&pod()).as_deref(), Ok("/api/v1/namespaces/ml/pods/q"));
        for name in ["", "..", "a/b", "a?b", "a%2fb", "a#", "a b", "ä", &"a".repeat(254)] {
            let of = |namespace: &str, name: &str| {
                path(&PodKey {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                })
            };
            assert!(of("ml", name).is_err() && of(name, "q").is_err(), "{name}");
        }
    }
}
