//! Tests of the probe and its client. They use the real NVML code path with the simulated driver.

mod client;
mod gauges;
mod hostile;
mod libraries;
mod probe;
mod share_files;
mod support;
mod vendors;
