//! `divvy-hook` called as a container runtime calls it, on normal and on hostile images.

mod hostile;
mod image;
mod peer;
mod work;
