//! `divvy simulate`: which runs there are ([`study`]), what they print ([`text`]) and draw ([`plots`]); what would change in a cluster ([`cluster`]).

pub mod cluster;
pub mod dump;
pub mod plots;
pub mod study;
pub mod text;
