//! Generates the spec of Intel GPUs: the DRM device nodes of each GPU with the driver `i915` or `xe`. The user-space libraries must be in the image.

use super::nvidia::drm_nodes;
use super::{DeviceNodeTree, Draft, DraftDevice, GenerateError, GenerateOptions, Generated, Tree, open_root};
use crate::Edits;
use divvy_host::Root;

const DEVICES: &str = "/sys/bus/pci/devices";
const VENDOR: &str = "0x8086";
/// The prefix of the PCI class of display controllers.
const DISPLAY: &str = "0x03";

/// Report whether the machine has an Intel GPU.
pub fn is_there(tree: &dyn Tree) -> bool {
    Root::open(tree, "/").is_some_and(|root| !gpus(&root).is_empty())
}

/// Generate the spec of a machine's Intel GPUs, in the order of their PCI addresses.
///
/// # Errors
/// Fails if no GPU has a render node.
pub fn generate(tree: &dyn Tree, options: &GenerateOptions) -> Result<Generated, GenerateError> {
    let machine = open_root(tree, "/", "--sys-root", "the machine's root")?;
    let nodes = DeviceNodeTree::find(tree, options, "/dev/dri")?;
    let mut draft = Draft::default();
    for (address, index) in gpus(&machine).into_iter().zip(0_u32..) {
        let mut edits = Edits::default();
        let mut can_compute = false;
        for path in drm_nodes(&machine, &address) {
            if path.contains("renderD") {
                can_compute |= nodes.add_with_group(&mut edits, &path);
            } else {
                nodes.add(&mut edits, &path);
            }
        }
        if !can_compute {
            draft.notes.push(format!(
                "the GPU at {address} is left out: it has no /dev/dri/renderD*; is the kernel module i915 or xe loaded?"
            ));
            continue;
        }
        let device = machine.text(&format!("{DEVICES}/{address}/device")).unwrap_or_default();
        draft.items.push(DraftDevice {
            index: index.to_string(),
            // Intel's resource driver for Kubernetes uses the same name.
            uuid: Some(format!("{}-{device}", address.replace([':', '.'], "-"))),
            edits,
            in_all: true,
        });
    }
    if draft.items.is_empty() {
        return Err(GenerateError::NoGpu(match draft.notes.as_slice() {
            [] => format!("{DEVICES} has no Intel display controller (vendor {VENDOR})"),
            notes => notes.join("; "),
        }));
    }
    draft.finish(options)
}

/// Return the PCI addresses of Intel GPUs, sorted.
fn gpus(machine: &Root<'_>) -> Vec<String> {
    let reads = |address: &str, file: &str| machine.text(&format!("{DEVICES}/{address}/{file}")).unwrap_or_default();
    let mut found = machine.names(DEVICES);
    found.retain(|address| reads(address, "vendor") == VENDOR && reads(address, "class").starts_with(DISPLAY));
    found.sort();
    found
}
