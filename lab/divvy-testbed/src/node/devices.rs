//! The kubelet's device manager as a value: which plugin offers which devices, which container holds which ids, and which ids a container
//! gets next. It has no clock and no I/O: times, random numbers, and plugins' responses are arguments.
//!
//! It follows `pkg/kubelet/cm/devicemanager/manager.go` of Kubernetes 1.36 with topology policy `none`. There is no NUMA alignment, so
//! GetPreferredAllocation is always called unless the ids of the pod's init containers cover the request.

use std::collections::{BTreeMap, BTreeSet};

use divvy_kubelet::api::v1beta1::{ContainerAllocateResponse, Device, DevicePluginOptions};
use divvy_testkit::dice::Dice;

/// The device manager bugs of Kubernetes 1.36 to imitate (see `docs/compatibility/kubelet.md`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bugs {
    /// B1, kubernetes#137534: if a pod has just ended, a podresources `List` during Allocate or GetPreferredAllocation makes the kubelet forget
    /// the ids that it is handing out, so the next pod gets the same ids.
    pub double_hand_out: bool,
    /// B2, kubernetes#121994: when an old plugin's stream ends, the *new* plugin of the same resource is disconnected. Messages of the old
    /// stream also still replace the device list.
    pub old_stream_disconnects_new: bool,
    /// B3, kubernetes#124345: after a kubelet restart, a running pod is killed because its ended init container "needs" devices and the
    /// plugin has not registered yet.
    pub ended_init_container_kills: bool,
}

impl Bugs {
    /// Return the bugs of an unpatched kubelet 1.36.
    pub fn as_in_kubernetes_1_36() -> Bugs {
        Bugs {
            double_hand_out: true,
            old_stream_disconnects_new: true,
            ended_init_container_kills: true,
        }
    }
}

/// The reason why a container gets no devices, with the kubelet's texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No plugin of this resource has registered since the kubelet's start.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// The plugin is gone, or all its devices failed.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    /// The devices of a container that is created again have failed.
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    HeldUnhealthy(String),
    /// There are not enough free ids.
    #[error("requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}")]
    Unavailable {
        /// The resource's name.
        resource: String,
        /// The number of ids still needed, without those reused from init containers.
        requested: usize,
        /// The number of free healthy ids.
        available: usize,
    },
    /// Fewer ids could be taken than were counted.
    #[error("unexpectedly allocated less resources than required. Requested: {requested}, Got: {got}")]
    Short {
        /// The number of ids requested.
        requested: usize,
        /// The number of ids taken.
        got: usize,
    },
    /// The container's request differs from the one for which its ids were recorded.
    #[error("pod {pod:?} container {container:?} changed request for resource {resource:?} from {from} to {to}")]
    Changed {
        /// The pod's UID.
        pod: String,
        /// The container's name.
        container: String,
        /// The resource's name.
        resource: String,
        /// The number of ids recorded.
        from: usize,
        /// The number of ids requested now.
        to: usize,
    },
    /// The resource was removed between the choice of ids and the call.
    #[error("unknown Device Plugin {0}")]
    UnknownPlugin(String),
    /// The response to Allocate has an empty list.
    #[error("no containers return in allocation response")]
    EmptyResponse,
    /// GetPreferredAllocation failed.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(String),
    /// PreStartContainer failed.
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(String),
    /// The plugin wants PreStartContainer, but the kubelet has no record because its checkpoint was lost.
    #[error("no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}")]
    NoRecord {
        /// The pod's UID.
        pod: String,
        /// The container's name.
        container: String,
        /// The resource's name.
        resource: String,
    },
    /// The call goes to an endpoint whose stream has ended.
    #[error("endpoint {0} has been stopped")]
    Stopped(String),
    /// The resource is known, but its endpoint is not.
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
    /// Allocate failed. The text is the gRPC error as Go prints it.
    #[error("{0}")]
    Allocate(String),
}

/// A container's claim on one resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceHolder {
    /// The pod's UID.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The resource's name.
    pub resource: String,
}

/// The devices of one resource that a container holds.
#[derive(Debug, Clone, PartialEq)]
pub struct HeldDevices {
    /// The device ids.
    pub ids: BTreeSet<String>,
    /// The plugin's response to Allocate, which is replayed at every start of the container.
    pub response: ContainerAllocateResponse,
}

