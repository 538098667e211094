//! The driver that an image requires, according to the variables `NVIDIA_REQUIRE_*`, or `CUDA_VERSION` in images that are older
//! than these variables.
//!
//! Each value is one expression. Spaces separate alternatives, and commas separate the conditions of one alternative (`cuda>=12.4
//! brand=tesla,driver>=470,driver<471`). NVIDIA's toolkit checks requirements only in mode `legacy`; here they count in every mode.
//!
//! Some facts may be unknown: the brand of a GPU if only CDI specs are read, or the CUDA version of a driver that is newer than
//! this program. A condition on an unknown fact counts as fulfilled, so a container is refused only if no alternative can hold.

use std::cmp::Ordering;

use thiserror::Error as ThisError;

use super::devices::DevicePlan;
use super::request::{RequestingContainer, is_legacy_image};
use super::settings::OciRuntimeSettings;
use divvy_cdi::{Registry, stale};
use divvy_host::plain_line;

/// A reason why the driver does not satisfy the image, or why that cannot be checked.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum RequirementError {
    /// No alternative of an expression holds. The text begins with NVIDIA's, so that users can search for it.
    #[error(
        "requirement error: unsatisfied condition: {condition}, please update your driver to a newer version, or use an earlier cuda container; this \
         machine has {facts}; to start the container anyway, set NVIDIA_DISABLE_REQUIRE=true in its environment"
    )]
    Unsatisfied {
        /// The expression on one line, shortened.
        condition: String,
        /// The known facts in words, such as `driver 535.129.03, CUDA 12.2`.
        facts: String,
    },
    /// A part of an expression is not a valid condition.
    #[error(
        "invalid expression: {0:?} in a variable NVIDIA_REQUIRE_* of the container; valid conditions are cuda>=12.4, driver<471, arch>=7.0, brand=tesla"
    )]
    Expression(String),
    /// `CUDA_VERSION` is not a version of one to three numbers.
    #[error("CUDA_VERSION is {0:?}, which is not a version such as 12.4")]
    CudaVersion(String),
}

/// The known facts about the driver and the GPUs. `None` means unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequirementFacts {
    /// The driver's version, such as `550.54.15`.
    pub driver: Option<String>,
    /// The newest CUDA version that the driver supports, such as `12.4`.
    pub cuda: Option<String>,
    /// The compute capability, such as `8.0`, if it is the same for all GPUs.
    pub arch: Option<String>,
    /// The GPUs' brand, such as `tesla`, if it is the same for all GPUs.
    pub brand: Option<String>,
}

impl RequirementFacts {
    /// Return the facts about the driver whose files the CDI specs add to the container.
    pub fn of_specs(plan: &DevicePlan, registry: &Registry) -> RequirementFacts {
        let DevicePlan::Inject { devices, driver_of } = plan else {
            return RequirementFacts::default();
        };
        let of_devices = devices.iter().filter_map(|device| registry.spec_of(device));
        let of_kind = registry.files().iter().rev().filter_map(|file| file.usable());
        let of_kind = of_kind.filter(|spec| Some(&spec.kind) == driver_of.as_ref());
        let driver = of_devices
            .chain(of_kind)
            .filter(|spec| spec.vendor_and_class().is_none_or(|(vendor, _)| vendor != "amd.com"))
            .find_map(stale::driver_version);
        RequirementFacts::of_driver(driver.unwrap_or_default())
    }

    /// Return the facts that follow from a driver's version. An empty version yields no facts.
    pub fn of_driver(driver: &str) -> RequirementFacts {
        RequirementFacts {
            driver: Some(driver.to_owned()).filter(|driver| !driver.is_empty()),
            cuda: cuda_of(driver).map(str::to_owned),
            ..RequirementFacts::default()
        }
    }

    fn in_words(&self) -> String {
        let parts = [
            ("driver", &self.driver),
            ("CUDA", &self.cuda),
            ("compute capability", &self.arch),
            ("brand", &self.brand),
        ];
        let known: Vec<String> = parts
            .into_iter()
            // The driver's version may come from a file name, which can contain any character.
            .filter_map(|(name, value)| Some(format!("{name} {}", plain_line(value.as_ref()?.chars().take(100)))))
            .collect();
        known.join(", ")
    }
}

/// The driver's branches and the newest CUDA version of each (CUDA Toolkit release notes, table "CUDA Toolkit and Corresponding Driver
/// Versions").
const BRANCHES: [(u32, &str); 29] = [
    (384, "9.0"),
    (390, "9.1"),
    (396, "9.2"),
    (410, "10.0"),
    (418, "10.1"),
    (430, "10.1"),
    (435, "10.1"),
    (440, "10.2"),
    (450, "11.0"),
    (455, "11.1"),
    (460, "11.2"),
    (465, "11.3"),
    (470, "11.4"),
    (495, "11.5"),
    (510, "11.6"),
    (515, "11.7"),
    (520, "11.8"),
    (525, "12.0"),
    (530, "12.1"),
    (535, "12.2"),
    (545, "12.3"),
    (550, "12.4"),
    (555, "12.5"),
    (560, "12.6"),
    (565, "12.7"),
    (570, "12.8"),
    (575, "12.9"),
    (580, "13.0"),
    (590, "13.1"),
];

