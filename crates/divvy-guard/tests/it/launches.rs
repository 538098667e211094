//! Launches wait while the pod has used up its compute time.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_shadow::sys;
use divvy_share::compute::{DEBT, Meter, total};
use divvy_share::limits::{self, ShareLimits, bell};
use divvy_share::limits::{ComputeAccount, WHOLE};
use divvy_share::usage;
use nix::time::{ClockId, clock_gettime};

use crate::sandbox::{MIB, Program, Sandbox, limits, ok};

const MS: u64 = 1_000_000;
const MEMORY: u64 = 8192 * MIB;

fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
    time.tv_sec().cast_unsigned() * 1000 * MS + time.tv_nsec().cast_unsigned()
}

/// Limits at this rate, with a balance that does not grow before a test ends. A balance of 1 is enough for one launch.
fn balance(rate: u64, balance: i64) -> ShareLimits {
    let account = ComputeAccount {
        balance,
        at: u64::MAX,
        launches: u64::MAX,
        launch_ns: 1,
    };
    ShareLimits {
        rate,
        account,
        ..limits(MEMORY)
    }
}

/// A rate at which the largest debt lasts for minutes.
const SLOW: u64 = WHOLE / 100;

/// A pod with this balance.
fn pod(account: i64) -> Sandbox {
    let sandbox = Sandbox::new(MEMORY);
    sandbox.give(0, &balance(SLOW, account));
    sandbox
}

/// Wake those that wait for the copy of this generation. Return how many there were.
fn wake(sandbox: &Sandbox, generation: u64) -> usize {
    let file = std::fs::File::open(sandbox.file(0, "limits")).unwrap();
    sys::wake(file.as_raw_fd(), limits::SIZE, bell(generation)).unwrap()
}

