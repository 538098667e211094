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

use crate::cargo::{build_workspace, run_cargo};
use crate::machine::{self, TargetMachine, needed};
use crate::ptx::output;
use crate::target_directory::debug_directory;

pub(crate) const USAGE: &str = "usage: cargo xtask image [--name NAME] [--out FILE] [--arch ARCH] [--fast]

Write a container image of Divvy's programs for amd64 and arm64 as an OCI archive. Nodes copy divvy-runtime, divvy-hook, divvy, divvy-probe, and divvy-smoke
from its /bin. The archive has a second image with the same files, k8s-device-plugin, which takes the place of nvcr.io/nvidia/k8s-device-plugin.

  --name NAME   full image name with tag [default: divvy.dev/divvy:VERSION]
  --out FILE    output file [default: target/divvy-VERSION.tar, and with one architecture target/divvy-VERSION-ARCH.tar]
  --arch ARCH   only for amd64 or arm64
  --fast        for tests: only for this machine, and with the debug builds of divvy, divvy-agent, and divvy-probe, which are larger and slower, and
                linked to glibc

Examples:
  cargo xtask image
  ctr -n k8s.io images import target/divvy-0.1.0.tar
  docker load -i target/divvy-0.1.0.tar
  skopeo copy --all oci-archive:target/divvy-0.1.0.tar:divvy.dev/divvy:0.1.0 docker://registry.example/divvy:0.1.0

Needs for this machine's architecture musl's gcc wrapper (Debian: musl-tools) and Rust's library for musl, and for the other one a compiler (Debian:
gcc-aarch64-linux-gnu and libc6-dev-arm64-cross) and Rust's libraries for glibc and musl. If one is missing, the command says what to type.";

/// The limit on the size of a compressed image, in MiB.
const MOST_MIB: f64 = 20.0;

/// The limit on the size of `divvy-smoke`, in bytes: what NVIDIA's vector addition takes that is linked statically with CUDA's runtime library.
const MOST_SMOKE: u64 = 700 << 10;

pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let (mut name, mut out, mut arch, mut is_fast) = (None, None, None, false);
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let target = match *flag {
            "--name" => &mut name,
            "--out" => &mut out,
            "--arch" => &mut arch,
            "--fast" => {
                is_fast = true;
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
    let machines: Vec<&TargetMachine> = match arch {
        Some(arch) => machine::ALL.iter().filter(|machine| machine.oci == arch).collect(),
        None if is_fast => vec![TargetMachine::own()?],
        None => machine::ALL.iter().collect(),
    };
    ensure!(!machines.is_empty(), "--arch takes amd64 or arm64\n\n{USAGE}");
    // Before the first build, which takes minutes.
    for machine in &machines {
        if let Some(lacks) = lacks(machine) {
            bail!("{lacks}");
        }
    }
    let default_name = format!("divvy.dev/divvy:{}", env!("CARGO_PKG_VERSION"));
    let default_out = file(&machines);
    let (name, out) = (name.unwrap_or(&default_name), Path::new(out.unwrap_or(&default_out)));

    let compression = if is_fast { Compression::fast() } else { Compression::best() };
    let mut layers = Vec::new();
    for machine in machines {
        let programs = if is_fast {
            take_debug_builds(machine)?
        } else {
            build(machine)?
        };
        layers.push((machine, layer(&files(machine, &programs, is_fast)?, compression)?));
    }
    let image = archive(&layers, name)?;
    if let Some(directory) = out.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
    }
    std::fs::write(out, &image).with_context(|| format!("{} could not be written", out.display()))?;
    say(&format!(
        "{name}\n{}\n{}: sha256:{}",
        plugin_name(name),
        out.display(),
        digest(&image)
    ));
    for (machine, layer) in &layers {
        let mib = |bytes: usize| bytes as f64 / 1048576.0;
        let compressed = mib(layer.compressed.len());
        let limit = if is_fast {
            String::new()
        } else {
            format!(" (at most {MOST_MIB})")
        };
        say(&format!(
            "{}: {compressed:.1} MiB compressed{limit}, {:.1} MiB unpacked",
            machine.oci,
            mib(layer.size)
        ));
        // Without optimization the programs are larger than what users get.
        ensure!(
            is_fast || compressed <= MOST_MIB,
            "the image for {} is larger than {MOST_MIB} MiB",
            machine.oci
        );
    }
    Ok(())
}

/// Build `divvy-runtime` and `divvy-hook` for this machine with the settings for an image.
pub(crate) fn runtime_programs() -> Result<()> {
    build_runtime(TargetMachine::own()?)
}

/// Return what this machine lacks for building an image, with the remedy; `None` if nothing is missing.
pub(crate) fn missing() -> Option<String> {
    match TargetMachine::own() {
        Ok(machine) => lacks(machine),
        Err(error) => Some(error.to_string()),
    }
}

