//! The probe's protocol: lines of JSON over a Unix socket (`docs/design/formats.md`).
//!
//! A client sends `{"v":1,"id":1,"op":"hello"|"snapshot"|"processes"|"utilization"|"metrics"|"driver"|"driverSpec"|"limit"|"kill"|"mountShare"|"unmountShare"|"ping"}`.
//! The two driver requests, the limit, the utilization, `kill`, and those about the files of shares carry further fields. The probe answers in the order of the requests, with `{"id":1,"ok":…}` or
//! `{"id":1,"err":{"code":"driver_not_loaded","text":"…"}}`. In addition, the probe sends unsolicited events:
//! `{"event":"fault","seq":7,"vendor":"nvidia","uuid":"GPU-…","code":79,"fatal":true,"name":"XID 79","partition":null}`, where a `uuid` of null
//! means every GPU of the vendor. Both sides ignore unknown fields and unknown events. A line has at most [`MAX_LINE`] bytes before its `\n`.

mod line;

use std::borrow::Cow;

use divvy_cdi::Spec;
use divvy_cdi::driver_spec::{Basis, NvmlGpu};
use divvy_model::MiB;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::{Error, Failure, FailureCode, Fault, SamplesSince};

pub use line::{LineBuffer, MAX_LINE};

/// The operation that a client requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase")]
pub enum ProbeOp {
    /// Identify the probe, and list the latest faults. The answer is a [`Hello`].
    Hello,
    /// Read all GPUs. The answer is a [`crate::Snapshot`].
    Snapshot,
    /// Read the processes on all GPUs. The answer is a list of [`crate::GpuProcesses`].
    Processes,
    /// Read how busy processes keep GPUs. The answer is a list of [`crate::GpuSamples`], in the order of the question.
    Utilization {
        /// The GPUs, and since when.
        gpus: Vec<SamplesSince>,
    },
    /// Read what the drivers measure and count of all GPUs. The answer is a list of [`crate::GpuGauges`].
    Metrics,
    /// Check the driver's files, which only the probe can see. The answer is a [`DriverFiles`]; no driver call is needed.
    Driver(DriverQuestion),
    /// Make the CDI spec of the driver. The answer is a [`DriverSpec`]; no driver call is needed.
    DriverSpec {
        /// The basis from the answer to [`ProbeOp::Driver`].
        basis: Box<Basis>,
    },
    /// Limit how much memory of a GPU the processes of a pod can allocate. The answer is a [`LimitAnswer`].
    Limit(LimitRequest),
    /// End a process of a pod with SIGKILL. The answer is empty.
    Kill(Kill),
    /// Mount a file system for the files of a share, unless there is one. The answer is empty; no driver call is needed.
    MountShare(ShareName),
    /// Unmount the file system of a share, if there is one. The answer is empty; no driver call is needed.
    UnmountShare(ShareName),
    /// Answer `{}` without a driver call.
    Ping,
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// Format version: 1.
    pub v: u32,
    /// A number that the client chooses and that the answer repeats.
    pub id: u64,
    /// The operation.
    #[serde(flatten)]
    pub op: ProbeOp,
}

/// The arguments of [`ProbeOp::Driver`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverQuestion {
    /// The driver version from a snapshot.
    pub version: String,
    /// The GPUs from a snapshot.
    pub gpus: Vec<NvmlGpu>,
    /// Paths on the machine whose existence is to be checked.
    pub paths: Vec<String>,
}

/// The arguments of [`ProbeOp::Limit`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitRequest {
    /// The GPU's UUID.
    pub uuid: String,
    /// The path of the cgroup of a pod or of a container, relative to the root of the cgroups.
    pub cgroup: String,
    /// The memory in MiB.
    #[serde(rename = "hardMiB")]
    pub hard: MiB,
    /// Whether no other container of the pod has the GPU. Only the limit of a container's cgroup depends on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
}

/// The arguments of [`ProbeOp::Kill`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kill {
    /// The process's PID on the host.
    pub pid: u32,
    /// The UID of the pod that the process must belong to.
    pub pod: String,
}

/// The arguments of [`ProbeOp::MountShare`] and [`ProbeOp::UnmountShare`]: which share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareName {
    /// The UID of the pod.
    pub pod: String,
    /// The UUID of the GPU, or of the MIG device.
    pub gpu: String,
}

