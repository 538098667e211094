//! What the pages show, and that no text of a user becomes markup.

mod addresses;
mod document;
mod history;
mod hostile;
mod pages;
mod scenes;
