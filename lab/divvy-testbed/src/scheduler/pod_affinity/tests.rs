//! Cases of upstream's `plugins/interpodaffinity/filtering_test.go`.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::super::cases::{ClusterBuilder, labels, pod};
use super::*;

const FITS: &str = "";

/// Return a term about the label `service` with one of these values.
fn term(key: &str, values: &[&str], more: Value) -> Value {
    let mut whole = json!({"topologyKey": key,
        "labelSelector": {"matchExpressions": [{"key": "service", "operator": "In", "values": values}]}});
    for (field, value) in more.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    whole
}

fn near(of: &str, terms: &[Value]) -> Pod {
    pod(
        "p",
        of,
        json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}),
    )
}

fn away(of: &str, terms: &[Value]) -> Pod {
    pod(
        "p",
        of,
        json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}),
    )
}

fn in_namespace(mut pod: Pod, namespace: &str) -> Pod {
    pod.metadata.namespace = Some(namespace.to_owned());
    pod
}

/// Return two nodes of one region, each in its own zone, and one node without either label.
fn nodes() -> ClusterBuilder {
    ClusterBuilder::default()
        .node("n1", "region=r1,zone=z1")
        .node("n2", "region=r1,zone=z2")
        .node("n3", "hostname=n3")
}

/// Cases of `TestRequiredAffinitySingleNode` and `TestRequiredAffinityMultipleNodes`.
#[test]
fn all_affinity_terms_must_match_in_the_domain() {
    let web = |key| term(key, &["web"], json!(null));
    let db = |key| term(key, &["db"], json!(null));
    let [one, none] = [[FITS, AFFINITY, AFFINITY], [AFFINITY; 3]];
    for (case, terms, bound, expected) in [
        ("no pods", vec![web("zone")], vec![], none),
        ("in the zone", vec![web("zone")], vec![("n1", "service=web")], one),
        (
            "in the region",
            vec![web("region")],
            vec![("n1", "service=web")],
            [FITS, FITS, AFFINITY],
        ),
        ("other labels", vec![web("zone")], vec![("n1", "service=db")], none),
        (
            "one pod for two terms",
            vec![web("zone"), db("region")],
            vec![("n1", "service=web")],
            none,
        ),
        (
            "two pods for two terms",
            vec![web("zone"), db("region")],
            vec![("n1", "service=web"), ("n2", "service=db")],
            none,
        ),
        (
            "the pod's node lacks the key",
            vec![web("zone")],
            vec![("n3", "service=web")],
            none,
        ),
        (
            "a node that is not there",
            vec![web("zone")],
            vec![("n9", "service=web")],
            none,
        ),
    ] {
        let cluster = bound.iter().fold(nodes(), |cluster, (node, of)| cluster.has(node, of));
        cluster.check(&near("", &terms), &expected, case);
    }
    // A pod must match all terms to count for any of them.
    let both = term(
        "region",
        &["web"],
        json!({"labelSelector": {"matchLabels": {"tier": "front"}}}),
    );
    let cluster = nodes().has("n1", "service=web,tier=front");
    cluster.check(&near("", &[web("zone"), both]), &one, "one pod that matches both");
}

/// The rule at the end of `satisfyPodAffinity`.
#[test]
fn the_first_of_pods_that_want_to_be_together_is_placed() {
    let web = term("zone", &["web"], json!(null));
    let first = near("service=web", std::slice::from_ref(&web));
    nodes().check(&first, &[FITS, FITS, AFFINITY], "the first");
    nodes()
        .has("n2", "service=web")
        .check(&first, &[AFFINITY, FITS, AFFINITY], "the second");
    nodes().check(
        &near("service=db", std::slice::from_ref(&web)),
        &[AFFINITY; 3],
        "it does not match itself",
    );
    let two = [web.clone(), term("zone", &["db"], json!(null))];
    nodes().check(&near("service=web", &two), &[AFFINITY; 3], "it does not match all its terms");
    nodes()
        .has("n3", "service=web")
        .check(&first, &[FITS, FITS, AFFINITY], "one without the key is none");
    let elsewhere = near("service=web", &[term("zone", &["web"], json!({"namespaces": ["elsewhere"]}))]);
    nodes().check(&elsewhere, &[AFFINITY; 3], "its own namespace is not meant");
}

