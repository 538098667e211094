//! The kubelet's device manager as a value: who offers which devices, who holds which, and which ids a
//! container gets next. No clock, no I/O: times, random numbers and plugins' answers are arguments.
//!
//! Follows `pkg/kubelet/cm/devicemanager/manager.go` of Kubernetes 1.36 (research/reliability.md section 1)
//! with topology policy `none`: no NUMA alignment, so GetPreferredAllocation is always called unless ids
//! of the pod's init containers cover the request.

use std::collections::{BTreeMap, BTreeSet};

use divvy_kubelet::api::v1beta1::{ContainerAllocateResponse, Device, DevicePluginOptions};

use super::seed::Seed;

/// Which device manager bugs of Kubernetes 1.36 are played (research/reliability.md section 1.7).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bugs {
    /// B1, kubernetes#137534: a podresources `List` during Allocate or GetPreferredAllocation, when some pod
    /// has just ended, makes the kubelet forget the ids it is handing out; the next pod gets them too.
    pub double_hand_out: bool,
    /// B2, kubernetes#121994: when an old plugin's stream ends, the *new* plugin of the same resource is
    /// disconnected; and messages of the old stream still replace the list.
    pub old_stream_disconnects_new: bool,
    /// B3, kubernetes#124345: after a kubelet restart a running pod is killed because its ended init
    /// container "needs" devices and the plugin has not registered yet.
    pub ended_init_container_kills: bool,
}

impl Bugs {
    /// What an unpatched kubelet 1.36 does.
    pub fn as_in_kubernetes_1_36() -> Bugs {
        Bugs {
            double_hand_out: true,
            old_stream_disconnects_new: true,
            ended_init_container_kills: true,
        }
    }
}

/// Why a container gets no devices, in the kubelet's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No plugin of this resource has registered since the kubelet's start.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// The plugin is gone, or all its devices failed.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    /// A container that is made again holds devices that failed.
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    HeldUnhealthy(String),
    /// Not enough free ids.
    #[error("requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}")]
    Unavailable {
        /// Resource name.
        resource: String,
        /// Ids still needed (those reused from init containers are off already).
        requested: usize,
        /// Free healthy ids.
        available: usize,
    },
    /// Fewer ids could be taken than were counted.
    #[error("unexpectedly allocated less resources than required. Requested: {requested}, Got: {got}")]
    Short {
        /// Ids asked for.
        requested: usize,
        /// Ids taken.
        got: usize,
    },
    /// The container's request is not what it was when its ids were recorded.
    #[error("pod {pod:?} container {container:?} changed request for resource {resource:?} from {from} to {to}")]
    Changed {
        /// Pod UID.
        pod: String,
        /// Container name.
        container: String,
        /// Resource name.
        resource: String,
        /// Ids recorded.
        from: usize,
        /// Ids asked for now.
        to: usize,
    },
    /// The resource was removed between choice and call.
    #[error("unknown Device Plugin {0}")]
    UnknownPlugin(String),
    /// Allocate answered with an empty list.
    #[error("no containers return in allocation response")]
    EmptyResponse,
    /// GetPreferredAllocation failed.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(String),
    /// PreStartContainer failed.
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(String),
    /// PreStartContainer is wanted and the kubelet has no record (its checkpoint was lost).
    #[error("no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}")]
    NoRecord {
        /// Pod UID.
        pod: String,
        /// Container name.
        container: String,
        /// Resource name.
        resource: String,
    },
    /// A call to an endpoint whose stream has ended.
    #[error("endpoint {0} has been stopped")]
    Stopped(String),
    /// The resource is known and its endpoint is not.
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
    /// Allocate failed; the gRPC error as Go prints it.
    #[error("{0}")]
    Allocate(String),
}

/// A container of a pod, by UID and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Pod UID.
    pub pod: String,
    /// Container name.
    pub container: String,
    /// Resource name.
    pub resource: String,
}

