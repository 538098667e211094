//! Links the library.

fn main() {
    divvy_shadow::link::alone("libdivvy-guard-audit.so");
}
