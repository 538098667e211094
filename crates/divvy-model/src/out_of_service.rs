//! GPUs that an administrator, or `divvy smoke --report`, took out of service, in the annotations of their node.

use std::collections::BTreeMap;

use crate::limits::{NODE_GPUS, REASON_BYTES, shortened};
use crate::{Health, names};

/// The longest name of an annotation after its prefix, in bytes (apimachinery `pkg/util/validation/validation.go`).
const NAME_BYTES: usize = 63;
/// The beginning of the reason in the inventory.
const OUT: &str = "out of service: ";
/// The beginning of a reason that `divvy smoke --report` writes.
const BY_SMOKE: &str = "divvy smoke: ";
/// The longest reason in an annotation, in bytes, so that the reason in the inventory is within its limit.
const MOST: usize = REASON_BYTES - OUT.len() - '…'.len_utf8();

/// A GPU that is not offered although it may work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfService {
    /// The reason, short enough for the inventory.
    pub reason: String,
    /// Whether pods that test the GPU may use it now.
    pub is_tested: bool,
}

impl OutOfService {
    /// Return the health that the inventory says of the GPU if the driver reports no fault.
    pub fn health(&self) -> Health {
        match self.is_tested {
            true => Health::Testing,
            false => Health::Failed,
        }
    }

    /// Return the reason as the inventory says it: `out of service: fan is broken`.
    pub fn text(&self) -> String {
        format!("{OUT}{}", self.reason)
    }
}

/// The GPUs of a node that are out of service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpusOutOfService {
    /// By the rest of the annotation's name.
    by_name: BTreeMap<String, OutOfService>,
}

impl GpusOutOfService {
    /// Read the annotations of a node. At most [`NODE_GPUS`] of them count, those with the first names.
    pub fn read(annotations: &BTreeMap<String, String>) -> GpusOutOfService {
        let ours = annotations
            .range(names::OUT_OF_SERVICE.to_owned()..)
            .map_while(|(key, value)| Some((key.strip_prefix(names::OUT_OF_SERVICE)?, value)));
        let read = ours.take(NODE_GPUS).map(|(name, value)| {
            let reason = match value.trim() {
                "" => "no reason was given",
                reason => reason,
            };
            // Events and logs show it.
            let reason = shortened(reason, MOST).replace(char::is_control, " ");
            let one = OutOfService {
                reason,
                is_tested: annotations.contains_key(&format!("{}{name}", names::UNDER_TEST)),
            };
            (name.to_owned(), one)
        });
        GpusOutOfService { by_name: read.collect() }
    }

    /// Return what is said of the GPU with this UUID. `None` if it is in service.
    pub fn get(&self, uuid: &str) -> Option<&OutOfService> {
        self.by_name.get(&name(uuid))
    }
}

/// Return the rest of the name of the annotations about a GPU: its UUID, in which `_` stands for what a name may not have.
fn name(uuid: &str) -> String {
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
            ("under-test.divvy.dev/GPU-3", "run"),
            ("under-test.divvy.dev/GPU-4", "run"),
            ("divvy.dev/inventory", "{}"),
            ("p.example/GPU-5", "x"),
        ]));
        let text = |uuid: &str| read.get(uuid).map(|out| (out.text(), out.health()));
        let of = |text: &str, health| Some((text.to_owned(), health));
        assert_eq!(text("GPU-1"), of("out of service: fan is broken", Health::Failed));
        assert_eq!(text("GPU-2"), of("out of service: no reason was given", Health::Failed));
        assert_eq!(
            text("GPU-3"),
            of("out of service: divvy smoke: S03 memory: wrong", Health::Testing)
        );
        for uuid in ["GPU-4", "GPU-5", "GPU", ""] {
            assert_eq!(text(uuid), None, "{uuid}");
        }
    }

    #[test]
    fn a_uuid_of_any_vendor_makes_a_name_that_the_api_server_accepts() {
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
            assert!(read.get(uuid).is_some(), "{uuid}");
        }
    }

    #[test]
    fn what_strangers_write_is_kept_within_limits() {
        let long = "é".repeat(1 << 16);
        let many: BTreeMap<String, String> = (0..1000)
            .map(|n| (format!("{}{n}", names::OUT_OF_SERVICE), long.clone()))
            .collect();
        let read = GpusOutOfService::read(&many);
        assert_eq!(read.by_name.len(), NODE_GPUS);
        for out in read.by_name.values() {
            assert!(out.text().len() <= REASON_BYTES);
        }
        assert!(OUT.len() + failed_smoke(&long).len() <= REASON_BYTES);
    }

    #[test]
    fn what_smoke_found_is_read_back_from_the_inventory_and_other_reasons_are_not() {
        let value = failed_smoke("S03 memory: wrong");
        let read = GpusOutOfService::read(&annotations(&[(&out_of_service_key("GPU-1"), &value)]));
        let text = read.get("GPU-1").expect("out of service").text();
        assert_eq!(found_by_smoke(&text), Some("S03 memory: wrong"));
        assert!(is_out_of_service(&text));
        let read = GpusOutOfService::read(&annotations(&[(&out_of_service_key("GPU-1"), "a\n\u{1b}[31mb")]));
        assert_eq!(read.get("GPU-1").expect("out of service").reason, "a  [31mb");
        for other in ["out of service: fan is broken", "divvy smoke: x", "XID 79", ""] {
            assert_eq!(found_by_smoke(other), None, "{other}");
        }
        assert!(!is_out_of_service("XID 79"));
    }
}
