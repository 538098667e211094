//! A comparison with NVIDIA's `nvidia-container-runtime`. The same requests on the same machine must lead to the same
//! `config.json`, and in mode `legacy` to the same arguments of `nvidia-container-cli`. `DIVVY_NVIDIA_CTK` names the directory of
//! NVIDIA's programs (1.20.0).
//!
//! In each row, both programs do the same, or the row states why they differ. A row that states a difference fails if there is
//! none.

mod hook;
mod mig;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::bed::{Bed, Refusal, built, nvidia};
use super::live::{driver, settings};

const MOUNTS: &str = "/var/run/nvidia-container-devices";
const BY_ENVIRONMENT: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n";
const NOT_BY_ENVIRONMENT: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
const BY_MOUNTS: &str = "accept-nvidia-visible-devices-as-volume-mounts = true\n";

/// A container's request.
#[derive(Clone)]
struct Request {
    env: Vec<String>,
    mounts: Vec<(String, String)>,
    annotations: BTreeMap<String, String>,
    privileged: bool,
    /// The text of the settings: `top` at the beginning of the file, and `tables` at its end.
    top: String,
    tables: String,
    change: fn(&mut Value),
}

fn env(entries: &[&str]) -> Request {
    Request {
        env: entries.iter().map(|entry| (*entry).to_owned()).collect(),
        mounts: Vec::new(),
        annotations: BTreeMap::new(),
        privileged: false,
        top: BY_ENVIRONMENT.to_owned(),
        tables: String::new(),
        change: |_| (),
    }
}

fn visible(value: &str) -> Request {
    env(&[&format!("NVIDIA_VISIBLE_DEVICES={value}")])
}

/// Return a request that consists of mounts of `/dev/null` at these paths below [`MOUNTS`].
fn mounted(below: &[&str]) -> Request {
    let mut request = env(&[]).top(&format!("{BY_ENVIRONMENT}{BY_MOUNTS}"));
    let at = |below: &&str| ("/dev/null".to_owned(), format!("{MOUNTS}{below}"));
    request.mounts = below.iter().map(at).collect();
    request
}

impl Request {
    fn and(mut self, entry: &str) -> Request {
        self.env.push(entry.to_owned());
        self
    }

    fn annotated(mut self, key: &str, value: &str) -> Request {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    fn top(mut self, top: &str) -> Request {
        self.top = top.to_owned();
        self
    }

    fn tables(mut self, tables: &str) -> Request {
        self.tables = tables.to_owned();
        self
    }

    fn privileged(mut self) -> Request {
        self.privileged = true;
        self
    }

    fn changed(mut self, change: fn(&mut Value)) -> Request {
        self.change = change;
        self
    }

    fn config(&self) -> Value {
        let env: Vec<&str> = ["PATH=/bin"].into_iter().chain(self.env.iter().map(String::as_str)).collect();
        let own = [
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/usr/lib/x", "type": "tmpfs", "source": "tmpfs"}),
        ];
        let asked = self
            .mounts
            .iter()
            .map(|(source, at)| json!({"destination": at, "source": source, "type": "bind", "options": ["bind"]}));
        let mut config = json!({
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "env": env, "cwd": "/"},
            "root": {"path": "rootfs"},
            "mounts": own.into_iter().chain(asked).collect::<Vec<_>>(),
            "annotations": self.annotations,
            "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}},
        });
        if self.privileged {
            config["process"]["capabilities"] = json!({"bounding": ["CAP_SYS_ADMIN"]});
        }
        (self.change)(&mut config);
        config
    }
}

/// Whose runtime to call: NVIDIA's or Divvy's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Theirs,
    Ours,
}

struct Machine {
    bed: Bed,
    programs: PathBuf,
    /// A replacement for `/proc/driver`, if there are GPUs that are divided into MIG devices.
    proc: Option<PathBuf>,
}