fn lacks(machine: &TargetMachine) -> Option<String> {
    let commands = machine.missing(&[])?;
    Some(format!(
        "programs for {} cannot be built here; on Debian, type: {commands}",
        machine.oci
    ))
}

/// Return the default path of an archive for one kind of machine, or for all.
fn file(machines: &[&TargetMachine]) -> String {
    let of_one = match machines {
        [machine] => format!("-{}", machine.oci),
        _ => String::new(),
    };
    format!("target/divvy-{}{of_one}.tar", env!("CARGO_PKG_VERSION"))
}

/// Return the default path of the archive for this machine alone.
pub(crate) fn default_file() -> Result<String> {
    Ok(file(&[TargetMachine::own()?]))
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn say(text: &str) {
    println!("{text}");
}

/// Build the programs. They have their own target directory, because their flags differ from those of other builds.
fn build(machine: &TargetMachine) -> Result<ImagePrograms> {
    let (static_target, dynamic_target) = (machine.target("musl"), machine.target("gnu"));
    let flags = flags()?;
    // A static program reads its relocations at startup and keeps them in memory: half a MiB per agent, or a few KiB if they are packed.
    let packed = format!("{flags} -Clink-arg=-Wl,-z,pack-relative-relocs");
    let directory = directory()?;
    let in_static = |path: &str| directory.join(&static_target).join(path);
    cargo(
        machine,
        &static_target,
        &packed,
        &["--no-default-features", "--profile", "release", "--package", "divvy"],
    )?;
    cargo(
        machine,
        &static_target,
        &without_unwinding(&packed)?,
        &["--profile", "node", "--package", "divvy-agent"],
    )?;
    let probe = ["--profile", "node", "--package", "divvy-hardware", "--bin", "divvy-probe"];
    cargo(machine, &dynamic_target, &flags, &probe)?;
    Ok(ImagePrograms {
        divvy: in_static("release/divvy"),
        agent: in_static("node/divvy-agent"),
        probe: directory.join(&dynamic_target).join("node/divvy-probe"),
        in_containers: in_containers(machine)?,
    })
}

/// Build what runs in containers, and what each container waits for. An image for tests has the same ones, because their size and their speed are tested.
fn in_containers(machine: &TargetMachine) -> Result<InContainers> {
    let dynamic_target = machine.target("gnu");
    let smoke = ["--profile", "node", "--package", "divvy-smoke"];
    cargo(machine, &dynamic_target, &without_unwinding(&flags()?)?, &smoke)?;
    let guard = guard(machine)?;
    build_runtime(machine)?;
    let of_nodes = |name: &str| Ok::<_, anyhow::Error>(directory()?.join(machine.target("musl")).join("node").join(name));
    Ok(InContainers {
        smoke: directory()?.join(dynamic_target).join("node/divvy-smoke"),
        guard,
        runtime: of_nodes("divvy-runtime")?,
        hook: of_nodes("divvy-hook")?,
    })
}

/// The guard's libraries: the packages, and the names under which the agent knows them.
const GUARD: [(&str, &str); 3] = [
    ("divvy-guard", "libdivvy-guard.so"),
    ("divvy-guard-nvml", "libdivvy-guard-nvml.so"),
    ("divvy-guard-audit", "libdivvy-guard-audit.so"),
];

/// Build the guard's libraries for a kind of machine. Return their names, and where they are.
pub(crate) fn guard(machine: &TargetMachine) -> Result<BTreeMap<&'static str, PathBuf>> {
    let target = machine.target("gnu");
    let mut libraries = BTreeMap::new();
    for (package, name) in GUARD {
        // Each is built alone, because other packages enable features of its dependencies that need the standard library.
        let what = ["--profile", "node", "--package", package, "--features", "shadow"];
        cargo(machine, &target, &flags()?, &what)?;
        let file = format!("lib{}.so", package.replace('-', "_"));
        libraries.insert(name, directory()?.join(&target).join("node").join(file));
    }
    Ok(libraries)
}

/// Take the debug builds of this machine, without their tables of lines. They are linked to glibc, whose parts are in the image for the probe.
fn take_debug_builds(machine: &TargetMachine) -> Result<ImagePrograms> {
    build_workspace()?;
    let directory = directory()?.join("debug");
    std::fs::create_dir_all(&directory).with_context(|| format!("{} could not be made", directory.display()))?;
    let stripped = |name: &str| {
        let to = directory.join(name);
        output(Command::new("strip").arg("-o").arg(&to).arg(debug_directory().join(name)))?;
        Ok::<_, anyhow::Error>(to)
    };
    Ok(ImagePrograms {
        divvy: stripped("divvy")?,
        agent: stripped("divvy-agent")?,
        probe: stripped("divvy-probe")?,
        in_containers: in_containers(machine)?,
    })
}

