//! Path patterns as in Go's `filepath.Glob`: `*` and `?` match within one path component.

use super::TextFiles;

/// Report whether a path matches a pattern.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<&str>, Vec<&str>) = (pattern.split('/').collect(), path.split('/').collect());
    pattern.len() == path.len() && pattern.iter().zip(&path).all(|(pattern, part)| part_matches(pattern, part))
}

fn part_matches(pattern: &str, part: &str) -> bool {
    let (pattern, part): (Vec<char>, Vec<char>) = (pattern.chars().collect(), part.chars().collect());
    // On a mismatch, go back to the last star and let it match one more character. Earlier stars never have to change.
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < part.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == part[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    p = at + 1;
                    t = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Report whether a text has pattern characters.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Return the paths that match a pattern, sorted. A path without pattern characters is returned even if it does not exist.
pub(super) fn expand(files: &dyn TextFiles, pattern: &str) -> Vec<String> {
    if !is_pattern(pattern) {
        return vec![pattern.to_owned()];
    }
    let mut found = vec![String::new()];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        found = found
            .iter()
            .flat_map(|directory| {
                let names = if is_pattern(part) {
                    let mut names = files.names(if directory.is_empty() { "/" } else { directory });
                    names.retain(|name| part_matches(part, name));
                    names
                } else {
                    vec![part.to_owned()]
                };
                names.into_iter().map(move |name| format!("{directory}/{name}"))
            })
            .collect();
    }
    found
}

/// Return the directory of a path; `/` if there is none.
pub(super) fn directory(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some(("", _)) | None => "/",
        Some((directory, _)) => directory,
    }
}
