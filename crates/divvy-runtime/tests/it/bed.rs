use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) use divvy_shadow_testkit::existing as built;
use serde_json::{Value, json};

/// A temporary directory with a bundle, specs, settings, and a stand-in for runc.
pub(crate) struct Bed {
    pub(crate) directory: tempfile::TempDir,
}

/// The stand-in for runc: it prints its arguments and the variable `A`, and ends with status 7.
const LOW_LEVEL: &str = "#!/bin/sh\nprintf '%s\\n' \"$@\"\necho \"A=$A\"\nexit 7\n";

impl Bed {
    pub(crate) fn new(config: &str) -> Bed {
        let bed = Bed {
            directory: tempfile::tempdir().expect("a directory"),
        };
        fs::create_dir_all(bed.path("bundle")).expect("a bundle");
        fs::create_dir_all(bed.path("cdi")).expect("a directory of specs");
        fs::write(bed.config(), config).expect("written");
        fs::set_permissions(bed.config(), fs::Permissions::from_mode(0o640)).expect("its mode");
        bed.spec("nvidia.json", &nvidia());
        bed.settings("cdi", &bed.low_level(LOW_LEVEL));
        bed
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.path("bundle/config.json")
    }

    pub(crate) fn spec(&self, name: &str, spec: &Value) {
        fs::write(self.path("cdi").join(name), spec.to_string()).expect("written");
    }

    pub(crate) fn low_level(&self, script: &str) -> PathBuf {
        let path = self.path("low-level");
        fs::write(&path, script).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        path
    }

    pub(crate) fn settings(&self, mode: &str, low_level: &Path) {
        self.settings_and(mode, low_level, "");
    }

    /// Write the settings, with `more` at the end of `config.toml`.
    pub(crate) fn settings_and(&self, mode: &str, low_level: &Path, more: &str) {
        let text = format!(
            "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-runtime]\nmode = {mode:?}\nruntimes = [{low_level:?}]\n\
             [nvidia-container-runtime.modes.cdi]\nspec-dirs = [{:?}]\n{more}",
            self.path("cdi")
        );
        fs::write(self.path("config.toml"), text).expect("written");
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-runtime"));
        command
            .args(words)
            .current_dir(self.path("bundle"))
            .env("NVIDIA_CTK_CONFIG_FILE_PATH", self.path("config.toml"));
        command
    }

    pub(crate) fn run(&self, words: &[&str]) -> Output {
        self.command(words).env("A", "1").output().expect("it runs")
    }

    pub(crate) fn text(&self) -> String {
        fs::read_to_string(self.config()).expect("there")
    }

    /// Call `create` for the bundle. Return the new `config.json` if the real runtime was reached.
    pub(crate) fn create(&self) -> Result<Value, Refusal> {
        let output = self.run(&["create", "--bundle", self.path("bundle").to_str().expect("text"), "c1"]);
        match output.status.code() {
            Some(7) => Ok(serde_json::from_str(&self.text()).expect("JSON")),
            _ => Err(Refusal::of(&output)),
        }
    }
}

/// What a runtime that did not create a container said on standard error.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) String);

impl Refusal {
    pub(crate) fn of(output: &Output) -> Refusal {
        Refusal(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Return a CDI spec such as a generator writes, for a GPU whose device node is `/dev/null`.
pub(crate) fn nvidia() -> Value {
    let node = json!({"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]});
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": node}, {"name": "all", "containerEdits": node}],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/usr/lib/libcuda.so.1", "options": ["ro", "nosuid", "nodev", "bind"]}],
        },
    })
}

pub(crate) fn asking(device: &str) -> String {
    json!({"process": {"env": ["PATH=/", format!("NVIDIA_VISIBLE_DEVICES={device}")]}, "newField": 1}).to_string()
}
