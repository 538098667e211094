//! `nvidia-ctk system`: creates NVIDIA's control device nodes, and links in `/dev/char` to NVIDIA's device nodes.
//!
//! With the systemd cgroup driver, runc looks for `/dev/char/MAJOR:MINOR` of each device that a container may use. NVIDIA's
//! kernel module does not create these links. Without them, a container loses its GPU when systemd reloads
//! (NVIDIA/nvidia-container-toolkit#48).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use divvy_cdi::generate::ldcache;
use divvy_cdi::generate::proc::mig_minors;
use divvy_host::Files;
use divvy_host::Root;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, makedev, mknodat, openat, openat2, statat};
use rustix::io::Errno;

use super::say;
use crate::cli::system::{DevCharLinksArgs, DeviceNodesArgs, SystemCommand};

/// The names in `/proc/devices` of the major number of NVIDIA's GPUs. Drivers before 550.40 use the second name.
const GPU: [&str; 2] = ["nvidia", "nvidia-frontend"];
const UVM: &str = "nvidia-uvm";
const CAPABILITIES: &str = "nvidia-caps";
/// The device nodes of NVIDIA's other drivers, which containers do not use.
const NOT_LINKED: [&str; 3] = ["nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink"];

/// Run a subcommand of `divvy nvidia-system`.
pub fn run(command: SystemCommand) -> anyhow::Result<()> {
    match command {
        SystemCommand::DevCharLinks(args) => links(&args),
        SystemCommand::DeviceNodes(args) => {
            if args.control {
                nodes(&args)
            } else {
                Ok(())
            }
        }
        SystemCommand::PrintLdcache { driver_root } => print_ldcache(&driver_root),
    }
}

/// Print the libraries as NVIDIA's tool does: those of 32 bits, then those of 64 bits.
fn print_ldcache(driver_root: &Path) -> anyhow::Result<()> {
    let path = driver_root.join("etc/ld.so.cache");
    let bytes = std::fs::read(&path).with_context(|| format!("failed to create ldcache: {}", path.display()))?;
    let all = ldcache::parse(&bytes).with_context(|| format!("failed to create ldcache: {}", path.display()))?;
    for (bits, is_64) in [(32, false), (64, true)] {
        let paths: BTreeSet<&str> = all
            .iter()
            .filter(|library| library.is_64_bit() == is_64)
            .map(|library| library.path)
            .collect();
        say(&match paths.len() {
            0 => format!("No {bits}-bit libraries found"),
            count => format!("{count} {bits}-bit libraries found"),
        })?;
        for path in paths {
            say(path)?;
        }
    }
    Ok(())
}

/// NVIDIA's major device numbers, by name.
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
            "no NVIDIA devices found: /proc/devices has no major number of NVIDIA, so the kernel module is not loaded; load it with modprobe nvidia"
        );
        Ok(Majors(majors))
    }

    fn of(&self, names: &[&str]) -> anyhow::Result<u32> {
        let found = names.iter().find_map(|name| self.0.get(*name)).copied();
        found.with_context(|| {
            format!(
                "missing required device major {0}: it is not in /proc/devices, so that kernel module is not loaded; load it with modprobe {0}",
                names[0]
            )
        })
    }

    /// Return the name, major number, and minor number of each control node.
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
    let found = if args.all { possible(&machine)? } else { existing(&machine) };
    if found.is_empty() {
        say("No NVIDIA devices found in /")?;
        return Ok(());
    }
    if !args.dry_run {
        std::fs::create_dir_all(&args.at).with_context(|| format!("the directory {} cannot be created", args.at.display()))?;
    }
    for (path, (major, minor)) in found {
        let link = args.at.join(format!("{major}:{minor}"));
        say(&format!("Creating link {} => {path}", link.display()))?;
        if args.dry_run || std::fs::read_link(&link).is_ok_and(|target| target == Path::new(&path)) {
            continue;
        }
        // Keep an existing file. It may be a correct link of udev, and it is not ours to delete.
        if let Err(error) = std::os::unix::fs::symlink(&path, &link) {
            say(&format!("warning: {} is not linked to {path}: {error}", link.display()))?;
        }
    }
    Ok(())
}

type NumberedDeviceNode = (String, (u32, u32));

/// Return NVIDIA's existing device nodes.
fn existing(machine: &Root<'_>) -> Vec<NumberedDeviceNode> {
    let mut found = Vec::new();
    for (directory, prefix) in [("/dev", "nvidia"), ("/dev/nvidia-caps", "nvidia-")] {
        let mut names = machine.names(directory);
        names.retain(|name| name.starts_with(prefix) && !NOT_LINKED.iter().any(|other| name.starts_with(other)));
        found.extend(names.into_iter().filter_map(|name| {
            // Skip links: they have the number of their target, but are not the kernel's name for it.
            let path = format!("{directory}/{name}");
            let number = machine.device(&path).filter(|_| machine.link(&path).is_none())?;
            Some((path, number))
        }));
    }
    found
}

/// Return the device nodes that the driver may create: the control nodes, the nodes of the GPUs, whose minor numbers start at 0,
/// and the nodes of the capabilities of MIG devices.
fn possible(machine: &Root<'_>) -> anyhow::Result<Vec<NumberedDeviceNode>> {
    let majors = Majors::read(machine)?;
    let minors = machine.text("/proc/driver/nvidia-caps/mig-minors");
    let control = majors.control()?;
    let capabilities = minors.as_ref().map(|_| majors.of(&[CAPABILITIES])).transpose()?;
    let gpus = gpus(machine);
    if gpus == 0 {
        return Ok(Vec::new());
    }
    let gpu = majors.of(&GPU)?;
    let mut found: Vec<NumberedDeviceNode> = control
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

/// Count NVIDIA's display and 3D controllers on the PCI bus. Virtual functions do not count, because they have no device node on the host.
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

/// Create the missing control nodes, with mode 0666 as nvidia-modprobe does.
fn nodes(args: &DeviceNodesArgs) -> anyhow::Result<()> {
    let files = Files::below("/");
    let machine = Root::open(&files, "/").context("there is no /")?;
    let control = Majors::read(&machine)?.control()?;
    let directory = args.dev_root.join("dev");
    let shown = |name: &str| directory.join(name).display().to_string();
    if args.dry_run {
        for (name, major, minor) in control {
            say(&format!("Running: mknod --mode=0666 {} c {major} {minor}", shown(name)))?;
        }
        return Ok(());
    }
    let directory = dev_of(&args.dev_root).with_context(|| format!("the directory {} cannot be opened", directory.display()))?;
    for (name, major, minor) in control {
        match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => {
                say(&format!("Skipping: {} already exists", shown(name)))?;
                continue;
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", shown(name))),
        }
        let mode = Mode::from_raw_mode(0o666);
        let made = mknodat(&directory, name, FileType::CharacterDevice, mode, makedev(major, minor));
        // The caller's umask must not restrict the mode.
        let made = made.and_then(|()| rustix::fs::chmodat(&directory, name, mode, AtFlags::empty()));
        made.with_context(|| format!("{} cannot be created; run this command as root", shown(name)))?;
    }
    Ok(())
}

/// Open `dev` below a root directory. No symbolic link can lead outside of the root.
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
        // Linux before 5.6 does not have openat2.
        Err(Errno::NOSYS) => openat(&root, "dev", flags | OFlags::NOFOLLOW, Mode::empty()),
        done => done,
    }
}