/// What a container holds of a resource.
#[derive(Debug, Clone, PartialEq)]
pub struct Held {
    /// The ids.
    pub ids: BTreeSet<String>,
    /// The plugin's answer to Allocate; replayed at every start of the container.
    pub response: ContainerAllocateResponse,
}

#[derive(Debug, Clone, Default)]
struct Endpoint {
    options: Option<DevicePluginOptions>,
    /// Milliseconds of the node's clock; `None` while the stream is open.
    stopped_ms: Option<u64>,
}

/// One container's request of one resource, while it is being allocated.
#[derive(Debug, Clone)]
pub struct Request {
    /// For whom.
    pub holder: Holder,
    /// Ids wanted in all.
    pub wanted: usize,
    /// Ids taken so far; also the `must_include` of GetPreferredAllocation.
    pub taken: BTreeSet<String>,
    available: BTreeSet<String>,
}

/// What an allocation needs next.
#[derive(Debug)]
pub enum Next {
    /// The container gets no (further) ids of this resource: it has them, or it runs already.
    Nothing,
    /// Ask GetPreferredAllocation, then [`DeviceBooks::preferred`].
    Ask {
        /// The request so far.
        request: Request,
        /// `available_deviceIDs`, in random order.
        available: Vec<String>,
    },
    /// Call Allocate with `request.taken`, then [`DeviceBooks::record`] or [`DeviceBooks::give_up`].
    Allocate(Request),
}

/// The device manager's books.
#[derive(Debug, Default)]
pub struct DeviceBooks {
    healthy: BTreeMap<String, BTreeSet<String>>,
    unhealthy: BTreeMap<String, BTreeSet<String>>,
    numa: BTreeMap<(String, String), Vec<i64>>,
    endpoints: BTreeMap<String, Endpoint>,
    /// What the kubelet believes to be taken. Differs from `held` while a call is under way, and by its bugs.
    allocated: BTreeMap<String, BTreeSet<String>>,
    held: BTreeMap<Holder, Held>,
    /// Ids of the current pod's ordinary init containers, per resource; of one pod at a time.
    reuse: (String, BTreeMap<String, BTreeSet<String>>),
    in_flight: Option<(String, BTreeSet<String>)>,
    /// Bugs to play.
    pub bugs: Bugs,
}

impl DeviceBooks {
    /// Books as a new kubelet has them after reading its checkpoint: holders are known, resources are known with
    /// no device and a stopped endpoint whose options are not known.
    pub fn restore(
        bugs: Bugs,
        now_ms: u64,
        held: BTreeMap<Holder, Held>,
        registered: impl IntoIterator<Item = String>,
    ) -> DeviceBooks {
        let mut books = DeviceBooks {
            held,
            bugs,
            ..DeviceBooks::default()
        };
        books.allocated = books.counted_from_held();
        for resource in registered {
            books.healthy.insert(resource.clone(), BTreeSet::new());
            books.unhealthy.insert(resource.clone(), BTreeSet::new());
            let endpoint = Endpoint {
                options: None,
                stopped_ms: Some(now_ms),
            };
            books.endpoints.insert(resource, endpoint);
        }
        books
    }

    fn counted_from_held(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut allocated: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (holder, held) in &self.held {
            let ids = allocated.entry(holder.resource.clone()).or_default();
            ids.extend(held.ids.iter().cloned());
        }
        allocated
    }

    /// A plugin has registered and answered GetDevicePluginOptions.
    pub fn connected(&mut self, resource: &str, options: DevicePluginOptions) {
        let endpoint = Endpoint {
            options: Some(options),
            stopped_ms: None,
        };
        self.endpoints.insert(resource.to_owned(), endpoint);
    }

    /// A plugin's stream ended: every id of the resource is unhealthy at once; capacity stays for the grace period.
    pub fn disconnected(&mut self, resource: &str, now_ms: u64) {
        let Some(endpoint) = self.endpoints.get_mut(resource) else {
            return;
        };
        endpoint.stopped_ms = Some(now_ms);
        if let Some(healthy) = self.healthy.get_mut(resource) {
            let ids = std::mem::take(healthy);
            self.unhealthy.entry(resource.to_owned()).or_default().extend(ids);
        }
    }

