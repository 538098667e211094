//! Which metrics are shown (`--metrics-allow`).

use std::collections::BTreeSet;

use divvy_exposition::{Metric, MetricsFormat, MetricsPage};

use super::{OWN, containers, dcgm, gpus};

/// How many similar names an error shows.
const SIMILAR: usize = 3;

/// A name that no metric has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a metric; similar names: {}; docs/reference/metrics.md lists all metrics", .similar.join(", "))]
pub struct UnknownMetric {
    name: String,
    similar: Vec<&'static str>,
}

/// The metrics that are shown. By default all are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allow(BTreeSet<String>);

impl Allow {
    /// Parse names that are separated by commas. No name at all means all metrics.
    ///
    /// # Errors
    /// The first name that no metric has, with names that are similar to it.
    pub fn parse(text: &str) -> Result<Allow, UnknownMetric> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let mut allow = Allow::default();
        for name in names {
            if !known().contains(&name) {
                return Err(UnknownMetric {
                    name: name.to_owned(),
                    similar: similar(name),
                });
            }
            allow.0.insert(name.to_owned());
        }
        Ok(allow)
    }

    /// Return a page that takes only the metrics that are shown.
    pub(super) fn page(&self, format: MetricsFormat) -> MetricsPage<'_> {
        MetricsPage::only(format, &self.0)
    }
}

/// Return the metrics in `/metrics`.
fn ours() -> impl Iterator<Item = &'static Metric> {
    [OWN, containers::ALL, gpus::ALL].into_iter().flatten()
}

/// Return all names, as they are written.
fn known() -> Vec<&'static str> {
    let mut names: Vec<&str> = ours().map(|metric| metric.name).collect();
    names.sort_unstable();
    names.extend(dcgm::names());
    names
}

fn similar(name: &str) -> Vec<&'static str> {
    let mut all = known();
    all.sort_by_cached_key(|known| strsim::damerau_levenshtein(known, name));
    all.truncate(SIMILAR);
    all
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
        let expected: BTreeSet<&str> = ours().map(|metric| metric.name).collect();
        assert_eq!(names.collect::<BTreeSet<_>>(), expected);
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
                    let (wrong, error) = (text.rsplit(',').next().expect("a name"), error.to_string());
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