/// The answer to [`ProbeOp::Limit`]: what the driver says after the limit was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitAnswer {
    /// The memory in MiB that the cgroup's processes use.
    #[serde(rename = "usedMiB")]
    pub used: MiB,
    /// Whether the limit was left out: limits do not nest on this machine, and the pod's other containers would be limited separately.
    #[serde(default, rename = "leftOut", skip_serializing_if = "std::ops::Not::not")]
    pub left_out: bool,
}

/// The answer to [`ProbeOp::Driver`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverFiles {
    /// The basis for a spec, or `None` if the driver's version is not known.
    pub basis: Option<Basis>,
    /// The driver's root directory as the probe opens it, for messages.
    pub looked_at: String,
    /// The requested paths that do not exist.
    pub missing: Vec<String>,
}

/// The answer to [`ProbeOp::DriverSpec`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DriverSpec {
    /// The spec for the CDI directory.
    pub spec: Spec,
    /// Sentences about what was left out or looks wrong.
    pub notes: Vec<String>,
}

/// The answer to [`ProbeOp::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Format version: 1.
    pub v: u32,
    /// The probe's version.
    pub probe: String,
    /// Identifies this run of the probe. `seq` counts within a run.
    pub instance: String,
    /// The sequence number of the latest fault, 0 if there was none.
    pub seq: u64,
    /// The latest faults, oldest first, so that a client can catch up on what it missed.
    #[serde(default)]
    pub recent: Vec<PastFault>,
}

/// A fault from the past.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PastFault {
    /// The fault's age in ms.
    pub ago_ms: u64,
    /// The event.
    #[serde(flatten)]
    pub event: FaultEvent,
}

/// A fault that a driver reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultEvent {
    /// The sequence number within a run of the probe, starting at 1.
    pub seq: u64,
    /// The fault.
    #[serde(flatten)]
    pub fault: Fault,
}

/// The name of the event that reports a fault.
const FAULT: &str = "fault";

/// An answer that is not parsed yet: the client parses it into the type that belongs to its request. So each answer is parsed once. The list of processes
/// arrives every second and is long.
#[derive(Debug, Clone)]
pub struct RawAnswer(Box<RawValue>);

impl RawAnswer {
    /// Parse the answer.
    ///
    /// # Errors
    /// The JSON does not have this type ([`FailureCode::Protocol`]).
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_str(self.0.get())
            .map_err(|error| Failure::new(FailureCode::Protocol, format!("the probe sent an invalid answer: {error}")))
    }
}

impl PartialEq for RawAnswer {
    fn eq(&self, other: &RawAnswer) -> bool {
        self.0.get() == other.0.get()
    }
}

/// A line from the probe.
#[derive(Debug, Clone, PartialEq)]
pub enum FromProbe {
    /// An answer.
    Answer {
        /// The request's id, or `None` if the probe could not read the request.
        id: Option<u64>,
        /// The result or the failure.
        result: Result<RawAnswer, Failure>,
    },
    /// A fault.
    Fault(FaultEvent),
    /// An event of a newer probe, which clients ignore.
    OtherEvent,
}

/// Return the line of a request, including its `\n`.
pub fn request_line(request: &ProbeRequest) -> String {
    format!("{}\n", json!(request))
}

/// Parse a request. A refusal carries the request's id if it could be read.
pub fn parse_request(line: &str) -> Result<ProbeRequest, (Option<u64>, Failure)> {
    let refuse = |id, text: String| Err((id, Failure::new(FailureCode::Protocol, text)));
    let value: Value = match serde_json::from_str(line) {
        Ok(value) => value,
        Err(error) => return refuse(None, format!("the request is not JSON: {error}")),
    };
    let id = value.get("id").and_then(Value::as_u64);
    match serde_json::from_value::<ProbeRequest>(value) {
        Ok(request) if request.v == 1 => Ok(request),
        Ok(request) => refuse(
            id,
            format!("the request has version {}, but this probe supports version 1", request.v),
        ),
        Err(error) => refuse(
            id,
            format!("{error}; a request looks like {{\"v\":1,\"id\":1,\"op\":\"snapshot\"}}"),
        ),
    }
}

/// Return the line of an answer, including its `\n`.
pub fn answer_line(id: Option<u64>, result: &Result<Value, Failure>) -> String {
    let line = match result {
        Ok(value) => json!({ "id": id, "ok": value }),
        Err(failure) => json!({ "id": id, "err": { "code": failure.code, "text": failure.text } }),
    };
    format!("{line}\n")
}

