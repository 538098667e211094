//! `cargo xtask image`: an OCI image archive, built without a container engine.
//!
//! The image has one layer. It contains the static programs `divvy` and `divvy-agent`, and `divvy-probe` with what it needs to load a driver's
//! library: the dynamic loader, libc and its parts, and libgcc_s (a static program cannot load NVML). `divvy-smoke` loads CUDA's driver library with the same loader and libraries. The driver's own programs, which NVIDIA's
//! container runtime mounts into `/usr/bin`, need the same loader and libraries (`mps-control-daemon` runs two of them). The guard's
//! libraries are in the directory of the agent, which copies them to the node for `--guard`. For the node itself it contains the static programs `divvy-runtime` and `divvy-hook`. These two are in `/bin`, together with `divvy`, the probe, and `divvy-smoke`, and nothing else, because
//! `ctr install` copies the directory `/bin` onto a node.
//!
//! The same sources, toolchain, and libc produce the same bytes: source paths are remapped, files are sorted, and times are 0. The format is the
//! OCI image layout 1.0 in a tar file, plus the `manifest.json` that `docker load` needs. containerd, podman, skopeo, and crane read the
//! OCI layout; Docker reads both.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub(crate) const USAGE: &str = "usage: cargo xtask image [--name NAME] [--out FILE] [--fast]

Write a container image of Divvy's programs as an OCI archive. Nodes copy divvy-runtime, divvy-hook, divvy, divvy-probe, and divvy-smoke from its /bin.
The archive has a second image with the same files, k8s-device-plugin, which takes the place of nvcr.io/nvidia/k8s-device-plugin.

  --name NAME   full image name with tag [default: divvy.dev/divvy:VERSION]
  --out FILE    output file [default: target/divvy-VERSION-ARCH.tar]
  --fast        build all but divvy-runtime, divvy-hook, and divvy-smoke without optimization: for tests; builds faster, makes larger and slower programs

Examples:
  cargo xtask image
  ctr -n k8s.io images import target/divvy-0.1.0-amd64.tar
  docker load -i target/divvy-0.1.0-amd64.tar
  skopeo copy oci-archive:target/divvy-0.1.0-amd64.tar docker://registry.example/divvy:0.1.0

Needs musl's gcc wrapper (Debian: apt-get install musl-tools) and the Rust target (rustup target add x86_64-unknown-linux-musl).";

/// The limit on the size of a compressed image, in MiB.
const MOST_MIB: f64 = 20.0;

/// The limit on the size of `divvy-smoke`, in bytes: what NVIDIA's vector addition takes that is linked statically with CUDA's runtime library.
const MOST_SMOKE: u64 = 700 << 10;

/// Parts of glibc to which a driver's library may be linked, although they are empty since glibc 2.34.
pub(crate) const STUBS: [&str; 5] = ["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1"];

/// The paths of glibc's loader on x86-64 and on Arm, as glibc programs name it.
const LOADERS: [&str; 2] = ["lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"];

pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let (mut name, mut out, mut fast) = (None, None, false);
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let target = match *flag {
            "--name" => &mut name,
            "--out" => &mut out,
            "--fast" => {
                fast = true;
                continue;
            }
            "--help" | "-h" => {
                say(USAGE);
                return Ok(());
            }
            other => bail!("{other} is not a flag of image\n\n{USAGE}"),
        };
        *target = Some(*rest.next().with_context(|| format!("{flag} needs a value\n\n{USAGE}"))?);
    }
    let machine = Machine { fast, ..Machine::own()? };
    let version = env!("CARGO_PKG_VERSION");
    let default_name = format!("divvy.dev/divvy:{version}");
    let default_out = default_file()?;
    let (name, out) = (name.unwrap_or(&default_name), Path::new(out.unwrap_or(&default_out)));

    let programs = machine.build()?;
    let layer = layer(&files(&programs)?)?;
    let image = archive(&machine, name, &layer)?;
    if let Some(directory) = out.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
    }
    std::fs::write(out, &image).with_context(|| format!("{} could not be written", out.display()))?;
    let mib = |bytes: usize| bytes as f64 / 1048576.0;
    let compressed = mib(layer.compressed.len());
    say(&format!(
        "{name}\n{}\n{}: {compressed:.1} MiB compressed (at most {MOST_MIB}), {:.1} MiB unpacked, sha256:{}",
        plugin_name(name),
        out.display(),
        mib(layer.size),
        digest(&image)
    ));
    // Without optimization the programs are larger than what users get.
    ensure!(
        machine.fast || compressed <= MOST_MIB,
        "the image is larger than {MOST_MIB} MiB"
    );
    Ok(())
}

