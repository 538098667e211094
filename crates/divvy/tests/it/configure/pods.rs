//! Pods on the installed containerds, created as a kubelet does, with GPUs through divvy-runtime and through containerd's own CDI support.
//!
//! An engine runs in its own directory, and in its own mount and PID namespaces. However the test ends, the namespaces and all
//! processes in them end with it.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use divvy_cdi::{GrantSpec, Spec, grant_spec};
use serde_json::{Value, json};

use super::cri::{
    CdiDevice, ContainerConfig, ContainerMetadata, ContainerSecurity, ContainerStatus, Cri, Image, LinuxContainer, LinuxSandbox,
    Mount, NamespaceOption, SandboxConfig, SandboxMetadata, SandboxSecurity, Variable,
};
use super::real::{containerds, divvy_runtime, eventually};
use super::went_well;
use crate::cli::divvy;

/// The configuration of a Kubernetes node, with two exceptions. The snapshotter is `native`, which needs no overlay file system.
/// Our own annotations are listed, because containerd passes only configured annotations to a runtime; `divvy configure --cdi`
/// lists the CDI annotations.
const V2: &str = "version = 2
root = \"@/root\"
state = \"@/state\"
[grpc]
  address = \"@/c.sock\"
[ttrpc]
  address = \"@/t.sock\"
[plugins.\"io.containerd.grpc.v1.cri\"]
  sandbox_image = \"divvy.test/image:1\"
  restrict_oom_score_adj = true
  [plugins.\"io.containerd.grpc.v1.cri\".containerd]
    snapshotter = \"native\"
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]
      runtime_type = \"io.containerd.runc.v2\"
      container_annotations = [\"nvidia.cdi.k8s.io/*\"]
      [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]
        BinaryName = \"runc\"
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]
      runtime_type = \"io.containerd.runc.v2\"
      [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun.options]
        BinaryName = \"crun\"
";
const V3: &str = "version = 3
root = '@/root'
state = '@/state'
[grpc]
  address = '@/c.sock'
[ttrpc]
  address = '@/t.sock'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'native'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = 'divvy.test/image:1'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  cdi_spec_dirs = ['@/cdi']
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    container_annotations = ['nvidia.cdi.k8s.io/*']
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = 'runc'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun.options]
      BinaryName = 'crun'
";

/// The script that starts the engine. crun refuses a machine with cgroup v2 mounted next to v1, so the script unmounts v2.
const START: &str =
    "mount -t tmpfs none /run || exit; ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified || exit
exec \"$0\" --config \"$1\"";

const IMAGE: &str = "divvy.test/image:1";

/// The script that makes an image from scratch in the format of `docker save`. The image contains a shell and a few programs of
/// this machine. Without a command it sleeps, as the container of a sandbox does.
const PACK: &str = r#"set -e
programs="/bin/sh /bin/ls /bin/cat /bin/sleep /usr/bin/tr"
for file in $programs $(ldd $programs | grep -o '/[^ :]*' | sort -u); do mkdir -p "image$(dirname "$file")"; cp -L "$file" "image$file"; done
mkdir -p image/tmp image/usr/lib packed
tar -C image -cf packed/layer.tar .
printf '{"architecture":"%s","os":"linux","config":{"Env":["PATH=/bin:/usr/bin"],"Entrypoint":["/bin/sleep","infinity"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$1" "$(sha256sum < packed/layer.tar | cut -d' ' -f1)" > packed/config.json
printf '[{"Config":"config.json","RepoTags":["divvy.test/image:1"],"Layers":["layer.tar"]}]' > packed/manifest.json
tar -C packed -cf image.tar manifest.json config.json layer.tar
"#;

/// The script with which a container prints its environment variables, device nodes, mounts, and the driver library.
const LOOK: &str =
    "tr '\\0' '\\n' < /proc/self/environ; ls -ln --time-style=+ /dev; cat /proc/self/mountinfo; cat /usr/lib/libcuda.so.1
for node in nvidia0 nvidiactl; do [ ! -e /dev/$node ] || ! echo x > /dev/$node || echo written to $node; done; true";

