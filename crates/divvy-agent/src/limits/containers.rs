//! Sets the limit of a pod on the cgroups of its containers, too, so that a container is shown its share as the size of the GPU.
//!
//! The pod's own limit holds without this, so no container waits for it and no failure matters to the pod. A container runtime makes the cgroup
//! some time before the first process of the container runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use divvy_agent_core::LimitedPod;
use divvy_hardware::protocol::LimitRequest;
use divvy_hardware::{Failure, FailureCode};
use divvy_model::MiB;
use divvy_model::cgroup::is_container;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::watch::{Changed, DirectoryHandle, DirectoryWatch};
use super::{LimitSetter, PATIENCE, late};
use crate::cgroups;

/// The number of cgroups of one pod that are limited. Only a privileged container can make cgroups next to its own.
const MOST: usize = 256;
/// The number of directory entries that are read to find them. A cgroup has less than a hundred files.
const MOST_ENTRIES: usize = 2048;
/// The number of cgroups of one pod to which a look gives a limit.
const AT_ONCE: usize = 16;

/// A container's cgroup: its name, and the inode, because the runtime may make another cgroup with the same name.
type CgroupId = (String, u64);

/// What was done for one cgroup.
#[derive(Debug)]
struct LimitedContainer {
    /// Whether it is to be limited at the next look.
    is_due: bool,
    /// The limits that the driver has, or was not to have because limits do not nest.
    done: Vec<(String, MiB)>,
    /// How often in a row this failed.
    failures: u32,
}

impl LimitedContainer {
    fn new() -> LimitedContainer {
        LimitedContainer {
            is_due: true,
            done: Vec::new(),
            failures: 0,
        }
    }
}

/// A pod whose containers are limited.
#[derive(Debug)]
struct WatchedPod {
    wanted: LimitedPod,
    /// The path of its cgroup, relative to the root of the cgroups.
    cgroup: String,
    inode: u64,
    watched: Option<DirectoryHandle>,
    /// Whether there may be new containers.
    is_changed: bool,
    containers: BTreeMap<CgroupId, LimitedContainer>,
    has_too_many: bool,
}

/// When to look again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextLook {
    /// When something changes, or at the next reconciliation.
    AtChange,
    /// After a moment.
    Soon,
}

/// The containers of the pods that the driver limits.
#[derive(Debug)]
pub(crate) struct Containers {
    sys_root: PathBuf,
    watch: Option<DirectoryWatch>,
    is_warned: bool,
    pods: BTreeMap<String, WatchedPod>,
}

impl Containers {
    pub(crate) fn new(sys_root: &Path) -> Containers {
        Containers {
            sys_root: sys_root.to_owned(),
            watch: None,
            is_warned: false,
            pods: BTreeMap::new(),
        }
    }

