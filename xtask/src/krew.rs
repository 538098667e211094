//! `cargo xtask krew`: the kubectl plugins in krew's format: an archive, and for each plugin a manifest with the archive's checksum.
//!
//! krew (<https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/>) links the `bin` of a plugin NAME as `kubectl-NAME`, with underscores
//! for dashes, so that `inspect-gpushare` becomes `kubectl inspect-gpushare`. Both plugins are the same program, which checks the name by which
//! it is called.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

pub(crate) const USAGE: &str = "usage: cargo xtask krew [--uri PREFIX] [--program FILE] [--out DIR]

Write divvy-VERSION-linux-ARCH.tar.gz and the krew manifests divvy.yaml and inspect-gpushare.yaml.

  --uri PREFIX     download location of the archive, without its name [default: the repository's releases on GitHub]
  --program FILE   package this divvy instead of building one (static, without the demo)
  --out DIR        output directory [default: target/krew]

Examples:
  cargo xtask krew
  kubectl krew install --manifest target/krew/divvy.yaml --archive target/krew/divvy-0.1.0-linux-amd64.tar.gz
  cargo xtask krew --uri https://downloads.example/divvy";

const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The plugins that users install: the name, a description in one line, and how to use the plugin.
const PLUGINS: [(&str, &str, &str); 2] = [
    (
        "divvy",
        "Show which pods use which shares of GPUs, and why a pod waits",
        "\
For clusters where Divvy (or Aliyun's gpushare) shares GPUs between pods.
  kubectl divvy why POD              why a pod waits for a GPU, or where it runs and which share it has
  kubectl divvy inspect gpushare     how much memory of each GPU each pod has
  kubectl divvy scheduler-config     the configuration that kube-scheduler needs
It reads nodes and pods with your own permissions and changes nothing.",
    ),
    (
        "inspect-gpushare",
        "Show GPU memory given to pods, per node and GPU",
        "\
The tables of Aliyun's kubectl-inspect-gpushare, byte for byte, for Divvy and for gpushare.
  kubectl inspect-gpushare           one line per node
  kubectl inspect-gpushare -d        all pods
  kubectl inspect-gpushare -o json
It reads nodes and pods with your own permissions and changes nothing.",
    ),
];

pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let (mut uri, mut program, mut out) = (None, None, None);
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let target = match *flag {
            "--uri" => &mut uri,
            "--program" => &mut program,
            "--out" => &mut out,
            "--help" | "-h" => {
                say(USAGE);
                return Ok(());
            }
            other => bail!("{other} is not a flag of krew\n\n{USAGE}"),
        };
        *target = Some(*rest.next().with_context(|| format!("{flag} needs a value\n\n{USAGE}"))?);
    }
    let (rust, arch) = match std::env::consts::ARCH {
        "x86_64" => ("x86_64", "amd64"),
        "aarch64" => ("aarch64", "arm64"),
        other => bail!("plugins can be built on x86_64 and aarch64 machines; this machine is {other}"),
    };
    let program = match program {
        Some(file) => PathBuf::from(file),
        None => build(rust)?,
    };
    let directory = Path::new(out.unwrap_or("target/krew"));
    std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
    let name = format!("divvy-{VERSION}-linux-{arch}.tar.gz");
    let archive = archive(&read(&program)?, &read(Path::new("LICENSE"))?)?;
    write(&directory.join(&name), &archive)?;
    let default_uri = format!("{REPOSITORY}/releases/download/v{VERSION}");
    let uri = format!("{}/{name}", uri.unwrap_or(&default_uri).trim_end_matches('/'));
    let sum: String = Sha256::digest(&archive).iter().map(|byte| format!("{byte:02x}")).collect();
    for plugin in PLUGINS {
        write(
            &directory.join(format!("{}.yaml", plugin.0)),
            manifest(plugin, arch, &uri, &sum).as_bytes(),
        )?;
    }
    say(&format!(
        "{}: {:.1} MiB, sha256:{sum}\ndivvy.yaml and inspect-gpushare.yaml in the same directory refer to {uri}",
        directory.join(&name).display(),
        archive.len() as f64 / 1048576.0
    ));
    Ok(())
}

/// Build a static program, which runs on every Linux. Its target directory is not the image's, because its features differ.
fn build(rust: &str) -> Result<PathBuf> {
    let target = format!("{rust}-unknown-linux-musl");
    let directory = std::env::current_dir()?.join("target/krew-build");
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "build",
            "--release",
            "--locked",
            "--package",
            "divvy",
            "--bin",
            "divvy",
            "--no-default-features",
        ])
        .args(["--features", "completions,top", "--target", &target])
        .env("CARGO_TARGET_DIR", &directory)
        .env(format!("CC_{}", target.replace('-', "_")), "musl-gcc")
        .status()
        .context("cargo could not be run")?;
    ensure!(
        status.success(),
        "cargo build for {target} failed; check that the target (rustup target add {target}) and musl-gcc (apt-get install musl-tools) are installed"
    );
    Ok(directory.join(target).join("release/divvy"))
}

/// Pack the archive. The same program always produces the same bytes.
fn archive(program: &[u8], license: &[u8]) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (path, content, mode) in [("LICENSE", license, 0o644), ("divvy", program, 0o755)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_mtime(0);
        tar.append_data(&mut header, path, content)?;
    }
    Ok(tar.into_inner()?.finish()?)
}

fn manifest((name, short, long): (&str, &str, &str), arch: &str, uri: &str, sum: &str) -> String {
    let long: String = long.lines().map(|line| format!("    {line}\n")).collect();
    let link = name.replace('-', "_");
    format!(
        "\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: {name}
spec:
  version: v{VERSION}
  homepage: {REPOSITORY}
  shortDescription: {short}
  description: |
{long}  caveats: |
    For shell completion, create a second link to the plugin under the name that kubectl expects:
      ln -s \"$(command -v kubectl-{link})\" \"$(dirname \"$(command -v kubectl-{link})\")/kubectl_complete-{link}\"
  platforms:
  - selector:
      matchLabels:
        os: linux
        arch: {arch}
    uri: {uri}
    sha256: {sum}
    files:
    - from: divvy
      to: .
    - from: LICENSE
      to: .
    bin: divvy
"
    )
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{} could not be read", path.display()))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("{} could not be written", path.display()))
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn say(text: &str) {
    println!("{text}");
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_archive_is_the_same_each_time_and_holds_what_the_manifests_name() {
        let made = archive(b"program", b"licence").expect("an archive");
        assert_eq!(made, archive(b"program", b"licence").expect("an archive"));
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&made[..]));
        let mut found = Vec::new();
        for entry in tar.entries().expect("entries") {
            let mut entry = entry.expect("an entry");
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("text");
            let mode = entry.header().mode().expect("a mode");
            found.push((entry.path().expect("a path").display().to_string(), mode, content));
        }
        let expected = [("LICENSE", 0o644, "licence"), ("divvy", 0o755, "program")];
        assert_eq!(
            found,
            expected.map(|(path, mode, content)| (path.to_owned(), mode, content.to_owned()))
        );
        for plugin in PLUGINS {
            let text = manifest(plugin, "amd64", "https://x/y.tar.gz", "00ff");
            for part in ["    bin: divvy\n", "    - from: divvy\n", "sha256: 00ff\n", "arch: amd64\n"] {
                assert!(text.contains(part), "{part} in {text}");
            }
            assert!(
                plugin.1.len() <= 80 && !plugin.1.ends_with('.'),
                "krew's rules for a short description"
            );
        }
    }
}
