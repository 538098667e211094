//! A cluster with something of everything.

use divvy_model::Health;
use divvy_model::usage::EscapeKind;
use divvy_view::WaitingPod;

use crate::{ClusterMoment, ViewSimNode, ViewSimShare};

/// A text that a user may write into an annotation, and that no page may take for markup.
pub const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror=alert(2)>\u{202e}'&amp;";

/// Make a cluster of 12 nodes with several models, MIG devices, a broken GPU, pods with whole GPUs, idle shares, a pod over its share, and pods that wait.
/// `step` changes what the pods use.
pub fn mixed(step: u64) -> ClusterMoment {
    let mut cluster = ClusterMoment::of(
        &[
            eight(
                "gpu-a100-01",
                "NVIDIA A100-SXM4-80GB",
                80,
                step,
                &[
                    ("research", "llama-ft", 64),
                    ("research", "clip-train", 40),
                    ("vision", "segment", 24),
                ],
            ),
            eight(
                "gpu-a100-02",
                "NVIDIA A100-SXM4-80GB",
                80,
                step + 13,
                &[
                    ("audio", "asr-train", 48),
                    ("platform", "embed", 16),
                    ("research", "diffusion", 72),
                ],
            ),
            eight(
                "gpu-h200-01",
                "NVIDIA H200",
                141,
                step + 29,
                &[("vision", "detect", 72), ("audio", "tts", 20), ("research", "moe", 110)],
            ),
            h100(step),
            mig(step),
            l4("gpu-l4-01", step, 4),
            l4("gpu-l4-02", step + 7, 3),
            l4("gpu-l4-03", step + 19, 2),
            a30(step),
            ViewSimNode::new("gpu-t4-02", "Tesla T4", 16, 4).silent("the agent gave no answer within 2 s"),
            ViewSimNode::new("gpu-v100-01", "Tesla V100-SXM2-32GB", 32, 4)
                .held(1, 3 * 1024)
                .pod(wave("genomics", "alphafold-0", 0, 32, step))
                .pod(wave("genomics", "alphafold-1", 1, 24, step + 4))
                .pod(ViewSimShare::new("genomics", "jupyter-mara", 2, 16).uses(900, 0)),
            ViewSimNode::new("gpu-l40s-01", HOSTILE, 48, 2)
                .trouble(&format!("containers get no driver libraries: {HOSTILE}"))
                .pod(wave("vision", "annotate", 0, 20, step)),
        ],
        step,
    );
    cluster.waiting = waiting();
    cluster
}

/// A pod whose use moves.
fn wave(namespace: &str, name: &str, gpu: usize, gib: u64, step: u64) -> ViewSimShare {
    let seed = name.bytes().fold(step, |sum, byte| sum * 3 + u64::from(byte)) % 97;
    let turn = (step * 3 + seed * 17) % 64;
    let level = if turn < 32 { turn } else { 64 - turn };
    let used = gib * 1024 * (50 + level * 3 / 2) / 100;
    ViewSimShare::new(namespace, name, gpu, gib).uses(used, 30 + level * 2)
}

fn idle(namespace: &str, name: &str, gpu: usize, gib: u64) -> ViewSimShare {
    ViewSimShare::new(namespace, name, gpu, gib).uses(gib * 1024 / 12, 0)
}

/// A machine with eight GPUs, where these pods have many workers, and notebooks have the rest.
fn eight(name: &str, model: &str, gib: u64, step: u64, jobs: &[(&str, &str, u64)]) -> ViewSimNode {
    let mut machine = ViewSimNode::new(name, model, gib, 8);
    let empty = name.bytes().map(usize::from).sum::<usize>() % 8;
    let people = ["ada", "kofi", "mei", "omar", "ines", "tariq", "yuki", "lena"];
    for gpu in 0..8_usize {
        let (namespace, job, share) = jobs[(gpu / 2) % jobs.len()];
        if gpu == empty {
            continue;
        }
        machine = machine.pod(wave(namespace, &format!("{job}-{gpu}"), gpu, share, step + gpu as u64));
        if share <= 48 && gpu % 3 != 2 {
            machine = machine.pod(idle("notebooks", &format!("jupyter-{}-{}", people[gpu], &name[9..]), gpu, 16));
        }
        if share <= 24 {
            machine = machine.pod(wave("platform", &format!("rerank-{gpu}"), gpu, 20, step + 3));
        }
    }
    machine
}

