//! The versions of the CDI standard, and the lowest version that a spec needs.

use std::fmt;

use super::{Edits, Spec};

/// A released version of the standard that readers accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CdiVersion {
    /// The first version that readers accept.
    V0_3_0,
    /// Added mount types.
    V0_4_0,
    /// Added host paths of device nodes, and device names that begin with a digit.
    V0_5_0,
    /// Added annotations, and dots in the class.
    V0_6_0,
    /// Added additional groups, and Intel RDT (Resource Director Technology).
    V0_7_0,
    /// Did not change the format.
    V0_8_0,
    /// Did not change the format.
    V1_0_0,
    /// Added network interfaces, and schemata and monitoring for Intel RDT.
    V1_1_0,
}

/// A feature of a spec that needs a certain version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// The first version that has the feature.
    pub version: CdiVersion,
    /// The field that uses the feature, such as `devices[0].name`.
    pub field: String,
    /// The feature, as a noun phrase for a message.
    pub what: &'static str,
}

impl CdiVersion {
    /// All versions, oldest first.
    pub const ALL: [CdiVersion; 8] = [
        CdiVersion::V0_3_0,
        CdiVersion::V0_4_0,
        CdiVersion::V0_5_0,
        CdiVersion::V0_6_0,
        CdiVersion::V0_7_0,
        CdiVersion::V0_8_0,
        CdiVersion::V1_0_0,
        CdiVersion::V1_1_0,
    ];

    /// Return the version as it is written in a spec, such as `0.5.0`.
    pub fn as_str(self) -> &'static str {
        match self {
            CdiVersion::V0_3_0 => "0.3.0",
            CdiVersion::V0_4_0 => "0.4.0",
            CdiVersion::V0_5_0 => "0.5.0",
            CdiVersion::V0_6_0 => "0.6.0",
            CdiVersion::V0_7_0 => "0.7.0",
            CdiVersion::V0_8_0 => "0.8.0",
            CdiVersion::V1_0_0 => "1.0.0",
            CdiVersion::V1_1_0 => "1.1.0",
        }
    }

    /// Parse `0.5.0` or `v0.5.0`. The result is `None` for 0.1.0 and 0.2.0: they were released, but readers reject specs of these versions.
    pub fn parse(text: &str) -> Option<CdiVersion> {
        let text = text.strip_prefix('v').unwrap_or(text);
        CdiVersion::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// Report whether a text is a version later than all versions in [`CdiVersion::ALL`].
    pub fn is_to_come(text: &str) -> bool {
        let mut parts = text.split('.').map(|part| part.parse::<u32>().ok());
        let mut next = || parts.next().flatten();
        let numbers = (next(), next(), next());
        numbers.2.is_some() && numbers > (Some(1), Some(1), Some(0))
    }

    /// Return the lowest version that has all features of a spec. Specs are written in this version, because readers reject versions that are
    /// newer than themselves.
    pub fn least_for(spec: &Spec) -> CdiVersion {
        needs(spec)
            .into_iter()
            .map(|need| need.version)
            .max()
            .unwrap_or(CdiVersion::V0_3_0)
    }
}

impl fmt::Display for CdiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Return all features of a spec that CDI 0.3.0 does not have.
pub(super) fn needs(spec: &Spec) -> Vec<Need> {
    let mut needs = Vec::new();
    let mut need = |version, field: String, what| needs.push(Need { version, field, what });
    if spec.kind.split_once('/').is_some_and(|(_, class)| class.contains('.')) {
        need(CdiVersion::V0_6_0, "kind".to_owned(), "a dot in the class");
    }
    if !spec.annotations.is_empty() {
        need(CdiVersion::V0_6_0, "annotations".to_owned(), "annotations");
    }
    for (i, device) in spec.devices.iter().enumerate() {
        if device.name.starts_with(|c: char| c.is_ascii_digit()) {
            need(
                CdiVersion::V0_5_0,
                format!("devices[{i}].name"),
                "a device name that begins with a digit",
            );
        }
        if !device.annotations.is_empty() {
            need(CdiVersion::V0_6_0, format!("devices[{i}].annotations"), "annotations");
        }
    }
    for (field, edits) in spec.all_edits() {
        of_edits(edits, &field, &mut need);
    }
    needs
}

fn of_edits(edits: &Edits, field: &str, need: &mut impl FnMut(CdiVersion, String, &'static str)) {
    let filled = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    for (i, mount) in edits.mounts.iter().enumerate() {
        if filled(&mount.kind) {
            need(CdiVersion::V0_4_0, format!("{field}.mounts[{i}].type"), "a mount type");
        }
    }
    for (i, node) in edits.device_nodes.iter().enumerate() {
        if filled(&node.host_path) {
            let field = format!("{field}.deviceNodes[{i}].hostPath");
            need(CdiVersion::V0_5_0, field, "a host path for a device node");
        }
    }
    if !edits.additional_gids.is_empty() {
        need(CdiVersion::V0_7_0, format!("{field}.additionalGids"), "additional groups");
    }
    if !edits.net_devices.is_empty() {
        need(CdiVersion::V1_1_0, format!("{field}.netDevices"), "network interfaces");
    }
    if let Some(rdt) = &edits.intel_rdt {
        need(CdiVersion::V0_7_0, format!("{field}.intelRdt"), "settings of Intel RDT");
        if rdt.schemata.is_some() {
            need(CdiVersion::V1_1_0, format!("{field}.intelRdt.schemata"), "schemata");
        }
        if rdt.enable_monitoring == Some(true) {
            need(CdiVersion::V1_1_0, format!("{field}.intelRdt.enableMonitoring"), "monitoring");
        }
    }
}