#[derive(Debug, Clone, Default)]
struct PluginEndpoint {
    options: Option<DevicePluginOptions>,
    /// The time at which the stream ended, in milliseconds of the node's clock; `None` while the stream is open.
    stopped_ms: Option<u64>,
}

/// A container's request for one resource during its allocation.
#[derive(Debug, Clone)]
pub struct ResourceRequest {
    /// The container that gets the ids.
    pub holder: DeviceHolder,
    /// The number of ids requested in total.
    pub wanted: usize,
    /// The ids taken so far, which are also the `must_include` list of GetPreferredAllocation.
    pub taken: BTreeSet<String>,
    available: BTreeSet<String>,
}

/// The next step of an allocation.
#[derive(Debug)]
pub enum AllocationStep {
    /// Nothing to do: the container already has its ids of this resource, or it is already running.
    Nothing,
    /// Call GetPreferredAllocation, then [`DeviceBooks::preferred`].
    Ask {
        /// The request so far.
        request: ResourceRequest,
        /// The value of `available_deviceIDs`, in random order.
        available: Vec<String>,
    },
    /// Call Allocate with `request.taken`, then [`DeviceBooks::record`] or [`DeviceBooks::give_up`].
    Allocate(ResourceRequest),
}

/// The device manager's records of devices and their holders.
#[derive(Debug, Default)]
pub struct DeviceBooks {
    healthy: BTreeMap<String, BTreeSet<String>>,
    unhealthy: BTreeMap<String, BTreeSet<String>>,
    numa: BTreeMap<(String, String), Vec<i64>>,
    endpoints: BTreeMap<String, PluginEndpoint>,
    /// The ids that the kubelet considers taken. They differ from `held` while a call is in progress, and because of its bugs.
    allocated: BTreeMap<String, BTreeSet<String>>,
    held: BTreeMap<DeviceHolder, HeldDevices>,
    /// The ids of the current pod's ordinary init containers, by resource. Only one pod at a time has such ids.
    reuse: (String, BTreeMap<String, BTreeSet<String>>),
    in_flight: Option<(String, BTreeSet<String>)>,
    /// The bugs to imitate.
    pub bugs: Bugs,
}

