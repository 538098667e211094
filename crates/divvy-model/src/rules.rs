//! Which GPUs a pod wants, by its annotations (DESIGN.md section 5): beside how much of one, which is in its containers' limits.

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{DEVICE_TEXT_BYTES, QUOTED_BYTES, RULE_BYTES, RULE_PATTERNS, RULE_UUIDS, quoted, shortened};
use crate::{ContainerRequest, Error, MiB, names, quantity_value};

/// What a pod's annotations say of the GPUs that it takes. The default takes any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuRules {
    /// Over how many GPUs its memory is spread evenly; `None`: one.
    pub gpus: Option<u32>,
    /// Products.
    pub models: ModelRule,
    /// Only GPUs with at least this much memory in all.
    pub least_memory: MiB,
    /// Only these GPUs, by UUID; empty: any.
    pub uuids: Vec<String>,
    /// Of those that fit, which first.
    pub prefer: Option<Prefer>,
}

/// The most GPUs that a pod may have its memory on; no node that policies are asked about is taken for larger.
pub const MOST_GPUS: u32 = 16;

/// A preference among GPUs that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Prefer {
    /// The most FP16 operations per second times memory bandwidth, by an estimate.
    Fastest,
    /// The most memory in all.
    MostMemory,
    /// The least memory in all.
    LeastMemory,
}

impl Prefer {
    /// All of them.
    pub const ALL: [Prefer; 3] = [Prefer::Fastest, Prefer::MostMemory, Prefer::LeastMemory];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Prefer::Fastest => "fastest",
            Prefer::MostMemory => "most-memory",
            Prefer::LeastMemory => "least-memory",
        }
    }
}

/// Products that are allowed and denied, by patterns.
///
/// A pattern is compared with the end of a product's name, from the start of any of its words on: `A100*` and `NVIDIA A100*` match
/// `NVIDIA A100-SXM4-40GB`, `T4` matches `Tesla T4`, `RTX 3080` does not match `NVIDIA GeForce RTX 3080 Ti`. `*` stands for any text; upper and
/// lower case are the same, and so are a space and a dash, as feature discovery writes it in labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelRule {
    /// One of these must match, if there are any.
    allow: Vec<Pattern>,
    /// None of these may.
    deny: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Pattern {
    /// As its user wrote it.
    written: String,
    /// As it is compared.
    normal: String,
}

impl ModelRule {
    /// Whether GPUs of this product may be taken. Of one that is not known nobody can say so, and it may not.
    pub fn allows(&self, product: &str) -> bool {
        if self.allow.is_empty() && self.deny.is_empty() {
            return true;
        }
        if product.trim().is_empty() {
            return false;
        }
        let product = normal(product.trim());
        let matches = |pattern: &Pattern| is_match(&pattern.normal, &product);
        (self.allow.is_empty() || self.allow.iter().any(matches)) && !self.deny.iter().any(matches)
    }

    fn parse(text: &str) -> Result<ModelRule, String> {
        let mut rule = ModelRule::default();
        let patterns = text.split(',').count();
        if patterns > RULE_PATTERNS {
            return Err(format!("it has {patterns} patterns and may have {RULE_PATTERNS}"));
        }
        for part in text.split(',').map(str::trim) {
            let (pattern, list) = match part.strip_prefix('!') {
                Some(pattern) => (pattern.trim(), &mut rule.deny),
                None => (part, &mut rule.allow),
            };
            // No product has one in its name, and what is asked for is shown to others.
            if pattern.is_empty() || pattern.contains('!') || pattern.contains(char::is_control) {
                return Err(format!("{} is no pattern", quoted(part)));
            }
            if pattern.len() > DEVICE_TEXT_BYTES {
                return Err(format!(
                    "a pattern has {} bytes and may have {DEVICE_TEXT_BYTES}",
                    pattern.len()
                ));
            }
            list.push(Pattern {
                written: pattern.to_owned(),
                normal: normal(pattern),
            });
        }
        Ok(rule)
    }
}

