//! Links the shadow library.

fn main() {
    divvy_shadow::link::shadow("libcuda.so.1", divvy_share::REAL_CUDA);
}
