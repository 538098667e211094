//! Which metrics are shown (`--metrics-allow`).

use std::collections::BTreeSet;

use prometheus_client::collector::Collector;
use prometheus_client::registry::{Metric, Registry};

use super::dcgm;

/// The names in `/metrics`, as they are written there. A test compares them with docs/reference/metrics.md.
const NAMES: [&str; 43] = [
    "divvy_agent_container_limits_total",
    "divvy_agent_device_ids",
    "divvy_agent_double_handouts_total",
    "divvy_agent_driver_spec_stale",
    "divvy_agent_faults_total",
    "divvy_agent_gpu_enforcement",
    "divvy_agent_gpu_healthy",
    "divvy_agent_gpus",
    "divvy_agent_grants",
    "divvy_agent_guarded_pods",
    "divvy_agent_memory_limits_total",
    "divvy_agent_pre_start_duration_seconds",
    "divvy_agent_probe_up",
    "divvy_agent_reconcile_total",
    "divvy_agent_registered",
    "divvy_agent_registrations",
    "divvy_agent_steering_misses_total",
    "divvy_container_gpu_allocated_byte_seconds_total",
    "divvy_container_gpu_busy_seconds_total",
    "divvy_container_gpu_denied_allocations_total",
    "divvy_container_gpu_denied_bytes_total",
    "divvy_container_gpu_escape",
    "divvy_container_gpu_last_busy_timestamp_seconds",
    "divvy_container_gpu_memory_limit_bytes",
    "divvy_container_gpu_memory_peak_bytes",
    "divvy_container_gpu_memory_used_bytes",
    "divvy_container_gpu_throttled_seconds_total",
    "divvy_gpu_allocated_bytes",
    "divvy_gpu_busy_ratio",
    "divvy_gpu_clock_hertz",
    "divvy_gpu_energy_joules_total",
    "divvy_gpu_held_bytes",
    "divvy_gpu_info",
    "divvy_gpu_memory_bandwidth_ratio",
    "divvy_gpu_memory_bytes",
    "divvy_gpu_memory_used_bytes",
    "divvy_gpu_power_watts",
    "divvy_gpu_shared_bytes",
    "divvy_gpu_sm_active_ratio",
    "divvy_gpu_temperature_celsius",
    "divvy_gpu_tensor_active_ratio",
    "divvy_gpu_throttled",
    "divvy_gpu_xid_errors_total",
];

/// How many similar names an error shows.
const SIMILAR: usize = 3;

/// The metrics that are shown. By default all are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allow(BTreeSet<String>);

impl Allow {
    /// Parse names that are separated by commas. No name at all means all metrics.
    ///
    /// # Errors
    /// The first name that no metric has, with names that are similar to it.
    pub fn parse(text: &str) -> Result<Allow, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let mut allow = Allow::default();
        for name in names {
            if !known().any(|known| known == name) {
                let similar = similar(name).join(", ");
                return Err(format!(
                    "{name:?} is not a metric; similar names: {similar}; docs/reference/metrics.md lists all metrics"
                ));
            }
            allow.0.insert(name.to_owned());
        }
        Ok(allow)
    }

    /// Report whether a metric is shown, by its name as it is written.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.contains(name)
    }

    /// Report the same of a family of metrics. The samples of one that counts have the suffix `_total`.
    fn has_family(&self, name: &str) -> bool {
        self.has(name) || self.0.iter().any(|of| of.strip_suffix("_total") == Some(name))
    }
}

fn known() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().chain(dcgm::names())
}

fn similar(name: &str) -> Vec<&'static str> {
    let mut all: Vec<&str> = known().collect();
    all.sort_by_cached_key(|known| strsim::damerau_levenshtein(known, name));
    all.truncate(SIMILAR);
    all
}

/// A registry that takes only the metrics that are shown.
pub(super) struct Sheet<'a> {
    registry: &'a mut Registry,
    allow: &'a Allow,
}

impl<'a> Sheet<'a> {
    pub(super) fn new(registry: &'a mut Registry, allow: &'a Allow) -> Sheet<'a> {
        Sheet { registry, allow }
    }

    pub(super) fn register(&mut self, name: &'static str, help: &'static str, metric: impl Metric) {
        if self.allow.has_family(name) {
            self.registry.register(name, help, metric);
        }
    }

    /// Register the samples of a family with this name.
    pub(super) fn collect(&mut self, name: &str, samples: impl Collector) {
        if self.allow.has_family(name) {
            self.registry.register_collector(Box::new(samples));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_reference() {
        let reference = include_str!("../../../../docs/reference/metrics.md");
        let agent = reference
            .split("\n## ")
            .find(|part| part.starts_with("Agent\n"))
            .expect("its part");
        let names = agent.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        assert_eq!(names.collect::<BTreeSet<_>>(), BTreeSet::from(NAMES));
    }

    #[test]
    fn a_name_that_no_metric_has_is_refused_with_similar_ones() {
        for (text, expected) in [
            ("", None),
            (" , ", None),
            ("divvy_gpu_info", None),
            ("divvy_container_gpu_busy_seconds_total, DCGM_FI_DEV_FB_USED", None),
            ("divvy_gpu_info,divvy_gpu_memory_used", Some("divvy_gpu_memory_used_bytes")),
            (
                "divvy_container_gpu_busy_seconds",
                Some("divvy_container_gpu_busy_seconds_total"),
            ),
            (
                "divvy_agent_pre_start_duration_seconds_bucket",
                Some("divvy_agent_pre_start_duration_seconds"),
            ),
            ("DCGM_FI_DEV_GPU_UTILS", Some("DCGM_FI_DEV_GPU_UTIL")),
            ("divvy_gpu_*", Some("divvy_gpu_info")),
        ] {
            match (Allow::parse(text), expected) {
                (Ok(_), None) => {}
                (Err(error), Some(expected)) => {
                    let wrong = text.rsplit(',').next().expect("a name");
                    assert!(
                        error.starts_with(&format!("{wrong:?} is not a metric")) && error.contains(expected),
                        "{error}"
                    );
                }
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
