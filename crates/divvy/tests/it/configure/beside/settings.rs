//! `nvidia-ctk config`: showing and changing the runtime's settings.

use serde_json::Value;

use super::{Compared, Run, Tree, meaning};

const FILE: &str = "/etc/nvidia-container-runtime/config.toml";

/// Arguments after `config`. They are tried with a user's file and without a file.
const WORDS: &str = include_str!("settings.txt");

const MINE: &str = "# mine\ndisable-require = true\n[nvidia-container-runtime]\nmode = \"legacy\" # why\nlog-level = \"debug\"\n";

/// Return the settings without empty tables, which have no meaning.
fn said(path: &str, text: &str) -> Value {
    fn without_empty(value: &mut Value) {
        if let Some(object) = value.as_object_mut() {
            object.values_mut().for_each(without_empty);
            object.retain(|_, value| value.as_object().is_none_or(|object| !object.is_empty()));
        }
    }
    let mut value = meaning(path, text);
    without_empty(&mut value);
    value
}

/// Return the intended difference for these arguments: our program refuses them, or does more than NVIDIA's tool. Both refuse a file that is not TOML.
fn better(words: &str, is_toml: bool) -> Option<(&'static str, bool)> {
    Some(match words {
        "--set supported-driver-capabilities=compute:utility" if is_toml => {
            ("a value is refused with which the runtime would not start", false)
        }
        "bogus" if is_toml => ("an unknown command is refused", false),
        "default --output=/etc/new/out.toml" => ("the directory is created", true),
        _ => return None,
    })
}

#[test]
fn settings_are_shown_and_changed_as_by_nvidia_s_tool() {
    let Some(mut compared) = Compared::new() else { return };
    let (mut equal, mut wrong) = (0, Vec::new());
    let assumed = divvy_oci::runtime::edit::assumed("@/sbin/ldconfig");
    for file in [None, Some(MINE), Some(assumed.as_str()), Some("= =\n")] {
        for words in WORDS.lines() {
            let files: Tree = file.map(|text| (FILE.to_owned(), text.to_owned())).into_iter().collect();
            let run = Run::of(files, &format!("config {words}"));
            let (theirs, ours) = (compared.theirs.run(&run), compared.ours.run(&run));
            if ours.status != 0 {
                assert_eq!(ours.files, run.files, "{words}: what is refused leaves all as it was");
            }
            let all = |files: &Tree| -> Vec<(String, Value)> {
                files.iter().map(|(path, text)| (path.clone(), said(path, text))).collect()
            };
            let same = (theirs.status == 0) == (ours.status == 0)
                && (theirs.status != 0
                    || (all(&theirs.files) == all(&ours.files)
                        && said("a.toml", &theirs.stdout) == said("a.toml", &ours.stdout)));
            match better(words, file != Some("= =\n")) {
                None if same => equal += 1,
                Some((_, does)) if !same && does == (ours.status == 0) => {}
                _ => wrong.push(format!(
                    "{words} {file:?}\n  theirs {} {:?}{}{}\n  ours   {} {:?}{}{}",
                    theirs.status,
                    all(&theirs.files),
                    said("a.toml", &theirs.stdout),
                    theirs.stderr,
                    ours.status,
                    all(&ours.files),
                    said("a.toml", &ours.stdout),
                    ours.stderr
                )),
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
    assert!(equal > 100, "{equal}");
}
