//! What this container was given, as its variables and its files say.

use std::path::Path;

use crate::find::SONAME;
use crate::steps::share::GivenShare;
use crate::steps::{StepOutcome, StepProblem};

/// NVIDIA's runtime takes the GPUs from it.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// The container's units.
const UNITS: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// The units of its GPU.
const ALL_UNITS: &str = "ALIYUN_COM_GPU_MEM_DEV";

/// Device nodes that a container with a GPU of NVIDIA has; the last one is that of WSL.
const DEVICES: [&str; 4] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/dxg"];
/// The device node that a container with an AMD GPU has.
const AMD: &str = "/dev/kfd";

/// A name and a value.
type GivenVariable = (&'static str, String);

/// Return the variables that say something about GPUs.
pub(crate) fn variables() -> Vec<GivenVariable> {
    let value = |name: &'static str| Some((name, std::env::var(name).ok()?));
    [VISIBLE, UNITS, ALL_UNITS].into_iter().filter_map(value).collect()
}

/// Return what the variables say.
pub(crate) fn grant(variables: &[GivenVariable]) -> GivenShare {
    let value = |name: &str| {
        variables
            .iter()
            .find_map(|(of, value)| (*of == name).then_some(value.as_str()))
    };
    let number = |name: &str| value(name)?.parse::<u64>().ok().filter(|units| *units > 0);
    let visible = value(VISIBLE).unwrap_or_default().split(',').map(str::trim);
    let uuids = visible.filter(|entry| entry.len() == 40 && (entry.starts_with("GPU-") || entry.starts_with("MIG-")));
    GivenShare {
        uuids: uuids.map(str::to_owned).collect(),
        units: number(UNITS).zip(number(ALL_UNITS)),
    }
}

/// The signs that a container was given a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Signs {
    /// The variables that name GPUs.
    pub(crate) variables: Vec<&'static str>,
    /// The device nodes.
    pub(crate) devices: Vec<&'static str>,
    /// Whether there is an AMD GPU.
    pub(crate) amd: bool,
}

impl Signs {
    pub(crate) fn of_this_process() -> Signs {
        Signs::of(&variables(), &|path| Path::new(path).exists())
    }

    fn of(variables: &[GivenVariable], exists: &dyn Fn(&str) -> bool) -> Signs {
        let names_gpus = |(name, value): &GivenVariable| {
            let is_none = *name == VISIBLE && matches!(value.as_str(), "" | "void" | "none");
            (!is_none).then_some(*name)
        };
        Signs {
            variables: variables.iter().filter_map(names_gpus).collect(),
            devices: DEVICES.into_iter().filter(|path| exists(path)).collect(),
            amd: exists(AMD),
        }
    }
}

/// Return the result of S01 if there is no driver's library: a failure where a GPU was given, and otherwise nothing to try.
pub(crate) fn no_library(signs: &Signs, refused: &[String]) -> StepOutcome {
    let refused = if refused.is_empty() {
        String::new()
    } else {
        format!(" ({})", refused.join("; "))
    };
    let found = format!("no {SONAME} that can be used is in the usual directories or in LD_LIBRARY_PATH{refused}");
    let given: Vec<&str> = signs.variables.iter().chain(&signs.devices).copied().collect();
    if given.is_empty() {
        let amd =
            "; there is an AMD GPU (/dev/kfd), for which there are no steps: its driver compiles no text without a toolchain";
        return Err(StepProblem::Skip(format!(
            "no GPU of NVIDIA was given: {found}{}",
            if signs.amd { amd } else { "" }
        )));
    }
    Err(StepProblem::finding(
        format!("{found}, although there is {}", given.join(", ")),
        "no program in this container can use CUDA",
        "put the driver's libraries into the container: by CDI (docs/cdi.md), or by NVIDIA's runtime with the capability compute",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_read_from_the_variables() {
        let uuid = "GPU-8f0a1111-0000-4000-8000-000000000000";
        let variables = |visible: &str, own: &str, all: &str| {
            [
                (VISIBLE, visible.to_owned()),
                (UNITS, own.to_owned()),
                (ALL_UNITS, all.to_owned()),
            ]
        };
        let table = [
            (variables(uuid, "2", "80"), vec![uuid], Some((2, 80))),
            (variables(&format!("all,0, {uuid}"), "0", "80"), vec![uuid], None),
            (variables("void", "2", "x"), vec![], None),
            (variables("", "-1", "80"), vec![], None),
        ];
        for (variables, uuids, units) in table {
            let grant = grant(&variables);
            assert_eq!(
                (grant.uuids.iter().map(String::as_str).collect::<Vec<_>>(), grant.units),
                (uuids, units)
            );
        }
    }

    #[test]
    fn a_missing_library_is_a_failure_only_where_a_gpu_was_given() {
        let nothing = Vec::new();
        let void = Vec::from([(VISIBLE, "void".to_owned())]);
        let all = Vec::from([(VISIBLE, "all".to_owned())]);
        let none = |_: &str| false;
        let device = |path: &str| path == "/dev/nvidiactl";
        let amd = |path: &str| path == AMD;
        let table = [
            (&nothing, &none as &dyn Fn(&str) -> bool, false, "no GPU of NVIDIA was given"),
            (&void, &none, false, "no GPU of NVIDIA was given"),
            (&nothing, &amd, false, "there is an AMD GPU"),
            (&all, &none, true, "although there is NVIDIA_VISIBLE_DEVICES"),
            (&void, &device, true, "although there is /dev/nvidiactl"),
        ];
        for (variables, exists, fails, part) in table {
            match no_library(&Signs::of(variables, exists), &["/x: it has 32 bits".to_owned()]) {
                Err(StepProblem::Finding(finding)) => {
                    assert!(fails && finding.found.contains(part) && finding.found.contains("(/x: it has 32 bits)"))
                }
                Err(StepProblem::Skip(reason)) => assert!(!fails && reason.contains(part), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
