//! What is known of error texts: the files in `knowledge/`, and how their patterns match.

use std::borrow::Cow;

use aho_corasick::AhoCorasick;
use divvy_model::nvidia::xid::{self, XidAction};
use serde::{Deserialize, Serialize};

use super::pattern::{TextPattern, plain};

/// The files, by the kind of the program that writes the texts. `knowledge/README.md` says how to add an entry.
const FILES: [(&str, &str); 9] = [
    ("driver.toml", include_str!("../../knowledge/driver.toml")),
    ("xid.toml", include_str!("../../knowledge/xid.toml")),
    ("vendors.toml", include_str!("../../knowledge/vendors.toml")),
    ("toolkit.toml", include_str!("../../knowledge/toolkit.toml")),
    ("engines.toml", include_str!("../../knowledge/engines.toml")),
    ("kubernetes.toml", include_str!("../../knowledge/kubernetes.toml")),
    ("plugins.toml", include_str!("../../knowledge/plugins.toml")),
    ("cuda.toml", include_str!("../../knowledge/cuda.toml")),
    ("programs.toml", include_str!("../../knowledge/programs.toml")),
];

/// How programs print the number of a CUDA error. The texts of an entry with `codes` are these, for each number.
const CODES: [&str; 11] = [
    "cuda error {}",
    "cuda error: {}",
    "cuda error ({})",
    "cuda error({})",
    "cuda error #{}",
    "cuda driver error {}",
    "cuda error code: {}",
    "cuda failure {}",
    "cuda runtime error ({})",
    "cuda...error {}:",
    "cuda*...returned {}",
];

/// The files cannot be used. A test shows that this does not happen.
#[derive(Debug, thiserror::Error)]
pub enum KnowledgeError {
    /// A file is not TOML, or has an unknown key.
    #[error("{file} in Divvy's knowledge of error texts cannot be read")]
    File {
        /// The name of the file.
        file: &'static str,
        /// What is wrong.
        source: toml::de::Error,
    },
    /// The patterns cannot be combined.
    #[error("the patterns in Divvy's knowledge of error texts cannot be combined")]
    Patterns(#[from] aho_corasick::BuildError),
}

/// What is known of a group of error texts with the same cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnowledgeEntry {
    /// A short name, which does not change.
    pub id: String,
    /// The program that writes the texts.
    pub program: String,
    /// The id of the check that detects the cause. `None` if no check can detect it.
    #[serde(default)]
    pub check: Option<String>,
    /// Whether this is an answer for errors that no other entry describes.
    #[serde(default, skip_serializing)]
    pub general: Option<General>,
    /// The patterns of the texts.
    #[serde(default, skip_serializing)]
    pub texts: Vec<String>,
    /// The numbers of CUDA errors.
    #[serde(default, skip_serializing)]
    pub codes: Vec<u32>,
    /// What happened.
    pub means: String,
    /// What to type next.
    pub fix: String,
    /// Where the text comes from: a file of the program's source, a page, or a report.
    pub source: String,
    /// Lines that the program prints.
    #[serde(default, skip_serializing)]
    pub examples: Vec<String>,
}

/// For which errors a general answer is. The later ones count first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum General {
    /// Errors that any program may have.
    Any,
    /// All other errors of the program.
    Program,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KnowledgeFile {
    entry: Vec<KnowledgeEntry>,
}

/// All entries, ready to be searched.
#[derive(Debug)]
pub struct Knowledge {
    entries: Vec<KnowledgeEntry>,
    patterns: Vec<TextPattern>,
    /// The entry of each pattern.
    of: Vec<usize>,
    /// Finds the longest literal of each pattern, for all patterns in one pass.
    literals: AhoCorasick,
}

/// The largest number of bytes of a line to search.
const LONGEST: usize = 64 * 1024;

impl Knowledge {
    /// Read the embedded files.
    pub fn load() -> Result<Knowledge, KnowledgeError> {
        let mut entries = Vec::new();
        for (file, text) in FILES {
            let KnowledgeFile { entry } = toml::from_str(text).map_err(|source| KnowledgeError::File { file, source })?;
            entries.extend(entry);
        }
        let (mut patterns, mut of) = (Vec::new(), Vec::new());
        for (index, KnowledgeEntry { texts, codes, .. }) in entries.iter().enumerate() {
            let numbered = codes
                .iter()
                .flat_map(|code| CODES.map(|form| form.replace("{}", &code.to_string())));
            for text in texts.iter().cloned().chain(numbered) {
                patterns.push(TextPattern::new(&plain(&text)));
                of.push(index);
            }
        }
        let literals = AhoCorasick::new(patterns.iter().map(TextPattern::longest))?;
        Ok(Knowledge {
            entries,
            patterns,
            of,
            literals,
        })
    }

