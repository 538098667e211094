//! How symbols are defined.

/// The address of a symbol.
pub(super) type SymbolAddress = *const ();

/// Define symbols: a name, or names in brackets of symbols that do the same, the parameters, and what is done. `call` is for those that need cuInit,
/// `bare` for the others. The module gets a function `all` that returns the names and addresses.
macro_rules! symbols {
    ($($gate:ident $names:tt $parameters:tt $body:expr;)*) => {
        $(symbols!(@each $gate $names $parameters $body);)*

        /// Return the symbols of this module.
        pub(super) fn all() -> Vec<(&'static str, $crate::abi::symbols::SymbolAddress)> {
            [$(symbols!(@list $names)),*].concat()
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
    (@list [$($name:ident),+]) => {
        vec![$((stringify!($name), $name as $crate::abi::symbols::SymbolAddress)),+]
    };
    (@list $name:ident) => {
        symbols!(@list [$name])
    };
}
pub(super) use symbols;
