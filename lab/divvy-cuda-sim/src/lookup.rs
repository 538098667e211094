//! Which symbol a program gets when it asks for a function by name.

use crate::names::TABLE;

/// What a search for a function found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FoundSymbol {
    /// The function is this symbol.
    Symbol(&'static str),
    /// The driver has no such function.
    Unknown,
    /// The driver has the function, but a program of this CUDA version does not know it.
    TooNew,
}

/// Find the function that a program of this CUDA version means.
pub(crate) fn find(function: &str, program: i32, driver: i32, per_thread: bool) -> FoundSymbol {
    let all = || TABLE.iter().filter(|(name, since, ..)| *name == function && *since <= driver);
    let newest = |thread: bool| {
        all()
            .filter(|(_, since, _, own)| *since <= program && *own == thread)
            .max_by_key(|(_, since, ..)| *since)
    };
    let twin = per_thread.then(|| newest(true)).flatten();
    match twin.or_else(|| newest(false)) {
        Some((_, _, symbol, _)) => FoundSymbol::Symbol(symbol),
        None if all().next().is_some() => FoundSymbol::TooNew,
        None => FoundSymbol::Unknown,
    }
}