/// Build `divvy-runtime` and `divvy-hook` with the settings for an image.
pub(crate) fn runtime_programs() -> Result<()> {
    Machine::own()?.build_runtime()
}

/// Return what this machine lacks for building an image, with the remedy; `None` if nothing is missing.
pub(crate) fn missing() -> Option<String> {
    let Ok(machine) = Machine::own() else {
        return Some(format!("images are not built on {}", std::env::consts::ARCH));
    };
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        return Some("musl-gcc is not in the PATH (Debian: musl-tools); it is needed for a static divvy".to_owned());
    }
    let target = format!("{}-unknown-linux-musl", machine.rust);
    let libraries = Command::new("rustc")
        .args(["--target", &target, "--print", "target-libdir"])
        .output();
    let directory = libraries.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim().to_owned()));
    match directory {
        Ok(directory) if directory.is_dir() => None,
        _ => Some(format!(
            "Rust's libraries for {target} are missing (rustup target add {target})"
        )),
    }
}

/// Return the default path of the archive.
pub(crate) fn default_file() -> Result<String> {
    Ok(format!(
        "target/divvy-{}-{}.tar",
        env!("CARGO_PKG_VERSION"),
        Machine::own()?.oci
    ))
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn say(text: &str) {
    println!("{text}");
}

/// The architecture of this machine. An image for another architecture must be built on such a machine.
struct Machine {
    /// Rust's name of the architecture.
    rust: &'static str,
    /// OCI's name of the architecture.
    oci: &'static str,
    /// Whether to build without optimization.
    fast: bool,
}

impl Machine {
    fn own() -> Result<Machine> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Machine {
                rust: "x86_64",
                oci: "amd64",
                fast: false,
            }),
            "aarch64" => Ok(Machine {
                rust: "aarch64",
                oci: "arm64",
                fast: false,
            }),
            other => bail!("images can be built on x86_64 and aarch64 machines; this machine is {other}"),
        }
    }

    /// Build the programs. They have their own target directory, because their flags differ from those of other builds.
    fn build(&self) -> Result<Programs> {
        let (static_target, dynamic_target) = (self.static_target(), format!("{}-unknown-linux-gnu", self.rust));
        let flags = flags()?;
        // A static program reads its relocations at startup and keeps them in memory: half a MiB per agent, or a few KiB if they are packed.
        let packed = format!("{flags} -Clink-arg=-Wl,-z,pack-relative-relocs");
        let (profile, of_nodes) = if self.fast { ("fast", "fast") } else { ("release", "node") };
        let build = |profile: &str, packages: &str| {
            let packages = packages.split(' ').flat_map(|package| ["--package", package]);
            let what: Vec<&str> = ["--no-default-features", "--profile", profile]
                .into_iter()
                .chain(packages)
                .collect();
            self.cargo(&static_target, &packed, &what)
        };
        let directory = directory()?;
        let in_static = |path: &str| directory.join(&static_target).join(path);
        let built = in_static(&format!("{of_nodes}/divvy-agent"));
        let agent = if self.fast {
            // One command, so that the programs share their dependencies. divvy needs the agent's default features.
            build(profile, "divvy divvy-agent")?;
            built.clone()
        } else {
            build(profile, "divvy")?;
            build(of_nodes, "divvy-agent")?;
            let agent = in_static("agent");
            std::fs::copy(&built, &agent).with_context(|| format!("{} could not be copied", built.display()))?;
            self.cargo(&static_target, &packed, &["--profile", of_nodes, "--package", "divvy-agent"])?;
            agent
        };
        self.cargo(
            &dynamic_target,
            &flags,
            &["--profile", of_nodes, "--package", "divvy-hardware", "--bin", "divvy-probe"],
        )?;
        // Its size is checked, so a fast image has the same one.
        self.cargo(&dynamic_target, &flags, &["--profile", "node", "--package", "divvy-smoke"])?;
        // The libraries run in other programs, so a fast image has the same ones. Each is built alone, because other packages enable features of its
        // dependencies that need the standard library.
        for library in ["divvy-guard", "divvy-guard-nvml", "divvy-guard-audit"] {
            let what = ["--profile", "node", "--package", library, "--features", "shadow"];
            self.cargo(&dynamic_target, &flags, &what)?;
        }
        self.build_runtime()?;
        Ok(Programs {
            divvy: in_static(&format!("{profile}/divvy")),
            agent,
            nvidia: built,
            probe: directory.join(&dynamic_target).join(of_nodes).join("divvy-probe"),
            smoke: directory.join(&dynamic_target).join("node/divvy-smoke"),
            guard: directory.join(&dynamic_target).join("node/libdivvy_guard.so"),
            guard_nvml: directory.join(&dynamic_target).join("node/libdivvy_guard_nvml.so"),
            guard_audit: directory.join(dynamic_target).join("node/libdivvy_guard_audit.so"),
            runtime: in_static("node/divvy-runtime"),
            hook: in_static("node/divvy-hook"),
        })
    }

    fn build_runtime(&self) -> Result<()> {
        let packages = ["--package", "divvy-runtime", "--package", "divvy-hook", "--bins"];
        // Tests use these programs as users get them, so a fast image has the same ones.
        self.cargo(
            &self.static_target(),
            &flags()?,
            &[&["--profile", "node"], &packages[..]].concat(),
        )
    }

    fn cargo(&self, target: &str, flags: &str, what: &[&str]) -> Result<()> {
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--locked", "--target", target])
            .args(what)
            .env("CARGO_TARGET_DIR", directory()?)
            .env("RUSTFLAGS", flags)
            .env(format!("CC_{}", self.static_target().replace('-', "_")), "musl-gcc")
            .status()
            .context("cargo could not be run")?;
        ensure!(
            status.success(),
            "cargo build for {target} failed; check that the target (rustup target add {target}) and musl-gcc (apt-get install musl-tools) are installed"
        );
        Ok(())
    }

    fn static_target(&self) -> String {
        format!("{}-unknown-linux-musl", self.rust)
    }
}

