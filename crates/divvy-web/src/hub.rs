//! The scene that is shown now.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use divvy_page::Scene;

/// What all pages and streams are made of.
#[derive(Debug, Default)]
pub struct Hub {
    scene: Mutex<Scene>,
}

impl Hub {
    /// Make a hub that shows an empty cluster.
    pub fn new() -> Hub {
        Hub::default()
    }

    /// Show this scene from now on.
    pub fn show(&self, scene: Scene) {
        *self.scene.lock().unwrap_or_else(PoisonError::into_inner) = scene;
    }

    /// Return the nodes on pages that were rendered in the last minute, or that a stream follows: the nodes whose agents should be asked.
    pub fn wanted(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}
