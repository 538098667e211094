//! The mount namespace.

use std::fs;

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};

/// Enter a mount namespace of this process's own, from which nothing reaches the machine's mounts. A process that is not root becomes root of a user
/// namespace, in which only its own user and group exist.
pub(crate) fn enter() -> Result<()> {
    let (user, group) = (Uid::effective(), Gid::effective());
    let refused = || advice(|path| fs::read_to_string(path).ok());
    // Root in a container may lack the right to make mounts.
    if !user.is_root() || unshare(CloneFlags::CLONE_NEWNS).is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).with_context(refused)?;
        let write = |file: &str, text: &str| {
            let path = format!("/proc/self/{file}");
            fs::write(&path, text).with_context(|| format!("{path} could not be written; {}", refused()))
        };
        write("setgroups", "deny")?;
        write("uid_map", &format!("0 {user} 1"))?;
        write("gid_map", &format!("0 {group} 1"))?;
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).with_context(refused)
}

/// The settings that keep users from making user namespaces, the value with which they do, and the command that changes it.
const SETTINGS: [(&str, &str, &str); 3] = [
    (
        "/proc/sys/user/max_user_namespaces",
        "0",
        "sudo sysctl -w user.max_user_namespaces=10000",
    ),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "sudo sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
];

/// Say what to type where a namespace is refused.
fn advice(read: impl Fn(&str) -> Option<String>) -> String {
    let refuses = |(path, value, _): &&(&str, &str, &str)| read(path).is_some_and(|text| text.trim() == *value);
    let commands: Vec<&str> = SETTINGS.iter().filter(refuses).map(|(.., command)| *command).collect();
    let what = match commands.as_slice() {
        [] => "run it as root, and in a container of Docker with `docker run --privileged`".to_owned(),
        commands => format!("type `{}`, or run it as root", commands.join("; ")),
    };
    format!("this machine does not let this user make a mount namespace, in which the containers' programs must run: {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_setting_that_refuses() {
        let of = |set: &'static [(&'static str, &'static str)]| {
            advice(|path| {
                set.iter()
                    .find(|(known, _)| path.ends_with(known))
                    .map(|(_, value)| format!("{value}\n"))
            })
        };
        let cases: [(&[(&str, &str)], &str); 4] = [
            (&[], "docker run --privileged"),
            (
                &[("max_user_namespaces", "9"), ("restrict_unprivileged_userns", "0")],
                "docker run --privileged",
            ),
            (
                &[("restrict_unprivileged_userns", "1")],
                "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`",
            ),
            (
                &[("max_user_namespaces", "0"), ("unprivileged_userns_clone", "0")],
                "`sudo sysctl -w user.max_user_namespaces=10000; sudo sysctl -w kernel.unprivileged_userns_clone=1`",
            ),
        ];
        for (set, expected) in cases {
            let text = of(set);
            assert!(text.contains(expected), "{set:?}: {text}");
        }
    }
}
