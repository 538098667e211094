//! Patterns of paths, as Go's `filepath.Glob` has them: `*` and `?` within one component.

use super::Files;

/// Whether a path matches a pattern.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<&str>, Vec<&str>) = (pattern.split('/').collect(), path.split('/').collect());
    pattern.len() == path.len() && pattern.iter().zip(&path).all(|(pattern, part)| part_matches(pattern, part))
}

fn part_matches(pattern: &str, part: &str) -> bool {
    let (pattern, part): (Vec<char>, Vec<char>) = (pattern.chars().collect(), part.chars().collect());
    // As in every matcher with one kind of star: on a mismatch the last star takes one more.
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

/// Whether it is a pattern at all.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// The files that a pattern names, sorted. A path without a star is itself, whether it is there or not.
pub(super) fn expand(files: &dyn Files, pattern: &str) -> Vec<String> {
    if !is_pattern(pattern) {
        return vec![pattern.to_owned()];
    }
    let mut found = vec![String::new()];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        found = found
            .iter()
            .flat_map(|folder| {
                let names = if is_pattern(part) {
                    let mut names = files.names(if folder.is_empty() { "/" } else { folder });
                    names.retain(|name| part_matches(part, name));
                    names
                } else {
                    vec![part.to_owned()]
                };
                names.into_iter().map(move |name| format!("{folder}/{name}"))
            })
            .collect();
    }
    found
}

/// The folder of a path.
pub(super) fn folder(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some(("", _)) | None => "/",
        Some((folder, _)) => folder,
    }
}
