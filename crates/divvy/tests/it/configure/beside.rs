//! Compares this program under the name `nvidia-ctk` with NVIDIA's own. Both get the same arguments, environment variables, and
//! files, each in its own root directory. The resulting files are compared by their meaning.
//!
//! `DIVVY_NVIDIA_CTK` names the directory with NVIDIA's programs (1.20.0; `.ci/run` builds them). Without this variable, the
//! tests are recorded as skipped.

mod better;
mod cases;
mod flags;
mod settings;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

/// The texts of files, by path.
pub(super) type Tree = BTreeMap<String, String>;
/// The parsed contents of files, by path.
pub(super) type Meanings = BTreeMap<String, Value>;

/// The shell script that mounts what the programs need, and then runs commands.
const ENTER: &str = "for at in $BIND; do mount --bind /$at $0/$at || exit; done; exec chroot $0 /bin/sh";

/// A machine for one of the two programs: a directory that serves as the root directory of a shell in its own mount namespace.
pub(super) struct Root {
    directory: tempfile::TempDir,
    shell: Child,
    commands: ChildStdin,
    statuses: BufReader<ChildStdout>,
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ended_already = self.shell.kill();
        let _ended_already = self.shell.wait();
    }
}

/// The result of a run.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) status: i32,
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) files: Tree,
}

/// A command to run.
#[derive(Debug, Clone, Default)]
pub(super) struct Run {
    pub(super) files: Tree,
    /// The programs in the PATH, which are shell scripts.
    pub(super) programs: Vec<(&'static str, String)>,
    pub(super) env: Vec<(&'static str, &'static str)>,
    pub(super) words: Vec<String>,
}

impl Root {
    /// Make both machines, NVIDIA's and ours. Return `None` and record the skip if this is not possible.
    pub(super) fn both() -> Option<(Root, Root)> {
        let directory = divvy_skip::directory("DIVVY_NVIDIA_CTK", "NVIDIA's programs")?;
        if !divvy_skip::root("change the root directory of a program") {
            return None;
        }
        let theirs = directory.join("nvidia-ctk");
        assert!(theirs.is_file(), "there is no {}", theirs.display());
        Some((Root::of(&theirs), Root::of(Path::new(env!("CARGO_BIN_EXE_divvy")))))
    }

    fn of(program: &Path) -> Root {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let mut bind = String::new();
        for name in ["usr", "bin", "sbin", "lib", "lib64", "dev"] {
            match std::fs::read_link(Path::new("/").join(name)) {
                Ok(target) => std::os::unix::fs::symlink(target, at(name)).expect("linked"),
                Err(_) => {
                    std::fs::create_dir(at(name)).expect("made");
                    if Path::new("/").join(name).is_dir() {
                        bind = format!("{bind} {name}");
                    }
                }
            }
        }
        std::fs::create_dir(at("opt")).expect("made");
        std::fs::copy(program, at("opt/program")).expect("copied");
        std::os::unix::fs::symlink("program", at("opt/nvidia-ctk")).expect("linked");
        let mut shell = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", ENTER])
            .arg(directory.path())
            .env("BIND", bind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let commands = shell.stdin.take().expect("piped");
        let statuses = BufReader::new(shell.stdout.take().expect("piped"));
        Root {
            directory,
            shell,
            commands,
            statuses,
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path.trim_start_matches('/'))
    }

    /// Run a command on a machine with only these files.
    pub(super) fn run(&mut self, run: &Run) -> Outcome {
        self.prepare(run);
        self.again(run)
    }

    fn prepare(&self, run: &Run) {
        for directory in ["etc", "srv", "stub"] {
            let _not_there = std::fs::remove_dir_all(self.at(directory));
            std::fs::create_dir(self.at(directory)).expect("made");
        }
        for (path, text) in &run.files {
            let at = self.at(path);
            std::fs::create_dir_all(at.parent().expect("a directory")).expect("made");
            std::fs::write(at, text).expect("written");
        }
        for (name, script) in &run.programs {
            let at = self.at("stub").join(name);
            std::fs::write(&at, script).expect("written");
            std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o755)).expect("its mode");
        }
    }

