//! Reading and editing the configuration files of container engines.

mod editing;
mod places;
mod properties;
mod reading;

use std::collections::BTreeMap;

/// Files by path.
pub(crate) type Tree = BTreeMap<String, String>;

pub(crate) fn tree<const N: usize>(files: [(&str, &str); N]) -> Tree {
    files
        .iter()
        .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
        .collect()
}

pub(crate) const CONTAINERD: &str = "/etc/containerd/config.toml";
pub(crate) const DOCKER: &str = "/etc/docker/daemon.json";
pub(crate) const CRIO: &str = "/etc/crio/crio.conf";

/// A file as a person writes it: with comments, a custom option, and a private registry.
pub(crate) const V2: &str = r#"version = 2
# where images live
root = "/var/lib/containerd"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.example/pause:3.9" # pinned
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
"#;
