//! Both formats, read by a parser of the tests' own.

mod formats;
mod negotiation;
mod reader;
mod written;
