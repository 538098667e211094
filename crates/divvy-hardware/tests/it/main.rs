//! The probe and its client with the real NVML code path over the simulated driver.

mod client;
mod hostile;
mod probe;
mod support;
