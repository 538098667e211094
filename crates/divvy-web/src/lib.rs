//! The web pages of [`divvy_page`] over HTTP, for `divvy web` and for the extender.
//!
//! - [`PageHub`]: the scene that is shown now, and what changed since when
//! - [`Gate`]: who may see it
//! - [`Hosts`]: under which names
//! - [`Impatient`]: a connection that ends when its client reads nothing
//!
//! The server around the router limits connections and times. It must allow for streams: a limit on the time of a whole answer ends them, and the script connects
//! again.

#![forbid(unsafe_code)]

mod answer;
mod events;
mod gate;
mod hosts;
mod hub;
mod impatient;
mod routes;
mod serve;
mod session;
mod version;

pub use gate::{Gate, LocalToken, TokenRefusal};
pub use hosts::Hosts;
pub use hub::PageHub;
pub use impatient::Impatient;
pub use routes::router;
pub use serve::{PATIENCE, limits, serve};
