//! Shares of a GPU's time, in virtual time.

use std::collections::VecDeque;

use divvy_share::compute::{DEBT, Meter, Turn, patience, turn};
use divvy_share::limits::ShareLimits;
use divvy_share::limits::{ComputeAccount, WHOLE};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// The step of the simulated time, and the time for which the GPU serves one pod before it serves the next.
const STEP: u64 = MS / 10;

/// What a pod launches: kernels of these lengths, again and again.
#[derive(Clone, Debug)]
struct Work {
    kernels: Vec<u64>,
    /// How many launches are in its stream at the same time. 1: it synchronizes after each.
    depth: usize,
    /// After so many launches it does nothing for some time.
    burst: u64,
    idle: u64,
}

/// What decides whether a launch passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    /// Measured busy time.
    Measured,
    /// Launches are counted: each costs as much as any other, and as many pass as would give the rate if they took this time.
    Counted(u64),
}

struct Pod {
    work: Work,
    control: Control,
    limits: ShareLimits,
    meter: Meter,
    /// What is left of each launched kernel.
    stream: VecDeque<u64>,
    /// The launches that were counted, and those that it has made: a few are counted before they are made.
    counted: u64,
    made: u64,
    credit: u64,
    since: Option<u64>,
    resume: u64,
    /// The GPU time that it has had, after each step.
    had: Vec<u64>,
    waited: u64,
}

impl Pod {
    fn new(rate: u64, work: Work, control: Control) -> Self {
        let meter = Meter::new(0, 0);
        Self {
            work,
            control,
            limits: ShareLimits {
                rate,
                account: meter.account(),
                ..ShareLimits::default()
            },
            meter,
            stream: VecDeque::new(),
            counted: 0,
            made: 0,
            credit: 0,
            since: None,
            resume: 0,
            had: vec![0],
            waited: 0,
        }
    }

    fn passes(&mut self, now: u64) -> bool {
        if let Control::Counted(usual) = self.control {
            let rate = u128::from(self.limits.rate);
            return u128::from(self.made * usual) * u128::from(WHOLE) <= u128::from(now) * rate;
        }
        if self.credit > 0 {
            self.credit -= 1;
            return true;
        }
        match turn(&self.limits, self.counted, now, *self.since.get_or_insert(now)) {
            Turn::Free => {}
            Turn::Go(more) => {
                self.credit = more;
                self.counted += 1 + more;
            }
            Turn::Wait(_) => return false,
        }
        self.since = None;
        true
    }

    fn launch(&mut self, now: u64) {
        while now >= self.resume && self.stream.len() < self.work.depth {
            if !self.passes(now) {
                self.waited += STEP;
                return;
            }
            let kernels = &self.work.kernels;
            self.stream.push_back(kernels[self.made as usize % kernels.len()]);
            self.made += 1;
            if self.made.is_multiple_of(self.work.burst) {
                self.resume = now + self.work.idle;
            }
        }
    }

    fn total(&self) -> u64 {
        self.total_at(u64::MAX)
    }

    fn total_at(&self, time: u64) -> u64 {
        self.had[(time / STEP).min(self.had.len() as u64 - 1) as usize]
    }
}

/// How the driver measures.
#[derive(Clone, Copy, Debug)]
struct Driver {
    interval: u64,
    /// How old its numbers are.
    lag: u64,
}

/// Let pods share a GPU for some time. The GPU serves all streams with work in turn, as the real one does with processes.
fn run(pods: &mut [Pod], driver: Driver, time: u64) {
    let mut first = 0;
    for step in 1..=time / STEP {
        let now = step * STEP;
        let mut left = STEP;
        let before: Vec<u64> = pods.iter().map(Pod::total).collect();
        let mut had = before.clone();
        // Work may be launched in the middle of a step.
        for _ in 0..64 {
            for pod in pods.iter_mut() {
                pod.launch(now);
            }
            let Some(index) = (0..pods.len())
                .map(|n| (first + n) % pods.len())
                .find(|n| !pods[*n].stream.is_empty())
            else {
                break;
            };
            while let Some(kernel) = pods[index].stream.front_mut().filter(|_| left > 0) {
                let part = left.min(*kernel);
                (*kernel, left, had[index]) = (*kernel - part, left - part, had[index] + part);
                if *kernel == 0 {
                    pods[index].stream.pop_front();
                }
            }
            if left == 0 {
                first = index + 1;
                break;
            }
        }
        for (pod, had) in pods.iter_mut().zip(had) {
            pod.had.push(had);
        }
        if now.is_multiple_of(driver.interval) {
            for pod in pods.iter_mut() {
                let seen = |time: u64| pod.total_at(time.saturating_sub(driver.lag));
                let busy = seen(now) - seen(now - driver.interval);
                // The driver tells a whole number of percent.
                let busy = (busy * 100 + driver.interval / 2) / driver.interval * driver.interval / 100;
                pod.limits.account = pod.meter.measure(pod.limits.rate, now, busy, pod.counted);
            }
        }
    }
}