/// Return the line of an event, including its `\n`.
pub fn event_line(event: &FaultEvent) -> String {
    #[derive(Serialize)]
    struct FaultLine<'e> {
        event: &'static str,
        #[serde(flatten)]
        fault: &'e FaultEvent,
    }
    format!(
        "{}\n",
        json!(FaultLine {
            event: FAULT,
            fault: event
        })
    )
}

/// Parse a line from the probe. The line is untrusted input.
pub fn parse_from_probe(line: &str) -> Result<FromProbe, Error> {
    #[derive(Deserialize)]
    struct ProtocolLine<'l> {
        #[serde(default, borrow, deserialize_with = "present")]
        event: Option<&'l RawValue>,
        #[serde(default)]
        id: Option<u64>,
        #[serde(default, borrow, deserialize_with = "present")]
        ok: Option<&'l RawValue>,
        err: Option<Failure>,
    }
    let wrong = |error: serde_json::Error| Error::Protocol(format!("a line does not follow the protocol: {error}"));
    let ProtocolLine { event, id, ok, err } = serde_json::from_str(line).map_err(wrong)?;
    if let Some(event) = event.map(RawValue::get).filter(|event| *event != "null") {
        if serde_json::from_str::<Cow<'_, str>>(event).ok().as_deref() != Some(FAULT) {
            return Ok(FromProbe::OtherEvent);
        }
        let event: FaultEvent = serde_json::from_str(line).map_err(wrong)?;
        event.fault.validate()?;
        return Ok(FromProbe::Fault(event));
    }
    let result = match (ok, err) {
        (Some(answer), None) => Ok(RawAnswer(answer.to_owned())),
        (None, Some(failure)) => Err(bounded(failure)),
        _ => return Err(Error::Protocol("a line has neither or both of ok and err".to_owned())),
    };
    Ok(FromProbe::Answer { id, result })
}

/// Read a value that is there, also if it is null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Limit a failure's text to one line of at most 1,024 characters, because it is logged and shown to users.
pub(crate) fn bounded(failure: Failure) -> Failure {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    Failure {
        code: failure.code,
        text: failure.text.chars().take(1024).map(clean).collect(),
    }
}

#[cfg(test)]
mod tests {

    use divvy_model::Vendor;

    use super::*;

    fn fault(uuid: Option<&str>, partition: Option<(u32, u32)>) -> Fault {
        Fault {
            vendor: Vendor::Nvidia,
            uuid: uuid.map(str::to_owned),
            code: 79,
            fatal: true,
            name: "XID 79".to_owned(),
            partition,
        }
    }

