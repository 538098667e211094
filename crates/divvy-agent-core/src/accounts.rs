//! What containers use of their GPUs, added up over time.
//!
//! A container has an account for each GPU from its grant until its end. The sums begin at 0 when the agent starts.

use std::collections::{BTreeMap, VecDeque};

use divvy_model::GrantRecord;

/// A container, by its pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AccountOwner {
    /// The pod's UID.
    pub pod: String,
    /// The container's name. `None` if it is not known yet: then it is the pod's only container with a grant for the GPU, if there is only one.
    pub container: Option<String>,
}

/// What a container uses of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageAccount {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The memory in bytes that the container was granted.
    pub limit: u64,
    /// The memory in bytes that its processes have. `None` if the driver does not say.
    pub used: Option<u64>,
    /// The most memory in bytes that was measured.
    pub peak: u64,
    /// For how many nanoseconds its processes have kept the GPU busy. `None` if the driver does not say.
    pub busy: Option<u64>,
    /// For which part of the time they kept it busy when that was measured last, in percent. `None` if it is not known.
    pub percent: Option<u32>,
    /// When they did last, in seconds since 1970; before that, when the measurement began. `None` if the driver has never said whether they do.
    pub last_busy: Option<u64>,
    /// The granted memory times the time for which it was granted, in bytes × milliseconds.
    pub allocated: u128,
}

/// A container on a GPU, and its account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccountedContainer {
    /// The pod's UID.
    pub uid: String,
    /// The container's name.
    pub container: String,
    /// The GPU's UUID.
    pub uuid: String,
    /// What it uses.
    pub account: UsageAccount,
}

/// Which account: the pod's UID, the container's name, and the GPU's UUID.
type AccountKey = (String, String, String);

/// How many accounts of ended containers are kept until they are read. No one has to read them.
const ENDED: usize = 256;

/// The accounts of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accounts {
    open: BTreeMap<AccountKey, UsageAccount>,
    /// Accounts of containers that have ended since the last time that [`Accounts::read`] returned them, in the order of their ends.
    ended: VecDeque<(AccountKey, UsageAccount)>,
    /// The time until which `allocated` was added up.
    until: Option<u64>,
}

