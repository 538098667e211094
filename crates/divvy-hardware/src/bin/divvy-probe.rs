//! The program `divvy-probe`; see [`divvy_hardware::probe`].

fn main() {
    let status = divvy_hardware::probe::main(std::env::args_os().skip(1));
    // Do not use exit(3): it runs the destructors of a driver's library, which may hang.
    signal_hook::low_level::exit(status);
}
