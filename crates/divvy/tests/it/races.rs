//! The interleavings by which others hand out the wrong GPU, or one GPU's memory twice (research/reliability.md section 2.2),
//! each played with the real programs. [`Bed::end`](crate::bed::Bed::end) audits every one of them.

mod admission;
mod binding;
mod freeing;
mod identity;
