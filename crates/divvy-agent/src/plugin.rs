//! The two extended resources, as the kubelet's device plugin API sees them.

use std::sync::Arc;

use divvy_kubelet::plugin::{Answer, Device, Options, Plugin, Refusal};
use tokio::sync::watch;

use crate::agent::Agent;
use divvy_agent_core::Resource;

/// The device plugin of one resource.
#[derive(Debug)]
pub(crate) struct AgentPlugin {
    pub(crate) agent: Arc<Agent>,
    pub(crate) resource: Resource,
    pub(crate) name: String,
}

impl Plugin for AgentPlugin {
    fn resource_name(&self) -> &str {
        &self.name
    }

    fn options(&self) -> Options {
        let memory = self.resource == Resource::Memory;
        Options {
            pre_start_required: memory,
            preferred_allocation: memory,
        }
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<Device>>> {
        match self.resource {
            Resource::Memory => self.agent.memory.subscribe(),
            Resource::Count => self.agent.count.subscribe(),
        }
    }

    fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        self.agent.core().preferred(available, must_include, size)
    }

    fn allocate(&self, ids: &[String]) -> Result<Answer, Refusal> {
        let cdi_devices = self.agent.core().allocate(self.resource, ids).map_err(Refusal::invalid)?;
        if self.resource == Resource::Memory {
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
        match self.resource {
            Resource::Memory => self.agent.pre_start(ids).await,
            Resource::Count => Ok(()),
        }
    }
}