fn build_runtime(machine: &TargetMachine) -> Result<()> {
    let packages = ["--package", "divvy-runtime", "--package", "divvy-hook", "--bins"];
    // Tests use these programs as users get them, so a fast image has the same ones.
    cargo(
        machine,
        &machine.target("musl"),
        &without_unwinding(&flags()?)?,
        &[&["--profile", "node"], &packages[..]].concat(),
    )
}

fn cargo(machine: &TargetMachine, target: &str, flags: &str, what: &[&str]) -> Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    machine
        .configure(&mut cargo)
        .args(["build", "--locked", "--target", target])
        .args(what);
    run_cargo(cargo.env("CARGO_TARGET_DIR", directory()?).env("RUSTFLAGS", flags))
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

/// Add to the flags of a program of the profile `node` that it has no tables for unwinding.
fn without_unwinding(flags: &str) -> Result<String> {
    let script = std::path::absolute("xtask/src/image/no-unwinding.ld").context("the current directory is unknown")?;
    Ok(format!("{flags} -Clink-arg=-Wl,-T,{}", script.display()))
}

/// The paths of the programs in an image.
struct ImagePrograms {
    divvy: PathBuf,
    agent: PathBuf,
    probe: PathBuf,
    in_containers: InContainers,
}

/// The paths of what runs in containers, or while they start.
struct InContainers {
    /// What proves that a GPU computes.
    smoke: PathBuf,
    /// What containers get in the place of the driver's libraries, by name.
    guard: BTreeMap<&'static str, PathBuf>,
    runtime: PathBuf,
    hook: PathBuf,
}

/// Return the image's files: for each path in the image, the path on this machine.
fn files(machine: &TargetMachine, programs: &ImagePrograms, is_fast: bool) -> Result<BTreeMap<String, PathBuf>> {
    let ImagePrograms {
        divvy,
        agent,
        probe,
        in_containers: InContainers {
            smoke,
            guard,
            runtime,
            hook,
        },
    } = programs;
    let of_the_image = [divvy.as_path(), agent];
    let statics = [runtime.as_path(), hook];
    let (linked, statics) = if is_fast {
        ([&of_the_image[..], &[probe, smoke]].concat(), statics.to_vec())
    } else {
        (vec![probe.as_path(), smoke], [&of_the_image[..], &statics].concat())
    };
    for program in statics {
        ensure!(
            needed(program)?.is_empty(),
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
        ("usr/bin/nvidia-device-plugin".to_owned(), agent.clone()),
        ("usr/bin/gpu-feature-discovery".to_owned(), agent.clone()),
        ("usr/bin/config-manager".to_owned(), agent.clone()),
        ("usr/bin/mps-control-daemon".to_owned(), agent.clone()),
        ("usr/bin/divvy-probe".to_owned(), probe.clone()),
        ("usr/bin/divvy-smoke".to_owned(), smoke.clone()),
        ("bin/divvy-runtime".to_owned(), runtime.clone()),
        ("bin/divvy-hook".to_owned(), hook.clone()),
        // For `divvy configure` and `divvy doctor` on the node; the same file as above.
        ("bin/divvy".to_owned(), divvy.clone()),
        // For divvy-runtime, which queries the GPUs with it; the same file as above.
        ("bin/divvy-probe".to_owned(), probe.clone()),
        // For the node's administrator; it asks the probe in the same directory.
        ("bin/divvy-smoke".to_owned(), smoke.clone()),
    ]);
    // Where the agent expects them: in the directory of its program.
    files.extend(guard.iter().map(|(name, path)| (format!("usr/bin/{name}"), path.clone())));
    files.extend(machine.libraries(&linked)?);
    Ok(files)
}

struct Layer {
    compressed: Vec<u8>,
    /// The size of the uncompressed tar file in bytes.
    size: usize,
    /// SHA-256 of the uncompressed tar file.
    diff_id: String,
}

fn layer(files: &BTreeMap<String, PathBuf>, compression: Compression) -> Result<Layer> {
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
    let mut gzip = GzEncoder::new(Vec::new(), compression);
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

impl ContainerImage<'_> {
    fn config(&self, machine: &TargetMachine, layer: &Layer) -> Value {
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
struct ContainerImage<'n> {
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

/// The files of an OCI layout.
#[derive(Default)]
struct OciLayout(BTreeMap<String, Vec<u8>>);

impl OciLayout {
    /// Add a blob of a kind, and return its descriptor.
    fn blob(&mut self, kind: &str, bytes: Vec<u8>) -> Value {
        let digest = digest(&bytes);
        let descriptor = json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": format!("sha256:{digest}"), "size": bytes.len()});
        self.0.insert(format!("blobs/sha256/{digest}"), bytes);
        descriptor
    }

    fn index(&mut self, manifests: &[Value]) -> Result<Value> {
        Ok(self.blob("index.v1+json", serde_json::to_vec(&index(manifests))?))
    }
}

fn index(manifests: &[Value]) -> Value {
    json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests})
}

