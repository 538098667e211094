//! The scheduler extender
