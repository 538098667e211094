//! Faults on request, from the clients' point of view.

use std::time::Duration;

use divvy_testbed::api::{Effect, FaultRule, Match};
use kube::api::{ListParams, PostParams};

use super::*;

fn broken<T: std::fmt::Debug>(result: kube::Result<T>) -> String {
    match result {
        Err(kube::Error::Service(why)) => why.to_string(),
        other => panic!("expected a broken connection, got {other:?}"),
    }
}

#[tokio::test]
async fn refusals_come_as_often_as_asked_and_are_counted() {
    let api = server();
    for (code, reason) in [
        (409, "Conflict"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ] {
        let effect = Effect::Refuse(code);
        let creations = Match::any().verb("create").resource("pods");
        let rule = api.faults().add(FaultRule::new(creations, effect).times(2));
        let dry = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let mut codes = Vec::new();
        for _ in 0..5 {
            codes.push(match pods(&api).create(&dry, &typed(pod("p"))).await {
                Ok(_) => 200,
                Err(kube::Error::Api(status)) => {
                    assert_eq!(status.reason, reason);
                    status.code
                }
                Err(other) => panic!("{other}"),
            });
        }
        assert_eq!(codes, [code, code, 200, 200, 200]);
        assert_eq!(
            (api.faults().fired(rule), api.faults().remove(rule), api.faults().fired(rule)),
            (2, 2, 0)
        );
    }
}

#[tokio::test]
async fn rules_choose_by_resource_name_and_client() {
    let api = server();
    let refuse = || Effect::Refuse(500);
    api.faults()
        .add(FaultRule::new(Match::any().resource("pods/binding"), refuse()));
    api.faults()
        .add(FaultRule::new(Match::any().name("web-*").verb("get"), refuse()));
    api.faults()
        .add(FaultRule::new(Match::any().client("agent-*").namespace("default"), refuse()));
    api.create("pods", pod("web-1")).unwrap();
    api.create("pods", pod("db")).unwrap();
    let agent: Api<Pod> = Api::namespaced(api.client_as("agent-n1"), "default");
    let other: Api<Pod> = Api::namespaced(api.client_as("extender"), "default");
    assert_eq!(refusal(agent.get("db").await).0, 500);
    assert!(other.get("db").await.is_ok());
    assert_eq!(refusal(other.get("web-1").await).0, 500);
    assert!(other.list(&ListParams::default()).await.is_ok());
    let binding = json!({"metadata": {"name": "db"}, "target": {"name": "n"}});
    let bound = other
        .create_subresource::<Value, Value>("binding", "db", &PostParams::default(), &binding)
        .await;
    assert_eq!(refusal(bound).0, 500);
    api.faults().clear();
    assert!(agent.get("web-1").await.is_ok());
}

#[tokio::test]
async fn a_lost_answer_was_done_and_a_lost_request_was_not() {
    let api = server();
    let lose = |effect| api.faults().add(FaultRule::new(Match::any().verb("create"), effect).times(1));
    lose(Effect::LoseAnswer);
    assert!(broken(pods(&api).create(&PostParams::default(), &typed(pod("a"))).await).contains("connection reset"));
    assert!(api.get("pods", "default", "a").is_ok());
    lose(Effect::LoseRequest);
    broken(pods(&api).create(&PostParams::default(), &typed(pod("b"))).await);
    assert!(api.get("pods", "default", "b").is_err());
}

#[tokio::test(start_paused = true)]
async fn latency_and_hanging_take_the_time_of_the_clock() {
    let api = server();
    api.faults().add(FaultRule::new(
        Match::any().verb("list"),
        Effect::Latency(Duration::from_secs(3)),
    ));
    let start = tokio::time::Instant::now();
    pods(&api).list(&ListParams::default()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(3));

    let hang = api.faults().add(FaultRule::new(Match::any().verb("get"), Effect::Hang));
    let hanging = tokio::spawn({
        let pods = pods(&api);
        async move { pods.get("p").await }
    });
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(!hanging.is_finished());
    api.faults().remove(hang);
    broken(hanging.await.unwrap());
}

#[tokio::test]
async fn chances_repeat_with_their_seed() {
    let run = |seed: u64| async move {
        let api = server();
        let effect = Effect::Refuse(500);
        let rule = api.faults().add(FaultRule::new(Match::any(), effect).chance(30, seed));
        let mut refused = Vec::new();
        for _ in 0..200 {
            refused.push(pods(&api).list(&ListParams::default()).await.is_err());
        }
        assert_eq!(
            api.faults().fired(rule),
            refused.iter().filter(|refused| **refused).count() as u64
        );
        refused
    };
    let (first, again, other) = (run(7).await, run(7).await, run(8).await);
    assert_eq!(first, again);
    assert_ne!(first, other);
    let count = first.iter().filter(|refused| **refused).count();
    assert!((40..80).contains(&count), "about 30 of 100: {count} of 200");
}
