//! Limits on values that tenants, nodes, and other schedulers write, and on how much of such a value is repeated in a message.
//!
//! The API server accepts 256 KiB of annotations per object. All of these annotations reach the extender, and those of bound pods
//! reach an agent, which has a memory limit of 64 MiB. Therefore Divvy checks each value against these limits before it parses
//! the value. The Helm chart's admission policies use the same limits, so that a user sees a refusal when the pod is created, and
//! not while the pod waits for a node.

use std::borrow::Cow;
use std::time::Duration;

/// The maximum size in bytes of one annotation with a pod's rules for its GPUs.
pub const RULE_BYTES: usize = 1024;
/// The maximum number of patterns in `divvy.dev/gpu-model`. The extender compares each pattern with each product in the cluster.
pub const RULE_PATTERNS: usize = 32;
/// The maximum number of UUIDs in `divvy.dev/gpu-uuid`, which is the largest number of GPUs that a pod can have.
pub const RULE_UUIDS: usize = 16;
/// The maximum size in bytes of the id of a run that tests a GPU which is out of service ([`crate::TestRun`]).
pub const TEST_RUN_BYTES: usize = 32;
/// The largest time limit of one test of a GPU (`divvy smoke --timeout`).
pub const TEST_TIMEOUT: Duration = Duration::from_mins(60);
/// The longest time for which a GPU that is out of service is open to a test: the time limit, and the time until the pod of the test has started.
pub const TEST_LASTS: Duration = Duration::from_mins(62);
/// The maximum size in bytes of a product name, a UUID, or a pattern for product names. This is the size of NVML's own buffers
/// (`NVML_DEVICE_NAME_V2_BUFFER_SIZE` and `NVML_DEVICE_UUID_V2_BUFFER_SIZE` in nvml.h).
pub const DEVICE_TEXT_BYTES: usize = 96;

/// The maximum size in bytes of a bound pod's labels, required podAntiAffinity terms, and host ports that are kept for `divvy
/// why`. Typical pods have a few hundred bytes.
pub const POD_RULES_BYTES: usize = 16 << 10;

/// The maximum number of shares in an allocation: the number of containers times the number of GPUs. A pod that needs more is not
/// placed.
pub const ALLOCATION_SHARES: usize = 256;
/// The maximum size in bytes of an annotation with a pod's allocation. An allocation with [`ALLOCATION_SHARES`] shares and the
/// longest names is smaller.
pub const ALLOCATION_BYTES: usize = 64 << 10;

/// The maximum number of GPUs of a node, in its inventory or in `aliyun.com/gpu-count`. The largest machines have 16 GPUs, which MIG can
/// divide into 112 parts, and the inventory also keeps lost GPUs.
pub const NODE_GPUS: usize = 128;
/// The maximum number of links of one GPU. For each other GPU, there may be one entry for NVLinks, and one for the nearest common
/// ancestor on the PCI bus. No machine has more than 64 GPUs that are connected.
pub const GPU_LINKS: usize = 128;
/// The maximum number of device nodes of one GPU. An NVIDIA GPU has one, a MIG device three, and a GPU of another vendor two.
pub const GPU_NODES: usize = 8;
/// The maximum number of different product names in one inventory. Machines have one or two.
pub const NODE_PRODUCTS: usize = 16;
/// The maximum number of units, besides the current one, in which a node's running containers were granted memory. Administrators
/// change the unit once or twice.
pub const OTHER_UNITS: usize = 8;
/// The maximum number of pods of a node that its inventory names for eviction. The agent names the others when these are gone.
pub const NODE_EVICTIONS: usize = 32;
/// The maximum size of an inventory in bytes. The inventory of 16 fully connected GPUs has 34 KiB.
pub const INVENTORY_BYTES: usize = 64 << 10;
/// The maximum size in bytes of the reason why a GPU is unhealthy. The agent truncates the reason, so a longer one does not come
/// from an agent.
pub const REASON_BYTES: usize = 256;
/// The maximum size in bytes of the text that says what is wrong with a node's driver files and what to type. The agent truncates
/// the text.
pub const DRIVER_TROUBLE_BYTES: usize = 768;
/// The maximum size in bytes of each short text in an inventory: versions, PCI addresses, and kinds of links.
pub const SHORT_TEXT_BYTES: usize = 96;

/// The maximum size in bytes of what an agent says of its node's use at `/v1/usage`.
pub const USAGE_BYTES: usize = 1 << 20;
/// The maximum number of entries about containers in that answer: one per container and GPU. By default, a node runs at most 110 pods.
pub const USAGE_CONTAINERS: usize = 2048;

/// The maximum size in bytes of a value that is repeated in an error.
pub const QUOTED_BYTES: usize = 100;
/// The maximum size in bytes of an error's text. Divvy keeps an error together with the object that caused it, and repeats the
/// error in events.
pub const ERROR_BYTES: usize = 600;

/// Return a text, shortened to at most `most` bytes without splitting a character. If something was cut off, append `…`.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let mut cut = text[..text.floor_char_boundary(most)].to_owned();
    cut.push('…');
    Cow::Owned(cut)
}

/// Return a value in quotes, for use in an error. Control characters are escaped, and the value is cut off after about
/// [`QUOTED_BYTES`].
pub fn quoted(value: &str) -> String {
    // Escaping never makes a text shorter, so cut before escaping.
    let most = value.floor_char_boundary(QUOTED_BYTES.min(value.len()));
    let escaped = value[..most].escape_debug().to_string();
    let cut = shortened(&escaped, QUOTED_BYTES);
    if most == value.len() && cut.len() == escaped.len() {
        format!("\"{escaped}\"")
    } else {
        format!("\"{}…\"", cut.trim_end_matches('…'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        for (text, most, expected) in [
            ("", 0, ""),
            ("abc", 3, "abc"),
            ("abc", 2, "ab…"),
            ("größe", 3, "gr…"),
            ("größe", 4, "grö…"),
            ("ö", 1, "…"),
        ] {
            assert_eq!(shortened(text, most), expected, "{text} {most}");
        }
    }

    #[test]
    fn a_value_of_any_length_and_content_is_quoted_in_a_few_bytes() {
        assert_eq!(quoted("two"), "\"two\"");
        assert_eq!(quoted("a\"\n"), r#""a\"\n""#);
        assert_eq!(quoted(&"a".repeat(QUOTED_BYTES)), format!("\"{}\"", "a".repeat(QUOTED_BYTES)));
        assert_eq!(quoted(&"a".repeat(250_000)), format!("\"{}…\"", "a".repeat(QUOTED_BYTES)));
        for hostile in ["\u{202e}", "\u{1}", "ö", "\"", "𝕏", "…"] {
            let text = quoted(&hostile.repeat(50_000));
            assert!(text.len() <= QUOTED_BYTES + 8, "{hostile:?}: {text}");
            assert!(text.ends_with("…\""), "{text}");
        }
    }
}
