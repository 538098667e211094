//! Specs of NVIDIA's devices other than GPUs, each in its own spec, as with `nvidia-ctk cdi generate --mode`.

use std::collections::BTreeSet;

use super::extras::numbered;
use super::nvidia::driver_files;
use super::{
    Channels, DeviceNodeTree, Draft, DraftDevice, Extras, GenerateError, GenerateOptions, Generated, Naming, Tree, open_root,
};
use divvy_host::Root;

/// The kind of device that a spec describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecSubject {
    /// All device nodes and files of the driver, for containers that manage GPUs.
    Management,
    /// GPUDirect Storage (mode `gds`).
    Storage,
    /// RDMA with Mellanox's driver (mode `mofed`).
    Rdma,
    /// GDRCopy.
    Gdrcopy,
    /// NVSwitches.
    Nvswitch,
    /// IMEX channels: one device for each channel, named by the channel's number.
    Imex,
}

const CAPABILITIES: &str = "/dev/nvidia-caps";
const CHANNELS: &str = "/dev/nvidia-caps-imex-channels";
/// Prefixes of device nodes that also begin with `nvidia` but belong to other drivers.
const OTHERS: [&str; 3] = ["nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink"];

/// Generate the spec of one kind of device. IMEX channels are one device each; every other kind is one device, `all`.
///
/// # Errors
/// Fails if the machine has no such device.
pub fn generate(tree: &dyn Tree, part: SpecSubject, options: &GenerateOptions) -> Result<Generated, GenerateError> {
    let root = open_root(tree, &options.driver_root, "--driver-root", "where the driver is installed")?;
    let machine = open_root(tree, "/", "--sys-root", "the machine's root")?;
    let nodes = DeviceNodeTree::find(tree, options, "/dev/nvidiactl")?;
    let mut draft = Draft::default();
    match part {
        SpecSubject::Management => management(tree, &root, &machine, &nodes, options, &mut draft)?,
        SpecSubject::Imex => imex(&nodes, &mut draft),
        _ => beside(part, &nodes, &root, &machine, &mut draft)?,
    }
    if draft.items.iter().all(|item| item.edits.device_nodes.is_empty()) {
        return Err(GenerateError::NoDriver(format!(
            "there is no device node of {} in {}: its kernel module is not loaded, or /dev is elsewhere (--dev-root)",
            part.name(),
            nodes.root.host("/dev")
        )));
    }
    draft.common.env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    // `only` selects GPUs, so it applies to no other kind of device except IMEX channels.
    let only = match part {
        SpecSubject::Imex => options.only.clone(),
        _ => Vec::new(),
    };
    draft.finish(&GenerateOptions {
        naming: vec![Naming::Index],
        only,
        ..options.clone()
    })
}

impl SpecSubject {
    fn name(self) -> &'static str {
        match self {
            SpecSubject::Management => "NVIDIA's driver",
            SpecSubject::Storage => "GPUDirect Storage",
            SpecSubject::Rdma => "RDMA (MOFED)",
            SpecSubject::Gdrcopy => "GDRCopy",
            SpecSubject::Nvswitch => "NVSwitches",
            SpecSubject::Imex => "IMEX channels",
        }
    }
}

fn all() -> DraftDevice {
    DraftDevice {
        index: "all".to_owned(),
        ..DraftDevice::default()
    }
}

fn beside(
    part: SpecSubject,
    nodes: &DeviceNodeTree<'_>,
    root: &Root<'_>,
    machine: &Root<'_>,
    draft: &mut Draft,
) -> Result<(), GenerateError> {
    let extras = Extras {
        storage: part == SpecSubject::Storage,
        rdma: part == SpecSubject::Rdma,
        gdrcopy: part == SpecSubject::Gdrcopy,
        nvswitch: part == SpecSubject::Nvswitch,
        imex: Channels::Some(BTreeSet::new()),
    };
    let mut found = Draft::default();
    extras.describe(nodes, root, machine, &mut found)?;
    draft.items.push(DraftDevice {
        edits: found.common,
        ..all()
    });
    Ok(())
}

fn imex(nodes: &DeviceNodeTree<'_>, draft: &mut Draft) {
    for path in numbered(nodes, CHANNELS, "channel") {
        let mut item = DraftDevice {
            index: path.trim_start_matches(CHANNELS).trim_start_matches("/channel").to_owned(),
            in_all: true,
            ..DraftDevice::default()
        };
        nodes.add_with_group(&mut item.edits, &path);
        draft.items.push(item);
    }
}

fn management(
    tree: &dyn Tree,
    root: &Root<'_>,
    machine: &Root<'_>,
    nodes: &DeviceNodeTree<'_>,
    options: &GenerateOptions,
    draft: &mut Draft,
) -> Result<(), GenerateError> {
    driver_files(
        root,
        machine,
        crate::driver_version::loaded_driver(tree).as_deref(),
        options,
        draft,
    )?;
    let mut item = all();
    let is_other = |name: &&String| OTHERS.iter().any(|other| name.starts_with(other));
    let names = nodes.root.names("/dev");
    let own = names.iter().filter(|name| name.starts_with("nvidia") && !is_other(name));
    let mut paths: Vec<String> = own
        .map(|name| format!("/dev/{name}"))
        .filter(|path| nodes.has(path))
        .collect();
    paths.extend(numbered(nodes, CAPABILITIES, "nvidia-cap"));
    paths.extend(numbered(nodes, CHANNELS, "channel"));
    for path in paths {
        nodes.add_with_group(&mut item.edits, &path);
    }
    draft.items.push(item);
    Ok(())
}
