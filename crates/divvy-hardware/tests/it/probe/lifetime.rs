//! The probe's socket, its end, and its size.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::json;

use super::text;
use crate::support::{Lines, Machine, PROBE, Running, TWO, connect, eventually, kill, sim_library};

/// A second probe does not take the socket.
#[test]
fn the_socket_is_for_its_owner_alone() {
    let machine = Machine::new(TWO);
    let mut first = machine.listening("s", &[]);
    let socket = machine.path("s");
    let mode = std::fs::metadata(&socket).expect("socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = |path: &str| {
        let listen = format!("unix:{}", machine.path(path).display());
        let output = machine
            .command()
            .stdin(Stdio::null())
            .arg("--listen")
            .arg(listen)
            .output()
            .expect("probe");
        (output.status.code(), text(&output.stderr))
    };
    let (status, error) = second("s");
    assert_eq!(status, Some(1));
    assert!(error.contains("another probe listens there"), "{error}");
    let (_, error) = second("machine.toml");
    assert!(error.contains("it is not a socket"), "{error}");
    let (_, error) = second("nowhere/s");
    assert!(error.contains("does the directory exist"), "{error}");
    // A socket that a killed probe left behind is replaced.
    first.0.kill().expect("kill");
    first.ended();
    assert!(socket.exists());
    let _third = machine.listening("s", &[]);
}

/// The socket is removed, and the exit status is 0.
#[test]
fn sigterm_ends_the_probe_even_if_the_driver_hangs() {
    for hangs in [false, true] {
        let machine = Machine::new(TWO);
        if hangs {
            std::fs::write(machine.path("control.state"), "{\"hangUntilMs\":99999999999999}").expect("state");
        }
        let mut probe = machine.listening("s", &[]);
        kill(probe.0.id(), Signal::TERM);
        assert_eq!(probe.ended(), 0);
        assert!(!machine.path("s").exists());
    }
}

#[test]
fn a_probe_whose_parent_is_killed_ends_and_removes_its_socket() {
    let machine = Machine::new(TWO);
    // The shell holds the writing end of the probe's standard input, as an agent does, and is killed.
    let script = "mkfifo in; \"$PROBE\" --nvml-library \"$LIB\" --listen unix:s --exit-with-stdin <in & exec 9>in; echo $!; wait";
    let mut shell = Command::new("sh");
    shell
        .current_dir(machine.dir.path())
        .envs(machine.env())
        .env("PROBE", PROBE)
        .env("LIB", sim_library());
    let mut shell = Running(shell.args(["-c", script]).stdout(Stdio::piped()).spawn().expect("sh"));
    drop(connect(&machine.path("s")));
    let mut pid = String::new();
    let mut out = shell.0.stdout.take().expect("stdout");
    let mut byte = [0];
    while out.read(&mut byte).expect("read") == 1 && byte[0] != b'\n' {
        pid.push(byte[0].into());
    }
    shell.0.kill().expect("kill -9");
    let process = format!("/proc/{}", pid.trim());
    eventually("the probe ends", || {
        match std::fs::read_to_string(format!("{process}/stat")) {
            // A zombie counts as ended, because a container may have no process that reaps it.
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        }
    });
    assert!(!machine.path("s").exists());
}

#[test]
fn a_hanging_driver_call_ends_the_probe_with_70() {
    let machine = Machine::new(TWO);
    let mut probe = machine.listening("s", &["--watchdog", "0.3"]);
    let mut client = Lines::new(connect(&machine.path("s")));
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    machine.control(&json!({"op": "hang", "seconds": 60}));
    client.send(b"{\"v\":1,\"id\":2,\"op\":\"snapshot\"}\n");
    assert_eq!(probe.ended(), 70);
    assert!(!machine.path("s").exists());
}

#[test]
fn a_probe_with_eight_gpus_is_small() {
    let mut description = String::from("v = 1\n[[node]]\nname = \"eight\"\n");
    for i in 0..8 {
        let links: Vec<String> = (0..8).filter(|j| *j != i).map(|j| format!("[{j}, \"nvlink\", 2]")).collect();
        description.push_str(&format!(
            "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\nlinks = [{}]\n",
            links.join(", ")
        ));
    }
    let machine = Machine::new(&description);
    let probe = machine.listening("s", &[]);
    let mut client = Lines::new(connect(&machine.path("s")));
    for id in 0..100 {
        let answer = client.ask(&json!({"v": 1, "id": id, "op": "snapshot"}).to_string());
        assert_eq!(answer["ok"]["gpus"].as_array().map(Vec::len), Some(8));
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", probe.0.id())).expect("status");
    let kib = |field: &str| {
        let line = status.lines().find(|line| line.starts_with(field)).expect(field);
        line.split_whitespace()
            .nth(1)
            .and_then(|value| value.parse::<u64>().ok())
            .expect("KiB")
    };
    // Pages of files count with their size on disk, which a debug build inflates. The probe's own allocations do not.
    if !divvy_skip::emulated("the memory of the probe is the emulator's") {
        assert!(kib("RssAnon") <= 4096, "{status}");
    }
}
