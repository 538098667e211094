//! `config-manager` with an embedded API server, real files and links, and processes that report their signals.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use divvy_agent::Error;
use divvy_agent::nvidia::manage_config;
use divvy_nvidia_config::{ConfigManager, Fallback, SignalTo, Unlabelled};
use divvy_testbed::api::{ApiServer, ApiServerOptions, Effect, FaultRule, Listening, Match, PatchKind, Right};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_secs(20);
const LABEL: &str = "nvidia.com/device-plugin.config";
const USER: &str = "config-manager";

/// SIGUSR1. A shell cannot react to SIGHUP if the tests run under nohup.
const SIGNAL: i32 = 10;

/// A process that writes a line into a file for each signal. It ends when it is dropped.
struct Receiver {
    child: Child,
    signals: PathBuf,
}

impl Receiver {
    async fn start(name: &str, signals: PathBuf) -> Receiver {
        // The shell waits without end until its standard input is closed; a trap interrupts `wait`.
        let script = "trap 'echo signal >> \"$0\"' USR1; exec 3<&0; cat <&3 >/dev/null & : >> \"$0\"; \
                      while kill -0 $! 2>/dev/null; do wait $!; done";
        let mut command = Command::new("/bin/sh");
        command.arg0(name).arg("-c").arg(script).arg(&signals).stdin(Stdio::piped());
        let child = command.spawn().expect("a shell");
        eventually("the shell has set its trap", || signals.exists().then_some(())).await;
        Receiver { child, signals }
    }

    fn count(&self) -> usize {
        fs::read_to_string(&self.signals).expect("written").lines().count()
    }

    async fn has(&self, count: usize) {
        eventually("signals", || (self.count() == count).then_some(())).await;
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().expect("the shell ends");
    }
}

async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

struct Bed {
    api: ApiServer,
    options: ConfigManager,
    directory: tempfile::TempDir,
    running: Option<(JoinHandle<Result<(), Error>>, CancellationToken)>,
    _listening: Listening,
}

impl Bed {
    /// Make a node without the label, and a mounted ConfigMap with these keys. The content of each is its name.
    async fn new(files: &[&str]) -> Bed {
        static BEDS: AtomicU32 = AtomicU32::new(0);
        let api = ApiServer::new(ApiServerOptions::default());
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("listening");
        // The other node's label must not matter.
        let other = json!({"metadata": {"name": "n0", "labels": {LABEL: "fast"}}});
        for node in [other, json!({"metadata": {"name": "n1"}})] {
            api.create("nodes", node).expect("created");
        }
        let directory = tempfile::tempdir().expect("temp dir");
        let path = |name: &str| directory.path().join(name).display().to_string();
        fs::write(path("kubeconfig"), api.kubeconfig_for(listening.addr(), USER)).expect("written");
        fs::create_dir(path("configs")).expect("created");
        let process = format!("divvy-test-{}-{}", std::process::id(), BEDS.fetch_add(1, Ordering::Relaxed));
        let options = ConfigManager {
            oneshot: false,
            kubeconfig: Some(path("kubeconfig")),
            node: "n1".to_owned(),
            label: LABEL.to_owned(),
            directory: path("configs"),
            destination: path("config.yaml"),
            unlabelled: Unlabelled {
                default: None,
                fallbacks: vec![Fallback::Named, Fallback::Single],
            },
            signal: Some(SignalTo { number: SIGNAL, process }),
        };
        let bed = Bed {
            api,
            options,
            directory,
            running: None,
            _listening: listening,
        };
        bed.mount(&files.iter().map(|name| (*name, *name)).collect::<Vec<_>>());
        bed
    }

