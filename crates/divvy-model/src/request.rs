use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::limits::ALLOCATION_SHARES;
use crate::{ContainerKind, ContainerRequest, Error, GpuRules, WholeContainer, WholeKind, names};

/// A pod's request. The containers are in the order in which the kubelet admits them: first the init containers in the order of
/// the spec, and then the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRequest {
    /// The containers. A container without a request makes no difference, so such containers are dropped when a pod is read from
    /// the API server.
    pub containers: Vec<ContainerRequest>,
    /// The whole GPUs or MIG devices that the pod requests. `None` if it requests none. A pod requests either whole devices of one
    /// kind or shared memory. For a pod that requests both, `rules` is an error.
    pub whole: Option<Box<WholeRequest>>,
    /// The rules in the pod's annotations. `None` means that the pod accepts any GPU. If the rules are an error, the pod fits on
    /// no node.
    pub rules: Option<Arc<Result<GpuRules, Error>>>,
}

/// A pod's request for whole GPUs or MIG devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WholeRequest {
    /// What the pod requests.
    pub kind: WholeKind,
    /// The containers that request GPUs, in the kubelet's order.
    pub containers: Vec<WholeContainer>,
}

impl WholeRequest {
    /// Return the pod's effective number of GPUs by Kubernetes' formula ([`PodRequest::effective`]). `None` on overflow.
    pub fn gpus(&self) -> Option<u64> {
        effective(self.containers.iter().map(|container| (container.kind, container.gpus)))
    }

    /// Return which of the pod's GPUs each container gets, as ranges of numbers from 0 to [`WholeRequest::gpus`].
    ///
    /// As in the kubelet, containers that run at the same time have different GPUs. A sidecar runs until the pod ends, so no later
    /// container uses its GPUs. An init container uses the GPUs that follow those of the earlier sidecars. When it has ended, later
    /// containers use the same GPUs again.
    pub fn gpus_of(&self) -> Vec<(&WholeContainer, Range<u64>)> {
        let sidecars = |of: &[WholeContainer]| {
            let sidecars = of.iter().filter(|container| container.kind == ContainerKind::Sidecar);
            sidecars.fold(0_u64, |sum, container| sum.saturating_add(container.gpus))
        };
        let mut next_of_app = sidecars(&self.containers);
        let ranges = self.containers.iter().enumerate().map(|(at, container)| {
            let start = match container.kind {
                ContainerKind::Init | ContainerKind::Sidecar => sidecars(&self.containers[..at]),
                ContainerKind::App => {
                    let start = next_of_app;
                    next_of_app = next_of_app.saturating_add(container.gpus);
                    start
                }
            };
            (container, start..start.saturating_add(container.gpus))
        });
        ranges.collect()
    }
}

impl PodRequest {
    /// Make a request from the containers in the kubelet's order, and from the rules in the pod's annotations.
    ///
    /// If the containers cannot meet the rules, or if the allocation would be too large to read, [`PodRequest::rules`] becomes an
    /// error.
    pub fn new(containers: Vec<ContainerRequest>, rules: Option<Result<GpuRules, Error>>) -> PodRequest {
        PodRequest::with_whole(containers, Vec::new(), rules)
    }

    /// Make a request as [`PodRequest::new`] does, for a pod that may also request whole GPUs.
    pub fn with_whole(
        containers: Vec<ContainerRequest>,
        whole: Vec<WholeRequest>,
        rules: Option<Result<GpuRules, Error>>,
    ) -> PodRequest {
        let rules = rules.map(|rules| rules.and_then(|rules| rules.can_spread(&containers).map(|()| rules)));
        let mixed = mixed(&containers, &whole);
        let mut request = PodRequest {
            rules: mixed.map(Err).or(rules).map(Arc::new),
            whole: whole.into_iter().next().map(Box::new),
            containers,
        };
        if let Err(error) = request.can_be_written() {
            request.rules = Some(Arc::new(Err(error)));
        }
        request
    }