impl fmt::Display for ModelRule {
    /// To be read after "a GPU", "GPUs" or "no GPU": `of a product like A100*, but not A100-PCIE*`, `other than T4`; nothing where any product is
    /// taken.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |patterns: &[Pattern]| {
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

/// Names are compared as feature discovery writes them, but for upper and lower case.
fn normal(text: &str) -> String {
    text.to_ascii_lowercase().replace(' ', "-")
}

/// Both are [`normal`]. Tenants write patterns and nodes write names, so the time grows with the sum of their lengths and not with the product,
/// whatever they are: the parts between the stars are found one after the other, and the first place of each leaves the most for the next.
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
    /// Reads a pod's annotations. `None`: it has none of these.
    ///
    /// # Errors
    /// A value that cannot be read, and a key of ours that means nothing for pods: the sentence says what was found, what is allowed, and
    /// has an example.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Option<GpuRules>, Error> {
        let ours = annotations
            .range(names::PREFIX.to_owned()..)
            .take_while(|(key, _)| key.starts_with(names::PREFIX));
        let mut rules: Option<GpuRules> = None;
        for (key, value) in ours {
            // Values of keys that are nobody's rule are not looked at.
            let what = names::POD_KEYS.into_iter().find(|known| known == key);
            if let Some(what) = what.filter(|_| value.len() > RULE_BYTES) {
                return Err(Error::invalid(
                    what,
                    format!("{} has {} bytes and may have {RULE_BYTES}", quoted(value), value.len()),
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
                names::GPU_UUID => {
                    let uuids: Vec<String> = value.split(',').map(|uuid| uuid.trim().to_owned()).collect();
                    let many = value.split(',').count() > RULE_UUIDS;
                    if many || uuids.iter().any(|uuid| uuid.is_empty() || uuid.len() > DEVICE_TEXT_BYTES) {
                        return wrong(
                            names::GPU_UUID,
                            &format!(
                                "at most {RULE_UUIDS} GPUs are named by their UUIDs of at most {DEVICE_TEXT_BYTES} bytes, separated by commas, as kubectl \
                                 inspect gpushare -o json shows them: \"GPU-…\""
                            ),
                        );
                    }
                    rules.get_or_insert_default().uuids = uuids;
                }
                names::GPU_CORES => {
                    return wrong(
                        names::GPU_CORES,
                        "shares of compute are not limited by this version of Divvy; take the annotation away, or use a whole GPU",
                    );
                }
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

    /// Over how many GPUs the pod's memory is spread.
    pub fn spread_over(&self) -> u64 {
        u64::from(self.gpus.unwrap_or(1).max(1))
    }

    /// Whether what each container asks for can be spread evenly over the GPUs.
    ///
    /// # Errors
    /// A container for which it cannot: who it is, and what it could ask for.
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
                        "\"{gpus}\" was found, but the {units} units of {} that container {name} asks for cannot be spread evenly over {gpus} GPUs; \
                         ask for {or_less}{}",
                        names::GPU_MEM,
                        below.saturating_add(gpus)
                    ),
                ))
            }
        }
    }

    /// Whether a GPU may be taken, whatever is free on it.
    pub fn allow(&self, product: &str, total: MiB, uuid: Option<&str>) -> bool {
        self.allow_any_product(total, uuid) && self.models.allows(product)
    }

    /// As [`GpuRules::allow`], but for the product, which is the same for many GPUs.
    pub fn allow_any_product(&self, total: MiB, uuid: Option<&str>) -> bool {
        total >= self.least_memory
            && (self.uuids.is_empty() || uuid.is_some_and(|uuid| self.uuids.iter().any(|wanted| wanted == uuid)))
    }
}

/// Rounded up to MiB. A size below 1 MiB is refused: its suffix was forgotten.
fn least_memory(text: &str) -> Result<MiB, &'static str> {
    const MIB: u64 = 1 << 20;
    let quantity = text.strip_prefix(">=").map(str::trim);
    match quantity.and_then(|quantity| quantity_value(quantity).ok()) {
        Some(bytes) if bytes >= MIB => Ok(MiB(bytes.div_ceil(MIB))),
        Some(_) => Err("that is less than 1 MiB; write the size with a suffix such as Gi: \">=40Gi\""),
        None => Err("write >= and the size that a GPU must have at least, such as \">=40Gi\""),
    }
}

