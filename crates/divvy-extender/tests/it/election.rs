//! Leader election: the rules one by one, and then in random order, with wrong clocks, lost answers, and frozen processes.

use divvy_extender::election::{Election, ElectionStep, LeaseRecord, Rules};
use proptest::prelude::*;

const S: u64 = 1_000_000_000;
const RULES: Rules = Rules {
    lease_ns: 15 * S,
    hold_ns: 10 * S,
    retry_ns: 2 * S,
};

fn held_by(holder: &str, renewed_us: i64) -> LeaseRecord {
    LeaseRecord {
        holder: holder.to_owned(),
        lease_s: 15,
        acquired_us: 1,
        renewed_us,
        transitions: 4,
    }
}

fn found(record: &LeaseRecord, version: u64) -> Option<(LeaseRecord, String)> {
    Some((record.clone(), version.to_string()))
}

#[test]
fn the_numbers_are_client_gos() {
    assert_eq!(Rules::default(), RULES);
    assert_eq!(Rules::of(std::time::Duration::from_secs(15)), RULES);
}

#[test]
fn a_lease_is_taken_when_it_is_free_and_not_a_moment_before() {
    let mut me = Election::new("me".to_owned(), RULES);
    let other = held_by("other", 100);
    assert_eq!(me.read(found(&other, 7), 100 * S, 0), ElectionStep::Wait);
    assert_eq!(me.holder(), Some("other"));
    // The Lease is renewed: whatever the other's clock says, time counts from when this replica saw the renewal.
    let renewed = held_by("other", 101);
    assert_eq!(me.read(found(&renewed, 8), 114 * S, 0), ElectionStep::Wait);
    assert_eq!(me.read(found(&renewed, 8), 129 * S - 1, 0), ElectionStep::Wait);
    assert!(me.would_take_over());
    let step = me.read(found(&renewed, 8), 129 * S, 55);
    let expected = LeaseRecord {
        holder: "me".to_owned(),
        lease_s: 15,
        acquired_us: 55,
        renewed_us: 55,
        transitions: 5,
    };
    assert_eq!(
        step,
        ElectionStep::Replace {
            version: "8".to_owned(),
            record: expected.clone()
        }
    );
    assert_eq!(me.held_until_ns(), 0, "nothing is held before the write was acknowledged");
    me.written(expected.clone(), "9".to_owned(), 129 * S);
    assert_eq!(me.held_until_ns(), 139 * S, "from when it was sent");
    assert!(!me.would_take_over());
    // The leader renews.
    let step = me.read(found(&expected, 9), 131 * S, 66);
    let again = LeaseRecord {
        renewed_us: 66,
        ..expected
    };
    assert_eq!(
        step,
        ElectionStep::Replace {
            version: "9".to_owned(),
            record: again
        }
    );
}

#[test]
fn what_nobody_holds_is_taken_at_once() {
    let mut me = Election::new("me".to_owned(), RULES);
    assert!(matches!(me.read(None, 5, 0), ElectionStep::Create(record) if record.holder == "me" && record.transitions == 0));
    let released = held_by("", 3);
    assert!(matches!(me.read(found(&released, 2), 6, 0), ElectionStep::Replace { version, .. } if version == "2"));
}

#[test]
fn a_holder_that_says_more_is_believed_up_to_a_minute() {
    for (said_s, free_after_s) in [(1, 15), (15, 15), (40, 40), (10_000, 60), (-5, 15)] {
        let mut me = Election::new("me".to_owned(), RULES);
        let other = LeaseRecord {
            lease_s: said_s,
            ..held_by("other", 1)
        };
        assert_eq!(me.read(found(&other, 1), 0, 0), ElectionStep::Wait);
        assert_eq!(
            me.read(found(&other, 1), free_after_s * S - 1, 0),
            ElectionStep::Wait,
            "{said_s}"
        );
        assert!(
            matches!(me.read(found(&other, 1), free_after_s * S, 0), ElectionStep::Replace { .. }),
            "{said_s}"
        );
    }
}

