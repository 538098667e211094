//! `divvy configure` on copies of machines (each a directory), and on real engines, which report their effective configuration.

mod beside;
mod cri;
mod gpus;
mod pods;
mod real;

pub(crate) use real::built;

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};

use divvy_oci::runtime::request::{DeviceRequest, RequestingContainer, WantedDevices};
use divvy_oci::runtime::{edit, settings};

use crate::cli::{divvy, stderr, stdout};

struct Machine(tempfile::TempDir);

impl Machine {
    fn of(files: &[(&str, &str)]) -> Machine {
        let machine = Machine(tempfile::tempdir().expect("a directory"));
        for (path, text) in files {
            let at = machine.at(path);
            std::fs::create_dir_all(at.parent().expect("a directory")).expect("made");
            std::fs::write(at, text).expect("written");
        }
        machine
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn configure(&self, args: &[&str]) -> Output {
        let root = self.0.path().display().to_string();
        divvy(&[&["configure"], args, &["--root", &root]].concat(), &[])
    }

    /// Return all files, each with its path, text, and mode.
    fn all(&self) -> Vec<(PathBuf, String, u32)> {
        let mut found = Vec::new();
        let mut directories = vec![self.0.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("a directory") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let mode = std::fs::symlink_metadata(&path).expect("there").permissions().mode();
                found.push((path, text, mode));
            }
        }
        found.sort();
        found
    }
}

const CONTAINERD: &str = "/etc/containerd/config.toml";
const V2: &str = "version = 2\n# mine\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n";
const DOCKER: &str = "/etc/docker/daemon.json";

fn went_well(output: &Output) {
    assert!(output.status.success(), "{}", stderr(output));
}

#[test]
fn every_engine_is_configured_once_and_given_back_to_the_byte() {
    for (engine, file, text) in [
        ("docker", DOCKER, "{\"debug\": true}"),
        ("containerd", CONTAINERD, V2),
        ("crio", "/etc/crio/crio.conf", "[crio.runtime]\n# c\n"),
        ("k3s", "/etc/none", ""),
        ("rke2", "/etc/none", ""),
        ("k0s", "/etc/k0s/containerd.toml", "version = 3\n"),
        (
            "microk8s",
            "/var/snap/microk8s/current/args/containerd-template.toml",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n",
        ),
    ] {
        let machine = Machine::of(&[(file, text)]);
        std::fs::set_permissions(machine.at(file), std::fs::Permissions::from_mode(0o640)).expect("set");
        let before = machine.all();
        let shown = machine.configure(&[engine, "--dry-run"]);
        went_well(&shown);
        assert!(stdout(&shown).contains("+++ "), "{engine}: no diff");
        assert_eq!(machine.all(), before, "{engine}: --dry-run writes");
        went_well(&machine.configure(&[engine]));
        let after = machine.all();
        assert_ne!(after, before, "{engine}");
        let again = machine.configure(&[engine]);
        assert!(stderr(&again).contains("already configured"), "{engine}: {}", stderr(&again));
        assert_eq!(machine.all(), after, "{engine}");
        went_well(&machine.configure(&[engine, "--undo"]));
        assert_eq!(machine.all(), before, "{engine}");
        assert!(
            stderr(&machine.configure(&[engine, "--undo"])).contains("nothing to remove"),
            "{engine}"
        );
    }
}

