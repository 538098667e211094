//! The programs as their users run them, on the embedded cluster.

mod audit;
mod bad_input;
mod bed;
mod chaos;
mod cli;
mod cluster;
mod demo;
mod invariants;
mod kubelet_cases;
mod outside;
mod races;
mod replicas;
mod scheduler_config;
