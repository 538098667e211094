//! Replays recorded runs of NVIDIA's `nvidia-ctk runtime configure`.
//!
//! The recordings are not part of this repository. `DIVVY_TOOLKIT` names a directory with `docker.json`, `containerd.json`, and `crio.json`: lists of
//! runs with `argv`, the files before (`input`) and after (`files`), and the exit status (`rc`). Without this variable the test reports that it was
//! skipped.

use std::collections::BTreeMap;

use divvy_engines::{RuntimeSettings, Target, configure, containerd};
use serde_json::{Value, json};

use super::editing::{apply, containerd_target, crio_target, docker_target};
use crate::{CONTAINERD, DOCKER, Tree};

struct Run {
    name: String,
    engine: String,
    flags: BTreeMap<String, String>,
    before: Tree,
    after: Tree,
    refused: bool,
}

impl Run {
    fn of(value: &Value) -> Run {
        let words: Vec<&str> = value["argv"]
            .as_array()
            .expect("argv")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let flags: BTreeMap<String, String> = words[2..]
            .iter()
            .map(|word| {
                let (key, value) = word
                    .trim_start_matches('-')
                    .split_once('=')
                    .unwrap_or((word.trim_start_matches('-'), "true"));
                (key.to_owned(), value.to_owned())
            })
            .collect();
        let tree = |files: &Value, text: fn(&Value) -> Option<&str>| -> Tree {
            let files = files.as_object().expect("files");
            files
                .iter()
                .filter_map(|(path, file)| Some((path.clone(), text(file)?.to_owned())))
                .collect()
        };
        Run {
            name: value["name"].as_str().expect("name").to_owned(),
            engine: flags.get("runtime").cloned().unwrap_or_else(|| "docker".to_owned()),
            before: tree(&value["input"], Value::as_str),
            after: tree(&value["files"], |file| file["text"].as_str()),
            refused: value["rc"] != json!(0),
            flags,
        }
    }

    fn flag(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.flags.get(*name)).map(String::as_str)
    }

    fn has(&self, names: &[&str]) -> bool {
        self.flag(names) == Some("true")
    }

    /// Translate the flags of `nvidia-ctk` into settings.
    fn settings(&self) -> RuntimeSettings {
        let docker = self.engine == "docker";
        let path = if docker {
            "nvidia-container-runtime"
        } else {
            "/usr/bin/nvidia-container-runtime"
        };
        let default = self.has(&["set-as-default", "nvidia-set-as-default"]);
        RuntimeSettings {
            name: self.flag(&["nvidia-runtime-name"]).unwrap_or("nvidia").to_owned(),
            path: self.flag(&["nvidia-runtime-path", "runtime-path"]).unwrap_or(path).to_owned(),
            set_default: (default || !docker).then_some(default),
            cdi: self.has(&["cdi.enabled", "cdi.enable", "enable-cdi"]).then_some(true),
            systemd_cgroup: None,
            overwrite: true,
            printed: None,
            command: "divvy configure containerd".to_owned(),
        }
    }

    fn target(&self) -> Target {
        let drop_in = |default: &str| {
            let given = self.flag(&["drop-in-config"]).unwrap_or(default);
            (!given.is_empty()).then(|| given.to_owned())
        };
        let mut target = match self.engine.as_str() {
            "docker" => docker_target(),
            "containerd" => containerd_target(drop_in("/etc/containerd/conf.d/99-nvidia.toml").as_deref(), None),
            _ => crio_target(drop_in("/etc/crio/crio.conf.d/99-nvidia.toml").as_deref()),
        };
        if let Some(given) = self.flag(&["config"]) {
            match &mut target {
                Target::Docker { config }
                | Target::Containerd { config, .. }
                | Target::Crio { config, .. }
                | Target::Template { config, .. } => {
                    given.clone_into(config);
                }
            }
        }
        target
    }

    /// Return why Divvy's result deliberately differs, or `None` if it must be the same.
    fn better(&self) -> Option<&'static str> {
        let input = |path: &str| self.before.get(path).map(String::as_str).unwrap_or_default();
        let docker: Value = serde_json::from_str(input(DOCKER)).unwrap_or_default();
        match self.engine.as_str() {
            "docker" if self.before.contains_key(DOCKER) && input(DOCKER).trim().is_empty() => {
                Some("an empty daemon.json is an empty object")
            }
            "docker" if self.settings().cdi.is_some() && docker["features"].is_object() => Some("the other features stay"),
            "docker"
                if docker["runtimes"][&self.settings().name]["runtimeArgs"]
                    .as_array()
                    .is_some_and(|args| !args.is_empty()) =>
            {
                Some("the person's runtimeArgs stay")
            }
            "containerd" if self.before.contains_key(CONTAINERD) && !self.refused => {
                match containerd::read(&self.before, CONTAINERD, containerd::Merge::Sections)
                    .ok()?
                    .version
                {
                    Some(1) => Some("version 1 is written where containerd reads it, and not into a drop-in that is not read"),
                    _ if self.flag(&["drop-in-config"]) == Some("") => Some("without a drop-in the runtime is in the main file"),
                    _ => None,
                }
            }
            "crio" if self.flag(&["drop-in-config"]) == Some("") => Some("crio.conf keeps what is not ours"),
            _ => None,
        }
    }
}