    /// Check that the allocation for this request would be within the limits that agents enforce.
    fn can_be_written(&self) -> Result<(), Error> {
        let rules = self.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        if let Some(whole) = &self.whole {
            let asked = whole
                .containers
                .iter()
                .fold(0_u64, |sum, container| sum.saturating_add(container.gpus));
            if let Some(GpuRules { cores: Some(_), .. }) = rules {
                let text = "it limits a share of a GPU; a pod with a whole GPU has all of its compute time: remove the annotation, or request shared memory";
                return Err(Error::invalid(names::GPU_CORES, text.to_owned()));
            }
            if let Some(GpuRules { gpus: Some(_), .. }) = rules {
                let text = format!(
                    "it spreads shared memory; for whole GPUs, the number is the amount of {}",
                    whole.kind.resource()
                );
                return Err(Error::invalid(names::GPUS, text));
            }
            if let Some(vendor) = rules.and_then(|rules| rules.vendor)
                && vendor != whole.kind.vendor()
            {
                let (resource, other) = (whole.kind.resource(), whole.kind.vendor().name());
                let text = format!(
                    "\"{}\" was found, but the containers request {resource}: write \"{other}\", or leave the annotation out",
                    vendor.name()
                );
                return Err(Error::invalid(names::GPU_VENDOR, text));
            }
            if asked > ALLOCATION_SHARES as u64 {
                let text = format!(
                    "the containers request {asked} {} together; at most {ALLOCATION_SHARES} are possible: split the pod",
                    whole.kind.plural()
                );
                return Err(Error::invalid(whole.kind.resource(), text));
            }
            return Ok(());
        }
        let gpus = rules.map_or(1, GpuRules::spread_over);
        let containers = self.memory_containers().count();
        if (containers as u64).saturating_mul(gpus) <= ALLOCATION_SHARES as u64 {
            return Ok(());
        }
        Err(Error::invalid(
            names::ALLOCATION,
            format!(
                "it needs one share per GPU for each container that requests {}, and may have at most {ALLOCATION_SHARES} shares; {containers} \
                 containers on {gpus} GPUs need more: split the pod",
                names::GPU_MEM
            ),
        ))
    }

    /// Drop most rules of a pod that already has its GPUs. The pod no longer needs the rules, which may take up to [`crate::limits::RULE_BYTES`] per
    /// annotation. Keep the number of GPUs, from which placement policies learn what pods usually request, and the isolation and whether the pod tests its
    /// GPU, which the agent needs. The share of the compute time is in the allocation.
    pub fn forget_most_rules(&mut self) {
        self.keep_rules(|rules| GpuRules {
            gpus: rules.gpus,
            isolation: rules.isolation,
            test: rules.test.clone(),
            ..GpuRules::default()
        });
    }

    /// Drop all rules except those that matter when a container starts: the isolation, and whether the pod tests its GPU.
    pub fn keep_rules_of_start(&mut self) {
        self.keep_rules(|rules| GpuRules {
            isolation: rules.isolation,
            test: rules.test.clone(),
            ..GpuRules::default()
        });
    }

    fn keep_rules(&mut self, keep: impl FnOnce(&GpuRules) -> GpuRules) {
        let rules = self.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        let kept = rules.map(keep).filter(|kept| *kept != GpuRules::default());
        self.rules = kept.map(|kept| Arc::new(Ok(kept)));
    }

    /// Report whether any container requests shared GPU memory.
    pub fn wants_memory(&self) -> bool {
        self.containers.iter().any(|container| container.units > 0)
    }

    /// Report whether any container requests a resource that Divvy allocates: shared GPU memory or whole GPUs.
    pub fn wants_gpus(&self) -> bool {
        self.wants_memory() || self.whole.is_some()
    }

    /// Return the containers that request shared GPU memory, in the kubelet's order.
    pub fn memory_containers(&self) -> impl Iterator<Item = &ContainerRequest> {
        self.containers.iter().filter(|container| container.units > 0)
    }

