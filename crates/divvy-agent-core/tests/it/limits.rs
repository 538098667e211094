//! How a pod is held to its shares before its container starts, and what follows if that fails.

use divvy_agent_core::{AgentAction, LimitError, LimitStep, NOT_LIMITED, NotLimited, PreStart, ResourceSpec, WithoutLimit};
use divvy_model::ContainerKind::App;
use divvy_model::{Enforcement, Isolation};

use crate::calls::{guarding_node, isolated};
use crate::node::Node;

/// Return a node on which both the driver and the guard enforce shares, and the steps for a pod on it.
fn steps(enforcement: Enforcement, isolation: Option<Isolation>) -> (Node, Vec<LimitStep>) {
    let mut node = guarding_node();
    node.set_enforcement(0, Some(enforcement));
    node.see(isolated("a", isolation, &[("main", App, 3)]));
    node.admit("a").expect("admitted");
    let PreStart::Granted { actions, .. } = node.pre_start("a", "main") else {
        panic!("granted");
    };
    let limits = actions
        .into_iter()
        .skip_while(|action| !matches!(action, AgentAction::Limit(_)));
    let limits = limits.map(|action| match action {
        AgentAction::Limit(limit) => limit,
        other => panic!("{other:?} comes after the limits"),
    });
    let limits = limits.collect();
    (node, limits)
}

fn not_done() -> LimitError {
    LimitError::NotDone("no permission".to_owned())
}

#[test]
fn the_guards_files_are_made_before_the_driver_is_asked() {
    let (_, steps) = steps(Enforcement::CGROUP.and(Enforcement::GUARD), None);
    assert!(
        matches!(&steps[..], [LimitStep::Mount(share), LimitStep::Files { .. }, LimitStep::Driver { .. }] if (share.pod(), share.gpu()) == ("a", "GPU-0")),
        "{steps:?}"
    );
}

#[test]
fn without_its_driver_limit_a_pod_waits_or_starts_with_an_event() {
    let both = Enforcement::CGROUP.and(Enforcement::GUARD);
    for (enforcement, isolation, expected) in [
        (Enforcement::CGROUP, None, "an event of the pod"),
        (Enforcement::CGROUP, Some(Isolation::Soft), "waits"),
        (Enforcement::CGROUP, Some(Isolation::Hard), "waits"),
        (both, None, "logged"),
        (both, Some(Isolation::Soft), "logged"),
        (both, Some(Isolation::Hard), "waits"),
    ] {
        let (mut node, steps) = steps(enforcement, isolation);
        let driver = steps.last().expect("the driver is asked");
        let found = match node.core.not_limited(driver, not_done()) {
            WithoutLimit::Refuse(NotLimited::Required(error)) if error == not_done() => "waits",
            WithoutLimit::Warn(pod, text) if pod.name == "pod-a" && text.ends_with("no permission") => "logged",
            WithoutLimit::TellPod(AgentAction::Event { uid, reason, text, .. }) => {
                assert_eq!((uid.as_str(), reason), ("a", NOT_LIMITED));
                assert!(text.starts_with("nothing limits the GPU memory of this pod") && text.ends_with(": no permission"));
                "an event of the pod"
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(found, expected, "{enforcement:?} {isolation:?}");
    }
}

#[test]
fn a_container_waits_until_the_guards_files_are_there() {
    let (mut node, steps) = steps(Enforcement::GUARD, None);
    let [mount, files] = &steps[..] else {
        panic!("{steps:?}");
    };
    let no_answer = || LimitError::NoAnswer("no answer in 2 s".to_owned());
    for (step, error, expected) in [
        (mount, LimitError::NoProbe, "the probe is not connected"),
        (
            mount,
            no_answer(),
            "the probe did not mount a file system for the files with the pod's share of the GPU: no answer in 2 s",
        ),
        (
            files,
            not_done(),
            "the files with the pod's share of the GPU are not complete: no permission",
        ),
    ] {
        match node.core.not_limited(step, error) {
            WithoutLimit::Refuse(why) => assert_eq!(why.to_string(), expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_node_gets_one_event_if_the_guards_files_lie_on_its_disk() {
    let (mut node, steps) = steps(Enforcement::GUARD, None);
    let told = node.core.not_limited(&steps[0], not_done());
    let WithoutLimit::TellNode { reason, text } = &told else {
        panic!("{told:?}");
    };
    assert_eq!(*reason, "GuardFilesOnDisk");
    assert!(text.ends_with(": no permission"), "{text}");
    assert_eq!(node.core.not_limited(&steps[0], not_done()), WithoutLimit::GoOn);
}

#[test]
fn containers_get_no_limits_before_their_pod_has_its_own() {
    let mut node = guarding_node();
    node.set_enforcement(0, Some(Enforcement::CGROUP));
    node.see(isolated("a", None, &[("main", App, 3)]));
    node.admit("a").expect("admitted");
    let (ids, facts) = (node.ids_of("a", "main"), node.facts());
    let PreStart::Granted { actions, .. } = node.core.pre_start(ResourceSpec::MEMORY, &ids, &facts) else {
        panic!("granted");
    };
    let (limits, others): (Vec<_>, Vec<_>) = actions
        .into_iter()
        .partition(|action| matches!(action, AgentAction::Limit(_)));
    node.perform(&others);
    assert_eq!(node.core.limited(), []);
    node.perform(&limits);
    assert_eq!(node.core.limited().len(), 1);
}
