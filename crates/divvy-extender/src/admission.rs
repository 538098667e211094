//! The mutating admission webhook that assigns new pods to a second scheduler, for API servers that do not support a
//! MutatingAdmissionPolicy.
//!
//! The API server sends each new pod to this webhook (admission.k8s.io/v1). The webhook answers with a patch of
//! `spec.schedulerName`, or without a patch. This module does no I/O.
//!
//! The rule is the same one that `divvy scheduler-config --as-second-scheduler` prints as CEL for a MutatingAdmissionPolicy; a test of
//! that command compares the two.

use divvy_kube::objects::PodSpec;
use divvy_model::{Vendor, WholeKind, names};
use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Return the extended resources that require scheduling through the extender: gpu-mem, because the ledger counts it; gpu-count,
/// so that the extender can warn that it has no effect; and the resources of whole GPUs.
pub fn managed() -> impl Iterator<Item = &'static str> {
    [names::GPU_MEM, names::GPU_COUNT]
        .into_iter()
        .chain(Vendor::ALL.map(Vendor::whole_resource))
}

/// Report whether the extender places pods that request this resource: one of [`managed`], or the resource of MIG devices of a profile.
pub fn is_managed(resource: &str) -> bool {
    managed().any(|name| name == resource) || WholeKind::of_resource(resource).is_some()
}

/// Return the resources of [`managed`] whose pods are assigned to a second scheduler. Whole GPUs of a vendor whose GPUs Divvy shares by default are not
/// among them: in a cluster with a second scheduler, that vendor's own device plugin usually offers them, and the default
/// scheduler places the pods that request them.
pub fn assigned() -> impl Iterator<Item = &'static str> {
    let shared = |name: &str| {
        let mut vendors = Vendor::ALL.into_iter();
        vendors.any(|vendor| vendor.is_shared_by_default() && vendor.whole_resource() == name)
    };
    managed().filter(move |name| !shared(name))
}

/// The scheduler name that the API server writes into a pod that names no scheduler, before any webhook sees the pod.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Return the path of the webhook that assigns pods to this scheduler.
pub fn path(scheduler: &str) -> String {
    format!("{PATH}/{scheduler}")
}

/// The prefix of the webhook's path; the scheduler's name follows it.
pub(crate) const PATH: &str = "/mutate";

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// A text that cannot be the name of a scheduler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} cannot be the name of a scheduler: use at most 63 lower-case letters, digits and -, with a letter or digit at both ends, such as \
     divvy-scheduler"
)]
pub struct NotASchedulerName(String);

/// Check that a text can be a scheduler's name. It must be a DNS label (RFC 1123), because it becomes part of paths, labels, and object names.
pub fn check_scheduler_name(name: &str) -> Result<(), NotASchedulerName> {
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let bytes = name.as_bytes();
    let inside = bytes
        .iter()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-');
    if bytes.len() <= 63 && inside && edge(bytes.first()) && edge(bytes.last()) {
        return Ok(());
    }
    Err(NotASchedulerName(name.to_owned()))
}

/// Report whether a new pod is assigned to the second scheduler: it requests a resource of [`assigned`], does not name a scheduler, and is not
/// bound.
fn is_to_be_given(spec: &PodSpec) -> bool {
    let names_none = spec
        .scheduler_name
        .as_deref()
        .is_none_or(|name| name.is_empty() || name == DEFAULT_SCHEDULER);
    let bound = spec.node_name.as_ref().is_some_and(|name| !name.is_empty());
    // The resource names decide, whatever the amounts. kube-scheduler decides in the same way whether to call the extender.
    let asks = spec.containers.iter().chain(&spec.init_containers).any(|container| {
        let resources = &container.resources;
        let asked = |name: &&str| resources.limits.contains_key(name) || resources.requests.contains_key(name);
        assigned().any(|name| asked(&name))
    });
    names_none && !bound && asks
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: Option<AdmissionRequest<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a request")]
struct AdmissionRequest<'a> {
    uid: String,
    kind: ReviewedKind,
    operation: String,
    sub_resource: Option<String>,
    #[serde(borrow)]
    object: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(expecting = "a group, a version, and a kind")]
struct ReviewedKind {
    group: String,
    version: String,
    kind: String,
}

#[derive(Deserialize)]
#[serde(expecting = "a pod")]
struct ReviewedPod {
    spec: PodSpec,
}

/// The answer to a review.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionAnswer {
    api_version: &'static str,
    kind: &'static str,
    response: Response,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    /// The JSON patch. It is stored as bytes, so that it is serialized in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
}

impl AdmissionAnswer {
    /// Report whether the answer assigns the pod to the scheduler.
    pub fn gives(&self) -> bool {
        self.response.patch.is_some()
    }
}

