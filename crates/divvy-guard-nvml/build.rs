//! Links the shadow library.

fn main() {
    divvy_shadow::link::shadow("libnvidia-ml.so.1", divvy_share::REAL_NVML);
}
