//! Facts from a machine's files.

use divvy_cdi::generate::{nvidia, wsl};
use divvy_cdi::{DIRECTORIES, FoundSpec, Registry, is_spec_file};
use divvy_host::FileKind;
use divvy_model::Vendor;

use super::Facts;
use super::engine::told;
use crate::check::CheckStop;

/// The mount point of a driver container's root directory (NVIDIA GPU Operator).
pub const DRIVER_CONTAINER: &str = "/run/nvidia/driver";
/// The directory in which the kernel lists PCI devices.
const PCI: &str = "/sys/bus/pci/devices";
/// The largest CDI spec that is read, in bytes. Specs may name hundreds of libraries.
const LARGEST_SPEC: usize = 4 * 1024 * 1024;
/// The largest database of rpm that is read, in bytes.
const LARGEST_DATABASE: usize = 128 * 1024 * 1024;
/// The largest text file that is read, in bytes.
const LARGEST_FILE: usize = 1024 * 1024;

/// Return a vendor's PCI id, and the PCI classes of its GPUs: 03 is a display controller, and 12 a processing accelerator.
fn on_pci(vendor: Vendor) -> (&'static str, &'static [&'static str]) {
    match vendor {
        Vendor::Nvidia => ("0x10de", &["03"]),
        Vendor::Amd => ("0x1002", &["03", "12"]),
        Vendor::Intel => ("0x8086", &["03"]),
    }
}

/// A GPU on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciGpu {
    /// The PCI address, such as `0000:81:00.0`.
    pub address: String,
    /// The vendor.
    pub vendor: Vendor,
    /// The kernel driver that is bound to the GPU.
    pub driver: Option<String>,
}

/// The kubelet's settings, from its command line and its configuration file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletSettings {
    /// The configuration file, if one was found.
    pub file: Option<String>,
    /// The root directory (`--root-dir`).
    pub dir: String,
    /// The path in `containerRuntimeEndpoint`, without `unix://`.
    pub endpoint: Option<String>,
    /// `cgroupDriver`: `systemd` or `cgroupfs`.
    pub cgroup_driver: Option<String>,
    /// The directory of static pods (`staticPodPath`).
    pub static_pods: Option<String>,
}