/// Return when a process waits in the kernel for the file of limits to change. After [`Sandbox::give`] its generation is 1.
fn wait_for_waiter(sandbox: &Sandbox, generation: u64) {
    let end = now() + 10_000 * MS;
    while wake(sandbox, generation + 1) == 0 {
        assert!(now() < end, "nothing waits");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_function_that_launches_waits_for_a_positive_balance() {
    let sandbox = pod(1);
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k_7ns");
    let graph = ok(&mut program, "graph");
    ok(&mut program, &format!("graph-kernel {graph} {kernel}"));
    let executable = ok(&mut program, &format!("graph-make {graph}"));
    let mut busy = 0;
    for name in [
        "cuLaunch",
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernelMultiDevice",
        "cuLaunchCooperativeKernel_ptsz",
        "cuLaunchGrid",
        "cuLaunchGridAsync",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchKernelEx_ptsz",
        "cuLaunchKernel_ptsz",
        "cuGraphLaunch",
        "cuGraphLaunch_ptsz",
    ] {
        let what = if name.starts_with("cuGraph") { executable } else { kernel };
        let generation = sandbox.change(&balance(SLOW, -1));
        program.send(&format!("launch {name} {what}"));
        wait_for_waiter(&sandbox, generation);
        assert_eq!(sandbox.busy(program.pid()), busy, "{name} did not wait");
        let generation = sandbox.change(&balance(SLOW, 1));
        wake(&sandbox, generation);
        assert_eq!(program.answer().map(|answer| answer[0]), Some(0), "{name}");
        busy += 7;
        assert_eq!(sandbox.busy(program.pid()), busy, "{name}");
        let counted: u64 = sandbox.slots().iter().map(|slot| slot.launches).sum();
        assert_eq!(counted, busy / 7, "{name} was not counted once");
    }
}

#[test]
fn a_balance_that_grows_ends_a_wait_without_a_write() {
    let sandbox = Sandbox::new(MEMORY);
    let owing = |at| {
        let mut owing = balance(WHOLE / 2, -(100 * MS as i64));
        owing.account.at = at;
        owing
    };
    sandbox.give(0, &owing(now()));
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k");
    assert_eq!(sandbox.totals().throttled_ns, Some(0), "nothing has waited");
    let start = now();
    sandbox.change(&owing(start));
    let before = now();
    ok(&mut program, &format!("launch cuLaunchKernel {kernel}"));
    let end = now();
    assert!(end - start >= 200 * MS);
    // All of it was waiting, except for what the program and this test did besides.
    let waited = sandbox.totals().throttled_ns.unwrap();
    assert!(
        waited <= end - before && waited >= 100 * MS,
        "{waited} ns of {}",
        end - before
    );
}

#[test]
fn all_threads_that_wait_go_on() {
    let sandbox = pod(-1);
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k_7ns");
    program.send(&format!("launch-threads {kernel} 8"));
    wait_for_waiter(&sandbox, 1);
    let generation = sandbox.change(&balance(SLOW, 1));
    wake(&sandbox, generation);
    assert_eq!(program.answer().map(|answer| answer[0]), Some(0));
    assert_eq!(sandbox.busy(program.pid()), 8 * 7);
}

/// Each of these has a debt in a file that does not hold the process.
#[test]
fn without_a_limit_that_holds_nothing_waits() {
    let owing = balance(SLOW, -(DEBT as i64));
    let without = ShareLimits { rate: 0, ..owing };
    let whole = ShareLimits { rate: WHOLE, ..owing };
    let give = |files: &[(usize, ShareLimits)]| {
        let sandbox = Sandbox::new(MEMORY);
        for (gpu, limits) in files {
            sandbox.give(*gpu, limits);
        }
        sandbox
    };
    let mut newer = owing.file();
    for version in [8, limits::SIZE / 2 + 8] {
        newer[version] = 9;
    }
    let cases = [
        ("no rate", give(&[(0, without)])),
        ("the whole GPU", give(&[(0, whole)])),
        ("another GPU", give(&[(0, without), (1, owing)])),
        ("a later version", give(&[(0, owing), (1, owing)])),
    ];
    fs::write(cases[3].1.file(0, "limits"), newer).unwrap();
    for (name, sandbox) in cases {
        let mut program = sandbox.start();
        ok(&mut program, "init");
        ok(&mut program, "retain 0");
        let kernel = ok(&mut program, "kernel k_7ns");
        for _ in 0..20 {
            ok(&mut program, &format!("launch cuLaunchKernel {kernel}"));
        }
        assert_eq!(sandbox.busy(program.pid()), 20 * 7, "{name}");
        let throttled = sandbox.totals().throttled_ns;
        assert!(throttled.is_none_or(|waited| waited == 0), "{name}: {throttled:?}");
    }
}

#[test]
fn a_process_that_is_held_notices_a_limit_that_came_later() {
    let sandbox = Sandbox::new(MEMORY);
    sandbox.give(0, &limits(MEMORY));
    // The limit of the other GPU makes it look.
    sandbox.give(1, &balance(SLOW, 1));
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k_7ns");
    ok(&mut program, &format!("launch cuLaunchKernel {kernel}"));
    let generation = sandbox.change(&balance(SLOW, -1));
    program.send(&format!("work {kernel} 1"));
    wait_for_waiter(&sandbox, generation);
    assert!(sandbox.busy(program.pid()) <= 7 * 1002);
}

/// A process that uses two GPUs, whose current one is the second, and a kernel of each.
fn on_two_gpus(sandbox: &Sandbox) -> (Program, [u64; 2]) {
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    let kernels = [0, 1].map(|gpu| {
        ok(&mut program, &format!("retain {gpu}"));
        ok(&mut program, "kernel k_7ns")
    });
    (program, kernels)
}

/// While a GPU has balance, launches pass on it without a question which one is meant. They must not pass on the other one.
#[test]
fn launches_wait_only_on_the_gpu_without_balance() {
    let sandbox = pod(-1);
    sandbox.give(1, &balance(SLOW, i64::MAX));
    let (mut program, [first, second]) = on_two_gpus(&sandbox);
    for _ in 0..50 {
        ok(&mut program, &format!("launch cuLaunchKernel {second}"));
    }
    ok(&mut program, "retain 0");
    program.send(&format!("launch cuLaunchKernel {first}"));
    wait_for_waiter(&sandbox, 1);
    assert_eq!(sandbox.busy(program.pid()), 0);
    // With a balance, as many launches as the other GPU lets pass.
    let generation = sandbox.change(&balance(SLOW, i64::MAX));
    wake(&sandbox, generation);
    assert_eq!(program.answer().map(|answer| answer[0]), Some(0));
    for _ in 0..50 {
        ok(&mut program, &format!("launch cuLaunchKernel {first}"));
    }
    // Those that were allowed already pass, and not more.
    let generation = sandbox.change(&balance(SLOW, -1));
    let before = sandbox.busy(program.pid());
    program.send(&format!("work {first} 1"));
    wait_for_waiter(&sandbox, generation);
    assert!(sandbox.busy(program.pid()) - before <= 7 * 16);
}

/// Each GPU's count is a sample: what is counted is right in total, and right for each GPU on average.
#[test]
fn launches_count_for_the_gpu_they_run_on() {
    let sandbox = pod(i64::MAX);
    sandbox.give(1, &balance(SLOW, i64::MAX));
    let (mut program, kernels) = on_two_gpus(&sandbox);
    // Twice as many on the first.
    for round in 0..1020 {
        let gpu = usize::from(round % 3 == 0);
        ok(&mut program, &format!("retain {gpu}"));
        ok(&mut program, &format!("launch cuLaunchKernel {}", kernels[gpu]));
    }
    let counted = [0, 1].map(|gpu| {
        let file = fs::read(sandbox.file(gpu, "usage")).unwrap();
        let content = usage::parse(&file).unwrap();
        content.slots().map(|slot| slot.launches).sum::<u64>()
    });
    let [first, second] = counted;
    assert!((1020..1020 + 2 * 16).contains(&(first + second)), "{counted:?}");
    assert!((600..760).contains(&first), "{counted:?}");
}

/// The agent stops a pod, of which one program avoids the guard. Its other programs wait.
#[test]
fn launches_of_a_pod_wait_while_it_is_stopped() {
    let sandbox = Sandbox::new(MEMORY);
    let going = ShareLimits {
        may_stop: true,
        ..limits(MEMORY)
    };
    let stopped = ShareLimits {
        is_stopped: true,
        ..going
    };
    sandbox.give(0, &going);
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k_7ns");
    ok(&mut program, &format!("launch cuLaunchKernel {kernel}"));
    let generation = sandbox.change(&stopped);
    program.send(&format!("work {kernel} 1"));
    wait_for_waiter(&sandbox, generation);
    let busy = sandbox.busy(program.pid());
    assert!(busy <= 7 * 20, "{busy} ns: it notices within a few launches");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(sandbox.busy(program.pid()), busy, "it looks again and again, and waits");
    assert!(
        sandbox.totals().throttled_ns > Some(100 * MS),
        "the wait is counted while it lasts"
    );
    let generation = sandbox.change(&going);
    wake(&sandbox, generation);
    let end = now() + 10_000 * MS;
    while sandbox.busy(program.pid()) == busy {
        assert!(now() < end, "it still waits");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a program in the pod writes into `usage` does not hide its launches from the balance. A program that starts with such a file gets no context.
#[test]
fn a_damaged_file_of_usage_does_not_open_the_gate() {
    let sandbox = pod(-1);
    let mut program = sandbox.ready();
    let kernel = ok(&mut program, "kernel k_7ns");
    let usage = fs::File::options().write(true).open(sandbox.file(0, "usage")).unwrap();
    usage.write_all_at(&[0xff; usage::SIZE], 0).unwrap();
    program.send(&format!("launch cuLaunchKernel {kernel}"));
    wait_for_waiter(&sandbox, 1);
    assert_eq!(sandbox.busy(program.pid()), 0);
}

/// A pod that works, and its rate.
struct Worker {
    sandbox: Sandbox,
    programs: Vec<Program>,
    rate: u64,
    meter: Meter,
    seen: u64,
}

impl Worker {
    /// Each process of the pod launches so many kernels, waits for them, and begins again.
    fn start(sandbox: Sandbox, percent: u64, processes: usize, kernel: &str, at_once: u64) -> Self {
        let rate = percent * WHOLE / 100;
        // Without what a pod that was idle has, which is much of a short test.
        let account = ComputeAccount {
            balance: 0,
            at: now(),
            ..ComputeAccount::default()
        };
        let held = ShareLimits {
            rate,
            account,
            ..limits(MEMORY / 4)
        };
        sandbox.give(0, &held);
        let programs = std::iter::repeat_with(|| {
            let mut program = sandbox.ready();
            let function = ok(&mut program, &format!("kernel {kernel}"));
            program.send(&format!("work {function} {at_once}"));
            program
        });
        Self {
            programs: programs.take(processes).collect(),
            sandbox,
            rate,
            meter: Meter::resume(account),
            seen: 0,
        }
    }

    /// The GPU time of the pod, which the driver tells for each process.
    fn busy(&self) -> u64 {
        self.programs.iter().map(|program| self.sandbox.busy(program.pid())).sum()
    }

    /// What the agent does after each interval.
    fn measure(&mut self) {
        let busy = self.busy();
        let launches = total(self.sandbox.slots().iter().map(|slot| slot.launches));
        let account = self.meter.measure(self.rate, now(), busy - self.seen, launches);
        self.seen = busy;
        let generation = self.sandbox.change(&ShareLimits {
            rate: self.rate,
            account,
            ..limits(MEMORY / 4)
        });
        wake(&self.sandbox, generation);
    }
}

/// Let pods work for some seconds, with an agent that measures every 50 ms. Return their shares of the GPU in percent, and what they have left.
fn shares(mut workers: Vec<Worker>, time: Duration) -> Vec<(f64, i64)> {
    let start = now();
    let before: Vec<u64> = workers.iter().map(Worker::busy).collect();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(time);
            ended.store(true, Ordering::Relaxed);
        });
        while !ended.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
            for worker in &mut workers {
                worker.measure();
            }
        }
    });
    let passed = (now() - start) as f64;
    let result = workers.iter().zip(before).map(|(worker, before)| {
        let had = worker.busy() - before;
        (had as f64 * 100.0 / passed, worker.meter.account().balance)
    });
    result.collect()
}