/// Return the target directory of an image's programs.
fn directory() -> Result<PathBuf> {
    std::path::absolute("target/image").context("the current directory is unknown")
}

/// Return compiler flags that keep this machine's directories out of the programs.
fn flags() -> Result<String> {
    let root = std::env::current_dir().context("the current directory is unknown")?;
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    Ok(format!(
        "--remap-path-prefix={}=/divvy --remap-path-prefix={}=/cargo",
        root.display(),
        cargo_home.display()
    ))
}

/// The paths of the programs in an image.
struct Programs {
    divvy: PathBuf,
    agent: PathBuf,
    /// The agent with the programs under NVIDIA's names.
    nvidia: PathBuf,
    probe: PathBuf,
    /// What proves that a GPU computes.
    smoke: PathBuf,
    /// What containers get in the place of CUDA's driver library.
    guard: PathBuf,
    /// What containers get in the place of NVML.
    guard_nvml: PathBuf,
    /// What has the loaders of containers take these two.
    guard_audit: PathBuf,
    runtime: PathBuf,
    hook: PathBuf,
}

/// Return the image's files: for each path in the image, the path on this machine.
fn files(
    Programs {
        divvy,
        agent,
        nvidia,
        probe,
        smoke,
        guard,
        guard_nvml,
        guard_audit,
        runtime,
        hook,
    }: &Programs,
) -> Result<BTreeMap<String, PathBuf>> {
    for program in [divvy, agent, nvidia, runtime, hook] {
        ensure!(
            linked(program)?.is_empty(),
            "{} is not static: it would need a loader and libraries",
            program.display()
        );
    }
    let size = std::fs::metadata(smoke)
        .with_context(|| format!("{} cannot be read", smoke.display()))?
        .len();
    ensure!(
        size <= MOST_SMOKE,
        "divvy-smoke has {size} bytes, and at most {MOST_SMOKE} are allowed"
    );
    let mut files = BTreeMap::from([
        ("usr/bin/divvy".to_owned(), divvy.clone()),
        // Each has only what it runs, because an agent's memory use depends on the size of its program.
        ("usr/bin/divvy-agent".to_owned(), agent.clone()),
        // One file. Its name decides which of NVIDIA's programs it is.
        ("usr/bin/nvidia-device-plugin".to_owned(), nvidia.clone()),
        ("usr/bin/gpu-feature-discovery".to_owned(), nvidia.clone()),
        ("usr/bin/config-manager".to_owned(), nvidia.clone()),
        ("usr/bin/mps-control-daemon".to_owned(), nvidia.clone()),
        ("usr/bin/divvy-probe".to_owned(), probe.clone()),
        ("usr/bin/divvy-smoke".to_owned(), smoke.clone()),
        // Where the agent expects them: in the directory of its program.
        ("usr/bin/libdivvy-guard.so".to_owned(), guard.clone()),
        ("usr/bin/libdivvy-guard-nvml.so".to_owned(), guard_nvml.clone()),
        ("usr/bin/libdivvy-guard-audit.so".to_owned(), guard_audit.clone()),
        ("bin/divvy-runtime".to_owned(), runtime.clone()),
        ("bin/divvy-hook".to_owned(), hook.clone()),
        // For `divvy configure` and `divvy doctor` on the node; the same file as above.
        ("bin/divvy".to_owned(), divvy.clone()),
        // For divvy-runtime, which queries the GPUs with it; the same file as above.
        ("bin/divvy-probe".to_owned(), probe.clone()),
        // For the node's administrator; it asks the probe in the same directory.
        ("bin/divvy-smoke".to_owned(), smoke.clone()),
    ]);
    let mut libraries = linked(probe)?;
    libraries.extend(linked(smoke)?);
    let libc = libraries
        .iter()
        .find(|path| path.file_name().is_some_and(|name| name == "libc.so.6"))
        .context("divvy-probe is not linked to glibc")?;
    let beside_libc = STUBS
        .iter()
        .map(|name| libc.with_file_name(name))
        .filter(|path| path.exists());
    for path in beside_libc.chain(libraries.iter().cloned()) {
        // The loader's default directories. On some distributions they are links to directories in /usr; in the image they are real directories.
        let at = path
            .to_string_lossy()
            .trim_start_matches("/usr")
            .trim_start_matches('/')
            .to_owned();
        files.insert(at, path);
    }
    ensure!(
        LOADERS.iter().any(|loader| files.contains_key(*loader)),
        "the image has no loader at {}: NVIDIA's container runtime mounts nvidia-smi and nvidia-cuda-mps-control, which need it there",
        LOADERS.join(" or ")
    );
    Ok(files)
}

