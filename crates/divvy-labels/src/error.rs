/// Why a machine cannot be described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The driver's version does not have two or three parts.
    #[error("error getting driver version: {0:?} does not have the form MAJOR.MINOR[.REVISION]")]
    DriverVersion(String),
    /// MPS cannot share MIG devices.
    #[error("sharing using MPS is not supported for MIG devices")]
    MpsWithMig,
}