impl Machine {
    /// Prepare the machine. If that is not possible, record a skip and return `None`.
    fn new(needed: &str) -> Option<Machine> {
        let programs = divvy_skip::directory("DIVVY_NVIDIA_CTK", "NVIDIA's programs")?;
        if !programs.join(needed).is_file() {
            divvy_skip::skipped(format_args!("{} has no {needed}", programs.display()));
            return None;
        }
        let bed = Bed::new("{}");
        let root = driver(&bed)?;
        // NVIDIA's programs load the driver's library themselves. The simulated library reports what the probe reports to Divvy's program.
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        fs::copy(
            built("divvy-nvml-sim", "libdivvy_nvml_sim.so"),
            libraries.join("libnvidia-ml.so.550.54.15"),
        )
        .expect("copied");
        symlink("libnvidia-ml.so.550.54.15", libraries.join("libnvidia-ml.so.1")).expect("linked");
        for path in [
            "dev/nvidia-fs",
            "dev/nvidia-fs0",
            "dev/nvidia-nvswitchctl",
            "dev/infiniband/uverbs0",
        ] {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            node(&path, 0o666);
        }
        fs::create_dir_all(root.join("etc")).expect("made");
        fs::write(root.join("etc/cufile.json"), "{}").expect("written");
        // A node with access for its group.
        node(&root.join("dev/nvidia-uvm-tools"), 0o660);
        std::os::unix::fs::chown(root.join("dev/nvidia-uvm-tools"), None, Some(44)).expect("its group");
        let mut spec = nvidia();
        spec["devices"] = json!(
            [("0", "nvidia1"), ("1", "nvidia0"), ("GPU-b", "nvidia0")].map(|(name, node)| {
                let host = root.join("dev").join(node);
                json!({"name": name, "containerEdits": {"deviceNodes": [{"path": format!("/dev/{node}"), "hostPath": host}]}})
            })
        );
        let all = [0, 1]
            .map(|minor| json!({"path": format!("/dev/nvidia{minor}"), "hostPath": root.join(format!("dev/nvidia{minor}"))}));
        spec["devices"]
            .as_array_mut()
            .expect("devices")
            .push(json!({"name": "all", "containerEdits": {"deviceNodes": all}}));
        spec["containerEdits"]["hooks"] =
            json!([{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "noop"]}]);
        bed.spec("nvidia.json", &spec);
        fs::create_dir_all(bed.path("bundle/rootfs")).expect("made");
        let cli = bed.path("cli");
        fs::write(&cli, format!("#!/bin/sh\nprintf '%s\\n' \"$@\" > {:?}\n", bed.path("called"))).expect("written");
        fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).expect("its mode");
        built("divvy-hook", "divvy-hook");
        settings(&bed, "auto", &bed.path("low-level"));
        Some(Machine {
            bed,
            programs,
            proc: None,
        })
    }

    /// Write the settings and the bundle.
    fn prepare(&self, whose: Whose, mode: &str, request: &Request) {
        let bed = &self.bed;
        let own = match whose {
            Whose::Ours => format!(
                "[nvidia-container-runtime.modes.jit-cdi]\nprobe = {:?}\nnvml-library = {:?}\n",
                bed.path("probe"),
                built("divvy-nvml-sim", "libdivvy_nvml_sim.so")
            ),
            Whose::Theirs => String::new(),
        };
        let (before, after) = request.tables.split_once("[cli]\n").unwrap_or((&request.tables, ""));
        let text = format!(
            "{}[nvidia-container-runtime]\nmode = {mode:?}\nlog-level = \"error\"\nruntimes = [{:?}]\n[nvidia-container-runtime.modes.cdi]\n\
             spec-dirs = [{:?}]\n{own}{before}[nvidia-container-cli]\nroot = {:?}\npath = {:?}\nldconfig = \"@/sbin/ldconfig\"\n{after}",
            request.top,
            bed.path("low-level"),
            bed.path("cdi"),
            bed.path("driver"),
            bed.path("cli"),
        );
        fs::write(bed.path("config.toml"), text).expect("written");
        fs::write(bed.config(), request.config().to_string()).expect("written");
    }

    /// Create a container. Return the new configuration.
    fn create(&self, whose: Whose, mode: &str, request: &Request) -> Result<Value, Refusal> {
        let bed = &self.bed;
        self.prepare(whose, mode, request);
        let bundle = bed.path("bundle");
        let words = ["create", "--bundle", bundle.to_str().expect("text"), "c1"];
        let program = match whose {
            Whose::Theirs => self.programs.join("nvidia-container-runtime"),
            Whose::Ours => PathBuf::from(env!("CARGO_BIN_EXE_divvy-runtime")),
        };
        let mut command = match &self.proc {
            None => Command::new(program),
            Some(proc) => {
                let mut command = Command::new("unshare");
                command
                    .args(["--mount", "--propagation", "private", "sh", "-c"])
                    .arg("mount --bind \"$0\" /proc/driver && exec \"$@\"")
                    .arg(proc)
                    .arg(program);
                command
            }
        };
        command
            .args(words)
            .current_dir(&bundle)
            .env("NVIDIA_CTK_CONFIG_FILE_PATH", bed.path("config.toml"));
        if whose == Whose::Theirs {
            command.env("DIVVY_NVML_SIM", bed.path("machine.toml"));
        }
        let output = command.output().expect("it runs");
        match output.status.code() {
            Some(7) => Ok(serde_json::from_str(&bed.text()).expect("JSON")),
            _ => Err(Refusal::of(&output)),
        }
    }

    /// Return the arguments with which `nvidia-container-cli` is called when a container starts in mode `legacy`. The list is
    /// empty if it is not called.
    fn called(&self, whose: Whose, request: &Request) -> Result<Vec<String>, Refusal> {
        let called = self.bed.path("called");
        let _ = fs::remove_file(&called);
        let config = self.create(whose, "legacy", request)?;
        let hooks = config["hooks"]["prestart"].as_array().cloned().unwrap_or_default();
        for hook in hooks {
            let program = match whose {
                Whose::Theirs => self.programs.join("nvidia-container-runtime-hook"),
                Whose::Ours => PathBuf::from(hook["path"].as_str().expect("a path")),
            };
            let words = hook["args"].as_array().expect("words").iter().skip(1);
            let mut child = Command::new(program)
                .args(words.map(|word| word.as_str().expect("text")))
                .current_dir(self.bed.path("bundle"))
                .env("NVIDIA_CTK_CONFIG_FILE_PATH", self.bed.path("config.toml"))
                .stdin(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it runs");
            let state =
                json!({"ociVersion": "1.0.2", "id": "c1", "status": "creating", "pid": 4242, "bundle": self.bed.path("bundle")});
            let mut stdin = child.stdin.take().expect("its input");
            stdin.write_all(state.to_string().as_bytes()).expect("read");
            drop(stdin);
            let output = child.wait_with_output().expect("it ends");
            if !output.status.success() {
                return Err(Refusal::of(&output));
            }
        }
        let words = fs::read_to_string(called).unwrap_or_default();
        let mut words: Vec<String> = words.lines().map(str::to_owned).collect();
        // NVIDIA's runtime writes them in a different order at each call.
        if let Some(first) = words.iter().position(|word| word.starts_with("--require=")) {
            let end = words
                .iter()
                .rposition(|word| word.starts_with("--require="))
                .map_or(first, |last| last + 1);
            words[first..end].sort();
        }
        Ok(words)
    }
}

