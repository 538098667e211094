//! What a container may have beside GPUs: GPUDirect Storage, RDMA, GDRCopy, NVSwitches, IMEX channels (nvidia-container-toolkit, `pkg/nvcdi`,
//! modes gds, mofed, gdrcopy, nvswitch and imex).

use std::collections::BTreeSet;

use super::tree::Root;
use super::{Draft, Error, Nodes, files};

/// Which of them; usually none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    /// GPUDirect Storage: `/dev/nvidia-fs*`, the udev database and `/etc/cufile.json`.
    pub storage: bool,
    /// RDMA by Mellanox' driver: `/dev/infiniband/uverbs*` and `rdma_cm`.
    pub rdma: bool,
    /// `/dev/gdrdrv`
    pub gdrcopy: bool,
    /// `/dev/nvidia-nvswitchctl` and `/dev/nvidia-nvswitch*`
    pub nvswitch: bool,
    /// `/dev/nvidia-caps-imex-channels/channel*`
    pub imex: Channels,
}

/// Channels of IMEX, by which GPUs of several machines share memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channels {
    /// These, which must be there.
    Some(BTreeSet<u32>),
    /// Those that are there.
    All,
}

impl Default for Channels {
    fn default() -> Channels {
        Channels::Some(BTreeSet::new())
    }
}

const IMEX: &str = "/dev/nvidia-caps-imex-channels";

impl Extras {
    /// What is asked for in general and is not there is noted; a channel that is asked for by its number and is not there is an error, as its
    /// GPUs would be found by nobody.
    pub(super) fn describe(
        &self,
        nodes: &Nodes<'_>,
        root: &Root<'_>,
        machine: &Root<'_>,
        draft: &mut Draft,
    ) -> Result<(), Error> {
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
                    return Err(Error::NoChannel(nodes.root.host(&path)));
                }
            }
        }
        Ok(())
    }
}

/// Nodes of a folder that are called so, with a number or without one (`nvidia-fs`).
pub(super) fn numbered(nodes: &Nodes<'_>, folder: &str, prefix: &str) -> Vec<String> {
    let is_number = |rest: &str| rest.bytes().all(|c| c.is_ascii_digit());
    let names = nodes.root.names(folder);
    let named = names.iter().filter(|name| name.strip_prefix(prefix).is_some_and(is_number));
    named
        .map(|name| format!("{folder}/{name}"))
        .filter(|path| nodes.has(path))
        .collect()
}
