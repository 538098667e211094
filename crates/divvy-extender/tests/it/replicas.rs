//! Several replicas, only one of which binds: first the core, then replicas over real connections with the embedded API server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use divvy_extender::core::{CoreTiming, ExtenderAction, ExtenderCore, Got, Posted};
use divvy_extender::election::Rules;
use divvy_extender::{ExtenderSurroundings, LeaseCandidate, run_with};
use divvy_model::MemoryUnit;
use divvy_testbed::api::{ApiServer, Effect, FaultRule, Match};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::server::{bind_args, create_pod, settings};
use crate::tls::{
    Running, as_nobody, as_scheduler, ask, cluster, connect, get, request, secret_source, stored, until, until_made,
};
use crate::values::*;

#[test]
fn who_does_not_lead_binds_nothing_and_says_so() {
    let q = pod("q", 4);
    let mut core = synced(&[gpushare_node("n1", 16, 1)], std::slice::from_ref(&q));
    assert_eq!(core.stand_by(), []);
    let error = one_refusal(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert!(error.contains("is not the leader"), "{error}");
    assert_eq!(core.filter(&q, ["n1"]).expect("it filters").passed, [0]);
}

/// The list must begin after the election.
#[test]
fn a_new_leader_lists_again_before_it_binds() {
    let (q, r) = (pod("q", 8), pod("r", 8));
    let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    core.index_mut().reset_nodes(&[gpushare_node("n1", 8, 1)]);
    core.index_mut().reset_pods(vec![q.clone(), r.clone()]);
    core.stand_by();
    assert!(core.elected());
    assert!(!core.elected(), "once");
    // A list that was under way before the election.
    core.pods_listed(at(10));
    let error = one_refusal(core.begin_bind(args(&r, "n1"), at(5_000)).1);
    assert!(error.contains("just become the leader"), "{error}");
    core.await_list();
    one_answer(core.begin_bind(args(&r, "n1"), at(5_000)).1).expect_err("not listed yet");
    // The list shows which pods the last leader has bound. Then the settle second begins.
    core.index_mut().reset_pods(vec![gpushare_pod("q", "n1", 0, 4), r.clone()]);
    core.pods_listed(at(6_000));
    let (op, _, pause) = one_get(core.begin_bind(args(&r, "n1"), at(6_100)).1);
    assert_eq!(pause, 900 * MS);
    // A Binding that the last leader had sent is carried out in that second.
    core.index_mut().apply_pod(gpushare_pod("q", "n1", 0, 8));
    let error = one_refusal(core.got(op, found(&r), at(7_000)));
    assert!(error.contains("0 of 8192 MiB free"), "{error}");
}

/// The former leader still finds out what became of the requests that it had sent.
#[test]
fn losing_the_lease_ends_sending() {
    let (q, r, s) = (pod("q", 4), pod("r", 4), pod("s", 4));
    let mut core = synced(&[gpushare_node("n1", 16, 1)], &[q.clone(), r.clone(), s.clone()]);
    let (posting, binding) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(core.begin_bind(args(&r, "n1"), at(1)).1, [], "it waits for the node");
    let error = one_refusal(core.stand_by());
    assert!(error.contains("is not the leader"), "{error}");
    assert!(core.in_doubt());
    // The answer to the POST is lost: the pod is read, and is bound.
    let (op, ..) = one_get(core.posted(posting, Posted::Unknown("reset".to_owned()), at(2)));
    assert_eq!(
        one_answer(core.got(op, Got::Found(Box::new(bound(&q, &binding))), at(3))),
        Ok(())
    );
    assert!(!core.in_doubt());
    // A bind that had begun when the lease ended, before the POST was sent: nothing stays reserved.
    let mut core = synced(&[gpushare_node("n1", 16, 1)], std::slice::from_ref(&s));
    let (op, _) = one_post(core.begin_bind(args(&s, "n1"), at(0)).1);
    assert_eq!(free(&core, "n1"), [12]);
    let error = one_refusal(core.posted(op, Posted::NotSent("lost".to_owned()), at(1)));
    assert!(error.contains("is not bound: lost"), "{error}");
    assert_eq!(free(&core, "n1"), [16]);
    assert!(!core.in_doubt());
    assert!(
        !matches!(core.sweep(at(10_000))[..], [ExtenderAction::Check { .. }]),
        "nothing to be looked after"
    );
}

/// A tenth of the real durations.
const RULES: Rules = Rules {
    lease_ns: 1_500_000_000,
    hold_ns: 1_000_000_000,
    retry_ns: 200_000_000,
};

struct Replica {
    running: Running,
    stop: CancellationToken,
    ended: JoinHandle<Result<(), divvy_extender::Error>>,
}

async fn replica(api: &ApiServer, name: &str) -> Replica {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address: SocketAddr = listener.local_addr().expect("bound");
    let stop = CancellationToken::new();
    let surroundings = ExtenderSurroundings {
        tls: Some(secret_source(3_600)),
        lease: Some(LeaseCandidate {
            namespace: "divvy-system".to_owned(),
            name: "divvy-extender".to_owned(),
            replica: name.to_owned(),
            address,
            rules: RULES,
        }),
        ..ExtenderSurroundings::default()
    };
    let ended = tokio::spawn(run_with(
        listener,
        api.client_as(name),
        settings(),
        surroundings,
        stop.clone(),
    ));
    until_made(api).await;
    Replica {
        running: Running::new(address, stop.clone()),
        stop,
        ended,
    }
}

impl Replica {
    async fn metric(&self, api: &ApiServer, name: &str) -> Option<u64> {
        let (_, text) = get(&self.running, as_nobody(&stored(api)), "/metrics").await.ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    async fn leads(&self, api: &ApiServer) -> bool {
        self.metric(api, "divvy_extender_leads").await == Some(1)
    }

    async fn bind(&self, api: &ApiServer, pod: &Value) -> String {
        let mut scheduler = connect(&self.running, as_scheduler(&stored(api)))
            .await
            .expect("a connection");
        let text = request("POST", "/gpushare-scheduler/bind", &bind_args(pod, "n1").to_string());
        let (_, body) = ask(&mut scheduler, &text).await.expect("an answer");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["Error"].as_str().expect("always there").to_owned()
    }

    /// Bind repeatedly until it succeeds, as kube-scheduler does.
    async fn binds(&self, api: &ApiServer, pod: &Value) {
        until("it is bound", async || (self.bind(api, pod).await.is_empty()).then_some(())).await;
    }
}

async fn leader(api: &ApiServer, replicas: &[&Replica]) -> usize {
    until("one leads", async || {
        for (i, replica) in replicas.iter().enumerate() {
            if replica.leads(api).await {
                return Some(i);
            }
        }
        None
    })
    .await
}

fn bound_pods(api: &ApiServer) -> usize {
    let pods = api.list("pods", "default").expect("pods");
    pods.iter().filter(|pod| pod["spec"]["nodeName"] == "n1").count()
}

/// The other replica takes over when the lease is released.
#[tokio::test]
async fn one_replica_binds_and_the_other_hands_on() {
    let api = cluster();
    let (a, b) = (replica(&api, "a").await, replica(&api, "b").await);
    let first = leader(&api, &[&a, &b]).await;
    let (leader, other) = if first == 0 { (a, b) } else { (b, a) };
    let (p, q, r) = (create_pod(&api, "p", 2), create_pod(&api, "q", 2), create_pod(&api, "r", 2));
    leader.binds(&api, &p).await;
    until("the other replica knows the leader", async || {
        other.bind(&api, &q).await.is_empty().then_some(())
    })
    .await;
    assert!(!other.leads(&api).await);
    assert_eq!(
        other.metric(&api, "divvy_extender_binds_total{outcome=\"bound\"}").await,
        Some(0)
    );
    assert_eq!(
        leader.metric(&api, "divvy_extender_binds_total{outcome=\"bound\"}").await,
        Some(2)
    );
    let (_, ready) = get(&other.running, as_nobody(&stored(&api)), "/readyz")
        .await
        .expect("an answer");
    assert!(ready.contains("@https://127.0.0.1:"), "{ready}");
    // A replica that forwards gets a forwarded bind: it does not forward it again.
    let mut scheduler = connect(&other.running, as_scheduler(&stored(&api)))
        .await
        .expect("a connection");
    let body = bind_args(&r, "n1").to_string();
    let circle = format!(
        "POST /gpushare-scheduler/bind HTTP/1.1\r\nhost: x\r\ndivvy-forwarded-by: z\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let (_, said) = ask(&mut scheduler, &circle).await.expect("an answer");
    assert!(
        said.contains("is not the leader") && said.contains("https://127.0.0.1:"),
        "{said}"
    );
    drop(scheduler);

    let began = Instant::now();
    leader.stop.cancel();
    leader.ended.await.expect("no panic").expect("it ends well");
    let lease = api
        .get("leases.coordination.k8s.io", "divvy-system", "divvy-extender")
        .expect("there");
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    assert!(holder.is_empty() || holder.contains("@https"), "released: {lease}");
    other.binds(&api, &r).await;
    assert!(
        began.elapsed() < Duration::from_nanos(RULES.lease_ns),
        "no lease had to end: {:?}",
        began.elapsed()
    );
    assert_eq!(bound_pods(&api), 3);
}

#[tokio::test]
async fn an_elected_replica_learns_what_its_watch_missed() {
    let api = cluster();
    let a = replica(&api, "a").await;
    assert_eq!(leader(&api, &[&a]).await, 0);
    let b = replica(&api, "b").await;
    let data = stored(&api);
    until("b has listed", async || {
        let (status, _) = get(&b.running, as_nobody(&data), "/readyz").await.ok()?;
        status.contains("200").then_some(())
    })
    .await;
    // From here on, b receives no events of pods and cannot list them.
    let broken = ["watch", "list"].map(|verb| {
        api.faults().add(FaultRule::new(
            Match::any().verb(verb).resource("pods").client("b"),
            Effect::Refuse(500),
        ))
    });
    api.faults().cut_watches();
    let (p, q) = (create_pod(&api, "p", 16), create_pod(&api, "q", 16));
    a.binds(&api, &p).await;
    a.stop.cancel();
    a.ended.await.expect("no panic").expect("it ends well");
    until("b leads", async || b.leads(&api).await.then_some(())).await;
    let error = b.bind(&api, &q).await;
    assert!(
        error.contains("just become the leader"),
        "it knows that it does not know: {error}"
    );
    for rule in broken {
        api.faults().remove(rule);
    }
    let error = until("b has listed", async || {
        Some(b.bind(&api, &q).await).filter(|error| !error.contains("just become the leader"))
    })
    .await;
    assert!(error.contains("0 of 16384 MiB free"), "{error}");
    assert_eq!(bound_pods(&api), 1);
}

#[tokio::test]
async fn a_leader_stops_before_losing_its_lease() {
    let api = cluster();
    let a = replica(&api, "a").await;
    assert_eq!(leader(&api, &[&a]).await, 0);
    let p = create_pod(&api, "p", 2);
    a.binds(&api, &p).await;
    let rule = FaultRule::new(
        Match::any()
            .verb("update")
            .verb("get")
            .resource("leases.coordination.k8s.io")
            .client("a"),
        Effect::Refuse(500),
    );
    let rule = api.faults().add(rule);
    until("it no longer leads", async || (!a.leads(&api).await).then_some(())).await;
    let q = create_pod(&api, "q", 2);
    let error = a.bind(&api, &q).await;
    assert!(
        error.contains("no replica of Divvy's extender") || error.contains("is not the leader"),
        "{error}"
    );
    assert_eq!(bound_pods(&api), 1);
    // Another replica takes the lease over after a whole lease time. Then the first one forwards binds.
    let b = replica(&api, "b").await;
    assert_eq!(leader(&api, &[&b]).await, 0);
    api.faults().remove(rule);
    a.binds(&api, &q).await;
    assert!(!a.leads(&api).await && b.leads(&api).await);
}

/// The replica says why it is not ready.
#[tokio::test]
async fn a_replica_denied_the_lease_is_not_ready() {
    let api = cluster();
    let rule = FaultRule::new(Match::any().resource("leases.coordination.k8s.io"), Effect::Refuse(403));
    let rule = api.faults().add(rule);
    let a = replica(&api, "a").await;
    let ready = async || get(&a.running, as_nobody(&stored(&api)), "/readyz").await.ok();
    let said = until("it has tried", async || {
        ready().await.filter(|(_, text)| text.contains("cannot be read or written"))
    })
    .await;
    assert!(said.0.contains("503"), "{said:?}");
    let p = create_pod(&api, "p", 2);
    let error = a.bind(&api, &p).await;
    assert!(error.contains("the lease cannot be read or written"), "{error}");
    api.faults().remove(rule);
    until("it leads", async || a.leads(&api).await.then_some(())).await;
    until("it is ready", async || {
        ready().await.filter(|(status, _)| status.contains("200"))
    })
    .await;
}
