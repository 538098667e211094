//! Limits on values that tenants, nodes, and other schedulers write, and on how much of such a value a message repeats.
//!
//! The API server accepts 256 KiB of annotations per object. All of them reach the extender, and those of bound pods reach an agent
//! with a memory limit of 64 MiB. Therefore Divvy checks each value against these limits before it parses the value. The Helm chart's
//! admission policies use the same numbers, so that a user sees the refusal when the pod is created and not while it waits for a node.

use std::borrow::Cow;

/// Most bytes of one annotation with a pod's rules for its GPUs.
pub const RULE_BYTES: usize = 1024;
/// Most patterns in `divvy.dev/gpu-model`. The extender compares each pattern with each product in the cluster.
pub const RULE_PATTERNS: usize = 32;
/// Most UUIDs in `divvy.dev/gpu-uuid`: the largest number of GPUs that a pod can have.
pub const RULE_UUIDS: usize = 16;
/// Most bytes of a product name, a UUID, or a pattern for product names: the size of NVML's own buffers
/// (`NVML_DEVICE_NAME_V2_BUFFER_SIZE` and `NVML_DEVICE_UUID_V2_BUFFER_SIZE` in nvml.h).
pub const DEVICE_TEXT_BYTES: usize = 96;

/// Most bytes of a bound pod's labels, required podAntiAffinity terms, and host ports that are kept for `divvy why`. Typical pods have
/// a few hundred.
pub const POD_RULES_BYTES: usize = 16 << 10;

/// Most shares in an allocation: containers times GPUs. A pod that needs more is not placed.
pub const ALLOCATION_SHARES: usize = 256;
/// Most bytes of an annotation with a pod's allocation. An allocation with [`ALLOCATION_SHARES`] shares and the longest names is smaller.
pub const ALLOCATION_BYTES: usize = 64 << 10;

/// Most GPUs of a node, in its inventory or by `aliyun.com/gpu-count`. The largest machines have 16, but the inventory keeps lost GPUs.
pub const NODE_GPUS: usize = 64;
/// Most links of one GPU: for each other GPU, one entry for NVLinks and one for the nearest common ancestor on the PCI bus.
pub const GPU_LINKS: usize = 2 * NODE_GPUS;
/// Most device nodes of one GPU. NVIDIA's GPUs have one, AMD's two.
pub const GPU_NODES: usize = 8;
/// Most different product names in one inventory. Machines have one or two.
pub const NODE_PRODUCTS: usize = 16;
/// Most units, besides the present one, in which a node's running containers were granted memory. Administrators change the unit once
/// or twice.
pub const OTHER_UNITS: usize = 8;
/// Most bytes of an inventory. The inventory of 16 fully connected GPUs has 34 KiB.
pub const INVENTORY_BYTES: usize = 64 << 10;
/// Most bytes of the reason why a GPU is unhealthy. The agent truncates the reason, so a longer one is not from an agent.
pub const REASON_BYTES: usize = 256;
/// Most bytes of the text that says what is wrong with a node's driver files and what to type. The agent truncates the text.
pub const DRIVER_TROUBLE_BYTES: usize = 768;
/// Most bytes of each short text in an inventory: versions, PCI addresses, kinds of links.
pub const SHORT_TEXT_BYTES: usize = 96;

/// Most bytes of a value that an error repeats.
pub const QUOTED_BYTES: usize = 100;
/// Most bytes of an error's text. Divvy keeps an error with the object that caused it and repeats the error in events.
pub const ERROR_BYTES: usize = 600;

/// Return at most `most` bytes of a text, cut between characters. Append `…` if something was cut off.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let mut cut = text[..text.floor_char_boundary(most)].to_owned();
    cut.push('…');
    Cow::Owned(cut)
}

/// Return a value in quotes for an error, with control characters escaped and cut off after about [`QUOTED_BYTES`].
pub fn quoted(value: &str) -> String {
    // Escaping never makes a text shorter, so cut before escaping.
    let most = value.floor_char_boundary(QUOTED_BYTES.min(value.len()));
    let escaped = value[..most].escape_debug().to_string();
    let cut = shortened(&escaped, QUOTED_BYTES);
    match most == value.len() && cut.len() == escaped.len() {
        true => format!("\"{escaped}\""),
        false => format!("\"{}…\"", cut.trim_end_matches('…')),
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
