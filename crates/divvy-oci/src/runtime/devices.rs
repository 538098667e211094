//! The change to a container's configuration.

/// The change to a container's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicePlan {
    /// The configuration is not changed.
    LeaveAlone,
    /// The container gets these devices. If there are none, it gets only the driver's files.
    Inject {
        /// The CDI names of the devices, in the order of injection.
        devices: Vec<String>,
        /// The CDI kind whose common edits (the driver's files) apply although no device is requested.
        driver_of: Option<String>,
    },
}
