//! Simulated machines: a builder for trees of files in memory.

use std::collections::BTreeMap;

use divvy_host::{FileKind, PathMetadata, Tree};

/// The files of a simulated machine.
#[derive(Debug, Default, Clone)]
pub struct MachineFiles(BTreeMap<String, (PathMetadata, Vec<u8>)>);

impl MachineFiles {
    fn put(&mut self, path: &str, kind: FileKind, mode: u32, gid: u32, bytes: &[u8]) -> &mut MachineFiles {
        let mut parent = path;
        while let Some((above, _)) = parent.rsplit_once('/') {
            let directory = PathMetadata {
                kind: FileKind::Directory,
                mode: 0o755,
                gid: 0,
            };
            let above = if above.is_empty() { "/" } else { above };
            self.0.entry(above.to_owned()).or_insert((directory, Vec::new()));
            if above == "/" {
                break;
            }
            parent = above;
        }
        self.0
            .insert(path.to_owned(), (PathMetadata { kind, mode, gid }, bytes.to_vec()));
        self
    }

    pub fn file(&mut self, path: &str, bytes: impl AsRef<[u8]>) -> &mut MachineFiles {
        self.put(path, FileKind::File, 0o644, 0, bytes.as_ref())
    }

    pub fn link(&mut self, path: &str, target: &str) -> &mut MachineFiles {
        self.put(path, FileKind::Link(target.to_owned()), 0o777, 0, b"")
    }

    pub fn node(&mut self, path: &str) -> &mut MachineFiles {
        self.put(path, FileKind::Special, 0o666, 0, b"")
    }

    pub fn node_of_group(&mut self, path: &str, gid: u32) -> &mut MachineFiles {
        self.put(path, FileKind::Special, 0o660, gid, b"")
    }

    pub fn remove(&mut self, path: &str) -> &mut MachineFiles {
        self.0.remove(path);
        self
    }
}

impl Tree for MachineFiles {
    fn names(&self, directory: &str) -> Vec<String> {
        let prefix = if directory == "/" {
            "/".to_owned()
        } else {
            format!("{directory}/")
        };
        let below = self.0.keys().filter_map(|path| path.strip_prefix(&prefix));
        below
            .filter(|name| !name.is_empty() && !name.contains('/'))
            .map(str::to_owned)
            .collect()
    }

    fn stat(&self, path: &str) -> Option<PathMetadata> {
        let path = if path.is_empty() { "/" } else { path };
        self.0.get(path).map(|(entry, _)| entry.clone())
    }

    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        let (_, bytes) = self.0.get(path)?;
        Some(bytes[..bytes.len().min(limit)].to_vec())
    }
}

/// Return the first bytes of a 64-bit library for x86.
pub fn elf() -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(18, 0);
    bytes.extend([0x3e, 0]);
    bytes
}

/// Return the first bytes of a 32-bit library.
pub fn elf32() -> Vec<u8> {
    let mut bytes = elf();
    bytes[4] = 1;
    bytes[18] = 3;
    bytes
}

/// Return a loader cache in the new format, in which each library is a 64-bit one for x86.
pub fn ld_so_cache(libraries: &[(&str, &str)]) -> Vec<u8> {
    let libraries: Vec<_> = libraries.iter().map(|(name, path)| (*name, *path, 0x0303)).collect();
    ld_so_cache_with_flags(&libraries)
}

