//! The rights of users, and the API server's reviews of users.

use divvy_testbed::api::Right;

use super::*;

const NAMESPACED: &str = "/api/v1/namespaces/ml/pods";

async fn as_user(api: &ApiServer, user: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let bearer = format!("Bearer {user}");
    let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
    request(api, method, path, &headers, body).await
}

fn with_a_limited_user() -> ApiServer {
    let api = server();
    api.create("namespaces", json!({"metadata": {"name": "ml"}})).unwrap();
    let mut mine = pod("mine");
    mine["metadata"]["namespace"] = json!("ml");
    api.create("pods", mine).unwrap();
    api.rights()
        .grant("ann", Right::new(&["get", "list"], "pods").in_namespace("ml"));
    api.rights().grant("ann", Right::new(&["get"], "nodes").named("n1"));
    api
}

/// Every other request is refused in upstream's words.
#[tokio::test]
async fn a_limited_user_has_only_its_granted_rights() {
    let api = with_a_limited_user();
    for (path, code, words) in [
        (NAMESPACED, 200, ""),
        (&format!("{NAMESPACED}/mine"), 200, ""),
        (
            "/api/v1/pods",
            403,
            r#"pods is forbidden: User "ann" cannot list resource "pods" in API group "" at the cluster scope"#,
        ),
        (
            "/api/v1/namespaces/default/pods/x",
            403,
            r#"pods "x" is forbidden: User "ann" cannot get resource "pods" in API group "" in the namespace "default""#,
        ),
        (
            "/api/v1/namespaces/ml/pods/mine/status",
            403,
            r#"pods "mine" is forbidden: User "ann" cannot get resource "pods/status" in API group "" in the namespace "ml""#,
        ),
        ("/api/v1/nodes/n1", 404, r#"nodes "n1" not found"#),
        (
            "/api/v1/nodes",
            403,
            r#"nodes is forbidden: User "ann" cannot list resource "nodes" in API group "" at the cluster scope"#,
        ),
        (
            "/apis/apps/v1/daemonsets",
            403,
            r#"daemonsets.apps is forbidden: User "ann" cannot list resource "daemonsets" in API group "apps" at the cluster scope"#,
        ),
        ("/version", 200, ""),
    ] {
        let (found, answer) = as_user(&api, "ann", "GET", path, &Value::Null).await;
        assert_eq!(found, code, "{path}: {answer}");
        if code != 200 {
            assert_eq!(answer["message"], words, "{path}");
        }
        assert_ne!(
            as_user(&api, "bob", "GET", path, &Value::Null).await.0,
            403,
            "bob has no limits: {path}"
        );
    }
}

#[tokio::test]
async fn reviews_tell_whose_a_token_is_and_what_a_user_may_do() {
    let api = with_a_limited_user();
    let tokens = "/apis/authentication.k8s.io/v1/tokenreviews";
    let accesses = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    api.rights().revoke_token("old");
    for (token, authenticated) in [("ann", true), ("old", false)] {
        let (code, answer) = as_user(&api, "", "POST", tokens, &json!({"spec": {"token": token}})).await;
        assert_eq!(
            (code, &answer["status"]["authenticated"]),
            (201, &json!(authenticated)),
            "{answer}"
        );
        assert_eq!(answer["status"]["user"]["username"].as_str(), authenticated.then_some("ann"));
    }
    assert_eq!(as_user(&api, "", "POST", tokens, &json!({"spec": {}})).await.0, 422);
    assert_eq!(
        as_user(&api, "old", "GET", NAMESPACED, &Value::Null).await.0,
        401,
        "the token is not valid"
    );
    for (attributes, allowed) in [
        (
            json!({"verb": "get", "resource": "pods", "namespace": "ml", "name": "mine"}),
            true,
        ),
        (
            json!({"verb": "get", "resource": "pods", "namespace": "default", "name": "mine"}),
            false,
        ),
        (json!({"verb": "list", "resource": "pods"}), false),
        (json!({"verb": "get", "resource": "nodes", "name": "n1"}), true),
    ] {
        let spec = json!({"user": "ann", "groups": ["system:authenticated"], "resourceAttributes": attributes});
        let (code, answer) = as_user(&api, "", "POST", accesses, &json!({"spec": spec})).await;
        assert_eq!((code, &answer["status"]["allowed"]), (201, &json!(allowed)), "{answer}");
        let own = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let (_, answer) = as_user(&api, "ann", "POST", own, &json!({"spec": {"resourceAttributes": attributes}})).await;
        assert_eq!(answer["status"]["allowed"], json!(allowed), "{answer}");
    }
    let whoever = json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}});
    assert_eq!(as_user(&api, "", "POST", accesses, &whoever).await.0, 422);
    let (code, answer) = as_user(&api, "ann", "POST", tokens, &json!({"spec": {"token": "bob"}})).await;
    assert_eq!(code, 403, "{answer}");
    let (_, answer) = as_user(
        &api,
        "ann",
        "POST",
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        &json!({}),
    )
    .await;
    assert_eq!(answer["status"]["userInfo"]["username"], "ann");
}
