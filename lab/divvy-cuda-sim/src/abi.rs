//! CUDA's symbols. Each call passes the gate of [`crate::driver`], and no panic leaves a symbol.

mod array;
mod context;
mod copy;
mod device;
mod entry;
mod graph;
mod memory;
mod pointer;
mod pool;
mod share;
mod vmm;
mod work;

/// The address of a symbol.
pub(crate) type Address = *const ();

/// Define symbols: a name, or names in brackets of symbols that do the same, the parameters, and what is done. `call` is for those that need cuInit,
/// `bare` for the others. The module gets a function `all` that returns the names and addresses.
macro_rules! symbols {
    ($($gate:ident $names:tt $parameters:tt $body:expr;)*) => {
        $(symbols!(@each $gate $names $parameters $body);)*

        /// Return the symbols of this module.
        pub(super) fn all() -> Vec<(&'static str, $crate::abi::Address)> {
            let mut all = Vec::new();
            $(symbols!(@list all $names);)*
            all
        }
    };
    (@each $gate:ident [$($name:ident),+] $parameters:tt $body:expr) => {
        $(symbols!(@each $gate $name $parameters $body);)+
    };
    (@each $gate:ident $name:ident ($($parameter:ident: $type:ty),* $(,)?) $body:expr) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name($($parameter: $type),*) -> std::ffi::c_int {
            $crate::driver::$gate(stringify!($name), $body)
        }
    };
    (@list $all:ident [$($name:ident),+]) => {
        $(symbols!(@list $all $name);)+
    };
    (@list $all:ident $name:ident) => {
        $all.push((stringify!($name), $name as $crate::abi::Address));
    };
}
use symbols;

/// Return all symbols, with their addresses.
pub(crate) fn all() -> Vec<(&'static str, Address)> {
    [
        entry::all(),
        device::all(),
        context::all(),
        memory::all(),
        copy::all(),
        vmm::all(),
        pool::all(),
        array::all(),
        graph::all(),
        work::all(),
        share::all(),
    ]
    .concat()
}
