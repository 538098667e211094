//! How busy processes keep a GPU, as a driver samples it.

use serde::{Deserialize, Serialize};

use crate::facts::{MAX_GPUS, is_uuid};
use crate::{Error, Failure, FailureCode};

/// The samples of a GPU in an answer. No GPU runs the work of so many processes within one sample.
pub(crate) const MAX_SAMPLES: usize = 512;

/// A question for the samples of one GPU. The one who asks keeps the time, so no samples are lost when the probe restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplesSince {
    /// The GPU's UUID.
    pub uuid: String,
    /// The time of the latest sample that is known already, in microseconds since 1970.
    pub since: u64,
}

impl SamplesSince {
    /// Refuse questions that no agent asks.
    pub(crate) fn validate(all: &[SamplesSince]) -> Result<(), Failure> {
        let refused = |text: String| Err(Failure::new(FailureCode::Protocol, text));
        if all.len() > MAX_GPUS {
            return refused(format!("the samples of more than {MAX_GPUS} GPUs are asked for"));
        }
        match all.iter().position(|of| !is_uuid(&of.uuid)) {
            Some(index) => refused(format!("the UUID of GPU {index} is malformed")),
            None => Ok(()),
        }
    }
}

/// The samples of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSamples {
    /// The GPU's UUID.
    pub uuid: String,
    /// At most one sample of each process for one time. A process that has not used the GPU has none.
    pub samples: Vec<UtilizationSample>,
    /// Why the driver gives no samples.
    #[serde(default, rename = "err", skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

/// For how much of the time since the driver's sample before a process kept the GPU busy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UtilizationSample {
    /// PID on the host.
    pub pid: u32,
    /// UID of the process's pod, from its cgroup. `None` for a process of the host, and for one that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container runtime's ID of the process's container, from its cgroup. `None` as for the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// When the driver took the sample, in microseconds since 1970.
    #[serde(rename = "atUs")]
    pub at: u64,
    /// Percent of the time, at most 100.
    pub percent: u32,
}

impl GpuSamples {
    /// Refuse answers that a driver cannot have produced.
    pub(crate) fn validate(all: &[GpuSamples]) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("samples of utilization were refused: {text}")));
        if all.len() > MAX_GPUS {
            return refuse(format!("they are of more than {MAX_GPUS} GPUs"));
        }
        for (index, gpu) in all.iter().enumerate() {
            if !is_uuid(&gpu.uuid) || all[..index].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("the UUID of GPU {index} is malformed or appears twice"));
            }
            if gpu.samples.len() > MAX_SAMPLES {
                return refuse(format!("GPU {} has more than {MAX_SAMPLES}", gpu.uuid));
            }
            for of in &gpu.samples {
                // The UUID check also accepts every valid pod UID and container ID.
                if of.percent > 100 || [&of.pod, &of.container].into_iter().flatten().any(|id| !is_uuid(id)) {
                    return refuse(format!(
                        "process {} on GPU {} has {} %, or a malformed pod UID or container ID",
                        of.pid, gpu.uuid, of.percent
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, percent: u32, pod: Option<&str>) -> GpuSamples {
        let sample = UtilizationSample {
            pid: 7,
            pod: pod.map(str::to_owned),
            container: pod.map(|pod| format!("{pod}cafe")),
            at: 1,
            percent,
        };
        GpuSamples {
            uuid: uuid.to_owned(),
            samples: vec![sample],
            error: None,
        }
    }

    #[test]
    fn samples_that_no_driver_takes_are_refused() {
        GpuSamples::validate(&[gpu("GPU-a", 100, None), gpu("GPU-b", 0, Some("0a-1b"))]).expect("ordinary");
        let mut many = gpu("GPU-a", 1, None);
        let mut path = gpu("GPU-a", 1, Some("0a-1b"));
        path.samples[0].container = Some("../x".to_owned());
        many.samples = vec![many.samples[0].clone(); MAX_SAMPLES + 1];
        for (name, all) in [
            ("the same GPU twice", vec![gpu("GPU-a", 1, None), gpu("GPU-a", 1, None)]),
            ("a path for a GPU", vec![gpu("../x", 1, None)]),
            ("a path for a pod", vec![gpu("GPU-a", 1, Some("../x"))]),
            ("a path for a container", vec![path]),
            ("more than all of the time", vec![gpu("GPU-a", 101, None)]),
            ("too many samples", vec![many]),
            ("too many GPUs", (0..300).map(|i| gpu(&format!("GPU-{i}"), 1, None)).collect()),
        ] {
            let error = GpuSamples::validate(&all).expect_err(name).to_string();
            assert!(error.contains("samples of utilization were refused"), "{name}: {error}");
        }
    }

    #[test]
    fn questions_that_no_agent_asks_are_refused() {
        let since = |uuid: String| SamplesSince { uuid, since: 0 };
        SamplesSince::validate(&[since("GPU-a".to_owned())]).expect("ordinary");
        SamplesSince::validate(&[since("a\nb".to_owned())]).expect_err("no UUID");
        let many: Vec<_> = (0..300).map(|index| since(format!("GPU-{index}"))).collect();
        SamplesSince::validate(&many).expect_err("too many");
    }
}
