//! The extender from outside: the core as interleavings, the server over HTTP against the embedded API server.

mod behind;
mod binds;
mod bounds;
mod departed;
mod doors;
mod doubt;
mod election;
mod preempts;
mod protocol;
mod ranks;
mod replicas;
mod server;
mod settle;
mod tls;
mod unreadable;
mod values;
mod world;
