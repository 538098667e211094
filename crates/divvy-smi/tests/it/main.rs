//! Tests of the table.

mod any;
mod published;