    /// Write the ConfigMap's keys and contents as the kubelet does: into a new directory, to which the link `..data` is then switched.
    fn mount(&self, files: &[(&str, &str)]) {
        let directory = Path::new(&self.options.directory);
        let version = fs::read_dir(directory).expect("listed").count();
        let version = format!("..version{version}");
        fs::create_dir(directory.join(&version)).expect("created");
        for (name, content) in files {
            fs::write(directory.join(&version).join(name), content).expect("written");
        }
        symlink(&version, directory.join("..data_tmp")).expect("linked");
        fs::rename(directory.join("..data_tmp"), directory.join("..data")).expect("switched");
        for (name, _) in files {
            if fs::symlink_metadata(directory.join(name)).is_err() {
                symlink(Path::new("..data").join(name), directory.join(name)).expect("linked");
            }
        }
        for entry in fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry")) {
            let name = entry.file_name().into_string().expect("text");
            if !name.starts_with("..") && !files.iter().any(|(file, _)| *file == name) {
                fs::remove_file(entry.path()).expect("removed");
            }
        }
    }

    async fn receiver(&self, file: &str) -> Receiver {
        let name = &self.options.signal.as_ref().expect("a signal").process;
        Receiver::start(name, self.directory.path().join(file)).await
    }

    fn start(&mut self) {
        let stop = CancellationToken::new();
        let running = tokio::spawn(manage_config(self.options.clone(), stop.clone()));
        self.running = Some((running, stop));
    }

    async fn stop(&mut self) {
        let (running, stop) = self.running.take().expect("running");
        stop.cancel();
        let outcome = tokio::time::timeout(LIMIT, running).await.expect("ends in time");
        outcome.expect("no panic").expect("it stops without an error");
    }

    /// Run with `oneshot` to its end.
    async fn once(&self) -> Result<(), Error> {
        let options = ConfigManager {
            oneshot: true,
            signal: None,
            ..self.options.clone()
        };
        let run = manage_config(options, CancellationToken::new());
        tokio::time::timeout(LIMIT, run).await.expect("ends in time")
    }

    fn label(&self, value: Value) {
        let patch = json!({"metadata": {"labels": {LABEL: value}}});
        self.api.patch("nodes", "", "n1", PatchKind::Merge, &patch).expect("patched");
    }

    fn destination(&self) -> &Path {
        Path::new(&self.options.destination)
    }

    fn target(&self) -> Option<PathBuf> {
        fs::read_link(self.destination()).ok()
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::new(&self.options.directory).join(name)
    }

    async fn uses(&self, name: &str) {
        let wanted = self.file(name);
        eventually(name, || (self.target().as_ref() == Some(&wanted)).then_some(())).await;
    }

    fn notes(&self) -> Vec<String> {
        let events = self.api.list("events.events.k8s.io", "").expect("listed");
        let about = |event: &Value| event["regarding"]["kind"] == "Node" && event["regarding"]["name"] == "n1";
        let notes = events.iter().filter(|event| about(event) && event["type"] == "Warning");
        notes
            .map(|event| event["note"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    async fn note(&self, part: &str) {
        eventually(part, || self.notes().iter().any(|note| note.contains(part)).then_some(())).await;
    }
}

/// Every process of the given name hears of each change.
#[tokio::test]
async fn the_label_chooses_the_file_and_all_processes_hear() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    let (first, second) = (bed.receiver("first").await, bed.receiver("second").await);
    let name = &bed.options.signal.as_ref().expect("a signal").process;
    let others = [
        Receiver::start(&format!("{name}-other"), bed.directory.path().join("longer")).await,
        Receiver::start(&name[..name.len() - 1], bed.directory.path().join("shorter")).await,
    ];
    bed.start();
    bed.uses("default").await;
    for (count, (label, file)) in [
        (json!("fast"), "fast"),
        (Value::Null, "default"),
        (json!("fast"), "fast"),
        (json!(""), "default"),
    ]
    .into_iter()
    .enumerate()
    {
        first.has(count + 1).await;
        second.has(count + 1).await;
        bed.label(label);
        bed.uses(file).await;
    }
    first.has(5).await;
    second.has(5).await;
    bed.stop().await;
    assert_eq!(others.map(|other| other.count()), [0, 0]);
    assert_eq!(bed.notes(), Vec::<String>::new());
}

/// The name is reported on the node.
#[tokio::test]
async fn an_unknown_name_keeps_the_previous_configuration() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    bed.label(json!("fast"));
    bed.start();
    bed.uses("fast").await;
    let receiver = bed.receiver("signals").await;
    receiver.has(1).await;
    bed.label(json!("..data"));
    bed.note("specified config ..data does not exist").await;
    bed.label(json!("slow"));
    bed.note("specified config slow does not exist; the previous configuration stays in use: fast. Choose one of default, fast:")
        .await;
    assert_eq!((bed.target(), receiver.count()), (Some(bed.file("fast")), 1));
    // The file appears later, as after an edit of the ConfigMap.
    bed.mount(&[("default", "default"), ("fast", "fast"), ("slow", "slow")]);
    bed.uses("slow").await;
    receiver.has(2).await;
    // The file goes away, and with it the configuration in use.
    bed.mount(&[("default", "default")]);
    bed.note("no configuration is in use, so the node gets default").await;
    bed.uses("default").await;
    bed.stop().await;
}

