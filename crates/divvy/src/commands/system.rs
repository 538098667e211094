//! `nvidia-ctk system`: NVIDIA's control nodes, and links to its nodes by their numbers.
//!
//! runc's systemd driver of cgroups looks for `/dev/char/MAJOR:MINOR` of each device that a container may use, and NVIDIA's module makes no such links: without them
//! a container loses its GPU when systemd reloads (NVIDIA/nvidia-container-toolkit#48).

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use divvy_cdi::generate::proc::mig_minors;
use divvy_host::Files;
use divvy_host::Root;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, makedev, mknodat, openat, openat2, statat};
use rustix::io::Errno;

use super::say;
use crate::cli::system::{DevCharLinksArgs, DeviceNodesArgs, SystemCommand};

/// Names of majors in `/proc/devices`; drivers before 550.40 have the second for GPUs.
const GPU: [&str; 2] = ["nvidia", "nvidia-frontend"];
const UVM: &str = "nvidia-uvm";
const CAPABILITIES: &str = "nvidia-caps";
/// Of other drivers than the GPUs' own, which containers do not use.
const NOT_LINKED: [&str; 3] = ["nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink"];

/// Does it.
pub fn run(command: SystemCommand) -> anyhow::Result<()> {
    match command {
        SystemCommand::DevCharLinks(args) => links(&args),
        SystemCommand::DeviceNodes(args) => match args.control {
            true => nodes(&args),
            false => Ok(()),
        },
    }
}

/// NVIDIA's majors, by their names.
struct Majors(BTreeMap<String, u32>);

impl Majors {
    fn read(machine: &Root<'_>) -> anyhow::Result<Majors> {
        let text = machine.text("/proc/devices").unwrap_or_default();
        let entry = |line: &str| {
            let (major, name) = line.trim().split_once(' ')?;
            let name = name.trim();
            name.starts_with("nvidia").then_some((name.to_owned(), major.parse().ok()?))
        };
        let majors: BTreeMap<String, u32> = text.lines().filter_map(entry).collect();
        anyhow::ensure!(
            !majors.is_empty(),
            "no NVIDIA devices found: /proc/devices has no major number of NVIDIA's, so the kernel's module is not loaded: modprobe nvidia"
        );
        Ok(Majors(majors))
    }

    fn of(&self, names: &[&str]) -> anyhow::Result<u32> {
        let found = names.iter().find_map(|name| self.0.get(*name)).copied();
        found.with_context(|| {
            format!(
                "missing required device major {0}: /proc/devices does not have it, so that module of the kernel is not loaded: modprobe {0}",
                names[0]
            )
        })
    }

