//! Links the shadow library.

fn main() {
    divvy_shadow::link::shadow("libnvidia-ml.so.1", "/run/divvy/guard/libnvidia-ml.so.real");
}
