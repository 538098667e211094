//! Installed engines, started on private directories with the configuration that was written for them: containerd from the PATH
//! and from `~/.cache/divvy-cluster`, and dockerd from the PATH. An engine that is not installed is skipped.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) use divvy_shadow_testkit::existing as built;

use super::{V2, went_well};
use crate::cli::{divvy, stderr, stdout};

/// Return the programs with this name in the PATH and in the cache of the end-to-end cluster.
pub(super) fn programs(name: &str) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found: Vec<PathBuf> = std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .take(64)
        .collect();
    found.retain(|program| program.is_file());
    found.truncate(1);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .filter(|cache| !cache.is_empty())
        .map(PathBuf::from);
    let cache = cache.or(home).map(|cache| cache.join("divvy-cluster"));
    let built = cache
        .and_then(|cache| std::fs::read_dir(cache).ok())
        .into_iter()
        .flatten()
        .flatten();
    found.extend(built.map(|entry| entry.path().join(name)).filter(|program| program.is_file()));
    found
}

/// Return every containerd of this machine. If there is none, record the skip and return an empty list.
pub(super) fn containerds() -> Vec<PathBuf> {
    let all = programs("containerd");
    if all.is_empty() {
        divvy_skip::skipped("there is no containerd in the PATH and none in ~/.cache/divvy-cluster");
    }
    all
}

/// A process that ends with the test, however the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Send SIGTERM, so that the process ends its own children.
        if let Ok(pid) = i32::try_from(self.0.id())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            let _ended_already = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ended_already = self.0.kill();
        let _ended_already = self.0.wait();
    }
}

