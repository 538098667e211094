//! `divvy-runtime` as an engine calls it: in front of a program that says what it was given, and in front of the real runtimes.

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
