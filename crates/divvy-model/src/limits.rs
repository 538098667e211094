//! Limits on what tenants, nodes and other schedulers write, and on how much of it is repeated in a message.
//!
//! The API server accepts 256 KiB of annotations per object. Every one of them reaches the extender, and those of bound pods reach an agent with
//! a memory limit of 64 MiB, so each value is checked against these limits before it is parsed. The admission policies of the Helm chart use the
//! same numbers: a user sees the refusal when the pod is created, and not when it waits for a node.

use std::borrow::Cow;

/// Bytes of one annotation in which a pod says which GPUs it takes.
pub const RULE_BYTES: usize = 1024;
/// Patterns in `divvy.dev/gpu-model`. Each one is compared with every product of the cluster.
pub const RULE_PATTERNS: usize = 32;
/// UUIDs in `divvy.dev/gpu-uuid`: as many as a pod can have GPUs.
pub const RULE_UUIDS: usize = 16;
/// Bytes of a product's name, of a UUID, and of a pattern for either: the size of NVML's own buffers (`NVML_DEVICE_NAME_V2_BUFFER_SIZE` and
/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE` in nvml.h).
pub const DEVICE_TEXT_BYTES: usize = 96;

/// Bytes of a bound pod's labels, required podAntiAffinity terms and host ports that are kept to answer `divvy why`. Pods have some hundred.
pub const POD_RULES_BYTES: usize = 16 << 10;

/// Shares in an allocation: containers times GPUs. A pod whose containers need more is not placed.
pub const ALLOCATION_SHARES: usize = 256;
/// Bytes of an annotation that says which GPUs a pod got. An allocation with [`ALLOCATION_SHARES`] shares and the longest names has less.
pub const ALLOCATION_BYTES: usize = 64 << 10;

/// GPUs of a node, by its inventory or by `aliyun.com/gpu-count`. The largest machines have 16; GPUs that were lost stay in the inventory.
pub const NODE_GPUS: usize = 64;
/// Links of one GPU: to each other GPU the NVLinks, and the nearest place on the PCI bus.
pub const GPU_LINKS: usize = 2 * NODE_GPUS;
/// Different product names in one inventory. Machines have one or two.
pub const NODE_PRODUCTS: usize = 16;
/// Units in which a node's living containers were granted memory, beside the present one. An operator changes it once or twice.
pub const OTHER_UNITS: usize = 8;
/// Bytes of an inventory. One of 16 GPUs that are all connected has 34 KiB.
pub const INVENTORY_BYTES: usize = 64 << 10;
/// Bytes of the reason why a GPU is not well. The agent cuts it; a longer one is not an agent's.
pub const REASON_BYTES: usize = 256;
/// Bytes of what is wrong with a node's driver files, with what to type. The agent cuts it.
pub const DRIVER_TROUBLE_BYTES: usize = 768;
/// Bytes of the short texts in an inventory: versions, PCI addresses, kinds of links.
pub const SHORT_TEXT_BYTES: usize = 96;

/// Bytes of a value that are repeated in an error.
pub const QUOTED_BYTES: usize = 100;
/// Bytes of an error's text. Errors are kept with the object that has them, and repeated in events.
pub const ERROR_BYTES: usize = 600;

/// The beginning of a text, with `…` if something was cut off.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let mut cut = text[..text.floor_char_boundary(most)].to_owned();
    cut.push('…');
    Cow::Owned(cut)
}

/// A value in quotes, with control characters escaped, for an error: at most about [`QUOTED_BYTES`] of it.
pub fn quoted(value: &str) -> String {
    // Escaping makes a text longer, never shorter.
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
