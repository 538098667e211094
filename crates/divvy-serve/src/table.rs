//! The table of connections. It decides which connection is closed to make room for a new one. It has no clock and no sockets: the caller passes
//! times and, for each connection, a value that is returned when the connection leaves.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use crate::ServerLimits;

/// The class of a connection, which decides the places that it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionClass {
    /// The handshake is under way.
    Shaking,
    /// The caller has identified itself.
    Known,
    /// The caller has not identified itself.
    Unknown,
}

/// The part of an address that a machine cannot choose freely: an IPv4 address, or the /64 network of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallerNetwork(IpAddr);

impl CallerNetwork {
    pub(crate) fn of(address: IpAddr) -> CallerNetwork {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                CallerNetwork(Ipv6Addr::from(network).into())
            }
            address => CallerNetwork(address),
        }
    }
}

/// The state of a connection. In all states but `Busy`, the server waits for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionPhase {
    /// The client has sent nothing yet.
    Fresh,
    /// The last request has been answered.
    Idle,
    /// A request has begun, but its headers are not complete.
    Header,
    /// A request is being answered, or a handshake is under way.
    Busy,
}

pub(crate) type ConnectionId = u64;

/// The decision about a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionVerdict {
    /// There is a place.
    Enter,
    /// The new connection takes the place of this one.
    Replace(ConnectionId),
    /// There is no place.
    Refuse,
}

#[derive(Debug)]
struct ConnectionEntry<T, V> {
    class: ConnectionClass,
    source: CallerNetwork,
    phase: ConnectionPhase,
    since: T,
    value: V,
}

#[derive(Debug, Clone, Copy)]
struct PlaceCounts {
    all: usize,
    per_source: usize,
}

/// The open connections, and the limits of each class.
#[derive(Debug)]
pub(crate) struct ConnectionTable<T, V> {
    shaking: PlaceCounts,
    known: PlaceCounts,
    unknown: PlaceCounts,
    entries: BTreeMap<ConnectionId, ConnectionEntry<T, V>>,
    next: ConnectionId,
}

impl<T: Copy + Ord, V> ConnectionTable<T, V> {
    pub(crate) fn new(limits: &ServerLimits) -> ConnectionTable<T, V> {
        ConnectionTable {
            shaking: PlaceCounts {
                all: limits.handshakes,
                per_source: limits.handshakes_per_address,
            },
            known: PlaceCounts {
                all: limits.known.connections,
                per_source: limits.known.per_address,
            },
            unknown: PlaceCounts {
                all: limits.unknown.connections,
                per_source: limits.unknown.per_address,
            },
            entries: BTreeMap::new(),
            next: 0,
        }
    }

    /// Decide about a new connection, without changing the table:
    ///
    /// 1. If the address has used all its places, it loses the connection that has waited longest for its client.
    /// 2. If the class is full, the address with the most connections loses the connection that has waited longest.
    /// 3. If no connection of the class is waiting, a request that is being answered is closed, but only from an address that has more
    ///    connections than the new connection's address will have.
    pub(crate) fn admit(&self, class: ConnectionClass, source: CallerNetwork) -> ConnectionVerdict {
        let places = match class {
            ConnectionClass::Shaking => self.shaking,
            ConnectionClass::Known => self.known,
            ConnectionClass::Unknown => self.unknown,
        };
        let of_class = || self.entries.iter().filter(move |(_, entry)| entry.class == class);
        let mut counts: BTreeMap<CallerNetwork, usize> = BTreeMap::new();
        for (_, entry) in of_class() {
            *counts.entry(entry.source).or_default() += 1;
        }
        let oldest = |waiting: bool, of: CallerNetwork| {
            of_class()
                .filter(|(_, entry)| (entry.phase != ConnectionPhase::Busy) == waiting && entry.source == of)
                .min_by_key(|(id, entry)| (entry.since, **id))
                .map_or(ConnectionVerdict::Refuse, |(id, _)| ConnectionVerdict::Replace(*id))
        };
        // The address with the most connections, among the addresses that have a connection in this state.
        let largest = |waiting: bool| {
            of_class()
                .filter(|(_, entry)| (entry.phase != ConnectionPhase::Busy) == waiting)
                .map(|(_, entry)| (counts[&entry.source], entry.source))
                .max()
        };
        let own = counts.get(&source).copied().unwrap_or(0);
        if own >= places.per_source {
            return oldest(true, source);
        }
        if counts.values().sum::<usize>() < places.all {
            return ConnectionVerdict::Enter;
        }
        if let Some((_, from)) = largest(true) {
            return oldest(true, from);
        }
        match largest(false) {
            Some((count, from)) if count > own + 1 => oldest(false, from),
            _ => ConnectionVerdict::Refuse,
        }
    }

