//! The version of what a client has: `RUN-NUMBER`.

use std::fmt::{self, Display};
use std::str::FromStr;

/// A version of a hub's scene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SceneVersion {
    /// The run of the program.
    pub(crate) run: u64,
    /// The number of the scene in this run.
    pub(crate) number: u64,
}

impl Display for SceneVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.run, self.number)
    }
}

impl FromStr for SceneVersion {
    type Err = ();

    fn from_str(text: &str) -> Result<SceneVersion, ()> {
        let (run, number) = text.split_once('-').ok_or(())?;
        if run.len() != 16 {
            return Err(());
        }
        Ok(SceneVersion {
            run: u64::from_str_radix(run, 16).map_err(|_| ())?,
            number: number.parse().map_err(|_| ())?,
        })
    }
}