    /// Return the pod's effective request for `aliyun.com/gpu-mem`, in units, by Kubernetes' formula ([`PodRequest::effective`]).
    /// `None` on overflow.
    pub fn effective_units(&self) -> Option<u64> {
        self.effective(|container| container.units)
    }

    /// Compute a pod's effective request for one resource by Kubernetes' formula (`PodRequests` in component-helpers
    /// `resource/helpers.go`, KEP-753). `None` on overflow.
    ///
    /// A sidecar runs from its place in the order until the pod ends. Therefore an init container runs alongside the sidecars
    /// *before* it, and the app containers run alongside all sidecars:
    /// `max(Σ app + Σ sidecars, max over init i (request i + Σ sidecars before i))`.
    pub fn effective(&self, request: impl Fn(&ContainerRequest) -> u64) -> Option<u64> {
        effective(self.containers.iter().map(|container| (container.kind, request(container))))
    }
}

fn effective(requests: impl Iterator<Item = (ContainerKind, u64)>) -> Option<u64> {
    let mut sidecars: u64 = 0;
    let mut init_peak: u64 = 0;
    let mut apps: u64 = 0;
    for (kind, amount) in requests {
        match kind {
            ContainerKind::Init => init_peak = init_peak.max(sidecars.checked_add(amount)?),
            ContainerKind::Sidecar => {
                sidecars = sidecars.checked_add(amount)?;
                init_peak = init_peak.max(sidecars);
            }
            ContainerKind::App => apps = apps.checked_add(amount)?,
        }
    }
    Some(init_peak.max(apps.checked_add(sidecars)?))
}

/// Return an error if a pod requests more than one kind of GPU, because no node can provide several kinds in one allocation.
fn mixed(containers: &[ContainerRequest], whole: &[WholeRequest]) -> Option<Error> {
    let memory = containers.iter().any(|container| container.units > 0);
    let resources = whole.iter().map(|whole| whole.kind.resource());
    let asked: Vec<Cow<'static, str>> = memory
        .then_some(Cow::Borrowed(names::GPU_MEM))
        .into_iter()
        .chain(resources)
        .collect();
    let [first, .., last] = asked.as_slice() else { return None };
    let text = format!(
        "the pod also requests {last}; a pod gets either shared memory or whole GPUs of one kind: remove one of the two, or split the pod"
    );
    Some(Error::invalid(first.clone(), text))
}

#[cfg(test)]
mod tests {
    use super::ContainerKind::{App, Init, Sidecar};
    use super::*;
    use crate::{Isolation, Vendor};

    fn check(containers: &[(ContainerKind, u64)], expected: Option<u64>) {
        let containers = containers
            .iter()
            .enumerate()
            .map(|(i, (kind, units))| ContainerRequest {
                name: format!("c{i}"),
                kind: *kind,
                units: *units,
                gpu_count: 0,
            })
            .collect();
        let request = PodRequest {
            containers,
            ..PodRequest::default()
        };
        assert_eq!(request.effective_units(), expected, "{request:?}");
    }

    #[test]
    fn the_effective_request_is_that_of_kubernetes() {
        check(&[], Some(0));
        check(&[(App, 3), (App, 5)], Some(8));
        check(&[(Init, 4), (App, 1)], Some(4));
        check(&[(Init, 1), (App, 4)], Some(4));
        check(&[(Init, 4), (Init, 6), (App, 5)], Some(6));
        check(&[(Sidecar, 2), (App, 3)], Some(5));
        // The order matters: an init container runs alongside the sidecars that started before it.
        check(&[(Sidecar, 2), (Init, 4), (App, 1)], Some(6));
        check(&[(Init, 4), (Sidecar, 2), (App, 1)], Some(4));
        check(&[(Init, 2), (Sidecar, 1), (App, 3), (App, 1)], Some(5));
    }

