//! Names of libraries, and what loaders search.

/// A list of musl's loader, which has no cache: its folders, in their order, where no file says others.
pub const MUSL_DEFAULT: &str = "/lib:/usr/local/lib:/usr/lib";

/// `libcuda` of `libcuda.so.1`
pub fn stem(name: &str) -> Option<&str> {
    let (stem, rest) = name.split_once(".so")?;
    let is_library = !stem.contains('/') && (rest.is_empty() || rest.starts_with('.'));
    (is_library && !rest.contains('/')).then_some(stem)
}

/// The list of musl's loader with these folders behind it, each once.
pub fn musl_list(there: Option<&str>, folders: &[&str]) -> String {
    let mut list = there.unwrap_or(MUSL_DEFAULT).to_owned();
    for folder in folders {
        if list.split([':', '\n']).all(|known| known != *folder) {
            list = format!("{}\n{folder}", list.trim_end());
        }
    }
    list
}