    /// Wait until a followed pod gets a container. Without inotify, wait forever. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        let Some(watch) = &mut self.watch else {
            return std::future::pending().await;
        };
        match watch.changed().await {
            Ok(Changed::Some(watched)) => {
                let changed = self.pods.values_mut();
                changed
                    .filter(|pod| pod.watched.as_ref().is_some_and(|of| watched.contains(&of.id())))
                    .for_each(|pod| pod.is_changed = true);
            }
            Ok(Changed::All) => self.pods.values_mut().for_each(|pod| pod.is_changed = true),
            Err(error) => {
                self.without_watch(&error);
                self.watch = None;
                self.pods.values_mut().for_each(|pod| pod.watched = None);
            }
        }
    }

    /// Follow exactly these pods, as far as they have cgroups, and try again what has failed.
    pub(crate) fn follow(&mut self, limited: Vec<LimitedPod>) {
        let limited: BTreeMap<String, LimitedPod> = limited.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
        let is_gone = |(uid, pod): &(&String, &WatchedPod)| {
            let is_there = || self.inode(&pod.cgroup).is_some_and(|inode| inode == pod.inode);
            !limited.contains_key(*uid) || !is_there()
        };
        let gone: Vec<String> = self.pods.iter().filter(is_gone).map(|(uid, _)| uid.clone()).collect();
        gone.iter().for_each(|uid| self.forget(uid));
        if limited.keys().any(|uid| !self.pods.contains_key(uid)) {
            let cgroups = cgroups::pod_cgroups(&self.sys_root).unwrap_or_else(|error| {
                warn!("the containers of pods get no limits: {error}");
                BTreeMap::new()
            });
            for (uid, cgroup) in cgroups {
                let wanted = limited.get(&uid).filter(|_| !self.pods.contains_key(&uid));
                if let Some((wanted, inode)) = wanted.zip(self.inode(&cgroup)) {
                    let pod = WatchedPod {
                        wanted: wanted.clone(),
                        cgroup,
                        inode,
                        watched: None,
                        is_changed: true,
                        containers: BTreeMap::new(),
                        has_too_many: false,
                    };
                    self.pods.insert(uid, pod);
                }
            }
        }
        for (uid, wanted) in limited {
            if let Some(pod) = self.pods.get_mut(&uid) {
                pod.wanted = wanted;
                pod.is_changed = true;
                for container in pod.containers.values_mut() {
                    container.is_due |= container.done != pod.wanted.gpus;
                }
            }
        }
        self.watch_all();
    }

    /// Return the inode of a cgroup. The kernel gives it to no other cgroup.
    fn inode(&self, cgroup: &str) -> Option<u64> {
        let data = fs::metadata(self.sys_root.join(cgroups::ROOT).join(cgroup));
        data.ok().map(|data| data.ino())
    }

    fn forget(&mut self, uid: &str) {
        let pod = self.pods.remove(uid);
        if let (Some(watch), Some(watched)) = (&self.watch, pod.and_then(|pod| pod.watched)) {
            watch.remove(watched);
        }
    }

    /// Watch the pods that are not watched yet. This comes before the look at their cgroups, so that no new one is missed.
    fn watch_all(&mut self) {
        if self.pods.values().all(|pod| pod.watched.is_some()) {
            return;
        }
        let watched = (|| {
            let watch = match self.watch.take() {
                Some(watch) => watch,
                None => DirectoryWatch::new()?,
            };
            let watch = self.watch.insert(watch);
            for pod in self.pods.values_mut().filter(|pod| pod.watched.is_none()) {
                match watch.add(&self.sys_root.join(cgroups::ROOT).join(&pod.cgroup)) {
                    Ok(watched) => pod.watched = Some(watched),
                    // The next look forgets the pod.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })();
        match watched {
            Ok(()) => self.is_warned = false,
            Err(error) => self.without_watch(&error),
        }
    }

    fn without_watch(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_warned, true) {
            warn!("inotify does not report new containers, so they get their limits some seconds later: {error}");
        }
    }

    /// Limit the cgroups that are due. `told` hears of each container when it is limited, and once if it is not.
    pub(crate) async fn limit(&mut self, driver: &impl LimitSetter, told: impl Fn(bool)) -> NextLook {
        let mut next = NextLook::AtChange;
        let mut gone = Vec::new();
        'pods: for (uid, pod) in &mut self.pods {
            let directory = self.sys_root.join(cgroups::ROOT).join(&pod.cgroup);
            if std::mem::replace(&mut pod.is_changed, false)
                && let Err(error) = pod.look(&directory)
            {
                debug!(%error, pod = %pod.wanted.pod, "the pod's cgroup cannot be listed");
                gone.push(uid.clone());
                continue;
            }
            let mut left = AT_ONCE;
            for ((name, _), container) in pod.containers.iter_mut().filter(|(_, container)| container.is_due) {
                if left == 0 {
                    next = NextLook::Soon;
                    break;
                }
                left -= 1;
                container.is_due = false;
                let failure = match limit_one(driver, &pod.wanted, &format!("{}/{name}", pod.cgroup)).await {
                    Ok(is_set) => {
                        container.done.clone_from(&pod.wanted.gpus);
                        container.failures = 0;
                        if is_set {
                            told(true);
                        }
                        continue;
                    }
                    // It has ended.
                    Err(_) if !directory.join(name).is_dir() => continue,
                    Err(failure) => failure,
                };
                container.failures = container.failures.saturating_add(1);
                match container.failures {
                    // It may be that the probe was busy, or that the pod's own limit is on its way after a restart of the agent.
                    1 => {
                        container.is_due = true;
                        next = NextLook::Soon;
                    }
                    2 => {
                        told(false);
                        warn!(
                            pod = %pod.wanted.pod, container = name,
                            "a container may be shown the whole GPU, because its own cgroup has no limit: {failure}"
                        );
                    }
                    _ => {}
                }
                if is_of_all(&failure) {
                    break 'pods;
                }
            }
        }
        gone.iter().for_each(|uid| self.forget(uid));
        next
    }
}

impl WatchedPod {
    /// Find the containers that there are now.
    fn look(&mut self, directory: &Path) -> io::Result<()> {
        let found = containers(directory)?;
        if found.len() > MOST && !std::mem::replace(&mut self.has_too_many, true) {
            warn!(pod = %self.wanted.pod, "the pod's cgroup has more than {MOST} cgroups; those beyond get no limit of their own");
        }
        let mut before = std::mem::take(&mut self.containers);
        for id in found.into_iter().take(MOST) {
            let container = before.remove(&id).unwrap_or_else(LimitedContainer::new);
            self.containers.insert(id, container);
        }
        Ok(())
    }
}

/// Report whether a failure would meet each further call, which would wait as long.
fn is_of_all(failure: &Failure) -> bool {
    matches!(
        failure.code,
        FailureCode::Timeout | FailureCode::ProbeUnreachable | FailureCode::Busy
    )
}

/// Return some cgroups directly below a pod's that have the name of a container's: more than [`MOST`] if there are more.
fn containers(pod: &Path) -> io::Result<BTreeSet<CgroupId>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(pod)?.take(MOST_ENTRIES) {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if entry.file_type()?.is_dir() && is_container(&name) {
            found.insert((name, entry.ino()));
        }
        if found.len() > MOST {
            break;
        }
    }
    Ok(found)
}

