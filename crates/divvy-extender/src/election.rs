//! Who of several replicas binds: a state machine over the Lease, the time of one's own clock, and one's own name. No I/O, no clock.
//!
//! The rules are client-go's, with its numbers (`tools/leaderelection`): who does not lead waits until the Lease has not changed for
//! [`Rules::lease_ns`] of *its own* clock; who leads holds it for [`Rules::hold_ns`] of its own clock from the moment in which it *sent* the
//! write that was acknowledged. Times written by others are never compared with one's own. A write names the version that was read, so that of two
//! only one is carried out.
//!
//! So two never lead at once as long as no clock runs `lease_ns / hold_ns` (1.5) times as fast as another, however wrong they are: a write
//! is seen by others after it was sent.

/// How long things take. All by one's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A Lease that does not change for so long is free.
    pub lease_ns: u64,
    /// A write of the Lease is good for so long.
    pub hold_ns: u64,
    /// Between two looks at the Lease.
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
    /// For a lease of this length, in the proportions of client-go's numbers: held for two thirds of it, looked at 7.5 times in it.
    pub fn of(lease: std::time::Duration) -> Rules {
        let lease_ns = u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX);
        Rules {
            lease_ns,
            hold_ns: lease_ns / 3 * 2,
            retry_ns: lease_ns / 15 * 2,
        }
    }
}

/// What is written in the Lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Who holds it; empty: nobody.
    pub holder: String,
    /// For how long, as the holder says, in seconds.
    pub lease_s: i32,
    /// Since when it does, in Unix microseconds, by its clock; for people.
    pub acquired_us: i64,
    /// When it last said so, by its clock: only whether it changes is looked at.
    pub renewed_us: i64,
    /// How often it changed hands.
    pub transitions: i32,
}

/// What to do after a look at the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Another holds it.
    Wait,
    /// It is not there: create it. Then call [`Election::written`].
    Create(Record),
    /// Replace it, if it still has this version. Then call [`Election::written`].
    Replace {
        /// `resourceVersion`
        version: String,
        /// The new content.
        record: Record,
    },
}

/// One replica's view.
#[derive(Debug, Clone)]
pub struct Election {
    identity: String,
    rules: Rules,
    /// What was last read, and when it was first read so.
    observed: Option<(Record, u64)>,
    /// Of the last read, or of the last write that was acknowledged.
    version: String,
    held_until_ns: u64,
}

impl Election {
    /// Holds nothing. The identity is one process's own: whoever has it holds what it holds.
    pub fn new(identity: String, rules: Rules) -> Election {
        Election {
            identity,
            rules,
            observed: None,
            version: String::new(),
            held_until_ns: 0,
        }
    }

    /// How long things take.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// Until when this replica leads, by its own clock.
    pub fn held_until_ns(&self) -> u64 {
        self.held_until_ns
    }

    /// Who holds the Lease, as far as is known.
    pub fn holder(&self) -> Option<&str> {
        self.observed
            .as_ref()
            .map(|(record, _)| record.holder.as_str())
            .filter(|holder| !holder.is_empty())
    }

    /// Whether a write now would take the Lease over from somebody, rather than go on.
    pub fn would_take_over(&self) -> bool {
        self.holder() != Some(&self.identity)
    }

    /// The Lease was read, with its version; none is not there. `unix_us`: for what is written.
    pub fn read(&mut self, found: Option<(Record, String)>, now_ns: u64, unix_us: i64) -> Step {
        let fresh = Record {
            holder: self.identity.clone(),
            lease_s: i32::try_from(self.rules.lease_ns / 1_000_000_000).unwrap_or(i32::MAX),
            acquired_us: unix_us,
            renewed_us: unix_us,
            transitions: 0,
        };
        let Some((record, version)) = found else {
            self.observed = None;
            return Step::Create(fresh);
        };
        self.version = version.clone();
        if self.observed.as_ref().is_none_or(|(known, _)| *known != record) {
            self.observed = Some((record.clone(), now_ns));
        }
        let since_ns = self.observed.as_ref().map_or(now_ns, |(_, at)| *at);
        if record.holder == self.identity {
            let renewed = Record {
                acquired_us: record.acquired_us,
                // The API server takes a write that changes nothing for none, and the others would not see that this replica is there: a wall
                // clock that was set back can show the same time again.
                renewed_us: unix_us.saturating_add(i64::from(unix_us == record.renewed_us)),
                transitions: record.transitions,
                ..fresh
            };
            return Step::Replace {
                version,
                record: renewed,
            };
        }
        // A holder of another version of Divvy may have said longer; a minute is the most that is believed.
        let said_ns = u64::try_from(record.lease_s.clamp(0, 60)).unwrap_or(0) * 1_000_000_000;
        let free_ns = since_ns.saturating_add(self.rules.lease_ns.max(said_ns));
        if !record.holder.is_empty() && now_ns < free_ns {
            return Step::Wait;
        }
        Step::Replace {
            version,
            record: Record {
                transitions: record.transitions.saturating_add(1),
                ..fresh
            },
        }
    }

    /// A write was acknowledged that was sent at this time.
    pub fn written(&mut self, record: Record, version: String, sent_ns: u64) {
        self.observed = Some((record, sent_ns));
        self.version = version;
        self.held_until_ns = self.held_until_ns.max(sent_ns.saturating_add(self.rules.hold_ns));
    }

    /// It holds the Lease no more by its own will: this is to be written, so that another need not wait. Nothing, if it holds none.
    pub fn release(&mut self) -> Option<(String, Record)> {
        self.held_until_ns = 0;
        let (record, _) = self.observed.as_ref().filter(|(record, _)| record.holder == self.identity)?;
        let free = Record {
            holder: String::new(),
            lease_s: 1,
            ..record.clone()
        };
        Some((self.version.clone(), free))
    }
}
