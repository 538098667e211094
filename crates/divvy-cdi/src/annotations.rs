//! Annotations of a pod or container that request devices: `cdi.k8s.io/<plugin>_<id>: vendor/class=a,vendor/class=b`.

use std::collections::BTreeMap;

use super::{NameError, QualifiedName};

/// The prefix of the annotations' keys.
pub const PREFIX: &str = "cdi.k8s.io/";

/// Return the devices that the annotations request, in the order of the annotations' keys.
///
/// # Errors
/// Returns the key of the first annotation with an invalid device name, and what is wrong with that name.
pub fn requested(annotations: &BTreeMap<String, String>) -> Result<Vec<QualifiedName>, (String, NameError)> {
    let mut devices = Vec::new();
    for (key, value) in annotations.iter().filter(|(key, _)| key.starts_with(PREFIX)) {
        for name in value.split(',') {
            devices.push(name.parse().map_err(|error| (key.clone(), error))?);
        }
    }
    Ok(devices)
}

/// Return the annotation key with which a plugin requests the device `id`, or `None` if the two do not form a valid annotation key.
pub fn key(plugin: &str, id: &str) -> Option<String> {
    let id = id.replace('/', "_");
    let name = format!("{plugin}_{id}");
    let inside = name.bytes().all(|c| c.is_ascii_alphanumeric() || b"_-.".contains(&c));
    let edge = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    (!plugin.is_empty() && !id.is_empty() && name.len() <= 63 && inside && edge(bytes.first()) && edge(bytes.last()))
        .then(|| format!("{PREFIX}{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(annotations: &[(&str, &str)]) -> Result<Vec<String>, (String, NameError)> {
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        requested(&annotations.collect()).map(|devices| devices.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn devices_are_asked_for_in_the_order_of_the_keys() {
        let found = devices(&[
            ("cdi.k8s.io/b_1", "nvidia.com/gpu=1"),
            ("cdi.k8s.io/a_1", "nvidia.com/gpu=0,amd.com/gpu=x"),
            ("other/key", "not a device"),
        ]);
        assert_eq!(
            found,
            Ok(vec![
                "nvidia.com/gpu=0".to_owned(),
                "amd.com/gpu=x".to_owned(),
                "nvidia.com/gpu=1".to_owned()
            ])
        );
    }

    #[test]
    fn a_wrong_name_is_refused_with_its_key() {
        for (value, part) in [
            ("0", "not the name of a CDI device"),
            ("nvidia.com/gpu=", "not the device"),
            ("nvidia.com/gpu=0,", "not the name"),
            ("1nvidia/gpu=0", "not the vendor"),
            ("nvidia.com/gpu/x=0", "not the class"),
            ("nvidia.com/gpu=../x", "not the device"),
        ] {
            let (key, error) = devices(&[("cdi.k8s.io/a_1", value)]).expect_err(value);
            assert!(
                key == "cdi.k8s.io/a_1" && error.to_string().contains(part),
                "{value}: {key}: {error}"
            );
        }
    }

    #[test]
    fn a_key_is_a_name_that_kubernetes_takes() {
        assert_eq!(key("divvy.dev", "a/b").as_deref(), Some("cdi.k8s.io/divvy.dev_a_b"));
        let long = "x".repeat(60);
        for (plugin, id) in [
            ("", "a"),
            ("a", ""),
            ("a b", "c"),
            ("_a", "b"),
            ("a", "b_"),
            ("plugin", long.as_str()),
        ] {
            assert_eq!(key(plugin, id), None, "{plugin:?} {id:?}");
        }
    }
}
