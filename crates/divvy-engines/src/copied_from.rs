//! Chooses the runtime from which the settings of a new runtime are copied.

/// Return the names of the runtimes to copy settings from; the first that exists is used. The default runtime comes first, unless it is the new
/// runtime or one of NVIDIA's, then runc and crun.
pub(crate) fn source<'n>(default: &'n Option<String>, name: &str) -> Vec<&'n str> {
    let default = default
        .as_deref()
        .filter(|default| *default != name && !default.starts_with("nvidia"));
    default
        .into_iter()
        .chain(["runc", "crun"])
        .filter(|from| *from != name)
        .collect()
}
