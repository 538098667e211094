//! A pod whose requests may be unreadable.

use divvy_model::{Error, Pod};

use super::pod;
use crate::objects::PodObject;

/// A pod as it is kept. One whose requests cannot be read still holds what its annotations say: it is taken in without them.
#[derive(Debug, Clone)]
pub struct ReadPod {
    pod: Pod,
    trouble: Option<Error>,
}

impl ReadPod {
    /// The pod.
    pub fn pod(&self) -> &Pod {
        &self.pod
    }

    /// As it is kept where only pods that are not bound yet are placed ([`divvy_model::kept`],
    /// [`divvy_model::PodRequest::forget_rules_but_count`]).
    pub fn as_kept(mut self) -> ReadPod {
        self.pod = divvy_model::kept(self.pod);
        if self.pod.node.is_some() {
            self.pod.request.forget_rules_but_count();
        }
        self
    }

    /// The pod, and what could not be read of what it asks for.
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
