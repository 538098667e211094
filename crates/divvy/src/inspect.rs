//! What `kubectl inspect gpushare` shows: who has how much of which GPU.
//!
//! [`view`] turns nodes and pods into a value, [`table`] prints it as the old tool did, to the byte
//! (research/gpushare.md section 4, but for what is marked there as a bug: rows are sorted, a GPU of
//! 140 GiB is not called MiB, a node's GPUs have their own sizes).

pub mod sort;
pub mod table;
pub mod view;