fn node(path: &Path, mode: u32) {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(mode), makedev(1, 3)).expect("root may");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its mode");
}

/// Return what a configuration means to a container runtime. If `live` is set (the spec is generated now), hooks are left out,
/// because Divvy uses mounts where NVIDIA uses hooks.
fn meaning(config: &Value, live: bool) -> BTreeMap<&'static str, BTreeSet<String>> {
    let all = |value: &Value| -> Vec<Value> { value.as_array().cloned().unwrap_or_default() };
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    for entry in all(&config["process"]["env"]) {
        let entry = entry.as_str().expect("text").to_owned();
        let name = entry.split('=').next().unwrap_or_default().to_owned();
        // If a name occurs several times, the last entry counts.
        variables.insert(name, entry);
    }
    if live {
        // Divvy has one more directory, and does not need a device without edits.
        for name in ["NVIDIA_CTK_LIBCUDA_DIR", "NVCT_EMPTY_DEVICE"] {
            variables.remove(name);
        }
    }
    let text = |value: &Value| value.to_string();
    let mut parts = BTreeMap::from([
        ("variables", variables.into_values().collect()),
        (
            "groups",
            all(&config["process"]["user"]["additionalGids"]).iter().map(text).collect(),
        ),
        ("nodes", all(&config["linux"]["devices"]).iter().map(text).collect()),
        (
            "rules",
            all(&config["linux"]["resources"]["devices"]).iter().map(text).collect(),
        ),
        ("prestart", all(&config["hooks"]["prestart"]).iter().map(text).collect()),
    ]);
    let mounts = all(&config["mounts"]);
    parts.insert("mounts", mounts.iter().map(text).collect());
    if !live {
        parts.insert("hooks", all(&config["hooks"]["createContainer"]).iter().map(text).collect());
    }
    parts
}

