//! The rules in a pod's annotations that say which GPUs the pod accepts. (The amount of memory is requested in the limits of the
//! pod's containers.)

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{DEVICE_TEXT_BYTES, QUOTED_BYTES, RULE_BYTES, RULE_PATTERNS, RULE_UUIDS, TEST_RUN_BYTES, quoted, shortened};
use crate::{ContainerRequest, Enforcement, Error, Health, MiB, TestRun, Vendor, names, quantity_value};

/// A pod's rules for its GPUs. The default accepts one GPU of any kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuRules {
    /// The number of GPUs over which the pod's memory is spread evenly. `None` means one.
    pub gpus: Option<u32>,
    /// The products that the pod accepts.
    pub models: ModelRule,
    /// The minimum total memory of a GPU.
    pub least_memory: MiB,
    /// The UUIDs of the only GPUs that the pod accepts. If the list is empty, the pod accepts any GPU.
    pub uuids: Vec<String>,
    /// The preference among the GPUs that fit.
    pub prefer: Option<Prefer>,
    /// The largest part of each GPU's compute time that the pod may use, in percent, 1 to 100. `None` leaves the compute time unlimited.
    pub cores: Option<u32>,
    /// Whether the pod must be held to its share. `None` leaves it to the node: the share is enforced if the node can.
    pub isolation: Option<Isolation>,
    /// The vendor of the GPUs of which the pod gets shares. `None` stands for the default vendor ([`GpuRules::vendor_of_shares`]). A pod with whole
    /// GPUs names the vendor by its resource.
    pub vendor: Option<Vendor>,
    /// The run whose test of a GPU the pod is. It accepts the GPUs in `uuids` while this run tests them ([`crate::Health::Testing`]).
    pub test: Option<TestRun>,
}

/// Whether a pod must be held to its share of a GPU. A pod with a whole GPU has no neighbor, so every value is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isolation {
    /// The share is enforced in a way from which no program in the pod can escape.
    Hard,
    /// The share is enforced in any way.
    Soft,
    /// The share is not enforced, even if the node can.
    None,
}

impl Isolation {
    /// All values.
    pub const ALL: [Isolation; 3] = [Isolation::Hard, Isolation::Soft, Isolation::None];

    /// Return the annotation's value.
    pub fn name(self) -> &'static str {
        match self {
            Isolation::Hard => "hard",
            Isolation::Soft => "soft",
            Isolation::None => "none",
        }
    }

    /// Report whether a share of a GPU is enough on which shares are enforced in this way.
    pub fn is_met_by(self, enforcement: Option<Enforcement>) -> bool {
        match self {
            Isolation::Hard => enforcement.is_some_and(Enforcement::has_cgroup),
            Isolation::Soft => enforcement.is_some_and(Enforcement::limits_memory),
            Isolation::None => true,
        }
    }
}

/// The largest number of GPUs over which a pod's memory may be spread. Placement policies use the same limit.
pub const MOST_GPUS: u32 = 16;

/// All of a GPU's compute time, in percent.
pub const ALL_CORES: u32 = 100;

/// A preference among GPUs that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Prefer {
    /// Prefer the GPU with the highest estimate of FP16 operations per second times memory bandwidth.
    Fastest,
    /// Prefer the GPU with the most total memory.
    MostMemory,
    /// Prefer the GPU with the least total memory.
    LeastMemory,
}

impl Prefer {
    /// All preferences.
    pub const ALL: [Prefer; 3] = [Prefer::Fastest, Prefer::MostMemory, Prefer::LeastMemory];

    /// Return the annotation's value for this preference.
    pub fn name(self) -> &'static str {
        match self {
            Prefer::Fastest => "fastest",
            Prefer::MostMemory => "most-memory",
            Prefer::LeastMemory => "least-memory",
        }
    }
}

/// Patterns for the GPU products that a pod accepts and rejects.
///
/// A pattern must match a product's name from the start of a word to the end of the name: `A100*` and `NVIDIA A100*` match
/// `NVIDIA A100-SXM4-40GB`, `T4` matches `Tesla T4`, but `RTX 3080` does not match `NVIDIA GeForce RTX 3080 Ti`. `*` stands for
/// any text. Case is ignored. A space is equal to a dash, because NVIDIA's GPU feature discovery writes dashes in its labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelRule {
    /// At least one of these patterns must match, unless the list is empty.
    allow: Vec<ProductPattern>,
    /// None of these patterns may match.
    deny: Vec<ProductPattern>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ProductPattern {
    /// The pattern as the user wrote it.
    written: String,
    /// The pattern in the form in which it is compared ([`normal`]).
    normal: String,
}

