//! The web pages about the GPUs of a cluster, as pure functions: a [`Scene`] in, HTML out. `divvy web` and the extender serve the same pages
//! (`divvy-web`).
//!
//! - [`Scene`]: what is known of the cluster, and [`History`]: what was measured in the last hour
//! - [`Address`]: the path and the query of a page
//! - [`page`]: a page, and [`part`]: a part of it, by which an event replaces an older one
//! - [`message`]: a page that only says something
//!
//! All amounts come from [`divvy_view::amounts`]. All text goes through maud, which escapes it; no HTML is made by `format!`.

#![forbid(unsafe_code)]

mod address;
mod bar;
mod card;
mod chart;
mod cluster;
mod frame;
mod history;
mod node;
mod parts;
mod pod;
mod scene;
mod select;
mod table;
mod text;
mod waiting;

pub use address::{Address, Condition, Filter, NoAddress};
pub use frame::{Message, SCRIPT, STYLE, message};
pub use history::{History, Point};
pub use parts::{Key, Listing, listing, page, part};
pub use scene::{Measured, Scene};
