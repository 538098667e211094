//! The index of pods and nodes.
