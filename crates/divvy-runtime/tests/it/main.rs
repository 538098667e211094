//! Tests that call `divvy-runtime` as an engine calls it, with a stand-in for runc that prints its arguments, and with the real
//! runtimes.

mod artefact;
mod bed;
mod hook;
mod hostile;
mod legacy;
mod live;
mod peer;
mod podman;
mod real;
mod shim;
