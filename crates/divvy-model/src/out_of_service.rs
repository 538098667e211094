//! GPUs that an administrator, or `divvy smoke --report`, took out of service, in the annotations of their node.

use std::collections::{BTreeMap, BTreeSet};

use crate::limits::{NODE_GPUS, REASON_BYTES, shortened};
use crate::{TestRun, names};

/// The longest name of an annotation after its prefix, in bytes (apimachinery `pkg/util/validation/validation.go`).
const NAME_BYTES: usize = 63;
/// The beginning of the reason in the inventory.
const OUT: &str = "out of service: ";
/// The beginning of a reason that `divvy smoke --report` writes.
const BY_SMOKE: &str = "divvy smoke: ";
/// How a reason says that the GPU is out of service of which this one is a part: `GPU GPU-8f0a…, of which it is a part: fan is broken`.
const IT_IS_GPU: &str = "GPU ";
const OF_WHICH: &str = ", of which it is a part: ";
/// The longest reason in an annotation, in bytes, so that the reason in the inventory is within its limit.
const MOST: usize = REASON_BYTES - OUT.len() - '…'.len_utf8();

/// A GPU that is not offered although it may work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfService {
    /// The reason, short enough for the inventory.
    pub reason: String,
    /// The rest of the annotation's name.
    name: String,
}

impl OutOfService {
    /// Return the reason as the inventory says it: `out of service: fan is broken`.
    pub fn text(&self) -> String {
        format!("{OUT}{}", self.reason)
    }

    /// Return the name of the annotation that takes the GPU out of service.
    pub fn key(&self) -> String {
        format!("{}{}", names::OUT_OF_SERVICE, self.name)
    }
}

/// What the annotations of a node say about its GPUs. The default stands for a node that was not read yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpusOutOfService {
    is_read: bool,
    /// The reasons of the GPUs that are out of service, by the rest of the annotation's name.
    reasons: BTreeMap<String, String>,
    /// The runs that test a GPU, by the rest of the annotation's name.
    tests: BTreeMap<String, TestRun>,
}

impl GpusOutOfService {
    /// Read the annotations of a node. Of each kind, at most [`NODE_GPUS`] count, those with the first names.
    pub fn read(annotations: &BTreeMap<String, String>) -> GpusOutOfService {
        let of_kind = |prefix: &'static str| {
            let ours = annotations
                .range(prefix.to_owned()..)
                .map_while(move |(key, value)| Some((key.strip_prefix(prefix)?, value)));
            ours.take(NODE_GPUS)
        };
        let reasons = of_kind(names::OUT_OF_SERVICE).map(|(name, value)| {
            let reason = match value.trim() {
                "" => "no reason was given",
                reason => reason,
            };
            // Events and logs show it.
            (name.to_owned(), shortened(reason, MOST).replace(char::is_control, " "))
        });
        let tests = of_kind(names::UNDER_TEST).filter_map(|(name, value)| Some((name.to_owned(), TestRun::parse(value)?)));
        GpusOutOfService {
            is_read: true,
            reasons: reasons.collect(),
            tests: tests.collect(),
        }
    }

    /// Report whether the node was read.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// Return what is said of the GPU with this UUID, which may be a part of the GPU `parent`. `None` if it is in service. A GPU that is out of service
    /// stays so when it is divided.
    pub fn get(&self, uuid: &str, parent: Option<&str>) -> Option<OutOfService> {
        let find = |uuid: &str| self.reasons.get_key_value(&name(uuid));
        let of_parent = parent.and_then(|parent| {
            let (name, reason) = find(parent)?;
            let reason = shortened(&format!("{IT_IS_GPU}{parent}{OF_WHICH}{reason}"), MOST).into_owned();
            Some((name, reason))
        });
        let (name, reason) = of_parent.or_else(|| find(uuid).map(|(name, reason)| (name, reason.clone())))?;
        Some(OutOfService {
            reason,
            name: name.clone(),
        })
    }

    /// Return the runs that test a GPU, by the rest of the annotation's name.
    pub fn tests(&self) -> &BTreeMap<String, TestRun> {
        &self.tests
    }

    /// Return the names of the annotations that take a GPU out of service whose UUID is none of these.
    pub fn unknown<'a>(&self, uuids: impl Iterator<Item = &'a str>) -> Vec<String> {
        let known: BTreeSet<String> = uuids.map(name).collect();
        let unknown = self.reasons.keys().filter(|name| !known.contains(*name));
        unknown.map(|name| format!("{}{name}", names::OUT_OF_SERVICE)).collect()
    }
}