/// Why a text is not a rule about products.
#[derive(Debug, thiserror::Error)]
enum PatternError {
    #[error("it has {0} patterns, but at most {RULE_PATTERNS} are allowed")]
    TooMany(usize),
    #[error("{} is not a pattern", quoted(.0))]
    NotAPattern(String),
    #[error("a pattern has {0} bytes, but at most {DEVICE_TEXT_BYTES} are allowed")]
    Long(usize),
}

impl ModelRule {
    /// Report whether the rule accepts GPUs of this product. If the product is unknown (an empty name), the rule accepts the GPU
    /// only if it has no patterns.
    pub fn allows(&self, product: &str) -> bool {
        if self.allow.is_empty() && self.deny.is_empty() {
            return true;
        }
        if product.trim().is_empty() {
            return false;
        }
        let product = normal(product.trim());
        let matches = |pattern: &ProductPattern| is_match(&pattern.normal, &product);
        (self.allow.is_empty() || self.allow.iter().any(matches)) && !self.deny.iter().any(matches)
    }

    fn parse(text: &str) -> Result<ModelRule, PatternError> {
        let mut rule = ModelRule::default();
        let patterns = text.split(',').count();
        if patterns > RULE_PATTERNS {
            return Err(PatternError::TooMany(patterns));
        }
        for part in text.split(',').map(str::trim) {
            let (pattern, list) = match part.strip_prefix('!') {
                Some(pattern) => (pattern.trim(), &mut rule.deny),
                None => (part, &mut rule.allow),
            };
            // No product name contains these characters, and messages show the patterns to other users.
            if pattern.is_empty() || pattern.contains('!') || pattern.contains(char::is_control) {
                return Err(PatternError::NotAPattern(part.to_owned()));
            }
            if pattern.len() > DEVICE_TEXT_BYTES {
                return Err(PatternError::Long(pattern.len()));
            }
            list.push(ProductPattern {
                written: pattern.to_owned(),
                normal: normal(pattern),
            });
        }
        Ok(rule)
    }
}

impl fmt::Display for ModelRule {
    /// Format as a phrase that follows "a GPU", "GPUs", or "no GPU": `of a product like A100*, but not A100-PCIE*`, or `other
    /// than T4`. If any product is accepted, write nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |patterns: &[ProductPattern]| {
            let written: Vec<&str> = patterns.iter().map(|pattern| pattern.written.as_str()).collect();
            written.join(" or ")
        };
        match (self.allow.as_slice(), self.deny.as_slice()) {
            ([], []) => Ok(()),
            (allow, []) => write!(f, "of a product like {}", list(allow)),
            ([], deny) => write!(f, "other than {}", list(deny)),
            (allow, deny) => write!(f, "of a product like {}, but not {}", list(allow), list(deny)),
        }
    }
}

/// Return the form in which names are compared: in lower case, and with dashes instead of spaces, as in the labels of GPU feature
/// discovery.
fn normal(text: &str) -> String {
    text.to_ascii_lowercase().replace(' ', "-")
}

