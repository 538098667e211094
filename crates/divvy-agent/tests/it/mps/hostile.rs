//! Programs that hang while everything ends, and clients that write what they like into the directories that they can reach.

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use super::*;

const H100: &str = "NVIDIA H100 80GB HBM3";

/// A node with two resources, whose daemons have little time to end.
fn two_resources() -> Bed {
    let mut bed = Bed::new(&[A100, H100]);
    bed.surroundings.mps.end_limit = END_LIMIT;
    let patterns = "resources: {gpus: [{pattern: '*A100*', name: a100}, {pattern: '*', name: h100}]}\n";
    let shared = share("{name: a100, replicas: 2}, {name: h100, replicas: 2}").replace("version: v1\n", "");
    bed.configure(&format!("{patterns}{shared}"));
    bed
}

const END_LIMIT: Duration = Duration::from_secs(5);
/// More than the limit, and less than the time that a single program may usually take.
const SOON: Duration = Duration::from_secs(9);

async fn stop_soon(running: Running) {
    running.1.cancel();
    let ended = tokio::time::timeout(SOON, ended(running)).await;
    ended.expect("within the limit").expect("it stops without an error");
}

#[tokio::test]
async fn all_daemons_end_within_one_limit_even_if_none_quits() {
    let bed = two_resources();
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let resources = ["nvidia.com/a100", "nvidia.com/h100"];
    let processes = resources.map(|name| bed.process(name).expect("a process"));
    bed.mode("control", "hang");
    stop_soon(running).await;
    assert!(!bed.is_ready() && resources.iter().all(|name| !bed.is_started(name)));
    until("the daemons have ended", || {
        processes.iter().all(|process| test_kill_process(*process).is_err())
    })
    .await;
    for gpu in [0, 1] {
        assert!(bed.calls().contains(&smi(gpu, "DEFAULT")), "{:?}", bed.calls());
    }
}

/// The agent records each GPU that stays in exclusive mode.
#[tokio::test]
async fn every_gpu_is_tried_within_the_limit() {
    let mut bed = Bed::new(&[A100; 3]);
    bed.surroundings.mps.end_limit = END_LIMIT;
    bed.configure(&replicas(2));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    bed.mode("smi", "hang");
    stop_soon(running).await;
    for gpu in 0..3 {
        assert!(bed.calls().contains(&smi(gpu, "DEFAULT")), "{:?}", bed.calls());
    }
    let list = std::fs::read_to_string(bed.at("mps/nvidia.com/gpu/.exclusive")).expect("kept");
    assert_eq!(list.lines().count(), 3);
    assert!(!bed.is_ready() && !bed.is_started("nvidia.com/gpu"));
}

#[tokio::test]
async fn the_end_does_not_wait_for_a_step_that_hangs() {
    let mut bed = Bed::new(&[A100]);
    bed.surroundings.mps.end_limit = END_LIMIT;
    bed.configure(&replicas(2));
    let old = bed.at("mps/nvidia.com/old");
    std::fs::create_dir_all(&old).expect("created");
    std::fs::write(old.join(".exclusive"), format!("{}\n", uuid(7))).expect("written");
    bed.mode("smi", "hang");
    let running = bed.start();
    until("the earlier run's GPU is being opened", || bed.at("bin/hanging").exists()).await;
    bed.mode("smi", "");
    stop_soon(running).await;
    assert_eq!(bed.count(&smi(7, "DEFAULT")), 2);
    assert!(!old.join(".exclusive").exists());
}

/// A process that looks like a control daemon. It ends when it is dropped.
struct Victim(Child);

impl Victim {
    fn start(command: &mut Command) -> Victim {
        let script = "read -r _";
        let command = command.args(["-c", script, CONTROL]).stdin(Stdio::piped());
        Victim(command.spawn().expect("a shell"))
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().expect("a child").is_none()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_client_cannot_make_the_program_kill_another_process() {
    let mut bed = Bed::new(&[A100]);
    bed.surroundings.mps.deadline = Duration::from_secs(1);
    bed.configure(&replicas(2));
    let pipe = bed.at("mps/nvidia.com/gpu/pipe");
    let pid_file = pipe.join(format!("{CONTROL}.pid"));
    // A process with the right name, and one in another container that imitates the environment, too.
    let mut victims = vec![Victim::start(Command::new("/bin/sh").arg0(CONTROL))];
    if divvy_skip::root("make a mount namespace") {
        let mut other = Command::new("unshare");
        other.args(["--mount", "/bin/sh"]).env("CUDA_MPS_PIPE_DIRECTORY", &pipe);
        victims.push(Victim::start(&mut other));
    }
    for victim in &mut victims {
        bed.mode("control", "");
        let running = bed.start();
        until("ready", || bed.is_ready()).await;
        let daemon = bed.process("nvidia.com/gpu").expect("a process");
        std::fs::write(&pid_file, format!("{}\n", victim.0.id())).expect("written");
        // The daemon does not quit, so it is killed: the daemon, and not the process in the file.
        bed.mode("control", "deaf");
        stop(running).await;
        until("the daemon has ended", || test_kill_process(daemon).is_err()).await;
        assert!(victim.lives());
        std::fs::remove_file(&pid_file).expect("removed");
    }
}

#[tokio::test]
async fn links_in_the_directories_of_a_daemon_are_not_followed() {
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(2));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let (precious, resource) = (bed.at("precious"), bed.at("mps/nvidia.com/gpu"));
    std::fs::write(&precious, "precious").expect("written");
    for name in ["log/start.log", "log/control.log"] {
        let link = resource.join(name);
        std::fs::remove_file(&link).expect("removed");
        symlink(&precious, &link).expect("linked");
    }
    symlink(bed.directory.path(), resource.join("log/directory")).expect("linked");
    bed.mode("control", "fail");
    kill_process(bed.process("nvidia.com/gpu").expect("a process"), Signal::KILL).expect("killed");
    until("a failed start", || bed.count("control -d") > 1).await;
    // The script of the daemon itself follows the link of its log.
    std::fs::remove_file(resource.join("log/control.log")).expect("removed");
    bed.mode("control", "");
    until("ready again", || bed.is_ready()).await;
    stop(running).await;
    assert_eq!(std::fs::read_to_string(&precious).expect("kept"), "precious");
    assert!(!resource.join("log").exists());
}