    /// Return all entries.
    pub fn entries(&self) -> &[KnowledgeEntry] {
        &self.entries
    }

    /// Return the entry of an id.
    pub fn by_id(&self, id: &str) -> Option<&KnowledgeEntry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    /// Return the number of patterns.
    pub fn count(&self) -> usize {
        self.patterns.len()
    }

    /// Return the entry for a text that has one cause. The most specific pattern decides. Only if no pattern of a certain error
    /// matches, the general answers count; of these, the one that begins last, because programs write the cause behind its effects.
    pub(super) fn find(&self, text: &str) -> Option<Cow<'_, KnowledgeEntry>> {
        let text = plain(&text[..text.floor_char_boundary(LONGEST)]);
        if let Some(entry) = self.xid(&text) {
            return Some(Cow::Owned(entry));
        }
        let mut candidates: Vec<usize> = self
            .literals
            .find_overlapping_iter(&text)
            .map(|found| found.pattern().as_usize())
            .collect();
        candidates.sort_unstable();
        candidates.dedup();
        let matching = candidates.into_iter().filter_map(|index| {
            let pattern = &self.patterns[index];
            let at = pattern.find(&text)?;
            let entry = &self.entries[self.of[index]];
            // Without a general answer, the entry is for a certain error, and counts before the others.
            let specific = match entry.general {
                None => pattern.length(),
                Some(_) => at,
            };
            Some(((entry.general.is_none(), entry.general, specific), entry))
        });
        matching
            .rev()
            .max_by_key(|(rank, _)| *rank)
            .map(|(_, entry)| Cow::Borrowed(entry))
    }

    /// Return the entry for an XID: what to do, with the number and its name.
    fn xid(&self, text: &str) -> Option<KnowledgeEntry> {
        let (number, rest) = xid_of(text)?;
        let entry = self.by_id(match xid::action(number, rest) {
            XidAction::Ignore => "xid-ignore",
            XidAction::RestartProgram => "xid-restart-program",
            XidAction::CheckLinks => "xid-check-links",
            XidAction::ResetGpu => "xid-reset-gpu",
            XidAction::RebootNode => "xid-reboot-node",
            XidAction::CheckPower => "xid-check-power",
            XidAction::UpdateDriver => "xid-update-driver",
            XidAction::Support => "xid-support",
        })?;
        let cause = rest
            .rsplit_once("caused by previous xid ")
            .and_then(|(_, cause)| cause.split_whitespace().next());
        let name = xid::lookup(number).map_or("not in NVIDIA's catalog", |row| row.name);
        let mut entry = entry.clone();
        entry.means = format!("XID {number} ({name}): {}", entry.means);
        if let Some(cause) = cause {
            entry.means = format!("{}. The driver says that XID {cause} caused it", entry.means);
        }
        Some(entry)
    }
}

/// Return the number of the XID in a line, and the text behind it. The driver writes `NVRM: Xid (PCI:0000:81:00): 79, pid=1, …`, and
/// NVIDIA's device plugin `XidCriticalError: Xid=79 on Device=GPU-…`; Divvy's events have `GPU 1 … failed: XID 79`.
fn xid_of(text: &str) -> Option<(u64, &str)> {
    let after = match text.split_once("nvrm: xid (") {
        Some((_, place)) => place.split_once("):")?.1,
        None if text.contains("gpu") => text.split_once("xid=").or_else(|| text.split_once(" xid "))?.1,
        None => return None,
    };
    let after = after.trim_start();
    let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    let (number, rest) = after.split_at(end);
    // Others use the word as well: a DHCP client prints xid=0x79a1.
    let is_number = !rest.starts_with(|c: char| c.is_alphanumeric());
    Some((number.parse().ok().filter(|_| is_number)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_xid_is_found_where_programs_write_it() {
        for (text, expected) in [
            ("nvrm: xid (pci:0000:81:00): 79, gpu", Some(79)),
            ("nvrm: xid (0000:03:00): 14, channel", Some(14)),
            ("gpu 1 (nvidia a100) failed: xid 79. divvy", Some(79)),
            ("xidcriticalerror: xid=48 on device=gpu-0", Some(48)),
            ("sxid (pci:0000:01:00.0): 12028, non-fatal", None),
            ("nvrm: xid (x", None),
            ("the xid of nothing", None),
            ("dhcpdiscover on eth0 xid=0x79a1", None),
        ] {
            assert_eq!(xid_of(text).map(|(number, _)| number), expected, "{text}");
        }
    }
}