/// Wait until `what` returns a value. On a timeout, panic with the engine's log.
pub(super) fn eventually<T>(log: &Path, mut what: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = what() {
            return answer;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "no answer: {}",
            std::fs::read_to_string(log).unwrap_or_default()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn dump(program: &Path, config: &str) -> toml::Table {
    let output = Command::new(program)
        .args(["--config", config, "config", "dump"])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", stderr(&output));
    toml::from_str(&String::from_utf8(output.stdout).expect("text")).expect("TOML")
}

/// Return the configuration of containerd's CRI plugin as containerd dumps it, for any version.
fn cri(dumped: &toml::Table) -> &toml::Table {
    let plugins = dumped["plugins"].as_table().expect("plugins");
    let section = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
        .into_iter()
        .find_map(|key| plugins.get(key).filter(|section| section.get("containerd").is_some()));
    section.and_then(toml::Value::as_table).expect("the CRI plugin's section")
}

const V1: &str = "[plugins.cri]\n  sandbox_image = \"registry.example/pause:1\"\n  [plugins.cri.containerd.runtimes.runc]\n    \
                  runtime_type = \"io.containerd.runc.v2\"\n    [plugins.cri.containerd.runtimes.runc.options]\n      SystemdCgroup = true\n";

#[test]
fn containerd_says_itself_that_it_has_the_runtime() {
    for program in containerds() {
        let version = Command::new(&program).arg("--version").output().expect("it runs");
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let new = divvy_engines::containerd::release(&version) >= Some((2, 0, 0));
        let pinned = format!("{V2}[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"registry.example/pause:1\"\n");
        let v3 = "version = 3\n[plugins.'io.containerd.cri.v1.images'.pinned_images]\n  sandbox = \"registry.example/pause:1\"\n";
        for (text, pause) in [
            (Some(V1), true),
            (Some(&pinned), true),
            (Some(""), false),
            (None, false),
            (Some(v3), true),
        ] {
            if text == Some(v3) && !new {
                continue;
            }
            for drop_in in [None, Some("")] {
                let directory = tempfile::tempdir().expect("a directory");
                let config = directory.path().join("config.toml").display().to_string();
                if let Some(text) = text {
                    std::fs::write(&config, text).expect("written");
                }
                let mut args = vec!["configure", "containerd", "--config", &config, "--engine-version", &version];
                args.extend([
                    "--set-default",
                    "--cdi",
                    "--cgroup-driver",
                    "systemd",
                    "--runtime-path",
                    "/opt/divvy-runtime",
                ]);
                args.extend(drop_in.iter().flat_map(|drop_in| ["--drop-in", drop_in]));
                went_well(&divvy(&args, &[]));
                let dumped = dump(&program, &config);
                let said = format!("{version}{text:?} {drop_in:?}: {dumped}");
                let of_containerd = cri(&dumped)["containerd"].as_table().expect("a table");
                let runtime = |name: &str| {
                    of_containerd["runtimes"]
                        .get(name)
                        .unwrap_or_else(|| panic!("no {name}: {said}"))
                };
                assert_eq!(of_containerd["default_runtime_name"].as_str(), Some("nvidia"), "{said}");
                assert_eq!(
                    runtime("nvidia")["options"]["BinaryName"].as_str(),
                    Some("/opt/divvy-runtime"),
                    "{said}"
                );
                for name in ["nvidia", "runc"] {
                    assert_eq!(
                        runtime(name)["options"]["SystemdCgroup"].as_bool(),
                        Some(true),
                        "{name}: {said}"
                    );
                    assert_eq!(
                        runtime(name)["runtime_type"].as_str(),
                        Some("io.containerd.runc.v2"),
                        "{name}: {said}"
                    );
                }
                if new {
                    assert_eq!(cri(&dumped)["enable_cdi"].as_bool(), Some(true), "{said}");
                }
                let kept = dumped.to_string().contains("registry.example/pause:1");
                assert_eq!(kept, pause, "{said}");
                went_well(&divvy(&["configure", "containerd", "--config", &config, "--undo"], &[]));
                assert_eq!(std::fs::read_to_string(&config).ok().as_deref(), text);
            }
        }
    }
}

/// Every installed containerd dumps the runtimes that Divvy's own reader finds, or refuses what that reader refuses.
#[test]
fn containerd_reads_files_of_several_versions_as_divvy_does() {
    let old = |name: &str| {
        format!("[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.{name}]\nruntime_type = 'io.containerd.runc.v2'\n")
    };
    let new = |name: &str| {
        format!("[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{name}]\nruntime_type = 'io.containerd.runc.v2'\n")
    };
    let first = |name: &str| format!("[plugins.cri.containerd.runtimes.{name}]\nruntime_type = 'io.containerd.runc.v2'\n");
    for program in containerds() {
        let version = Command::new(&program).arg("--version").output().expect("it runs");
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let release = divvy_engines::containerd::release(&version).expect("a version");
        for (main, imported) in [
            (format!("version = 2\n{}", old("a")), format!("version = 2\n{}", old("b"))),
            (format!("version = 2\n{}", old("a")), format!("version = 2\n{}", new("b"))),
            (format!("version = 2\n{}", new("a")), "version = 2\n".to_owned()),
            (format!("version = 2\n{}{}", old("a"), new("b")), "version = 2\n".to_owned()),
            (format!("version = 2\n{}", old("a")), format!("version = 3\n{}", new("b"))),
            (format!("version = 3\n{}", new("a")), format!("version = 2\n{}", old("b"))),
            (format!("version = 2\n{}", old("a")), format!("version = 4\n{}", new("b"))),
            (first("a"), "version = 2\n".to_owned()),
            (format!("version = 5\n{}", new("a")), "version = 2\n".to_owned()),
        ] {
            let directory = tempfile::tempdir().expect("a directory");
            let at = |name: &str| directory.path().join(name).display().to_string();
            let main = format!("imports = [{:?}]\n{main}", at("imported.toml"));
            std::fs::write(at("config.toml"), &main).expect("written");
            std::fs::write(at("imported.toml"), &imported).expect("written");
            let files =
                std::collections::BTreeMap::from([(at("config.toml"), main.clone()), (at("imported.toml"), imported.clone())]);
            let read = divvy_engines::containerd::effective(&files, &at("config.toml"), release);
            let output = Command::new(&program)
                .args(["--config", &at("config.toml"), "config", "dump"])
                .output()
                .expect("it runs");
            let said = format!("{version}{main}{imported}{}", stderr(&output));
            assert_eq!(read.is_ok(), output.status.success(), "{said}{read:?}");
            let Ok(read) = read else { continue };
            let dumped: toml::Table = toml::from_str(&stdout(&output)).expect("TOML");
            let runtimes = cri(&dumped)["containerd"]["runtimes"].as_table().expect("a table");
            for name in ["a", "b"] {
                assert_eq!(
                    read.runtimes.contains_key(name),
                    runtimes.contains_key(name),
                    "{name}: {said}"
                );
            }
        }
    }
}

#[test]
fn containerd_s_cri_plugin_starts_with_the_runtime() {
    if !divvy_skip::root("start containerd") {
        return;
    }
    for program in containerds() {
        let version = Command::new(&program).arg("--version").output().expect("it runs");
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name).display().to_string();
        let text = format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\n[grpc]\n  address = \"{}\"\n[ttrpc]\n  address = \"{}\"\n",
            at("root"),
            at("state"),
            at("c.sock"),
            at("t.sock")
        );
        std::fs::write(at("config.toml"), text).expect("written");
        // Without the default runtime: in this case runc's table would be missing.
        let args = [
            "configure",
            "containerd",
            "--config",
            &at("config.toml"),
            "--engine-version",
            &version,
        ];
        went_well(&divvy(&args, &[]));
        let log = std::fs::File::create(at("log")).expect("a log");
        let child = Command::new(&program)
            .args(["--config", &at("config.toml")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("twice"))
            .stderr(log)
            .spawn()
            .expect("it starts");
        let _running = Running(child);
        let plugins = eventually(Path::new(&at("log")), || {
            let output = Command::new(program.with_file_name("ctr"))
                .args(["--address", &at("c.sock"), "--timeout", "5s", "plugins", "ls"])
                .output()
                .ok()?;
            output
                .status
                .success()
                .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        });
        let of_cri = plugins
            .lines()
            .find(|line| line.split_whitespace().nth(1) == Some("cri"))
            .expect("a CRI plugin");
        assert!(of_cri.trim_end().ends_with("ok"), "{version}{of_cri}");
    }
}

#[test]
fn dockerd_has_the_runtime_and_gives_containers_their_gpus() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(
        at("daemon.json"),
        "{\n    \"log-level\": \"warn\",\n    \"features\": {\"buildkit\": true}\n}\n",
    )
    .expect("written");
    let args = [
        "configure",
        "docker",
        "--config",
        &at("daemon.json"),
        "--set-default",
        "--cdi",
        "--runtime-path",
        &at("runtime"),
    ];
    went_well(&divvy(&args, &[]));
    runtime_with_a_gpu(directory.path());
    let Some(docker) = Docker::start(directory.path(), &[]) else {
        return;
    };
    let answer = docker.info();
    let body = answer.split_once("\r\n\r\n").expect("a body").1;
    let info: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
    assert_eq!(info["Runtimes"]["nvidia"]["path"], at("runtime"));
    assert_eq!(info["DefaultRuntime"], "nvidia");
    containers_get_what_they_ask_for(&docker);
}