struct Engine {
    directory: tempfile::TempDir,
    program: PathBuf,
    version: String,
    running: Option<(Child, Cri)>,
    pods: Cell<u32>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        // The directories that runc would have removed; they are empty, because nothing of the engine is left.
        for controller in std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            let pods = controller.path().join(self.cgroup());
            for container in std::fs::read_dir(&pods).into_iter().flatten().flatten() {
                let _a_file_or_gone = std::fs::remove_dir(container.path());
            }
            let _not_there = std::fs::remove_dir(pods);
        }
        let _not_there = std::fs::remove_dir(Path::new("/sys/fs/cgroup").join(self.cgroup()));
    }
}

/// The ways in which a container requests a GPU.
#[derive(Clone, Copy, Default)]
struct Ask<'a> {
    privileged: bool,
    env: Option<(&'a str, &'a str)>,
    annotation: Option<(&'a str, &'a str)>,
    /// The path at which `/dev/null` is mounted.
    mount: Option<&'a str>,
    /// The name of a device in the CRI's list of CDI devices, which the kubelet uses.
    cdi: Option<&'a str>,
}

impl Engine {
    fn new(program: PathBuf) -> Engine {
        let version = Command::new(&program).arg("--version").output().expect("it runs");
        let engine = Engine {
            directory: tempfile::tempdir().expect("a directory"),
            version: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
            program,
            running: None,
            pods: Cell::new(0),
        };
        let text = if engine.new_enough_for_cdi() { V3 } else { V2 };
        std::fs::write(
            engine.at("config.toml"),
            text.replace('@', &engine.directory.path().display().to_string()),
        )
        .expect("written");
        let machine = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let packed = Command::new("sh")
            .args(["-c", PACK, "pack", machine])
            .current_dir(engine.directory.path())
            .status();
        assert!(packed.expect("sh").success());
        engine
    }