#[test]
fn a_renewal_changes_the_lease_despite_stuck_clocks() {
    let mut election = Election::new("a".to_owned(), Rules::default());
    let at = held_by("a", 7_000);
    for unix_us in [7_000, 7_001, 6_000] {
        let ElectionStep::Replace { record, .. } = election.read(found(&at, 1), 0, unix_us) else {
            panic!("its own Lease is renewed");
        };
        assert_ne!(record.renewed_us, at.renewed_us, "at {unix_us}");
    }
}

#[test]
fn who_releases_holds_nothing_and_another_need_not_wait() {
    let mut me = Election::new("me".to_owned(), RULES);
    assert_eq!(me.clone().release(), None, "who holds none has none to give");
    let ElectionStep::Create(record) = me.read(None, 0, 1) else {
        panic!("it is free")
    };
    me.written(record.clone(), "1".to_owned(), 0);
    let (version, free) = me.release().expect("it holds it");
    assert_eq!((version.as_str(), free.holder.as_str()), ("1", ""));
    assert_eq!(me.held_until_ns(), 0);
    let mut other = Election::new("other".to_owned(), RULES);
    assert_eq!(other.read(found(&record, 1), 0, 0), ElectionStep::Wait);
    assert!(matches!(other.read(found(&free, 2), 1, 0), ElectionStep::Replace { .. }));
}

#[derive(Debug, Clone)]
enum Event {
    /// Time passes, in milliseconds.
    Pass(u64),
    /// A replica sends a read, and the server reads the Lease.
    Ask(usize),
    /// The replica gets the answer, and acts.
    Hear(usize),
    /// The server carries out one of the pending writes.
    Carry(usize),
    /// The replica gets the answer to its write.
    Told(usize),
    /// The answer to the write is lost.
    Lost(usize),
    Release(usize),
    /// The replica is killed and started again.
    Restart(usize),
}

const REPLICAS: usize = 3;

fn events() -> impl Strategy<Value = Vec<Event>> {
    let replica = 0..REPLICAS;
    let event = prop_oneof![
        4 => prop_oneof![Just(1u64), Just(200), Just(2_000), Just(5_100), Just(9_900), 10_000..18_000u64].prop_map(Event::Pass),
        6 => replica.clone().prop_map(Event::Ask),
        6 => replica.clone().prop_map(Event::Hear),
        6 => any::<usize>().prop_map(Event::Carry),
        6 => replica.clone().prop_map(Event::Told),
        1 => replica.clone().prop_map(Event::Lost),
        1 => replica.clone().prop_map(Event::Release),
        1 => replica.prop_map(Event::Restart),
    ];
    proptest::collection::vec(event, 1..120)
}

struct Replica {
    election: Election,
    /// The clock's speed in per mille of true time, and its offset.
    clock: (u64, u64),
    heard: Option<Option<(LeaseRecord, String)>>,
    /// The write whose answer the replica waits for: its number, its content, and when it was sent by the replica's clock.
    waits: Option<(u64, LeaseRecord, u64)>,
}

struct Write {
    number: u64,
    /// `None`: create the Lease only if it does not exist.
    version: Option<String>,
    record: LeaseRecord,
}

struct World {
    now_ns: u64,
    lease: Option<(LeaseRecord, u64)>,
    version: u64,
    replicas: Vec<Replica>,
    on_their_way: Vec<Write>,
    carried: std::collections::BTreeMap<u64, Option<u64>>,
    next: u64,
}

impl World {
    fn new(clocks: &[(u64, u64)]) -> World {
        let replicas = clocks.iter().enumerate().map(|(i, clock)| Replica {
            election: Election::new(format!("r{i}"), RULES),
            clock: *clock,
            heard: None,
            waits: None,
        });
        World {
            now_ns: 0,
            lease: None,
            version: 0,
            replicas: replicas.collect(),
            on_their_way: Vec::new(),
            carried: Default::default(),
            next: 0,
        }
    }