#[test]
fn two_pods_have_their_shares_of_a_busy_gpu() {
    let first = Sandbox::new(MEMORY);
    let second = first.beside();
    let workers = vec![
        Worker::start(first, 25, 1, "k_10000000ns", 6),
        // The simulated GPU serves launches in their order. With several processes there is always a launch that it can serve.
        Worker::start(second, 75, 3, "k_10000000ns", 4),
    ];
    let shares = shares(workers, Duration::from_secs(5));
    assert_held(&shares, &[25.0, 75.0]);
}

/// Check that each pod has its share, within 5 points. On a machine that is too busy, the processes do not keep the simulated GPU busy. Then they have
/// less, and time left: it was not the limit that held them.
fn assert_held(shares: &[(f64, i64)], rates: &[f64]) {
    for ((share, left), rate) in shares.iter().zip(rates) {
        assert!(*share <= rate + 5.0, "{shares:?}");
        let is_busy = *share >= rate - 5.0 || *left > 50 * MS as i64;
        assert!(
            is_busy || divvy_skip::emulated("the emulator was too slow to keep the GPU busy"),
            "{shares:?}"
        );
    }
}

/// The hole of controllers that compare before they subtract: each launch finds a positive balance after a synchronization.
#[test]
fn huge_kernels_with_synchronizations_keep_their_share() {
    let workers = vec![Worker::start(Sandbox::new(MEMORY), 30, 1, "gemm_150000000ns", 1)];
    let shares = shares(workers, Duration::from_secs(5));
    assert_held(&shares, &[30.0]);
}