    /// Run a command on the machine in its current state.
    pub(super) fn again(&mut self, run: &Run) -> Outcome {
        self.begin(run);
        self.end()
    }

    fn begin(&mut self, run: &Run) {
        let variables = run.env.iter().map(|(name, value)| format!("{name}={value}"));
        let words: Vec<String> = variables
            .chain(["/opt/nvidia-ctk".to_owned()])
            .chain(run.words.iter().cloned())
            .collect();
        let quoted: Vec<String> = words
            .iter()
            .map(|word| format!("'{}'", word.replace('\'', "'\\''")))
            .collect();
        let command = format!(
            "/usr/bin/env -i PATH=/stub {} < /dev/null > /stdout 2> /stderr; echo $?\n",
            quoted.join(" ")
        );
        self.commands.write_all(command.as_bytes()).expect("the shell listens");
    }

    fn end(&mut self) -> Outcome {
        let mut status = String::new();
        self.statuses.read_line(&mut status).expect("the shell answers");
        let said = |name: &str| String::from_utf8_lossy(&std::fs::read(self.at(name)).expect("redirected")).into_owned();
        let (stdout, stderr) = (said("stdout"), said("stderr"));
        let mut files = Tree::new();
        for directory in ["etc", "srv"] {
            self.collect(&format!("/{directory}"), &mut files);
        }
        Outcome {
            status: status.trim().parse().unwrap_or_else(|_| panic!("no status: {status:?}")),
            stdout,
            stderr,
            files,
        }
    }

    fn collect(&self, directory: &str, files: &mut Tree) {
        for entry in std::fs::read_dir(self.at(directory)).expect("a directory") {
            let entry = entry.expect("an entry");
            let path = format!("{directory}/{}", entry.file_name().display());
            if entry.file_type().expect("a type").is_dir() {
                self.collect(&path, files)
            } else {
                files.insert(path, std::fs::read_to_string(entry.path()).expect("text"));
            }
        }
    }
}

/// Parse a file. Arguments of Docker's runtime are ignored, because NVIDIA's tool writes them under a key that dockerd does not
/// read.
pub(super) fn meaning(path: &str, text: &str) -> Value {
    if path.ends_with(".json") {
        let mut value: Value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
        let runtimes = value.get_mut("runtimes").and_then(Value::as_object_mut);
        for runtime in runtimes.into_iter().flat_map(|all| all.values_mut()) {
            if let Some(runtime) = runtime.as_object_mut() {
                runtime.remove("args");
                runtime.remove("runtimeArgs");
            }
        }
        return value;
    }
    let table: Result<toml::Table, _> = toml::from_str(text);
    table.map_or_else(|_| text.into(), |table| serde_json::to_value(table).expect("a value"))
}

/// Return all files except the record for `--undo`.
pub(super) fn meanings(files: &Tree) -> Meanings {
    files
        .iter()
        .filter(|(path, _)| !path.ends_with(".divvy-undo"))
        .map(|(path, text)| (path.clone(), meaning(path, text)))
        .collect()
}

impl Run {
    fn of(files: Tree, words: &str) -> Run {
        Run {
            files,
            words: words.split_whitespace().map(str::to_owned).collect(),
            ..Run::default()
        }
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|given| given == word)
    }

    /// Return the same run with other files.
    fn with(&self, files: Tree) -> Run {
        Run { files, ..self.clone() }
    }

    /// Return the same run with one argument replaced.
    fn instead(&self, word: &str, other: Option<&str>) -> Run {
        let mut run = self.clone();
        run.words = run
            .words
            .into_iter()
            .filter_map(|given| {
                if given == word {
                    other.map(str::to_owned)
                } else {
                    Some(given)
                }
            })
            .collect();
        run
    }
}

