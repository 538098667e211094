use std::collections::BTreeSet;

/// The XIDs that applications cause, not the GPU. NVIDIA's plugin ignores them by default (internal/rm/health.go).
const OF_APPLICATIONS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// Which XIDs make a GPU unhealthy, from `DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS`.
///
/// Each variable holds `all`, `xids`, or XIDs separated by commas. What is enabled counts even if it is also disabled: an XID,
/// so that "disable all, enable some" works, as NVIDIA documents it, and `all`, as in NVIDIA's plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthChecks {
    /// Whether an XID that is in neither list makes a GPU unhealthy.
    others: bool,
    /// Whether `DP_ENABLE_HEALTHCHECKS` is `all`.
    all: bool,
    enabled: BTreeSet<u64>,
    disabled: BTreeSet<u64>,
}

impl HealthChecks {
    /// Parse the two variables. Also return the words that are not understood; they have no effect.
    pub fn parse(disabled: &str, enabled: &str) -> (HealthChecks, Vec<String>) {
        let (mut disabled_xids, disable_all, mut unknown) = words(disabled);
        let (enabled_xids, enable_all, more) = words(enabled);
        unknown.extend(more);
        if enable_all {
            disabled_xids.clear()
        } else {
            disabled_xids.extend(OF_APPLICATIONS)
        }
        let checks = HealthChecks {
            others: enable_all || !disable_all,
            all: enable_all,
            enabled: enabled_xids,
            disabled: disabled_xids,
        };
        (checks, unknown)
    }

    /// Report whether no XID makes a GPU unhealthy.
    pub fn are_off(&self) -> bool {
        !self.others && self.enabled.is_empty()
    }

    /// Report whether `DP_ENABLE_HEALTHCHECKS` contains this XID.
    pub fn is_enabled(&self, xid: u64) -> bool {
        self.all || self.enabled.contains(&xid)
    }

    /// Report whether this XID makes a GPU unhealthy.
    pub fn is_fatal(&self, xid: u64) -> bool {
        self.enabled.contains(&xid) || (self.others && !self.disabled.contains(&xid))
    }
}

/// Parse a variable. Return its XIDs, whether it contains `all` or `xids`, and the words that are not understood.
fn words(text: &str) -> (BTreeSet<u64>, bool, Vec<String>) {
    let (mut xids, mut all, mut unknown) = (BTreeSet::new(), false, Vec::new());
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match (word.to_ascii_lowercase().as_str(), word.parse()) {
            ("all" | "xids", _) => all = true,
            (_, Ok(xid)) => {
                xids.insert(xid);
            }
            (_, Err(_)) => unknown.push(word.to_owned()),
        }
    }
    (xids, all, unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The XIDs of applications count only if they are enabled.
    #[test]
    fn an_enabled_xid_wins_over_a_disabled_one() {
        for (disabled, enabled, fatal, harmless) in [
            ("", "", &[48u64, 63, 79, 94, 119][..], &[13u64, 31, 43, 45, 68, 109][..]),
            ("all", "", &[], &[13, 79]),
            ("xids", "", &[], &[13, 79]),
            ("XIDs", "", &[], &[79]),
            ("79,13", "13", &[13, 48], &[79, 31]),
            ("all", "79", &[79], &[48, 13]),
            ("", "all", &[13, 31, 79], &[]),
            ("79", "all", &[13, 79], &[]),
            ("all", "xids", &[13, 79], &[]),
            (" 79 , 48 ", "", &[94], &[79, 48]),
        ] {
            let (checks, unknown) = HealthChecks::parse(disabled, enabled);
            let wrong: Vec<&u64> = fatal
                .iter()
                .filter(|xid| !checks.is_fatal(**xid))
                .chain(harmless.iter().filter(|xid| checks.is_fatal(**xid)))
                .collect();
            assert!(
                wrong.is_empty() && unknown.is_empty(),
                "{disabled:?} {enabled:?}: {wrong:?} {unknown:?}"
            );
        }
        assert_eq!(HealthChecks::parse("79,x", "-1").1, ["x", "-1"]);
        let off = [("all", ""), ("all", "79"), ("all", "all"), ("", ""), ("79", "")].map(|(disabled, enabled)| {
            let (checks, _) = HealthChecks::parse(disabled, enabled);
            checks.are_off()
        });
        assert_eq!(off, [true, false, false, false, false]);
    }
}