pub fn ld_so_cache_with_flags(libraries: &[(&str, &str, u32)]) -> Vec<u8> {
    let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
    let count = u32::try_from(libraries.len()).expect("few");
    bytes.extend(count.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend([2, 0, 0, 0]);
    bytes.extend([0; 16]);
    let mut texts = Vec::new();
    let from = bytes.len() + libraries.len() * 24;
    for (name, path, flags) in libraries {
        bytes.extend(flags.to_le_bytes());
        for text in [name, path] {
            let at = u32::try_from(from + texts.len()).expect("small");
            bytes.extend(at.to_le_bytes());
            texts.extend(text.as_bytes());
            texts.push(0);
        }
        bytes.extend([0; 12]);
    }
    bytes.extend(texts);
    bytes
}

/// Return a loader cache in the old format, followed by `behind` at the offset where a cache in the new format may begin.
pub fn old_cache(libraries: &[(&str, &str)], behind: &[u8]) -> Vec<u8> {
    let mut bytes = b"ld.so-1.7.0\0".to_vec();
    bytes.extend(u32::try_from(libraries.len()).expect("few").to_le_bytes());
    let mut texts = Vec::new();
    for (name, path) in libraries {
        bytes.extend(0x0303_u32.to_le_bytes());
        for text in [name, path] {
            bytes.extend(u32::try_from(texts.len()).expect("small").to_le_bytes());
            texts.extend(text.as_bytes());
            texts.push(0);
        }
    }
    if behind.is_empty() {
        bytes.extend(texts);
    } else {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend(behind);
    }
    bytes
}

impl MachineFiles {
    /// Add two libraries of the driver with the links that `ldconfig` creates, and more libraries without links.
    pub fn driver(&mut self, root: &str, directory: &str, version: &str) -> &mut MachineFiles {
        for name in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
            self.file(&format!("{root}{directory}/{name}.so.{version}"), elf());
            self.link(&format!("{root}{directory}/{name}.so.1"), &format!("{name}.so.{version}"));
        }
        self.link(&format!("{root}{directory}/libcuda.so"), "libcuda.so.1");
        self.file(&format!("{root}{directory}/libnvidia-glcore.so.{version}"), elf());
        self.file(&format!("{root}{directory}/libc.so.6"), elf())
    }

    /// Add the `/proc` files of a driver with GPUs at these PCI addresses. The first GPU has the highest minor number.
    pub fn gpus(&mut self, version: &str, addresses: &[&str]) -> &mut MachineFiles {
        self.file("/sys/module/nvidia/version", format!("{version}\n"));
        let count = addresses.len();
        for (i, address) in addresses.iter().enumerate() {
            let minor = count - 1 - i;
            self.file(
                &format!("/proc/driver/nvidia/gpus/{address}/information"),
                format!(
                    "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 408\nGPU UUID: \t GPU-{i:08x}-11c1-52b8-0517-92f30e7fac88\nVideo BIOS: \t 92.00\n\
                     Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
                ),
            );
        }
        self
    }

    /// Add the device nodes of a driver with this number of GPUs.
    pub fn nvidia_nodes(&mut self, root: &str, gpus: usize) -> &mut MachineFiles {
        for name in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"] {
            self.node(&format!("{root}/dev/{name}"));
        }
        for minor in 0..gpus {
            self.node(&format!("{root}/dev/nvidia{minor}"));
        }
        self
    }

    /// Add a PCI device with its DRM device nodes.
    pub fn drm(&mut self, address: &str, card: u32, render: u32) -> &mut MachineFiles {
        let device = format!("/sys/devices/pci0000:00/{address}");
        for name in [format!("card{card}"), format!("renderD{render}")] {
            self.file(&format!("{device}/drm/{name}/dev"), "226:0\n");
            self.node_of_group(&format!("/dev/dri/{name}"), if name.starts_with('c') { 44 } else { 104 });
            self.link(&format!("{device}/drm/{name}/device"), "../..");
            self.link(
                &format!("/sys/class/drm/{name}"),
                &format!("../../devices/pci0000:00/{address}/drm/{name}"),
            );
        }
        self.link(
            &format!("/sys/bus/pci/devices/{address}"),
            &format!("../../../devices/pci0000:00/{address}"),
        )
    }
}

/// One machine of each kind.
pub mod kinds {
    use super::{MachineFiles, elf, elf32, ld_so_cache};