/// Sort the keys of objects and drop null members, so that texts can be compared.
fn plain(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(plain);
            let sorted: BTreeMap<String, Value> = std::mem::take(members).into_iter().collect();
            members.extend(sorted);
        }
        Value::Array(items) => items.iter_mut().for_each(plain),
        _ => {}
    }
}

/// Return the differences between two configurations.
fn differences(theirs: &Value, ours: &Value, live: bool) -> Vec<String> {
    let (mut theirs, mut ours) = (theirs.clone(), ours.clone());
    plain(&mut theirs);
    plain(&mut ours);
    let (a, b) = (meaning(&theirs, live), meaning(&ours, live));
    let mut found = Vec::new();
    for (part, of_theirs) in &a {
        let of_ours = &b[part];
        found.extend(of_theirs.difference(of_ours).map(|one| format!("{part}: ours lacks {one}")));
        if *part != "mounts" || !live {
            found.extend(
                of_ours
                    .difference(of_theirs)
                    .map(|one| format!("{part}: only ours has {one}")),
            );
        }
    }
    if live {
        let at = |mount: &Value| mount["destination"].as_str().map(str::to_owned);
        let mounted: BTreeSet<String> = ours["mounts"].as_array().expect("mounts").iter().filter_map(at).collect();
        for link in links(&theirs).difference(&mounted) {
            found.push(format!("links: ours has nothing at {link}"));
        }
    }
    found
}

/// Return the paths at which NVIDIA's hooks create links.
fn links(config: &Value) -> BTreeSet<String> {
    let hooks = config["hooks"]["createContainer"].as_array().cloned().unwrap_or_default();
    let words = hooks
        .iter()
        .flat_map(|hook| hook["args"].as_array().cloned().unwrap_or_default());
    words
        .filter_map(|word| Some(word.as_str()?.split_once("::")?.1.to_owned()))
        .collect()
}

/// A row of the comparison: the modes, the request, and, if a difference is intended, the reason for it.
type Row = (&'static str, Request, Option<&'static str>);

const ALL: &str = "cdi jit-cdi auto";
const LIVE: &str = "jit-cdi auto";

const HOLE: &str = "0,0 is 0; NVIDIA's also requests the device none";
const NONE: &str = "none needs no device of that name in a spec";
const STRICT: &str = "unknown fields of config.json are kept; NVIDIA's refuses to start the container";
const COMPONENTS: &str = "a mount counts by whole path components, and one that names no device is ignored with a warning";
const BLANKS: &str = "spaces around names do not count";
const OF_NOW: &str = "in mode jit-cdi nvidia.com/gpu=0 is the driver's current GPU 0, so that no stale spec is used";
const ANNOTATIONS: &str =
    "in mode jit-cdi an annotation, which the node's device plugin wrote, also takes precedence over the image's variables";
