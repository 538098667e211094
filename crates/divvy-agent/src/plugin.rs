//! The extended resources, as the kubelet's device plugin API sees them.

use std::borrow::Cow;
use std::sync::Arc;

use divvy_kubelet::plugin::{Answer, Device, Options, Plugin, Refusal};
use tokio::sync::watch;

use crate::agent::Agent;
use divvy_agent_core::ResourceSpec;

/// The device plugin of one resource.
#[derive(Debug)]
pub(crate) struct AgentPlugin {
    pub(crate) agent: Arc<Agent>,
    pub(crate) spec: ResourceSpec,
    name: Cow<'static, str>,
}

impl AgentPlugin {
    pub(crate) fn new(agent: Arc<Agent>, spec: ResourceSpec) -> AgentPlugin {
        AgentPlugin {
            agent,
            spec,
            name: spec.name(),
        }
    }
}

impl Plugin for AgentPlugin {
    fn resource_name(&self) -> &str {
        &self.name
    }

    fn options(&self) -> Options {
        Options {
            pre_start_required: self.spec.grants(),
            preferred_allocation: self.spec.grants(),
        }
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<Device>>> {
        self.agent.devices(self.spec)
    }

    async fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        if self.spec.grants() && !self.agent.core().is_expected(self.spec, must_include, size) {
            self.agent.look_for_pods().await;
        }
        self.agent.core().preferred(self.spec, available, must_include, size)
    }

    fn allocate(&self, ids: &[String]) -> Result<Answer, Refusal> {
        let cdi_devices = self.agent.core().allocate(self.spec, ids).map_err(Refusal::invalid)?;
        if self.spec.grants() {
            // The handed-out ids decide which ids stay healthy.
            self.agent.publish();
            self.agent.look.notify_one();
        }
        Ok(Answer {
            cdi_devices,
            ..Answer::default()
        })
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), Refusal> {
        if self.spec.grants() {
            self.agent.pre_start(self.spec, ids).await
        } else {
            Ok(())
        }
    }
}