/// One matching term of the pod is enough.
#[test]
fn a_pod_avoids_domains_of_its_anti_affinity() {
    let web = |key| term(key, &["web"], json!(null));
    let db = |key| term(key, &["db"], json!(null));
    let cluster = nodes().has("n1", "service=web").has("n3", "service=db");
    for (case, terms, expected) in [
        ("the zone", vec![web("zone")], [ANTI_AFFINITY, FITS, FITS]),
        ("the region", vec![web("region")], [ANTI_AFFINITY, ANTI_AFFINITY, FITS]),
        (
            "any of two terms",
            vec![web("zone"), db("hostname")],
            [ANTI_AFFINITY, FITS, ANTI_AFFINITY],
        ),
        ("a key that no node has", vec![web("rack")], [FITS; 3]),
    ] {
        cluster.check(&away("service=web", &terms), &expected, case);
    }
}

/// Symmetry: `satisfyExistingPodsAntiAffinity`.
#[test]
fn a_pod_avoids_domains_of_others_anti_affinity() {
    let shy = away("service=shy", &[term("region", &["web"], json!(null))]);
    let cluster = nodes().holds("n2", shy);
    cluster.check(&pod("p", "service=web", json!({})), &[EXISTING, EXISTING, FITS], "meant");
    cluster.check(&pod("p", "service=db", json!({})), &[FITS; 3], "not meant");
    let other = in_namespace(pod("p", "service=web", json!({})), "elsewhere");
    cluster.check(&other, &[FITS; 3], "in another namespace");
    // The reasons of the pod's own rules come first, its affinity before its anti-affinity.
    let terms = json!([term("zone", &["web"], json!(null))]);
    let both = json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}});
    cluster.check(
        &pod("p", "service=web", both),
        &[EXISTING, EXISTING, AFFINITY],
        "n3 has no zone",
    );
    let cluster = cluster.has("n1", "service=web");
    let own = away("service=web", &[term("zone", &["web"], json!(null))]);
    cluster.check(&own, &[ANTI_AFFINITY, EXISTING, FITS], "its own before others'");
}

#[test]
fn pods_that_are_being_deleted_count() {
    let mut ending = pod("", "service=web", json!({}));
    ending.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-11-01T10:00:00Z")).expect("time"));
    let cluster = nodes().holds("n1", ending);
    let web = term("zone", &["web"], json!(null));
    cluster.check(&near("", std::slice::from_ref(&web)), &[FITS, AFFINITY, AFFINITY], "affinity");
    cluster.check(&away("", &[web]), &[ANTI_AFFINITY, FITS, FITS], "anti-affinity");
}

