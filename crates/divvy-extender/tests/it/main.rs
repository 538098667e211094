//! The extender from outside: interleavings of the core, and the server over HTTP with the embedded API server.

mod behind;
mod binds;
mod bounds;
mod departed;
mod doors;
mod doubt;
mod election;
mod evicts;
mod preempts;
mod protocol;
mod ranks;
mod replicas;
mod server;
mod settle;
mod tls;
mod unreadable;
mod values;
mod waiting;
mod web;
mod whole;
