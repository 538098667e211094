//! `divvy simulate`: which runs there are ([`study`]), what they print ([`text`]) and draw ([`plots`]).

pub mod plots;
pub mod study;
pub mod text;