    #[test]
    fn whole_gpus_are_used_again_after_init_containers_only() {
        let check = |containers: &[(ContainerKind, u64)], expected: &[(u64, u64)]| {
            let containers = containers.iter().map(|(kind, gpus)| WholeContainer {
                name: String::new(),
                kind: *kind,
                gpus: *gpus,
            });
            let request = WholeRequest {
                kind: WholeKind::Gpu(Vendor::Amd),
                containers: containers.collect(),
            };
            let found: Vec<(u64, u64)> = request
                .gpus_of()
                .into_iter()
                .map(|(_, range)| (range.start, range.end))
                .collect();
            assert_eq!(found, expected);
            let all = found.iter().map(|(_, end)| *end).max();
            assert_eq!(request.gpus(), all, "{request:?}");
        };
        check(&[(App, 2)], &[(0, 2)]);
        check(&[(App, 1), (App, 3)], &[(0, 1), (1, 4)]);
        check(&[(Init, 4), (App, 1)], &[(0, 4), (0, 1)]);
        check(
            &[(Sidecar, 2), (Init, 4), (App, 1), (App, 1)],
            &[(0, 2), (2, 6), (2, 3), (3, 4)],
        );
        check(
            &[(Init, 1), (Sidecar, 2), (Sidecar, 1), (App, 1)],
            &[(0, 1), (0, 2), (2, 3), (3, 4)],
        );
    }

    #[test]
    fn what_cannot_be_spread_evenly_is_refused_with_what_could() {
        let error = |gpus: u32, units: &[u64]| {
            let container = |(i, units): (usize, &u64)| ContainerRequest {
                name: format!("c{i}"),
                kind: App,
                units: *units,
                gpu_count: 0,
            };
            let rules = GpuRules {
                gpus: Some(gpus),
                ..GpuRules::default()
            };
            let request = PodRequest::new(units.iter().enumerate().map(container).collect(), Some(Ok(rules)));
            match request.rules.as_deref() {
                Some(Err(error)) => error.to_string(),
                _ => String::new(),
            }
        };
        assert_eq!(error(2, &[4, 0, 2]), "");
        assert_eq!(error(1, &[3]), "");
        assert_eq!(
            error(2, &[4, 3]),
            "divvy.dev/gpus: \"2\" was found, but the 3 units of aliyun.com/gpu-mem that container c1 requests cannot be spread evenly over 2 GPUs; \
             request 2 or 4"
        );
        assert!(error(4, &[3]).ends_with("request 4"), "{}", error(4, &[3]));
    }

    #[test]
    fn pods_with_unreadable_allocations_fit_no_node() {
        let error = |containers: usize, gpus: Option<u32>| {
            let container = |i: usize| ContainerRequest {
                name: format!("c{i}"),
                kind: App,
                units: 16,
                gpu_count: 0,
            };
            let rules = gpus.map(|gpus| {
                Ok(GpuRules {
                    gpus: Some(gpus),
                    ..GpuRules::default()
                })
            });
            let request = PodRequest::new((0..containers).map(container).collect(), rules);
            match request.rules.as_deref() {
                Some(Err(error)) => error.to_string(),
                _ => String::new(),
            }
        };
        assert_eq!((error(256, None), error(16, Some(16))), (String::new(), String::new()));
        assert_eq!(
            error(17, Some(16)),
            "divvy.dev/allocation: it needs one share per GPU for each container that requests aliyun.com/gpu-mem, and may have at most 256 \
             shares; 17 containers on 16 GPUs need more: split the pod"
        );
        assert!(error(257, None).contains("257 containers on 1 GPUs"), "{}", error(257, None));
    }