/// Report whether a pattern matches a name. Both must be in the form that [`normal`] returns.
///
/// Tenants choose the patterns and nodes choose the names, so the running time must be linear in the sum of their lengths.
/// Therefore the parts between the stars are searched for from left to right. The first match of each part is always the best
/// one, because it leaves the most text for the next part.
fn is_match(pattern: &str, name: &str) -> bool {
    let is_start = |at: usize| at == 0 || name.as_bytes()[at - 1] == b'-';
    let Some((first, rest)) = pattern.split_once('*') else {
        return name.len().checked_sub(pattern.len()).is_some_and(is_start) && name.ends_with(pattern);
    };
    let mut starts = (0..name.len()).filter(|at| is_start(*at));
    let Some(start) = starts.find(|at| name.as_bytes()[*at..].starts_with(first.as_bytes())) else {
        return false;
    };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let mut left = &name[start + first.len()..];
    for part in middle.split('*') {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

impl GpuRules {
    /// Parse the rules in a pod's annotations. `None` means that the pod has no rules.
    ///
    /// # Errors
    /// Fails if a value cannot be read, or if a key with Divvy's prefix is not one of [`names::POD_KEYS`]. The error says what
    /// was found and what is allowed, and gives an example.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Option<GpuRules>, Error> {
        let ours = annotations
            .range(names::PREFIX.to_owned()..)
            .take_while(|(key, _)| key.starts_with(names::PREFIX));
        let mut rules: Option<GpuRules> = None;
        for (key, value) in ours {
            // The value of an unknown key is neither checked nor repeated.
            let what = names::POD_KEYS.into_iter().find(|known| known == key);
            if let Some(what) = what.filter(|_| value.len() > RULE_BYTES) {
                return Err(Error::invalid(
                    what,
                    format!(
                        "{} has {} bytes; at most {RULE_BYTES} are allowed",
                        quoted(value),
                        value.len()
                    ),
                ));
            }
            let value = value.trim();
            let wrong =
                |what: &'static str, allowed: &str| Err(Error::invalid(what, format!("{} was found; {allowed}", quoted(value))));
            match key.as_str() {
                names::ALLOCATION | names::SCHEDULER_CHECK => {}
                names::GPUS => match value.parse().ok().filter(|gpus| (1..=MOST_GPUS).contains(gpus)) {
                    Some(gpus) => rules.get_or_insert_default().gpus = Some(gpus),
                    None => {
                        return wrong(
                            names::GPUS,
                            &format!("write the number of GPUs, from 1 to {MOST_GPUS}, such as \"2\""),
                        );
                    }
                },
                names::GPU_MODEL => match ModelRule::parse(value) {
                    Ok(models) => rules.get_or_insert_default().models = models,
                    Err(why) => {
                        return wrong(
                            names::GPU_MODEL,
                            &format!(
                                "{why}; patterns of products are separated by commas, those with ! are denied: \"A100*,H100*\", \"!T4\""
                            ),
                        );
                    }
                },
                names::GPU_MEMORY => match least_memory(value) {
                    Ok(memory) => rules.get_or_insert_default().least_memory = memory,
                    Err(allowed) => return wrong(names::GPU_MEMORY, allowed),
                },
                names::GPU_PREFER => match Prefer::ALL.into_iter().find(|prefer| prefer.name() == value) {
                    Some(prefer) => rules.get_or_insert_default().prefer = Some(prefer),
                    None => {
                        return wrong(names::GPU_PREFER, "write fastest, most-memory or least-memory");
                    }
                },
                names::ISOLATION => match Isolation::ALL.into_iter().find(|isolation| isolation.name() == value) {
                    Some(isolation) => rules.get_or_insert_default().isolation = Some(isolation),
                    None => return wrong(names::ISOLATION, "write hard, soft or none"),
                },
                names::GPU_VENDOR => match Vendor::of_name(value) {
                    Some(vendor) => rules.get_or_insert_default().vendor = Some(vendor),
                    None => {
                        let [names @ .., last] = Vendor::ALL.map(Vendor::name);
                        return wrong(names::GPU_VENDOR, &format!("write {} or {last}", names.join(", ")));
                    }
                },
                names::GPU_TEST => match TestRun::parse(value) {
                    Some(run) => rules.get_or_insert_default().test = Some(run),
                    None => {
                        return wrong(
                            names::GPU_TEST,
                            &format!(
                                "divvy smoke writes the id of its run, at most {TEST_RUN_BYTES} lowercase letters and digits; leave the annotation out"
                            ),
                        );
                    }
                },
                names::GPU_UUID => {
                    let uuids: Vec<String> = value.split(',').map(|uuid| uuid.trim().to_owned()).collect();
                    let many = value.split(',').count() > RULE_UUIDS;
                    if many || uuids.iter().any(|uuid| uuid.is_empty() || uuid.len() > DEVICE_TEXT_BYTES) {
                        return wrong(
                            names::GPU_UUID,
                            &format!(
                                "write at most {RULE_UUIDS} UUIDs of GPUs, each of at most {DEVICE_TEXT_BYTES} bytes, separated by commas, as \
                                 kubectl inspect gpushare -o json shows them: \"GPU-…\""
                            ),
                        );
                    }
                    rules.get_or_insert_default().uuids = uuids;
                }
                names::GPU_CORES => match value.parse().ok().filter(|cores| (1..=ALL_CORES).contains(cores)) {
                    Some(cores) => rules.get_or_insert_default().cores = Some(cores),
                    None => {
                        return wrong(
                            names::GPU_CORES,
                            "write the percentage of each GPU's compute time that the pod may use, from 1 to 100, such as \"30\"",
                        );
                    }
                },
                _ => {
                    return Err(Error::invalid(
                        "an annotation of the pod",
                        format!(
                            "{} means nothing to Divvy; a pod may have {}",
                            shortened(key, QUOTED_BYTES),
                            names::POD_KEYS.join(", ")
                        ),
                    ));
                }
            }
        }
        Ok(rules)
    }

    /// Return the vendor of the GPUs of which the pod gets shares. The programs of an image are made for GPUs of one vendor, so a pod that says nothing
    /// gets the default vendor's, and never another's by accident.
    pub fn vendor_of_shares(&self) -> Vendor {
        self.vendor.unwrap_or_default()
    }

    /// Report whether the rules accept a GPU of this health, which this run tests. A GPU that is being tested is open only to the pod of that test.
    pub fn accept_health(&self, health: Health, tested_by: Option<&TestRun>) -> bool {
        health == Health::Ok || (health == Health::Testing && self.test.is_some() && self.test.as_ref() == tested_by)
    }

    /// Return the number of GPUs over which the pod's memory is spread, at least 1.
    pub fn spread_over(&self) -> u64 {
        u64::from(self.gpus.unwrap_or(1).max(1))
    }

    /// Check that the request of each container can be spread evenly over the GPUs.
    ///
    /// # Errors
    /// Fails if the units of a container are not a multiple of the number of GPUs. The error names the container and the nearest
    /// multiples.
    pub fn can_spread(&self, containers: &[ContainerRequest]) -> Result<(), Error> {
        let gpus = self.spread_over();
        match containers.iter().find(|container| !container.units.is_multiple_of(gpus)) {
            None => Ok(()),
            Some(ContainerRequest { name, units, .. }) => {
                let below = units - units % gpus;
                let or_less = if below > 0 { format!("{below} or ") } else { String::new() };
                Err(Error::invalid(
                    names::GPUS,
                    format!(
                        "\"{gpus}\" was found, but the {units} units of {} that container {name} requests cannot be spread evenly over {gpus} GPUs; \
                         request {or_less}{}",
                        names::GPU_MEM,
                        below.saturating_add(gpus)
                    ),
                ))
            }
        }
    }

    /// Report whether the rules accept a GPU, regardless of how much of its memory is free. `total` is the GPU's total memory.
    /// `uuid` is `None` if it is unknown.
    pub fn allow(&self, product: &str, total: MiB, uuid: Option<&str>) -> bool {
        self.allow_any_product(total, uuid) && self.models.allows(product)
    }

    /// Report whether the rules accept a share of a GPU on which shares are enforced in this way.
    pub fn accept_share(&self, enforcement: Option<Enforcement>) -> bool {
        let limits_compute = enforcement.is_some_and(Enforcement::limits_compute);
        self.isolation.is_none_or(|isolation| isolation.is_met_by(enforcement)) && (limits_compute || !self.needs_compute_limit())
    }

    /// Report whether the pod must be held to its share of the compute time. For a pod that wants no isolation, the share only counts when pods are
    /// placed.
    pub fn needs_compute_limit(&self) -> bool {
        self.cores.is_some() && self.isolation != Some(Isolation::None)
    }

    /// Check everything that [`GpuRules::allow`] checks, except the product. Callers check the product only once for many equal
    /// GPUs.
    pub fn allow_any_product(&self, total: MiB, uuid: Option<&str>) -> bool {
        total >= self.least_memory
            && (self.uuids.is_empty() || uuid.is_some_and(|uuid| self.uuids.iter().any(|wanted| wanted == uuid)))
    }
}

/// Parse `>=40Gi` and round the size up to MiB. Refuse a size below 1 MiB, because the user must have forgotten the suffix.
fn least_memory(text: &str) -> Result<MiB, &'static str> {
    const MIB: u64 = 1 << 20;
    let quantity = text.strip_prefix(">=").map(str::trim);
    match quantity.and_then(|quantity| quantity_value(quantity).ok()) {
        Some(bytes) if bytes >= MIB => Ok(MiB(bytes.div_ceil(MIB))),
        Some(_) => Err("that is less than 1 MiB; write the size with a suffix such as Gi: \">=40Gi\""),
        None => Err("write >= and the size that a GPU must have at least, such as \">=40Gi\""),
    }
}

