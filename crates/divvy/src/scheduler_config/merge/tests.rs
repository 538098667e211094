use super::super::{API_VERSION, LOCAL_URL};
use super::*;

/// A configuration from gpushare's tutorials, in any version.
fn tutorial(version: &str) -> String {
    format!(
        "# the tutorial's\napiVersion: kubescheduler.config.k8s.io/{version}\nkind: KubeSchedulerConfiguration\n\
         clientConnection:\n  kubeconfig: /etc/kubernetes/scheduler.conf\nextenders:\n\
         - urlPrefix: \"http://127.0.0.1:32766/gpushare-scheduler\"\n  filterVerb: filter\n  bindVerb: bind\n  enableHTTPS: false\n\
         \x20 nodeCacheCapable: true\n  managedResources:\n  - name: aliyun.com/gpu-mem\n    ignoredByScheduler: false\n  ignorable: false\n"
    )
}

const BUSY: &str = include_str!("busy.yaml");
const POLICY: &str = r#"{"kind":"Policy","apiVersion":"v1","extenders":[{"urlPrefix":"http://127.0.0.1:32766/gpushare-scheduler",
"filterVerb":"filter","bindVerb":"bind","enableHttps":false,"nodeCacheCapable":true,"httpTimeout":20000000000,
"managedResources":[{"name":"aliyun.com/gpu-mem","ignoredByScheduler":false}],"ignorable":false}],"hardPodAffinitySymmetricWeight":10}"#;

fn wanted() -> WantedSettings {
    WantedSettings {
        stanza: Stanza::new(LOCAL_URL, Tls::default()).expect("an address"),
        address: ExtenderAddressSource::Default,
        kubeconfig: None,
        default_kubeconfig: "/etc/kubernetes/scheduler.conf".to_owned(),
        profile: None,
    }
}

fn merged(input: &str) -> Merged {
    merge(input, "old.yaml", &wanted()).unwrap_or_else(|error| panic!("{error}"))
}

fn value(merged: &Merged) -> Value {
    serde_saphyr::from_str(&merged.text).expect("it is YAML")
}

fn refused(input: &str, part: &str) {
    let error = merge(input, "old.yaml", &wanted()).expect_err(input).to_string();
    assert!(error.contains(part), "{error}");
    assert!(
        error.contains("old.yaml") && error.to_lowercase().contains("nothing was written"),
        "{error}"
    );
}

