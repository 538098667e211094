//! The clock by which a replica measures how long it leads.

/// Return the nanoseconds of a clock that never goes back and keeps counting while the machine is suspended.
pub(crate) fn boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