impl DeviceBooks {
    /// Create the books of a new kubelet that has read its checkpoint. Holders are known. Resources are known without devices, with a
    /// stopped endpoint whose options are unknown.
    pub fn restore(
        bugs: Bugs,
        now_ms: u64,
        held: BTreeMap<DeviceHolder, HeldDevices>,
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
            let endpoint = PluginEndpoint {
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

    /// Note that a plugin has registered and has answered GetDevicePluginOptions.
    pub fn connected(&mut self, resource: &str, options: DevicePluginOptions) {
        let endpoint = PluginEndpoint {
            options: Some(options),
            stopped_ms: None,
        };
        self.endpoints.insert(resource.to_owned(), endpoint);
    }

    /// Note that a plugin's stream ended. Every id of the resource is unhealthy at once; the capacity stays for the grace period.
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

    /// Apply a message of ListAndWatch, which always contains the complete list.
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

    /// Return capacity and allocatable of every resource. Resources whose plugin has been gone longer than `grace_ms` are forgotten and
    /// returned in the second part; the kubelet sets them to 0 in the node's status.
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

    /// Report whether the device manager manages this resource. It ignores other resources in a pod's limits.
    pub fn knows(&self, resource: &str) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// Forget pods that are no longer active (`UpdateAllocatedDevices`). Report whether any pod was forgotten.
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

    /// Begin the allocation of one resource for one container. `kubelet_starting` is true until the first list of pods has been handled
    /// (`sourcesReady`). `running` says whether the container is already running.
    pub fn begin(
        &mut self,
        holder: DeviceHolder,
        wanted: usize,
        kubelet_starting: bool,
        running: bool,
        seed: &mut Dice,
    ) -> Result<AllocationStep, DeviceError> {
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
            return Ok(AllocationStep::Nothing);
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
            return Ok(AllocationStep::Nothing);
        }
        if wanted == 0 {
            return Ok(AllocationStep::Nothing);
        }
        let mut request = ResourceRequest {
            holder,
            wanted,
            taken: BTreeSet::new(),
            available: BTreeSet::new(),
        };
        let reusable = self.reuse.1.get(&resource).cloned().unwrap_or_default();
        if self.take(&mut request, &reusable, seed) {
            return Ok(AllocationStep::Allocate(request));
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
            return self.fill(request, seed).map(AllocationStep::Allocate);
        }
        let mut available: Vec<String> = request.available.union(&request.taken).cloned().collect();
        seed.shuffle(&mut available);
        self.in_flight = Some((resource, request.taken.clone()));
        Ok(AllocationStep::Ask { request, available })
    }

    /// Apply the response of GetPreferredAllocation: keep its available ids, choose among them at random if there are too many, and add
    /// random ids if there are too few.
    pub fn preferred(
        &mut self,
        mut request: ResourceRequest,
        answer: &[String],
        seed: &mut Dice,
    ) -> Result<ResourceRequest, DeviceError> {
        let wished = answer.iter().filter(|id| request.available.contains(*id)).cloned().collect();
        if self.take(&mut request, &wished, seed) {
            return Ok(request);
        }
        self.fill(request, seed)
    }

    fn fill(&mut self, mut request: ResourceRequest, seed: &mut Dice) -> Result<ResourceRequest, DeviceError> {
        let available = request.available.clone();
        if self.take(&mut request, &available, seed) {
            return Ok(request);
        }
        Err(DeviceError::Short {
            requested: request.wanted,
            got: request.taken.len(),
        })
    }

    /// Take ids until the request is covered, and report whether it is. The ids count as allocated at once, as in the kubelet.
    fn take(&mut self, request: &mut ResourceRequest, from: &BTreeSet<String>, seed: &mut Dice) -> bool {
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

    /// Return the ids of a request in random order, as Allocate and PreStartContainer receive them.
    pub fn in_random_order(ids: &BTreeSet<String>, seed: &mut Dice) -> Vec<String> {
        let mut ids: Vec<String> = ids.iter().cloned().collect();
        seed.shuffle(&mut ids);
        ids
    }

    /// Record the response of Allocate. With B1, `allocated` is not corrected here; that is the bug.
    pub fn record(&mut self, request: ResourceRequest, response: ContainerAllocateResponse) {
        self.in_flight = None;
        let held = HeldDevices {
            ids: request.taken,
            response,
        };
        self.held.insert(request.holder, held);
    }

    /// Note that the call failed: the ids that were taken are free again.
    pub fn give_up(&mut self) {
        self.in_flight = None;
        self.allocated = self.counted_from_held();
    }

    /// Settle a container's devices. An ordinary init container leaves its ids to the containers that follow. Any other container
    /// keeps its ids, including those that init containers left to it.
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

    /// Return the devices of a resource that a container holds.
    pub fn held(&self, pod: &str, container: &str, resource: &str) -> Option<&HeldDevices> {
        self.held.get(&DeviceHolder {
            pod: pod.to_owned(),
            container: container.to_owned(),
            resource: resource.to_owned(),
        })
    }

    /// Return all holders with their devices.
    pub fn holders(&self) -> &BTreeMap<DeviceHolder, HeldDevices> {
        &self.held
    }

    /// Count the ids of each resource that pods hold, each id once. At admission, the kubelet uses this number as the node's
    /// allocatable if the node has fewer healthy ids.
    pub fn allocated_counts(&self) -> BTreeMap<String, usize> {
        self.allocated
            .iter()
            .map(|(resource, ids)| (resource.clone(), ids.len()))
            .collect()
    }

    /// Return the healthy ids of each resource.
    pub fn healthy(&self) -> &BTreeMap<String, BTreeSet<String>> {
        &self.healthy
    }

    /// Return the ids for which PreStartContainer must be called. `Ok(None)` means that the plugin does not want the call, or that the
    /// kubelet has not received the plugin's options since its own restart, in which case it silently omits the call.
    pub fn pre_start(&self, holder: &DeviceHolder) -> Result<Option<&BTreeSet<String>>, DeviceError> {
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

    /// Report whether the resource's plugin has an open stream.
    pub fn is_running(&self, resource: &str) -> bool {
        self.endpoints
            .get(resource)
            .is_some_and(|endpoint| endpoint.stopped_ms.is_none())
    }

    /// Group ids by NUMA node, with `-1` for ids without one (the checkpoint's form).
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

/// Report whether the kubelet accepts this name as a device plugin's resource (`IsExtendedResourceName`).
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
        // `requests.<name>` must be a qualified name as well, because quotas are counted under that name.
        && plain(domain, 253 - "requests.".len())
        && domain.chars().all(|c| !c.is_ascii_uppercase() && c != '_')
        && plain(rest, 63)
}