impl Accounts {
    /// Take note of the grants at the time `now`, in milliseconds of a clock that is never set back.
    pub fn grants<'r>(&mut self, now: u64, records: impl Iterator<Item = &'r GrantRecord>) {
        let passed = self.until.map_or(0, |until| now.saturating_sub(until));
        self.until = Some(now);
        for account in self.open.values_mut() {
            let more = u128::from(account.limit) * u128::from(passed);
            account.allocated = account.allocated.saturating_add(more);
        }
        let mut before = std::mem::take(&mut self.open);
        for record in records {
            for share in &record.container_gpus {
                let key = (record.uid.clone(), record.container.clone(), share.uuid.clone());
                let mut account = before.remove(&key).unwrap_or_else(|| {
                    self.ended.retain(|(ended, _)| *ended != key);
                    UsageAccount::default()
                });
                account.namespace.clone_from(&record.namespace);
                account.pod.clone_from(&record.name);
                account.limit = share.memory.0.saturating_mul(1 << 20);
                self.open.insert(key, account);
            }
        }
        self.ended.extend(before);
        self.ended.drain(..self.ended.len().saturating_sub(ENDED));
    }

    /// Report whether no container has a grant.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Set the memory that the processes on a GPU have: pairs of the process's container and bytes. What belongs to no account is left out.
    pub fn memory(&mut self, uuid: &str, processes: impl Iterator<Item = (AccountOwner, u64)>) {
        for ((.., of), account) in &mut self.open {
            if of == uuid {
                account.used = Some(0);
            }
        }
        for (owner, bytes) in processes {
            if let Some(account) = self.find(&owner, uuid) {
                account.used = Some(account.used.unwrap_or(0).saturating_add(bytes));
            }
        }
        for ((.., of), account) in &mut self.open {
            if of == uuid {
                account.peak = account.peak.max(account.used.unwrap_or(0));
            }
        }
    }

    /// Take note that the driver does not say what the processes on a GPU have.
    pub fn memory_is_unknown(&mut self, uuid: &str) {
        for ((.., of), account) in &mut self.open {
            if of == uuid {
                account.used = None;
            }
        }
    }

    /// Add the nanoseconds for which containers kept a GPU busy until now, in seconds since 1970. `passed` is the time in nanoseconds that these are about, if
    /// it is known.
    pub fn busy(&mut self, uuid: &str, busy: &BTreeMap<AccountOwner, u64>, passed: Option<u64>, now: u64) {
        let percent = |ns: u64| {
            let passed = passed.filter(|passed| *passed > 0)?;
            u32::try_from((u128::from(ns) * 100 / u128::from(passed)).min(100)).ok()
        };
        for ((.., of), account) in &mut self.open {
            if of == uuid {
                account.busy.get_or_insert(0);
                account.percent = percent(0);
                account.last_busy.get_or_insert(now);
            }
        }
        for (owner, ns) in busy.iter().filter(|(_, ns)| **ns > 0) {
            if let Some(account) = self.find(owner, uuid) {
                account.busy = Some(account.busy.unwrap_or(0).saturating_add(*ns));
                account.percent = percent(*ns);
                account.last_busy = Some(now);
            }
        }
    }

    /// Take note that the driver does not say how busy containers keep a GPU. If it says so again, the sum begins at 0.
    pub fn busy_is_unknown(&mut self, uuid: &str) {
        for ((.., of), account) in &mut self.open {
            if of == uuid {
                (account.busy, account.percent) = (None, None);
            }
        }
    }

    /// Find the account of a container. If its name is unknown, it is the only one of its pod, or none.
    fn find(&mut self, owner: &AccountOwner, uuid: &str) -> Option<&mut UsageAccount> {
        let AccountOwner { pod, container } = owner;
        if let Some(container) = container {
            return self.open.get_mut(&(pod.clone(), container.clone(), uuid.to_owned()));
        }
        let of_pod = self.open.range_mut((pod.clone(), String::new(), String::new())..);
        let mut all = of_pod
            .take_while(|((uid, ..), _)| uid == pod)
            .filter(|((.., of), _)| of == uuid);
        match (all.next(), all.next()) {
            (Some((_, account)), None) => Some(account),
            _ => None,
        }
    }

    /// Return the accounts, in the order of their keys. The account of a container that has ended is returned once more, so that
    /// its last numbers are seen, if it is among the last 256.
    pub fn read(&mut self) -> Vec<AccountedContainer> {
        let ended = std::mem::take(&mut self.ended);
        let open = self.open.iter().map(|(key, account)| (key.clone(), account.clone()));
        // What has ended is not open.
        let all: BTreeMap<AccountKey, UsageAccount> = ended.into_iter().chain(open).collect();
        all.into_iter().map(used).collect()
    }

    /// Return the accounts of the containers that have a grant, in the order of their keys.
    pub fn open(&self) -> Vec<AccountedContainer> {
        let open = self.open.iter().map(|(key, account)| (key.clone(), account.clone()));
        open.map(used).collect()
    }
}