/// Return the libraries and the loader that a program is linked to, as the loader resolves them.
pub(crate) fn linked(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd could not be run")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.contains("statically linked") || String::from_utf8_lossy(&output.stderr).contains("not a dynamic executable") {
        return Ok(BTreeSet::new());
    }
    ensure!(output.status.success(), "ldd {} failed: {text}", program.display());
    // `libc.so.6 => /lib/…/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`, `linux-vdso.so.1 (0x…)`
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let path = line.split("=>").last().unwrap_or(line).split('(').next().unwrap_or("").trim();
        ensure!(path != "not found", "ldd {}: {line}", program.display());
        if path.starts_with('/') {
            found.insert(PathBuf::from(path));
        }
    }
    Ok(found)
}

struct Layer {
    compressed: Vec<u8>,
    /// The size of the uncompressed tar file in bytes.
    size: usize,
    /// SHA-256 of the uncompressed tar file.
    diff_id: String,
}

fn layer(files: &BTreeMap<String, PathBuf>) -> Result<Layer> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut directories = BTreeSet::new();
    for at in files.keys() {
        directories.extend(
            Path::new(at)
                .ancestors()
                .skip(1)
                .filter(|directory| !directory.as_os_str().is_empty()),
        );
    }
    for directory in directories {
        let mut header = header(0, 0o755);
        header.set_entry_type(tar::EntryType::Directory);
        tar.append_data(&mut header, directory, std::io::empty())?;
    }
    let mut packed: BTreeMap<&Path, &str> = BTreeMap::new();
    for (at, path) in files {
        if let Some(first) = packed.insert(path.as_path(), at) {
            let mut link = header(0, 0o755);
            link.set_entry_type(tar::EntryType::Link);
            tar.append_link(&mut link, at, first)?;
            continue;
        }
        let bytes = std::fs::read(path).with_context(|| format!("{} could not be read", path.display()))?;
        tar.append_data(&mut header(bytes.len() as u64, 0o755), at, bytes.as_slice())?;
    }
    let plain = tar.into_inner()?;
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    std::io::Write::write_all(&mut gzip, &plain)?;
    Ok(Layer {
        compressed: gzip.finish()?,
        size: plain.len(),
        diff_id: digest(&plain),
    })
}