const REQUIRED: &str = "the image's requirements on the driver count in every mode";
const EXTRAS: &str =
    "if the settings ignore variables of unprivileged containers, those for GPUDirect Storage do not count either";
const CHANNELS: &str = "all means every existing channel; NVIDIA's ignores it";

fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut same = |modes, request| rows.push((modes, request, None));
    for value in [
        "0", "1", "0,1", " 0 , ", "all", "0,all", "all,0", "all,none", "void", "0,void", "", "  ", ",",
    ] {
        same(ALL, visible(value));
    }
    for value in [
        "7",
        "ALL",
        "-1",
        "0-1",
        "0;1",
        "gpu0",
        "0000:06:00.0",
        "MIG-x",
        "gpu-b",
        "nvidia.com/gpu=9",
    ] {
        same(ALL, visible(value));
    }
    for value in ["none", "0,none", "none,all"] {
        same(LIVE, visible(value));
    }
    same("cdi", visible("GPU-b"));
    same("cdi auto", visible("nvidia.com/gpu=0"));
    same("cdi auto", visible("nvidia.com/gpu=0,nvidia.com/gpu=1"));
    same("cdi auto", visible("nvidia.com/gpu=all"));
    same(ALL, visible("runtime.nvidia.com/gpu=0"));
    same("cdi auto", visible("runtime.nvidia.com/gpu=0,nvidia.com/gpu=0"));
    same("auto", visible("0,nvidia.com/gpu=1"));
    same("cdi", visible("0,nvidia.com/gpu=1"));
    same(ALL, env(&[]));
    same(ALL, env(&["CUDA_VERSION=9.0"]));
    same(ALL, env(&["CUDA_VERSION=9.0", "NVIDIA_VISIBLE_DEVICES=void"]));
    same(ALL, env(&["CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"]));
    same(ALL, env(&["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"]));
    same(ALL, visible("0").top(NOT_BY_ENVIRONMENT));
    same(ALL, visible("0").top(NOT_BY_ENVIRONMENT).privileged());
    // Annotations.
    let zero = "nvidia.com/gpu=0";
    same("cdi auto", env(&[]).annotated("cdi.k8s.io/x_y", zero));
    same("cdi auto", visible("all").annotated("cdi.k8s.io/x_y", "nvidia.com/gpu=1"));
    same("cdi auto", visible("void").annotated("cdi.k8s.io/x_y", zero));
    same(
        "cdi auto",
        env(&[])
            .annotated("cdi.k8s.io/b", "nvidia.com/gpu=1")
            .annotated("cdi.k8s.io/a", zero),
    );
    same(
        "cdi auto",
        env(&[]).annotated("cdi.k8s.io/b", "nvidia.com/gpu=1,nvidia.com/gpu=0"),
    );
    same("cdi auto", env(&[]).annotated("cdi.k8s.io/b", zero).top(NOT_BY_ENVIRONMENT));
    same(ALL, env(&[]).annotated("nvidia.cdi.k8s.io/b", zero));
    same(ALL, env(&[]).annotated("cdi.k8s.io/b", "foo"));
    same(ALL, env(&[]).annotated("cdi.k8s.io/b", "0"));
    // Mounts.
    for below in ["/0", "/1", "/all", "/0/", "/../x", "", "/imex/3", "/cdi/foo"] {
        same(ALL, mounted(&[below]));
    }
    same("cdi auto", mounted(&["/cdi/nvidia.com/gpu/1"]));
    same("cdi auto", mounted(&["/cdi/nvidia.com/gpu=1"]));
    same(ALL, mounted(&["/1", "/0"]));
    same(ALL, mounted(&["/1", "/1"]));
    same(ALL, mounted(&["/0", "/imex/3"]));
    same(ALL, mounted(&["/0"]).top(BY_ENVIRONMENT));
    same(ALL, mounted(&["/1"]).and("NVIDIA_VISIBLE_DEVICES=all"));
    same(
        ALL,
        mounted(&["/1"])
            .and("NVIDIA_VISIBLE_DEVICES=all")
            .top(&format!("{NOT_BY_ENVIRONMENT}{BY_MOUNTS}")),
    );
    same("cdi auto", mounted(&["/1"]).annotated("cdi.k8s.io/a", zero));
    // Swarm.
    let swarm = |names: &str| format!("swarm-resource = {names:?}\n{BY_ENVIRONMENT}");
    same(
        ALL,
        env(&["DOCKER_RESOURCE_GPU=1", "NVIDIA_VISIBLE_DEVICES=all"]).top(&swarm("DOCKER_RESOURCE_GPU")),
    );
    same(ALL, env(&["A=1", "B=0"]).top(&swarm("A,B")));
    same(ALL, visible("1").top(&swarm("A,B")));
    // Variables that have no effect in these modes, or requirements that are met.
    for entry in [
        "NVIDIA_DRIVER_CAPABILITIES=utility",
        "NVIDIA_DRIVER_CAPABILITIES=foo",
        "NVIDIA_REQUIRE_CUDA=cuda>=11.0",
        "NVIDIA_MIG_CONFIG_DEVICES=all",
        "NVIDIA_MOFED=enabled",
        "NVIDIA_GDRCOPY=enabled",
        "NVIDIA_NVSWITCH=enabled",
        "NVIDIA_GDRCOPY=1",
        "NVIDIA_GDS=enabled",
        "NVIDIA_IMEX_CHANNELS=3",
        "NVIDIA_IMEX_CHANNELS=",
        "NVIDIA_IMEX_CHANNELS=7",
        "NVIDIA_IMEX_CHANNELS=x",
        "NVIDIA_IMEX_CHANNELS=-1",
        "NVIDIA_IMEX_CHANNELS=1048576",
    ] {
        same(ALL, visible("0").and(entry));
    }
    same(ALL, env(&["NVIDIA_IMEX_CHANNELS=3"]));
    let unmet = "NVIDIA_REQUIRE_CUDA=cuda>=14.0";
    same(ALL, visible("0").and(unmet).and("NVIDIA_DISABLE_REQUIRE=1"));
    for feature in ["ignore-imex-channel-requests", "no-additional-gids-for-device-nodes"] {
        let feature = format!("[features]\n{feature} = true\n");
        same(ALL, visible("0").and("NVIDIA_IMEX_CHANNELS=3").tables(&feature));
    }
    // Configurations that already contain hooks, devices, mounts, groups, or mappings.
    for value in ["0", "void"] {
        same(
            ALL,
            visible(value).changed(|config| {
                config["hooks"] = json!({"prestart": [
                    {"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/bin/other"}, {"path": "/x/nvidia-container-toolkit"}]});
            }),
        );
    }
    same(
        ALL,
        visible("0").changed(|config| config["process"]["user"] = json!({"uid": 1000, "gid": 1001, "additionalGids": [7]})),
    );
    same(
        ALL,
        visible("0").changed(|config| {
            config["linux"]["devices"] =
                json!([{"path": "/dev/nvidia1", "type": "c", "major": 9, "minor": 9}, {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]);
        }),
    );
    same(
        ALL,
        visible("0").changed(|config| {
            let there = json!({"destination": "/usr/lib/libcuda.so.1", "source": "/y", "type": "bind"});
            config["mounts"].as_array_mut().expect("mounts").push(there);
        }),
    );
    same(
        ALL,
        visible("0").changed(|config| {
            config["linux"]["namespaces"] = json!([{"type": "user"}]);
            config["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
        }),
    );

    let mut apart = |modes, request, why| rows.push((modes, request, Some(why)));
    apart(ALL, visible("0,0"), HOLE);
    for value in ["none", "0,none", "none,all"] {
        apart("cdi", visible(value), NONE);
    }
    apart("cdi", mounted(&["/none"]), NONE);
    apart(ALL, env(&["FOO", "NVIDIA_VISIBLE_DEVICES=0"]), STRICT);
    for value in ["0", "void"] {
        apart(ALL, visible(value).changed(|config| config["newField"] = json!(1)), STRICT);
    }
    apart(ALL, mounted(&["X/0"]), COMPONENTS);
    apart(ALL, mounted(&["/void"]), COMPONENTS);
    apart(ALL, mounted(&["/cdi/nvidia.com/gpu/0/1"]), COMPONENTS);
    apart(
        "cdi",
        env(&[]).annotated("cdi.k8s.io/b", ""),
        "an empty annotation asks for nothing",
    );
    apart(
        "cdi auto",
        env(&[]).annotated("cdi.k8s.io/b", "nvidia.com/gpu=1, nvidia.com/gpu=0"),
        BLANKS,
    );
    apart("jit-cdi", visible("nvidia.com/gpu=0"), OF_NOW);
    apart("jit-cdi", visible("runtime.nvidia.com/gpu=0,nvidia.com/gpu=0"), OF_NOW);
    apart("jit-cdi", mounted(&["/cdi/nvidia.com/gpu/1"]), OF_NOW);
    apart("jit-cdi", env(&[]).annotated("cdi.k8s.io/x_y", zero), ANNOTATIONS);
    apart("jit-cdi", visible("all").annotated("cdi.k8s.io/x_y", zero), ANNOTATIONS);
    apart(LIVE, visible("0").and(unmet), REQUIRED);
    apart(
        LIVE,
        mounted(&["/1"])
            .and("NVIDIA_GDS=enabled")
            .top(&format!("{NOT_BY_ENVIRONMENT}{BY_MOUNTS}")),
        EXTRAS,
    );
    apart(LIVE, visible("0").and("NVIDIA_IMEX_CHANNELS=all"), CHANNELS);
    rows
}

#[test]
fn what_containers_ask_for_they_get_as_from_nvidias_runtime() {
    let Some(machine) = Machine::new("nvidia-container-runtime") else {
        return;
    };
    let mut wrong = Vec::new();
    for (modes, request, why) in rows() {
        for mode in modes.split(' ') {
            let theirs = machine.create(Whose::Theirs, mode, &request);
            let ours = machine.create(Whose::Ours, mode, &request);
            let live = |config: &Value| config.to_string().contains("/driver/usr/lib/");
            let found = match (&theirs, &ours) {
                (Ok(theirs), Ok(ours)) => differences(theirs, ours, live(theirs) || live(ours)),
                (Err(_), Err(_)) => Vec::new(),
                (Err(Refusal(said)), Ok(_)) => vec![format!("only theirs refuses: {said}")],
                (Ok(_), Err(Refusal(said))) => vec![format!("only ours refuses: {said}")],
            };
            let what = format!(
                "{mode} {:?} {:?} {:?} {:?}",
                request.env, request.mounts, request.annotations, request.tables
            );
            match why {
                None if !found.is_empty() => wrong.push(format!("{what}: {found:#?}")),
                Some(why) if found.is_empty() => wrong.push(format!("{what}: no longer different: {why}")),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn case_26_e_nvidias_program_is_called_as_by_nvidias_hook() {
    let Some(machine) = Machine::new("nvidia-container-runtime-hook") else {
        return;
    };
    let mut rows: Vec<(Request, Option<&str>)> = Vec::new();
    let mut same = |request| rows.push((request, None));
    for value in [
        "all",
        "none",
        "0",
        "0,1",
        " 0 , ",
        "void",
        "",
        "0,all",
        "GPU-x",
        "0000:06:00.0",
        "0:1",
        "ALL",
        "7",
        "MIG-GPU-x/1/2",
        "MIG-b1028956-cfa2-0990-bf4a-5da9abb51763",
    ] {
        same(visible(value));
    }
    same(env(&[]));
    for version in ["9.0", "9.0.116", "9", "foo", ""] {
        same(env(&[&format!("CUDA_VERSION={version}")]));
    }
    let expression = "NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=470,driver<471";
    same(visible("0").and("CUDA_VERSION=12.4.1").and(expression));
    same(visible("0").and(expression).and("NVIDIA_DISABLE_REQUIRE=1"));
    same(
        visible("0")
            .and(expression)
            .top(&format!("disable-require = true\n{BY_ENVIRONMENT}")),
    );
    same(
        visible("0")
            .and("NVIDIA_REQUIRE_B=driver>=3")
            .and(expression)
            .and("NVIDIA_REQUIRE_JETPACK=csv-mounts=all"),
    );
    for list in [
        "all",
        "utility",
        "compute,utility",
        "graphics",
        "display",
        "video,ngx",
        "compat32",
        "",
        "foo",
        "compute,foo",
        " compute , utility ",
    ] {
        same(visible("0").and(&format!("NVIDIA_DRIVER_CAPABILITIES={list}")));
        let fewer = format!("supported-driver-capabilities = \"compute,utility\"\n{BY_ENVIRONMENT}");
        same(visible("0").and(&format!("NVIDIA_DRIVER_CAPABILITIES={list}")).top(&fewer));
    }
    same(visible("none").and("NVIDIA_DRIVER_CAPABILITIES=all"));
    for channels in ["0", "0,3", "all", "", "0,all"] {
        same(visible("0").and(&format!("NVIDIA_IMEX_CHANNELS={channels}")));
    }
    same(mounted(&["/imex/3", "/1"]));
    same(mounted(&["/1"]).and("NVIDIA_VISIBLE_DEVICES=all"));
    for entry in [
        "NVIDIA_MIG_CONFIG_DEVICES=all",
        "NVIDIA_MIG_MONITOR_DEVICES=all",
        "NVIDIA_MIG_CONFIG_DEVICES=0",
    ] {
        same(visible("all").and(entry));
        same(visible("all").and(entry).privileged());
    }
    same(visible("all").top(NOT_BY_ENVIRONMENT));
    same(visible("1").annotated("cdi.k8s.io/a", "nvidia.com/gpu=0"));
    for key in [
        "no-cgroups = true",
        "no-pivot = true",
        "debug = \"/nowhere/x.log\"",
        "ldcache = \"/etc/ld.so.cache\"",
        "user = \"root:video\"",
        "load-kmods = false",
        "environment = [\"A=b\"]",
    ] {
        same(visible("0").tables(&format!("[cli]\n{key}\n")));
    }
    for mode in ["ldconfig", "mount", "disabled", "hook"] {
        same(visible("0").tables(&format!(
            "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = {mode:?}\n"
        )));
    }
    for feature in [
        "allow-cuda-compat-libs-from-container",
        "disable-imex-channel-creation",
        "ignore-imex-channel-requests",
        "disable-cuda-compat-lib-hook",
    ] {
        let feature = format!("[features]\n{feature} = true\n");
        same(visible("0").and("NVIDIA_IMEX_CHANNELS=0").tables(&feature));
    }
    rows.push((visible("0,0"), Some("0,0 is 0; NVIDIA's writes --device=,0")));
    rows.push((
        visible("nvidia.com/gpu=0"),
        Some("a request that the program does not understand is refused before the call"),
    ));
    rows.push((
        visible("0").and("NVIDIA_IMEX_CHANNELS=x"),
        Some("a request that the program does not understand is refused before the call"),
    ));
    let mut wrong = Vec::new();
    for (request, why) in rows {
        let theirs = machine.called(Whose::Theirs, &request);
        let ours = machine.called(Whose::Ours, &request);
        let same = match (&theirs, &ours) {
            (Ok(theirs), Ok(ours)) => theirs == ours,
            (Err(_), Err(_)) => true,
            _ => false,
        };
        if same != why.is_none() {
            wrong.push(format!(
                "{:?} {:?} {:?}:\n  theirs {theirs:?}\n  ours   {ours:?}",
                request.env, request.top, request.tables
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
