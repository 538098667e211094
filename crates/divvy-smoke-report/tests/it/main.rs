//! Tests of the report as a value.

mod cut;
mod read;
mod text;

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, TestedGpu};

fn gpu() -> TestedGpu {
    TestedGpu {
        uuid: "GPU-00000000-0000-4000-8000-000000000000".to_owned(),
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        cc: "9.0".to_owned(),
        driver: "/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned(),
        cuda: "13.0".to_owned(),
        memory: 81_559 << 20,
    }
}

fn passed() -> SmokeStep {
    SmokeStep {
        ms: 12,
        ..SmokeStep::pass(StepId::S02, "50000 elements", 200_000)
    }
}

fn failed() -> SmokeStep {
    SmokeStep {
        gpu_at_fault: true,
        ..SmokeStep::fail(
            StepId::S03,
            "1 of 67108864 words is wrong, the first at byte 4096",
            "programs on this GPU compute wrong results",
            "drain the node",
        )
    }
}

fn report(steps: Vec<SmokeStep>) -> SmokeReport {
    SmokeReport::new(Some(gpu()), steps)
}
