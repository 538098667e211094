//! Names of libraries, and the directories that musl's loader searches.

/// The directories that musl's loader searches by default, in order. This loader has no cache, but a file can replace the list.
pub const MUSL_DEFAULT: &str = "/lib:/usr/local/lib:/usr/lib";

/// Return the name of a shared library without `.so` and the version: `libcuda` for `libcuda.so.1`. The result is `None` for
/// other names.
pub fn stem(name: &str) -> Option<&str> {
    let (stem, rest) = name.split_once(".so")?;
    let is_library = !stem.contains('/') && (rest.is_empty() || rest.starts_with('.'));
    (is_library && !rest.contains('/')).then_some(stem)
}

/// Append directories to the list of musl's loader, without duplicates. If there is no list, start with [`MUSL_DEFAULT`].
pub fn musl_list(there: Option<&str>, directories: &[&str]) -> String {
    let mut list = there.unwrap_or(MUSL_DEFAULT).to_owned();
    for directory in directories {
        if list.split([':', '\n']).all(|known| known != *directory) {
            list = format!("{}\n{directory}", list.trim_end());
        }
    }
    list
}