    fn clock(&self, i: usize) -> u64 {
        let (rate, wrong) = self.replicas[i].clock;
        wrong + self.now_ns / 1_000 * rate
    }

    fn leaders(&self) -> Vec<usize> {
        let leads = |i: &usize| self.clock(*i) < self.replicas[*i].election.held_until_ns();
        (0..self.replicas.len()).filter(leads).collect()
    }

    fn send(&mut self, version: Option<String>, record: LeaseRecord) -> u64 {
        self.next += 1;
        self.on_their_way.push(Write {
            number: self.next,
            version,
            record,
        });
        self.next
    }

    fn play(&mut self, event: &Event) {
        match *event {
            Event::Pass(ms) => self.now_ns += ms * 1_000_000,
            Event::Ask(i) => {
                let lease = self
                    .lease
                    .as_ref()
                    .map(|(record, version)| (record.clone(), version.to_string()));
                self.replicas[i].heard = Some(lease);
            }
            Event::Hear(i) => {
                let now = self.clock(i);
                let Some(found) = self.replicas[i].heard.take() else { return };
                let (version, record) = match self.replicas[i].election.read(found, now, (now / 1_000).cast_signed()) {
                    ElectionStep::Wait => return,
                    ElectionStep::Create(record) => (None, record),
                    ElectionStep::Replace { version, record } => (Some(version), record),
                };
                let number = self.send(version, record.clone());
                self.replicas[i].waits = Some((number, record, now));
            }
            Event::Carry(which) => {
                if self.on_their_way.is_empty() {
                    return;
                }
                let write = self.on_their_way.remove(which % self.on_their_way.len());
                let there = self.lease.as_ref().map(|(_, version)| version.to_string());
                let done = (there == write.version).then(|| {
                    self.version += 1;
                    self.lease = Some((write.record, self.version));
                    self.version
                });
                self.carried.insert(write.number, done);
            }
            Event::Told(i) => {
                let carried = self.replicas[i]
                    .waits
                    .as_ref()
                    .and_then(|(number, ..)| self.carried.get(number));
                let Some(done) = carried.copied() else { return };
                let Some((_, record, sent)) = self.replicas[i].waits.take() else {
                    return;
                };
                if let Some(version) = done {
                    self.replicas[i].election.written(record, version.to_string(), sent);
                }
            }
            Event::Lost(i) => self.replicas[i].waits = None,
            Event::Release(i) => {
                if let Some((version, record)) = self.replicas[i].election.release() {
                    self.send(Some(version), record);
                    self.replicas[i].waits = None;
                }
            }
            Event::Restart(i) => {
                self.next += 1;
                let replica = &mut self.replicas[i];
                replica.election = Election::new(format!("r{i}-{}", self.next), RULES);
                (replica.heard, replica.waits) = (None, None);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    /// The clocks keep to the bound in the module's documentation: no clock is 1.5 times as fast as another.
    #[test]
    fn two_never_lead_at_once_and_in_calm_one_does(
        clocks in proptest::collection::vec((820..1_220u64, 0..1_000 * S), REPLICAS),
        events in events(),
    ) {
        let mut world = World::new(&clocks);
        for event in &events {
            world.play(event);
            prop_assert!(world.leaders().len() <= 1, "{:?} after {event:?}", world.leaders());
        }
        for _ in 0..60 {
            for i in 0..REPLICAS {
                for event in [Event::Ask(i), Event::Hear(i)] {
                    world.play(&event);
                }
                while !world.on_their_way.is_empty() {
                    world.play(&Event::Carry(0));
                }
                world.play(&Event::Told(i));
                prop_assert!(world.leaders().len() <= 1);
            }
            world.play(&Event::Pass(1_000));
        }
        prop_assert_eq!(world.leaders().len(), 1, "one replica leads");
    }
}
