//! Leader election among replicas: a state machine over the Lease, the replica's own clock, and its own identity. No I/O, no clock.
//!
//! The rules and numbers are those of client-go (`tools/leaderelection`):
//!
//! - A follower waits until the Lease has not changed for [`Rules::lease_ns`] by *its own* clock. Then it may take the Lease over.
//! - The leader leads for [`Rules::hold_ns`] by its own clock, counted from the moment at which it *sent* the last write that was
//!   acknowledged. Every [`Rules::retry_ns`] it writes again.
//! - A replica never compares times that others wrote with its own clock.
//! - Each write names the version that the replica read, so the API server carries out only one of two concurrent writes.
//!
//! ```text
//! leader     sends a write ── hold_ns (10 s) ──► stops binding, unless a later write was acknowledged
//! follower         └► reads the new Lease ─────── lease_ns (15 s) ───────► takes over, unless the Lease has changed
//! ```
//!
//! A follower can only read a write after the leader has sent it. Therefore two replicas never lead at the same time, however wrong
//! their clocks are, as long as no clock runs `lease_ns / hold_ns` (1.5) times as fast as another.

/// The durations of the election, in nanoseconds of the replica's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A Lease that has not changed for this long is free.
    pub lease_ns: u64,
    /// The replica leads for this long after it sent a write of the Lease.
    pub hold_ns: u64,
    /// Pause between two reads of the Lease.
    pub retry_ns: u64,
}

impl Default for Rules {
    fn default() -> Rules {
        const S: u64 = 1_000_000_000;
        Rules {
            lease_ns: 15 * S,
            hold_ns: 10 * S,
            retry_ns: 2 * S,
        }
    }
}

impl Rules {
    /// Compute the rules for a lease of this length, in the proportions of client-go's numbers: held for two thirds of the length, and read
    /// every 2/15 of it.
    pub fn of(lease: std::time::Duration) -> Rules {
        let lease_ns = u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX);
        Rules {
            lease_ns,
            hold_ns: lease_ns / 3 * 2,
            retry_ns: lease_ns / 15 * 2,
        }
    }
}

/// The content of the Lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The holder's identity; empty if the Lease is free.
    pub holder: String,
    /// The length of the lease that the holder states, in seconds.
    pub lease_s: i32,
    /// When the holder took the Lease, in Unix microseconds of its clock. Only for people who read the Lease.
    pub acquired_us: i64,
    /// When the holder last wrote the Lease, in Unix microseconds of its clock. Other replicas only check whether it changes.
    pub renewed_us: i64,
    /// How often the holder has changed.
    pub transitions: i32,
}

/// The next step after a read of the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ElectionStep {
    /// Another replica holds the Lease: do nothing.
    Wait,
    /// The Lease does not exist: create it, then call [`Election::written`].
    Create(LeaseRecord),
    /// Replace the Lease if it still has this version, then call [`Election::written`].
    Replace {
        /// The `resourceVersion` that was read.
        version: String,
        /// The content to write.
        record: LeaseRecord,
    },
}

/// One replica's view of the election.
#[derive(Debug, Clone)]
pub struct Election {
    identity: String,
    rules: Rules,
    /// The content that was last read, and when this content was first seen.
    observed: Option<(LeaseRecord, u64)>,
    /// The version of the last read or the last acknowledged write.
    version: String,
    held_until_ns: u64,
}

impl Election {
    /// Make a view that does not hold the Lease. The identity must be unique to this process: two processes with the same identity would both
    /// consider themselves the holder.
    pub fn new(identity: String, rules: Rules) -> Election {
        Election {
            identity,
            rules,
            observed: None,
            version: String::new(),
            held_until_ns: 0,
        }
    }

    /// Return the durations of the election.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// Return the time by the replica's own clock until which it leads; 0 if it has never led or has released
    /// the Lease.
    pub fn held_until_ns(&self) -> u64 {
        self.held_until_ns
    }

    /// Return the holder's identity as last seen; `None` if the Lease is free or has not been read.
    pub fn holder(&self) -> Option<&str> {
        self.observed
            .as_ref()
            .map(|(record, _)| record.holder.as_str())
            .filter(|holder| !holder.is_empty())
    }

    /// Report whether a write now would take the Lease over rather than renew it.
    pub fn would_take_over(&self) -> bool {
        self.holder() != Some(&self.identity)
    }

    /// Handle a read of the Lease: its content and its version, or `None` if it does not exist. Return the next step. `unix_us`
    /// is used only for the times in the record to write.
    pub fn read(&mut self, found: Option<(LeaseRecord, String)>, now_ns: u64, unix_us: i64) -> ElectionStep {
        let fresh = LeaseRecord {
            holder: self.identity.clone(),
            lease_s: i32::try_from(self.rules.lease_ns / 1_000_000_000).unwrap_or(i32::MAX),
            acquired_us: unix_us,
            renewed_us: unix_us,
            transitions: 0,
        };
        let Some((record, version)) = found else {
            self.observed = None;
            return ElectionStep::Create(fresh);
        };
        self.version = version.clone();
        if self.observed.as_ref().is_none_or(|(known, _)| *known != record) {
            self.observed = Some((record.clone(), now_ns));
        }
        let since_ns = self.observed.as_ref().map_or(now_ns, |(_, at)| *at);
        if record.holder == self.identity {
            let renewed = LeaseRecord {
                acquired_us: record.acquired_us,
                // A wall clock that was set back can show the same time again. The API server ignores a write that changes nothing, and
                // the other replicas would not see that this one is alive.
                renewed_us: unix_us.saturating_add(i64::from(unix_us == record.renewed_us)),
                transitions: record.transitions,
                ..fresh
            };
            return ElectionStep::Replace {
                version,
                record: renewed,
            };
        }
        // A holder with another version of Divvy may state a longer lease. Respect up to a minute.
        let said_ns = u64::try_from(record.lease_s.clamp(0, 60)).unwrap_or(0) * 1_000_000_000;
        let free_ns = since_ns.saturating_add(self.rules.lease_ns.max(said_ns));
        if !record.holder.is_empty() && now_ns < free_ns {
            return ElectionStep::Wait;
        }
        ElectionStep::Replace {
            version,
            record: LeaseRecord {
                transitions: record.transitions.saturating_add(1),
                ..fresh
            },
        }
    }

    /// Record that a write was acknowledged. `sent_ns` is when it was sent, by the replica's own clock.
    pub fn written(&mut self, record: LeaseRecord, version: String, sent_ns: u64) {
        self.observed = Some((record, sent_ns));
        self.version = version;
        self.held_until_ns = self.held_until_ns.max(sent_ns.saturating_add(self.rules.hold_ns));
    }

    /// Stop leading. Return the version and the content to write, so that another replica need not wait for the lease to expire; `None` if
    /// this replica does not hold the Lease.
    pub fn release(&mut self) -> Option<(String, LeaseRecord)> {
        self.held_until_ns = 0;
        let (record, _) = self.observed.as_ref().filter(|(record, _)| record.holder == self.identity)?;
        let free = LeaseRecord {
            holder: String::new(),
            lease_s: 1,
            ..record.clone()
        };
        Some((self.version.clone(), free))
    }
}
