//! Links the shadow library.

fn main() {
    divvy_shadow::link::shadow("libcuda.so.1", "/run/divvy/guard/libcuda.so.real");
}
