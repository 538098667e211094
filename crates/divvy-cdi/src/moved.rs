//! A spec that was made where the driver is at one path, for a machine or a container where it is at another: `nvidia-ctk cdi transform root`.

use super::{Edits, Spec, Version};

/// Whose paths are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The machine's: sources of mounts, device nodes, programs of hooks that run there.
    Host,
    /// The container's: where mounts and device nodes are put, programs that run there, and what hooks are told of it.
    Container,
}

/// Puts what is below `from` below `to`, by whole components of paths. A hook's arguments are of
/// the container where it runs in the container's namespaces (createContainer, startContainer), and stay elsewhere. The spec's version becomes
/// what it needs now, if that is more. How many paths are others now.
pub fn move_root(spec: &mut Spec, from: &str, to: &str, side: Side) -> usize {
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
    let least = Version::least_for(spec);
    if Version::parse(&spec.cdi_version).is_some_and(|version| version < least) {
        spec.cdi_version = least.to_string();
    }
    changed
}

fn of_edits(edits: &mut Edits, side: Side, replace: &mut impl FnMut(&mut String)) {
    for node in &mut edits.device_nodes {
        match (side, &mut node.host_path) {
            (Side::Host, Some(path)) => {
                let before = path.clone();
                replace(path);
                // Back where it came from, it needs no path of its own.
                if *path != before && *path == node.path {
                    node.host_path = None;
                }
            }
            // One path for both sides, of which one is to change.
            (Side::Host, None) => {
                let mut host = node.path.clone();
                replace(&mut host);
                node.host_path = (host != node.path).then_some(host);
            }
            (Side::Container, host) => {
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
            Side::Host => &mut mount.host_path,
            Side::Container => &mut mount.container_path,
        });
    }
    // A program that is run in the container is the container's.
    let of_host = |name: &str| name != "startContainer";
    let hooks = edits
        .hooks
        .iter_mut()
        .filter(|hook| of_host(&hook.hook_name) == (side == Side::Host));
    hooks.for_each(|hook| replace(&mut hook.path));
    if side == Side::Container {
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

/// `/path`, `--folder=/path`, or a link: `/target::/link`.
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

/// The path below the other root; `None` if it is not below the first.
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
