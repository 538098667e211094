//! How a pod is held to its rate of compute time: a balance of GPU time, in nanoseconds.
//!
//! The balance grows with the rate of the pod. The agent reduces it by the time for which the driver says that the pod's processes kept the GPU busy
//! ([`Meter`]), and writes it into `limits`. The guards only read it: a launch passes if the balance is positive ([`turn`]), and otherwise waits. So a kernel
//! may be longer than the balance, but then it leaves a debt, which later launches wait off. How many launches a program makes does not matter, so it gains
//! nothing from few long kernels.
//!
//! The driver's numbers come late. Until the next measurement, a guard reduces the balance by an estimate: the launches since the last one, which all
//! processes of the pod count in their slots of `usage`, times the usual time of a launch. A pod that writes wrong counts makes only this estimate wrong. The
//! next measurement corrects it.
//!
//! - **If the pod has no limit, no launch waits.** A rate of 0 means no limit. So does the rate of a whole GPU, which cannot be exceeded.
//! - **No launch waits forever for its balance.** The balance has a lower bound, and no launch waits longer than the largest debt lasts ([`patience`]): it
//!   may be the launch for which a running kernel waits.
//! - **Launches of a pod that the agent has stopped wait until the agent says otherwise** ([`ShareLimits::is_stopped`]).
//! - **Without an agent the balance still grows**, so a pod whose agent is gone runs on, at the rate that the estimate allows.

use core::sync::atomic::Ordering;

use crate::limits::{ComputeAccount, ShareLimits, WHOLE};
use crate::usage::UsageFile;

/// The lowest balance. A pod that is below it, because one kernel ran this long, has used time that it does not pay for.
pub const DEBT: u64 = 5_000_000_000;
/// A balance is at most what grows in this time. A pod that was idle may run ahead of its rate by that much.
const BURST: u64 = 300_000_000;
/// How many launches pass at most until the balance is looked at again.
const LAUNCHES: u64 = 16;
/// With each measurement, the earlier ones lose this part, an eighth, of their weight in the usual time of a launch.
const FADE: u64 = 8;
/// Launches are summed in this many parts each. A sum of whole launches would stop fading below eight.
const PARTS: u64 = 1024;
/// The longest wait until the balance is looked at again.
const SLICE: u64 = 100_000_000;

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// This GPU has no limit of compute time, and the agent will not stop the pod.
    Free,
    /// The launch passes, and after it so many others without another look.
    Go(u64),
    /// The launch waits so many nanoseconds, or until the agent writes.
    Wait(u64),
}

/// Decide about a launch that arrived at the time `since`. `launches` is what [`launches`] returns now.
#[must_use]
pub fn turn(limits: &ShareLimits, launches: u64, now: u64, since: u64) -> Turn {
    if limits.is_stopped {
        return Turn::Wait(SLICE);
    }
    if !limits.limits_compute() {
        return if limits.may_stop { Turn::Go(LAUNCHES - 1) } else { Turn::Free };
    }
    let ComputeAccount {
        balance,
        at,
        launches: before,
        launch_ns,
    } = limits.account;
    let estimate = launches.saturating_sub(before).saturating_mul(launch_ns);
    let balance = balance
        .saturating_add_unsigned(grown(limits.rate, now.saturating_sub(at)))
        .saturating_sub_unsigned(estimate);
    if balance > 0 {
        // Until the time of a launch is known, each one is decided: it may be a long one.
        let fits = balance.unsigned_abs().checked_div(launch_ns).unwrap_or(0);
        return Turn::Go(fits.min(LAUNCHES).saturating_sub(1));
    }
    let left = patience(limits.rate).saturating_sub(now.saturating_sub(since));
    if left == 0 {
        return Turn::Go(0);
    }
    let missing = balance.unsigned_abs().saturating_add(1);
    // Rounded up, so that the balance is positive afterwards.
    let wait = missing.saturating_mul(WHOLE).checked_div(limits.rate).unwrap_or(0);
    Turn::Wait(wait.saturating_add(1000).min(SLICE).min(left))
}

/// The longest time for which a launch waits: as long as the largest debt lasts.
#[must_use]
pub fn patience(rate: u64) -> u64 {
    DEBT.saturating_mul(WHOLE).checked_div(rate).unwrap_or(0)
}

/// The launches that all processes of the pod have counted in their slots, also those that have ended.
#[must_use]
pub fn launches(usage: &UsageFile) -> u64 {
    let slots = usage.slots.iter().take(usage.bound());
    total(slots.map(|slot| slot.launches.load(Ordering::Relaxed)))
}

/// The same for the counts of all slots as the agent has read them. A pod can write any number there.
#[must_use]
pub fn total(launches: impl Iterator<Item = u64>) -> u64 {
    launches.fold(0, u64::saturating_add)
}

/// The agent's account of one pod's compute time on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    account: ComputeAccount,
    /// Busy time since the last measurement with a launch: one kernel can run through several.
    unsampled: u64,
    /// The busy time of recent measurements, in nanoseconds, and their launches, in [`PARTS`]. The usual time of a launch is their quotient. The mean of
    /// each measurement's quotient would be too long: while a full queue drains, the GPU is busy, but little is launched.
    busy: u64,
    made: u64,
}

impl Meter {
    /// A pod that has not used the GPU, or whose use until now is unknown.
    #[must_use]
    pub fn new(now: u64, launches: u64) -> Self {
        Self::resume(ComputeAccount {
            balance: 0,
            at: now,
            launches,
            launch_ns: 0,
        })
    }

    /// Continue with what an earlier agent wrote.
    #[must_use]
    pub fn resume(account: ComputeAccount) -> Self {
        Self {
            account,
            unsampled: 0,
            busy: 0,
            made: 0,
        }
    }

    /// What the agent writes into `limits`.
    #[must_use]
    pub fn account(&self) -> ComputeAccount {
        self.account
    }

    /// Take the result of a measurement: the time for which the pod's processes kept the GPU busy since the last one, in nanoseconds, and their
    /// launches until now. Return what the agent writes into `limits`.
    pub fn measure(&mut self, rate: u64, now: u64, busy: u64, launches: u64) -> ComputeAccount {
        let ComputeAccount {
            balance,
            at,
            launches: before,
            launch_ns,
        } = self.account;
        // The busy time first: the pod may have used what grew since the last measurement.
        let balance = balance
            .saturating_add_unsigned(grown(rate, now.saturating_sub(at)))
            .saturating_sub_unsigned(busy)
            .clamp(0_i64.saturating_sub_unsigned(DEBT), burst(rate));
        self.unsampled = self.unsampled.saturating_add(busy);
        let made = launches.saturating_sub(before);
        let launch_ns = if made == 0 {
            launch_ns
        } else {
            self.busy = (self.busy - self.busy / FADE).saturating_add(self.unsampled);
            self.made = (self.made - self.made / FADE).saturating_add(made.saturating_mul(PARTS));
            self.unsampled = 0;
            let usual = u128::from(self.busy) * u128::from(PARTS) / u128::from(self.made);
            u64::try_from(usual).unwrap_or(DEBT).min(DEBT)
        };
        self.account = ComputeAccount {
            balance,
            at: now,
            launches,
            launch_ns,
        };
        self.account
    }
}

/// What a balance grows by in some time. In microseconds, so that hours fit.
fn grown(rate: u64, time: u64) -> u64 {
    (time / 1000).saturating_mul(rate) / 1_000_000
}

fn burst(rate: u64) -> i64 {
    i64::try_from(grown(rate, BURST)).unwrap_or(i64::MAX)
}
