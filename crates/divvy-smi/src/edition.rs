//! The editions of the table. NVIDIA changed it with some of the driver's branches.

/// An edition, named after the first branch of the driver that has it. Branches before 450 printed another table, without MIG; they get the first
/// edition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Edition {
    /// 79 columns.
    R450,
    /// 89 columns.
    R530,
    /// Longer spaces in the first column.
    R535,
    /// 91 columns.
    R550,
    /// Other heads for MIG devices. No table with MIG devices from the branch 555 was found.
    R560,
    /// Longer PIDs.
    R570,
    /// Another line above the heads, and no spaces in empty lines.
    R580,
    /// The versions of the driver's two parts: of its kernel modules (KMD), and of CUDA (UMD).
    R610,
}

impl Edition {
    /// Return the edition of a driver's version. A version that is not a number gets the latest.
    pub(crate) fn of(driver: &str) -> Edition {
        match branch(driver) {
            Some(..530) => Edition::R450,
            Some(530..535) => Edition::R530,
            Some(535..550) => Edition::R535,
            Some(550..560) => Edition::R550,
            Some(560..570) => Edition::R560,
            Some(570..580) => Edition::R570,
            Some(580..610) => Edition::R580,
            Some(610..) | None => Edition::R610,
        }
    }

    /// Return the number of columns between the first and the last bar.
    pub(crate) fn inner(self) -> usize {
        match self {
            Edition::R450 => 77,
            Edition::R530 | Edition::R535 => 87,
            _ => 89,
        }
    }

    /// Return the widths of the cells of GPUs.
    pub(crate) fn gpu_cells(self) -> [usize; 3] {
        match self {
            Edition::R450 => [31, 22, 22],
            Edition::R530 | Edition::R535 => [41, 22, 22],
            _ => [41, 24, 22],
        }
    }

    /// Return the widths of the cells of MIG devices.
    pub(crate) fn mig_cells(self) -> [usize; 4] {
        match self {
            Edition::R450 => [18, 22, 11, 23],
            Edition::R530 | Edition::R535 => [18, 32, 11, 23],
            _ => [18, 34, 11, 23],
        }
    }

    /// Return the line above the processes.
    pub(crate) fn gap(self) -> String {
        let spaces = match self {
            Edition::R450 => 79,
            Edition::R580 | Edition::R610 => 0,
            // The branches with 91 columns kept the 89 spaces.
            _ => 89,
        };
        format!("{:spaces$}\n", "")
    }
}

/// Return the branch of a driver's version.
pub(crate) fn branch(driver: &str) -> Option<u32> {
    driver.split('.').next()?.parse().ok()
}