/// Return the rest of the name of the annotations about a GPU: its UUID, in which `_` stands for what a name may not have.
pub fn name(uuid: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let name: String = uuid
        .chars()
        .take(NAME_BYTES)
        .map(|c| if allowed(c) { c } else { '_' })
        .collect();
    // A name begins and ends with a letter or a digit.
    name.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

/// Return the name of the annotation that takes the GPU with this UUID out of service.
pub fn out_of_service_key(uuid: &str) -> String {
    format!("{}{}", names::OUT_OF_SERVICE, name(uuid))
}

/// Return the name of the annotation that lets pods test the GPU with this UUID.
pub fn under_test_key(uuid: &str) -> String {
    format!("{}{}", names::UNDER_TEST, name(uuid))
}

/// Return the value of the annotation for a GPU that failed the test: `divvy smoke: S03 memory: 1 of 67108864 words is wrong`.
pub fn failed_smoke(found: &str) -> String {
    shortened(&format!("{BY_SMOKE}{found}"), MOST).into_owned()
}

/// Report whether a GPU's reason in the inventory says that it is out of service.
pub fn is_out_of_service(reason: &str) -> bool {
    reason.starts_with(OUT)
}

/// Return the UUID of the GPU that is out of service, from the reason in the inventory of a part of it.
pub fn whole_out_of_service(reason: &str) -> Option<&str> {
    let (uuid, _) = reason.strip_prefix(OUT)?.strip_prefix(IT_IS_GPU)?.split_once(OF_WHICH)?;
    Some(uuid)
}

/// Return what `divvy smoke --report` found, from a GPU's reason in the inventory. `None` if the reason is another one.
pub fn found_by_smoke(reason: &str) -> Option<&str> {
    reason.strip_prefix(OUT)?.strip_prefix(BY_SMOKE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(of: &[(&str, &str)]) -> BTreeMap<String, String> {
        of.iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn a_gpu_is_out_of_service_by_its_own_annotation_only() {
        let read = GpusOutOfService::read(&annotations(&[
            ("out-of-service.divvy.dev/GPU-1", "fan is broken"),
            ("out-of-service.divvy.dev/GPU-2", " "),
            ("out-of-service.divvy.dev/GPU-3", "divvy smoke: S03 memory: wrong"),
            ("under-test.divvy.dev/GPU-3", "1a2b"),
            ("under-test.divvy.dev/GPU-4", "not one"),
            ("divvy.dev/inventory", "{}"),
            ("p.example/GPU-5", "x"),
        ]));
        let text = |uuid: &str| read.get(uuid, None).map(|out| out.text());
        let of = |text: &str| Some(text.to_owned());
        assert_eq!(text("GPU-1"), of("out of service: fan is broken"));
        assert_eq!(text("GPU-2"), of("out of service: no reason was given"));
        assert_eq!(text("GPU-3"), of("out of service: divvy smoke: S03 memory: wrong"));
        for uuid in ["GPU-4", "GPU-5", "GPU", ""] {
            assert_eq!(text(uuid), None, "{uuid}");
        }
        let tests: Vec<_> = read.tests().iter().map(|(name, run)| (name.as_str(), run.as_str())).collect();
        assert_eq!(tests, [("GPU-3", "1a2b")], "what is no id tests nothing");
        assert!(read.is_read() && !GpusOutOfService::default().is_read());
    }

    #[test]
    fn a_part_of_a_gpu_is_out_of_service_with_the_gpu() {
        let read = GpusOutOfService::read(&annotations(&[
            ("out-of-service.divvy.dev/GPU-1", "divvy smoke: S03 memory: wrong"),
            ("out-of-service.divvy.dev/MIG-2", "fan is broken"),
        ]));
        let of_whole = read.get("MIG-1", Some("GPU-1")).expect("out of service");
        let text = of_whole.text();
        assert_eq!(
            text,
            "out of service: GPU GPU-1, of which it is a part: divvy smoke: S03 memory: wrong"
        );
        assert_eq!(of_whole.key(), "out-of-service.divvy.dev/GPU-1");
        assert!(
            is_out_of_service(&text) && found_by_smoke(&text).is_none(),
            "a test of the part does not clear the GPU"
        );
        assert_eq!(whole_out_of_service(&text), Some("GPU-1"));
        // What is said of the GPU counts before what is said of the part.
        assert_eq!(
            read.get("MIG-2", Some("GPU-1")).expect("out of service").key(),
            of_whole.key()
        );
        let of_part = read.get("MIG-2", Some("GPU-2")).expect("out of service");
        assert_eq!(
            (of_part.text().as_str(), whole_out_of_service(&of_part.text())),
            ("out of service: fan is broken", None)
        );
        assert_eq!(read.get("MIG-3", Some("GPU-2")), None);
        assert_eq!(
            read.unknown(["GPU-1", "MIG-1"].into_iter()),
            ["out-of-service.divvy.dev/MIG-2"]
        );
    }

    #[test]
    fn any_vendors_uuid_makes_a_valid_annotation_name() {
        let long = format!("GPU-{}", "é".repeat(60));
        for uuid in [
            "GPU-8f0a3c1e-0000-0000-0000-000000000000",
            "MIG-GPU-8f0a3c1e-0000-0000-0000-000000000000/1/0",
            "0x18f3a9c2b7d4e610",
            "0000:19:00.0",
            "-x-",
            &long,
        ] {
            for key in [out_of_service_key(uuid), under_test_key(uuid)] {
                let name = key.split_once('/').expect("a prefix").1;
                assert!((1..=63).contains(&name.len()), "{key}");
                let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
                assert!(is_edge(name.chars().next()) && is_edge(name.chars().last()), "{key}");
                assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)), "{key}");
            }
            let read = GpusOutOfService::read(&annotations(&[(&out_of_service_key(uuid), "x")]));
            assert!(read.get(uuid, None).is_some(), "{uuid}");
            assert_eq!(read.unknown([uuid].into_iter()), Vec::<String>::new());
        }
    }

    #[test]
    fn what_strangers_write_is_kept_within_limits() {
        let long = "é".repeat(1 << 16);
        let many: BTreeMap<String, String> = (0..1000)
            .flat_map(|n| {
                [
                    (format!("{}{n}", names::OUT_OF_SERVICE), long.clone()),
                    (format!("{}{n}", names::UNDER_TEST), "1a2b".to_owned()),
                ]
            })
            .collect();
        let read = GpusOutOfService::read(&many);
        assert_eq!((read.reasons.len(), read.tests.len()), (NODE_GPUS, NODE_GPUS));
        for name in read.reasons.keys() {
            for parent in [None, Some(name.as_str()), Some(&long)] {
                assert!(read.get(name, parent).expect("there").text().len() <= REASON_BYTES);
            }
        }
        assert!(OUT.len() + failed_smoke(&long).len() <= REASON_BYTES);
    }

    /// The findings of smoke are read back from the inventory; other reasons are not.
    #[test]
    fn only_smokes_findings_are_read_back() {
        let value = failed_smoke("S03 memory: wrong");
        let read = GpusOutOfService::read(&annotations(&[(&out_of_service_key("GPU-1"), &value)]));
        let text = read.get("GPU-1", None).expect("out of service").text();
        assert_eq!(found_by_smoke(&text), Some("S03 memory: wrong"));
        assert!(is_out_of_service(&text));
        let read = GpusOutOfService::read(&annotations(&[(&out_of_service_key("GPU-1"), "a\n\u{1b}[31mb")]));
        assert_eq!(read.get("GPU-1", None).expect("out of service").reason, "a  [31mb");
        for other in ["out of service: fan is broken", "divvy smoke: x", "XID 79", ""] {
            assert_eq!(found_by_smoke(other), None, "{other}");
        }
        assert!(!is_out_of_service("XID 79"));
    }
}