#[tokio::test]
async fn an_unknown_name_at_the_start_counts_like_no_label() {
    let bed = Bed::new(&["default", "fast"]).await;
    bed.label(json!("wrong"));
    bed.once().await.expect("the default is used");
    assert_eq!(bed.target(), Some(bed.file("default")));
    bed.note("specified config wrong does not exist; no configuration is in use, so the node gets default")
        .await;
    bed.label(json!("fast"));
    bed.once().await.expect("a known name");
    bed.label(json!("wrong"));
    bed.once().await.expect("the previous one stays");
    assert_eq!(bed.target(), Some(bed.file("fast")));
}

#[tokio::test]
async fn only_an_edit_of_the_key_in_use_is_signalled() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    bed.once().await.expect("linked");
    let receiver = bed.receiver("signals").await;
    bed.start();
    // The init container has made the link, so the start changes nothing. Wait until the content is known.
    bed.label(json!("fast"));
    receiver.has(1).await;
    bed.mount(&[("default", "edited"), ("fast", "fast")]);
    // After the second report, the files have been looked at and the signal would have been sent.
    for name in ["wrong", "wrong2"] {
        bed.label(json!(name));
        bed.note(&format!("specified config {name} does not exist")).await;
    }
    assert_eq!(receiver.count(), 1);
    // While a label names no file, the previous file is watched.
    bed.mount(&[("default", "edited"), ("fast", "edited")]);
    receiver.has(2).await;
    assert_eq!(fs::read_to_string(bed.destination()).expect("readable"), "edited");
    bed.label(json!("fast"));
    bed.mount(&[("default", "edited"), ("fast", "again")]);
    receiver.has(3).await;
    bed.stop().await;
    // The files were looked at several times while the names were wrong, but each was reported once.
    let events = bed.api.list("events.events.k8s.io", "").expect("listed");
    assert!(events.iter().all(|event| event["series"].is_null()), "{events:?}");
    assert_eq!(bed.target(), Some(bed.file("fast")));
}

/// The program does not run during the edit.
#[tokio::test]
async fn an_edit_in_an_absence_is_signalled_on_return() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    bed.once().await.expect("linked");
    let receiver = bed.receiver("signals").await;
    // An edit after the init container.
    bed.mount(&[("default", "edited"), ("fast", "fast")]);
    bed.start();
    receiver.has(1).await;
    bed.label(json!("fast"));
    receiver.has(2).await;
    bed.stop().await;
    bed.mount(&[("default", "edited"), ("fast", "edited, too")]);
    bed.start();
    receiver.has(3).await;
    bed.stop().await;
    // Without an edit, a return is not signalled: the next signal is the one of the next label.
    bed.start();
    bed.label(json!("wrong"));
    bed.note("specified config wrong does not exist").await;
    assert_eq!(receiver.count(), 3);
    bed.stop().await;
    // A signal that found no process is sent by the next run.
    drop(receiver);
    bed.label(json!("default"));
    bed.start();
    bed.uses("default").await;
    bed.stop().await;
    let receiver = bed.receiver("later").await;
    bed.start();
    receiver.has(1).await;
    bed.stop().await;
}

#[tokio::test]
async fn the_signal_waits_for_the_process() {
    let mut bed = Bed::new(&["default"]).await;
    bed.start();
    bed.uses("default").await;
    let receiver = bed.receiver("signals").await;
    receiver.has(1).await;
    bed.stop().await;
}

/// The program writes the link as soon as the API server answers.
#[tokio::test]
async fn once_writes_the_labels_link_without_a_signal() {
    let bed = Bed::new(&["default", "fast"]).await;
    bed.label(json!("fast"));
    let receiver = bed.receiver("signals").await;
    let refuse = Effect::Refuse(503);
    let away = bed
        .api
        .faults()
        .add(FaultRule::new(Match::any().resource("nodes"), refuse).times(2));
    bed.once().await.expect("linked");
    assert_eq!(bed.api.faults().fired(away), 2);
    assert_eq!((bed.target(), receiver.count()), (Some(bed.file("fast")), 0));
}

