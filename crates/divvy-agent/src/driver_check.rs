//! Keeps the CDI specs from which grants take the driver's libraries in agreement with the driver: asks the probe, and tells operators.

use std::sync::Arc;

use divvy_cdi::driver_spec::NvmlGpu;
use tracing::{info, warn};

use crate::driver_spec::{self, CheckedSpec, DriverSpecKeeper, News};
use crate::probe_access::{ProbeAccess, answered};
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::store::Store;

/// Keeps the CDI spec of the driver in agreement with the driver, and reports changes as events.
pub(crate) struct DriverCheck {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) probe: Arc<ProbeAccess>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) store: Arc<Store>,
    pub(crate) spec: DriverSpecKeeper,
}

impl DriverCheck {
    /// Set the GPUs and MIG devices that the driver reports: the driver's spec names the MIG devices instead of a GPU in MIG mode. Report whether they
    /// changed.
    pub(crate) fn set_places(&self, places: Vec<NvmlGpu>) -> bool {
        self.spec.set_places(places)
    }

    /// Check the specs from which grants take the driver's libraries. This runs before the grants are reconciled, so that their
    /// specs use the new libraries in the same pass. It does not hold the lock of the grants, because the probe may answer
    /// slowly.
    pub(crate) async fn check(self: &Arc<Self>) {
        let Some(checked) = self.checked().await else { return };
        self.reports.metrics.driver_spec(checked.trouble.is_some());
        self.core.lock().set_driver_trouble(checked.trouble);
        for news in checked.news {
            match news {
                News::Trouble(trouble) => {
                    warn!("{}", trouble.text);
                    self.reports.post_on_node(true, trouble.reason(), trouble.text);
                }
                News::Made(text) => {
                    info!("{text}");
                    self.reports.post_on_node(false, "DriverSpecMade", text);
                }
                News::Removed(text) => info!("{text}"),
                News::Over => info!("the CDI specs of the GPUs match the loaded driver again"),
            }
        }
    }

    /// Return the state of the driver's specs, or `None` if it is unknown at the moment.
    async fn checked(self: &Arc<Self>) -> Option<CheckedSpec> {
        let probe = self.probe.get()?;
        let question = self
            .blocking(|this| {
                let driver = this.core.lock().driver(driver_spec::VENDOR).to_owned();
                this.spec.question(&this.store, &driver)
            })
            .await??;
        let answer = answered(probe.driver(question.asked.clone())).await;
        let checked = self
            .blocking(move |this| this.spec.check(&this.store, question, answer))
            .await?;
        let wanted = match checked {
            Ok(checked) => return checked,
            Err(wanted) => wanted,
        };
        let made = answered(probe.driver_spec(wanted.basis.clone())).await;
        self.blocking(move |this| this.spec.made(&this.store, *wanted, made)).await?
    }

    /// Run work that blocks on files.
    async fn blocking<T: Send + 'static>(self: &Arc<Self>, work: impl FnOnce(&DriverCheck) -> T + Send + 'static) -> Option<T> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&this)).await;
        done.inspect_err(|error| warn!(%error, "work on files failed")).ok()
    }
}