/// Pack two images with the same layers into one archive: for each kind of machine a manifest, and an index of these if there are several.
fn archive(layers: &[(&TargetMachine, Layer)], name: &str) -> Result<Vec<u8>> {
    let plugin = plugin_name(name);
    let images = [
        ContainerImage {
            name,
            title: "divvy",
            entrypoint: "/usr/bin/divvy",
            env: vec!["PATH=/usr/bin"],
        },
        ContainerImage {
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
    let mut layout = OciLayout::default();
    let path = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        format!("blobs/{}", digest.replace(':', "/"))
    };
    let (mut docker, mut named) = (Vec::new(), Vec::new());
    for image in images {
        let mut manifests = Vec::new();
        for (machine, layer) in layers {
            let packed = layout.blob("layer.v1.tar+gzip", layer.compressed.clone());
            let config = layout.blob("config.v1+json", serde_json::to_vec(&image.config(machine, layer))?);
            // This file has no place for a second image of the same name.
            if machine.is_own() || layers.len() == 1 {
                docker.push(json!({"Config": path(&config), "RepoTags": [image.name], "Layers": [path(&packed)]}));
            }
            let manifest = json!({
                "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": [packed],
            });
            let mut manifest = layout.blob("manifest.v1+json", serde_json::to_vec(&manifest)?);
            manifest["platform"] = json!({"architecture": machine.oci, "os": "linux"});
            manifests.push(manifest);
        }
        let mut whole = match manifests.as_slice() {
            [one] => one.clone(),
            several => layout.index(several)?,
        };
        whole["annotations"] = json!({
            "io.containerd.image.name": image.name,
            // The whole name, because both images have the same tag.
            "org.opencontainers.image.ref.name": image.name,
        });
        named.push(whole);
    }
    layout.0.insert("index.json".to_owned(), serde_json::to_vec(&index(&named))?);
    layout.0.insert("manifest.json".to_owned(), serde_json::to_vec(&docker)?);
    layout
        .0
        .insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    let mut tar = tar::Builder::new(Vec::new());
    for (at, bytes) in &layout.0 {
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
    fn each_image_has_a_manifest_for_each_kind_of_machine() {
        let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let files = [("bin/divvy".to_owned(), own)].into();
        for count in 1..=machine::ALL.len() {
            let machines = machine::ALL.iter().take(count);
            let layers: Vec<_> = machines
                .map(|machine| (machine, layer(&files, Compression::best()).expect("packed")))
                .collect();
            let bytes = archive(&layers, "divvy.dev/divvy:0.1.0").expect("packed");
            let mut blobs = BTreeMap::new();
            for entry in tar::Archive::new(bytes.as_slice()).entries().expect("a tar") {
                let mut entry = entry.expect("an entry");
                let (name, mut bytes) = (entry.path().expect("a path").display().to_string(), Vec::new());
                entry.read_to_end(&mut bytes).expect("read");
                blobs.insert(name, bytes);
            }
            let json = |name: &str| serde_json::from_slice::<Value>(&blobs[name]).expect("JSON");
            let blob = |descriptor: &Value| {
                let digest = descriptor["digest"].as_str().expect("a digest").replace(':', "/");
                json(&format!("blobs/{digest}"))
            };
            let index = json("index.json");
            let images = index["manifests"].as_array().expect("images");
            for (image, name) in images
                .iter()
                .zip(["divvy.dev/divvy:0.1.0", "divvy.dev/k8s-device-plugin:0.1.0"])
            {
                assert_eq!(image["annotations"]["io.containerd.image.name"], name);
                let manifests = match count {
                    1 => vec![image.clone()],
                    _ => blob(image)["manifests"].as_array().expect("manifests").clone(),
                };
                assert_eq!(manifests.len(), count);
                for (manifest, (machine, _)) in manifests.iter().zip(&layers) {
                    assert_eq!(manifest["platform"]["architecture"], machine.oci);
                    assert_eq!(blob(&blob(manifest)["config"])["architecture"], machine.oci);
                }
            }
            assert_eq!(images.len(), 2);
            assert_eq!(
                json("manifest.json").as_array().map(Vec::len),
                Some(2),
                "for Docker, one machine's"
            );
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
        let layer = layer(&files, Compression::best()).expect("packed");
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