    /// Report whether the engine supports CDI without a setting that enables it.
    fn new_enough_for_cdi(&self) -> bool {
        divvy_engines::containerd::release(&self.version) >= Some((2, 0, 0))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn cgroup(&self) -> String {
        let name = self.directory.path().file_name().expect("a name");
        format!("divvy-test{}", name.display())
    }

    /// Return the PATH with the engine's own programs first.
    fn path(&self) -> std::ffi::OsString {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = self.program.parent().map(Path::to_owned);
        let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
        std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)).chain(system)).expect("a PATH")
    }

    fn start(&mut self) {
        self.stop();
        let log = std::fs::File::create(self.at("log")).expect("a log");
        let child = Command::new("setpriv")
            // In case the test is killed.
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["sh", "-c", START])
            .arg(&self.program)
            .arg(self.at("config.toml"))
            .env("PATH", self.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("twice"))
            .stderr(log)
            .spawn()
            .expect("setpriv runs");
        let mut running = Running(Some(child));
        let cri = eventually(&self.at("log"), || {
            assert!(matches!(running.child().try_wait(), Ok(None)), "it ended: {}", self.log());
            // The plugins are ready later than the socket.
            let cri = Cri::connect(&self.at("c.sock"))?;
            cri.status().ok().map(|_| cri)
        });
        self.running = Some((running.keep(), cri));
        let output = Command::new(self.program.with_file_name("ctr"))
            .arg("--address")
            .arg(self.at("c.sock"))
            .args(["--namespace", "k8s.io", "images", "import", "--no-unpack"])
            .arg(self.at("image.tar"))
            .output()
            .expect("ctr");
        went_well(&output);
        // The CRI plugin learns of images from the rest of containerd.
        eventually(&self.at("log"), || {
            self.cri().has_image(IMAGE).is_ok_and(|has| has).then_some(())
        });
    }

    fn stop(&mut self) {
        if let Some((child, _)) = self.running.take() {
            drop(Running(Some(child)));
        }
    }

    fn cri(&self) -> &Cri {
        &self.running.as_ref().expect("started").1
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.at("log")).unwrap_or_default()
    }

    /// Run a pod's only container until it has ended. Return its output, normalized so that equal containers print equal lines.
    fn run(&self, handler: &str, ask: Ask<'_>) -> anyhow::Result<Vec<String>> {
        let number = self.pods.get();
        self.pods.set(number + 1);
        let logs = self.at(&format!("logs/{number}"));
        let namespaces = Some(NamespaceOption { network: 2, pid: 1 });
        let sandbox_config = SandboxConfig {
            metadata: Some(SandboxMetadata {
                name: format!("pod-{number}"),
                uid: format!("uid-{number}"),
                namespace: "default".to_owned(),
            }),
            log_directory: logs.display().to_string(),
            linux: Some(LinuxSandbox {
                cgroup_parent: format!("/{}", self.cgroup()),
                security: Some(SandboxSecurity {
                    namespaces: namespaces.clone(),
                    privileged: ask.privileged,
                }),
            }),
        };
        let sandbox = self.cri().run_sandbox(&sandbox_config, handler)?;
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "main".to_owned() }),
            image: Some(Image { image: IMAGE.to_owned() }),
            command: ["/bin/sh", "-c", LOOK].map(str::to_owned).to_vec(),
            envs: ask
                .env
                .into_iter()
                .map(|(name, value)| Variable {
                    name: name.to_owned(),
                    value: value.to_owned(),
                })
                .collect(),
            mounts: ask
                .mount
                .into_iter()
                .map(|path| Mount {
                    container_path: path.to_owned(),
                    host_path: "/dev/null".to_owned(),
                })
                .collect(),
            annotations: HashMap::from_iter(ask.annotation.map(|(key, value)| (key.to_owned(), value.to_owned()))),
            log_path: "main.log".to_owned(),
            linux: Some(LinuxContainer {
                security: Some(ContainerSecurity {
                    privileged: ask.privileged,
                    namespaces,
                }),
            }),
            cdi_devices: ask.cdi.map(|name| CdiDevice { name: name.to_owned() }).into_iter().collect(),
        };
        let ran = self
            .cri()
            .start(&sandbox, &sandbox_config, &container)
            .and_then(|id| self.ended(&id))
            .map(|status| (status, std::fs::read_to_string(logs.join("main.log")).unwrap_or_default()));
        self.cri().remove_sandbox(&sandbox)?;
        let (status, log) = ran?;
        let ContainerStatus {
            exit_code,
            reason,
            message,
            ..
        } = status;
        anyhow::ensure!(exit_code == 0, "it ended with {exit_code}: {reason}: {message}: {log}");
        Ok(lines(&log))
    }

    fn ended(&self, id: &str) -> anyhow::Result<ContainerStatus> {
        eventually(&self.at("log"), || match self.cri().container(id) {
            Ok(status) if status.state != 2 => None,
            other => Some(other),
        })
    }
}

/// A process that is ended with all its children.
struct Running(Option<Child>);

impl Running {
    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("not kept yet")
    }

    fn keep(mut self) -> Child {
        self.0.take().expect("not kept yet")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // The first process of the namespace ends with `unshare`, and all others end with the first.
            let _ended_already = child.kill();
            let _ended_already = child.wait();
        }
    }
}

/// Normalize a log in the CRI format (`TIME STREAM TAG TEXT`): remove what differs between any two containers, such as ids,
/// numbers of mounts and snapshots, and the width of `ls` columns.
fn lines(log: &str) -> Vec<String> {
    let said = log.lines().filter_map(|line| {
        let (_time, rest) = line.split_once(' ')?;
        rest.strip_prefix("stdout F ")
    });
    let mut lines: Vec<String> = said
        .map(|line| {
            // A line of mountinfo starts with three numbers.
            let numbered = line.starts_with(|first: char| first.is_ascii_digit());
            let words = line.split_whitespace().skip(if numbered { 3 } else { 0 });
            let word = |word: &str| {
                let mut before = "";
                let parts = word.split('/').map(|part| {
                    let id = part.len() == 64 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
                    let part = if id || before == "snapshots" { "ID" } else { part };
                    before = part;
                    part
                });
                parts.collect::<Vec<&str>>().join("/")
            };
            words.map(word).collect::<Vec<String>>().join(" ")
        })
        .collect();
    lines.sort();
    lines
}

