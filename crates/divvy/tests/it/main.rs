//! Tests of the programs as their users run them, on the embedded cluster.

mod asks;
mod audit;
mod bad_input;
mod bed;
mod cdi;
mod cdi_peer;
mod chaos;
mod cli;
mod cluster;
mod completions;
mod configure;
mod connection;
mod ctk_system;
mod demo;
mod doctor;
mod hostile;
mod invariants;
mod kubelet_cases;
mod outside;
mod races;
mod replicas;
mod scheduler_config;
mod simulate;
mod suggestions;
mod uninstall;
mod unreadable;
