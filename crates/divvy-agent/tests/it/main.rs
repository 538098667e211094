//! Tests of the agent's decisions as tables, as races (`docs/compatibility/races.md`), and with random input; and tests of the whole agent on
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