fn h100(step: u64) -> ViewSimNode {
    let mut machine = ViewSimNode::new("gpu-h100-01", "NVIDIA H100 80GB HBM3", 80, 8);
    for gpu in 0..6 {
        let mib = 61_000 + (step * 211 + gpu as u64 * 977) % 14_000;
        machine =
            machine.pod(ViewSimShare::whole("research", &format!("pretrain-{gpu}"), gpu).uses(mib, 94 + (step + gpu as u64) % 6));
    }
    machine.pod(wave("platform", "serve-70b", 6, 72, step))
}

fn mig(step: u64) -> ViewSimNode {
    let small: Vec<(&str, u64)> = vec![("1g.10gb", 10); 7];
    ViewSimNode::new("gpu-h100-02", "NVIDIA H100 80GB HBM3", 80, 4)
        .divided(3, &[("4g.40gb", 40), ("2g.20gb", 20), ("1g.10gb", 10)])
        .divided(0, &small)
        .pod(wave("team-a", "lab-01", 0, 10, step))
        .pod(wave("team-a", "lab-02", 1, 10, step + 9))
        .pod(idle("team-a", "lab-03", 2, 10))
        .pod(wave("team-a", "lab-05", 4, 10, step + 21))
        .pod(wave("audio", "whisper-large", 7, 64, step))
        .pod(wave("platform", "vector-db", 8, 40, step))
        .pod(wave("team-a", "exam", 9, 30, step + 4))
        .pod(wave("team-a", "exam-check", 9, 8, step + 31))
        .pod(wave("platform", "guardrail", 10, 20, step + 2))
}

fn l4(name: &str, step: u64, replicas: usize) -> ViewSimNode {
    let mut machine = ViewSimNode::new(name, "NVIDIA L4", 24, 4);
    for gpu in 0..replicas {
        machine = machine.pod(wave(
            "platform",
            &format!("chat-{}-{gpu}", &name[7..]),
            gpu,
            10,
            step + gpu as u64,
        ));
        machine = machine.pod(wave("vision", &format!("ocr-{}-{gpu}", &name[7..]), gpu, 6, step + 11));
    }
    machine
}

fn a30(step: u64) -> ViewSimNode {
    ViewSimNode::new("gpu-a30-01", "NVIDIA A30", 24, 4)
        .broken(2, Health::Failed, "XID 79: GPU has fallen off the bus")
        .pod(wave("platform", "thumbnails", 0, 8, step))
        // 1.5 GiB more than its share.
        .pod(
            ViewSimShare::new("vision", "legacy-tagger", 0, 4)
                .uses(5632, 71)
                .escapes(EscapeKind::Unguarded, 12),
        )
        .pod(wave("notebooks", "jupyter-sam", 1, 12, step))
        .pod(ViewSimShare::new("vision", "classify", 2, 6).uses(0, 0))
}

fn waiting() -> Vec<WaitingPod> {
    let pod = |namespace: &str, name: &str, seconds, why: &str, help: &[&str]| WaitingPod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        seconds,
        why: why.to_owned(),
        help: help.iter().map(|help| (*help).to_owned()).collect(),
    };
    vec![
        pod(
            "research",
            "pretrain-6",
            Some(8040),
            "The pod asks for 2 whole GPUs on one node. No node has more than 1 GPU without pods.",
            &[
                "Delete the pod platform/serve-70b on gpu-h100-01: then the pod would start there.",
                "Ask for 1 GPU: then the pod would start on gpu-h100-01 now.",
            ],
        ),
        pod(
            "notebooks",
            "jupyter-noor",
            Some(310),
            "The pod asks for 48 GiB on a GPU of the model NVIDIA A30, which has 24 GiB.",
            &["Ask for 8 GiB or less: then the pod would start on gpu-a30-01 now."],
        ),
        pod(
            "vision",
            "annotate-2",
            None,
            &format!("The pod's annotation names the model {HOSTILE}, which no node has."),
            &["Remove the annotation: then the pod would start on gpu-l4-03 now."],
        ),
    ]
}
