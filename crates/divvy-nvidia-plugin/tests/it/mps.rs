//! The MPS control daemons: how they are started and ended, and what happens when something changes.

use std::path::{Component, Path, PathBuf};

use divvy_model::MiB;
use divvy_nvidia_config::{NvidiaConfig, SharingStrategy};
use divvy_nvidia_plugin::mps::share::{MpsProcess, SharesAbove};
use divvy_nvidia_plugin::mps::{
    Daemon, DaemonReport, DaemonStep, Intervals, MpsAction, MpsComputeMode, MpsLimit, Service, SharedGpu, Supervision, changes,
    daemons, directory, excerpt, for_shares, left_over,
};
use divvy_nvidia_plugin::{Error, PluginMachine, offer};
use proptest::prelude::*;

use crate::build::{config, gpu, machine, pattern, replicated, share, u};

const ROOT: &str = "/mps";

fn plan(config: &NvidiaConfig, machine: &PluginMachine) -> Result<Vec<Daemon>, Error> {
    daemons(&offer(config, machine)?.resources, machine, Path::new(ROOT))
}

fn one(replicas: u32, machine: &PluginMachine) -> Daemon {
    let mut all = plan(&share(SharingStrategy::Mps, replicas), machine).expect("a plan");
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn commands(daemon: &Daemon) -> Vec<String> {
    let commands = daemon.start().into_iter().filter_map(|action| match action {
        MpsAction::Command(command) => Some(command),
        _ => None,
    });
    commands.collect()
}

fn mode(index: u32, mode: MpsComputeMode) -> MpsAction {
    MpsAction::SetComputeMode { gpu: u(index), mode }
}

#[test]
fn a_replicas_memory_and_threads_are_rounded_down() {
    for (replicas, memory, threads) in [(2, 20480, 50), (4, 10240, 25), (7, 5851, 14), (48, 853, 2)] {
        assert_eq!(
            commands(&one(replicas, &machine(2))),
            [
                format!("set_default_device_pinned_mem_limit 0 {memory}M"),
                format!("set_default_device_pinned_mem_limit 1 {memory}M"),
                format!("set_default_active_thread_percentage {threads}"),
            ]
        );
    }
}

/// The only limit of the daemon is 100 percent of the threads, which limits nothing.
#[test]
fn the_shares_daemon_has_gpus_mps_can_serve() {
    let mut machine = machine(4);
    machine.gpus[0].mig = Some(true);
    machine.gpus[1] = PluginMachine::unreadable(1);
    machine.gpus[2].lost = true;
    let daemon = for_shares(&machine, Path::new(ROOT), "uid").expect("a daemon");
    let gpus: Vec<(u32, bool)> = daemon.gpus.iter().map(|gpu| (gpu.index, gpu.is_usable)).collect();
    assert_eq!(gpus, [(2, false), (3, true)]);
    assert_eq!(commands(&daemon), ["set_default_active_thread_percentage 100"]);
    assert_eq!(daemon.pipe_directory(), Path::new("/mps/divvy.dev/shares/pipe"));
    let marker = MpsAction::WriteFile("/mps/divvy.dev/shares/.started".into(), "uid".to_owned());
    assert_eq!(daemon.start().last(), Some(&marker));
    machine.gpus.truncate(2);
    assert_eq!(for_shares(&machine, Path::new(ROOT), "uid"), None);
}

#[test]
fn the_marker_is_written_after_checking_all_limits() {
    let directory = PathBuf::from("/mps/nvidia.com/gpu");
    let check = |command: &str, limit| MpsAction::Check {
        command: command.to_owned(),
        limit,
    };
    assert_eq!(
        one(4, &machine(1)).start(),
        [
            MpsAction::Quit,
            MpsAction::MakeDirectory(directory.join("pipe")),
            MpsAction::LabelDirectory(directory.join("pipe")),
            MpsAction::MakeDirectory(directory.join("log")),
            MpsAction::WriteFile(directory.join(".exclusive"), format!("{}\n", u(0))),
            mode(0, MpsComputeMode::ExclusiveProcess),
            MpsAction::Start,
            MpsAction::Command("set_default_device_pinned_mem_limit 0 10240M".to_owned()),
            MpsAction::Command("set_default_active_thread_percentage 25".to_owned()),
            check("get_default_device_pinned_mem_limit 0", MpsLimit::Memory(MiB(10240))),
            check("get_default_active_thread_percentage", MpsLimit::Threads(25)),
            MpsAction::WriteFile(directory.join(".started"), String::new()),
        ]
    );
}

#[test]
fn the_end_withdraws_the_service_first_and_opens_every_gpu() {
    let directory = PathBuf::from("/mps/nvidia.com/gpu");
    let mut machine = machine(2);
    machine.gpus[1].lost = true;
    let daemon = one(2, &machine);
    assert_eq!(
        daemon.end(),
        [
            MpsAction::RemoveFile(directory.join(".started")),
            MpsAction::Quit,
            MpsAction::RemoveFile(directory.join("pipe/control")),
            MpsAction::RemoveFile(directory.join("pipe/control_lock")),
            MpsAction::RemoveFile(directory.join("pipe/control_privileged")),
            mode(0, MpsComputeMode::Default),
            mode(1, MpsComputeMode::Default),
            MpsAction::RemoveFile(directory.join(".exclusive")),
            MpsAction::RemoveDirectory(directory.join("log")),
        ]
    );
    // A restart keeps the GPUs closed to processes that would have no limits.
    assert_eq!(
        daemon.withdraw(),
        [MpsAction::RemoveFile(directory.join(".started")), MpsAction::Quit]
    );
    assert_eq!(
        daemon.environment().into_iter().collect::<Vec<_>>(),
        [
            ("CUDA_MPS_LOG_DIRECTORY", directory.join("log")),
            ("CUDA_MPS_PIPE_DIRECTORY", directory.join("pipe")),
        ]
    );
}

#[test]
fn only_resources_that_use_mps_get_a_daemon() {
    let mut config = share(SharingStrategy::Mps, 3);
    config.resources.gpus = vec![
        pattern("*A100*", "nvidia.com/a100"),
        pattern("*H100*", "nvidia.com/h100"),
        pattern("*", "nvidia.com/gpu"),
    ];
    config.sharing.resources = vec![replicated("nvidia.com/a100", 2), replicated("nvidia.com/h100", 5)];
    config.sharing.resources[1].rename = Some("nvidia.com/h100.shared".to_owned());
    let mut machine = machine(4);
    machine.gpus[1].model = "NVIDIA H100 80GB HBM3".to_owned();
    machine.gpus[2].model = "Tesla T4".to_owned();
    let daemons = plan(&config, &machine).expect("a plan");
    let found: Vec<(&str, Vec<u32>, u32)> = daemons
        .iter()
        .map(|daemon| {
            let gpus = daemon.gpus.iter().map(|gpu| gpu.index).collect();
            (daemon.resource.as_str(), gpus, daemon.threads)
        })
        .collect();
    assert_eq!(
        found,
        [("nvidia.com/a100", vec![0, 3], 50), ("nvidia.com/h100.shared", vec![1], 20)]
    );
    for other in [SharingStrategy::TimeSlicing, SharingStrategy::None] {
        assert_eq!(plan(&share(other, 2), &machine), Ok(Vec::new()));
    }
}

#[test]
fn a_gpu_that_cannot_be_configured_does_not_stop_the_others() {
    let mut machine = machine(3);
    machine.gpus[0] = PluginMachine::unreadable(0);
    machine.gpus[1].lost = true;
    let daemon = one(2, &machine);
    let start = daemon.start();
    assert_eq!(daemon.gpus.len(), 2);
    assert!(
        !start.contains(&mode(1, MpsComputeMode::ExclusiveProcess)) && start.contains(&mode(2, MpsComputeMode::ExclusiveProcess))
    );
    assert_eq!(
        commands(&daemon),
        [
            "set_default_device_pinned_mem_limit 2 20480M",
            "set_default_active_thread_percentage 50"
        ]
    );
    assert_eq!(
        plan(&share(SharingStrategy::Mps, 2), &PluginMachine::default()),
        Ok(Vec::new())
    );
}

/// A GPU with too little memory is refused.
#[test]
fn a_gpu_of_unknown_memory_gets_no_limit() {
    let mut machine = machine(1);
    machine.gpus[0].memory = MiB(0);
    assert_eq!(commands(&one(4, &machine)), ["set_default_active_thread_percentage 25"]);
    machine.gpus[0].memory = MiB(3);
    let error = plan(&share(SharingStrategy::Mps, 4), &machine).expect_err("too little");
    assert_eq!(
        error.to_string(),
        "GPU 0 has 3 MiB of memory, and 4 replicas cannot have 1 MiB each; reduce the number of replicas in sharing.mps"
    );
}

#[test]
fn only_daemons_that_would_serve_differently_are_restarted() {
    let all = machine(2);
    let lost = {
        let mut machine = machine(2);
        machine.gpus[1].lost = true;
        machine
    };
    let more = machine(3);
    let (same, without, other) = (one(2, &all), one(2, &lost), one(4, &all));
    let kept = |started: &Daemon, wanted: &Daemon| {
        let found = changes(std::slice::from_ref(started), std::slice::from_ref(wanted));
        assert_eq!(found.start.len() + found.keep.len(), 1);
        assert_eq!(found.end.len(), found.start.len());
        found.keep.first() == Some(wanted)
    };
    for (started, wanted, is_kept) in [
        (&same, &same, true),
        // A GPU that is lost while the daemon serves needs no restart.
        (&same, &without, true),
        (&without, &without, true),
        // A GPU that returns has no limits yet.
        (&without, &same, false),
        (&same, &other, false),
        (&same, &one(2, &more), false),
        (&one(2, &more), &same, false),
    ] {
        assert_eq!(kept(started, wanted), is_kept, "{started:?} {wanted:?}");
    }
    let ended = changes(std::slice::from_ref(&same), &[]);
    assert_eq!((ended.end, ended.start.len()), (vec![same.resource.clone()], 0));
    let earlier = left_over(
        &same.resource,
        same.directory.clone(),
        &format!("{}\nGPU-$(reboot)\n--id\n{}\n", u(0), u(7)),
    );
    assert_eq!(
        earlier.gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(),
        [u(0), u(7)]
    );
    assert!(!kept(&earlier, &same));
    let first = changes(&[], std::slice::from_ref(&same));
    assert_eq!((first.end.len(), first.start), (0, vec![same]));
}

/// A failed start is repeated after 30 s.
#[test]
fn a_dead_daemon_restarts_after_growing_pauses() {
    let mut life = Supervision::new(Intervals::default());
    let (dead, slow) = (
        DaemonReport::Silent { is_running: false },
        DaemonReport::Silent { is_running: true },
    );
    assert_eq!(life.next(DaemonReport::NotStarted), DaemonStep::Start(30_000));
    assert_eq!(life.next(DaemonReport::Started), DaemonStep::Look(3_000));
    assert_eq!(life.next(DaemonReport::Lives), DaemonStep::Look(3_000));
    for pause in [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
        assert_eq!(life.next(dead), DaemonStep::Start(pause));
        assert_eq!(life.next(DaemonReport::Started), DaemonStep::Look(3_000));
    }
    for _ in 0..20 {
        life.next(DaemonReport::Lives);
    }
    assert_eq!(life.next(dead), DaemonStep::Start(1_000));
    // One late answer does not end the clients of a daemon that runs; two do.
    life.next(DaemonReport::Started);
    assert_eq!(life.next(slow), DaemonStep::Ask(3_000));
    assert_eq!(life.next(DaemonReport::Lives), DaemonStep::Look(3_000));
    assert_eq!(life.next(slow), DaemonStep::Ask(3_000));
    assert_eq!(life.next(slow), DaemonStep::Start(2_000));
    for _ in 0..100 {
        life.next(dead);
    }
    assert_eq!(life.next(dead), DaemonStep::Start(30_000));
}

/// During a long restart, the devices become unhealthy.
#[test]
fn a_daemons_short_restart_leaves_devices_healthy() {
    let absent = || Some("no answer".to_owned());
    let mut known = None;
    let mut found = Vec::new();
    for (now, missing) in [
        (0, absent()),
        (1_000, None),
        (4_000, absent()),
        (7_000, None),
        (10_000, absent()),
        (39_999, absent()),
        (40_000, absent()),
        (43_000, absent()),
        (46_000, None),
    ] {
        let service = Service::after(known.as_ref(), missing, now, Intervals::default());
        found.push(match &service {
            Service::Serves => "serves",
            Service::Restarts { .. } => "restarts",
            Service::Absent(_) => "absent",
        });
        known = Some(service);
    }
    let expected = [
        "absent", "serves", "restarts", "serves", "restarts", "restarts", "absent", "absent", "serves",
    ];
    assert_eq!(found, expected);
    let impatient = Intervals {
        grace: 0,
        ..Intervals::default()
    };
    let service = Service::after(Some(&Service::Serves), absent(), 1_000, impatient);
    assert_eq!(service, Service::Absent("no answer".to_owned()));
}

#[test]
fn a_daemon_that_runs_is_asked_every_ten_minutes() {
    let mut life = Supervision::new(Intervals::default());
    life.next(DaemonReport::Started);
    for _ in 0..2 {
        for _ in 0..199 {
            assert_eq!(life.next(DaemonReport::Lives), DaemonStep::Look(3_000));
        }
        assert_eq!(life.next(DaemonReport::Lives), DaemonStep::Ask(3_000));
    }
}

/// The answers are those of NVIDIA's program in the drivers 470, 535, 550, and 555.
#[test]
fn only_the_answer_that_a_limit_has_when_it_is_set_counts() {
    let (threads, memory) = (MpsLimit::Threads(25), MpsLimit::Memory(MiB(10240)));
    for (limit, answer, expected) in [
        (threads, "25.0\n", true),
        (threads, "100.0\n", false),
        (threads, "", false),
        (memory, "10G\n", true),
        (memory, "11G\n", false),
        (memory, "", false),
        (memory, "Unknown command \"get_default_device_pinned_mem_limit\"\n", false),
        (MpsLimit::Memory(MiB(16276)), "15G\n", true),
        (MpsLimit::Memory(MiB(16276)), "16G\n", false),
        (MpsLimit::Memory(MiB(512)), "512M\n", true),
        (MpsLimit::Memory(MiB(512)), "513M\n", false),
        (MpsLimit::Memory(MiB(512)), "0G\n", false),
        (memory, "99999999999999999999G", false),
    ] {
        assert_eq!(limit.is(answer), expected, "{limit:?} {answer:?}");
    }
}

#[test]
fn a_log_is_passed_on_in_part_if_it_is_long() {
    let long = format!("{}\n\n{}", "x".repeat(1000), "line\n".repeat(99));
    let (lines, left_out) = excerpt(&long);
    assert_eq!((lines.len(), lines[0].len(), left_out), (40, 400, 60));
    assert_eq!(excerpt("a\n \nb"), (vec!["a".to_owned(), "b".to_owned()], 0));
}

#[test]
fn what_a_daemon_logs_about_questions_is_not_passed_on() {
    let line = |said: &str| format!("[2026-11-30 03:46:37.035 Control 21122] {said}\n");
    let question = |command: &str, answer: &str| {
        let said = ["Accepting connection...", "NEW UI", command, answer, "UI closed"];
        said.into_iter().filter(|said| !said.is_empty()).map(line).collect::<String>()
    };
    let start = "Starting control daemon using socket /mps/pipe/control";
    let refused = "Unknown command \"nope\"";
    let set = "Cmd:set_default_active_thread_percentage 25";
    let log = [
        line(start),
        question("Cmd:get_default_active_thread_percentage", "100.0"),
        question(set, "25.0"),
        question("Cmd:get_server_list", ""),
        question("Cmd:nope", refused),
    ];
    let (lines, left_out) = excerpt(&log.concat());
    let said: Vec<&str> = lines
        .iter()
        .filter_map(|line| line.split_once("] "))
        .map(|(_, said)| said)
        .collect();
    assert_eq!((said, left_out), (vec![start, set, "Cmd:nope", refused], 0));
}

#[test]
fn a_name_that_is_no_resource_name_has_no_directory() {
    for name in [
        "",
        "gpu",
        "nvidia.com/",
        "/gpu",
        "../gpu",
        "nvidia.com/..",
        "nvidia.com/../../etc",
        "nvidia.com/a/b",
        "a b/c",
        ".ready/x",
        "a/\0",
    ] {
        assert_eq!(
            directory(Path::new(ROOT), name),
            Err(Error::NotADirectoryName(name.to_owned()))
        );
    }
    assert_eq!(
        directory(Path::new(ROOT), "example.com/gpu.shared"),
        Ok("/mps/example.com/gpu.shared".into())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Each replica gets a part of the GPU.
    #[test]
    fn replicas_together_get_at_most_the_gpu(
        memory in proptest::collection::vec(prop_oneof![Just(0u64), 1..100u64, Just(40960), any::<u64>()], 1..9),
        replicas in 2..49u32,
    ) {
        let mut machine = PluginMachine { gpus: (0..).zip(&memory).map(|(index, _)| gpu(index)).collect(), ..PluginMachine::default() };
        for (gpu, memory) in machine.gpus.iter_mut().zip(&memory) {
            gpu.memory = MiB(*memory);
        }
        let Ok(plan) = plan(&share(SharingStrategy::Mps, replicas), &machine) else {
            prop_assert!(memory.iter().any(|memory| (1..u64::from(replicas)).contains(memory)));
            return Ok(());
        };
        for SharedGpu { index, limit, .. } in &plan[0].gpus {
            let total = memory[*index as usize];
            let limit = limit.map_or(0, |limit| limit.0);
            prop_assert_eq!(limit == 0, total == 0);
            prop_assert!(u128::from(limit) * u128::from(replicas) <= u128::from(total));
        }
        prop_assert!((1..=100).contains(&(plan[0].threads * replicas)));
    }

    #[test]
    fn no_resource_name_escapes_the_root(name in prop_oneof!["[a-z./]{0,12}", ".{0,20}", r"(\.\.|nvidia\.com|/|gpu){0,5}"]) {
        let mut config = config();
        config.sharing = share(SharingStrategy::Mps, 2).sharing;
        config.resources.gpus = vec![pattern("*", &name)];
        config.sharing.resources = vec![replicated(&name, 2)];
        let Ok(plan) = plan(&config, &machine(1)) else { return Ok(()) };
        let below = plan[0].directory.strip_prefix(ROOT).expect("below the root");
        prop_assert_eq!(below.components().count(), 2);
        prop_assert!(below.components().all(|part| matches!(part, Component::Normal(_))));
    }
}

/// A process of the container `c1` of the pod `p1`, and so on.
fn client(gpu: u32, container: u32, used: u64) -> MpsProcess {
    MpsProcess {
        gpu: u(gpu),
        pod: format!("p{container}"),
        container: format!("c{container}"),
        used: MiB(used),
    }
}

#[test]
fn a_containers_processes_count_together_for_its_share() {
    // One replica is 10240 MiB.
    let daemons = [one(4, &machine(2))];
    for (name, clients, above) in [
        ("no process", vec![], vec![]),
        ("exactly the share", vec![client(0, 1, 5120), client(0, 1, 5120)], vec![]),
        (
            "one more",
            vec![client(0, 1, 5120), client(0, 1, 5121)],
            vec![("c1", 0, 10241, 2)],
        ),
        ("two containers", vec![client(0, 1, 9000), client(0, 2, 9000)], vec![]),
        ("two GPUs", vec![client(0, 1, 9000), client(1, 1, 9000)], vec![]),
        ("one process", vec![client(0, 1, 10700)], vec![]),
        ("a GPU without MPS", vec![client(7, 1, 9000), client(7, 1, 9000)], vec![]),
        (
            "more than fits into a number",
            vec![client(1, 3, u64::MAX), client(1, 3, u64::MAX), client(1, 3, 1)],
            vec![("c3", 1, u64::MAX, 3)],
        ),
    ] {
        let found = SharesAbove::default().count(&daemons, &clients);
        let found: Vec<_> = found
            .iter()
            .map(|excess| (excess.container.as_str(), excess.index, excess.used.0, excess.processes))
            .collect();
        assert_eq!(found, above, "{name}");
    }
}

#[test]
fn an_excess_is_told_once_and_again_only_after_it_ended() {
    let daemons = [one(4, &machine(1))];
    let two = [client(0, 1, 9000), client(0, 1, 9000)];
    let mut shares = SharesAbove::default();
    let told: Vec<usize> = [&two[..], &two, &two[..1], &two]
        .into_iter()
        .map(|clients| shares.count(&daemons, clients).len())
        .collect();
    assert_eq!(told, [1, 0, 0, 1]);
    insta::assert_snapshot!(
        SharesAbove::default().count(&daemons, &two)[0],
        @"container c1 of pod p1 uses 18000 MiB of GPU 0 in 2 processes, but its share (1 nvidia.com/gpu) is 10240 MiB. MPS limits each process, not the container, so other pods may run out of memory. Start fewer processes in the container, or limit each to a part of the share with the variable CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    );
}
