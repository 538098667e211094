//! A libnvidia-ml.so for tests, driven by a machine description
