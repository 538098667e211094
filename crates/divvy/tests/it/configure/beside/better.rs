//! The intended differences from NVIDIA's tool. Each has a reason and an exact expected result, which is derived from what
//! NVIDIA's tool does with other files or arguments.

use serde_json::{Map, Value};

use super::cases::{CRIO, DOCKER};
use super::{Expected, Meanings, Root, Run, Tree, meaning, meanings};

const NO_DROP_IN: &str = "--drop-in-config=";
const OTHERS: &str = "/etc/containerd/conf.d/10-mine.toml";
const OWN: &str = "/etc/containerd/conf.d/99-nvidia.toml";
const OF_CRIO: &str = "/etc/crio/crio.conf.d/10-crio.conf";

/// Merge one value into another, table by table.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => from.clone_into(into),
    }
}

fn file(path: &str, text: &str) -> Tree {
    Tree::from([(path.to_owned(), text.to_owned())])
}

/// Return the content of the drop-in file that is written next to the engine's own file.
fn drop_in(meanings: &Meanings, run: &Run) -> Value {
    let given = run
        .words
        .iter()
        .find_map(|word| word.strip_prefix(NO_DROP_IN))
        .filter(|given| !given.is_empty());
    let paths = [given.unwrap_or(OWN), "/etc/crio/crio.conf.d/99-nvidia.toml"];
    paths.iter().find_map(|path| meanings.get(*path)).cloned().unwrap_or_default()
}

/// Return the main file merged with the drop-in that NVIDIA's tool would write.
fn all_in_one(theirs: &mut Root, own: &str, run: &Run, main: &str) -> Meanings {
    let beside = theirs.run(&run.instead(NO_DROP_IN, None).with(file(own, main)));
    let mut files = meanings(&run.files);
    let mut written = drop_in(&meanings(&beside.files), &run.instead(NO_DROP_IN, None));
    let main = files.entry(own.to_owned()).or_insert_with(|| Value::Object(Map::new()));
    if own == CRIO {
        merge(main, &written);
        return files;
    }
    // The drop-in has the main file's whole section, with the runtime added.
    if main.get("version").is_some()
        && let Some(written) = written.as_object_mut()
    {
        written.remove("version");
    }
    merge(main, &written);
    let default = written.pointer("/plugins/io.containerd.grpc.v1.cri/containerd/default_runtime_name");
    if default.is_none()
        && let Some(of) = main
            .pointer_mut("/plugins/io.containerd.grpc.v1.cri/containerd")
            .and_then(Value::as_object_mut)
    {
        of.remove("default_runtime_name");
    }
    files
}

/// Add to the expected files the runtime options that the user has set, unless the run itself writes these options.
fn own_options(files: &mut Meanings, path: &str, pointer: &str, options: &Value) {
    let Some(runtime) = files.get_mut(path).and_then(|file| file.pointer_mut(pointer)) else {
        return;
    };
    let program = runtime.pointer("/options/BinaryName").cloned();
    let (of_crio, kind) = (runtime.get("runtime_path").cloned(), runtime.get("runtime_type").cloned());
    merge(runtime, options);
    if let Some(program) = program {
        runtime["options"]["BinaryName"] = program;
    }
    if let (Some(path), Some(kind)) = (of_crio, kind) {
        runtime["runtime_path"] = path;
        runtime["runtime_type"] = kind;
    }
}

const RUNTIME: &str = "/plugins/io.containerd.grpc.v1.cri/containerd/runtimes/nvidia";

pub(super) fn better(theirs: &mut Root, engine: &str, own: &str, input: &str, run: &Run) -> Option<(&'static str, Expected)> {
    match engine {
        "docker" => docker(theirs, input, run),
        "containerd" => containerd(theirs, own, input, run),
        _ => crio(theirs, own, input, run),
    }
}

fn docker(theirs: &mut Root, input: &str, run: &Run) -> Option<(&'static str, Expected)> {
    let mut as_with = |text: &str| meanings(&theirs.run(&run.with(file(DOCKER, text))).files);
    Some(match input {
        "empty" | "blank" => ("an empty daemon.json is an empty object", Expected::Files(as_with("{}"))),
        "runtimes null" => (
            "null is nothing, as for dockerd",
            Expected::Files(as_with("{\"debug\": true}")),
        ),
        "features and a runtime" | "CDI on" if run.has("--cdi.enabled") => {
            let mut files = as_with(&run.files[DOCKER]);
            let mut features = meaning(DOCKER, &run.files[DOCKER])["features"].clone();
            features["cdi"] = true.into();
            files.get_mut(DOCKER)?["features"] = features;
            ("the other features stay", Expected::Files(files))
        }
        "unknown keys" => {
            let mut files = as_with(&run.files[DOCKER]);
            let before = meaning(DOCKER, &run.files[DOCKER]);
            for key in ["big", "e"] {
                files.get_mut(DOCKER)?[key] = before[key].clone();
            }
            ("numbers stay as they are written", Expected::Files(files))
        }
        "features a list"
        | "features a text"
        | "CDI a text"
        | "the runtime a text"
        | "another runtime a text"
        | "default a number"
        | "more behind it" => ("dockerd refuses this file", Expected::Refused),
        _ => return None,
    })
}