/// `TestGetTPMapMatchingIncomingAffinityAntiAffinity` and the cases with `NamespaceSelector` upstream.
/// The namespaces that the term lists are meant, too.
#[test]
fn a_term_means_its_own_or_selected_namespaces() {
    let cluster = nodes()
        .namespace("default", "")
        .namespace("team1", "team=one")
        .namespace("team2", "team=two")
        .holds("n1", in_namespace(pod("", "service=web", json!({})), "team1"));
    let team = |team: &str| json!({"namespaceSelector": {"matchLabels": {"team": team}}});
    let with = |more: Value, namespaces: &[&str]| {
        let mut more = more;
        more["namespaces"] = json!(namespaces);
        more
    };
    let [found, lost] = [[FITS, AFFINITY, AFFINITY], [AFFINITY; 3]];
    for (more, expected) in [
        (json!(null), lost),
        (json!({"namespaces": ["team1"]}), found),
        (json!({"namespaces": ["team2"]}), lost),
        (json!({"namespaces": []}), lost),
        (json!({"namespaceSelector": null}), lost),
        (json!({"namespaceSelector": {}}), found),
        (team("one"), found),
        (team("two"), lost),
        (with(team("two"), &["team1"]), found),
        (with(team("one"), &["team2"]), found),
        (with(team("two"), &["default"]), lost),
        (
            json!({"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}}),
            found,
        ),
    ] {
        cluster.check(
            &near("", &[term("zone", &["web"], more.clone())]),
            &expected,
            &more.to_string(),
        );
        // The same applies in reverse: terms of other pods about this pod.
        let mut shy = nodes();
        shy.namespaces.clone_from(&cluster.namespaces);
        let shy = shy.holds("n1", away("", &[term("zone", &["web"], more.clone())]));
        let placed = in_namespace(pod("p", "service=web", json!({})), "team1");
        let expected = if expected == found {
            [EXISTING, FITS, FITS]
        } else {
            [FITS; 3]
        };
        shy.check(&placed, &expected, &format!("existing: {more}"));
    }
}

#[test]
fn a_namespace_selector_does_not_mean_the_own_namespace_too() {
    let cluster = nodes().namespace("default", "").has("n1", "service=web");
    let other = json!({"namespaceSelector": {"matchLabels": {"team": "one"}}});
    let pod = near("", &[term("zone", &["web"], other)]);
    cluster.check(&pod, &[AFFINITY; 3], "default is not of the team");
    let cluster = nodes().namespace("default", "team=one").has("n1", "service=web");
    cluster.check(&pod, &[FITS, AFFINITY, AFFINITY], "it is");
}

/// The labels of the namespace are unknown. A pod's own selectors are converted into lists of known namespaces, so they do not
/// include it. The selectors of other pods find no labels in it to match.
#[test]
fn only_an_empty_selector_has_an_unknown_namespace() {
    let lost = in_namespace(pod("p", "service=web", json!({})), "unknown");
    let not_one = json!({"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["one"]}]}});
    let all = json!({"namespaceSelector": {}});
    for (more, own, others) in [(&all, FITS, EXISTING), (&not_one, AFFINITY, EXISTING)] {
        let cluster = nodes().holds("n1", lost.clone());
        cluster.check(
            &near("", &[term("zone", &["web"], more.clone())]),
            &[own, AFFINITY, AFFINITY],
            &more.to_string(),
        );
        let shy = nodes().holds("n1", away("", &[term("zone", &["web"], more.clone())]));
        shy.check(&lost, &[others, FITS, FITS], &format!("existing: {more}"));
    }
}

#[test]
fn match_and_mismatch_label_keys_compare_with_the_owners_labels() {
    let cluster = nodes().has("n1", "service=web,hash=1").has("n2", "service=web,hash=2");
    let same = [term("zone", &["web"], json!({"matchLabelKeys": ["hash", "absent"]}))];
    let other = [term("zone", &["web"], json!({"mismatchLabelKeys": ["hash", "absent"]}))];
    cluster.check(&near("hash=2", &same), &[AFFINITY, FITS, AFFINITY], "same");
    cluster.check(&near("hash=2", &other), &[FITS, AFFINITY, AFFINITY], "other");
    cluster.check(&away("hash=2", &other), &[ANTI_AFFINITY, FITS, FITS], "away from others");
    let shy = nodes().holds("n1", away("hash=1", &other));
    shy.check(&pod("p", "service=web,hash=1", json!({})), &[FITS; 3], "the owner's own kind");
    shy.check(
        &pod("p", "service=web,hash=2", json!({})),
        &[EXISTING, FITS, FITS],
        "another kind",
    );
}

/// Without a selector, no pod is meant.
#[test]
fn an_empty_label_selector_means_every_pod() {
    let cluster = nodes().has("n1", "service=web");
    let by = |selector: Value| {
        [term(
            "zone",
            &[],
            json!({"labelSelector": selector, "matchLabelKeys": ["service"]}),
        )]
    };
    cluster.check(&away("service=web", &by(json!(null))), &[FITS; 3], "absent");
    cluster.check(&away("service=web", &by(json!({}))), &[ANTI_AFFINITY, FITS, FITS], "empty");
    cluster.check(&away("service=db", &by(json!({}))), &[FITS; 3], "empty, and a key");
    assert_eq!(labels(""), ObjectLabels::new());
}