/// Return the lines of `more` that are not in `less`. Repeated lines are counted.
fn beyond(more: &[String], less: &[String]) -> Vec<String> {
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    for line in less {
        *left.entry(line).or_default() += 1;
    }
    let new = more.iter().filter(|line| match left.get_mut(line.as_str()) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    });
    new.cloned().collect()
}

/// Return the CDI spec of a GPU with these device nodes.
fn spec(library: &Path, gpu: &Path, control: &Path) -> Value {
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": gpu}]}}],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void", "OF_THE_SPEC=1"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": control}],
            "mounts": [{"hostPath": library, "containerPath": "/usr/lib/libcuda.so.1", "options": ["ro", "nosuid", "nodev", "bind"]}],
        },
    })
}

/// The output lines that a container has only because of the GPU of [`spec`], sorted. The line of the mount is not among them.
const GPU: [&str; 7] = [
    "NVIDIA_VISIBLE_DEVICES=void",
    "OF_THE_SPEC=1",
    "crw-rw-rw- 1 0 0 1, 3 nvidia0",
    "crw-rw-rw- 1 0 0 1, 5 nvidiactl",
    "this is libcuda",
    "written to nvidia0",
    "written to nvidiactl",
];

/// Check that the additional output lines of the container are those of the GPU and of its mount.
fn has_the_gpu_and_nothing_else(with: &[String], without: &[String], what: &str) {
    let (mounts, other): (Vec<String>, Vec<String>) = beyond(with, without).into_iter().partition(|line| line.contains(" - "));
    assert_eq!(other, GPU, "{what}");
    let [mount] = mounts.as_slice() else {
        panic!("{what}: {mounts:#?}");
    };
    assert!(
        mount.contains("/driver/libcuda.so.1 /usr/lib/libcuda.so.1 ro,nosuid,nodev"),
        "{what}: {mount}"
    );
    assert_eq!(beyond(without, with), Vec::<String>::new(), "{what}: it lost something");
}

/// Make the wrapper that containerd calls. It sets environment variables, because containerd does not pass its own on.
fn write_runtime(engine: &Engine) {
    let script = format!(
        "#!/bin/sh\nNVIDIA_CTK_CONFIG_FILE_PATH={} exec {} \"$@\"\n",
        engine.at("settings.toml").display(),
        divvy_runtime().display()
    );
    for directory in ["cdi", "driver"] {
        std::fs::create_dir(engine.at(directory)).expect("made");
    }
    let library = engine.at("driver/libcuda.so.1");
    std::fs::write(&library, "this is libcuda\n").expect("written");
    // The same devices as /dev/null and /dev/zero. The modes of those two are everyone's.
    for (name, minor) in [("null", "3"), ("zero", "5")] {
        let made = Command::new("mknod")
            .args(["-m", "666"])
            .arg(engine.at(name))
            .args(["c", "1", minor])
            .status();
        assert!(made.expect("mknod").success());
    }
    let spec = spec(&library, &engine.at("null"), &engine.at("zero"));
    std::fs::write(engine.at("cdi/nvidia.json"), spec.to_string()).expect("written");
    std::fs::write(engine.at("runtime"), script).expect("written");
    std::fs::set_permissions(engine.at("runtime"), std::fs::Permissions::from_mode(0o755)).expect("its mode");
}

/// Write NVIDIA's settings file for this OCI runtime and this mode. `first` is the beginning of the file, and `cdi` the end.
fn settings(engine: &Engine, low_level: &str, first: &str, mode: &str, cdi: &str) {
    let text = format!(
        "{first}\n[nvidia-container-runtime]\nmode = {mode:?}\nruntimes = [{low_level:?}]\n[nvidia-container-runtime.modes.cdi]\n\
         spec-dirs = [{:?}]\n{cdi}\n",
        engine.at("cdi")
    );
    std::fs::write(engine.at("settings.toml"), text).expect("written");
}