    pub(crate) fn enter(&mut self, class: ConnectionClass, source: CallerNetwork, now: T, value: V) -> ConnectionId {
        let id = self.next;
        self.next += 1;
        let entry = ConnectionEntry {
            class,
            source,
            phase: ConnectionPhase::Fresh,
            since: now,
            value,
        };
        self.entries.insert(id, entry);
        id
    }

    pub(crate) fn set(&mut self, id: ConnectionId, phase: ConnectionPhase, now: T) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.phase = phase;
            entry.since = now;
        }
    }

    /// Return the state of a connection, and since when it is in this state; `None` if it has left.
    pub(crate) fn get(&self, id: ConnectionId) -> Option<(ConnectionPhase, T)> {
        self.entries.get(&id).map(|entry| (entry.phase, entry.since))
    }

    pub(crate) fn leave(&mut self, id: ConnectionId) -> Option<V> {
        self.entries.remove(&id).map(|entry| entry.value)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::CallerLimits;

    fn table(known: usize, unknown: usize, per_address: usize) -> ConnectionTable<u64, ()> {
        let share = |connections| CallerLimits {
            connections,
            per_address,
            idle: Duration::ZERO,
            body_bytes: 0,
        };
        ConnectionTable::new(&ServerLimits {
            known: share(known),
            unknown: share(unknown),
            handshakes: unknown,
            handshakes_per_address: per_address,
            first_byte: Duration::ZERO,
            handshake: Duration::ZERO,
            header: Duration::ZERO,
            body: Duration::ZERO,
            request: Duration::ZERO,
            header_bytes: 0,
            bodies_bytes: 0,
        })
    }

    fn source(last: u8) -> CallerNetwork {
        CallerNetwork::of([10, 0, 0, last].into())
    }

    /// Make a table with connections of class `Unknown`, in the order in which they arrived: (address, phase).
    fn with(all: usize, per_address: usize, connections: &[(u8, ConnectionPhase)]) -> ConnectionTable<u64, ()> {
        let mut table = table(0, all, per_address);
        for (at, (last, phase)) in connections.iter().enumerate() {
            let id = table.enter(ConnectionClass::Unknown, source(*last), at as u64, ());
            table.set(id, *phase, at as u64);
        }
        table
    }

    #[test]
    fn room_is_made_by_the_address_with_the_most_connections() {
        use ConnectionPhase::{Busy, Fresh, Header, Idle};
        for (what, all, per_address, there, newcomer, expected) in [
            (
                "there is a place",
                3,
                2,
                vec![(1, Busy), (1, Idle)],
                2,
                ConnectionVerdict::Enter,
            ),
            (
                "an address has its share: its own oldest that waits",
                9,
                3,
                vec![(2, Idle), (1, Busy), (1, Header), (1, Idle)],
                1,
                ConnectionVerdict::Replace(2),
            ),
            (
                "an address has its share, and all are busy",
                9,
                2,
                vec![(2, Idle), (1, Busy), (1, Busy)],
                1,
                ConnectionVerdict::Refuse,
            ),
            (
                "full: the oldest that waits, of the address with the most",
                4,
                3,
                vec![(2, Idle), (1, Busy), (1, Fresh), (1, Header)],
                3,
                ConnectionVerdict::Replace(2),
            ),
            (
                "full, and only one waits: that one",
                3,
                3,
                vec![(1, Busy), (1, Busy), (2, Idle)],
                3,
                ConnectionVerdict::Replace(2),
            ),
            (
                "full and all are busy: of an address that has more than the newcomer will have",
                3,
                3,
                vec![(2, Busy), (1, Busy), (1, Busy)],
                3,
                ConnectionVerdict::Replace(1),
            ),
            (
                "full, all are busy, and no address has more",
                3,
                3,
                vec![(1, Busy), (2, Busy), (3, Busy)],
                4,
                ConnectionVerdict::Refuse,
            ),
            (
                "full, all are busy, and the newcomer has as many",
                4,
                3,
                vec![(1, Busy), (1, Busy), (2, Busy), (2, Busy)],
                2,
                ConnectionVerdict::Refuse,
            ),
        ] {
            assert_eq!(
                with(all, per_address, &there).admit(ConnectionClass::Unknown, source(newcomer)),
                expected,
                "{what}"
            );
        }
    }

    #[test]
    fn known_callers_have_places_that_others_cannot_take() {
        let mut table = table(1, 2, 2);
        for _ in 0..2 {
            table.enter(ConnectionClass::Unknown, source(1), 0, ());
            table.enter(ConnectionClass::Shaking, source(1), 0, ());
        }
        assert_eq!(table.admit(ConnectionClass::Known, source(1)), ConnectionVerdict::Enter);
    }

    #[test]
    fn an_address_is_what_one_machine_cannot_change() {
        let of = |text: &str| CallerNetwork::of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Come(u8),
        Set(u8, ConnectionPhase),
        Leave(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let phase = prop_oneof![
            Just(ConnectionPhase::Fresh),
            Just(ConnectionPhase::Idle),
            Just(ConnectionPhase::Header),
            Just(ConnectionPhase::Busy)
        ];
        prop_oneof![
            4 => (0..6u8).prop_map(Step::Come),
            2 => (any::<u8>(), phase).prop_map(|(which, phase)| Step::Set(which, phase)),
            1 => any::<u8>().prop_map(Step::Leave),
        ]
    }

    proptest! {
        /// The connection is the only one of its address, and the limits still hold.
        #[test]
        fn a_single_connection_is_not_crowded_out(steps in proptest::collection::vec(step(), 1..200)) {
            const ALL: usize = 8;
            const PER_ADDRESS: usize = 3;
            let mut table = table(0, ALL, PER_ADDRESS);
            let count = |table: &ConnectionTable<u64, ()>, source: CallerNetwork| table.entries.values().filter(|entry| entry.source == source).count();
            for (at, step) in steps.into_iter().enumerate() {
                let now = at as u64;
                let pick = |table: &ConnectionTable<u64, ()>, which: u8| table.entries.keys().nth(usize::from(which) % table.entries.len().max(1)).copied();
                match step {
                    Step::Come(last) => {
                        let newcomer = source(last);
                        let largest = table.entries.values().map(|entry| count(&table, entry.source)).max().unwrap_or(0);
                        match table.admit(ConnectionClass::Unknown, newcomer) {
                            ConnectionVerdict::Enter => {}
                            ConnectionVerdict::Replace(id) => {
                                let victim = &table.entries[&id];
                                let of_victim = count(&table, victim.source);
                                prop_assert!(victim.phase != ConnectionPhase::Busy || of_victim > count(&table, newcomer) + 1);
                                let others_wait = table.entries.values()
                                    .any(|entry| entry.phase != ConnectionPhase::Busy && count(&table, entry.source) == largest);
                                prop_assert!(victim.source == newcomer || of_victim == largest || !others_wait);
                                table.leave(id);
                            }
                            ConnectionVerdict::Refuse => {
                                // A newcomer from an address without a connection is only refused if each address has one busy connection.
                                prop_assert!(count(&table, newcomer) > 0 || largest <= 1);
                                continue;
                            }
                        }
                        table.enter(ConnectionClass::Unknown, newcomer, now, ());
                        prop_assert!(table.entries.len() <= ALL);
                        prop_assert!(count(&table, newcomer) <= PER_ADDRESS);
                    }
                    Step::Set(which, phase) => {
                        if let Some(id) = pick(&table, which) {
                            table.set(id, phase, now);
                        }
                    }
                    Step::Leave(which) => {
                        if let Some(id) = pick(&table, which) {
                            table.leave(id);
                            prop_assert!(table.get(id).is_none());
                        }
                    }
                }
            }
        }
    }
}
