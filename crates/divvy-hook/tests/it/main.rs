//! `divvy-hook` as a container runtime calls it, on images that are as they should be and on others.

mod hostile;
mod image;
mod peer;
mod work;
