//! A pod whose requests may be unreadable.

use divvy_model::{Error, Pod};

use super::pod;
use crate::objects::PodObject;

/// A converted pod. If its requests cannot be read, it is kept without them, because it still holds what its annotations say.
#[derive(Debug, Clone)]
pub struct ReadPod {
    pod: Pod,
    trouble: Option<Error>,
}

impl ReadPod {
    /// Return the pod.
    pub fn pod(&self) -> &Pod {
        &self.pod
    }

    /// Drop the parts that are not needed to place other pods ([`divvy_model::kept`] and, if the pod is bound,
    /// [`divvy_model::PodRequest::forget_most_rules`]).
    pub fn as_kept(mut self) -> ReadPod {
        self.pod = divvy_model::kept(self.pod);
        if self.pod.node.is_some() {
            self.pod.request.forget_most_rules();
        }
        self
    }

    /// Return the pod, and the error if its requests could not be read.
    pub fn into_parts(self) -> (Pod, Option<Error>) {
        (self.pod, self.trouble)
    }
}

impl From<Pod> for ReadPod {
    fn from(pod: Pod) -> ReadPod {
        ReadPod { pod, trouble: None }
    }
}

impl From<PodObject> for ReadPod {
    fn from(mut object: PodObject) -> ReadPod {
        match pod(&object) {
            Ok(pod) => ReadPod { pod, trouble: None },
            Err(error) => {
                object.spec.overhead.clear();
                for container in object.spec.init_containers.iter_mut().chain(&mut object.spec.containers) {
                    container.resources = Default::default();
                }
                ReadPod {
                    pod: pod(&object).unwrap_or_default(),
                    trouble: Some(error),
                }
            }
        }
    }
}
