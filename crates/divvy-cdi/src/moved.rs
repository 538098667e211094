//! Rewrites the paths of a spec for a machine or container in which the driver's files are at another place, like
//! `nvidia-ctk cdi transform root`.

use super::{CdiVersion, Edits, Spec};

/// The side whose paths are rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MovedSide {
    /// Paths on the machine: the sources of mounts and device nodes, and the programs of hooks that run on the machine.
    Host,
    /// Paths in the container: the targets of mounts and device nodes, the programs of hooks that run in the container, and hook arguments that
    /// name paths in the container.
    Container,
}

/// Move paths that are below `from` to the same place below `to`, and return the number of changed paths. Only whole path components match.
///
/// The arguments of a hook count as paths in the container if the hook runs in the container's namespaces (createContainer, startContainer);
/// arguments of other hooks stay the same. If the result needs a higher CDI version, the spec's version is raised.
pub fn move_root(spec: &mut Spec, from: &str, to: &str, side: MovedSide) -> usize {
    let mut changed = 0;
    let mut replace = |path: &mut String| {
        if let Some(new) = below(path, from, to).filter(|new| new != path) {
            *path = new;
            changed += 1;
        }
    };
    let devices = spec.devices.iter_mut().map(|device| &mut device.container_edits);
    for edits in devices.chain([&mut spec.container_edits]) {
        of_edits(edits, side, &mut replace);
    }
    let least = CdiVersion::least_for(spec);
    if CdiVersion::parse(&spec.cdi_version).is_some_and(|version| version < least) {
        spec.cdi_version = least.to_string();
    }
    changed
}

fn of_edits(edits: &mut Edits, side: MovedSide, replace: &mut impl FnMut(&mut String)) {
    for node in &mut edits.device_nodes {
        match (side, &mut node.host_path) {
            (MovedSide::Host, Some(path)) => {
                let before = path.clone();
                replace(path);
                // If both paths are equal again, the host path is redundant.
                if *path != before && *path == node.path {
                    node.host_path = None;
                }
            }
            // `path` is the path on both sides, but only the host's path changes.
            (MovedSide::Host, None) => {
                let mut host = node.path.clone();
                replace(&mut host);
                node.host_path = (host != node.path).then_some(host);
            }
            (MovedSide::Container, host) => {
                let before = node.path.clone();
                replace(&mut node.path);
                if node.path != before {
                    let of_host = host.take().unwrap_or(before);
                    *host = (of_host != node.path).then_some(of_host);
                }
            }
        }
    }
    for mount in &mut edits.mounts {
        replace(match side {
            MovedSide::Host => &mut mount.host_path,
            MovedSide::Container => &mut mount.container_path,
        });
    }
    // Only the program of a startContainer hook is a path in the container; the others are on the machine.
    let of_host = |name: &str| name != "startContainer";
    let hooks = edits
        .hooks
        .iter_mut()
        .filter(|hook| of_host(&hook.hook_name) == (side == MovedSide::Host));
    hooks.for_each(|hook| replace(&mut hook.path));
    if side == MovedSide::Container {
        let inside = ["createContainer", "startContainer"];
        let hooks = edits
            .hooks
            .iter_mut()
            .filter(|hook| inside.contains(&hook.hook_name.as_str()));
        hooks
            .flat_map(|hook| hook.args.iter_mut().skip(1))
            .for_each(|word| argument(word, replace));
    }
}

/// Move the paths in one argument of a hook: `/path`, `--folder=/path`, or a link in the form `/target::/link`.
fn argument(word: &mut String, replace: &mut impl FnMut(&mut String)) {
    let (first, between, second) = match (word.split_once("::"), word.split_once('=')) {
        (Some((target, link)), _) => (target, "::", link),
        (None, Some((flag, value))) if flag.starts_with("--") => (flag, "=", value),
        _ => return replace(word),
    };
    let (mut first, mut second) = (first.to_owned(), second.to_owned());
    replace(&mut first);
    replace(&mut second);
    *word = format!("{first}{between}{second}");
}

/// Return the path moved from `from` to `to`, or `None` if it is not below `from`.
fn below(path: &str, from: &str, to: &str) -> Option<String> {
    let rest = path.strip_prefix(from.trim_end_matches('/'))?;
    let to = to.trim_end_matches('/');
    match rest {
        "" if to.is_empty() => Some("/".to_owned()),
        "" => Some(to.to_owned()),
        rest if rest.starts_with('/') => Some(format!("{to}{rest}")),
        _ => None,
    }
}