#[tokio::test]
async fn once_fails_if_the_node_gets_no_configuration() {
    let mut bed = Bed::new(&["a", "b"]).await;
    let reason = |outcome: Result<(), Error>| outcome.expect_err("nothing is chosen").to_string();
    let all_failed = "no config was set, no default was provided, and all fallbacks failed";
    assert_eq!(reason(bed.once().await), all_failed);
    bed.label(json!("c"));
    assert_eq!(
        reason(bed.once().await),
        format!("specified config c does not exist; {all_failed}")
    );
    bed.options.unlabelled.default = Some("d".to_owned());
    bed.label(Value::Null);
    assert_eq!(reason(bed.once().await), "specified config d does not exist");
    fs::remove_dir_all(&bed.options.directory).expect("removed");
    let unreadable = "error getting list of configuration files: error reading directory: ";
    assert!(reason(bed.once().await).starts_with(unreadable));
    assert_eq!(bed.target(), None);
}

#[tokio::test]
async fn a_node_that_does_not_exist_has_no_label() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    bed.options.node = "n3".to_owned();
    bed.once().await.expect("the default is used");
    assert_eq!(bed.target(), Some(bed.file("default")));
}

#[tokio::test]
async fn a_link_to_nothing_is_replaced_and_anything_else_is_kept() {
    let mut bed = Bed::new(&["default"]).await;
    symlink(bed.file("gone"), bed.destination()).expect("linked");
    // The temporary link of a killed process is replaced.
    symlink("nowhere", bed.directory.path().join("config.yaml.next")).expect("linked");
    bed.once().await.expect("linked");
    assert_eq!(bed.target(), Some(bed.file("default")));
    bed.options.unlabelled.fallbacks = vec![Fallback::Empty];
    bed.once().await.expect("linked");
    assert_eq!(bed.target(), Some("/dev/null".into()));
    fs::remove_file(bed.destination()).expect("removed");
    fs::write(bed.destination(), "precious").expect("written");
    let error = bed.once().await.expect_err("a file").to_string();
    assert!(
        error.contains("is not a symbolic link") && error.contains("--config-file-dst"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(bed.destination()).expect("kept"), "precious");
    // Once the file is away, the running program goes on.
    bed.start();
    fs::remove_file(bed.destination()).expect("removed");
    eventually("a link", || bed.target()).await;
    bed.stop().await;
}

#[tokio::test]
async fn a_file_that_is_too_large_is_not_chosen() {
    let bed = Bed::new(&["default"]).await;
    fs::write(bed.file("large"), vec![b'#'; (1 << 20) + 1]).expect("written");
    fs::write(bed.file("largest"), vec![b'#'; 1 << 20]).expect("written");
    bed.label(json!("largest"));
    bed.once().await.expect("as large as allowed");
    bed.label(json!("large"));
    let error = bed.once().await.expect_err("too large").to_string();
    assert!(error.contains("larger than 1 MiB"), "{error}");
    assert_eq!(bed.target(), Some(bed.file("largest")));
}

#[tokio::test]
async fn the_rights_of_nvidias_chart_are_enough() {
    let mut bed = Bed::new(&["default", "fast"]).await;
    bed.api.rights().grant(USER, Right::new(&["get", "list", "watch"], "nodes"));
    bed.label(json!("wrong"));
    bed.start();
    bed.uses("default").await;
    bed.label(json!("fast"));
    bed.uses("fast").await;
    bed.stop().await;
    assert_eq!(bed.notes(), Vec::<String>::new());
}

/// Run the program under NVIDIA's name.
fn program(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-agent"));
    command.arg0("/usr/bin/config-manager").args(arguments).env_clear();
    command.output().expect("it starts")
}

#[test]
fn wrong_settings_end_with_status_1_and_nvidias_text() {
    let required = ["--node-name=n", "--config-file-srcdir=/s", "--config-file-dst=/d"];
    for (arguments, text) in [
        (&[][..], "invalid <node-name>: must not be empty string"),
        (&["--fallback-strategies=other"], "unknown fallback strategy: other"),
        (&["--signal=200", "--kubeconfig=/dev/null"], "--signal"),
        (&["--nonsense"], "flag provided but not defined: -nonsense"),
    ] {
        let all = if arguments.is_empty() {
            vec![]
        } else {
            [&required[..], arguments].concat()
        };
        let Output { status, stderr, .. } = program(&all);
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(
            status.code() == Some(1) && stderr.contains(text),
            "{arguments:?}: {status} {stderr}"
        );
    }
    let help = program(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("kubectl label node"));
}