/// The share of the GPU that a pod had, in percent.
fn share(pod: &Pod, time: u64) -> f64 {
    pod.total() as f64 * 100.0 / time as f64
}

/// Work without pauses.
fn steady(kernels: Vec<u64>, depth: usize) -> Work {
    Work {
        kernels,
        depth,
        burst: u64::MAX,
        idle: 0,
    }
}

fn percent(rate: u64) -> u64 {
    rate * WHOLE / 100
}

/// Work that always has something to launch.
fn busy_work() -> impl Strategy<Value = Work> {
    let kernel = prop_oneof![
        4 => 20_000..MS,
        2 => MS..20 * MS,
        1 => 20 * MS..200 * MS,
    ];
    let stream = (prop::collection::vec(kernel, 1..5), prop_oneof![Just(1), 2..8_usize]);
    prop_oneof![
        3 => stream.prop_map(|(kernels, depth)| steady(kernels, depth)),
        // Many tiny kernels in a deep queue.
        1 => (20_000..200_000_u64).prop_map(|kernel| steady(vec![kernel], 1000)),
    ]
}

/// Let programs with long kernels synchronize after each kernel. Otherwise a pod could launch many long kernels before the first measurement, and get more than
/// its share. If all rates add up to the whole GPU, the other pods cannot get that time back.
fn without_backlog(work: Work) -> Work {
    let long = work.kernels.iter().any(|kernel| *kernel > 20 * MS);
    Work {
        depth: if long { 1 } else { work.depth },
        ..work
    }
}

fn driver() -> impl Strategy<Value = Driver> {
    (prop_oneof![Just(50), Just(100), Just(200)], 0..3_u64).prop_map(|(interval, lag)| Driver {
        interval: interval * MS,
        lag: lag * 50 * MS,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 60, ..ProptestConfig::default() })]

    #[test]
    fn a_pod_alone_has_its_rate_whatever_it_launches(rate in 20..100_u64, work in busy_work(), driver in driver()) {
        let mut pods = [Pod::new(percent(rate), work, Control::Measured)];
        run(&mut pods, driver, 10 * SECOND);
        let share = share(&pods[0], 10 * SECOND);
        prop_assert!((share - rate as f64).abs() <= 5.0, "{share} % of {rate} %");
    }

    #[test]
    fn pods_that_share_a_gpu_have_their_rates(
        rates in prop::sample::select(vec![vec![25, 75], vec![50, 50], vec![30, 30, 40], vec![20, 20, 60], vec![20, 30]]),
        work in prop::collection::vec(busy_work().prop_map(without_backlog), 3),
        driver in driver(),
    ) {
        let mut pods: Vec<Pod> = rates.iter().zip(work).map(|(rate, work)| Pod::new(percent(*rate), work, Control::Measured)).collect();
        run(&mut pods, driver, 10 * SECOND);
        for (pod, rate) in pods.iter().zip(&rates) {
            let share = share(pod, 10 * SECOND);
            prop_assert!((share - *rate as f64).abs() <= 5.0, "{share} % of {rate} %");
        }
    }

    /// A pod that was idle may run ahead of its rate by one burst only.
    #[test]
    fn a_pod_that_pauses_has_at_most_its_rate(
        rate in 20..100_u64,
        work in busy_work(),
        burst in 1..200_u64,
        idle in 0..2 * SECOND,
        driver in driver(),
    ) {
        let mut pods = [Pod::new(percent(rate), Work { burst, idle, ..work }, Control::Measured)];
        run(&mut pods, driver, 10 * SECOND);
        let share = share(&pods[0], 10 * SECOND);
        prop_assert!(share <= rate as f64 + 5.0, "{share} % of {rate} %");
    }

    #[test]
    fn a_pod_without_a_limit_never_waits(rate in prop_oneof![Just(0), Just(WHOLE)], work in busy_work(), other in busy_work(), driver in driver()) {
        let mut pods = [Pod::new(rate, work, Control::Measured), Pod::new(percent(30), other, Control::Measured)];
        run(&mut pods, driver, 3 * SECOND);
        prop_assert_eq!(pods[0].waited, 0);
    }

    /// Also with what no agent writes.
    #[test]
    fn every_launch_passes_in_the_end(
        rate in 0..2 * WHOLE,
        (balance, at, before, launch_ns) in any::<(i64, u64, u64, u64)>(),
        (launches, since) in any::<(u64, u64)>(),
    ) {
        let limits = ShareLimits { rate, account: ComputeAccount { balance, at, launches: before, launch_ns }, ..ShareLimits::default() };
        let wait = match turn(&limits, launches, since, since) {
            Turn::Wait(wait) => wait,
            Turn::Free | Turn::Go(_) => 0,
        };
        prop_assert!(wait <= patience(rate) && wait <= SECOND / 10);
        let end = since.saturating_add(patience(rate));
        prop_assume!(end - since == patience(rate));
        let turn = turn(&limits, launches, end, since);
        prop_assert!(!matches!(turn, Turn::Wait(_)), "{:?}", turn);
    }

    #[test]
    fn a_balance_stays_between_the_largest_debt_and_the_burst(
        steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), prop_oneof![any::<u64>(), 0..50_u64]), 1..50),
    ) {
        let mut meter = Meter::new(0, 0);
        for (rate, now, busy, launches) in steps {
            let account = meter.measure(rate % (2 * WHOLE), now, busy, launches);
            prop_assert!(account.balance >= -(DEBT as i64) && account.balance <= 2 * WHOLE as i64 * 3 / 10, "{account:?}");
            prop_assert!(account.launch_ns <= DEBT);
        }
    }
}

