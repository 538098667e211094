//! A benchmark of the time that `divvy-runtime` adds to the start of a container, with and without a GPU. The variants, one of
//! which starts the container without `divvy-runtime`, take turns in one run.
//!
//! ```text
//! cargo build --profile node --target x86_64-unknown-linux-musl -p divvy-runtime -p divvy-hook
//! cargo bench -p divvy-bench --bench container_starts -- target/x86_64-unknown-linux-musl/node [STARTS]
//! ```
//!
//! If `DIVVY_NVIDIA_CTK` names a directory with NVIDIA's programs, the `nvidia-container-runtime` in it takes part as well.
//!
//! The first table uses a low-level runtime that exits immediately, so that the table shows little besides the added time. The
//! second table uses runc, if the user is root and runc is installed. The row `jit-cdi` does not include the time that the driver
//! needs, because a stand-in for the probe answers immediately.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "a program for a terminal"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// One variant of a container start.
struct Row {
    name: &'static str,
    program: PathBuf,
    /// The text that is written to `config.json` before each start.
    config: String,
    /// The text of `config.toml`.
    settings: &'static str,
    times: Vec<Duration>,
}

/// Write a spec as `divvy cdi generate` would for eight GPUs, with a hundred mounts.
fn spec(directory: &Path) {
    fs::write(directory.join("driver-file"), "").unwrap();
    let node = |name: &str| json!({"path": format!("/dev/{name}"), "hostPath": "/dev/null"});
    let devices: Vec<Value> = (0..8)
        .map(|i| json!({"name": i.to_string(), "containerEdits": {"deviceNodes": [node(&format!("nvidia{i}"))]}}))
        .collect();
    let mounts: Vec<Value> = (0..100)
        .map(|i| json!({"hostPath": directory.join("driver-file"), "containerPath": format!("/usr/lib64/libnvidia-{i}.so.1"), "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}))
        .collect();
    let common =
        json!({"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": [node("nvidiactl"), node("nvidia-uvm")], "mounts": mounts});
    let spec = json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": common});
    fs::create_dir_all(directory.join("cdi")).unwrap();
    fs::write(directory.join("cdi/nvidia.json"), spec.to_string()).unwrap();
}

/// Write the root directory of a driver, and a stand-in for the probe, for the mode `jit-cdi`. Report whether the device nodes
/// could be created.
fn driver(directory: &Path) -> bool {
    let libraries = directory.join("driver/usr/lib64");
    fs::create_dir_all(&libraries).unwrap();
    fs::create_dir_all(directory.join("driver/dev")).unwrap();
    for name in [
        "libcuda",
        "libnvidia-ml",
        "libnvidia-ptxjitcompiler",
        "libnvidia-nvvm",
        "libnvcuvid",
        "libnvidia-encode",
    ] {
        fs::write(libraries.join(format!("{name}.so.550.54.15")), "").unwrap();
    }
    let made = ["nvidiactl", "nvidia-uvm", "nvidia0"].iter().all(|name| {
        let path = directory.join("driver/dev").join(name);
        Command::new("mknod")
            .arg(path)
            .args(["c", "1", "3"])
            .status()
            .is_ok_and(|status| status.success())
    });
    let said =
        json!({"v": 2, "drivers": {"nvidia": {"version": "550.54.15"}}, "gpus": [{"uuid": "GPU-a", "index": 0, "minor": 0}]});
    fs::write(directory.join("probe"), format!("#!/bin/sh\necho '{said}'\n")).unwrap();
    fs::set_permissions(directory.join("probe"), fs::Permissions::from_mode(0o755)).unwrap();
    made
}

fn measure(rows: &mut [Row], directory: &Path, low_level: &Path, starts: usize) {
    let (config, toml) = (directory.join("bundle/config.json"), directory.join("config.toml"));
    // The first five starts only warm the caches.
    for start in 0..starts + 5 {
        for row in rows.iter_mut() {
            fs::write(&config, &row.config).unwrap();
            let settings = row
                .settings
                .replace("LOW", &low_level.display().to_string())
                .replace("HERE", &directory.display().to_string());
            fs::write(&toml, settings).unwrap();
            let mut command = Command::new(&row.program);
            command
                .args(["--root"])
                .arg(directory.join("state"))
                .args(["create", "--bundle"])
                .arg(directory.join("bundle"));
            command
                .arg(format!("divvy-starts-{}", std::process::id()))
                .env("NVIDIA_CTK_CONFIG_FILE_PATH", &toml);
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let from = Instant::now();
            let ended = command.status().unwrap();
            let lasted = from.elapsed();
            assert!(ended.success(), "{} does not start: {ended}", row.name);
            // Engines call `create` and then `start`. NVIDIA's runtime adds nothing to a container of `run`.
            let mut delete = Command::new(low_level);
            delete.arg("--root").arg(directory.join("state")).args(["delete", "--force"]);
            let deleted = delete.arg(format!("divvy-starts-{}", std::process::id())).status().unwrap();
            assert!(deleted.success(), "{} is not deleted: {deleted}", row.name);
            if start >= 5 {
                row.times.push(lasted);
            }
        }
    }
    let ms = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    let mut alone = Duration::ZERO;
    println!(
        "{:<44} {:>9} {:>9} {:>9} {:>9}",
        format!("ms, {starts} starts, {}", low_level.display()),
        "best",
        "median",
        "p99",
        "added"
    );
    for row in rows {
        row.times.sort_unstable();
        let (best, median, p99) = (row.times[0], row.times[starts / 2], row.times[starts * 99 / 100]);
        if alone.is_zero() {
            alone = median;
        }
        let added = median.as_secs_f64() * 1e3 - alone.as_secs_f64() * 1e3;
        println!(
            "{:<44} {:>9} {:>9} {:>9} {:>9}",
            row.name,
            ms(best),
            ms(median),
            ms(p99),
            format!("{added:+.2}")
        );
    }
}

const CDI: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-runtime]\nmode = \"cdi\"\nlog-level = \"error\"\nruntimes = [\"LOW\"]\n\
    [nvidia-container-runtime.modes.cdi]\nspec-dirs = [\"HERE/cdi\"]\n";
const JIT: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-cli]\nroot = \"HERE/driver\"\n\
    [nvidia-container-runtime]\nmode = \"jit-cdi\"\nruntimes = [\"LOW\"]\n[nvidia-container-runtime.modes.jit-cdi]\nprobe = \"HERE/probe\"\n";

fn main() {
    let mut words = divvy_bench::arguments();
    let (Some(programs), Ok(starts)) = (words.next(), words.next().map_or(Ok(200), |word| word.parse::<usize>())) else {
        eprintln!(
            "usage: container_starts DIR [STARTS]: DIR contains divvy-runtime and divvy-hook, built for size; each variant starts STARTS times (200)"
        );
        return;
    };
    let programs = fs::canonicalize(programs).expect("the directory of divvy-runtime");
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::create_dir_all(directory.join("bundle/rootfs")).unwrap();
    // The program is static, so the image needs nothing else.
    fs::copy(programs.join("divvy-hook"), directory.join("bundle/rootfs/program")).expect("divvy-hook");
    spec(directory);
    let has_nodes = driver(directory);
    let theirs = std::env::var_os("DIVVY_NVIDIA_CTK").map(|directory| PathBuf::from(directory).join("nvidia-container-runtime"));
    let theirs = theirs.filter(|program| program.exists());
    let runc = ["/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc"]
        .iter()
        .map(Path::new)
        .find(|path| path.exists());
    for low_level in [Some(Path::new("/bin/true")), runc].into_iter().flatten() {
        let made = Command::new(runc.unwrap_or(Path::new("/bin/true")))
            .arg("spec")
            .current_dir(directory)
            .output();
        let made = made.ok().and_then(|_| fs::read_to_string(directory.join("config.json")).ok());
        let _ = fs::remove_file(directory.join("config.json"));
        let mut config: Value = made.map_or_else(|| json!({"process": {}}), |text| serde_json::from_str(&text).unwrap());
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["/program", "--version"]);
        config["root"] = json!({"path": "rootfs"});
        let mut row = |name, program: &Path, asked: &str, settings| {
            config["process"]["env"] = json!(["PATH=/bin", format!("NVIDIA_VISIBLE_DEVICES={asked}")]);
            Row {
                name,
                program: program.to_owned(),
                config: config.to_string(),
                settings,
                times: Vec::new(),
            }
        };
        let ours = programs.join("divvy-runtime");
        let mut rows = vec![
            row("without divvy-runtime", low_level, "void", CDI),
            row("divvy-runtime, no GPU", &ours, "void", CDI),
            row("divvy-runtime, a GPU of a CDI spec", &ours, "0", CDI),
        ];
        if has_nodes {
            rows.push(row("divvy-runtime, jit-cdi", &ours, "0", JIT));
        }
        if let Some(theirs) = &theirs {
            rows.push(row("nvidia-container-runtime, no GPU", theirs, "void", CDI));
            rows.push(row("nvidia-container-runtime, a GPU of a CDI spec", theirs, "0", CDI));
        }
        measure(&mut rows, directory, low_level, starts);
    }
}
