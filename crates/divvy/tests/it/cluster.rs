//! The setup that all tests of this target share.

use std::path::Path;
use std::time::Duration;

use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::programs::Programs;
use divvy_testbed::scenario::Play;
use divvy_testbed::story::{StoryListener, TimedEvent};

/// Return the paths of the built programs. `cargo xtask test` builds them before the tests.
pub(crate) fn programs() -> Programs {
    Programs::beside(Path::new(env!("CARGO_BIN_EXE_divvy")))
        .expect("`cargo xtask test`, or `cargo build --workspace` before `cargo test`")
}

/// Make a cluster with these machines, which have not joined it yet.
pub(crate) async fn cluster(machines: &str) -> Embedded {
    Embedded::start(EmbeddedSettings::new(machines, programs()))
        .await
        .expect("the cluster comes up")
}

/// A listener that prints nothing, but keeps a play's events for the message of a failed test.
#[derive(Debug, Default)]
pub(crate) struct Quiet(pub(crate) Vec<String>);

impl StoryListener for Quiet {
    fn hear(&mut self, told: &TimedEvent) -> std::io::Result<()> {
        self.0.push(format!("{:>6} {:?}", told.ms, told.event));
        Ok(())
    }
}

/// Make a play on a cluster, to use its helpers such as `create`, `started`, and `eventually`.
pub(crate) fn play<'a>(cluster: &'a mut Embedded, quiet: &'a mut Quiet) -> Play<'a, Embedded> {
    Play::new(cluster, quiet, Duration::ZERO)
}