/// Launches before the first measurement, and launches that are still queued at one, must not distort the account for long. The pod with the largest rate would
/// lose the most.
/// The other pods run long kernels and keep their queues full.
#[test]
fn others_kernels_cost_no_pod_its_rate() {
    let cases = [
        (
            50,
            100,
            [20, 20, 60],
            [(vec![174_221_148], 1), (vec![529_882], 1), (vec![20_985, 20_000], 1)],
        ),
        (
            50,
            100,
            [20, 20, 60],
            [(vec![1_853_520], 1), (vec![188_560_551], 1), (vec![173_722], 2)],
        ),
        (
            100,
            50,
            [30, 30, 40],
            [
                (vec![101_875_001], 1),
                (vec![56_773], 1),
                (vec![668_138, 114_475_194, 261_333], 1),
            ],
        ),
        (
            100,
            100,
            [20, 20, 60],
            [(vec![165_459], 1000), (vec![467_963, 819_667], 1), (vec![162_229], 1000)],
        ),
    ];
    for (interval, lag, rates, work) in cases {
        let pods = rates.iter().zip(work.clone());
        let mut pods: Vec<Pod> = pods
            .map(|(rate, (kernels, depth))| Pod::new(percent(*rate), steady(kernels, depth), Control::Measured))
            .collect();
        let driver = Driver {
            interval: interval * MS,
            lag: lag * MS,
        };
        run(&mut pods, driver, 10 * SECOND);
        for (pod, rate) in pods.iter().zip(rates) {
            let share = share(pod, 10 * SECOND);
            assert!((share - rate as f64).abs() <= 3.0, "{share} % of {rate} %: {work:?}");
        }
    }
}

