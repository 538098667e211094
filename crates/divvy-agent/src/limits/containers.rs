//! Sets the limit of a pod on the cgroups of its containers, too, so that a container is shown its share as the size of the GPU.
//!
//! The pod's own limit holds without this, so no container waits for it and no failure matters to the pod. A container runtime makes the cgroup
//! some time before the first process of the container runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::DirEntryExt as _;
use std::path::{Path, PathBuf};

use divvy_agent_core::LimitedPod;
use divvy_hardware::protocol::Limit;
use divvy_hardware::{Code, Failure};
use divvy_model::MiB;
use divvy_model::cgroup::is_container;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::watch::{Changed, Watch, Watched};
use super::{Driver, PATIENCE, late};
use crate::cgroups;

/// The number of cgroups of one pod that are limited. Only a privileged container can make cgroups next to its own.
const MOST: usize = 256;
/// The number of directory entries that are read to find them. A cgroup has less than a hundred files.
const MOST_ENTRIES: usize = 2048;
/// The number of cgroups of one pod to which a look gives a limit.
const AT_ONCE: usize = 16;

/// A container's cgroup: its name, and the inode, because the runtime may make another cgroup with the same name.
type Id = (String, u64);

/// What was done for one cgroup.
#[derive(Debug)]
struct Container {
    /// Whether it is to be limited at the next look.
    is_due: bool,
    /// The limits that the driver has, or was not to have because limits do not nest.
    done: Vec<(String, MiB)>,
    /// How often in a row this failed.
    failures: u32,
}

impl Container {
    fn new() -> Container {
        Container {
            is_due: true,
            done: Vec::new(),
            failures: 0,
        }
    }
}

/// A pod whose containers are limited.
#[derive(Debug)]
struct Pod {
    wanted: LimitedPod,
    /// The path of its cgroup, relative to the root of the cgroups.
    cgroup: String,
    watched: Option<Watched>,
    /// Whether there may be new containers.
    is_changed: bool,
    containers: BTreeMap<Id, Container>,
    has_too_many: bool,
}

/// When to look again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// When something changes, or at the next reconciliation.
    AtChange,
    /// After a moment.
    Soon,
}

/// The containers of the pods that the driver limits.
#[derive(Debug)]
pub(crate) struct Containers {
    sys_root: PathBuf,
    watch: Option<Watch>,
    is_warned: bool,
    pods: BTreeMap<String, Pod>,
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
        let gone: Vec<String> = self.pods.keys().filter(|uid| !limited.contains_key(*uid)).cloned().collect();
        gone.iter().for_each(|uid| self.forget(uid));
        if limited.keys().any(|uid| !self.pods.contains_key(uid)) {
            let cgroups = cgroups::pod_cgroups(&self.sys_root).unwrap_or_else(|error| {
                warn!("the containers of pods get no limits: {error}");
                BTreeMap::new()
            });
            for (uid, cgroup) in cgroups {
                if let Some(wanted) = limited.get(&uid).filter(|_| !self.pods.contains_key(&uid)) {
                    let pod = Pod {
                        wanted: wanted.clone(),
                        cgroup,
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
                None => Watch::new()?,
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
    pub(crate) async fn limit(&mut self, driver: &impl Driver, told: impl Fn(bool)) -> Next {
        let mut next = Next::AtChange;
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
                    next = Next::Soon;
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
                    // The pod's own limit may just be on its way.
                    1 => {
                        container.is_due = true;
                        next = Next::Soon;
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

impl Pod {
    /// Find the containers that there are now.
    fn look(&mut self, directory: &Path) -> io::Result<()> {
        let found = containers(directory)?;
        if found.len() > MOST && !std::mem::replace(&mut self.has_too_many, true) {
            warn!(pod = %self.wanted.pod, "the pod's cgroup has more than {MOST} cgroups; those beyond get no limit of their own");
        }
        let mut before = std::mem::take(&mut self.containers);
        for id in found.into_iter().take(MOST) {
            let container = before.remove(&id).unwrap_or_else(Container::new);
            self.containers.insert(id, container);
        }
        Ok(())
    }
}

/// Report whether a failure would meet each further call, which would wait as long.
fn is_of_all(failure: &Failure) -> bool {
    matches!(failure.code, Code::Timeout | Code::ProbeUnreachable | Code::Busy)
}

/// Return some cgroups directly below a pod's that have the name of a container's: more than [`MOST`] if there are more.
fn containers(pod: &Path) -> io::Result<BTreeSet<Id>> {
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
async fn limit_one(driver: &impl Driver, pod: &LimitedPod, cgroup: &str) -> Result<bool, Failure> {
    let mut result = Ok(false);
    for (uuid, memory) in &pod.gpus {
        let limit = Limit {
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
