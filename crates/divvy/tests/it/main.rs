//! The programs as their users run them, on the embedded cluster.

mod bed;
mod cli;
mod cluster;
mod demo;
mod kubelet_cases;
mod races;
