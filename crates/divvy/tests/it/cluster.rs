//! The setup of every test here.

use std::path::Path;
use std::time::Duration;

use divvy_testbed::embedded::{Embedded, Settings};
use divvy_testbed::programs::Programs;
use divvy_testbed::scenario::Play;
use divvy_testbed::story::{Listener, TimedEvent};

/// Return the built programs; `cargo xtask test` builds them before the tests.
pub(crate) fn programs() -> Programs {
    Programs::beside(Path::new(env!("CARGO_BIN_EXE_divvy")))
        .expect("`cargo xtask test`, or `cargo build --workspace` before `cargo test`")
}

/// Make a cluster of these machines, which have not joined yet.
pub(crate) async fn cluster(machines: &str) -> Embedded {
    Embedded::start(Settings::new(machines, programs()))
        .await
        .expect("the cluster comes up")
}

/// A listener that keeps a play's events, for the message of a failed test.
#[derive(Debug, Default)]
pub(crate) struct Quiet(pub(crate) Vec<String>);

impl Listener for Quiet {
    fn hear(&mut self, told: &TimedEvent) -> std::io::Result<()> {
        self.0.push(format!("{:>6} {:?}", told.ms, told.event));
        Ok(())
    }
}

/// Make a play on a cluster, for its helpers: create, started, eventually.
pub(crate) fn play<'a>(cluster: &'a mut Embedded, quiet: &'a mut Quiet) -> Play<'a, Embedded> {
    Play::new(cluster, quiet, Duration::ZERO)
}