/// A private dockerd below a directory, configured by its `daemon.json`. It ends with the test.
pub(super) struct Docker {
    directory: PathBuf,
    _running: Running,
}

impl Docker {
    /// Start dockerd. Return `None` and record the skip if it does not start.
    pub(super) fn start(directory: &Path, variables: &[(&str, &str)]) -> Option<Docker> {
        if !divvy_skip::root("start dockerd") {
            return None;
        }
        let Some(program) = programs("dockerd").into_iter().next() else {
            divvy_skip::skipped("dockerd is not in the PATH (Debian: docker.io)");
            return None;
        };
        let at = |name: &str| directory.join(name).display().to_string();
        let log = std::fs::File::create(at("log")).expect("a log");
        let child = Command::new(program)
            .args([
                "--config-file",
                &at("daemon.json"),
                "--data-root",
                &at("data"),
                "--exec-root",
                &at("exec"),
            ])
            .args([
                "--pidfile",
                &at("pid"),
                "--host",
                &format!("unix://{}", at("d.sock")),
                "--storage-driver",
                "vfs",
            ])
            .args(["--bridge", "none", "--iptables=false", "--ip6tables=false"])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("twice"))
            .stderr(log)
            .spawn()
            .expect("it starts");
        let mut docker = Docker {
            directory: directory.to_owned(),
            _running: Running(child),
        };
        let ended = eventually(Path::new(&at("log")), || match docker._running.0.try_wait() {
            Ok(Some(_)) => Some(true),
            _ => docker.asked().map(|_| false),
        });
        if ended {
            let log = std::fs::read_to_string(at("log")).unwrap_or_default();
            // Probably the test runs in a container without permission for mounts and networks. A refused daemon.json would give the error below.
            assert!(!log.contains("unable to configure the Docker daemon"), "{log}");
            let last = log.lines().last().unwrap_or_default();
            divvy_skip::skipped(format_args!("dockerd does not start here: {last}"));
            return None;
        }
        Some(docker)
    }

    pub(super) fn at(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn asked(&self) -> Option<String> {
        let mut socket = UnixStream::connect(self.at("d.sock")).ok()?;
        socket.write_all(b"GET /info HTTP/1.0\r\nHost: docker\r\n\r\n").ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.0 200").then_some(answer)
    }

    fn info(&self) -> String {
        self.asked().expect("it answers")
    }

    /// Make an image from scratch with this machine's shell and `ls`. Return false and record the skip if no container of this
    /// image runs.
    pub(super) fn image(&self) -> bool {
        if programs("docker").is_empty() {
            divvy_skip::skipped("no container was run: docker is not in the PATH (Debian: docker.io)");
            return false;
        }
        let copy = "set -e; mkdir -p image; for file in /bin/sh /bin/ls $(ldd /bin/sh /bin/ls | grep -o '/[^ :]*' | sort -u); do cp -L --parents $file image; done; \
                    tar -C image -cf image.tar .";
        let copied = Command::new("sh")
            .args(["-c", copy])
            .current_dir(&self.directory)
            .status()
            .expect("it runs");
        assert!(copied.success());
        went_well(&self.docker(&["import", &self.at("image.tar"), "divvy-test"]));
        let plain = self.run(&[], "true");
        if !plain.status.success() {
            divvy_skip::skipped(format_args!("docker runs no container here: {}", stderr(&plain)));
        }
        plain.status.success()
    }

    fn docker(&self, args: &[&str]) -> Output {
        let docker = programs("docker").into_iter().next().expect("it was looked for");
        let host = format!("unix://{}", self.at("d.sock"));
        Command::new(docker)
            .args(["--host", &host])
            .args(args)
            .output()
            .expect("it runs")
    }

    /// Run `docker run` with these flags.
    pub(super) fn run(&self, flags: &[&str], script: &str) -> Output {
        let mut args = vec!["run", "--rm", "--network", "none", "--ulimit", "nofile=512:512"];
        args.extend(flags);
        args.extend(["divvy-test", "/bin/sh", "-c", script]);
        self.docker(&args)
    }
}