#[test]
fn a_launch_waits_for_a_positive_balance() {
    let account = |balance, launch_ns| ComputeAccount {
        balance,
        at: 1000 * MS,
        launches: 7,
        launch_ns,
    };
    let half = percent(50);
    let cases = [
        (0, account(-1000, 1), 7, Turn::Free),
        (WHOLE, account(-1000, 1), 7, Turn::Free),
        // The balance grows by 5 ms until now.
        (half, account(0, 0), 7, Turn::Go(0)),
        (half, account(0, MS), 7, Turn::Go(4)),
        (half, account(0, 1000), 7, Turn::Go(15)),
        (half, account(0, 50 * MS), 7, Turn::Go(0)),
        // Three launches since the measurement.
        (half, account(0, MS), 10, Turn::Go(1)),
        (half, account(0, 2 * MS), 10, Turn::Wait(2 * MS + 1002)),
        (half, account(-7 * (MS as i64), 0), 7, Turn::Wait(4 * MS + 1002)),
        (half, account(-(DEBT as i64), 0), 7, Turn::Wait(100 * MS)),
        // Somebody in the pod has changed the counts.
        (half, account(0, MS), 0, Turn::Go(4)),
        (half, account(0, MS), u64::MAX, Turn::Wait(100 * MS)),
    ];
    for (rate, account, launches, expected) in cases {
        let limits = ShareLimits {
            rate,
            account,
            ..ShareLimits::default()
        };
        assert_eq!(
            turn(&limits, launches, 1010 * MS, 1010 * MS),
            expected,
            "{rate} {account:?} {launches}"
        );
    }
}

#[test]
fn launches_of_a_pod_that_is_stopped_wait_whatever_it_has_left() {
    for rate in [0, percent(30), WHOLE] {
        let account = ComputeAccount {
            balance: 1,
            ..ComputeAccount::default()
        };
        let limits = ShareLimits {
            rate,
            account,
            is_stopped: true,
            ..ShareLimits::default()
        };
        for since in [0, u64::MAX] {
            assert_eq!(turn(&limits, 0, u64::MAX, since), Turn::Wait(SECOND / 10));
        }
        let going = ShareLimits {
            is_stopped: false,
            may_stop: true,
            ..limits
        };
        assert!(
            matches!(turn(&going, 0, 0, 0), Turn::Go(more) if more < 20),
            "it looks again soon"
        );
    }
}

/// Each kernel is longer than what the rate gives in any measurement.
#[test]
fn a_huge_kernel_leaves_a_debt_that_is_waited_off() {
    let driver = Driver {
        interval: 100 * MS,
        lag: 100 * MS,
    };
    for kernel in [500 * MS, SECOND, 3 * SECOND] {
        let mut pods = [Pod::new(percent(30), steady(vec![kernel], 1), Control::Measured)];
        let time = 40 * kernel;
        run(&mut pods, driver, time);
        let share = share(&pods[0], time);
        assert!((share - 30.0).abs() <= 5.0, "{share} % with kernels of {kernel} ns");
    }
}

/// Why launches are not counted: if each counts alike, the share of a pod depends on how long its kernels are.
#[test]
fn counted_launches_give_shares_that_depend_on_the_kernels() {
    let driver = Driver {
        interval: 100 * MS,
        lag: 0,
    };
    let shares = |control| {
        let works = [steady(vec![MS / 5], 4), steady(vec![20 * MS], 4)];
        let mut pods = works.map(|work| Pod::new(percent(30), work, control));
        run(&mut pods, driver, 10 * SECOND);
        pods.map(|pod| share(&pod, 10 * SECOND))
    };
    for share in shares(Control::Measured) {
        assert!((share - 30.0).abs() <= 5.0, "{share} % measured");
    }
    // Whatever time a launch counts as, one of them is far off.
    for usual in [MS / 5, 2 * MS, 20 * MS] {
        let shares = shares(Control::Counted(usual));
        let worst = shares.iter().map(|share| (share - 30.0).abs()).fold(0.0, f64::max);
        assert!(worst >= 20.0, "{shares:?} if a launch counts as {usual} ns");
    }
}

/// The agent has stopped: the last balance grows on, and no pod stands still or waits longer for each launch.
#[test]
fn without_measurements_a_pod_runs_at_about_its_rate() {
    let driver = Driver {
        interval: 100 * MS,
        lag: 0,
    };
    let mut pods = [Pod::new(percent(40), steady(vec![2 * MS], 4), Control::Measured)];
    run(&mut pods, driver, 2 * SECOND);
    let mut gone = Pod {
        limits: pods[0].limits,
        counted: pods[0].counted,
        ..Pod::new(percent(40), steady(vec![2 * MS], 4), Control::Measured)
    };
    // The simulated time starts again, so the account does, too.
    gone.limits.account.at = 0;
    let never = Driver {
        interval: u64::MAX,
        lag: 0,
    };
    let mut pods = [gone];
    run(&mut pods, never, 20 * SECOND);
    let share = share(&pods[0], 20 * SECOND);
    assert!((share - 40.0).abs() <= 5.0, "{share} %");
}
