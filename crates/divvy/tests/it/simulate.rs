//! `divvy simulate` as a command, on traces that are small enough to read.

use std::fmt::Write as _;
use std::fs;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use serde_json::{Value, json};

use crate::cli::{beside, divvy, stderr, stdout};

/// A directory with a list of nodes and a list of pods, on which commands are run.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir().expect("a directory"));
        files.write("nodes.csv", &nodes(0..30));
        files.write("pods.csv", &pods(0..180));
        files
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.at(name), text).expect("written");
        self.at(name)
    }

    fn simulate(&self, args: &[&str]) -> std::process::Output {
        let (nodes, pods) = (self.at("nodes.csv"), self.at("pods.csv"));
        divvy(&[&["simulate", "--nodes", &nodes, "--pods", &pods], args].concat(), &[])
    }

    /// Run a command that must fail, and return its error.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.simulate(args);
        assert!(!output.status.success(), "{args:?}: {}", stdout(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
        stderr(&output).replace(&self.at(""), "")
    }
}

fn nodes(rows: impl Iterator<Item = usize>) -> String {
    let mut text = "sn,cpu_milli,memory_mib,gpu,model\n".to_owned();
    for row in rows {
        let (cpu, gpus, model) = (16_000 + 8000 * (row % 3), 2 + 2 * (row % 4), ["T4", "A10"][row % 2]);
        let _ = writeln!(text, "node-{row:02},{cpu},65536,{gpus},{model}");
    }
    text
}

fn pods(rows: impl Iterator<Item = usize>) -> String {
    let mut text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n".to_owned();
    for row in rows {
        let (gpus, milli) = [(1, 300), (1, 1000), (1, 810), (1, 1000), (0, 0), (2, 1000), (1, 470)][row % 7];
        let (cpu, model) = (1000 * (1 + row % 5), if row % 10 == 0 { "T4|P100" } else { "" });
        let (from, to) = (10 * row, 10 * row + 200 + 50 * (row % 7));
        let _ = writeln!(text, "pod-{row:02},{cpu},1024,{gpus},{milli},{model},{from},{to}");
    }
    text
}

