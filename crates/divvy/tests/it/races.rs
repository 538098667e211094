//! The races with which other systems grant the wrong GPU, or allocate a GPU's memory twice (docs/compatibility/races.md),
//! each played with the real programs. [`Bed::end`](crate::bed::Bed::end) audits every test.

mod admission;
mod binding;
mod freeing;
mod identity;