    /// A message of ListAndWatch: the whole list.
    pub fn devices(&mut self, resource: &str, devices: &[Device]) {
        let (mut healthy, mut unhealthy) = (BTreeSet::new(), BTreeSet::new());
        self.numa.retain(|(of, _), _| of != resource);
        for device in devices {
            if let Some(topology) = device.topology.as_ref().filter(|topology| !topology.nodes.is_empty()) {
                let nodes = topology.nodes.iter().map(|node| node.id).collect();
                self.numa.insert((resource.to_owned(), device.id.clone()), nodes);
            }
            if device.health == "Healthy" {
                healthy.insert(device.id.clone());
            } else {
                unhealthy.insert(device.id.clone());
            }
        }
        self.healthy.insert(resource.to_owned(), healthy);
        self.unhealthy.insert(resource.to_owned(), unhealthy);
    }

    /// Capacity and allocatable of every resource. Resources whose plugin has been gone for longer than `grace_ms`
    /// are forgotten and named in the second part: the kubelet sets them to 0 in the node's status.
    pub fn capacity(&mut self, now_ms: u64, grace_ms: u64) -> (BTreeMap<String, (usize, usize)>, Vec<String>) {
        let known: BTreeSet<String> = self.healthy.keys().chain(self.unhealthy.keys()).cloned().collect();
        let (mut capacity, mut removed) = (BTreeMap::new(), Vec::new());
        for resource in known {
            let expired = match self.endpoints.get(&resource) {
                None => true,
                Some(endpoint) => endpoint.stopped_ms.is_some_and(|at| now_ms.saturating_sub(at) > grace_ms),
            };
            if expired {
                self.endpoints.remove(&resource);
                self.healthy.remove(&resource);
                self.unhealthy.remove(&resource);
                removed.push(resource);
                continue;
            }
            let healthy = self.healthy.get(&resource).map_or(0, BTreeSet::len);
            let unhealthy = self.unhealthy.get(&resource).map_or(0, BTreeSet::len);
            capacity.insert(resource, (healthy + unhealthy, healthy));
        }
        (capacity, removed)
    }

    /// Whether the device manager looks after this resource (others in a pod's limits are none of its business).
    pub fn knows(&self, resource: &str) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// Forgets pods that are no longer active (`UpdateAllocatedDevices`). Says whether anything was forgotten.
    pub fn forget_all_but(&mut self, active: &BTreeSet<String>) -> bool {
        let before = self.held.len();
        self.held.retain(|holder, _| active.contains(&holder.pod));
        if self.held.len() == before {
            return false;
        }
        self.allocated = self.counted_from_held();
        if let Some((resource, ids)) = self.in_flight.as_ref().filter(|_| !self.bugs.double_hand_out) {
            self.allocated
                .entry(resource.clone())
                .or_default()
                .extend(ids.iter().cloned());
        }
        true
    }

