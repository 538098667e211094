//! The layout of the two files, and the protocol of reservations.

#![allow(clippy::unwrap_used, reason = "tests")]

mod compute;
mod every_order;
mod killed;
mod layout;
mod refused;