#[test]
fn the_command_in_a_written_file_removes_what_was_written() {
    let rancher = "/var/lib/rancher/k3s/agent/etc/containerd";
    let base = format!("{rancher}/config.toml");
    let imports = format!("version = 3\nimports = [\"{rancher}/config-v3.toml.d/*.toml\"]\n");
    for (args, file, text) in [
        (&["containerd"][..], CONTAINERD, V2),
        (
            &["containerd", "--config", "/opt/containerd.toml"],
            "/opt/containerd.toml",
            V2,
        ),
        (&["crio"], "/etc/crio/crio.conf", "[crio.runtime]\n"),
        (&["k3s"], base.as_str(), imports.as_str()),
        (&["k3s"], base.as_str(), "version = 3\n"),
        (&["rke2"], "/etc/none", ""),
        (&["k0s"], "/etc/k0s/containerd.toml", "version = 3\n"),
        (
            &["k0s", "--drop-in", "/etc/k0s/containerd.d/gpu.toml"],
            "/etc/k0s/containerd.toml",
            "version = 3\n",
        ),
    ] {
        let machine = Machine::of(&[(file, text)]);
        let before = machine.all();
        went_well(&machine.configure(args));
        let commands: Vec<String> = machine
            .all()
            .iter()
            .filter(|(path, ..)| !path.display().to_string().ends_with(".divvy-undo"))
            .flat_map(|(_, text, _)| {
                text.split('`')
                    .filter(|part| part.ends_with("--undo"))
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect();
        assert!(!commands.is_empty(), "{args:?}: no file names a command");
        let words: Vec<&str> = commands[0].split(' ').collect();
        assert_eq!(words[..2], ["divvy", "configure"], "{words:?}");
        went_well(&machine.configure(&words[2..]));
        assert_eq!(machine.all(), before, "{args:?}: {}", commands[0]);
    }
}

/// containerd 2.0 to 2.2 do not use the older section next to a newer one, and 1.7 reads no file of version 3.
#[test]
fn success_means_that_the_release_uses_what_was_written() {
    let v3 = "version = 3\n";
    let newer = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.x]\n";
    let both = format!("{V2}{newer}");
    for (release, text, refused) in [
        ("1.7.27", V2, None),
        ("1.7.27", v3, Some("containerd 1.7 reads versions up to 2")),
        ("2.2.0", v3, None),
        ("2.2.0", V2, None),
        ("2.2.0", both.as_str(), Some("which containerd 2.2 does not use")),
        ("2.3.7", both.as_str(), None),
    ] {
        let machine = Machine::of(&[(CONTAINERD, text)]);
        let before = machine.all();
        let output = machine.configure(&["containerd", "--engine-version", release]);
        match refused {
            None => went_well(&output),
            Some(words) => {
                assert!(!output.status.success(), "{release} {text}");
                assert!(stderr(&output).contains(words), "{release}: {}", stderr(&output));
                assert_eq!(machine.all(), before);
            }
        }
    }
}

/// containerd itself says what it will use. The files get their former contents back if it does not have the runtime, or does not start.
#[test]
fn files_are_restored_if_containerd_lacks_the_runtime() {
    for (dump, error) in [
        (
            "cat \"$2\" /dev/null $(dirname \"$2\")/conf.d/*.toml | grep -v -e ^imports -e ^version | sed '1i version = 2'",
            None,
        ),
        ("echo 'version = 2'", Some("the runtime cannot be set")),
        (
            "echo 'containerd: a reason' >&2; exit 1",
            Some("containerd would not start with the runtime"),
        ),
    ] {
        let machine = Machine::of(&[("/c/config.toml", "version = 2\n")]);
        let program = machine.at("/containerd");
        std::fs::write(
            &program,
            format!("#!/bin/sh\nif [ \"$1\" = --version ]; then echo containerd x v2.1.0; exit; fi\n{dump}\n"),
        )
        .expect("written");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("set");
        let before = machine.all();
        let (config, program) = (
            machine.at("/c/config.toml").display().to_string(),
            program.display().to_string(),
        );
        let output = divvy(
            &["configure", "containerd", "--config", &config, "--executable-path", &program],
            &[],
        );
        match error {
            None => went_well(&output),
            Some(error) => {
                assert!(stderr(&output).contains(error), "{}", stderr(&output));
                assert_eq!(machine.all(), before, "{dump}");
            }
        }
    }
}

#[test]
fn the_file_of_the_containerd_that_runs_pods_is_configured() {
    let machine = Machine::of(&[
        (CONTAINERD, V2),
        ("/etc/cri/containerd.toml", V2),
        ("/proc/900/comm", "containerd\n"),
        ("/proc/900/cmdline", "/bin/containerd\0--config\0/etc/cri/containerd.toml\0"),
    ]);
    went_well(&machine.configure(&["containerd"]));
    let written = std::fs::read_to_string(machine.at("/etc/cri/conf.d/zz-divvy.toml")).expect("written");
    assert!(written.contains("runtimes.nvidia"), "{written}");
    assert_eq!(std::fs::read_to_string(machine.at(CONTAINERD)).ok().as_deref(), Some(V2));
}

#[test]
fn what_may_be_secret_stays_so() {
    let machine = Machine::of(&[(CONTAINERD, V2)]);
    std::fs::set_permissions(machine.at(CONTAINERD), std::fs::Permissions::from_mode(0o600)).expect("set");
    went_well(&machine.configure(&["containerd"]));
    for (path, _, mode) in machine.all() {
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
    }
}

#[test]
fn a_link_stays_a_link() {
    let machine = Machine::of(&[("/srv/docker.json", "{}"), ("/etc/docker/x", "")]);
    std::os::unix::fs::symlink("/srv/docker.json", machine.at(DOCKER)).expect("linked");
    went_well(&machine.configure(&["docker"]));
    assert!(machine.at(DOCKER).is_symlink());
    assert!(machine.read("/srv/docker.json").contains("nvidia"));
}

#[test]
fn what_is_wrong_is_refused_and_all_stays_as_it_was() {
    for (engine, file, text, says) in [
        ("docker", DOCKER, "{not json", "line 1, column 2"),
        (
            "docker",
            DOCKER,
            "{\n  \"features\": true\n}",
            "line 2, column 3: `features` is true",
        ),
        ("containerd", CONTAINERD, "version = \"2\"\n", "a number without quotes"),
        ("crio", "/etc/crio/crio.conf", "[crio", "is not valid TOML"),
        (
            "containerd",
            "/var/lib/kubelet/config.yaml",
            "cgroupDriver: cgroup2\n",
            "--cgroup-driver",
        ),
        // A file in place of the drop-in directory.
        (
            "containerd",
            "/etc/containerd/conf.d",
            "",
            "conf.d/zz-divvy.toml could not be written",
        ),
    ] {
        let machine = Machine::of(&[(file, text)]);
        let before = machine.all();
        let output = machine.configure(&[engine]);
        assert_eq!(output.status.code(), Some(1), "{engine} {text}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
        assert_eq!(machine.all(), before);
    }
    let machine = Machine::of(&[]);
    for (args, says) in [
        (&["docker", "--restart"][..], "copy of another machine's files"),
        (&["containerd", "--runtime-path", "rel"], "not an absolute path"),
        (&["docker", "--drop-in", "/etc/docker/x.json"], "Docker reads one file"),
        (&["containerd", "--engine-version", "new"], "write it as 1.7"),
        (&["--detect"], "no container engine was found"),
    ] {
        let output = machine.configure(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
}

#[test]
fn a_program_that_is_missing_is_told() {
    let told = |files: &[(&str, &str)]| stderr(&Machine::of(files).configure(&["docker", "--dry-run"]));
    let (runtime, probe) = (("/usr/local/bin/divvy-runtime", ""), ("/usr/local/bin/divvy-probe", ""));
    assert!(told(&[]).contains("there is no /usr/local/bin/divvy-runtime"));
    assert!(told(&[runtime]).contains("there is no /usr/local/bin/divvy-probe"));
    assert!(!told(&[runtime, probe]).contains("there is no"));
    let link = "sudo ln -s /usr/local/bin/divvy-runtime /usr/local/bin/nvidia-container-runtime-hook";
    assert!(told(&[runtime, probe]).contains(link));
    for there in ["/usr/bin", "/usr/local/bin", "/usr/local/sbin"] {
        let hook = format!("{there}/nvidia-container-runtime-hook");
        assert!(!told(&[runtime, probe, (&hook, "")]).contains("--gpus"), "{there}");
    }
    let machine = Machine::of(&[]);
    let others = machine.configure(&["docker", "--dry-run", "--runtime-path", "/usr/bin/nvidia-container-runtime"]);
    assert!(
        !stderr(&others).contains(link),
        "another program is not the hook by that name"
    );
    let pods = machine.configure(&["containerd", "--dry-run"]);
    assert!(!stderr(&pods).contains("--gpus"), "{}", stderr(&pods));
}

#[test]
fn all_engines_of_a_machine_are_found() {
    let machine = Machine::of(&[(DOCKER, "{}"), (CONTAINERD, V2)]);
    let output = machine.configure(&["--detect", "-o", "json"]);
    went_well(&output);
    let all: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(all.as_array().map(Vec::len), Some(1), "Docker's containerd is Docker's");
    assert_eq!(all[0]["engine"], "docker");
    assert_eq!(all[0]["restart"], "systemctl reload docker");
    let machine = Machine::of(&[
        (DOCKER, "{}"),
        (CONTAINERD, V2),
        ("/var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n"),
    ]);
    went_well(&machine.configure(&["--detect", "--set-default"]));
    assert!(
        machine
            .read("/etc/containerd/conf.d/zz-divvy.toml")
            .contains("SystemdCgroup = true")
    );
}

/// Run this program under the name of NVIDIA's tool.
fn nvidia_ctk(args: &[&str]) -> Output {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("nvidia-ctk");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_divvy"), &program).expect("linked");
    Command::new(program)
        .args(args)
        .env_remove("DIVVY_SYS_ROOT")
        .output()
        .expect("it runs")
}

#[test]
fn nvidia_s_tool_s_flags_do_the_same_here() {
    let machine = Machine::of(&[("/daemon.json", "{\"features\": {\"buildkit\": true}}"), ("/config.toml", V2)]);
    let file = |name: &str| machine.at(name).display().to_string();
    let docker = format!("--config={}", file("/daemon.json"));
    let output = nvidia_ctk(&[
        "runtime",
        "configure",
        &docker,
        "--dry-run",
        "--set-as-default",
        "--enable-cdi",
    ]);
    went_well(&output);
    let printed: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(
        printed,
        serde_json::json!({"features": {"buildkit": true, "cdi": true}, "default-runtime": "nvidia",
                           "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}})
    );
    let (config, drop_in) = (
        format!("--config={}", file("/config.toml")),
        format!("--drop-in-config={}", file("/d/99.toml")),
    );
    let args = [
        "runtime",
        "configure",
        "--runtime=containerd",
        &config,
        &drop_in,
        "--cdi.enabled",
        "--nvidia-set-as-default",
    ];
    let output = nvidia_ctk(&args);
    went_well(&output);
    assert!(
        stderr(&output).contains("It is recommended that containerd daemon be restarted."),
        "{}",
        stderr(&output)
    );
    assert!(machine.read("/d/99.toml").contains("default_runtime_name = \"nvidia\""));
    // A second run without the flag switches it off again, as in NVIDIA's tool.
    went_well(&nvidia_ctk(&args[..5]));
    let text = machine.read("/d/99.toml");
    assert!(
        !text.contains("default_runtime_name") && !text.contains("enable_cdi"),
        "{text}"
    );
    assert!(machine.read("/config.toml").contains("# mine"));
    for (args, says) in [
        (&["runtime", "configure", "--runtime=bogus"][..], "bogus"),
        (
            &["runtime", "configure", "--runtime=crio", "--nvidia-runtime-path=rel"],
            "not an absolute path",
        ),
        (&["runtime", "configure", "--drop-in-config=/x"], "Docker reads one file"),
        (
            &["system", "create-device-nodes", "--load-kernel-modules"],
            "run modprobe -a nvidia nvidia-uvm nvidia-modeset first",
        ),
    ] {
        let output = nvidia_ctk(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
    let root = machine.0.path().display().to_string();
    let output = nvidia_ctk(&[
        "cdi",
        "generate",
        "--driver-root",
        &root,
        "--device-name-strategy=uuid",
        "--disable-hook=all",
    ]);
    assert!(!stderr(&output).contains("unexpected argument"), "{}", stderr(&output));
}

#[test]
fn case_16_a_runtime_settings_are_shown_and_set_like_nvidias() {
    let machine = Machine::of(&[]);
    let file = machine.at("/deep/config.toml").display().to_string();
    let assumed = edit::assumed(settings::ldconfig(|path| std::path::Path::new(path).exists()));
    for words in [
        &["config", "default"][..],
        &["config", "create-default"],
        &["config", "--config-file", &file],
    ] {
        let output = nvidia_ctk(words);
        went_well(&output);
        assert_eq!(stdout(&output), assumed, "{words:?}");
    }
    let output = nvidia_ctk(&["config", "--config-file", &file, "--set", "bogus.key=1", "--in-place"]);
    assert_eq!(output.status.code(), Some(1));
    let says = "invalid --set option bogus.key=1: invalid config option: undefined field: \"bogus\"";
    assert!(stderr(&output).contains(says), "{}", stderr(&output));
    assert!(!std::path::Path::new(&file).exists(), "nothing was written");

    let output = nvidia_ctk(&["config", "-c", &file, "--set", "nvidia-container-runtime.runtimes=crun:runc"]);
    went_well(&output);
    assert!(
        stdout(&output).contains("\nruntimes = [\"crun\", \"runc\"]\n"),
        "{}",
        stdout(&output)
    );
    assert!(!std::path::Path::new(&file).exists(), "it was shown");

    went_well(&nvidia_ctk(&[
        "config",
        "--config",
        &file,
        "-i",
        "--set",
        "nvidia-container-cli.no-cgroups",
    ]));
    assert!(machine.read("/deep/config.toml").contains("\nno-cgroups = true\n"));
    std::fs::write(&file, "# mine\n[nvidia-container-runtime]\nmode = \"cdi\" # why\n").expect("written");
    went_well(&nvidia_ctk(&[
        "config",
        "--config-file",
        &file,
        "-i",
        "--set=nvidia-container-runtime.mode=legacy",
    ]));
    assert_eq!(
        machine.read("/deep/config.toml"),
        "# mine\n[nvidia-container-runtime]\nmode = \"legacy\" # why\n"
    );
    let other = machine.at("/other.toml").display().to_string();
    went_well(&nvidia_ctk(&["config", "default", "-o", &other]));
    assert_eq!(machine.read("/other.toml"), assumed);
}

/// A new settings file does not contain the one setting that lets an image request GPUs, unless the user requests it.
#[test]
fn a_new_settings_file_gives_no_image_gpus() {
    let machine = Machine::of(&[]);
    let file = machine.at("/etc/config.toml").display().to_string();
    let image = RequestingContainer {
        env: vec!["NVIDIA_VISIBLE_DEVICES=all".to_owned()],
        ..RequestingContainer::default()
    };
    let gets = |text: &str| DeviceRequest::of(&image, &settings::OciRuntimeSettings::parse(text).expect("settings")).wanted;
    went_well(&nvidia_ctk(&[
        "config",
        "-c",
        &file,
        "-i",
        "--set",
        "nvidia-container-runtime.mode=cdi",
    ]));
    let text = machine.read("/etc/config.toml");
    assert_eq!(gets(&text), WantedDevices::Nothing);
    let taken = text.replace("\n#accept-", "\naccept-");
    assert!(taken != text);
    assert_eq!(gets(&taken), WantedDevices::Nothing, "the comments, taken as lines");
    went_well(&nvidia_ctk(&[
        "config",
        "-c",
        &file,
        "-i",
        "--set",
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
    ]));
    assert_eq!(gets(&machine.read("/etc/config.toml")), WantedDevices::All, "who asks for it");
}

#[test]
fn case_32_c_a_driver_containers_spec_moves_by_nvidias_words() {
    let spec = "{\"cdiVersion\":\"0.5.0\",\"kind\":\"v.com/gpu\",\"devices\":[{\"name\":\"a\",\"containerEdits\":{\"mounts\":[\
                {\"hostPath\":\"/driver/lib/a.so\",\"containerPath\":\"/lib/a.so\"},{\"hostPath\":\"/driver-x/lib/a.so\",\"containerPath\":\"/lib/b.so\"}]}}]}";
    let machine = Machine::of(&[("/in.json", spec)]);
    let (input, output) = (
        machine.at("/in.json").display().to_string(),
        machine.at("/out.yaml").display().to_string(),
    );
    let root = |more: &[&str]| {
        let words = [
            "cdi",
            "transform",
            "root",
            "--from",
            "/driver",
            "--to",
            "/",
            "--input",
            &input,
        ];
        nvidia_ctk(&[&words[..], more].concat())
    };
    let printed = root(&[]);
    went_well(&printed);
    let moved: serde_json::Value = serde_json::from_str(&stdout(&printed)).expect("JSON, as it came");
    let mounts = &moved["devices"][0]["containerEdits"]["mounts"];
    assert_eq!(
        (&mounts[0]["hostPath"], &mounts[1]["hostPath"]),
        (&"/lib/a.so".into(), &"/driver-x/lib/a.so".into())
    );
    went_well(&root(&["--output", &output]));
    assert!(machine.read("/out.yaml").contains("hostPath: /lib/a.so"));
    for (more, says) in [
        (&["--output", "x.yml"][..], "engines read only files whose names end in"),
        (&["--relative-to", "image"], "invalid value 'image'"),
    ] {
        let output = root(more);
        assert_eq!(output.status.code(), Some(1), "{more:?}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
}
