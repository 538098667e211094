//! Generates the spec of AMD GPUs: `/dev/kfd`, and a render node for each GPU or partition of a GPU (an `MI300` in CPX mode has eight). The
//! user-space libraries must be in the image.

use std::collections::{BTreeMap, BTreeSet};

use super::{DeviceNodeTree, Draft, DraftDevice, GenerateError, GenerateOptions, Generated, Tree, open_root};
use crate::Edits;
use divvy_host::Root;

const KFD: &str = "/dev/kfd";
const TOPOLOGY: &str = "/sys/class/kfd/kfd/topology/nodes";

/// Report whether the machine has a GPU with AMD's compute driver.
pub fn is_there(tree: &dyn Tree) -> bool {
    Root::open(tree, "/").is_some_and(|root| root.names(TOPOLOGY).iter().any(|node| gpu(&root, node).is_some()))
}

/// Generate the spec of a machine's AMD GPUs, in the order of the driver's topology, which is ROCm's order.
///
/// # Errors
/// Fails if there is no driver, or if no GPU has a device node.
pub fn generate(tree: &dyn Tree, options: &GenerateOptions) -> Result<Generated, GenerateError> {
    let machine = open_root(tree, "/", "--sys-root", "the machine's root")?;
    let nodes = DeviceNodeTree::find(tree, options, KFD)?;
    let mut draft = Draft {
        driver: machine.text("/sys/module/amdgpu/version"),
        ..Draft::default()
    };
    if !nodes.add_with_group(&mut draft.common, KFD) {
        return Err(GenerateError::NoDriver(format!(
            "there is no {}: the kernel module amdgpu is not loaded, or was built without compute support; load it (modprobe amdgpu), or say where \
             /dev is with --dev-root",
            nodes.root.host(KFD)
        )));
    }
    let mut order: Vec<(u64, String)> = machine
        .names(TOPOLOGY)
        .into_iter()
        .filter_map(|node| Some((node.parse().ok()?, node)))
        .collect();
    order.sort_unstable();
    let gpus = order.iter().filter_map(|(_, node)| gpu(&machine, node));
    for (gpu, index) in gpus.zip(0_u32..) {
        let render = format!("renderD{}", gpu.render);
        let mut edits = Edits::default();
        let path = format!("/dev/dri/{render}");
        if !nodes.add_with_group(&mut edits, &path) {
            draft
                .notes
                .push(format!("GPU {index} is left out: there is no {}", nodes.root.host(&path)));
            continue;
        }
        for name in machine.names(&format!("/sys/class/drm/{render}/device/drm")) {
            if name.starts_with("card") {
                nodes.add(&mut edits, &format!("/dev/dri/{name}"));
            }
        }
        draft.items.push(DraftDevice {
            index: index.to_string(),
            // amd-smi and AMD's container toolkit use the same name for a card.
            uuid: (gpu.unique_id != 0).then(|| format!("0x{:x}", gpu.unique_id)),
            edits,
            in_all: true,
        });
    }
    if draft.items.is_empty() {
        return Err(GenerateError::NoGpu(match draft.notes.as_slice() {
            [] => format!(
                "{KFD} exists, but {TOPOLOGY} lists no GPU; run rocminfo on this machine to see which GPUs the driver knows"
            ),
            notes => notes.join("; "),
        }));
    }
    let distinct: BTreeSet<_> = draft.items.iter().filter_map(|item| item.uuid.as_ref()).collect();
    let named = draft.items.iter().filter(|item| item.uuid.is_some()).count();
    if distinct.len() < named {
        draft.notes.push(format!(
            "{named} partitions share {} cards: a device that is named by a card's ID has all partitions of that card",
            distinct.len()
        ));
    }
    draft.finish(options)
}

struct AmdGpu {
    render: u32,
    unique_id: u64,
}

/// Read a node of the topology, whose file has `key value` lines. Return `None` if the node is not a GPU.
fn gpu(machine: &Root<'_>, node: &str) -> Option<AmdGpu> {
    let text = machine.text(&format!("{TOPOLOGY}/{node}/properties"))?;
    let fields: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.trim().split_once(' ')).collect();
    let number = |key: &str| fields.get(key)?.trim().parse::<u64>().ok();
    // The node of a CPU has cores, but no SIMD units.
    number("simd_count").filter(|count| *count > 0)?;
    Some(AmdGpu {
        render: number("drm_render_minor")?.try_into().ok().filter(|minor| *minor > 0)?,
        unique_id: number("unique_id").unwrap_or_default(),
    })
}
