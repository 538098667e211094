//! The races that make other systems grant the wrong GPU, or allocate a GPU's memory twice (docs/compatibility/races.md). Each is
//! played with the real programs, and [`Bed::end`](crate::bed::Bed::end) audits every test.

mod admission;
mod binding;
mod freeing;
mod identity;
