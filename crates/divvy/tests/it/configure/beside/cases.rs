//! Files of engines as they occur in practice, and the arguments of NVIDIA's tool.

use std::path::Path;

use serde::Deserialize;

use super::Tree;

pub(super) const DOCKER: &str = "/etc/docker/daemon.json";
pub(super) const CONTAINERD: &str = "/etc/containerd/config.toml";
pub(super) const CRIO: &str = "/etc/crio/crio.conf";

/// The initial files of a machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Input {
    pub(super) name: String,
    own: Option<String>,
    own_file: Option<String>,
    #[serde(default)]
    others: Tree,
}

/// The inputs of each engine.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cases {
    pub(super) docker: Vec<Input>,
    pub(super) containerd: Vec<Input>,
    pub(super) crio: Vec<Input>,
}

pub(super) fn cases() -> Cases {
    toml::from_str(include_str!("cases.toml")).expect("TOML")
}

impl Input {
    /// Return the files of a machine whose engine has its own file at this path.
    pub(super) fn tree(&self, own: &str) -> Tree {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/configure/beside");
        let read = |name: &String| std::fs::read_to_string(directory.join(name)).expect("a file of the tests");
        let mut files = self.others.clone();
        if let Some(text) = self.own_file.as_ref().map(read).or(self.own.clone()) {
            files.insert(own.to_owned(), text);
        }
        files
    }
}

/// The arguments with which every input is tried.
pub(super) const WORDS: &[&str] = &[
    "",
    "--set-as-default --cdi.enabled",
    "--nvidia-runtime-name=gpu --nvidia-runtime-path=/opt/gpu",
];

/// Further arguments with which every input of containerd and CRI-O is tried.
pub(super) const WITH_DROP_INS: &[&str] = &[
    "--drop-in-config=",
    "--drop-in-config=/etc/other.d/gpu.toml --nvidia-set-as-default",
];