    #[test]
    fn bound_pods_keep_gpu_count_and_isolation_rules() {
        let rules = GpuRules {
            gpus: Some(2),
            uuids: vec!["GPU-1".to_owned()],
            ..GpuRules::default()
        };
        let kept = |rules: Option<Result<GpuRules, Error>>| {
            let mut request = PodRequest::new(Vec::new(), rules);
            request.forget_most_rules();
            request.rules.map(|rules| (*rules).clone())
        };
        let two = GpuRules {
            gpus: Some(2),
            ..GpuRules::default()
        };
        assert_eq!(kept(Some(Ok(rules.clone()))), Some(Ok(two)));
        let hard = GpuRules {
            isolation: Some(Isolation::Hard),
            ..GpuRules::default()
        };
        assert_eq!(kept(Some(Ok(hard.clone()))), Some(Ok(hard)));
        assert_eq!(kept(Some(Ok(GpuRules { gpus: None, ..rules }))), None);
        assert_eq!(kept(Some(Err(Error::invalid("x", "y")))), None);
        assert_eq!(kept(None), None);
    }

    /// A pod cannot get both, and all its whole GPUs are from one vendor.
    #[test]
    fn a_pod_gets_whole_gpus_or_shared_memory() {
        let whole = |vendor: Vendor, counts: &[(ContainerKind, u64)]| WholeRequest {
            kind: WholeKind::Gpu(vendor),
            containers: counts
                .iter()
                .enumerate()
                .map(|(i, (kind, gpus))| WholeContainer {
                    name: format!("c{i}"),
                    kind: *kind,
                    gpus: *gpus,
                })
                .collect(),
        };
        let memory = vec![ContainerRequest {
            name: "m".to_owned(),
            kind: App,
            units: 1,
            gpu_count: 0,
        }];
        let two = GpuRules {
            gpus: Some(2),
            ..GpuRules::default()
        };
        let of = |vendor: Vendor| GpuRules {
            vendor: Some(vendor),
            ..GpuRules::default()
        };
        let amd = || whole(Vendor::Amd, &[(Init, 3), (App, 1), (App, 1)]);
        assert_eq!(amd().gpus(), Some(3));
        for (containers, whole, rules, error) in [
            (Vec::new(), vec![amd()], None, ""),
            (Vec::new(), vec![amd()], Some(Ok(GpuRules::default())), ""),
            (Vec::new(), vec![amd()], Some(Ok(of(Vendor::Amd))), ""),
            (memory.clone(), Vec::new(), Some(Ok(of(Vendor::Amd))), ""),
            (
                Vec::new(),
                vec![amd()],
                Some(Ok(of(Vendor::Nvidia))),
                "divvy.dev/gpu-vendor: \"nvidia\" was found, but the containers request amd.com/gpu: write \"amd\", or leave the annotation out",
            ),
            (
                memory.clone(),
                vec![amd()],
                None,
                "aliyun.com/gpu-mem: the pod also requests amd.com/gpu; a pod gets either shared memory or whole GPUs of one kind: remove one of the two, or split the pod",
            ),
            (
                Vec::new(),
                vec![whole(Vendor::Nvidia, &[(App, 1)]), amd()],
                None,
                "nvidia.com/gpu: the pod also requests amd.com/gpu; a pod gets either shared memory or whole GPUs of one kind: remove one of the two, or split the pod",
            ),
            (
                Vec::new(),
                vec![amd()],
                Some(Ok(two)),
                "divvy.dev/gpus: it spreads shared memory; for whole GPUs, the number is the amount of amd.com/gpu",
            ),
            (
                Vec::new(),
                vec![whole(Vendor::Amd, &[(App, 257)])],
                None,
                "amd.com/gpu: the containers request 257 AMD GPUs together; at most 256 are possible: split the pod",
            ),
        ] {
            let request = PodRequest::with_whole(containers, whole, rules);
            assert!(request.wants_gpus());
            let found = match request.rules.as_deref() {
                Some(Err(error)) => error.to_string(),
                _ => String::new(),
            };
            assert_eq!(found, error);
        }
    }

    #[test]
    fn an_overflowing_request_has_no_size() {
        check(&[(App, u64::MAX), (App, 1)], None);
        check(&[(Sidecar, u64::MAX), (Init, 1), (App, 0)], None);
    }
}