const ACCEPTED: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = true";
const ASKED: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "nvidia.com/gpu=0");

#[test]
fn a_containerd_pod_gets_its_gpu_in_every_way() {
    if !divvy_skip::root("start containerd") {
        return;
    }
    for program in containerds() {
        let mut engine = Engine::new(program);
        // The state without GPUs: all other containers are compared with the container of this state.
        engine.start();
        let without: Vec<(&str, Vec<String>)> = ["runc", "crun"]
            .into_iter()
            .filter_map(|low_level| match engine.run(low_level, Ask::default()) {
                Ok(lines) => Some((low_level, lines)),
                Err(said) => {
                    divvy_skip::skipped(format_args!("{} runs no pod with {low_level} here: {said}", engine.version));
                    None
                }
            })
            .collect();
        configure(&engine);
        engine.start();
        says_that_it_has_the_runtime(&engine);
        for (low_level, without) in &without {
            pods(&engine, low_level, without);
        }
    }
}

fn configure(engine: &Engine) {
    write_runtime(engine);
    let text = |name: &str| engine.at(name).display().to_string();
    let (config, runtime) = (text("config.toml"), text("runtime"));
    let mut args = vec![
        "configure",
        "containerd",
        "--config",
        &config,
        "--engine-version",
        &engine.version,
    ];
    args.extend(["--runtime-path", &runtime, "--cgroup-driver", "cgroupfs", "--cdi"]);
    went_well(&divvy(&args, &[]));
}

fn says_that_it_has_the_runtime(engine: &Engine) {
    let status = engine.cri().status().expect("it answers");
    let ready = status.status.expect("conditions").conditions;
    assert!(
        ready
            .iter()
            .any(|condition| condition.kind == "RuntimeReady" && condition.status),
        "{ready:?}"
    );
    let config: Value = serde_json::from_str(&status.info["config"]).expect("JSON");
    let runtimes = &config["containerd"]["runtimes"];
    assert_eq!(
        runtimes["nvidia"]["options"]["BinaryName"].as_str().map(Path::new),
        Some(engine.at("runtime").as_path()),
        "{}: {runtimes}",
        engine.version
    );
    for key in ["runtimeType", "snapshotter"] {
        assert_eq!(runtimes["nvidia"].get(key), runtimes["runc"].get(key), "{key}");
    }
    // With runc's annotations, and the CDI annotations, which containerd does not pass to a runtime by default.
    assert_eq!(
        runtimes["nvidia"]["ContainerAnnotations"],
        json!(["nvidia.cdi.k8s.io/*", "cdi.k8s.io/*"])
    );
}