/// Set the pod's limits on one cgroup, as far as possible. Report whether there is one now; there is none if limits do not nest.
///
/// # Errors
/// A limit is not set.
async fn limit_one(driver: &impl LimitSetter, pod: &LimitedPod, cgroup: &str) -> Result<bool, Failure> {
    let mut result = Ok(false);
    for (uuid, memory) in &pod.gpus {
        let limit = LimitRequest {
            uuid: uuid.clone(),
            cgroup: cgroup.to_owned(),
            hard: *memory,
            alone: pod.alone,
        };
        match timeout(PATIENCE, driver.limit(limit)).await.unwrap_or_else(|_| Err(late())) {
            Ok(limited) => result = result.map(|is_set| is_set || !limited.left_out),
            Err(failure) if is_of_all(&failure) => return Err(failure),
            Err(failure) => result = result.and(Err(failure)),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Mutex;
    use std::time::Duration;

    use divvy_hardware::protocol::LimitAnswer;
    use divvy_model::PodKey;
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    /// The deadline for events.
    const DEADLINE: Duration = Duration::from_secs(10);
    const PODS: usize = 4;

    /// A driver that does what the probe's does, and forgets the limit of a cgroup that is gone.
    struct Fake {
        root: TempDir,
        /// Whether limits nest.
        nest: bool,
        failure: Mutex<Option<FailureCode>>,
        /// The limits, by the cgroup's path, its inode, and the GPU.
        limits: Mutex<BTreeMap<(String, u64, String), MiB>>,
        calls: Mutex<Vec<String>>,
    }

    impl Fake {
        fn new(nest: bool) -> Fake {
            let root = tempfile::tempdir().expect("a directory");
            fs::create_dir_all(root.path().join(cgroups::ROOT).join("kubepods/besteffort")).expect("created");
            Fake {
                root,
                nest,
                failure: Mutex::default(),
                limits: Mutex::default(),
                calls: Mutex::default(),
            }
        }

        fn directory(&self, cgroup: &str) -> PathBuf {
            self.root.path().join(cgroups::ROOT).join(cgroup)
        }

        fn make(&self, cgroup: &str) {
            fs::create_dir_all(self.directory(cgroup)).expect("created");
        }

        /// Remove a cgroup. Its inode is not used again.
        fn end(&self, cgroup: &str) {
            let graves = self.root.path().join("graves");
            fs::create_dir_all(&graves).expect("created");
            let count = fs::read_dir(&graves).expect("listed").count();
            fs::rename(self.directory(cgroup), graves.join(count.to_string())).expect("moved");
        }

        fn fail(&self, code: Option<FailureCode>) {
            *self.failure.lock().expect("no panic") = code;
        }

        /// Return the limits of a cgroup by GPU.
        fn of(&self, cgroup: &str) -> Vec<(String, MiB)> {
            let inode = fs::metadata(self.directory(cgroup)).expect("there").ino();
            let limits = self.limits.lock().expect("no panic");
            let of = limits.iter().filter(|((path, of, _), _)| path == cgroup && *of == inode);
            of.map(|((_, _, uuid), memory)| (uuid.clone(), *memory)).collect()
        }

        fn calls(&self) -> Vec<String> {
            std::mem::take(&mut *self.calls.lock().expect("no panic"))
        }
    }

    impl LimitSetter for Fake {
        async fn limit(&self, limit: LimitRequest) -> Result<LimitAnswer, Failure> {
            self.calls.lock().expect("no panic").push(limit.cgroup.clone());
            if let Some(code) = *self.failure.lock().expect("no panic") {
                return Err(Failure::new(code, "as the test wants"));
            }
            let data = fs::metadata(self.directory(&limit.cgroup));
            let inode = data
                .map_err(|error| Failure::new(FailureCode::Unknown, error.to_string()))?
                .ino();
            let left_out = !self.nest && !limit.alone;
            if !left_out {
                let mut limits = self.limits.lock().expect("no panic");
                limits.insert((limit.cgroup, inode, limit.uuid), limit.hard);
            }
            Ok(LimitAnswer { used: MiB(0), left_out })
        }
    }

    fn limited(pod: usize, alone: bool, gpus: &[&str]) -> LimitedPod {
        let share = MiB(1024 * (pod as u64 + 1));
        LimitedPod {
            uid: format!("a-{pod}"),
            pod: PodKey {
                namespace: "default".to_owned(),
                name: format!("pod-{pod}"),
            },
            gpus: gpus.iter().map(|uuid| ((*uuid).to_owned(), share)).collect(),
            alone,
        }
    }

    fn cgroup(pod: usize) -> String {
        format!("kubepods/besteffort/poda-{pod}")
    }

    /// Look until nothing is due.
    async fn settle(containers: &mut Containers, driver: &Fake) {
        for _ in 0..100 {
            if containers.limit(driver, |_| {}).await == NextLook::AtChange {
                return;
            }
        }
        panic!("the looks have no end");
    }

    #[derive(Debug, Clone)]
    enum Step {
        PodStarts(usize),
        PodEnds(usize),
        /// A container starts, with one of the names that runtimes give.
        Starts(usize, usize),
        /// The oldest container of the pod ends.
        Ends(usize),
        /// The oldest container ends, and another one with the same name starts before the agent looks.
        Again(usize),
        /// A container makes a cgroup in its own, and the pod has one with another name.
        Others(usize),
        AgentRestarts,
        Driver(Option<FailureCode>),
        Follow,
        Look,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            2 => (0..PODS).prop_map(Step::PodStarts),
            1 => (0..PODS).prop_map(Step::PodEnds),
            4 => (0..PODS, 0..3_usize).prop_map(|(pod, style)| Step::Starts(pod, style)),
            1 => (0..PODS).prop_map(Step::Ends),
            1 => (0..PODS).prop_map(Step::Again),
            1 => (0..PODS).prop_map(Step::Others),
            1 => Just(Step::AgentRestarts),
            2 => prop_oneof![Just(None), Just(Some(FailureCode::NotSupported)), Just(Some(FailureCode::Timeout))].prop_map(Step::Driver),
            3 => Just(Step::Follow),
            4 => Just(Step::Look),
        ];
        proptest::collection::vec(step, 0..60)
    }

    /// What there is on the node: for each pod the names of its containers.
    type Node = BTreeMap<usize, Vec<String>>;

    fn start(node: &mut Node, driver: &Fake, pod: usize, style: usize, count: &mut usize) {
        if let Some(of) = node.get_mut(&pod) {
            *count += 1;
            let name = match style {
                0 => format!("{count:064x}"),
                1 => format!("cri-containerd-{count:064x}.scope"),
                _ => format!("crio-{count:064x}.scope"),
            };
            driver.make(&format!("{}/{name}", cgroup(pod)));
            of.push(name);
        }
    }

    /// Pod 0 is not limited, pod 1 has one container with a GPU, and pod 3 has two GPUs.
    fn wanted(node: &Node) -> Vec<LimitedPod> {
        let limited = node.keys().filter(|pod| **pod > 0);
        limited.map(|pod| limited_of(*pod)).collect()
    }

    fn limited_of(pod: usize) -> LimitedPod {
        limited(pod, pod == 1, if pod == 3 { &["GPU-a", "GPU-b"] } else { &["GPU-a"] })
    }

    fn check(node: &Node, driver: &Fake) {
        for (pod, names) in node {
            let of = limited_of(*pod);
            let is_limited = *pod > 0 && (driver.nest || of.alone);
            let expected = if is_limited { of.gpus } else { Vec::new() };
            let path = cgroup(*pod);
            for name in names {
                assert_eq!(driver.of(&format!("{path}/{name}")), expected, "{path}/{name}");
            }
            assert_eq!(driver.of(&path), [], "{path}");
            for entry in fs::read_dir(driver.directory(&path)).expect("listed") {
                let name = entry.expect("an entry").file_name().into_string().expect("text");
                let nested = format!("{path}/{name}/nested");
                if driver.directory(&nested).is_dir() {
                    assert_eq!(driver.of(&nested), [], "{nested}");
                }
                if !names.contains(&name) {
                    assert_eq!(driver.of(&format!("{path}/{name}")), [], "{path}/{name}");
                }
            }
        }
    }

    async fn play(steps: Vec<Step>, nest: bool) {
        let driver = Fake::new(nest);
        let mut containers = Containers::new(driver.root.path());
        let (mut node, mut count) = (Node::new(), 0);
        for step in steps {
            match step {
                Step::PodStarts(pod) => {
                    driver.make(&cgroup(pod));
                    node.entry(pod).or_default();
                }
                Step::PodEnds(pod) => {
                    if node.remove(&pod).is_some() {
                        driver.end(&cgroup(pod));
                    }
                }
                Step::Starts(pod, style) => start(&mut node, &driver, pod, style, &mut count),
                Step::Ends(pod) | Step::Again(pod) => {
                    let Some(names) = node.get_mut(&pod).filter(|names| !names.is_empty()) else {
                        continue;
                    };
                    let name = names.remove(0);
                    let path = format!("{}/{name}", cgroup(pod));
                    driver.end(&path);
                    if matches!(step, Step::Again(_)) {
                        driver.make(&path);
                        names.push(name);
                    }
                }
                Step::Others(pod) => {
                    if let Some(names) = node.get(&pod) {
                        driver.make(&format!("{}/crio-conmon-0f.scope/nested", cgroup(pod)));
                        if let Some(name) = names.first() {
                            driver.make(&format!("{}/{name}/nested", cgroup(pod)));
                        }
                    }
                }
                Step::AgentRestarts => containers = Containers::new(driver.root.path()),
                Step::Driver(code) => driver.fail(code),
                Step::Follow => containers.follow(wanted(&node)),
                Step::Look => drop(containers.limit(&driver, |_| {}).await),
            }
        }
        driver.fail(None);
        containers.follow(wanted(&node));
        settle(&mut containers, &driver).await;
        check(&node, &driver);
        let followed: Vec<usize> = node.keys().copied().filter(|pod| *pod > 0).collect();
        let uids: Vec<String> = followed.iter().map(|pod| format!("a-{pod}")).collect();
        assert_eq!(containers.pods.keys().cloned().collect::<Vec<_>>(), uids);
        // From now on, inotify alone tells of containers.
        driver.calls();
        for pod in followed {
            start(&mut node, &driver, pod, pod % 3, &mut count);
            let name = node[&pod].last().cloned().expect("started");
            let told = async {
                while !driver.calls().iter().any(|call| call.ends_with(&name)) {
                    containers.changed().await;
                    settle(&mut containers, &driver).await;
                }
            };
            timeout(DEADLINE, told).await.expect("inotify tells of it");
        }
        check(&node, &driver);
        containers.follow(Vec::new());
        assert!(containers.pods.is_empty());
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// At the end, each container of a limited pod has exactly the limit of its pod.
        #[test]
        fn only_containers_of_limited_pods_have_a_limit(
            steps in steps(), nest in any::<bool>()
        ) {
            run(play(steps, nest));
        }
    }

    #[test]
    fn a_failure_is_told_once_and_so_is_the_success_that_follows() {
        run(async {
            let driver = Fake::new(true);
            let path = format!("{}/0f", cgroup(2));
            driver.make(&path);
            let mut containers = Containers::new(driver.root.path());
            let (set, failed) = (Cell::new(0), Cell::new(0));
            let told = |is_set: bool| {
                let of = if is_set { &set } else { &failed };
                of.set(of.get() + 1);
            };
            driver.fail(Some(FailureCode::NotSupported));
            for _ in 0..4 {
                containers.follow(vec![limited(2, false, &["GPU-a"])]);
                while containers.limit(&driver, told).await == NextLook::Soon {}
            }
            assert_eq!((set.get(), failed.get()), (0, 1));
            // A new container does not have the old one tried again.
            driver.calls();
            driver.make(&format!("{}/0e", cgroup(2)));
            timeout(DEADLINE, containers.changed()).await.expect("told");
            while containers.limit(&driver, told).await == NextLook::Soon {}
            assert_eq!(driver.calls(), [format!("{}/0e", cgroup(2)), format!("{}/0e", cgroup(2))]);
            assert_eq!((set.get(), failed.get()), (0, 2));
            driver.fail(None);
            for _ in 0..3 {
                containers.follow(vec![limited(2, false, &["GPU-a"])]);
                while containers.limit(&driver, told).await == NextLook::Soon {}
            }
            assert_eq!((set.get(), failed.get()), (2, 2));
            assert_eq!(driver.of(&path), [("GPU-a".to_owned(), MiB(3072))]);
        });
    }

    #[test]
    fn a_gpu_that_fails_does_not_keep_the_others_from_their_limits() {
        struct One(Fake);
        impl LimitSetter for One {
            async fn limit(&self, limit: LimitRequest) -> Result<LimitAnswer, Failure> {
                if limit.uuid == "GPU-a" {
                    Err(Failure::new(FailureCode::GpuLost, "gone"))
                } else {
                    self.0.limit(limit).await
                }
            }
        }
        run(async {
            let driver = One(Fake::new(true));
            let path = format!("{}/0f", cgroup(2));
            driver.0.make(&path);
            let mut containers = Containers::new(driver.0.root.path());
            containers.follow(vec![limited(2, false, &["GPU-a", "GPU-b"])]);
            containers.limit(&driver, |_| {}).await;
            assert_eq!(driver.0.of(&path), [("GPU-b".to_owned(), MiB(3072))]);
        });
    }

    #[test]
    fn a_limit_that_changes_is_set_again() {
        run(async {
            let driver = Fake::new(true);
            let path = format!("{}/0f", cgroup(2));
            driver.make(&path);
            let mut containers = Containers::new(driver.root.path());
            for share in [MiB(5), MiB(7), MiB(7)] {
                let mut pod = limited(2, false, &["GPU-a"]);
                pod.gpus[0].1 = share;
                containers.follow(vec![pod]);
                settle(&mut containers, &driver).await;
                assert_eq!(driver.of(&path), [("GPU-a".to_owned(), share)]);
            }
            assert_eq!(driver.calls().len(), 2);
        });
    }

    #[test]
    fn a_pods_cgroup_that_is_made_again_is_watched_again() {
        run(async {
            let driver = Fake::new(true);
            let pods = || vec![limited(2, false, &["GPU-a"])];
            let mut containers = Containers::new(driver.root.path());
            driver.make(&cgroup(2));
            containers.follow(pods());
            settle(&mut containers, &driver).await;
            driver.end(&cgroup(2));
            driver.make(&cgroup(2));
            containers.follow(pods());
            settle(&mut containers, &driver).await;
            let path = format!("{}/0f", cgroup(2));
            driver.make(&path);
            timeout(DEADLINE, containers.changed()).await.expect("told");
            settle(&mut containers, &driver).await;
            assert_eq!(driver.of(&path), [("GPU-a".to_owned(), MiB(3072))]);
        });
    }

    #[test]
    fn endless_cgroups_cost_few_calls_and_delay_no_pod() {
        run(async {
            let driver = Fake::new(true);
            for i in 0..MOST + 50 {
                driver.make(&format!("{}/{i:064x}", cgroup(1)));
            }
            let other = format!("{}/0f", cgroup(2));
            driver.make(&other);
            let pods = || vec![limited(1, true, &["GPU-a"]), limited(2, false, &["GPU-a"])];
            let mut containers = Containers::new(driver.root.path());
            containers.follow(pods());
            containers.limit(&driver, |_| {}).await;
            assert_eq!(driver.calls().len(), AT_ONCE + 1);
            assert_eq!(driver.of(&other).len(), 1);
            settle(&mut containers, &driver).await;
            assert_eq!(driver.calls().len(), MOST - AT_ONCE);
            // Not even if none of them can be limited.
            driver.fail(Some(FailureCode::NotSupported));
            let mut containers = Containers::new(driver.root.path());
            containers.follow(pods());
            settle(&mut containers, &driver).await;
            assert_eq!(driver.calls().len(), 2 * (MOST + 1), "each is tried twice");
            // A driver that does not answer is asked once at each look.
            driver.fail(Some(FailureCode::Timeout));
            for _ in 0..3 {
                containers.follow(pods());
                containers.limit(&driver, |_| {}).await;
                assert_eq!(driver.calls().len(), 1);
            }
        });
    }
}
