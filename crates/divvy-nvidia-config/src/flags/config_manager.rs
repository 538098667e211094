//! The flags that only `config-manager` has.

use super::FlagKind::{Bool, List, Number, Text};
use super::{Flag, NvidiaProgram, flag};

const MANAGER: &[NvidiaProgram] = &[NvidiaProgram::ConfigManager];

pub(super) const FLAGS: [Flag; 9] = [
    flag(
        "oneshot",
        &["ONESHOT"],
        Bool,
        MANAGER,
        "Choose the file once, without a signal, and end: for an init container [default: false]",
    ),
    flag(
        "node-label",
        &["NODE_LABEL"],
        Text,
        MANAGER,
        "The node label whose value is the name of a file in --config-file-srcdir [default: nvidia.com/device-plugin.config]",
    ),
    flag(
        "config-file-srcdir",
        &["CONFIG_FILE_SRCDIR"],
        Text,
        MANAGER,
        "The directory with the configuration files, usually a mounted ConfigMap",
    ),
    flag(
        "config-file-dst",
        &["CONFIG_FILE_DST"],
        Text,
        MANAGER,
        "The symbolic link to the chosen file, which the other containers read",
    ),
    flag(
        "default-config",
        &["DEFAULT_CONFIG"],
        Text,
        MANAGER,
        "The file for a node without the label",
    ),
    flag(
        "fallback-strategies",
        &["FALLBACK_STRATEGIES"],
        List,
        MANAGER,
        "Without label and --default-config, the first that applies: named (the file default), single (the only file), empty (an empty file)",
    ),
    flag(
        "send-signal",
        &["SEND_SIGNAL"],
        Bool,
        MANAGER,
        "Send a signal after each change of the configuration [default: true]",
    ),
    flag(
        "signal",
        &["SIGNAL"],
        Number,
        MANAGER,
        "The number of the signal [default: 1, SIGHUP]",
    ),
    flag(
        "process-to-signal",
        &["PROCESS_TO_SIGNAL"],
        Text,
        MANAGER,
        "Every process that was started under exactly this name gets the signal [default: nvidia-device-plugin]",
    ),
];

/// The end of the help.
pub(super) const MORE: &str = "\
Required are --node-name, --config-file-srcdir, and --config-file-dst.

The files are the keys of a ConfigMap. To choose one for a node, write its name into the node's label:

  kubectl label node NODE nvidia.com/device-plugin.config=NAME --overwrite
  kubectl label node NODE nvidia.com/device-plugin.config-            # back to the default

A name that does not exist is reported in the log and in an event on the node (kubectl describe node NODE). The previous
configuration then stays in use. An edit of the chosen file is noticed within 2 s after the kubelet has updated the directory.

To signal a process of another container, the pod needs shareProcessNamespace: true.";