pub(super) fn divvy_runtime() -> PathBuf {
    built("divvy-runtime", "divvy-runtime")
}

/// Make a program that runs `divvy-runtime` with a GPU that is `/dev/null`.
fn runtime_with_a_gpu(directory: &Path) {
    let at = |name: &str| directory.join(name).display().to_string();
    let program = divvy_runtime();
    let spec = r#"{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits":
        {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]}}], "containerEdits": {"env": ["OF_THE_SPEC=1"]}}"#;
    let settings = format!(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-runtime]\nmode = \"cdi\"\n\
         [nvidia-container-runtime.modes.cdi]\nspec-dirs = [\"{}\"]\n",
        at("cdi")
    );
    let script = format!(
        "#!/bin/sh\nNVIDIA_CTK_CONFIG_FILE_PATH={} exec {} \"$@\"\n",
        at("config.toml"),
        program.display()
    );
    std::fs::create_dir(at("cdi")).expect("made");
    for (name, text) in [("cdi/nvidia.json", spec), ("config.toml", &settings), ("runtime", &script)] {
        std::fs::write(at(name), text).expect("written");
    }
    std::fs::set_permissions(at("runtime"), std::fs::Permissions::from_mode(0o755)).expect("its mode");
}

fn containers_get_what_they_ask_for(docker: &Docker) {
    if !docker.image() {
        return;
    }
    let run = |flags: &[&str]| docker.run(flags, "echo of the spec: $OF_THE_SPEC; ls /dev");
    let plain = run(&[]);
    let devices = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().map(str::to_owned).collect::<Vec<String>>()
    };
    let gpu = run(&["--env", "NVIDIA_VISIBLE_DEVICES=0"]);
    went_well(&gpu);
    let mut expected = devices(&plain);
    assert_eq!(expected[0], "of the spec:");
    expected[0].push_str(" 1");
    expected.push("nvidia0".to_owned());
    expected.sort();
    let mut found = devices(&gpu);
    found.sort();
    assert_eq!(found, expected, "exactly what was asked for");
    let wrong = run(&["--env", "NVIDIA_VISIBLE_DEVICES=7"]);
    assert!(!wrong.status.success());
    assert!(stderr(&wrong).contains("nvidia.com/gpu=7"), "{}", stderr(&wrong));
}
