//! Tests of the steps, of the supervision, and of the program.

mod fake;
mod guard;
mod health;
mod kernels;
mod lies;
mod mig;
mod program;
mod rig;
mod supervision;
mod texts;
mod visible;