#[test]
fn policies_stand_side_by_side_with_mean_and_spread() {
    let files = Files::new();
    let output = files.simulate(&["--policy", "best-fit,fgd,divvy", "--seeds", "1-3"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "", "no progress without a terminal");
    insta::assert_snapshot!("filling", stdout(&output));
    let output = files.simulate(&[
        "--policy",
        "best-fit,divvy",
        "--seeds",
        "1,2",
        "--load",
        "0.5,1.05",
        "--warm-up",
        "200",
        "--count",
        "500",
    ]);
    insta::assert_snapshot!("loads", stdout(&output));
    let output = files.simulate(&[
        "--policy",
        "best-fit",
        "--arrivals",
        "list",
        "--lifetimes",
        "trace",
        "-o",
        "csv",
    ]);
    insta::assert_snapshot!("replay", stdout(&output));
}

#[test]
fn equal_input_gives_equal_bytes_for_any_jobs() {
    let files = Files::new();
    let output = |jobs: &str, form: &str, more: &[&str]| {
        let args = [
            "--policy",
            "gpu-clustering,fgd,divvy",
            "--seeds",
            "1,2",
            "--jobs",
            jobs,
            "-o",
            form,
        ];
        let output = files.simulate(&[&args[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    for (form, more) in [
        ("json", &["--tune", "0.9"][..]),
        ("table", &["--load", "0.6,1.1", "--warm-up", "20", "--count", "60"]),
    ] {
        let one = output("1", form, more);
        assert!(one.contains("gpu-clustering"));
        assert_eq!(one, output("5", form, more), "{form} {more:?}");
    }
}

#[test]
fn json_has_the_runs_by_the_keys_that_others_read() {
    let files = Files::new();
    let output = files.simulate(&["--policy", "fgd,divvy", "--seeds", "7", "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let runs = answer["runs"].as_array().expect("runs");
    let policies: Vec<_> = runs.iter().map(|run| run["policy"].as_str().expect("a name")).collect();
    assert_eq!(policies, ["fgd", "divvy"]);
    for run in runs {
        assert_eq!(run["seed"], 7);
        for key in ["at95", "at100", "used"] {
            assert!(run[key].as_f64().is_some_and(|at| at > 50.0 && at <= 100.0), "{key} of {run}");
        }
        let [used, placed, failed] = ["used_milli", "placed", "failed"].map(|key| run[key].as_u64().expect(key));
        assert!(used <= answer["capacity_milli"].as_u64().expect("a number"));
        let sizes = run["sizes"].as_array().expect("sizes");
        let sum = |key: &str| sizes.iter().filter_map(|size| size[key].as_u64()).sum::<u64>();
        assert_eq!((sum("asked"), sum("failed")), (placed + failed, failed));
    }
}

#[test]
fn orders_are_read_for_each_seed_or_once() {
    let files = Files::new();
    let ranks = (0..30).map(|rank| rank.to_string()).collect::<Vec<_>>().join(" ");
    for (seed, arrivals) in [(1, "0 1 2 3"), (2, "3 2 1 0 5")] {
        files.write(&format!("order_{seed}.txt"), &format!("{arrivals}\n{ranks}\n"));
    }
    let pattern = files.at("order_{seed}.txt");
    let csv = |args: &[&str]| stdout(&files.simulate(&[args, &["-o", "csv"]].concat()));
    let header = "policy,seed,at95,at100,at130,used_milli,placed,failed,first_failure\n";
    assert_eq!(
        csv(&["--order", &pattern, "--seeds", "2,1"]),
        format!("{header}divvy,2,,,,5110,5,0,\ndivvy,1,,,,3110,4,0,\n")
    );
    assert_eq!(
        csv(&["--order", &files.at("order_2.txt")]),
        format!("{header}divvy,,,,,5110,5,0,\n")
    );
}

#[test]
fn several_clusters_in_one_hold_as_many_times_the_pods() {
    let files = Files::new();
    let args = |times| {
        [
            "--repeat-nodes",
            times,
            "--tune",
            "0.5",
            "--seeds",
            "1",
            "--policy",
            "best-fit",
            "-o",
            "json",
        ]
    };
    let of = |times| -> serde_json::Value { serde_json::from_str(&stdout(&files.simulate(&args(times)))).expect("JSON") };
    let (one, three) = (of("1"), of("3"));
    assert_eq!(3 * one["capacity_milli"].as_u64().expect("a number"), three["capacity_milli"]);
    let used = |of: &serde_json::Value| of["runs"][0]["used_milli"].as_u64().expect("a number");
    assert!(used(&three) > 2 * used(&one));
}

#[test]
fn what_is_wrong_is_said_so_that_it_can_be_mended() {
    let files = Files::new();
    files.write("order.txt", "0 1\n0 1\n");
    let order = files.at("order.txt");
    for (args, expected) in [
        (
            &["--policy", "fdg"][..],
            "there is no policy \"fdg\"; the policies are random, best-fit, ",
        ),
        (&["--seeds", "46-42"], "46-42 ends before it begins; write 42-46"),
        (&["--tune", "0.975"], "with at most two decimals; write 1.3"),
        (&["--tune=-1"], "\"-1\" is not a number above 0"),
        (&["--load", "0"], "\"0\" is not a number above 0"),
        (&["--load", "0.9", "--tune", "1.3"], "--tune is for pods that never end"),
        (&["--load", "0.9", "--order", &order], "--order is for pods that never end"),
        (&["--load", "0.9", "--arrivals", "list"], "omit --load or --arrivals list"),
        (&["--lifetimes", "exp"], "add --load 0.9"),
        (
            &["--lifetimes", "trace", "--seeds", "1"],
            "omit --seeds, or add --arrivals poisson",
        ),
        (&["--order", &order, "--seeds", "1"], "write {seed} in place of the seed"),
        (
            &["--order", &order],
            "order.txt cannot be used: the order file: it ranks 2 nodes, but the node list has 30",
        ),
        (&["--order", "nowhere_{seed}"], "nowhere_42 cannot be read: No such file"),
        (&["--jobs", "0"], "--jobs"),
    ] {
        let found = files.refused(args);
        assert!(found.contains(expected), "{args:?}\nfound    {found}\nexpected {expected}");
    }
    for (name, text, expected) in [
        (
            "pods.csv",
            "name,cpu_milli\n",
            "the pod list: it has no rows; it needs the columns of openb's pod lists: name, cpu_milli",
        ),
        ("pods.csv", "", "the pod list: it has no rows"),
        (
            "pods.csv",
            "name,cpu_milli,memory_mib,num_gpu\na,1,1,1\n",
            "missing field `gpu_milli`",
        ),
        (
            "pods.csv",
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,0,0\n",
            "no pod of the list asks for a GPU",
        ),
        ("pods.csv", "\u{1f}\u{8b}", "the pod list"),
        (
            "nodes.csv",
            "sn,cpu_milli,memory_mib,gpu\na,1,1,0\n",
            "no node of the list has a GPU",
        ),
    ] {
        let files = Files::new();
        files.write(name, text);
        let found = files.refused(&[]);
        assert!(found.contains(expected), "{text:?}\nfound    {found}\nexpected {expected}");
    }
    let files = Files::new();
    fs::write(files.at("pods.csv"), [0x1f, 0x8b, 8, 0, 0]).expect("written");
    let found = files.refused(&[]);
    assert!(
        found.contains("the pod list cannot be decompressed") && found.contains("gzip -t"),
        "{found}"
    );
    files.write("pods.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,500\n");
    let found = files.refused(&["--lifetimes", "trace"]);
    assert!(found.contains("pod a has no times"), "{found}");
}

/// Return the nodes and pods of a small gpushare cluster: two half-full GPUs, and one pod that waits for a whole GPU.
fn cluster() -> Vec<(&'static str, Value)> {
    let node = |name: &str| {
        let has = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "32Gi", "pods": "110"});
        json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}, "spec": {}, "status": {"capacity": has, "allocatable": has}})
    };
    let pod = |name: &str, units: u32, node: Option<&str>, created: u32| {
        let mut annotations = serde_json::Map::new();
        if node.is_some() {
            for (key, value) in [("IDX", "0"), ("POD", &units.to_string()), ("DEV", "16"), ("ASSUME_TIME", "1")] {
                annotations.insert(format!("ALIYUN_COM_GPU_MEM_{key}"), json!(value));
            }
            annotations.insert("ALIYUN_COM_GPU_MEM_ASSIGNED".to_owned(), json!("true"));
        }
        let container =
            json!({"name": "main", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string(), "cpu": "1"}}});
        json!({
            "kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": name, "namespace": "default", "annotations": annotations, "creationTimestamp": format!("2026-01-0{created}T00:00:00Z")},
            "spec": {"nodeName": node, "containers": [container]},
            "status": {"phase": if node.is_some() { "Running" } else { "Pending" }}
        })
    };
    vec![
        ("nodes", node("gpu-1")),
        ("nodes", node("gpu-2")),
        ("pods", pod("serve", 8, Some("gpu-1"), 1)),
        ("pods", pod("notebook", 8, Some("gpu-2"), 2)),
        ("pods", pod("train", 16, None, 3)),
    ]
}