#[test]
fn mig_resources_are_added_and_survive_another_merge() {
    let resources = |merged: &Merged| -> Vec<String> {
        let list = value(merged)["extenders"][0]["managedResources"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let names = list.iter().filter_map(|resource| resource["name"].as_str());
        names.filter(|name| name.contains("mig")).map(str::to_owned).collect()
    };
    let with = |profiles: &[&str], input: &str| {
        let mut wanted = wanted();
        wanted.stanza = wanted
            .stanza
            .with_mig(profiles.iter().map(|profile| profile.parse().expect("a profile")));
        merge(input, "old.yaml", &wanted).expect("merged")
    };
    let first = with(&["1g.10gb+me", "3g.20gb"], &tutorial("v1"));
    assert_eq!(resources(&first), ["nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-3g.20gb"]);
    let second = with(&["2g.10gb"], &first.text);
    assert_eq!(
        resources(&second),
        [
            "nvidia.com/mig-1g.10gb.me",
            "nvidia.com/mig-2g.10gb",
            "nvidia.com/mig-3g.20gb"
        ]
    );
    assert_eq!(merged(&second.text).text, second.text);
}

#[test]
fn the_tutorials_file_of_every_version_becomes_the_same_v1() {
    let expected = value(&merged(&tutorial("v1")));
    for (version, without) in [("v1beta2", "1.28"), ("v1beta3", "1.29")] {
        let found = merged(&tutorial(version));
        assert_eq!(value(&found), expected, "{version}");
        let first = &found.notes[0];
        assert!(
            first.contains(&format!("/{version} to {API_VERSION}: Kubernetes {without} no longer reads")),
            "{first}"
        );
    }
}

#[test]
fn a_busy_file_keeps_what_is_in_it() {
    let found = merged(BUSY);
    insta::assert_snapshot!(format!("{}\n---\n{}", found.notes.join("\n"), found.text));
}

#[test]
fn merging_a_file_for_a_new_cluster_changes_nothing() {
    let stanza = wanted().stanza;
    let fresh = WholeConfig {
        stanza: &stanza,
        kubeconfig: Some("/etc/kubernetes/scheduler.conf"),
        profile: "default-scheduler",
        lease: None,
    }
    .text();
    let again = merged(&fresh);
    assert_eq!(value(&again), serde_saphyr::from_str::<Value>(&fresh).expect("YAML"));
    let said: Vec<_> = again.notes.iter().filter(|note| !note.starts_with("kept")).collect();
    assert_eq!(said, ["unchanged: the file already contains what Divvy needs"]);
}

#[test]
fn merging_twice_is_merging_once() {
    for input in [
        BUSY,
        POLICY,
        &tutorial("v1"),
        &tutorial("v1beta2"),
        "kind: KubeSchedulerConfiguration\napiVersion: kubescheduler.config.k8s.io/v1\n",
    ] {
        let once = merged(input);
        let twice = merged(&once.text);
        assert_eq!(once.text, twice.text);
        assert!(
            twice.notes.iter().any(|note| note.starts_with("unchanged")),
            "{:?}",
            twice.notes
        );
        assert!(
            !twice
                .notes
                .iter()
                .any(|note| note.starts_with("changed") || note.starts_with("removed") || note.starts_with("added"))
        );
    }
}

#[test]
fn policy_files_of_old_tutorials_keep_their_extenders() {
    let found = merged(POLICY);
    let file = value(&found);
    assert_eq!(file["apiVersion"], API_VERSION);
    assert_eq!(file["extenders"][0]["urlPrefix"], LOCAL_URL);
    assert_eq!(file["extenders"][0].get("enableHttps"), None);
    assert_eq!(file["profiles"][0]["pluginConfig"][0]["args"]["hardPodAffinityWeight"], 10);
    assert!(
        found.notes[0].contains("Kubernetes 1.23 removed --policy-config-file"),
        "{:?}",
        found.notes
    );
}

#[test]
fn another_extenders_timeout_in_nanoseconds_becomes_a_duration() {
    let found = merged(
        r#"{"kind":"Policy","apiVersion":"v1","extenders":[{"urlPrefix":"http://h/x","filterVerb":"f","httpTimeout":1500000000}]}"#,
    );
    assert_eq!(value(&found)["extenders"][0]["httpTimeout"], "1500ms");
}

#[test]
fn what_v1_has_not_and_cannot_be_left_out_is_refused() {
    let with = |version: &str, rest: &str| {
        format!("apiVersion: kubescheduler.config.k8s.io/{version}\nkind: KubeSchedulerConfiguration\n{rest}")
    };
    let most = "profiles: [{plugins: {score: {enabled: [{name: NodeResourcesMostAllocated}]}}}]\n";
    refused(&with("v1beta2", most), "scoringStrategy: {type: MostAllocated}");
    refused(
        &with("v1beta2", "profiles: [{pluginConfig: [{name: NodeLabel, args: {}}]}]\n"),
        "node affinity",
    );
    refused(
        r#"{"kind":"Policy","predicates":[{"name":"PodFitsResources"}]}"#,
        "remove predicates",
    );
    refused(
        r#"{"kind":"Policy","priorities":[{"name":"LeastRequestedPriority","weight":1}]}"#,
        "remove priorities",
    );
    // Disabling a plugin that no longer exists has no effect.
    let off = merged(&with(
        "v1beta2",
        "profiles: [{plugins: {score: {disabled: [{name: NodePreferAvoidPods}]}}}]\n",
    ));
    assert!(
        off.notes.iter().any(|note| note.contains("nothing to turn off")),
        "{:?}",
        off.notes
    );
}

#[test]
fn other_files_are_named_for_what_they_are() {
    refused("a: [b", "line ");
    refused(
        "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nkind: X\n",
        "line 3",
    );
    refused("[]", "not a list of fields");
    refused("", "not a list of fields");
    refused("a: 1", "without kind");
    refused("apiVersion: v1\nkind: Pod\n", "the file that its --config names");
    refused("apiVersion: v1\nkind: ConfigMap\n", "from its data");
    refused(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\n",
        "extraArgs",
    );
    for version in ["v1alpha1", "v1beta1", "v2"] {
        refused(&tutorial(version), "scheduler-configuration-migrations");
    }
}

#[test]
fn an_extender_that_cannot_stay_beside_ours_is_named() {
    let with = |rest: &str| format!("apiVersion: {API_VERSION}\nkind: KubeSchedulerConfiguration\nextenders:{rest}\n");
    refused(
        &with("\n- {urlPrefix: http://h/x, bindVerb: bind}"),
        "two extenders that bind",
    );
    let both =
        "\n- {urlPrefix: http://h/x, filterVerb: f, managedResources: [{name: aliyun.com/gpu-mem}, {name: example.com/x}]}";
    refused(&with(both), "only one extender");
    refused(&with(" yes"), "not a list");
}

#[test]
fn certificates_in_the_file_stay_and_no_key_is_told() {
    let old = format!(
        "apiVersion: {API_VERSION}\nkind: KubeSchedulerConfiguration\nextenders:\n- {{urlPrefix: https://h/gpushare-scheduler, enableHTTPS: true, \
         tlsConfig: {{caData: AAAA, certData: BBBB, keyData: CCCC, serverName: x}}}}\n"
    );
    let found = merged(&old);
    assert_eq!(
        value(&found)["extenders"][0]["tlsConfig"],
        serde_json::json!({"caData": "AAAA", "certData": "BBBB", "keyData": "CCCC", "serverName": "x"})
    );
    let tls = Tls {
        inline: Some(Inline {
            ca: "DDDD".to_owned(),
            cert: "EEEE".to_owned(),
            key: "FFFF".to_owned(),
        }),
        ..Tls::default()
    };
    let other = WantedSettings {
        stanza: Stanza::new("https://10.0.0.7:1/gpushare-scheduler", tls).expect("an address"),
        address: ExtenderAddressSource::Cluster,
        ..wanted()
    };
    let found = merge(&old, "old.yaml", &other).expect("it merges");
    assert_eq!(value(&found)["extenders"][0]["tlsConfig"]["keyData"], "FFFF");
    let told = found.notes.join("\n");
    assert!(
        told.contains("tlsConfig") && !told.contains("FFFF") && !told.contains("CCCC"),
        "{told}"
    );
}

#[test]
fn the_address_stays_unless_another_is_asked_for() {
    let old = tutorial("v1").replace("127.0.0.1", "10.0.0.9");
    assert_eq!(
        value(&merged(&old))["extenders"][0]["urlPrefix"],
        "http://10.0.0.9:32766/gpushare-scheduler"
    );
    for (address, why) in [
        (ExtenderAddressSource::Flag, ": from --extender-url"),
        (
            ExtenderAddressSource::Cluster,
            ": the address of the installed extender (--from-cluster)",
        ),
    ] {
        let other = WantedSettings { address, ..wanted() };
        let found = merge(&old, "old.yaml", &other).expect("it merges");
        assert_eq!(value(&found)["extenders"][0]["urlPrefix"], LOCAL_URL);
        let note = format!("changed: extenders[0].urlPrefix http://10.0.0.9:32766/gpushare-scheduler to {LOCAL_URL}{why}");
        assert!(found.notes.contains(&note), "{note}: {:?}", found.notes);
        // A second merge keeps the address, and names its source again.
        let kept = merge(&found.text, "new.yaml", &other).expect("it merges");
        let why = match address {
            ExtenderAddressSource::Cluster => "it is the address of the installed extender",
            _ => "--extender-url changes it",
        };
        let note = format!("kept: extenders[0].urlPrefix {LOCAL_URL}; {why}");
        assert!(kept.notes.contains(&note), "{note}: {:?}", kept.notes);
    }
    // An old entry with another URL path counts as Divvy's entry because of its resource, but its address is not kept.
    let nowhere = tutorial("v1").replace("/gpushare-scheduler", "/elsewhere");
    assert_eq!(value(&merged(&nowhere))["extenders"][0]["urlPrefix"], LOCAL_URL);
    let files =
        "\n- urlPrefix: https://h/gpushare-scheduler\n  enableHTTPS: true\n  tlsConfig: {caFile: /ca, serverName: extender}\n";
    let kept = merged(&format!(
        "apiVersion: {API_VERSION}\nkind: KubeSchedulerConfiguration\nextenders:{files}"
    ));
    assert_eq!(
        value(&kept)["extenders"][0]["tlsConfig"],
        json!({"caFile": "/ca", "serverName": "extender"})
    );
}

#[test]
fn a_second_entry_for_the_same_resource_goes() {
    let (head, entry) = tutorial("v1")
        .split_once("extenders:\n")
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .expect("extenders");
    let found = merged(&format!("{head}extenders:\n{entry}{entry}"));
    assert_eq!(value(&found)["extenders"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_field_that_no_scheduler_knows_is_warned_of() {
    let found = merged(&format!(
        "apiVersion: {API_VERSION}\nkind: KubeSchedulerConfiguration\nParallelism: 3\nextenders: [{{urlPrefix: http://h, filterverb: f}}]\n"
    ));
    for part in [
        "did you mean parallelism?",
        "extenders[0].filterverb",
        "did you mean filterVerb?",
    ] {
        assert!(
            found
                .notes
                .iter()
                .any(|note| note.starts_with("warning") && note.contains(part)),
            "{part}: {:?}",
            found.notes
        );
    }
}

#[test]
fn a_profile_that_is_asked_for_is_there() {
    let profile = |name: &str| WantedSettings {
        profile: Some(name.to_owned()),
        ..wanted()
    };
    let names =
        |wanted: &WantedSettings, input: &str| value(&merge(input, "old.yaml", wanted).expect("it merges"))["profiles"].clone();
    let mine =
        format!("apiVersion: {API_VERSION}\nkind: KubeSchedulerConfiguration\nprofiles: [{{percentageOfNodesToScore: 5}}]\n");
    assert_eq!(
        names(&profile("default-scheduler"), &mine),
        json!([{"percentageOfNodesToScore": 100}])
    );
    assert_eq!(
        names(&profile("gpu"), &mine),
        json!([{"percentageOfNodesToScore": 100}, {"schedulerName": "gpu"}])
    );
}

#[test]
fn strings_that_yaml_would_take_for_something_else_stay_strings() {
    let odd = [
        "yes",
        "on",
        "null",
        "~",
        "1e3",
        "0x10",
        "010",
        "12:30",
        "- a",
        "a: b",
        "# c",
        " d ",
        "*e",
        "&f",
        "!g",
        "%h",
        "@i",
        "\u{e9}\n\tj",
    ];
    let profiles: Vec<Value> = odd.iter().map(|name| json!({ "schedulerName": name })).collect();
    let input = json!({"apiVersion": API_VERSION, "kind": "KubeSchedulerConfiguration", "profiles": profiles});
    assert_eq!(value(&merged(&input.to_string()))["profiles"], input["profiles"]);
}

/// A weight that had no effect is replaced with our weight.
#[test]
fn only_a_weight_that_counted_is_kept() {
    let with = |more: &str| tutorial("v1").replace("  bindVerb: bind\n", &format!("  bindVerb: bind\n{more}"));
    for (more, weight) in [
        ("", 25),
        ("  weight: 1\n", 25),
        ("  prioritizeVerb: prioritize\n  weight: 11\n", 11),
        ("  prioritizeVerb: prioritize\n  weight: 0\n", 25),
    ] {
        assert_eq!(value(&merged(&with(more)))["extenders"][0]["weight"], weight, "{more:?}");
    }
}
