use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::limits::ALLOCATION_SHARES;
use crate::{Error, GpuRules, names};

/// The phase of a pod in which a container runs, which decides how its request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerKind {
    /// An init container that ends before the next container starts.
    Init,
    /// An init container with `restartPolicy: Always`: it keeps running alongside the later containers (KEP-753).
    Sidecar,
    /// A container of `spec.containers`.
    App,
}

/// The request of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// The phase in which the container runs.
    pub kind: ContainerKind,
    /// `aliyun.com/gpu-mem`, in units.
    pub units: u64,
    /// `aliyun.com/gpu-count`. It has no effect on what the container gets.
    pub gpu_count: u64,
}

/// A pod's request. The containers are in the order in which the kubelet admits them: init containers in spec order first,
/// then the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRequest {
    /// The containers. A container without a request makes no difference; pods from the API server are read without such containers.
    pub containers: Vec<ContainerRequest>,
    /// The rules in the pod's annotations; `None` means that any GPU is accepted. With an error, the pod fits on no node.
    pub rules: Option<Arc<Result<GpuRules, Error>>>,
}

impl PodRequest {
    /// Make a request from the containers in the kubelet's order and the rules in the pod's annotations.
    ///
    /// Rules that the containers cannot meet, and a request whose allocation would be too large to read, become an error in
    /// [`PodRequest::rules`].
    pub fn new(containers: Vec<ContainerRequest>, rules: Option<Result<GpuRules, Error>>) -> PodRequest {
        let rules = rules.map(|rules| rules.and_then(|rules| rules.can_spread(&containers).map(|()| rules)));
        let mut request = PodRequest {
            rules: rules.map(Arc::new),
            containers,
        };
        if let Err(error) = request.can_be_written() {
            request.rules = Some(Arc::new(Err(error)));
        }
        request
    }

    /// Check that the allocation of this request would be within the limits that agents enforce.
    fn can_be_written(&self) -> Result<(), Error> {
        let rules = self.rules.as_deref().and_then(|rules| rules.as_ref().ok());
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

    /// Drop the rules of a pod that has its GPUs, except the number of GPUs: placement policies learn from it what pods request. The
    /// other rules are no longer needed and may take up to [`crate::limits::RULE_BYTES`] of text per annotation.
    pub fn forget_rules_but_count(&mut self) {
        let rules = self.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        let gpus = rules.and_then(|rules| rules.gpus);
        self.rules = gpus.map(|gpus| {
            Arc::new(Ok(GpuRules {
                gpus: Some(gpus),
                ..GpuRules::default()
            }))
        });
    }

    /// Report whether any container requests shared GPU memory.
    pub fn wants_memory(&self) -> bool {
        self.containers.iter().any(|container| container.units > 0)
    }

    /// Return the containers that request shared GPU memory, in the kubelet's order.
    pub fn memory_containers(&self) -> impl Iterator<Item = &ContainerRequest> {
        self.containers.iter().filter(|container| container.units > 0)
    }

    /// Return the pod's effective request for gpu-mem in units, by Kubernetes' formula ([`PodRequest::effective`]); `None` on overflow.
    pub fn effective_units(&self) -> Option<u64> {
        self.effective(|container| container.units)
    }

    /// Compute a pod's effective request for one resource by Kubernetes' formula (`PodRequests` in component-helpers
    /// `resource/helpers.go`, KEP-753); `None` on overflow.
    ///
    /// A sidecar runs from its place in the order until the pod ends. So an init container runs alongside the sidecars *before*
    /// it, and the app containers run alongside all sidecars:
    /// `max(Σ app + Σ sidecars, max over init i (request i + Σ sidecars before i))`.
    pub fn effective(&self, request: impl Fn(&ContainerRequest) -> u64) -> Option<u64> {
        let mut sidecars: u64 = 0;
        let mut init_peak: u64 = 0;
        let mut apps: u64 = 0;
        for container in &self.containers {
            let units = request(container);
            match container.kind {
                ContainerKind::Init => init_peak = init_peak.max(sidecars.checked_add(units)?),
                ContainerKind::Sidecar => {
                    sidecars = sidecars.checked_add(units)?;
                    init_peak = init_peak.max(sidecars);
                }
                ContainerKind::App => apps = apps.checked_add(units)?,
            }
        }
        Some(init_peak.max(apps.checked_add(sidecars)?))
    }
}

#[cfg(test)]
mod tests {
    use super::ContainerKind::{App, Init, Sidecar};
    use super::*;

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
    fn a_pod_whose_allocation_could_not_be_read_has_rules_that_no_node_meets() {
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
    fn of_a_bound_pods_rules_only_the_number_of_gpus_stays() {
        let rules = GpuRules {
            gpus: Some(2),
            uuids: vec!["GPU-1".to_owned()],
            ..GpuRules::default()
        };
        let kept = |rules: Option<Result<GpuRules, Error>>| {
            let mut request = PodRequest::new(Vec::new(), rules);
            request.forget_rules_but_count();
            request.rules.map(|rules| (*rules).clone())
        };
        let two = GpuRules {
            gpus: Some(2),
            ..GpuRules::default()
        };
        assert_eq!(kept(Some(Ok(rules.clone()))), Some(Ok(two)));
        assert_eq!(kept(Some(Ok(GpuRules { gpus: None, ..rules }))), None);
        assert_eq!(kept(Some(Err(Error::invalid("x", "y")))), None);
        assert_eq!(kept(None), None);
    }

    #[test]
    fn an_overflowing_request_has_no_size() {
        check(&[(App, u64::MAX), (App, 1)], None);
        check(&[(Sidecar, u64::MAX), (Init, 1), (App, 0)], None);
    }
}