async fn served(objects: &[(&'static str, Value)], directory: &std::path::Path) -> (ApiServer, Listening, String) {
    let api = ApiServer::new(ApiServerOptions::default());
    for (kind, object) in objects {
        api.create(kind, object.clone()).expect("taken");
    }
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.join("kubeconfig");
    fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    (api, listening, path.display().to_string())
}

/// Return the objects as `kubectl get -o json` prints them. The pods have UIDs, as an API server sets them.
fn dump(objects: &[(&'static str, Value)]) -> String {
    let items = objects.iter().enumerate().map(|(number, (_, object))| {
        let mut object = object.clone();
        object["metadata"]["uid"] = json!(format!("uid-{number}"));
        object
    });
    json!({"kind": "List", "apiVersion": "v1", "items": items.collect::<Vec<_>>()}).to_string()
}

#[test]
fn what_if_says_what_would_change_in_a_saved_cluster() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("cluster.json");
    fs::write(&path, dump(&cluster())).expect("written");
    let path = path.display().to_string();
    let simulate = |args: &[&str]| {
        let output = divvy(&[&["simulate", "--cluster-dump", &path], args].concat(), &[]);
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    insta::assert_snapshot!("all_placed_again", simulate(&["--policy", "best-fit,divvy"]));
    insta::assert_snapshot!("one_more_node", simulate(&["--keep-bound", "--add-nodes", "1"]));
    insta::assert_snapshot!("large_units", simulate(&["--unit-mib", "10000"]));
    insta::assert_snapshot!("as_json", simulate(&["-o", "json"]));
    for (args, expected) in [
        (
            &["--add-nodes", "1:gpu-9"][..],
            "there is no node gpu-9 to copy; nodes with GPUs are gpu-1, gpu-2",
        ),
        (&["--add-nodes", "none"], "write 2, or 2:gpu-7"),
        (&["--unit-mib", "0"], "write 256, or 1024 for 1 GiB"),
        (&["--seeds", "1"], "cannot be used with"),
        (&["-o", "csv"], "for a cluster, use -o table or -o json"),
        (&["--cluster-dump", "/nowhere"], "cannot be used"),
    ] {
        let output = divvy(&[&["simulate", "--cluster-dump", &path], args].concat(), &[]);
        assert!(
            !output.status.success() && stderr(&output).contains(expected),
            "{args:?}: {}",
            stderr(&output)
        );
    }
    fs::write(&path, "{\"kind\": \"PodList\", \"items\": []}").expect("written");
    let output = divvy(&["simulate", "--cluster-dump", &path], &[]);
    assert!(
        stderr(&output).contains("it has neither nodes nor pods; create it with: kubectl get nodes,pods -A -o json"),
        "{}",
        stderr(&output)
    );
    let output = divvy(&["simulate"], &[]);
    assert!(stderr(&output).contains("--cluster-dump"), "{}", stderr(&output));
}

#[tokio::test]
async fn what_if_reads_the_cluster_itself_as_well() {
    let directory = tempfile::tempdir().expect("a directory");
    let objects = cluster();
    let (_api, _listening, kubeconfig) = served(&objects, directory.path()).await;
    let path = directory.path().join("cluster.json");
    fs::write(&path, dump(&objects)).expect("written");
    // Without the policy random, which depends on the UIDs; the API server sets other UIDs.
    let args = ["--policy", "best-fit,fgd,divvy", "-o", "json"];
    let saved = divvy(
        &[&["simulate", "--cluster-dump", &path.display().to_string()], &args[..]].concat(),
        &[],
    );
    let live = beside(
        &[&["simulate", "--cluster", "--kubeconfig", &kubeconfig], &args[..]].concat(),
        &[],
    )
    .await;
    assert!(live.status.success(), "{}", stderr(&live));
    let read = |output| serde_json::from_str::<Value>(&stdout(output)).expect("JSON");
    assert_eq!(read(&live), read(&saved));
    assert_eq!(read(&live)["then"][1]["would_fit"], json!(["default/train"]));
}