    /// The control nodes: name, major and minor.
    fn control(&self) -> anyhow::Result<[(&'static str, u32, u32); 4]> {
        let (gpu, uvm) = (self.of(&GPU)?, self.of(&[UVM])?);
        Ok([
            ("nvidiactl", gpu, 255),
            ("nvidia-modeset", gpu, 254),
            ("nvidia-uvm", uvm, 0),
            ("nvidia-uvm-tools", uvm, 1),
        ])
    }
}

fn links(args: &DevCharLinksArgs) -> anyhow::Result<()> {
    let files = Files::below("/");
    let machine = Root::open(&files, "/").context("there is no /")?;
    if args.with_nodes {
        nodes(&DeviceNodesArgs {
            dev_root: PathBuf::from("/"),
            control: true,
            dry_run: args.dry_run,
        })?;
    }
    let found = match args.all {
        true => possible(&machine)?,
        false => existing(&machine),
    };
    if found.is_empty() {
        say("No NVIDIA devices found in /")?;
        return Ok(());
    }
    if !args.dry_run {
        std::fs::create_dir_all(&args.at).with_context(|| format!("the folder {} cannot be made", args.at.display()))?;
    }
    for (path, (major, minor)) in found {
        let link = args.at.join(format!("{major}:{minor}"));
        say(&format!("Creating link {} => {path}", link.display()))?;
        if args.dry_run || std::fs::read_link(&link).is_ok_and(|target| target == Path::new(&path)) {
            continue;
        }
        // One of udev's, say: what is there is right as often as not, and nobody's to throw away.
        if let Err(error) = std::os::unix::fs::symlink(&path, &link) {
            say(&format!("warning: {} is not linked to {path}: {error}", link.display()))?;
        }
    }
    Ok(())
}

type Node = (String, (u32, u32));

/// The nodes that are there.
fn existing(machine: &Root<'_>) -> Vec<Node> {
    let mut found = Vec::new();
    for (folder, prefix) in [("/dev", "nvidia"), ("/dev/nvidia-caps", "nvidia-")] {
        let mut names = machine.names(folder);
        names.retain(|name| name.starts_with(prefix) && !NOT_LINKED.iter().any(|other| name.starts_with(other)));
        found.extend(names.into_iter().filter_map(|name| {
            // A link to a node has the node's number, and is not what the kernel calls it.
            let path = format!("{folder}/{name}");
            let number = machine.device(&path).filter(|_| machine.link(&path).is_none())?;
            Some((path, number))
        }));
    }
    found
}

/// The nodes that the driver may make: of its GPUs, whose minors count up from 0, of the capabilities of their MIG devices, and the control nodes.
fn possible(machine: &Root<'_>) -> anyhow::Result<Vec<Node>> {
    let majors = Majors::read(machine)?;
    let minors = machine.text("/proc/driver/nvidia-caps/mig-minors");
    let control = majors.control()?;
    let capabilities = minors.as_ref().map(|_| majors.of(&[CAPABILITIES])).transpose()?;
    let gpus = gpus(machine);
    if gpus == 0 {
        return Ok(Vec::new());
    }
    let gpu = majors.of(&GPU)?;
    let mut found: Vec<Node> = control
        .map(|(name, major, minor)| (format!("/dev/{name}"), (major, minor)))
        .to_vec();
    found.extend((0..gpus).map(|minor| (format!("/dev/nvidia{minor}"), (gpu, minor))));
    if let (Some(text), Some(major)) = (&minors, capabilities) {
        let of_gpu = |path: &str| {
            let number = path.strip_prefix("gpu").and_then(|rest| rest.split_once('/'));
            number.is_some_and(|(number, _)| number.parse::<u32>().is_ok_and(|number| number < gpus))
        };
        let counts = |path: &str| path == "config" || path == "monitor" || of_gpu(path);
        let minors = mig_minors(text).into_iter().filter(|(path, _)| counts(path));
        found.extend(minors.map(|(_, minor)| (format!("/dev/nvidia-caps/nvidia-cap{minor}"), (major, minor))));
    }
    Ok(found)
}

/// NVIDIA's display and 3D controllers on the PCI bus; a virtual function of one has no node of its own here.
fn gpus(machine: &Root<'_>) -> u32 {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let is_gpu = |address: &String| {
        let field = |name: &str| machine.text(&format!("{DEVICES}/{address}/{name}")).unwrap_or_default();
        let class = field("class");
        let is_function = machine.link(&format!("{DEVICES}/{address}/physfn")).is_some();
        !is_function && field("vendor") == "0x10de" && (class.starts_with("0x0300") || class.starts_with("0x0302"))
    };
    let all = machine.names(DEVICES);
    u32::try_from(all.iter().filter(|address| is_gpu(address)).count()).unwrap_or(u32::MAX)
}

/// Makes the control nodes that are not there, open to everybody, as nvidia-modprobe makes them.
fn nodes(args: &DeviceNodesArgs) -> anyhow::Result<()> {
    let files = Files::below("/");
    let machine = Root::open(&files, "/").context("there is no /")?;
    let control = Majors::read(&machine)?.control()?;
    let folder = args.dev_root.join("dev");
    let shown = |name: &str| folder.join(name).display().to_string();
    if args.dry_run {
        for (name, major, minor) in control {
            say(&format!("Running: mknod --mode=0666 {} c {major} {minor}", shown(name)))?;
        }
        return Ok(());
    }
    let folder = dev_of(&args.dev_root).with_context(|| format!("the folder {} cannot be opened", folder.display()))?;
    for (name, major, minor) in control {
        match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => {
                say(&format!("Skipping: {} already exists", shown(name)))?;
                continue;
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error).with_context(|| format!("{} cannot be looked at", shown(name))),
        }
        let mode = Mode::from_raw_mode(0o666);
        let made = mknodat(&folder, name, FileType::CharacterDevice, mode, makedev(major, minor));
        // The caller's mask is not for others.
        let made = made.and_then(|()| rustix::fs::chmodat(&folder, name, mode, AtFlags::empty()));
        made.with_context(|| format!("{} cannot be made; root may", shown(name)))?;
    }
    Ok(())
}

/// `/dev` beneath a root: no link in it leads out.
fn dev_of(root: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, root, flags, Mode::empty())?;
    match openat2(
        &root,
        "dev",
        flags,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    ) {
        // Before Linux 5.6.
        Err(Errno::NOSYS) => openat(&root, "dev", flags | OFlags::NOFOLLOW, Mode::empty()),
        done => done,
    }
}
