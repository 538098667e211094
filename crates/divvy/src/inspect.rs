//! The output of `kubectl inspect gpushare`: how much memory of each GPU each pod uses.
//!
//! [`divvy_view`] turns nodes and pods into a value. [`table`] prints the value exactly as gpushare's tool does
//! (`docs/compatibility/gpushare.md`), without its bugs: rows are sorted, a GPU of 140 GiB is not shown in MiB, and the GPUs of a node may
//! have different sizes.

pub mod sort;
pub mod table;