/// Why a body is not a review that the webhook answers.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is something else.
    #[error(
        "the body is not an {KIND} of {API_VERSION}: {0}; only the API server calls this path, through a MutatingWebhookConfiguration"
    )]
    NotAReview(serde_json::Error),
    /// The body is of another kind or version.
    #[error(
        "the body is of kind {kind} in {api_version}, but this webhook answers an {KIND} of {API_VERSION}: set admissionReviewVersions: [v1] in the \
         MutatingWebhookConfiguration"
    )]
    OtherKind {
        /// The body's kind.
        kind: String,
        /// The body's version.
        api_version: String,
    },
    /// The review has no request.
    #[error("the {KIND} has no request: it is an answer and not a request")]
    NoRequest,
    /// The review is about a new pod, but contains something else.
    #[error("the object of the {KIND} is not a pod: {0}")]
    NotAPod(serde_json::Error),
    /// The review is about a new pod, but contains no object.
    #[error("the {KIND} is about a new pod but has no object")]
    NoObject,
}

/// Answer an AdmissionReview. Every object is allowed. A new pod that requests a resource of [`assigned`], does not name a
/// scheduler, and is not bound is assigned to `scheduler`.
///
/// # Errors
/// Fails if the body is not an AdmissionReview, or if the object of a review of a new pod is not a pod.
pub fn review(body: &[u8], scheduler: &str) -> Result<AdmissionAnswer, ReviewError> {
    let review: Review<'_> = serde_json::from_slice(body).map_err(ReviewError::NotAReview)?;
    if (review.api_version.as_str(), review.kind.as_str()) != (API_VERSION, KIND) {
        return Err(ReviewError::OtherKind {
            kind: review.kind,
            api_version: review.api_version,
        });
    }
    let request = review.request.ok_or(ReviewError::NoRequest)?;
    let ReviewedKind { group, version, kind } = &request.kind;
    let new_pod = (group.as_str(), version.as_str(), kind.as_str()) == ("", "v1", "Pod")
        && request.operation == "CREATE"
        && request.sub_resource.as_deref().unwrap_or_default().is_empty();
    let given = match request.object {
        Some(object) if new_pod => {
            let pod: ReviewedPod = serde_json::from_str(object.get()).map_err(ReviewError::NotAPod)?;
            is_to_be_given(&pod.spec)
        }
        None if new_pod => return Err(ReviewError::NoObject),
        _ => false,
    };
    // The operation "add" replaces an existing value.
    let patch = given
        .then(|| serde_json::json!([{"op": "add", "path": "/spec/schedulerName", "value": scheduler}]).to_string())
        .map(|text| ByteString(text.into_bytes()));
    Ok(AdmissionAnswer {
        api_version: API_VERSION,
        kind: KIND,
        response: Response {
            uid: request.uid,
            allowed: true,
            patch_type: patch.is_some().then_some("JSONPatch"),
            patch,
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn body(pod: &Value) -> Value {
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "705ab4f5", "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "operation": "CREATE", "userInfo": {"username": "jane"}, "object": pod, "oldObject": null, "dryRun": false
            }
        })
    }

    fn answer(body: &Value) -> Value {
        let answer = review(body.to_string().as_bytes(), "divvy-scheduler").expect("a review");
        serde_json::to_value(answer).expect("JSON")
    }

    fn gives(body: &Value) -> bool {
        let answer = answer(body);
        assert_eq!(answer["response"]["allowed"], true, "{body}");
        let patched = answer["response"].get("patch").is_some();
        assert_eq!(answer["response"].get("patchType").is_some(), patched);
        patched
    }

    fn asking(resources: &Value) -> Value {
        json!({"spec": {"schedulerName": "default-scheduler", "containers": [{"name": "main", "resources": resources}]}})
    }

    /// The pod names neither a scheduler nor a node.
    #[test]
    fn an_undecided_gpu_pod_goes_to_our_scheduler() {
        let mem = json!({"limits": {"aliyun.com/gpu-mem": "3"}});
        let mut cases = vec![
            ("gpu-mem as a limit", asking(&mem), true),
            (
                "as a request",
                asking(&json!({"requests": {"aliyun.com/gpu-mem": "3"}})),
                true,
            ),
            ("gpu-count", asking(&json!({"limits": {"aliyun.com/gpu-count": "1"}})), true),
            ("whole GPUs", asking(&json!({"limits": {"amd.com/gpu": "1"}})), true),
            ("of Intel", asking(&json!({"limits": {"gpu.intel.com/xe": "1"}})), true),
            (
                "none of it, but named",
                asking(&json!({"limits": {"aliyun.com/gpu-mem": "0"}})),
                true,
            ),
            (
                "another resource",
                asking(&json!({"limits": {"nvidia.com/gpu": "1", "cpu": "1"}})),
                false,
            ),
            (
                "a name that begins like it",
                asking(&json!({"limits": {"aliyun.com/gpu-mem-2": "1"}})),
                false,
            ),
            ("nothing", asking(&json!({})), false),
            ("null", asking(&Value::Null), false),
            ("null limits", asking(&json!({"limits": null, "requests": null})), false),
        ];
        for place in ["containers", "initContainers"] {
            for policy in [Value::Null, json!("Always")] {
                let mut pod = asking(&json!({}));
                pod["spec"][place] = json!([{"name": "a"}, {"name": "b", "restartPolicy": policy, "resources": mem}]);
                cases.push(("the second of several, a sidecar too", pod, true));
            }
        }
        for (name, expected) in [
            (json!(""), true),
            (Value::Null, true),
            (json!("divvy-scheduler"), false),
            (json!("mine"), false),
        ] {
            let mut pod = asking(&mem);
            pod["spec"]["schedulerName"] = name;
            cases.push(("another schedulerName", pod, expected));
        }
        for (node, expected) in [(json!(""), true), (json!("n1"), false)] {
            let mut pod = asking(&mem);
            pod["spec"]["nodeName"] = node;
            cases.push(("bound already, as a DaemonSet's was once", pod, expected));
        }
        for (what, pod, expected) in cases {
            assert_eq!(gives(&body(&pod)), expected, "{what}: {pod}");
        }
    }

    #[test]
    fn nothing_but_a_new_pod_is_touched() {
        let pod = asking(&json!({"limits": {"aliyun.com/gpu-mem": "3"}}));
        let check = |pointer: &str, value: Value| {
            let mut body = body(&pod);
            *body.pointer_mut(pointer).expect(pointer) = value;
            assert!(!gives(&body), "{body}");
        };
        assert!(gives(&body(&pod)));
        check("/request/operation", json!("UPDATE"));
        check("/request/operation", json!("DELETE"));
        check(
            "/request/kind",
            json!({"group": "apps", "version": "v1", "kind": "Deployment"}),
        );
        check(
            "/request/kind",
            json!({"group": "example.com", "version": "v1", "kind": "Pod"}),
        );
        let mut binding = body(&pod);
        binding["request"]["subResource"] = json!("binding");
        assert!(!gives(&binding));
    }

    #[test]
    fn the_answer_is_of_the_question_and_patches_one_field() {
        let answer = answer(&body(&asking(&json!({"limits": {"aliyun.com/gpu-mem": "3"}}))));
        assert_eq!((&answer["apiVersion"], &answer["kind"]), (&json!(API_VERSION), &json!(KIND)));
        assert_eq!(answer["response"]["uid"], "705ab4f5");
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
        let patch: ByteString = serde_json::from_value(answer["response"]["patch"].clone()).expect("base64");
        assert_eq!(
            serde_json::from_slice::<Value>(&patch.0).expect("JSON"),
            json!([{"op": "add", "path": "/spec/schedulerName", "value": "divvy-scheduler"}])
        );
    }

    #[test]
    fn what_is_no_review_is_refused_in_words() {
        let check = |body: &str, part: &str| {
            let why = review(body.as_bytes(), "divvy-scheduler").expect_err(body).to_string();
            assert!(why.contains(part), "{body}: {why}");
        };
        check("", "not an AdmissionReview");
        check("[]", "not an AdmissionReview");
        check(r#"{"Pod": {}, "NodeNames": ["n1"]}"#, "not an AdmissionReview");
        check(r#"{"apiVersion": "v1", "kind": "Pod"}"#, "of kind Pod in v1");
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        check(&deep, "not an AdmissionReview");
        let with = |pointer: &str, value: Value| {
            let mut body = body(&asking(&json!({})));
            *body.pointer_mut(pointer).expect(pointer) = value;
            body.to_string()
        };
        check(
            &with("/apiVersion", json!("admission.k8s.io/v1beta1")),
            "admissionReviewVersions: [v1]",
        );
        check(&with("/request", Value::Null), "no request");
        check(&with("/request/uid", Value::Null), "not an AdmissionReview");
        check(&with("/request/object", Value::Null), "has no object");
        check(&with("/request/object", json!({"spec": {"containers": "x"}})), "is not a pod");
        check(&with("/request/object", json!({"metadata": {}})), "is not a pod");
    }

    #[test]
    fn a_schedulers_name_is_a_dns_label() {
        for name in ["divvy-scheduler", "a", "0", &"a".repeat(63)] {
            assert_eq!(check_scheduler_name(name), Ok(()), "{name}");
        }
        for name in ["", "-a", "a-", "a.b", "A", "a_b", "a/b", "ä", "a b", &"a".repeat(64)] {
            assert!(
                check_scheduler_name(name).is_err_and(|why| why.to_string().contains("divvy-scheduler")),
                "{name}"
            );
        }
    }
}