/// Format as `80 GiB` if the size is a whole number of GiB, else as `81559 MiB`.
fn size(memory: MiB) -> String {
    match memory.0 {
        mib if mib.is_multiple_of(1024) => format!("{} GiB", mib / 1024),
        _ => memory.to_string(),
    }
}

impl fmt::Display for GpuRules {
    /// Format as a phrase that follows "a GPU": `of a product like A100* and with 40 GiB or more in all`. If any GPU is accepted,
    /// write nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(vendor) = self.vendor {
            write!(f, "from {vendor}")?;
        }
        let mut parts = Vec::new();
        if self.least_memory > MiB::ZERO {
            parts.push(format!("with {} or more in all", size(self.least_memory)));
        }
        let enforced = match self.isolation {
            Some(Isolation::Hard) => Some("on which the driver enforces shares (isolation: hard)"),
            Some(Isolation::Soft) => Some("on which shares are enforced (isolation: soft)"),
            Some(Isolation::None) | None => None,
        };
        if let Some(enforced) = enforced {
            parts.push(enforced.to_owned());
        }
        if let Some(cores) = self.cores.filter(|_| self.needs_compute_limit()) {
            parts.push(format!("on which compute time is limited (gpu-cores: {cores})"));
        }
        if !self.uuids.is_empty() {
            parts.push(format!("named {}", self.uuids.join(" or ")));
        }
        let (models, rest) = (self.models.to_string(), parts.join(" and "));
        let and = match self.models.deny.is_empty() {
            _ if models.is_empty() || rest.is_empty() => "",
            true => " and ",
            // Without the comma, the rest would read as part of what is denied.
            false => ", and ",
        };
        let space = match self.vendor {
            Some(_) if !(models.is_empty() && rest.is_empty()) => " ",
            _ => "",
        };
        write!(f, "{space}{models}{and}{rest}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<Option<GpuRules>, Error> {
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        GpuRules::from_annotations(&annotations.collect())
    }

    #[test]
    fn patterns_match_from_a_word_to_the_end_of_the_name() {
        let a100 = "NVIDIA A100-SXM4-40GB";
        let check = |rule: &str, product: &str, expected: bool| {
            let rule = ModelRule::parse(rule).expect("a rule");
            assert_eq!(rule.allows(product), expected, "{rule} {product}");
        };
        check("A100*", a100, true);
        check("a100-sxm4-40gb", a100, true);
        check("NVIDIA-A100-SXM4-40GB", a100, true);
        check("NVIDIA A100*", a100, true);
        check("A100", a100, false);
        check("*40GB", a100, true);
        check("*", a100, true);
        check("A*SXM*40*", a100, true);
        check("A*PCIe*", a100, false);
        check("T4", "Tesla T4", true);
        check("T4", "NVIDIA T4", true);
        check("T4", "NVIDIA T400", false);
        check("RTX 3080", "NVIDIA GeForce RTX 3080 Ti", false);
        check("RTX 3080*", "NVIDIA GeForce RTX 3080 Ti", true);
        check("A100*,H100*", "NVIDIA H100 PCIe", true);
        check("A100*,H100*", "NVIDIA H200", false);
        check("!T4", "Tesla T4", false);
        check("!T4", a100, true);
        check("A*, !A100*", a100, false);
        check("A*, !A100*", "NVIDIA A30", true);
        check("40GB*", "", false);
        check("aa*aa", "aaa", false);
        check("A*40*B", "NVIDIA A100-40GB-40GC-B", true);
        check("größe*", "Die GRößE 4", true);
        check("*", " ", false);
    }

    /// Report whether a pattern matches a name, exactly as defined and without regard to running time: from the start of a word
    /// to the end of the name, with a star for any text.
    fn by_definition(pattern: &[u8], name: &[u8]) -> bool {
        fn whole(pattern: &[u8], name: &[u8]) -> bool {
            match (pattern.split_first(), name.split_first()) {
                (None, _) => name.is_empty(),
                (Some((b'*', rest)), _) => (0..=name.len()).any(|taken| whole(rest, &name[taken..])),
                (Some((a, pattern)), Some((b, name))) => a == b && whole(pattern, name),
                (Some(_), None) => false,
            }
        }
        let starts = (0..name.len()).filter(|at| *at == 0 || name[at - 1] == b'-');
        starts.into_iter().any(|start| whole(pattern, &name[start..]))
    }

    proptest::proptest! {
        #[test]
        fn a_pattern_matches_as_it_is_defined(pattern in "[ab*-]{1,7}", name in "[ab-]{1,9}") {
            proptest::prop_assert_eq!(is_match(&pattern, &name), by_definition(pattern.as_bytes(), name.as_bytes()));
        }
    }

    /// The message does not repeat the refused rules.
    #[test]
    fn rules_above_the_limits_are_refused() {
        let list = |count: usize, one: &str| vec![one; count].join(",");
        let fine = [
            ("divvy.dev/gpu-model", list(RULE_PATTERNS, "A100*")),
            ("divvy.dev/gpu-model", "a".repeat(DEVICE_TEXT_BYTES)),
            ("divvy.dev/gpu-uuid", list(RULE_UUIDS, "GPU-1")),
            ("divvy.dev/gpu-uuid", "g".repeat(DEVICE_TEXT_BYTES)),
        ];
        for (key, value) in fine {
            assert!(matches!(read(&[(key, &value)]), Ok(Some(_))), "{key} {value}");
        }
        for (key, value, part) in [
            (
                "divvy.dev/gpu-model",
                list(125_000, "a"),
                "has 249999 bytes; at most 1024 are allowed",
            ),
            (
                "divvy.dev/gpu-model",
                list(RULE_PATTERNS + 1, "a"),
                "it has 33 patterns, but at most 32 are allowed",
            ),
            (
                "divvy.dev/gpu-model",
                "a".repeat(DEVICE_TEXT_BYTES + 1),
                "a pattern has 97 bytes, but at most 96 are allowed",
            ),
            ("divvy.dev/gpu-model", "!".repeat(1024), "is not a pattern"),
            ("divvy.dev/gpu-uuid", list(RULE_UUIDS + 1, "GPU-1"), "at most 16 UUIDs"),
            ("divvy.dev/gpu-uuid", "g".repeat(DEVICE_TEXT_BYTES + 1), "at most 96 bytes"),
            (
                "divvy.dev/gpu-memory",
                format!(">={}", "0".repeat(250_000)),
                "bytes; at most 1024 are allowed",
            ),
            ("divvy.dev/gpus", "1".repeat(250_000), "bytes; at most 1024 are allowed"),
            ("divvy.dev/gpu-prefer", "\u{202e}".repeat(300), "fastest, most-memory"),
            ("divvy.dev/gpu-cores", "9".repeat(250_000), "at most"),
        ] {
            let error = read(&[(key, &value)]).expect_err(key).to_string();
            assert!(error.starts_with(key) && error.contains(part), "{error}");
            assert!(error.len() <= 500, "{} bytes: {error}", error.len());
        }
        let key = format!("divvy.dev/{}", "x".repeat(250_000));
        let error = read(&[(&key, "")]).expect_err("no such key").to_string();
        assert!(
            error.len() < 500 && error.contains("a pod may have divvy.dev/gpu-model"),
            "{error}"
        );
    }

    /// What the rules deny is shown separately.
    #[test]
    fn rules_are_shown_as_they_were_written() {
        let (model, memory, uuid) = ("divvy.dev/gpu-model", "divvy.dev/gpu-memory", "divvy.dev/gpu-uuid");
        let isolation = "divvy.dev/isolation";
        for (annotations, expected) in [
            (&[("divvy.dev/gpus", "2")][..], ""),
            (&[(model, "A100*")], "of a product like A100*"),
            (&[("divvy.dev/gpu-vendor", "amd")], "from AMD"),
            (&[("divvy.dev/gpu-vendor", "intel")], "from Intel"),
            (
                &[(model, "*MI210"), ("divvy.dev/gpu-vendor", " amd "), (memory, ">=40Gi")],
                "from AMD of a product like *MI210 and with 40 GiB or more in all",
            ),
            (&[(model, "nvidia A100*, H100*")], "of a product like nvidia A100* or H100*"),
            (&[(model, "!T4")], "other than T4"),
            (&[(model, "! T4, !P4")], "other than T4 or P4"),
            (&[(model, "!A100-PCIE*,A100*")], "of a product like A100*, but not A100-PCIE*"),
            (&[(memory, ">=80Gi")], "with 80 GiB or more in all"),
            (&[(memory, ">=80G")], "with 76294 MiB or more in all"),
            (&[(memory, ">=1Mi")], "with 1 MiB or more in all"),
            (
                &[(model, "!T4"), (memory, ">=40Gi")],
                "other than T4, and with 40 GiB or more in all",
            ),
            (&[(isolation, "none"), ("divvy.dev/gpu-cores", "30")], ""),
            (
                &[(isolation, "soft"), ("divvy.dev/gpu-cores", "30")],
                "on which shares are enforced (isolation: soft) and on which compute time is limited (gpu-cores: 30)",
            ),
            (
                &[(memory, ">=40Gi"), (isolation, "hard")],
                "with 40 GiB or more in all and on which the driver enforces shares (isolation: hard)",
            ),
            (
                &[(model, "A100*"), (memory, ">= 40Gi"), (uuid, "GPU-1, GPU-2")],
                "of a product like A100* and with 40 GiB or more in all and named GPU-1 or GPU-2",
            ),
        ] {
            let rules = read(annotations).expect("they are right").expect("some");
            assert_eq!(rules.to_string(), expected);
        }
    }

    #[test]
    fn only_a_pods_wish_makes_enforcement_necessary() {
        // "compute" stands for a share of the compute time, which the driver's limit is not on. MPS is here only for compute.
        let cases = [
            (
                "hard",
                ["cgroup", "cgroup+guard", "cgroup+mps", "cgroup+guard+mps"].as_slice(),
            ),
            (
                "soft",
                &[
                    "cgroup",
                    "guard",
                    "cgroup+guard",
                    "cgroup+mps",
                    "guard+mps",
                    "cgroup+guard+mps",
                ],
            ),
            ("hard compute", &["cgroup+guard", "cgroup+mps", "cgroup+guard+mps"]),
            (
                "soft compute",
                &["guard", "cgroup+guard", "cgroup+mps", "guard+mps", "cgroup+guard+mps"],
            ),
            (
                "compute",
                &["guard", "mps", "cgroup+guard", "cgroup+mps", "guard+mps", "cgroup+guard+mps"],
            ),
        ];
        for (wanted, expected) in cases {
            let words = wanted.split(' ').map(|word| match word {
                "compute" => ("divvy.dev/gpu-cores", "30"),
                isolation => ("divvy.dev/isolation", isolation),
            });
            let rules = read(&words.collect::<Vec<_>>()).expect("right").expect("some");
            let accepted = Enforcement::ALL.into_iter().filter(|kind| rules.accept_share(Some(*kind)));
            let accepted: BTreeSet<&str> = accepted.map(Enforcement::name).collect();
            assert_eq!(accepted, expected.iter().copied().collect(), "{wanted}");
            assert!(!rules.accept_share(None), "{wanted}");
        }
        for annotations in [
            [("divvy.dev/isolation", "none")].as_slice(),
            &[("divvy.dev/isolation", "none"), ("divvy.dev/gpu-cores", "30")],
        ] {
            let rules = read(annotations).expect("right").expect("some");
            let all = Enforcement::ALL.map(Some).into_iter().chain([None]);
            assert!(all.into_iter().all(|with| rules.accept_share(with)), "{annotations:?}");
        }
        assert!(GpuRules::default().accept_share(None));
    }

    #[test]
    fn a_gpu_under_test_is_accepted_by_the_pod_of_that_test() {
        let (uuid, test) = (("divvy.dev/gpu-uuid", "GPU-1"), ("divvy.dev/gpu-test", " 1a2b "));
        let of_test = &[Health::Ok, Health::Testing][..];
        for (annotations, tested_by, accepted) in [
            (&[uuid][..], Some("1a2b"), &[Health::Ok][..]),
            (&[uuid], None, &[Health::Ok]),
            (&[uuid, test], Some("1a2b"), of_test),
            (&[uuid, test], Some("1a2c"), &[Health::Ok]),
            (&[uuid, test], None, &[Health::Ok]),
        ] {
            let rules = read(annotations).expect("right").expect("some");
            let run = tested_by.and_then(TestRun::parse);
            let found: Vec<Health> = Health::ALL
                .into_iter()
                .filter(|health| rules.accept_health(*health, run.as_ref()))
                .collect();
            assert_eq!(found, accepted, "{annotations:?} {tested_by:?}");
        }
    }

    /// The message also says what was found and what is allowed.
    #[test]
    fn a_refused_annotation_comes_with_an_example() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(
            read(&[("divvy.dev/allocation", "{}"), ("example.com/divvy.dev/gpus", "x")]),
            Ok(None)
        );
        let rules = read(&[
            ("divvy.dev/gpu-model", "A100*"),
            ("divvy.dev/gpu-memory", ">= 40Gi"),
            ("divvy.dev/gpu-prefer", "fastest"),
            ("divvy.dev/gpu-uuid", "GPU-1, GPU-2"),
            ("divvy.dev/gpus", " 2 "),
        ]);
        let rules = rules.expect("they are right").expect("some");
        assert_eq!(rules.gpus, Some(2));
        assert_eq!((rules.least_memory, rules.prefer), (MiB(40 * 1024), Some(Prefer::Fastest)));
        assert!(rules.allow("NVIDIA A100-SXM4-40GB", MiB(40960), Some("GPU-2")));
        assert!(!rules.allow("NVIDIA A100-SXM4-40GB", MiB(40959), Some("GPU-2")));
        assert!(!rules.allow("NVIDIA A100-SXM4-40GB", MiB(40960), Some("GPU-3")));
        assert!(!rules.allow("NVIDIA A100-SXM4-40GB", MiB(40960), None));
        for (key, value, parts) in [
            (
                "divvy.dev/gpus",
                "0",
                &["divvy.dev/gpus: \"0\" was found", "from 1 to 16", "\"2\""][..],
            ),
            ("divvy.dev/gpus", "17", &["from 1 to 16"]),
            ("divvy.dev/gpus", "two", &["\"two\" was found"]),
            ("divvy.dev/gpu-model", "A100*,,T4", &["\"\" is not a pattern", "\"!T4\""]),
            ("divvy.dev/gpu-model", "!!T4", &["\"!!T4\" is not a pattern"]),
            ("divvy.dev/gpu-memory", "40Gi", &["\"40Gi\" was found", "\">=40Gi\""]),
            ("divvy.dev/gpu-memory", ">=much", &["write >= and the size", "\">=40Gi\""]),
            (
                "divvy.dev/gpu-memory",
                ">=20",
                &["\">=20\" was found; that is less than 1 MiB", "suffix such as Gi"],
            ),
            ("divvy.dev/gpu-memory", ">=0", &["less than 1 MiB"]),
            ("divvy.dev/gpu-memory", ">=1M", &["less than 1 MiB"]),
            (
                "divvy.dev/gpu-prefer",
                "best",
                &["\"best\" was found", "fastest, most-memory or least-memory"],
            ),
            (
                "divvy.dev/isolation",
                "strong",
                &["\"strong\" was found", "hard, soft or none"],
            ),
            (
                "divvy.dev/gpu-test",
                "1-2",
                &["\"1-2\" was found", "at most 32 lowercase letters and digits"],
            ),
            ("divvy.dev/gpu-test", "", &["\"\" was found", "leave the annotation out"]),
            (
                "divvy.dev/gpu-vendor",
                "AMD",
                &["\"AMD\" was found", "write nvidia, amd or intel"],
            ),
            ("divvy.dev/gpu-vendor", "", &["\"\" was found", "write nvidia, amd or intel"]),
            ("divvy.dev/gpu-uuid", "GPU-1,", &["\"GPU-1,\" was found"]),
            ("divvy.dev/gpu-cores", "0", &["\"0\" was found", "from 1 to 100", "\"30\""]),
            ("divvy.dev/gpu-cores", "101", &["from 1 to 100"]),
            ("divvy.dev/gpu-cores", "30%", &["\"30%\" was found"]),
            (
                "divvy.dev/gpu-modell",
                "T4",
                &["divvy.dev/gpu-modell means nothing", "divvy.dev/gpu-model,"],
            ),
        ] {
            let error = read(&[(key, value)]).expect_err(key).to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
