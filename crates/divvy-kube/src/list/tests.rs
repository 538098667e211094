use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::script::ScriptedServer;

fn pod(number: usize) -> Value {
    json!({"metadata": {"name": format!("pod-{number:05}"), "namespace": "ns", "uid": format!("u-{number}")}, "spec": {}})
}

/// The defect of every thousandth pod.
fn broken(number: usize) -> Option<Value> {
    (number % 1000 == 7).then(|| {
        let mut pod = pod(number);
        match number / 1000 % 3 {
            0 => pod["spec"] = json!(5),
            1 => pod["spec"] = json!({"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "3X"}}}]}),
            _ => pod["metadata"] = json!("none"),
        }
        pod
    })
}

fn page(numbers: std::ops::Range<usize>, next: &str) -> String {
    let items: Vec<Value> = numbers.map(|number| broken(number).unwrap_or_else(|| pod(number))).collect();
    json!({"kind": "PodList", "items": items, "metadata": {"resourceVersion": "9", "continue": next}}).to_string()
}

async fn names(script: &ScriptedServer) -> (Result<LeftOut, Error>, Vec<String>) {
    let mut names = Vec::new();
    let read = |object: PodObject| pod_of(object).map(|pod| pod.name);
    let client = script.client();
    let all = each_pod(&client, None, read, |name| names.push(name));
    let all = tokio::time::timeout(Duration::from_secs(600), all).await;
    (all.expect("an end"), names)
}

/// Objects that cannot be read are named.
#[tokio::test]
async fn a_long_list_is_handed_over_in_order() {
    for part in [1000, 70_000, usize::MAX] {
        let script = ScriptedServer::default()
            .then_in_parts(page(0..2500, "more"), part)
            .then_in_parts(page(2500..3500, ""), part);
        let (left_out, names) = names(&script).await;
        let left_out = left_out.expect("a list");
        let expected = (0..3500).filter(|number| broken(*number).is_none());
        let expected: Vec<String> = expected.map(|number| format!("pod-{number:05}")).collect();
        let differ = names.iter().zip(&expected).position(|(is, should)| is != should);
        assert_eq!((differ, names.len()), (None, expected.len()), "in parts of {part}");
        insta::allow_duplicates! {
            insta::assert_debug_snapshot!(left_out, @r#"
            LeftOut {
                named: [
                    (
                        "ns/pod-00007",
                        "invalid type: integer `5`, expected struct PodSpec",
                    ),
                    (
                        "ns/pod-01007",
                        "aliyun.com/gpu-mem: in container c of pod pod-01007: quantity: \"3X\" has an unknown suffix",
                    ),
                    (
                        "item 2008",
                        "invalid type: string \"none\", expected struct Meta",
                    ),
                    (
                        "ns/pod-03007",
                        "invalid type: integer `5`, expected struct PodSpec",
                    ),
                ],
                more: 0,
            }
            "#);
        }
    }
}

#[tokio::test]
async fn a_wrong_or_cut_list_fails_at_once() {
    let whole = page(0..3000, "");
    let cut = whole.len() - 100;
    let cases = [
        ("a page that ends too soon", ScriptedServer::default().then(&whole[..cut])),
        (
            "a second page that ends too soon",
            ScriptedServer::default().then(page(0..3000, "more")).then(&whole[..cut]),
        ),
        (
            "an HTML page, from a server that keeps the connection open",
            ScriptedServer::default().then_stays_open("<html>502 Bad Gateway</html>"),
        ),
        (
            "text that is not JSON in the middle of a list",
            ScriptedServer::default().then_stays_open(format!("{}, <html>", &whole[..whole.find("]").unwrap_or(0)])),
        ),
        ("a refusal", ScriptedServer::default().then_status(403, "no")),
    ];
    let mut said = String::new();
    for (case, script) in cases {
        let (outcome, _) = names(&script).await;
        said += &format!("{case}: {}\n", outcome.expect_err(case));
    }
    insta::assert_snapshot!(said, @r"
    a page that ends too soon: the pods could not be listed: the answer ended after 226898 bytes, in the middle of the list
    a second page that ends too soon: the pods could not be listed: the answer ended after 226898 bytes, in the middle of the list
    an HTML page, from a server that keeps the connection open: the pods could not be listed: the answer is not JSON: expected value (byte 0)
    text that is not JSON in the middle of a list: the pods could not be listed: the answer is not JSON: expected value (byte 75448)
    a refusal: the pods could not be listed: no (403 Failed to parse error data)
    ");
}

#[tokio::test(start_paused = true)]
async fn the_right_to_list_needs_no_whole_list() {
    let beginning = &page(0..100, "")[..500];
    let client = ScriptedServer::default()
        .then_stays_open(beginning)
        .then_stays_open(beginning)
        .client();
    let checked = tokio::time::timeout(Duration::from_secs(60), can_list(&client)).await;
    checked.expect("an end").expect("a right");

    let forbidden = r#"{"kind":"Status","code":403,"reason":"Forbidden","message":"pods is forbidden"}"#;
    let client = ScriptedServer::default()
        .then_stays_open(beginning)
        .then_status(403, forbidden)
        .client();
    let error = can_list(&client).await.expect_err("no right");
    assert!(error.is_forbidden(), "{error}");
    assert_eq!(
        error.to_string(),
        "the pods could not be listed: pods is forbidden (403 Forbidden)"
    );

    // A server that is no API server.
    let client = ScriptedServer::default().then("<html>Welcome</html>").client();
    let error = can_list(&client).await.expect_err("no list").to_string();
    assert!(error.contains("the nodes could not be listed"), "{error}");
}