fn used(((uid, container, uuid), account): (AccountKey, UsageAccount)) -> AccountedContainer {
    AccountedContainer {
        uid,
        container,
        uuid,
        account,
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::{ContainerShare, MemoryUnit, MiB};
    use proptest::prelude::*;

    use super::*;

    fn record(uid: &str, container: &str, gpus: &[(&str, u64)]) -> GrantRecord {
        let share = |(uuid, memory): &(&str, u64)| ContainerShare {
            uuid: (*uuid).to_owned(),
            memory: MiB(*memory),
            cores: 0,
        };
        GrantRecord {
            v: 1,
            namespace: "ns".to_owned(),
            name: format!("pod-{uid}"),
            uid: uid.to_owned(),
            container: container.to_owned(),
            cdi: None,
            unit: MemoryUnit::GIB,
            gpus: Vec::new(),
            container_gpus: gpus.iter().map(share).collect(),
            guarded: false,
            threads: 0,
            boot_id: String::new(),
        }
    }

    fn owner(pod: &str, container: &str) -> AccountOwner {
        AccountOwner {
            pod: pod.to_owned(),
            container: (!container.is_empty()).then(|| container.to_owned()),
        }
    }

    fn accounts(records: &[GrantRecord]) -> Accounts {
        let mut accounts = Accounts::default();
        accounts.grants(1000, records.iter());
        accounts
    }

    fn of(accounts: &mut Accounts, container: &str) -> UsageAccount {
        let all = accounts.read();
        let found = all.into_iter().find(|of| of.container == container);
        found.unwrap_or_else(|| panic!("no account of {container}")).account
    }

    #[test]
    fn memory_belongs_to_its_container_and_the_peak_stays() {
        let records = [record("a", "one", &[("G", 100)]), record("a", "two", &[("G", 50)])];
        let mut of_pod = accounts(&records);
        assert_eq!(of(&mut of_pod, "one").used, None, "nothing was measured");
        let used = [
            (owner("a", "one"), 7),
            (owner("a", "one"), 1),
            (owner("a", "sidecar"), 99),
            (owner("b", "one"), 99),
        ];
        of_pod.memory("G", used.into_iter());
        of_pod.memory("H", [(owner("a", "one"), 99)].into_iter());
        let one = of(&mut of_pod, "one");
        assert_eq!((one.used, one.peak, one.limit), (Some(8), 8, 100 << 20));
        assert_eq!(of(&mut of_pod, "two").used, Some(0));
        of_pod.memory("G", [(owner("a", "two"), 3)].into_iter());
        let one = of(&mut of_pod, "one");
        assert_eq!((one.used, one.peak), (Some(0), 8));
        of_pod.memory_is_unknown("G");
        assert_eq!(of(&mut of_pod, "one").used, None);
    }

    /// A process whose container is unknown counts only if its pod has one container on this GPU.
    #[test]
    fn an_unknown_containers_process_counts_only_without_a_choice() {
        let mut single = accounts(&[record("a", "one", &[("G", 100)]), record("b", "two", &[("G", 100)])]);
        single.memory("G", [(owner("a", ""), 5)].into_iter());
        assert_eq!(of(&mut single, "one").used, Some(5));
        let mut double = accounts(&[record("a", "one", &[("G", 100)]), record("a", "two", &[("G", 100)])]);
        double.memory("G", [(owner("a", ""), 5)].into_iter());
        assert_eq!((of(&mut double, "one").used, of(&mut double, "two").used), (Some(0), Some(0)));
    }

    #[test]
    fn busy_time_is_absent_until_measured_and_only_grows() {
        let mut accounts = accounts(&[record("a", "one", &[("G", 100)])]);
        assert_eq!(of(&mut accounts, "one").busy, None);
        accounts.busy("G", &BTreeMap::new(), None, 50);
        let idle = of(&mut accounts, "one");
        assert_eq!((idle.busy, idle.last_busy), (Some(0), Some(50)));
        accounts.busy("G", &BTreeMap::from([(owner("a", "one"), 30)]), Some(120), 51);
        assert_eq!(of(&mut accounts, "one").percent, Some(25));
        accounts.busy("G", &BTreeMap::from([(owner("a", "one"), 0)]), Some(100), 52);
        let busy = of(&mut accounts, "one");
        assert_eq!((busy.busy, busy.last_busy, busy.percent), (Some(30), Some(51), Some(0)));
        accounts.busy_is_unknown("G");
        let unknown = of(&mut accounts, "one");
        assert_eq!((unknown.busy, unknown.percent), (None, None));
    }

    /// A container that starts again under the same name has a new account.
    #[test]
    fn an_ended_container_is_returned_once_more() {
        let records = [record("a", "one", &[("G", 100)])];
        let mut accounts = accounts(&records);
        accounts.busy("G", &BTreeMap::from([(owner("a", "one"), 30)]), None, 51);
        accounts.grants(2000, [].iter());
        assert!(accounts.is_empty());
        assert_eq!(of(&mut accounts, "one").busy, Some(30));
        assert_eq!(accounts.read(), []);
        accounts.grants(3000, records.iter());
        assert_eq!(of(&mut accounts, "one").busy, None, "another life of the name");
    }

    #[test]
    fn of_containers_that_ended_unread_the_last_are_returned() {
        let mut accounts = Accounts::default();
        let long_lived = record("z", "one", &[("G", 100)]);
        for index in 0..10_000 {
            // The order of the keys is not that of the ends.
            let record = record(&format!("{}", 99_999 - index), "one", &[("G", 100), ("H", 100)]);
            accounts.grants(index * 1000, [&long_lived, &record].into_iter());
            accounts.busy("G", &BTreeMap::from([(owner(&record.uid, "one"), index)]), None, 51);
        }
        let all = accounts.read();
        assert_eq!(all.len(), 256 + 3);
        let kept = all.iter().filter(|of| of.uuid == "G" && of.uid != "z");
        let kept: Vec<_> = kept
            .map(|of| (99_999 - of.uid.parse::<u64>().expect("a number"), of.account.busy))
            .collect();
        let expected: Vec<_> = (10_000 - 129..10_000).rev().map(|index| (index, Some(index))).collect();
        assert_eq!(kept, expected, "with their sums");
        assert_eq!(accounts.read().len(), 3);
    }

    /// What happens on a node.
    #[derive(Debug, Clone)]
    enum Step {
        Grants(Vec<bool>),
        Memory(Vec<u16>),
        Busy(Vec<u16>),
        Read,
    }

    const CONTAINERS: [(&str, &str); 4] = [("a", "one"), ("a", "two"), ("b", "one"), ("c", "one")];

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let numbers = || proptest::collection::vec(any::<u16>(), CONTAINERS.len());
        let granted = proptest::collection::vec(any::<bool>(), CONTAINERS.len());
        let step = prop_oneof![
            granted.prop_map(Step::Grants),
            numbers().prop_map(Step::Memory),
            numbers().prop_map(Step::Busy),
            Just(Step::Read),
        ];
        proptest::collection::vec(step, 1..60)
    }

    proptest! {
        /// What the accounts have is what the driver has reported of containers with a grant, and their allocated time is what passed.
        #[test]
        fn the_sums_are_those_of_what_happened(steps in steps()) {
            let records: Vec<GrantRecord> =
                CONTAINERS.iter().map(|(uid, container)| record(uid, container, &[("G", 1)])).collect();
            let mut accounts = Accounts::default();
            let mut granted = vec![false; CONTAINERS.len()];
            let (mut now, mut total_busy, mut held) = (0_u64, 0_u64, 0_u128);
            let (mut seen_busy, mut seen_held) = (0_u64, 0_u128);
            for step in steps {
                match step {
                    Step::Grants(next) => {
                        now += 1000;
                        held += granted.iter().filter(|is| **is).count() as u128 * 1000 * (1 << 20);
                        let ended = |index: usize| granted[index] && !next[index];
                        let before = accounts.clone();
                        accounts.grants(now, records.iter().zip(&next).filter(|(_, is)| **is).map(|(record, _)| record));
                        // Ended accounts leave the sum when they are read.
                        for (index, (uid, container)) in CONTAINERS.iter().enumerate() {
                            let key = ((*uid).to_owned(), (*container).to_owned(), "G".to_owned());
                            if ended(index) {
                                let (_, account) = accounts.ended.iter().find(|(ended, _)| *ended == key).expect("it is kept");
                                seen_busy += account.busy.unwrap_or(0);
                                seen_held += account.allocated;
                                prop_assert_eq!(account.busy, before.open[&key].busy);
                            }
                        }
                        granted = next;
                    }
                    Step::Memory(used) => {
                        let processes = CONTAINERS.iter().zip(&used).map(|((uid, name), bytes)| (owner(uid, name), u64::from(*bytes)));
                        accounts.memory("G", processes);
                        let sum: u64 = accounts.open.values().filter_map(|account| account.used).sum();
                        let expected: u64 = used.iter().zip(&granted).filter(|(_, is)| **is).map(|(bytes, _)| u64::from(*bytes)).sum();
                        prop_assert_eq!(sum, expected);
                    }
                    Step::Busy(busy) => {
                        let all = CONTAINERS.iter().zip(&busy).map(|((uid, name), ns)| (owner(uid, name), u64::from(*ns)));
                        accounts.busy("G", &all.collect(), Some(1 << 20), now);
                        total_busy += busy.iter().zip(&granted).filter(|(_, is)| **is).map(|(ns, _)| u64::from(*ns)).sum::<u64>();
                    }
                    Step::Read => {
                        let open = accounts.open();
                        prop_assert_eq!(open.len(), granted.iter().filter(|is| **is).count());
                        prop_assert!(accounts.read().len() >= granted.iter().filter(|is| **is).count());
                        prop_assert!(accounts.ended.is_empty());
                    }
                }
            }
            let open_busy: u64 = accounts.open.values().filter_map(|account| account.busy).sum();
            let open_held: u128 = accounts.open.values().map(|account| account.allocated).sum();
            prop_assert_eq!(open_busy + seen_busy, total_busy);
            prop_assert_eq!(open_held + seen_held, held);
        }
    }
}
