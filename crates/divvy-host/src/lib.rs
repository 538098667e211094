//! What a machine looks like to code that reads its files.
//!
//! - [`Tree`]: a machine's files; tests build one as a value, [`Files`] reads a real one (feature `files`, the only part of this crate that does I/O)
//! - [`Root`]: a directory of a tree, below which every path and every symbolic link is resolved
//! - [`plain`], [`plain_line`]: text from outside, made safe to print on a terminal

#![forbid(unsafe_code)]

#[cfg(feature = "files")]
mod files;
mod printable;
mod tree;

#[cfg(feature = "files")]
pub use files::Files;
pub use printable::{plain, plain_line};
pub use tree::{FileKind, PathMetadata, Root, Tree};