/// Check the configured engine with this OCI runtime. `without` is the output that a container without a GPU had before the
/// configuration.
fn pods(engine: &Engine, low_level: &str, without: &[String]) {
    let run = |handler: &str, ask: Ask<'_>, what: &str| {
        let ran = engine.run(handler, ask);
        ran.unwrap_or_else(|said| panic!("{}, {low_level}, {what}: {said}\n{}", engine.version, engine.log()))
    };
    let what = |what: &str| format!("{}, {low_level}: {what}", engine.version);
    let plain = Ask::default();
    let annotated = |key: &'static str| Ask {
        annotation: Some((key, "nvidia.com/gpu=0")),
        ..plain
    };
    let by_variable = Ask {
        env: Some(ASKED),
        ..plain
    };

    settings(engine, low_level, "", "auto", "");
    assert_eq!(
        run(low_level, plain, "plain"),
        without,
        "{}",
        what("what is there already stays as it is")
    );
    assert_eq!(
        run("nvidia", plain, "nothing"),
        without,
        "{}",
        what("who asks for nothing gets nothing")
    );
    let refused = run("nvidia", by_variable, "the variable alone");
    assert_eq!(
        (beyond(&refused, without), beyond(without, &refused)),
        (vec![format!("{}={}", ASKED.0, ASKED.1)], Vec::new()),
        "{}",
        what("the variable alone gives nothing")
    );

    // If containerd also does CDI, both apply the spec, and this does no harm.
    let ours = run("nvidia", annotated("cdi.k8s.io/test"), "annotation");
    has_the_gpu_and_nothing_else(&ours, without, &what("by annotation"));
    settings(
        engine,
        low_level,
        "",
        "auto",
        "annotation-prefixes = [\"nvidia.cdi.k8s.io/\"]",
    );
    let alone = run("nvidia", annotated("nvidia.cdi.k8s.io/test"), "our annotation");
    assert_eq!(alone, ours, "{}", what("by an annotation that the engine does not know"));
    settings(engine, low_level, ACCEPTED, "cdi", "");
    assert_eq!(
        run("nvidia", by_variable, "variable"),
        ours,
        "{}",
        what("by the variable, where that is allowed")
    );

    settings(
        engine,
        low_level,
        "accept-nvidia-visible-devices-as-volume-mounts = true",
        "cdi",
        "",
    );
    let path = "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0";
    let mounted = run(
        "nvidia",
        Ask {
            mount: Some(path),
            ..plain
        },
        "mount",
    );
    let more = beyond(&mounted, &ours);
    assert!(
        matches!(more.as_slice(), [mount] if mount.contains(path)) && beyond(&ours, &mounted).is_empty(),
        "{}: {more:#?}",
        what("by a mount, which is there itself, too")
    );

    // The node's agent has written the grant's spec, and the pod gets exactly that. The container's own request does not count.
    settings(engine, low_level, "", "divvy", "");
    let pod = engine.pods.get();
    let name = "0123456789abcdef0123456789abcdef";
    let grant = engine.at("cdi").join(divvy_cdi::file_name(name));
    std::fs::write(&grant, a_grant(engine, name, &format!("uid-{pod}"))).expect("written");
    assert_eq!(
        run("nvidia", by_variable, "grant"),
        ours,
        "{}",
        what("by the grant of its pod")
    );
    assert_eq!(
        run("nvidia", by_variable, "no grant"),
        refused,
        "{}",
        what("another pod's grant is not its own")
    );
    std::fs::remove_file(grant).expect("removed");

    settings(engine, low_level, "", "cdi", "");
    if engine.new_enough_for_cdi() {
        let by_kubelet = Ask {
            cdi: Some("nvidia.com/gpu=0"),
            ..plain
        };
        for handler in [low_level, "nvidia"] {
            assert_eq!(run(handler, by_kubelet, "CDI"), ours, "{}", what("put in by containerd"));
        }
    }
    let privileged = Ask {
        privileged: true,
        ..plain
    };
    let mut before = run(low_level, privileged, "privileged");
    // A machine with a GPU may have these itself. Those of the spec take their place.
    before.retain(|line| !["nvidia0", "nvidiactl"].iter().any(|node| line.ends_with(node)));
    let after = run(
        "nvidia",
        Ask {
            env: by_variable.env,
            ..privileged
        },
        "privileged, variable",
    );
    has_the_gpu_and_nothing_else(&after, &before, &what("the variable of a privileged container"));

    let wrong = Ask {
        annotation: Some(("cdi.k8s.io/test", "nvidia.com/gpu=7")),
        ..plain
    };
    let said = engine.run("nvidia", wrong).expect_err("there is no such device").to_string();
    assert!(said.contains("unresolvable CDI devices nvidia.com/gpu=7"), "{}", what(&said));
}

fn a_grant(engine: &Engine, name: &str, uid: &str) -> String {
    let record = json!({
        "v": 1, "namespace": "default", "name": "pod", "uid": uid, "container": "main", "cdi": name, "unitMiB": 1024,
        "gpus": [], "containerGpus": [], "bootId": "b",
    });
    let base = std::fs::read_to_string(engine.at("cdi/nvidia.json")).expect("written");
    grant_spec(&GrantSpec {
        name,
        owner: &record.to_string(),
        env: &[("NVIDIA_VISIBLE_DEVICES", "void".to_owned())],
        gpus: &["0"],
        libraries: Some("nvidia.com/gpu"),
        base: &[Spec::parse(&base).expect("a spec")],
        shadow: None,
        ..GrantSpec::default()
    })
}
