//! Tests that call `divvy-hook` as a container runtime calls it, on normal and on hostile images.

mod guarded;
mod hostile;
mod image;
mod peer;
mod work;