fn cuda_of(driver: &str) -> Option<&'static str> {
    let branch: u32 = driver.split('.').next()?.parse().ok()?;
    BRANCHES.iter().find(|(known, _)| *known == branch).map(|(_, cuda)| *cuda)
}

/// Return the expressions of a container's image, sorted by the names of the variables, with the one for `CUDA_VERSION` last. The
/// list is empty if the settings or `NVIDIA_DISABLE_REQUIRE` disable the check.
///
/// # Errors
/// [`RequirementError::CudaVersion`] if an old image has an invalid `CUDA_VERSION`.
pub fn expressions(container: &RequestingContainer, settings: &OciRuntimeSettings) -> Result<Vec<String>, RequirementError> {
    let off = container.variable("NVIDIA_DISABLE_REQUIRE").unwrap_or_default();
    // The true values of Go's strconv.ParseBool.
    if settings.disable_require || ["1", "t", "T", "TRUE", "true", "True"].contains(&off) {
        return Ok(Vec::new());
    }
    let mut names: Vec<&str> = container
        .env
        .iter()
        .filter_map(|entry| entry.split_once('='))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("NVIDIA_REQUIRE_") && !name.starts_with("NVIDIA_REQUIRE_JETPACK"))
        .collect();
    names.sort_unstable();
    names.dedup();
    let values = names.iter().filter_map(|name| container.variable(name));
    let mut all: Vec<String> = values.filter(|value| !value.is_empty()).map(str::to_owned).collect();
    if is_legacy_image(container) {
        let version = container.variable("CUDA_VERSION").unwrap_or_default();
        let of_cuda =
            major_and_minor(version).ok_or_else(|| RequirementError::CudaVersion(version.chars().take(100).collect()))?;
        all.push(format!("cuda>={of_cuda}"));
    }
    Ok(all)
}

/// Return the major and minor number of a version: `9.0` for `9.0.116`, and `9.0` for `9`.
fn major_and_minor(version: &str) -> Option<String> {
    let parts: Vec<&str> = version.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    (parts.len() <= 3 && parts.iter().all(is_number)).then(|| format!("{}.{}", parts[0], parts.get(1).unwrap_or(&"0")))
}

/// Check that every expression holds, or could hold if some facts are unknown.
///
/// # Errors
/// Fails with [`RequirementError::Expression`] if any condition is invalid, even in an expression that holds; otherwise with
/// [`RequirementError::Unsatisfied`] for the first expression that cannot hold.
pub fn check(expressions: &[String], facts: &RequirementFacts) -> Result<(), RequirementError> {
    let mut refused = None;
    for expression in expressions {
        let mut possible = expression.trim().is_empty();
        for alternative in expression.split_whitespace() {
            let mut holds = true;
            for condition in alternative.split(',').filter(|condition| !condition.is_empty()) {
                holds &= judge(condition, facts)?.unwrap_or(true);
            }
            possible |= holds;
        }
        if !possible {
            refused.get_or_insert(expression);
        }
    }
    match refused {
        None => Ok(()),
        Some(expression) => Err(RequirementError::Unsatisfied {
            // Alternatives may be separated by tabs or newlines, but the message must stay on one line.
            condition: plain_line(expression.chars().take(200).map(|c| if c.is_control() { ' ' } else { c })),
            facts: facts.in_words(),
        }),
    }
}

/// Report whether one condition holds. The result is `None` if the fact is unknown.
fn judge(condition: &str, facts: &RequirementFacts) -> Result<Option<bool>, RequirementError> {
    let invalid = || RequirementError::Expression(condition.chars().take(100).collect());
    let is_operator = |c: char| "=!<>".contains(c);
    let start = condition.find(is_operator).ok_or_else(invalid)?;
    let (property, rest) = condition.split_at(start);
    let value = rest.trim_start_matches(is_operator);
    let operator = &rest[..rest.len() - value.len()];
    let fact = match property {
        "driver" => &facts.driver,
        "cuda" => &facts.cuda,
        "arch" => &facts.arch,
        "brand" => &facts.brand,
        _ => return Err(invalid()),
    };
    if value.is_empty() {
        return Err(invalid());
    }
    if property == "brand" {
        let same = fact.as_ref().map(|brand| brand.eq_ignore_ascii_case(value));
        return match operator {
            "=" => Ok(same),
            "!=" => Ok(same.map(|same| !same)),
            _ => Err(invalid()),
        };
    }
    let wanted = numbers(value).ok_or_else(invalid)?;
    let holds: fn(Ordering) -> bool = match operator {
        "=" => Ordering::is_eq,
        "!=" => Ordering::is_ne,
        "<" => Ordering::is_lt,
        "<=" => Ordering::is_le,
        ">" => Ordering::is_gt,
        ">=" => Ordering::is_ge,
        _ => return Err(invalid()),
    };
    let found = fact.as_deref().and_then(numbers);
    Ok(found.map(|found| holds(compare(&found, &wanted))))
}

fn numbers(version: &str) -> Option<Vec<u64>> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// Compare two versions number by number. A missing number counts as 0.
fn compare(a: &[u64], b: &[u64]) -> Ordering {
    let part = |parts: &[u64], at: usize| parts.get(at).copied().unwrap_or(0);
    (0..a.len().max(b.len()))
        .map(|at| part(a, at).cmp(&part(b, at)))
        .find(|order| order.is_ne())
        .unwrap_or(Ordering::Equal)
}
