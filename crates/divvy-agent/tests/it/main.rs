//! The agent's decisions, as tables, as the races of research/reliability.md section 2.2, and at random; and the whole agent on
//! an emulated node.

mod amounts;
mod bounds;
mod calls;
mod devices;
mod driver;
mod lists;
mod node;
mod races;
mod random;
mod reconcile;
mod several;
mod shell;
