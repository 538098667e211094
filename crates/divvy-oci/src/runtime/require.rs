//! What an image requires of the driver: `NVIDIA_REQUIRE_*`, and `CUDA_VERSION` of images that are older than these.
//!
//! Each value is one expression: alternatives stand beside each other, conditions of one alternative behind commas (`cuda>=12.4
//! brand=tesla,driver>=470,driver<471`). NVIDIA's toolkit judges them in mode `legacy` only; here they count in every mode. What nobody knows
//! of this machine (a GPU's brand where only specs are read, the CUDA version of a driver that is newer than this program) is in nobody's way:
//! a container is refused only where no alternative can be true.

use std::cmp::Ordering;

use thiserror::Error as ThisError;

use super::plan::Plan;
use super::request::{Container, is_legacy_image};
use super::settings::Settings;
use divvy_cdi::{Registry, stale};
use divvy_host::plain_line;

/// Why the driver is not the one that the image wants.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// No alternative of an expression holds. NVIDIA's sentence, for which people search.
    #[error(
        "requirement error: unsatisfied condition: {condition}, please update your driver to a newer version, or use an earlier cuda container; this \
         machine has {facts}, and NVIDIA_DISABLE_REQUIRE=true in the container's environment starts it all the same"
    )]
    Unsatisfied {
        /// The expression.
        condition: String,
        /// In words.
        facts: String,
    },
    /// What is no condition.
    #[error(
        "invalid expression: {0:?} in a variable NVIDIA_REQUIRE_* of the container; cuda>=12.4, driver<471, arch>=7.0 and brand=tesla are conditions"
    )]
    Expression(String),
    /// `CUDA_VERSION`
    #[error("CUDA_VERSION is {0:?}, which is no version (12.4 is one)")]
    CudaVersion(String),
}

/// What is known of the driver and the GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// `550.54.15`
    pub driver: Option<String>,
    /// The newest CUDA that the driver runs, `12.4`.
    pub cuda: Option<String>,
    /// Compute capability, `8.0`, where all GPUs have the same.
    pub arch: Option<String>,
    /// `tesla`
    pub brand: Option<String>,
}

impl Facts {
    /// Of the driver whose files CDI specs put into the container.
    pub fn of_specs(plan: &Plan, registry: &Registry) -> Facts {
        let Plan::Inject { devices, driver_of } = plan else {
            return Facts::default();
        };
        let of_devices = devices.iter().filter_map(|device| registry.spec_of(device));
        let of_kind = registry.files().iter().rev().filter_map(|file| file.usable());
        let of_kind = of_kind.filter(|spec| Some(&spec.kind) == driver_of.as_ref());
        let driver = of_devices
            .chain(of_kind)
            .filter(|spec| spec.vendor_and_class().is_none_or(|(vendor, _)| vendor != "amd.com"))
            .find_map(stale::driver_version);
        Facts::of_driver(driver.unwrap_or_default())
    }

    /// Of a driver alone.
    pub fn of_driver(driver: &str) -> Facts {
        Facts {
            driver: Some(driver.to_owned()).filter(|driver| !driver.is_empty()),
            cuda: cuda_of(driver).map(str::to_owned),
            ..Facts::default()
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
            // A driver's version may be a part of a file's name.
            .filter_map(|(name, value)| Some(format!("{name} {}", plain_line(value.as_ref()?.chars().take(100)))))
            .collect();
        known.join(", ")
    }
}

/// Branches of the driver, and the CUDA that came with each (CUDA Toolkit release notes, table "CUDA Toolkit and Corresponding Driver Versions").
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

/// What a container's image requires, by the names of its variables.
///
/// # Errors
/// [`Error::CudaVersion`].
pub fn expressions(container: &Container, settings: &Settings) -> Result<Vec<String>, Error> {
    let off = container.variable("NVIDIA_DISABLE_REQUIRE").unwrap_or_default();
    // As Go's strconv.ParseBool.
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
        let of_cuda = major_and_minor(version).ok_or_else(|| Error::CudaVersion(version.chars().take(100).collect()))?;
        all.push(format!("cuda>={of_cuda}"));
    }
    Ok(all)
}

/// `9.0` of `9.0.116`, `9.0` of `9`.
fn major_and_minor(version: &str) -> Option<String> {
    let parts: Vec<&str> = version.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    (parts.len() <= 3 && parts.iter().all(is_number)).then(|| format!("{}.{}", parts[0], parts.get(1).unwrap_or(&"0")))
}

/// Whether all expressions hold, or may.
///
/// # Errors
/// [`Error::Unsatisfied`] for the first that does not; [`Error::Expression`] for what is none, whatever else is true.
pub fn check(expressions: &[String], facts: &Facts) -> Result<(), Error> {
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
        Some(expression) => Err(Error::Unsatisfied {
            // On one line, whatever blanks stand between the alternatives.
            condition: plain_line(expression.chars().take(200).map(|c| if c.is_control() { ' ' } else { c })),
            facts: facts.in_words(),
        }),
    }
}

/// Whether one condition holds, if that is known.
fn judge(condition: &str, facts: &Facts) -> Result<Option<bool>, Error> {
    let invalid = || Error::Expression(condition.chars().take(100).collect());
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

/// Part by part; one that is missing is 0.
fn compare(a: &[u64], b: &[u64]) -> Ordering {
    let part = |parts: &[u64], at: usize| parts.get(at).copied().unwrap_or(0);
    (0..a.len().max(b.len()))
        .map(|at| part(a, at).cmp(&part(b, at)))
        .find(|order| order.is_ne())
        .unwrap_or(Ordering::Equal)
}