fn header(size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// The last part of the name of the image that replaces NVIDIA's `nvcr.io/nvidia/k8s-device-plugin`.
const PLUGIN_IMAGE: &str = "k8s-device-plugin";

impl Image<'_> {
    fn config(&self, machine: &Machine, layer: &Layer) -> Value {
        json!({
            "created": "1970-01-01T00:00:00Z", "architecture": machine.oci, "os": "linux",
            "config": {
                "Entrypoint": [self.entrypoint], "Env": self.env,
                "Labels": {
                    "org.opencontainers.image.title": self.title, "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
                    "org.opencontainers.image.licenses": "Apache-2.0",
                },
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", layer.diff_id)]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "cargo xtask image"}],
        })
    }
}

/// An image: its name, and what a container of it runs.
struct Image<'n> {
    name: &'n str,
    title: &'static str,
    entrypoint: &'static str,
    env: Vec<&'static str>,
}

/// Return the name of the image that replaces NVIDIA's: the name of Divvy's image, with another last part.
fn plugin_name(name: &str) -> String {
    let (repository, tag) = name.rsplit_once(':').unwrap_or((name, "latest"));
    match repository.rsplit_once('/') {
        Some((registry, _)) => format!("{registry}/{PLUGIN_IMAGE}:{tag}"),
        None => format!("{PLUGIN_IMAGE}:{tag}"),
    }
}

