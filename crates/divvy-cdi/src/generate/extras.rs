//! What a container may get in addition to GPUs: GPUDirect Storage, RDMA, GDRCopy, NVSwitches, IMEX channels (nvidia-container-toolkit,
//! `pkg/nvcdi`, modes gds, mofed, gdrcopy, nvswitch, and imex).

use std::collections::BTreeSet;

use super::{DeviceNodeTree, Draft, GenerateError, files};
use divvy_host::Root;

/// The additional devices to include; by default none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    /// GPUDirect Storage: `/dev/nvidia-fs*`, the udev database, and `/etc/cufile.json`.
    pub storage: bool,
    /// RDMA with Mellanox's driver: `/dev/infiniband/uverbs*` and `/dev/infiniband/rdma_cm`.
    pub rdma: bool,
    /// GDRCopy: `/dev/gdrdrv`.
    pub gdrcopy: bool,
    /// NVSwitches: `/dev/nvidia-nvswitchctl` and `/dev/nvidia-nvswitch*`.
    pub nvswitch: bool,
    /// IMEX channels: `/dev/nvidia-caps-imex-channels/channel*`.
    pub imex: Channels,
}

/// A selection of IMEX channels, through which GPUs of several machines share memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channels {
    /// The channels with these numbers, which must exist.
    Some(BTreeSet<u32>),
    /// All existing channels.
    All,
}

impl Default for Channels {
    fn default() -> Channels {
        Channels::Some(BTreeSet::new())
    }
}

const IMEX: &str = "/dev/nvidia-caps-imex-channels";

impl Extras {
    /// Add the selected devices to the draft. If a kind of device is missing, add a note. If a channel that was requested by
    /// number is missing, return an error, because without it the GPUs of other machines cannot be reached.
    pub(super) fn describe(
        &self,
        nodes: &DeviceNodeTree<'_>,
        root: &Root<'_>,
        machine: &Root<'_>,
        draft: &mut Draft,
    ) -> Result<(), GenerateError> {
        let mut wanted: Vec<(&str, Vec<String>)> = Vec::new();
        if self.storage {
            wanted.push(("GPUDirect Storage", numbered(nodes, "/dev", "nvidia-fs")));
            draft.common.mounts.extend(files::storage(root, machine));
        }
        if self.rdma {
            let mut paths = numbered(nodes, "/dev/infiniband", "uverbs");
            paths.extend(Some("/dev/infiniband/rdma_cm".to_owned()).filter(|path| nodes.has(path)));
            wanted.push(("RDMA (MOFED)", paths));
        }
        if self.gdrcopy {
            let node = Some("/dev/gdrdrv".to_owned()).filter(|path| nodes.has(path));
            wanted.push(("GDRCopy", node.into_iter().collect()));
        }
        if self.nvswitch {
            let mut paths = numbered(nodes, "/dev", "nvidia-nvswitch");
            paths.extend(Some("/dev/nvidia-nvswitchctl".to_owned()).filter(|path| nodes.has(path)));
            wanted.push(("NVSwitch", paths));
        }
        if self.imex == Channels::All {
            wanted.push(("IMEX channels", numbered(nodes, IMEX, "channel")));
        }
        for (what, paths) in wanted {
            if paths.is_empty() {
                draft.notes.push(format!(
                    "{what} is requested, but this machine has no device node for it: its driver is not loaded"
                ));
            }
            for path in paths {
                nodes.add_with_group(&mut draft.common, &path);
            }
        }
        if let Channels::Some(numbers) = &self.imex {
            for number in numbers {
                let path = format!("{IMEX}/channel{number}");
                if !nodes.add_with_group(&mut draft.common, &path) {
                    return Err(GenerateError::NoChannel(nodes.root.host(&path)));
                }
            }
        }
        Ok(())
    }
}

/// Return the device nodes in a directory that are named with the prefix and a number, or with the prefix alone (`nvidia-fs`).
pub(super) fn numbered(nodes: &DeviceNodeTree<'_>, directory: &str, prefix: &str) -> Vec<String> {
    let is_number = |rest: &str| rest.bytes().all(|c| c.is_ascii_digit());
    let names = nodes.root.names(directory);
    let named = names.iter().filter(|name| name.strip_prefix(prefix).is_some_and(is_number));
    named
        .map(|name| format!("{directory}/{name}"))
        .filter(|path| nodes.has(path))
        .collect()
}