/// The expected result of our program.
#[derive(Debug)]
pub(super) enum Expected {
    Refused,
    Files(Meanings),
}

/// The results of both programs, and their differences.
struct Compared {
    theirs: Root,
    ours: Root,
    equal: usize,
    better: BTreeMap<&'static str, usize>,
    wrong: Vec<String>,
}

impl Compared {
    fn new() -> Option<Compared> {
        let (theirs, ours) = Root::both()?;
        Some(Compared {
            theirs,
            ours,
            equal: 0,
            better: BTreeMap::new(),
            wrong: Vec::new(),
        })
    }

    /// Run both programs and compare their results. Run ours a second time, which must change nothing.
    fn compare(&mut self, name: &str, run: &Run, better: Option<(&'static str, Expected)>) {
        for root in [&mut self.theirs, &mut self.ours] {
            root.prepare(run);
            root.begin(run);
        }
        let (theirs, ours) = (self.theirs.end(), self.ours.end());
        let dry = ["--dry-run", "--dry-run=true"].iter().any(|word| run.has(word));
        if ours.status != 0 || dry {
            assert_eq!(
                ours.files, run.files,
                "{name}: what is refused or only shown leaves all as it was"
            );
        } else {
            let again = self.ours.again(run);
            assert_eq!(
                (again.status, &again.files),
                (0, &ours.files),
                "{name}: a second run changes something"
            );
        }
        let same = (theirs.status == 0) == (ours.status == 0) && meanings(&theirs.files) == meanings(&ours.files);
        let as_expected = match &better {
            None => false,
            Some((_, Expected::Refused)) => ours.status == 1,
            Some((_, Expected::Files(files))) => ours.status == 0 && meanings(&ours.files) == *files,
        };
        match better {
            _ if ![0, 1, 3].contains(&ours.status) => self.wrong.push(format!("{name}: {}: {}", ours.status, ours.stderr)),
            None if same => self.equal += 1,
            Some((why, _)) if as_expected && !same => *self.better.entry(why).or_default() += 1,
            Some((why, _)) if as_expected => self
                .wrong
                .push(format!("{name}: no difference, where there should be one: {why}")),
            better => self.wrong.push(format!(
                "{name}\n  theirs {} {}\n  ours   {} {}\n  wanted {better:?}\n  theirs said {}\n  ours said {}",
                theirs.status,
                serde_json::json!(meanings(&theirs.files)),
                ours.status,
                serde_json::json!(meanings(&ours.files)),
                theirs.stderr,
                ours.stderr
            )),
        }
    }

    #[expect(clippy::print_stdout, reason = "what was compared, and what is better on purpose")]
    fn end(self) {
        let better: usize = self.better.values().sum();
        println!(
            "{} equal, {better} better on purpose, {} different",
            self.equal,
            self.wrong.len()
        );
        self.better
            .iter()
            .for_each(|(why, times)| println!("better, {times} times: {why}"));
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.equal > 0, "nothing was compared");
    }
}

#[test]
fn engines_files_end_as_with_nvidia_s_tool_or_better_on_purpose() {
    use cases::{CONTAINERD, CRIO, DOCKER, WITH_DROP_INS, WORDS};
    let Some(mut compared) = Compared::new() else { return };
    let cases = cases::cases();
    for (engine, own, inputs) in [
        ("docker", DOCKER, &cases.docker),
        ("containerd", CONTAINERD, &cases.containerd),
        ("crio", CRIO, &cases.crio),
    ] {
        let with_drop_ins = if engine == "docker" { &[][..] } else { WITH_DROP_INS };
        for input in inputs {
            for words in WORDS.iter().chain(with_drop_ins) {
                let run = Run::of(input.tree(own), &format!("runtime configure --runtime={engine} {words}"));
                let better = better::better(&mut compared.theirs, engine, own, &input.name, &run);
                compared.compare(&format!("{engine}, {}: {words}", input.name), &run, better);
            }
        }
    }
    compared.end();
}
