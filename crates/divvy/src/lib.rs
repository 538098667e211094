//! The divvy program: grammar, wiring, printing
