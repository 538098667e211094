//! The extended resources, as the kubelet's device plugin API sees them.

use std::borrow::Cow;
use std::sync::Arc;

use divvy_kubelet::plugin::{AllocateAnswer, CallRefusal, Plugin, PluginDevice, PluginOptions};
use tokio::sync::watch;

use crate::grants::Grants;
use crate::publishing::Publishing;
use divvy_agent_core::ResourceSpec;

/// The device plugin of one resource.
pub(crate) struct AgentPlugin {
    grants: Arc<Grants>,
    publishing: Arc<Publishing>,
    spec: ResourceSpec,
    name: Cow<'static, str>,
}

impl AgentPlugin {
    pub(crate) fn new(grants: Arc<Grants>, publishing: Arc<Publishing>, spec: ResourceSpec) -> AgentPlugin {
        AgentPlugin {
            grants,
            publishing,
            spec,
            name: spec.name(),
        }
    }
}

impl Plugin for AgentPlugin {
    fn resource_name(&self) -> &str {
        &self.name
    }

    fn options(&self) -> PluginOptions {
        PluginOptions {
            pre_start_required: self.spec.grants(),
            preferred_allocation: self.spec.grants(),
        }
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.publishing.devices(self.spec)
    }

    async fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        self.grants.preferred(self.spec, available, must_include, size).await
    }

    fn allocate(&self, ids: &[String]) -> Result<AllocateAnswer, CallRefusal> {
        Ok(AllocateAnswer {
            cdi_devices: self.grants.allocate(self.spec, ids)?,
            ..AllocateAnswer::default()
        })
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), CallRefusal> {
        if self.spec.grants() {
            self.grants.pre_start(self.spec, ids).await
        } else {
            Ok(())
        }
    }
}
