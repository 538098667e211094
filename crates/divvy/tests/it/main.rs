//! The programs as their users run them, on the embedded cluster.

mod cli;
mod cluster;
mod demo;
