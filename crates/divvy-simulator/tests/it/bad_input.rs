//! Tests that errors in input files say what is wrong and how to fix it.

use std::io::Write as _;

use divvy_policy::Policy;
use divvy_simulator::{Order, Trace, inflate};

const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\nn0,8000,1024,2,T4\nn1,8000,1024,1,A10\n";
const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\na,1000,1,1,500,\nb,1000,1,2,1000,T4\n";

fn refused(nodes: &str, pods: &str) -> String {
    Trace::read(nodes.as_bytes(), pods.as_bytes())
        .expect_err("must be refused")
        .to_string()
}

/// The message says what is expected.
#[test]
fn an_unreadable_list_is_refused_with_its_line() {
    let pods = |rows: &str| format!("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n{rows}");
    for (nodes, pods, expected) in [
        (
            "sn,cpu_milli\nn0,1\n".to_owned(),
            PODS.to_owned(),
            "the node list: CSV deserialize error: record 1 (line: 2, byte: 13): missing field `memory_mib`",
        ),
        (
            NODES.to_owned(),
            pods(""),
            "the pod list: it has no rows; it needs the columns of openb's pod lists: name,",
        ),
        (NODES.to_owned(), pods("a,1,1,one,1000\n"), "num_gpu"),
        (
            NODES.to_owned(),
            pods("a,1,1,1,1001\n"),
            "the pod list, pod a: gpu_milli is 1001; a part of a GPU is 1 to 1000",
        ),
        (
            NODES.to_owned(),
            pods("a,1,1,4,500\n"),
            "the pod list, pod a: gpu_milli is 500 with 4 GPUs; with several GPUs it must be 1000",
        ),
        (
            format!("{NODES}n2,1,1,17,T4\n"),
            PODS.to_owned(),
            "the node list, node n2: 17 GPUs; at most 16",
        ),
    ] {
        let found = refused(&nodes, &pods);
        assert!(found.contains(expected), "found    {found}\nexpected {expected}");
    }
}

#[test]
fn a_list_may_be_compressed_and_a_torn_one_is_refused() {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(NODES.as_bytes()).expect("memory");
    let packed = packed.finish().expect("memory");
    let trace = Trace::read(&packed, PODS.as_bytes()).expect("a trace");
    assert_eq!(trace, Trace::read(NODES.as_bytes(), PODS.as_bytes()).expect("a trace"));
    let torn = Trace::read(&packed[..packed.len() / 2], PODS.as_bytes())
        .expect_err("torn")
        .to_string();
    assert!(
        torn.starts_with("the node list cannot be decompressed") && torn.contains("gzip -t"),
        "{torn}"
    );
}

#[test]
fn an_order_of_another_trace_is_refused() {
    let trace = Trace::read(NODES.as_bytes(), PODS.as_bytes()).expect("a trace");
    for (text, expected) in [
        ("0 1", "it has no line with the ranks"),
        ("0 x\n0 1", "\"x\" among the arrivals is not a number"),
        ("0 2\n0 1", "row 2 shall arrive, but the pod list has 2 rows (0 to 1)"),
        ("0 1\n0", "it ranks 1 nodes, but the node list has 2"),
    ] {
        let error = Order::read(text.as_bytes(), &trace).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A pod that requests a GPU model is placed only on that model.
#[test]
fn every_pod_is_placed_or_counted_as_failed() {
    let trace = Trace::read(NODES.as_bytes(), PODS.as_bytes()).expect("a trace");
    let order = Order::read(b"0 1 1 0", &trace).expect_err("no ranks").to_string();
    assert!(order.contains("two lines of numbers"), "{order}");
    let order = Order {
        arrivals: vec![1, 1, 0, 0],
        ranks: Order::ranks_by_name(&trace),
    };
    for policy in Policy::ALL {
        let run = inflate(&trace, &order, policy);
        // Only n0 has T4s, two of them. The A10 takes both halves.
        assert_eq!((run.placed, run.failed, run.used_milli), (3, 1, 3000), "{policy}");
        assert_eq!(run.first_failure_milli, Some(4000), "{policy}");
    }
}