    /// Starts the allocation of one resource for one container. `kubelet_starting` is true until the first list of pods
    /// was handled (`sourcesReady`), `running` whether the container runs already.
    pub fn begin(
        &mut self,
        holder: Holder,
        wanted: usize,
        kubelet_starting: bool,
        running: bool,
        seed: &mut Seed,
    ) -> Result<Next, DeviceError> {
        if self.reuse.0 != holder.pod {
            self.reuse = (holder.pod.clone(), BTreeMap::new());
        }
        let resource = holder.resource.clone();
        let held = self.held.get(&holder).map(|held| held.ids.clone());
        if let Some(ids) = &held
            && ids.len() != wanted
        {
            return Err(DeviceError::Changed {
                from: ids.len(),
                to: wanted,
                pod: holder.pod,
                container: holder.container,
                resource: holder.resource,
            });
        }
        if kubelet_starting && running {
            return Ok(Next::Nothing);
        }
        let Some(healthy) = self.healthy.get(&resource) else {
            return Err(DeviceError::Unregistered(resource));
        };
        if healthy.is_empty() {
            return Err(DeviceError::NoneHealthy(resource));
        }
        if let Some(ids) = held {
            if !ids.is_subset(healthy) {
                return Err(DeviceError::HeldUnhealthy(resource));
            }
            return Ok(Next::Nothing);
        }
        if wanted == 0 {
            return Ok(Next::Nothing);
        }
        let mut request = Request {
            holder,
            wanted,
            taken: BTreeSet::new(),
            available: BTreeSet::new(),
        };
        let reusable = self.reuse.1.get(&resource).cloned().unwrap_or_default();
        if self.take(&mut request, &reusable, seed) {
            return Ok(Next::Allocate(request));
        }
        let in_use = self.allocated.get(&resource).cloned().unwrap_or_default();
        request.available = self
            .healthy
            .get(&resource)
            .map(|ids| ids.difference(&in_use).cloned().collect())
            .unwrap_or_default();
        let needed = wanted - request.taken.len();
        if request.available.len() < needed {
            return Err(DeviceError::Unavailable {
                resource,
                requested: needed,
                available: request.available.len(),
            });
        }
        let Some(endpoint) = self.endpoints.get(&resource) else {
            return Err(DeviceError::NoEndpoint(resource));
        };
        let asks = endpoint
            .options
            .as_ref()
            .is_some_and(|options| options.get_preferred_allocation_available);
        if !asks {
            return self.fill(request, seed).map(Next::Allocate);
        }
        let mut available: Vec<String> = request.available.union(&request.taken).cloned().collect();
        seed.shuffle(&mut available);
        self.in_flight = Some((resource, request.taken.clone()));
        Ok(Next::Ask { request, available })
    }

    /// The answer of GetPreferredAllocation: intersected with what is available, a random part when it is too long,
    /// filled at random when it is too short.
    pub fn preferred(&mut self, mut request: Request, answer: &[String], seed: &mut Seed) -> Result<Request, DeviceError> {
        let wished = answer.iter().filter(|id| request.available.contains(*id)).cloned().collect();
        if self.take(&mut request, &wished, seed) {
            return Ok(request);
        }
        self.fill(request, seed)
    }

    fn fill(&mut self, mut request: Request, seed: &mut Seed) -> Result<Request, DeviceError> {
        let available = request.available.clone();
        if self.take(&mut request, &available, seed) {
            return Ok(request);
        }
        Err(DeviceError::Short {
            requested: request.wanted,
            got: request.taken.len(),
        })
    }

    /// Takes ids until the request is covered; true when it is. Marks them as allocated at once, as the kubelet does.
    fn take(&mut self, request: &mut Request, from: &BTreeSet<String>, seed: &mut Seed) -> bool {
        let mut candidates: Vec<&String> = from.difference(&request.taken).collect();
        seed.shuffle(&mut candidates);
        candidates.truncate(request.wanted - request.taken.len());
        let ids: Vec<String> = candidates.into_iter().cloned().collect();
        let allocated = self.allocated.entry(request.holder.resource.clone()).or_default();
        allocated.extend(ids.iter().cloned());
        request.taken.extend(ids);
        self.in_flight = Some((request.holder.resource.clone(), request.taken.clone()));
        request.taken.len() == request.wanted
    }

    /// The ids of a request in random order, as Allocate and PreStartContainer get them.
    pub fn in_random_order(ids: &BTreeSet<String>, seed: &mut Seed) -> Vec<String> {
        let mut ids: Vec<String> = ids.iter().cloned().collect();
        seed.shuffle(&mut ids);
        ids
    }

    /// Allocate answered. With B1 `allocated` is not repaired here: that is the bug.
    pub fn record(&mut self, request: Request, response: ContainerAllocateResponse) {
        self.in_flight = None;
        let held = Held {
            ids: request.taken,
            response,
        };
        self.held.insert(request.holder, held);
    }

    /// The call failed: what was taken is free again.
    pub fn give_up(&mut self) {
        self.in_flight = None;
        self.allocated = self.counted_from_held();
    }

