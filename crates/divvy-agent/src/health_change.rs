//! What to tell an operator when a GPU fails or recovers.

use divvy_hardware::health::HealthVerdict;
use divvy_model::Health;
use divvy_model::out_of_service::OutOfService;
use tracing::{info, warn};

const OFFERED_NO_MORE: &str =
    "Divvy no longer offers this GPU, and nothing starts on it until it recovers; pods that already run there are not touched";

/// A change of a GPU's health, as an event on the node tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HealthChange {
    /// Whether the event's type is `Warning` instead of `Normal`.
    pub(crate) warning: bool,
    /// The event's reason.
    pub(crate) reason: &'static str,
    pub(crate) text: String,
}

impl HealthChange {
    /// Return the change of the GPU with this index, model, and UUID to this verdict. The index of a MIG device is `GPU:INDEX`.
    pub(crate) fn new(index: &str, model: &str, uuid: &str, verdict: &HealthVerdict) -> HealthChange {
        let name = format!("GPU {index} ({model}, {uuid})");
        let why = verdict.reason.as_deref().unwrap_or("the reason is unknown");
        let (warning, reason, text) = match verdict.health {
            Health::Ok => (false, "GpuRecovered", format!("{name} has recovered and is offered again")),
            Health::Failed | Health::Testing => (true, "GpuFailed", format!("{name} failed: {why}. {OFFERED_NO_MORE}")),
            Health::Lost => (true, "GpuLost", format!("{name} is lost: {why}. {OFFERED_NO_MORE}")),
        };
        HealthChange { warning, reason, text }
    }

    /// Return the change of a GPU that was taken out of service for this reason, or is in service again.
    pub(crate) fn service(index: &str, model: &str, uuid: &str, out_of_service: Option<&OutOfService>) -> HealthChange {
        let name = format!("GPU {index} ({model}, {uuid})");
        match out_of_service {
            Some(out) => HealthChange {
                warning: true,
                reason: "GpuOutOfService",
                text: format!(
                    "{name} was taken out of service: {}. Divvy does not offer it until the annotation {} is removed from this node, as divvy smoke --report \
                     does when the GPU passes; pods that already run there are not touched",
                    out.reason,
                    out.key()
                ),
            },
            None => HealthChange {
                warning: false,
                reason: "GpuInService",
                text: format!("{name} is in service again. Divvy offers it unless the driver reports a fault"),
            },
        }
    }

    /// Return the change when the driver has not answered for too long.
    pub(crate) fn silence() -> HealthChange {
        HealthChange {
            warning: true,
            reason: "DriverSilent",
            text: "the GPUs' driver does not answer, so Divvy offers no GPU of this node until it does; pods that already run there are not touched"
                .to_owned(),
        }
    }

    /// Return the change when the driver answers again.
    pub(crate) fn answer() -> HealthChange {
        HealthChange {
            warning: false,
            reason: "DriverAnswers",
            text: "the GPUs' driver answers again, so Divvy offers those of this node that work".to_owned(),
        }
    }

    pub(crate) fn log(&self) {
        if self.warning {
            warn!("{}", self.text)
        } else {
            info!("{}", self.text)
        }
    }
}
