//! GPU drivers behind a small trait; the probe and its protocol
