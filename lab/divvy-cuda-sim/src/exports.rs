//! Which symbols the library has for `dlsym`: those of the driver's version.

use divvy_gpu_sim::exports;

use crate::machine;
use crate::names::TABLE;
use crate::trace::{complain, is_left_out};

/// Report whether a symbol is one that a driver of a version does not have yet.
fn is_newer(symbol: &str, version: i32) -> bool {
    let mut since = TABLE.iter().filter(|row| row.2 == symbol).map(|row| row.1).peekable();
    since.peek().is_some() && since.all(|since| since > version)
}

/// Remove the symbols that the described driver lacks.
extern "C" fn at_load() {
    // cuInit says what is wrong with the description.
    let Ok(version) = machine::version() else { return };
    let removed = exports::remove(at_load as *const (), |symbol| {
        is_newer(symbol, version) || is_left_out(symbol)
    });
    if let Err(error) = removed {
        complain(&format!("the symbols that a driver lacks could not be removed: {error}"));
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;