    #[test]
    fn the_lines_are_those_of_the_design() {
        let request = ProbeRequest {
            v: 1,
            id: 1,
            op: ProbeOp::Snapshot,
        };
        assert_eq!(request_line(&request), "{\"v\":1,\"id\":1,\"op\":\"snapshot\"}\n");
        let failure = Failure::new(FailureCode::DriverNotLoaded, "…");
        assert_eq!(
            answer_line(Some(1), &Err(failure)),
            "{\"id\":1,\"err\":{\"code\":\"driver_not_loaded\",\"text\":\"…\"}}\n"
        );
        assert_eq!(answer_line(Some(1), &Ok(json!({}))), "{\"id\":1,\"ok\":{}}\n");
        let event = FaultEvent {
            seq: 7,
            fault: fault(Some("GPU-a"), None),
        };
        assert_eq!(
            event_line(&event),
            "{\"event\":\"fault\",\"seq\":7,\"vendor\":\"nvidia\",\"uuid\":\"GPU-a\",\"code\":79,\"fatal\":true,\"name\":\"XID 79\",\"partition\":null}\n"
        );
    }

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let question = DriverQuestion {
            version: "550.54.15".to_owned(),
            gpus: vec![NvmlGpu {
                index: 0,
                uuid: "GPU-a".to_owned(),
                minor: 1,
                pci: "0000:81:00.0".to_owned(),
                mig: Some(Vec::new()),
            }],
            paths: vec!["/usr/lib64/libcuda.so.1".to_owned()],
        };
        let basis = Box::new(Basis {
            driver: "550.54.15".to_owned(),
            gpus: Vec::new(),
            driver_root: "/".to_owned(),
            root: None,
        });
        let share = ShareName {
            pod: "aaaa-1".to_owned(),
            gpu: "GPU-a".to_owned(),
        };
        for op in [
            ProbeOp::Hello,
            ProbeOp::Snapshot,
            ProbeOp::Processes,
            ProbeOp::Utilization {
                gpus: vec![SamplesSince {
                    uuid: "GPU-a".to_owned(),
                    since: u64::MAX,
                }],
            },
            ProbeOp::Metrics,
            ProbeOp::Driver(question),
            ProbeOp::DriverSpec { basis },
            ProbeOp::Limit(LimitRequest {
                uuid: "GPU-a".to_owned(),
                cgroup: "kubepods/pod1".to_owned(),
                hard: MiB(3072),
                alone: true,
            }),
            ProbeOp::Kill(Kill {
                pid: 7,
                pod: "aaaa-1".to_owned(),
            }),
            ProbeOp::MountShare(share.clone()),
            ProbeOp::UnmountShare(share),
            ProbeOp::Ping,
        ] {
            let request = ProbeRequest { v: 1, id: u64::MAX, op };
            assert_eq!(parse_request(&request_line(&request)), Ok(request));
        }
        for result in [
            Ok(json!({"a": [1, 2]})),
            Ok(Value::Null),
            Err(Failure::new(FailureCode::GpuLost, "gone")),
        ] {
            let FromProbe::Answer { id, result: read } = parse_from_probe(&answer_line(Some(3), &result)).expect("answer") else {
                panic!("an answer")
            };
            assert_eq!((id, read.and_then(|answer| answer.read())), (Some(3), result));
        }
        for uuid in [None, Some("GPU-a")] {
            let event = FaultEvent {
                seq: 1,
                fault: fault(uuid, Some((1, 0))),
            };
            assert_eq!(
                parse_from_probe(&event_line(&event)).expect("event"),
                FromProbe::Fault(event.clone())
            );
            // The answer to hello has the same fields.
            let past = PastFault { ago_ms: 3, event };
            let written = serde_json::to_value(&past).expect("JSON");
            assert_eq!(serde_json::from_value::<PastFault>(written).expect("fault"), past);
        }
    }

    #[test]
    fn a_wrong_question_is_refused_with_its_id_and_what_to_ask() {
        for (line, id, part) in [
            ("", None, "not JSON"),
            ("[]", None, "op"),
            ("{\"v\":1,\"id\":7,\"op\":\"reset\"}", Some(7), "unknown variant `reset`"),
            ("{\"v\":2,\"id\":8,\"op\":\"ping\"}", Some(8), "version 2"),
            ("{\"v\":1,\"op\":\"ping\"}", None, "missing field `id`"),
        ] {
            let (found, failure) = parse_request(line).expect_err(line);
            assert_eq!(found, id, "{line}");
            assert!(failure.text.contains(part), "{}", failure.text);
        }
    }

    /// Unknown events and codes are ignored, too.
    #[test]
    fn unknown_fields_pass_and_nonsense_does_not() {
        assert!(parse_request("{\"v\":1,\"id\":1,\"op\":\"ping\",\"new\":[]}").is_ok());
        assert_eq!(
            parse_from_probe("{\"event\":\"reset\",\"seq\":1}").expect("event"),
            FromProbe::OtherEvent
        );
        let newer = parse_from_probe("{\"id\":1,\"err\":{\"code\":\"on_fire\",\"text\":\"a\\nb\"}}").expect("answer");
        let result = Err(Failure::new(FailureCode::Unknown, "a b"));
        assert_eq!(newer, FromProbe::Answer { id: Some(1), result });
        for line in [
            "",
            "null",
            "{}",
            "{\"id\":1}",
            "{\"id\":-1,\"ok\":1}",
            "{\"id\":1,\"ok\":1,\"err\":{\"code\":\"x\",\"text\":\"\"}}",
            "{\"event\":\"fault\"}",
        ] {
            assert!(matches!(parse_from_probe(line), Err(Error::Protocol(_))), "{line}");
        }
        let with = |uuid: Value, vendor: &str, name: &str| {
            let line =
                json!({"event": "fault", "seq": 1, "vendor": vendor, "uuid": uuid, "code": 79, "fatal": true, "name": name});
            parse_from_probe(&line.to_string())
        };
        with(json!("GPU-a"), "nvidia", "XID 79").expect("a fault without the partition");
        for (uuid, vendor, name) in [
            (json!("../x"), "nvidia", "XID 79"),
            (Value::Null, "matrox", "XID 79"),
            (Value::Null, "amd", ""),
            (Value::Null, "amd", "a\nb"),
            (Value::Null, "amd", &"a".repeat(65)),
        ] {
            assert!(
                matches!(with(uuid.clone(), vendor, name), Err(Error::Protocol(_))),
                "{uuid} {vendor} {name}"
            );
        }
    }
}