fn containerd(theirs: &mut Root, own: &str, input: &str, run: &Run) -> Option<(&'static str, Expected)> {
    let main = run.files.get(own).cloned().unwrap_or_default();
    let without = run.has(NO_DROP_IN);
    let elsewhere = run.words.iter().any(|word| word.starts_with(NO_DROP_IN)) && !without;
    let renamed = run.has("--nvidia-runtime-name=gpu");
    Some(match input {
        "imports a text" | "imports of numbers" | "plugins a list" | "containerd a text" | "runtimes a list"
        | "the runtime a text" | "options a list" | "default a number" | "CDI a text" => {
            ("containerd refuses this file", Expected::Refused)
        }
        "our drop-in, no TOML" if without || elsewhere => ("containerd refuses that file", Expected::Refused),
        "a drop-in of others, imported" | "our drop-in of an earlier run, imported" if without => (
            "the last file that has the section wins, so the runtime would not be seen",
            Expected::Refused,
        ),
        _ if input.starts_with("version 1") || input.starts_with("no version") => {
            let mut one = run.clone();
            one.words.retain(|word| !word.starts_with(NO_DROP_IN));
            one.words.push(NO_DROP_IN.to_owned());
            let mut files = meanings(&theirs.run(&one).files);
            let file = files.get_mut(own)?;
            if !main.contains("version =") {
                file.as_object_mut()?.remove("version");
            }
            if let Some(cdi) = file
                .pointer_mut("/plugins/cri/containerd")?
                .as_object_mut()?
                .remove("enable_cdi")
            {
                file["plugins"]["cri"]["enable_cdi"] = cdi;
            }
            if without && input == "version 1, written" {
                return None;
            }
            (
                "version 1 is written where containerd reads it, with enable_cdi in its place, and its number not where it was not",
                Expected::Files(files),
            )
        }
        "version 2, the runtime with options of its own" if !renamed => {
            let options = meaning(own, &main).pointer(RUNTIME)?.clone();
            let mut files = if without {
                all_in_one(theirs, own, run, &main)
            } else {
                meanings(&theirs.run(run).files)
            };
            for path in [own, OWN, "/etc/other.d/gpu.toml"] {
                let untouched = path == own && !without;
                if !untouched {
                    own_options(&mut files, path, RUNTIME, &options);
                }
            }
            ("a person's own options of the runtime stay", Expected::Files(files))
        }
        "a drop-in of others, imported" | "our drop-in of an earlier run, imported" if input.starts_with('a') || elsewhere => {
            let (path, text) = run.files.iter().find(|(path, _)| [OTHERS, OWN].contains(&path.as_str()))?;
            let mut files = meanings(&theirs.run(run).files);
            let written = drop_in(&meanings(&theirs.run(&run.with(file(own, text))).files), run);
            let at = if elsewhere { "/etc/other.d/gpu.toml" } else { OWN };
            files.insert(at.to_owned(), written);
            if let Some(options) = meaning(path, text).pointer(RUNTIME) {
                own_options(&mut files, at, RUNTIME, options);
            }
            (
                "what is copied is the section that counts, in whichever file",
                Expected::Files(files),
            )
        }
        // Both programs refuse it.
        _ if without && theirs.run(run).status != 0 => return None,
        _ if without => (
            "without a drop-in the runtime is in the main file",
            Expected::Files(all_in_one(theirs, own, run, &main)),
        ),
        "imports that match otherwise" | "imports of the file" | "imports, relative" if !elsewhere => {
            let mut files = meanings(&theirs.run(run).files);
            files.insert(own.to_owned(), meaning(own, &main));
            ("no import is added where one matches", Expected::Files(files))
        }
        "a drop-in of others, not imported" if !elsewhere => {
            let mut files = meanings(&theirs.run(run).files);
            files.get_mut(own)?["imports"] = [OWN].into();
            ("no other file is brought to life by an import", Expected::Files(files))
        }
        _ => return None,
    })
}

fn crio(theirs: &mut Root, own: &str, input: &str, run: &Run) -> Option<(&'static str, Expected)> {
    const RUNTIME: &str = "/crio/runtime/runtimes/nvidia";
    let main = run.files.get(own).cloned().unwrap_or_default();
    let without = run.has(NO_DROP_IN);
    let elsewhere = run.words.iter().any(|word| word.starts_with(NO_DROP_IN)) && !without;
    let renamed = run.has("--nvidia-runtime-name=gpu");
    Some(match input {
        "crio a text" | "runtimes a list" | "runtimes a text" | "default a number" | "a path a number" => {
            ("CRI-O refuses this file", Expected::Refused)
        }
        "our drop-in, no TOML" if without || elsewhere => ("CRI-O refuses that file", Expected::Refused),
        "the runtime with options of its own" if !renamed => {
            let options = meaning(own, &main).pointer(RUNTIME)?.clone();
            let (mut files, paths) = if without {
                (all_in_one(theirs, own, run, &main), [own, own])
            } else {
                (
                    meanings(&theirs.run(run).files),
                    ["/etc/crio/crio.conf.d/99-nvidia.toml", "/etc/other.d/gpu.toml"],
                )
            };
            for path in paths {
                own_options(&mut files, path, RUNTIME, &options);
            }
            ("a person's own options of the runtime stay", Expected::Files(files))
        }
        "a runtime in a drop-in" => {
            let text = &run.files[OF_CRIO];
            let files = if without {
                all_in_one(theirs, own, run, text)
            } else {
                let mut files = meanings(&run.files);
                let made = meanings(&theirs.run(&run.with(file(own, text))).files);
                files.extend(made.into_iter().filter(|(path, _)| path != own));
                files
            };
            ("runtimes of CRI-O's drop-ins are copied from, too", Expected::Files(files))
        }
        "missing" | "empty" | "our drop-in with something else" if without => return None,
        // Both programs refuse it.
        _ if without && theirs.run(run).status != 0 => return None,
        _ if without => {
            let mut files = all_in_one(theirs, own, run, &main);
            if input == "ours is the default" {
                files.get_mut(own)?["crio"]["runtime"]
                    .as_object_mut()?
                    .remove("default_runtime");
            }
            ("crio.conf keeps what is not ours", Expected::Files(files))
        }
        _ => return None,
    })
}
