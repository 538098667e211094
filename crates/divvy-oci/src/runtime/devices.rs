//! Which devices a container gets.

/// The change to a container's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// The configuration is not changed.
    LeaveAlone,
    /// The container gets these devices. Without any device it gets only the driver's files.
    Inject {
        /// CDI names in the order of injection.
        devices: Vec<String>,
        /// The CDI kind whose common edits (the driver's files) apply although no device is requested.
        driver_of: Option<String>,
    },
}