/// Pack two images with the same layer into one archive.
fn archive(machine: &Machine, name: &str, layer: &Layer) -> Result<Vec<u8>> {
    let plugin = plugin_name(name);
    let images = [
        Image {
            name,
            title: "divvy",
            entrypoint: "/usr/bin/divvy",
            env: vec!["PATH=/usr/bin"],
        },
        Image {
            name: &plugin,
            title: PLUGIN_IMAGE,
            entrypoint: "/usr/bin/nvidia-device-plugin",
            // With NVIDIA's container runtime, these put the driver's library into the container, as NVIDIA's own image does.
            env: vec![
                "PATH=/usr/bin",
                "NVIDIA_VISIBLE_DEVICES=all",
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ],
        },
    ];
    let mut blobs: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut blob = |media_type: &str, bytes: Vec<u8>| -> Value {
        let digest = digest(&bytes);
        let descriptor = json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()});
        blobs.insert(format!("blobs/sha256/{digest}"), bytes);
        descriptor
    };
    let packed = blob("application/vnd.oci.image.layer.v1.tar+gzip", layer.compressed.clone());
    let path = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        format!("blobs/{}", digest.replace(':', "/"))
    };
    let (mut docker, mut manifests) = (Vec::new(), Vec::new());
    for image in images {
        let config = image.config(machine, layer);
        let config = blob("application/vnd.oci.image.config.v1+json", serde_json::to_vec(&config)?);
        docker.push(json!({"Config": path(&config), "RepoTags": [image.name], "Layers": [path(&packed)]}));
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": [packed],
        });
        let mut manifest = blob("application/vnd.oci.image.manifest.v1+json", serde_json::to_vec(&manifest)?);
        manifest["platform"] = json!({"architecture": machine.oci, "os": "linux"});
        manifest["annotations"] = json!({
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rsplit_once(':').map_or("latest", |(_, tag)| tag),
        });
        manifests.push(manifest);
    }
    let index = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests});
    blobs.insert("index.json".to_owned(), serde_json::to_vec(&index)?);
    blobs.insert("manifest.json".to_owned(), serde_json::to_vec(&docker)?);
    blobs.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    let mut tar = tar::Builder::new(Vec::new());
    for (at, bytes) in &blobs {
        tar.append_data(&mut header(bytes.len() as u64, 0o644), at, bytes.as_slice())?;
    }
    Ok(tar.into_inner()?)
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_image_in_place_of_nvidias_is_beside_divvys() {
        for (name, expected) in [
            ("divvy.dev/divvy:0.1.0", "divvy.dev/k8s-device-plugin:0.1.0"),
            (
                "registry.example:5000/team/divvy:dev",
                "registry.example:5000/team/k8s-device-plugin:dev",
            ),
            ("divvy:1", "k8s-device-plugin:1"),
            ("divvy", "k8s-device-plugin:latest"),
        ] {
            assert_eq!(plugin_name(name), expected);
        }
    }

    #[test]
    fn a_program_that_has_two_names_is_in_the_layer_once() {
        let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let other = own.with_file_name("src/main.rs");
        let files = [
            ("usr/bin/divvy-probe", &own),
            ("bin/divvy-probe", &own),
            ("usr/bin/divvy", &other),
        ];
        let files = files.map(|(at, path)| (at.to_owned(), path.clone())).into();
        let layer = layer(&files).expect("packed");
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(layer.compressed.as_slice())
            .read_to_end(&mut plain)
            .expect("unpacked");
        let mut archive = tar::Archive::new(plain.as_slice());
        let found: Vec<(String, tar::EntryType, Option<String>)> = archive
            .entries()
            .expect("a tar")
            .map(|entry| {
                let entry = entry.expect("an entry");
                let link = entry.link_name().expect("a name").map(|name| name.display().to_string());
                (
                    entry.path().expect("a path").display().to_string(),
                    entry.header().entry_type(),
                    link,
                )
            })
            .filter(|(_, kind, _)| *kind != tar::EntryType::Directory)
            .collect();
        // The file comes before the link to it, and the file is in the directory that nodes copy.
        assert_eq!(
            found,
            [
                ("bin/divvy-probe".to_owned(), tar::EntryType::Regular, None),
                ("usr/bin/divvy".to_owned(), tar::EntryType::Regular, None),
                (
                    "usr/bin/divvy-probe".to_owned(),
                    tar::EntryType::Link,
                    Some("bin/divvy-probe".to_owned())
                ),
            ]
        );
    }
}
