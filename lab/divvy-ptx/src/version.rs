//! Which driver compiles which PTX for which GPU.

/// A version of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PtxVersion {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
}

impl std::fmt::Display for PtxVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The newest PTX that a driver of each CUDA version knows (PTX ISA, "Release Notes"), with CUDA's encoding: 12040 for 12.4.
/// Those of 13.3 and 13.4 follow from their neighbors.
const NEWEST: [(i32, u32, u32); 32] = [
    (13050, 9, 5),
    (13040, 9, 4),
    (13030, 9, 3),
    (13020, 9, 2),
    (13010, 9, 1),
    (13000, 9, 0),
    (12090, 8, 8),
    (12080, 8, 7),
    // 12.6 has 8.5, as 12.5.
    (12070, 8, 6),
    (12050, 8, 5),
    (12040, 8, 4),
    (12030, 8, 3),
    (12020, 8, 2),
    (12010, 8, 1),
    (12000, 8, 0),
    (11080, 7, 8),
    (11070, 7, 7),
    (11060, 7, 6),
    (11050, 7, 5),
    (11040, 7, 4),
    (11030, 7, 3),
    (11020, 7, 2),
    (11010, 7, 1),
    (11000, 7, 0),
    (10020, 6, 5),
    (10010, 6, 4),
    (10000, 6, 3),
    (9020, 6, 2),
    (9010, 6, 1),
    (9000, 6, 0),
    (8000, 5, 0),
    (7050, 4, 3),
];

/// Why a driver does not compile a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ModuleRefusal {
    /// CUDA_ERROR_UNSUPPORTED_PTX_VERSION.
    #[error("the module has PTX {module}, and the driver knows versions up to {driver}; update the driver")]
    Version {
        /// The version of the module.
        module: PtxVersion,
        /// The newest version that the driver knows.
        driver: PtxVersion,
    },
    /// CUDA_ERROR_NO_BINARY_FOR_GPU.
    #[error("the module is for compute capabilities from {module} on, and the GPU has {gpu}")]
    Target {
        /// The target of the module.
        module: u32,
        /// The compute capability of the GPU.
        gpu: u32,
    },
}

impl ModuleRefusal {
    /// Return the `CUresult`.
    pub fn code(self) -> i32 {
        match self {
            ModuleRefusal::Version { .. } => 222,
            ModuleRefusal::Target { .. } => 209,
        }
    }
}

impl PtxVersion {
    /// Return the newest version that a driver of this CUDA version knows.
    pub fn newest(cuda: i32) -> PtxVersion {
        let found = NEWEST.iter().find(|(since, ..)| cuda >= *since);
        let (major, minor) = found.map_or((4, 2), |(_, major, minor)| (*major, *minor));
        PtxVersion { major, minor }
    }
}

impl crate::Module {
    /// Check that a driver of this CUDA version compiles the module for a GPU of this compute capability, such as 86.
    pub fn check(&self, cuda: i32, gpu: u32) -> Result<(), ModuleRefusal> {
        let driver = PtxVersion::newest(cuda);
        if self.version > driver {
            return Err(ModuleRefusal::Version {
                module: self.version,
                driver,
            });
        }
        if self.target > gpu {
            Err(ModuleRefusal::Target {
                module: self.target,
                gpu,
            })
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_compiles_each_version_up_to_its_own() {
        let cases = [
            (7000, "4.2"),
            (9000, "6.0"),
            (10000, "6.3"),
            (11000, "7.0"),
            (12060, "8.5"),
            (12090, "8.8"),
            (13020, "9.2"),
            (14000, "9.5"),
        ];
        for (cuda, newest) in cases {
            assert_eq!(PtxVersion::newest(cuda).to_string(), newest, "{cuda}");
        }
        let module = |version: &str, target: u32| {
            let text = format!(".version {version} .target sm_{target} .address_size 64");
            crate::Module::parse(&text, |_| false).expect("a module")
        };
        let cases = [
            ("7.0", 80, 11000, 80, None),
            ("7.0", 80, 10020, 80, Some(222)),
            ("7.0", 80, 11000, 75, Some(209)),
            ("6.0", 30, 13040, 121, None),
            ("6.0", 30, 9000, 35, None),
        ];
        for (version, target, cuda, gpu, code) in cases {
            let refused = module(version, target).check(cuda, gpu).err();
            assert_eq!(refused.map(ModuleRefusal::code), code, "{version} {target} {cuda} {gpu}");
        }
    }
}