impl Facts<'_> {
    /// Return the text of a file without trailing whitespace. `None` if the file cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.root.read(path, LARGEST_FILE)?;
        Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.root.resolve(path).is_some()
    }

    /// Return the number of all PCI devices, and the GPUs among them.
    pub(crate) fn pci(&self) -> (usize, Vec<PciGpu>) {
        let addresses = self.root.names(PCI);
        let gpus = addresses.iter().filter_map(|address| self.pci_gpu(address)).collect();
        (addresses.len(), gpus)
    }

    fn pci_gpu(&self, address: &str) -> Option<PciGpu> {
        let read = |file: &str| self.root.text(&format!("{PCI}/{address}/{file}"));
        let (vendor, class) = (read("vendor")?, read("class")?);
        let class = class.get(2..4)?;
        let vendor = Vendor::ALL.into_iter().find(|known| {
            let (id, classes) = on_pci(*known);
            id == vendor && classes.contains(&class)
        })?;
        let driver = self.root.link(&format!("{PCI}/{address}/driver"));
        Some(PciGpu {
            address: address.to_owned(),
            vendor,
            driver: driver.and_then(|target| Some(target.rsplit('/').next()?.to_owned())),
        })
    }

    /// Return the GPUs of one vendor on the PCI bus.
    pub(crate) fn gpus_of(&self, vendor: Vendor) -> Vec<PciGpu> {
        let mut gpus = self.pci().1;
        gpus.retain(|gpu| gpu.vendor == vendor);
        gpus
    }

    /// Report whether this machine is WSL 2 with a GPU. It has no PCI bus and no kernel module.
    pub(crate) fn wsl(&self) -> bool {
        wsl::is_there(self.tree)
    }

    /// Return [`CheckStop::Skip`] if this machine has neither an NVIDIA GPU nor an NVIDIA driver.
    pub(crate) fn nvidia(&self) -> Result<(), CheckStop> {
        let there = !self.gpus_of(Vendor::Nvidia).is_empty() || self.loaded().is_some() || self.wsl();
        there
            .then_some(())
            .ok_or_else(|| CheckStop::Skip("no NVIDIA GPU here".to_owned()))
    }

    /// Return the version of NVIDIA's loaded kernel module, or [`CheckStop::Skip`] if none is loaded.
    pub(crate) fn nvidia_driver(&self) -> Result<String, CheckStop> {
        self.nvidia()?;
        if self.wsl() {
            return Err(CheckStop::Skip("WSL: the driver is part of Windows".to_owned()));
        }
        self.loaded()
            .ok_or_else(|| CheckStop::Skip("NVIDIA's kernel module is not loaded (D02)".to_owned()))
    }

    /// Return [`CheckStop::Skip`] if this machine has no GPU.
    pub(crate) fn any_gpu(&self) -> Result<(), CheckStop> {
        let there = !self.pci().1.is_empty() || self.loaded().is_some() || self.wsl() || self.exists("/sys/class/kfd");
        there.then_some(()).ok_or_else(|| CheckStop::Skip("no GPU here".to_owned()))
    }

    /// Return the version of NVIDIA's loaded kernel module. `None` if none is loaded.
    pub(crate) fn loaded(&self) -> Option<String> {
        divvy_cdi::driver_version::loaded_driver(self.tree)
    }

    /// Return NVIDIA's driver libraries below the driver root.
    pub(crate) fn installed(&self) -> Option<nvidia::Installed> {
        nvidia::installed(self.tree, &self.driver_root)
    }

    /// Return the driver container's root directory if only that directory contains driver libraries. Otherwise return `/`.
    pub(super) fn usual_driver_root(&self) -> String {
        let has = |root: &str| nvidia::installed(self.tree, root).is_some();
        if !has("/") && has(DRIVER_CONTAINER) {
            DRIVER_CONTAINER.to_owned()
        } else {
            "/".to_owned()
        }
    }

    /// Return a path below the driver root.
    pub(crate) fn of_driver(&self, path: &str) -> String {
        format!("{}{path}", self.driver_root.trim_end_matches('/'))
    }

    /// Return the command that generates a CDI spec for a vendor.
    pub(crate) fn generate(&self, vendor: &str, path: &str) -> String {
        let vendor = if vendor == "nvidia" {
            String::new()
        } else {
            format!(" --vendor {vendor}")
        };
        let root = match self.driver_root.as_str() {
            "/" => String::new(),
            root => format!(" --driver-root {root}"),
        };
        format!("divvy cdi generate{vendor}{root} -o {path}")
    }

    /// Return the directory that contains the device nodes: the driver container's directory if it contains any, and otherwise
    /// the machine's `/dev`.
    pub(crate) fn dev(&self) -> String {
        let own = self.of_driver("/dev");
        if self.exists(&format!("{own}/nvidiactl")) {
            own
        } else {
            "/dev".to_owned()
        }
    }

    /// Return the CDI specs in the directories that engines read.
    pub(crate) fn specs(&self) -> Registry {
        let mut found = Vec::new();
        for (priority, directory) in DIRECTORIES.into_iter().enumerate() {
            for name in self.root.names(directory) {
                let path = format!("{directory}/{name}");
                if is_spec_file(&name) && self.root.file(&path).is_some() {
                    let text = self.root.read(&path, LARGEST_SPEC).ok_or("it cannot be read");
                    let text = text.and_then(|bytes| String::from_utf8(bytes).map_err(|_| "it is not text"));
                    found.push(FoundSpec::of(path, priority, text.map_err(std::io::Error::other)));
                }
            }
        }
        Registry::new(found)
    }

    /// Report whether a CDI spec describes a vendor's GPUs.
    pub(crate) fn has_spec(&self, vendor: &str) -> bool {
        let registry = self.specs();
        registry
            .files()
            .iter()
            .filter_map(FoundSpec::usable)
            .any(|spec| spec.kind.starts_with(vendor) && spec.kind.ends_with("/gpu"))
    }

    /// Report whether the distribution's `ID` or `ID_LIKE` contains the name of this family.
    pub(crate) fn is_like(&self, family: &str) -> bool {
        let release = self.text("/etc/os-release").or_else(|| self.text("/usr/lib/os-release"));
        release.unwrap_or_default().lines().any(|line| {
            line.strip_prefix("ID=")
                .or_else(|| line.strip_prefix("ID_LIKE="))
                .is_some_and(|names| names.trim_matches('"').split_whitespace().any(|name| name == family))
        })
    }

    /// Return the version of an installed package of dpkg or rpm.
    pub(crate) fn package(&self, name: &str) -> Option<String> {
        self.dpkg(name).or_else(|| self.rpm(name))
    }

    /// Return the version of an rpm package. rpm's database is binary; a package's header has the strings NAME, VERSION, and RELEASE one after
    /// the other (`rpmtag.h`), each with a zero at its end.
    fn rpm(&self, name: &str) -> Option<String> {
        let databases = ["/var/lib/rpm", "/usr/lib/sysimage/rpm"].map(|directory| format!("{directory}/rpmdb.sqlite"));
        let read = || databases.iter().find_map(|path| self.root.read(path, LARGEST_DATABASE));
        let bytes = self.rpm_database.get_or_init(|| read().unwrap_or_default());
        let start = format!("\0{name}\0");
        let mut places = bytes
            .windows(start.len())
            .enumerate()
            .filter(|(_, window)| *window == start.as_bytes());
        places.find_map(|(at, _)| {
            let version = bytes[at + start.len()..].split(|byte| *byte == 0).next()?;
            let version = std::str::from_utf8(version).ok()?;
            version.starts_with(|c: char| c.is_ascii_digit()).then(|| version.to_owned())
        })
    }

    fn dpkg(&self, name: &str) -> Option<String> {
        let status = self.root.read("/var/lib/dpkg/status", 64 * 1024 * 1024)?;
        let status = String::from_utf8_lossy(&status);
        let paragraph = status.split("\n\n").find(|paragraph| {
            let mut lines = paragraph.lines();
            lines.next().and_then(|line| line.strip_prefix("Package: ")) == Some(name)
                && paragraph.contains("\nStatus: install ok installed")
        })?;
        let version = paragraph.lines().find_map(|line| line.strip_prefix("Version: "))?;
        Some(version.to_owned())
    }

    /// Return the PID and the arguments of each process with this name. The processes of nested PID namespaces are left out: they are the
    /// engines and kubelets of other machines, such as the nodes of kind and k3d.
    pub fn processes(&self, name: &str) -> Vec<(u32, Vec<String>)> {
        let all = self.process_names.get_or_init(|| {
            let numbers = self.root.names("/proc").into_iter().filter_map(|entry| entry.parse().ok());
            let named = numbers.filter_map(|number: u32| Some((number, self.root.text(&format!("/proc/{number}/comm"))?)));
            named.collect()
        });
        let mut found = Vec::new();
        for (number, _) in all.iter().filter(|(_, comm)| comm == name) {
            let status = self.root.text(&format!("/proc/{number}/status")).unwrap_or_default();
            let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            if ids.is_some_and(|ids| ids.split_whitespace().count() > 1) {
                continue;
            }
            let line = self
                .root
                .read(&format!("/proc/{number}/cmdline"), 64 * 1024)
                .unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            found.push((
                *number,
                line.split('\0').filter(|word| !word.is_empty()).map(str::to_owned).collect(),
            ));
        }
        found
    }

    /// Return the start time of a process in seconds since 1970. It is field 22 of `stat` (`proc(5)`), in ticks of 10 ms since
    /// `btime`.
    pub fn started(&self, process: u32) -> Option<i64> {
        let boot = self.root.text("/proc/stat")?;
        let boot: i64 = boot
            .lines()
            .find_map(|line| line.strip_prefix("btime "))?
            .trim()
            .parse()
            .ok()?;
        let stat = self.root.text(&format!("/proc/{process}/stat"))?;
        // The process name may contain blanks and parentheses, so fields are counted after the last parenthesis.
        let ticks: i64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        boot.checked_add(ticks / 100)
    }

    /// Return the kubelet's settings. Its command line has precedence over its configuration file. `None` if there is no sign of
    /// a kubelet.
    pub fn kubelet(&self) -> Option<KubeletSettings> {
        const FILES: [&str; 3] = [
            "/var/lib/kubelet/config.yaml",
            "/etc/kubernetes/kubelet/kubelet-config.json",
            "/var/snap/microk8s/current/args/kubelet",
        ];
        let arguments = self.processes("kubelet").into_iter().next().map(|(_, arguments)| arguments);
        let flag = |name: &str| told(arguments.as_deref().unwrap_or_default(), &[&format!("--{name}")]);
        let file = flag("config")
            .filter(|file| self.exists(file))
            .or_else(|| FILES.into_iter().find(|file| self.exists(file)).map(str::to_owned));
        let dir = flag("root-dir").or_else(|| {
            let dirs = ["/var/lib/kubelet", "/var/lib/k0s/kubelet"];
            dirs.into_iter()
                .find(|dir| self.exists(&format!("{dir}/device-plugins")))
                .map(str::to_owned)
        });
        if file.is_none() && arguments.is_none() && dir.is_none() {
            return None;
        }
        let settings: serde_json::Value = file
            .as_ref()
            .and_then(|file| serde_saphyr::from_str(&self.text(file)?).ok())
            .unwrap_or_default();
        let setting = |name: &str| settings.get(name).and_then(|value| value.as_str()).map(str::to_owned);
        let endpoint = flag("container-runtime-endpoint").or_else(|| setting("containerRuntimeEndpoint"));
        Some(KubeletSettings {
            dir: dir.unwrap_or_else(|| "/var/lib/kubelet".to_owned()),
            endpoint: endpoint
                .map(|endpoint| endpoint.trim_start_matches("unix://").to_owned())
                .filter(|endpoint| !endpoint.is_empty()),
            static_pods: flag("pod-manifest-path").or_else(|| setting("staticPodPath")),
            cgroup_driver: flag("cgroup-driver").or_else(|| setting("cgroupDriver")),
            file,
        })
    }

    /// Report whether a path leads to a file. Links are followed.
    pub(crate) fn is_program(&self, path: &str) -> bool {
        self.root.resolve(path).is_some_and(|(_, entry)| entry.kind == FileKind::File)
    }

    /// Return the path of the first of these programs that exists in one of the usual directories.
    pub fn program(&self, names: &[&str]) -> Option<String> {
        let directories = [
            "/usr/bin",
            "/usr/local/bin",
            "/usr/sbin",
            "/usr/local/sbin",
            "/usr/local/nvidia/toolkit",
            "/opt/divvy/bin",
        ];
        names
            .iter()
            .flat_map(|name| directories.iter().map(move |directory| format!("{directory}/{name}")))
            .find(|path| self.is_program(path))
    }
}

/// Report whether a version (`550.54.15`, `v1.30.2+k3s1`, `1.17.8-1`) is `least` or later. Only the parts before the first part
/// that is not a number are compared.
pub fn version_at_least(version: &str, least: &[u32]) -> bool {
    let version = version.trim_start_matches('v');
    let numbers: Vec<u32> = version
        .split(['.', '-', '+', '~', ':'])
        .map_while(|part| part.parse().ok())
        .collect();
    for (i, wanted) in least.iter().enumerate() {
        let have = numbers.get(i).copied().unwrap_or(0);
        if have != *wanted {
            return have > *wanted;
        }
    }
    true
}
