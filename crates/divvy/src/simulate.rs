//! `divvy simulate`: the runs of a study ([`study`]), their text output ([`text`]), and the answers to what-if questions about
//! a cluster ([`cluster`]).

pub mod cluster;
pub mod dump;
pub mod study;
pub mod text;