/// Return a file's content as a value. Arguments of Docker's runtime are ignored, because `nvidia-ctk` writes them under a key that dockerd does not
/// read.
fn meaning(path: &str, text: &str) -> Value {
    if path.ends_with(".json") {
        let mut value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        for runtime in value["runtimes"].as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            if let Some(runtime) = runtime.as_object_mut() {
                runtime.remove("args");
                runtime.remove("runtimeArgs");
            }
        }
        return value;
    }
    let table: Result<toml::Table, _> = toml::from_str(text);
    table.map_or(Value::String(text.to_owned()), |table| {
        serde_json::to_value(table).expect("a value")
    })
}

fn meanings(files: &Tree) -> BTreeMap<&str, Value> {
    files
        .iter()
        .map(|(path, text)| (path.as_str(), meaning(path, text)))
        .collect()
}

#[test]
#[expect(clippy::print_stdout, reason = "what was compared, and what is better on purpose")]
fn recorded_runs_of_nvidia_ctk_end_in_the_same_configuration() {
    let Some(directory) = divvy_skip::directory("DIVVY_TOOLKIT", "recorded runs of nvidia-ctk") else {
        return;
    };
    let (mut equal, mut better, mut wrong) = (0, Vec::new(), Vec::new());
    for engine in ["docker", "containerd", "crio"] {
        let file = directory.join(format!("{engine}.json"));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let runs: Vec<Value> = serde_json::from_str(&text).expect("recordings");
        for run in runs.iter().filter(|run| run["argv"][0] == "runtime").map(Run::of) {
            let mut ours = run.before.clone();
            let result = configure(&ours, &run.target(), &run.settings(), None);
            if let (Ok(plan), false) = (&result, run.has(&["dry-run"])) {
                apply(&mut ours, plan);
            }
            let same = result.is_err() == run.refused && meanings(&ours) == meanings(&run.after);
            match (same, run.better()) {
                (true, _) => equal += 1,
                (false, Some(why)) => {
                    assert!(result.is_ok(), "{}: {result:?}", run.name);
                    let read = run.target().read(&ours).expect("read");
                    let runtime = read.runtimes.get(&run.settings().name).expect("the runtime is effective");
                    assert_eq!(runtime.path.as_deref(), Some(run.settings().path.as_str()), "{}", run.name);
                    if engine == "docker" {
                        let (before, after) = (meaning(DOCKER, &run.before[DOCKER]), meaning(DOCKER, &ours[DOCKER]));
                        for (key, value) in before["features"]
                            .as_object()
                            .into_iter()
                            .flatten()
                            .filter(|(key, _)| *key != "cdi")
                        {
                            assert_eq!(&after["features"][key], value, "{}", run.name);
                        }
                    }
                    better.push(format!("{}: {why}", run.name));
                }
                (false, None) => wrong.push(format!(
                    "{}: {:?}\n  ours   {}\n  theirs {}",
                    run.name,
                    result.err(),
                    json!(meanings(&ours)),
                    json!(meanings(&run.after))
                )),
            }
        }
    }
    println!("{equal} equal, {} better on purpose, {} different", better.len(), wrong.len());
    better.iter().for_each(|line| println!("better: {line}"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(equal > 0, "nothing was compared");
}