/// `80 GiB` where it is a whole number of them, else `81559 MiB`.
fn size(memory: MiB) -> String {
    match memory.0 {
        mib if mib.is_multiple_of(1024) => format!("{} GiB", mib / 1024),
        _ => memory.to_string(),
    }
}

impl fmt::Display for GpuRules {
    /// To be read after "a GPU": `of a product like A100* and with 40 GiB or more in all`; nothing where any GPU is taken.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.least_memory > MiB::ZERO {
            parts.push(format!("with {} or more in all", size(self.least_memory)));
        }
        if !self.uuids.is_empty() {
            parts.push(format!("named {}", self.uuids.join(" or ")));
        }
        let (models, rest) = (self.models.to_string(), parts.join(" and "));
        let and = match self.models.deny.is_empty() {
            _ if models.is_empty() || rest.is_empty() => "",
            true => " and ",
            // Else what follows reads as if it were denied, too.
            false => ", and ",
        };
        write!(f, "{models}{and}{rest}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<Option<GpuRules>, String> {
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        GpuRules::from_annotations(&annotations.collect()).map_err(|error| error.to_string())
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

    /// As patterns are defined: from the start of some word to the end, a star for any text.
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

    #[test]
    fn what_is_longer_or_more_than_the_limits_is_refused_and_not_repeated() {
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
                "has 249999 bytes and may have 1024",
            ),
            (
                "divvy.dev/gpu-model",
                list(RULE_PATTERNS + 1, "a"),
                "it has 33 patterns and may have 32",
            ),
            (
                "divvy.dev/gpu-model",
                "a".repeat(DEVICE_TEXT_BYTES + 1),
                "a pattern has 97 bytes and may have 96",
            ),
            ("divvy.dev/gpu-model", "!".repeat(1024), "is no pattern"),
            ("divvy.dev/gpu-uuid", list(RULE_UUIDS + 1, "GPU-1"), "at most 16 GPUs"),
            ("divvy.dev/gpu-uuid", "g".repeat(DEVICE_TEXT_BYTES + 1), "at most 96 bytes"),
            (
                "divvy.dev/gpu-memory",
                format!(">={}", "0".repeat(250_000)),
                "bytes and may have 1024",
            ),
            ("divvy.dev/gpus", "1".repeat(250_000), "bytes and may have 1024"),
            ("divvy.dev/gpu-prefer", "\u{202e}".repeat(300), "fastest, most-memory"),
            ("divvy.dev/gpu-cores", "9".repeat(250_000), "not limited by this version"),
        ] {
            let error = read(&[(key, &value)]).expect_err(key);
            assert!(error.starts_with(key) && error.contains(part), "{error}");
            assert!(error.len() <= 500, "{} bytes: {error}", error.len());
        }
        let key = format!("divvy.dev/{}", "x".repeat(250_000));
        let error = read(&[(&key, "")]).expect_err("no such key");
        assert!(
            error.len() < 500 && error.contains("a pod may have divvy.dev/gpu-model"),
            "{error}"
        );
    }

    #[test]
    fn rules_are_shown_as_they_were_written_and_what_is_denied_apart() {
        let (model, memory, uuid) = ("divvy.dev/gpu-model", "divvy.dev/gpu-memory", "divvy.dev/gpu-uuid");
        for (annotations, expected) in [
            (&[("divvy.dev/gpus", "2")][..], ""),
            (&[(model, "A100*")], "of a product like A100*"),
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
    fn annotations_are_read_or_refused_with_what_was_found_what_is_allowed_and_an_example() {
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
            ("divvy.dev/gpu-model", "A100*,,T4", &["\"\" is no pattern", "\"!T4\""]),
            ("divvy.dev/gpu-model", "!!T4", &["\"!!T4\" is no pattern"]),
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
            ("divvy.dev/gpu-uuid", "GPU-1,", &["\"GPU-1,\" was found"]),
            ("divvy.dev/gpu-cores", "30", &["not limited by this version"]),
            (
                "divvy.dev/gpu-modell",
                "T4",
                &["divvy.dev/gpu-modell means nothing", "divvy.dev/gpu-model,"],
            ),
        ] {
            let error = read(&[(key, value)]).expect_err(key);
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