    /// A container's devices are settled: an ordinary init container leaves its ids to those that follow,
    /// any other keeps what it took from them.
    pub fn settle(&mut self, pod: &str, container: &str, leaves_ids: bool) {
        if self.reuse.0 != pod {
            self.reuse = (pod.to_owned(), BTreeMap::new());
        }
        for (holder, held) in &self.held {
            if holder.pod != pod || holder.container != container {
                continue;
            }
            let ids = self.reuse.1.entry(holder.resource.clone()).or_default();
            if leaves_ids {
                ids.extend(held.ids.iter().cloned());
            } else {
                ids.retain(|id| !held.ids.contains(id));
            }
        }
    }

    /// What a container holds of a resource.
    pub fn held(&self, pod: &str, container: &str, resource: &str) -> Option<&Held> {
        self.held.get(&Holder {
            pod: pod.to_owned(),
            container: container.to_owned(),
            resource: resource.to_owned(),
        })
    }

    /// Everyone who holds devices.
    pub fn holders(&self) -> &BTreeMap<Holder, Held> {
        &self.held
    }

    /// Ids that pods hold of each resource, counted once: a node's allocatable is never less at admission.
    pub fn allocated_counts(&self) -> BTreeMap<String, usize> {
        self.allocated
            .iter()
            .map(|(resource, ids)| (resource.clone(), ids.len()))
            .collect()
    }

    /// The healthy ids of each resource.
    pub fn healthy(&self) -> &BTreeMap<String, BTreeSet<String>> {
        &self.healthy
    }

    /// Whether and how PreStartContainer must be called: `Ok(None)` when the plugin does not want it, or when the
    /// kubelet has not heard of its options since its own restart (then it is skipped without a word).
    pub fn pre_start(&self, holder: &Holder) -> Result<Option<&BTreeSet<String>>, DeviceError> {
        let Some(endpoint) = self.endpoints.get(&holder.resource) else {
            return Err(DeviceError::NoEndpoint(holder.resource.clone()));
        };
        if !endpoint.options.as_ref().is_some_and(|options| options.pre_start_required) {
            return Ok(None);
        }
        match self.held.get(holder) {
            Some(held) => Ok(Some(&held.ids)),
            None => Err(DeviceError::NoRecord {
                pod: holder.pod.clone(),
                container: holder.container.clone(),
                resource: holder.resource.clone(),
            }),
        }
    }

    /// Whether the resource's plugin has an open stream.
    pub fn is_running(&self, resource: &str) -> bool {
        self.endpoints
            .get(resource)
            .is_some_and(|endpoint| endpoint.stopped_ms.is_none())
    }

    /// The ids of a holder by NUMA node, `-1` for those without (the checkpoint's form).
    pub fn by_numa(&self, resource: &str, ids: &BTreeSet<String>) -> BTreeMap<i64, Vec<String>> {
        let mut nodes: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            match self.numa.get(&(resource.to_owned(), id.clone())) {
                None => nodes.entry(-1).or_default().push(id.clone()),
                Some(of) => of.iter().for_each(|node| nodes.entry(*node).or_default().push(id.clone())),
            }
        }
        nodes
    }
}

/// Whether the kubelet accepts this as a device plugin's resource name (`IsExtendedResourceName`).
pub fn is_extended_resource(name: &str) -> bool {
    let Some((domain, rest)) = name.split_once('/') else {
        return false;
    };
    let label = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| label(c) || matches!(c, '-' | '_' | '.');
    let plain = |text: &str, max: usize| {
        !text.is_empty() && text.len() <= max && text.chars().all(inner) && text.starts_with(label) && text.ends_with(label)
    };
    !domain.ends_with("kubernetes.io")
        && !name.starts_with("requests.")
        // `requests.<name>` must be a qualified name too: quotas are counted under it.
        && plain(domain, 253 - "requests.".len())
        && domain.chars().all(|c| !c.is_ascii_uppercase() && c != '_')
        && plain(rest, 63)
}

#[cfg(test)]
mod tests;
