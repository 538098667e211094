//! Checks of the driver's files on the machine. The probe can see them because it loads the driver's library, and no other process on a node
//! needs that access.

use std::path::PathBuf;

use divvy_cdi::driver_spec::{self, Basis};
use divvy_host::Files;

use crate::nvidia;
use crate::protocol::{DriverFiles, DriverQuestion, DriverSpec};
use crate::{Failure, FailureCode};

/// Where the driver's files are.
#[derive(Debug)]
pub(super) struct DriverLocation {
    /// The path at which the machine's root is mounted.
    pub(super) sys_root: PathBuf,
    /// How to find the driver's library.
    pub(super) nvidia: nvidia::NvidiaOptions,
}

impl DriverLocation {
    pub(super) fn answer(&self, question: &DriverQuestion) -> DriverFiles {
        let tree = Files::below(&self.sys_root);
        // A driver container may be replaced at any time, so search for it on each request.
        let root = nvidia::driver_root(&self.nvidia);
        let below = root.strip_prefix(&self.sys_root).unwrap_or(&root);
        let named = PathBuf::from("/").join(below).display().to_string();
        let basis = Basis::read(&tree, &named, &question.version, &question.gpus);
        DriverFiles {
            basis,
            looked_at: root.display().to_string(),
            missing: driver_spec::missing(&tree, &question.paths),
        }
    }

    pub(super) fn spec(&self, basis: &Basis) -> Result<DriverSpec, Failure> {
        let made = basis.spec(&Files::below(&self.sys_root));
        let (spec, notes) = made.map_err(|error| Failure::new(FailureCode::DriverFiles, error.to_string()))?;
        Ok(DriverSpec { spec, notes })
    }
}
