//! The driver's files on the machine. The probe sees all of them already, to load the driver's library; nobody else on a node needs to.

use std::path::PathBuf;

use divvy_cdi::driver::{self, Basis};
use divvy_host::Files;

use crate::nvidia;
use crate::protocol::{DriverFiles, DriverQuestion, DriverSpec};
use crate::{Code, Failure};

/// Where they are.
#[derive(Debug)]
pub(super) struct Driver {
    /// Where the machine's root is.
    pub(super) sys_root: PathBuf,
    /// How the driver's library is found.
    pub(super) nvidia: nvidia::Options,
}

impl Driver {
    pub(super) fn look(&self, question: &DriverQuestion) -> DriverFiles {
        let tree = Files::below(&self.sys_root);
        // A driver container comes and goes: each time anew.
        let root = nvidia::driver_root(&self.nvidia);
        let below = root.strip_prefix(&self.sys_root).unwrap_or(&root);
        let named = PathBuf::from("/").join(below).display().to_string();
        let basis = Basis::look(&tree, &named, &question.version, &question.gpus);
        DriverFiles {
            basis,
            looked_at: root.display().to_string(),
            missing: driver::missing(&tree, &question.paths),
        }
    }

    pub(super) fn spec(&self, basis: &Basis) -> Result<DriverSpec, Failure> {
        let made = basis.spec(&Files::below(&self.sys_root));
        let (spec, notes) = made.map_err(|text| Failure::new(Code::DriverFiles, text))?;
        Ok(DriverSpec { spec, notes })
    }
}
