use divvy_bench::cluster::{ClusterSize, Form, UNITS};
use divvy_kube::convert;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::{Held, MemoryUnit, Phase};
use divvy_placement::{GpuSource, Ledger, Totals};

fn cluster(form: Form) -> ClusterSize {
    ClusterSize {
        nodes: 50,
        gpus: 8,
        pods: 500,
        waiting: 3,
        form,
    }
}

/// In a real cluster, a pod has 3.9 KB, and a node has 8 KB.
#[test]
fn objects_are_as_large_as_those_of_a_real_cluster() {
    let cluster = cluster(Form::Gpushare);
    let mean = |count: usize, object: &dyn Fn(usize) -> serde_json::Value| {
        (0..count).map(|i| object(i).to_string().len()).sum::<usize>() / count
    };
    let (pod, node) = (
        mean(cluster.pods, &|i| cluster.pod(i)),
        mean(cluster.nodes, &|i| cluster.node(i)),
    );
    assert!((3_800..=4_000).contains(&pod), "a pod has {pod} bytes");
    assert!((7_800..=8_200).contains(&node), "a node has {node} bytes");
}

#[test]
fn pods_are_placed_and_no_gpu_is_given_twice_in_either_form() {
    for form in [Form::Gpushare, Form::Divvy] {
        let cluster = cluster(form);
        let mut ledger = Ledger::new(MemoryUnit::GIB);
        for i in 0..cluster.nodes {
            let object: NodeObject = serde_json::from_value(cluster.node(i)).expect("a node");
            ledger.apply_node(&convert::node(&object));
        }
        for i in 0..cluster.pods + cluster.waiting {
            let object: PodObject = serde_json::from_value(cluster.pod(i)).expect("a pod");
            let pod = convert::pod(&object).expect("readable");
            let bound = i < cluster.pods;
            assert_eq!(pod.node.is_some(), bound, "{}", pod.name);
            assert_eq!(pod.phase == Phase::Running, bound, "{}", pod.name);
            match (form, bound) {
                (_, false) => assert_eq!(pod.held, Held::Nothing),
                (Form::Gpushare, true) => assert!(matches!(pod.held, Held::Legacy(_)), "{:?}", pod.held),
                (Form::Divvy, true) => assert!(matches!(pod.held, Held::Allocation(_)), "{:?}", pod.held),
            }
            assert!(ledger.apply_pod(pod));
        }
        let nodes = cluster.nodes as u64;
        let expected = match form {
            Form::Gpushare => Totals {
                division: nodes,
                ..Totals::default()
            },
            Form::Divvy => Totals {
                inventory: nodes,
                ..Totals::default()
            },
        };
        assert_eq!(ledger.totals(), expected, "{form:?}");
        for view in ledger.nodes() {
            let state = view.state().expect("a node that was seen");
            assert_ne!(state.source, GpuSource::Unusable(divvy_placement::UnusableGpus::NotShared));
            assert_eq!(state.gpus.len(), cluster.gpus);
            assert!(state.gpus.iter().all(|gpu| gpu.units == UNITS), "{form:?}");
            assert_eq!(view.pods().count(), cluster.pods / cluster.nodes);
        }
    }
}

/// Each object has a name of its own.
#[test]
fn the_same_numbers_give_the_same_objects() {
    let cluster = cluster(Form::Divvy);
    let all = || {
        let pods = (0..cluster.pods + cluster.waiting).map(|i| cluster.pod(i).to_string());
        let nodes = (0..cluster.nodes).map(|i| cluster.node(i).to_string());
        pods.chain(nodes).collect::<Vec<String>>()
    };
    assert_eq!(all(), all());
    for i in 0..cluster.pods + cluster.waiting {
        let pod = cluster.pod(i);
        assert_eq!(
            cluster.pod_position(pod["metadata"]["name"].as_str().expect("a name")),
            Some(i)
        );
    }
    for i in 0..cluster.nodes {
        assert_eq!(cluster.node_position(&ClusterSize::name(i)), Some(i));
    }
    assert_eq!(cluster.node_position(&ClusterSize::name(cluster.nodes)), None);
    assert_eq!(cluster.pod_position("trainer-7c9d8b6f5d-503"), None);
    assert_eq!(cluster.pod_position("somebody-else-1"), None);
}