    /// Return a Debian host with driver 550, two GPUs, and all files that the driver's installer adds.
    pub fn debian() -> MachineFiles {
        let mut machine = MachineFiles::default();
        let lib = "/usr/lib/x86_64-linux-gnu";
        let version = "550.54.15";
        machine.link("/lib", "usr/lib").driver("", lib, version);
        for (name, link) in [("libEGL_nvidia", "0"), ("libnvidia-allocator", "1")] {
            machine.file(&format!("{lib}/{name}.so.{version}"), elf());
            machine.link(&format!("{lib}/{name}.so.{link}"), &format!("{name}.so.{version}"));
        }
        machine
            .file(&format!("{lib}/libnvidia-egl-gbm.so.1.1.1"), elf())
            .link(&format!("{lib}/libnvidia-egl-gbm.so.1"), "libnvidia-egl-gbm.so.1.1.1")
            .link(&format!("{lib}/gbm/nvidia-drm_gbm.so"), "../libnvidia-allocator.so.1")
            .file(&format!("{lib}/vdpau/libvdpau_nvidia.so.{version}"), elf())
            .link(
                &format!("{lib}/vdpau/libvdpau_nvidia.so.1"),
                &format!("libvdpau_nvidia.so.{version}"),
            )
            .file(&format!("{lib}/nvidia/xorg/nvidia_drv.so"), elf())
            .file(&format!("{lib}/nvidia/xorg/libglxserver_nvidia.so.{version}"), elf())
            .file("/usr/lib/i386-linux-gnu/libcuda.so.550.54.15", elf32())
            .file(
                "/etc/ld.so.cache",
                ld_so_cache(&[
                    ("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1"),
                    ("libc.so.6", "/lib/x86_64-linux-gnu/libc.so.6"),
                ]),
            )
            .file("/usr/lib/nvidia/current/nvidia-smi", elf())
            .link("/etc/alternatives/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
            .link("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia-smi")
            .file("/usr/bin/nvidia-cuda-mps-control", elf())
            .file("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
            .file("/etc/vulkan/icd.d/nvidia_icd.json", "{}")
            .file("/usr/share/nvidia/nvoptix.bin", "")
            .file("/usr/lib/firmware/nvidia/550.54.15/gsp_ga10x.bin", "")
            .file("/usr/lib/firmware/nvidia/550.54.15/gsp_tu10x.bin", "")
            .file("/usr/lib/firmware/nvidia/535.1.1/gsp_tu10x.bin", "")
            .node("/run/nvidia-persistenced/socket")
            .gpus(version, &["0000:06:00.0", "0000:81:00.0"])
            .nvidia_nodes("", 2)
            .drm("0000:06:00.0", 1, 128)
            .drm("0000:81:00.0", 2, 129);
        machine
    }

    /// Return a Debian host with the packages of a branch that is not the current one: the libraries are in a directory of that branch, and all links lead there through
    /// Debian's alternatives (`nvidia-tesla-470-alternative`).
    pub fn debian_alternatives() -> MachineFiles {
        let mut machine = MachineFiles::default();
        let (lib, version) = ("/usr/lib/x86_64-linux-gnu", "470.256.02");
        let own = format!("{lib}/nvidia/tesla-470");
        machine.link("/lib", "usr/lib").driver("", &own, version);
        for name in [
            "libcuda.so",
            "libcuda.so.1",
            "libnvidia-ml.so.1",
            "libnvidia-ptxjitcompiler.so.1",
        ] {
            let alternative = format!("/etc/alternatives/nvidia--{name}-x86_64-linux-gnu");
            machine.link(&format!("{lib}/{name}"), &alternative);
            machine.link(&alternative, &format!("{own}/{name}"));
        }
        machine
            .file(
                "/etc/ld.so.cache",
                ld_so_cache(&[
                    ("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1"),
                    ("libnvidia-ml.so.1", "/lib/x86_64-linux-gnu/libnvidia-ml.so.1"),
                ]),
            )
            .gpus(version, &["0000:06:00.0"])
            .nvidia_nodes("", 1);
        machine
    }

    /// Return a driver container as the GPU operator mounts it. Links and the cache in its root are valid only relative to that root.
    pub fn operator() -> MachineFiles {
        let mut machine = MachineFiles::default();
        let root = "/run/nvidia/driver";
        machine
            .driver(root, "/usr/lib/x86_64-linux-gnu", "535.129.03")
            .link(&format!("{root}/lib"), "/usr/lib")
            .file(&format!("{root}/usr/bin/nvidia-smi"), elf())
            .file("/usr/bin/nvidia-debugdump", "of the host, and not this driver's")
            .node(&format!("{root}/run/nvidia-persistenced/socket"))
            .gpus("535.129.03", &["0000:06:00.0"])
            .nvidia_nodes(root, 1);
        machine
    }

    /// Return a host with Red Hat's directories.
    pub fn red_hat() -> MachineFiles {
        let mut machine = MachineFiles::default();
        machine
            .driver("", "/usr/lib64", "560.35.03")
            .link("/lib64", "usr/lib64")
            .link("/lib", "usr/lib")
            // A 32-bit library with the same name.
            .file("/usr/lib/libcuda.so.560.35.03", elf32())
            .gpus("560.35.03", &["0000:06:00.0"])
            .nvidia_nodes("", 1);
        machine
    }

    /// Return a machine with two GPUs, of which the second one has two MIG devices.
    pub fn mig() -> MachineFiles {
        let mut machine = MachineFiles::default();
        machine
            .driver("", "/usr/lib64", "550.54.15")
            .gpus("550.54.15", &["0000:06:00.0", "0000:81:00.0"])
            .nvidia_nodes("", 2);
        machine.file(
            "/proc/driver/nvidia-caps/mig-minors",
            "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi2/access 21\ngpu0/gi2/ci0/access 22\ngpu0/gi3/access 30\n",
        );
        for instance in ["gi1", "gi2"] {
            let directory = format!("/proc/driver/nvidia/capabilities/gpu0/mig/{instance}");
            machine.file(&format!("{directory}/access"), "DeviceFileMinor: 12\n");
            machine.file(&format!("{directory}/ci0/access"), "DeviceFileMinor: 13\n");
        }
        for minor in [1, 2, 12, 13, 21, 22] {
            machine.node(&format!("/dev/nvidia-caps/nvidia-cap{minor}"));
        }
        machine
    }

    /// Return a machine with WSL 2 and a GPU.
    pub fn wsl() -> MachineFiles {
        let mut machine = MachineFiles::default();
        let store = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0b6f8f2c";
        for name in [
            "libcuda.so.1.1",
            "libcuda_loader.so",
            "libnvidia-ml.so.1",
            "nvcubins.bin",
            "nvidia-smi",
            "readme.txt",
        ] {
            machine.file(&format!("{store}/{name}"), elf());
        }
        machine.file("/usr/lib/wsl/drivers/iigd_dch.inf_amd64_1/libigc.so", elf());
        for name in [
            "libcuda.so",
            "libcuda.so.1",
            "libnvidia-ml.so.1",
            "libdxcore.so",
            "libd3d12.so",
            "nvidia-smi",
        ] {
            machine.file(&format!("/usr/lib/wsl/lib/{name}"), elf());
        }
        machine.node("/dev/dxg");
        machine
    }

    /// Return a machine with two MI300X, of which the second one has two partitions.
    pub fn mi300() -> MachineFiles {
        let mut machine = MachineFiles::default();
        machine
            .node_of_group("/dev/kfd", 104)
            .file("/sys/module/amdgpu/version", "6.8.5\n");
        let node = |machine: &mut MachineFiles, node: u32, properties: &str| {
            machine.file(&format!("/sys/class/kfd/kfd/topology/nodes/{node}/properties"), properties);
        };
        node(&mut machine, 0, "cpu_cores_count 96\nsimd_count 0\ndrm_render_minor 0\n");
        for (number, render, id) in [(1, 128, 17_269_044_532_110_123_456_u64), (2, 136, 42), (10, 137, 42)] {
            node(
                &mut machine,
                number,
                &format!("cpu_cores_count 0\nsimd_count 1216\ndrm_render_minor {render}\nunique_id {id}\nvendor_id 4098\n"),
            );
        }
        machine.drm("0000:0c:00.0", 1, 128).drm("0000:22:00.0", 9, 136);
        // The parent of a partition is a platform device, not a PCI device.
        let partition = "/sys/devices/platform/amdgpu_xcp_1";
        for name in ["card10", "renderD137"] {
            machine.file(&format!("{partition}/drm/{name}/dev"), "226:10\n");
            machine.link(&format!("{partition}/drm/{name}/device"), "../..");
            machine.link(
                &format!("/sys/class/drm/{name}"),
                &format!("../../devices/platform/amdgpu_xcp_1/drm/{name}"),
            );
            machine.node_of_group(&format!("/dev/dri/{name}"), 104);
        }
        machine
    }

    /// Return a machine with an integrated Intel GPU, an Intel Flex card, and a network card.
    pub fn intel() -> MachineFiles {
        let mut machine = MachineFiles::default();
        machine.drm("0000:00:02.0", 0, 128).drm("0000:4d:00.0", 1, 129);
        for (address, class, device) in [
            ("0000:00:02.0", "0x030000", "0x9a60"),
            ("0000:4d:00.0", "0x038000", "0x56c0"),
            ("0000:01:00.0", "0x020000", "0x1572"),
        ] {
            let directory = format!("/sys/devices/pci0000:00/{address}");
            machine
                .file(&format!("{directory}/vendor"), "0x8086\n")
                .file(&format!("{directory}/class"), format!("{class}\n"))
                .file(&format!("{directory}/device"), format!("{device}\n"))
                .link(
                    &format!("/sys/bus/pci/devices/{address}"),
                    &format!("../../../devices/pci0000:00/{address}"),
                );
        }
        machine
    }

    /// Return a machine without a GPU.
    pub fn none() -> MachineFiles {
        let mut machine = MachineFiles::default();
        machine
            .file("/etc/os-release", "ID=debian\n")
            .node("/dev/null")
            .file("/proc/version", "Linux\n");
        machine
    }
}

impl MachineFiles {
    /// Write the machine's files below a directory. Device nodes become regular files, as in a copy that an unprivileged user made. Sockets stay
    /// sockets.
    pub fn write_below(&self, root: &std::path::Path) -> std::io::Result<()> {
        for (path, (entry, bytes)) in &self.0 {
            let at = root.join(path.trim_start_matches('/'));
            match &entry.kind {
                FileKind::Directory => std::fs::create_dir_all(&at)?,
                FileKind::File => std::fs::write(&at, bytes)?,
                FileKind::Link(target) => std::os::unix::fs::symlink(target, &at)?,
                FileKind::Special if path.contains("/run/") => drop(std::os::unix::net::UnixListener::bind(&at)?),
                FileKind::Special => std::fs::write(&at, "")?,
            }
        }
        Ok(())
    }
}
