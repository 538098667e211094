//! The web pages about the GPUs of a cluster, as pure functions: a [`ClusterScene`] in, HTML out. `divvy web` and the extender serve the same pages
//! (`divvy-web`).
//!
//! - [`ClusterScene`]: what is known of the cluster, and [`UsageHistory`]: what was measured in the last hour
//! - [`PageAddress`]: the path and the query of a page
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

pub use address::{ConditionFilter, Filter, NoAddress, PageAddress};
pub use frame::{MessagePage, SCRIPT, STYLE, message};
pub use history::{Point, UsageHistory};
pub use parts::{PageParts, PartKey, listing, page, part};
pub use scene::{ClusterScene, MeasuredUsage};
