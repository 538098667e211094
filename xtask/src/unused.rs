//! Unused dependencies: a crate's manifest names only what its sources use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use regex::Regex;

/// Packages whose library has another name.
const RENAMED: [(&str, &str); 1] = [("rustls-webpki", "webpki")];

/// Fail if a manifest names a dependency that no source file mentions.
pub(crate) fn check() -> Result<()> {
    let mut found = String::new();
    for directory in crates()? {
        let manifest = fs::read_to_string(directory.join("Cargo.toml"))?;
        let (mut production, mut tests) = (String::new(), String::new());
        read(&directory.join("src"), &mut production)?;
        read(&directory.join("build.rs"), &mut production)?;
        for part in ["tests", "examples", "benches"] {
            read(&directory.join(part), &mut tests)?;
        }
        tests.push_str(&production);
        for (section, text) in [("dependencies", &production), ("dev-dependencies", &tests)] {
            for name in names(&manifest, section)? {
                let library = RENAMED
                    .iter()
                    .find(|(package, _)| *package == name)
                    .map_or(name.as_str(), |(_, library)| library);
                let used = Regex::new(&format!(r"\b{}\b", library.replace('-', "_")))?;
                if !used.is_match(text) {
                    found.push_str(&format!("  {}: {section}: {name}\n", directory.display()));
                }
            }
        }
    }
    ensure!(found.is_empty(), "these dependencies are not used; remove them:\n{found}");
    Ok(())
}

fn crates() -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("xtask")];
    for directory in ["crates", "lab"] {
        for entry in fs::read_dir(directory).with_context(|| format!("{directory} cannot be listed"))? {
            found.push(entry?.path());
        }
    }
    found.retain(|directory| directory.join("Cargo.toml").exists());
    found.sort();
    Ok(found)
}

/// Return the names in a section of a manifest.
fn names(manifest: &str, section: &str) -> Result<BTreeSet<String>> {
    let start = format!("[{section}]");
    let name = Regex::new(r"^([a-z0-9_-]+)(\.workspace)? *=")?;
    let lines = manifest.lines().skip_while(|line| *line != start).skip(1);
    let lines = lines.take_while(|line| !line.starts_with('['));
    Ok(lines.filter_map(|line| Some(name.captures(line)?[1].to_owned())).collect())
}

/// Append the text of a file, or of all Rust files below a directory. Append nothing if it does not
/// exist.
fn read(path: &Path, text: &mut String) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            read(&entry?.path(), text)?;
        }
    } else if path.extension().is_some_and(|kind| kind == "rs") && path.exists() {
        text.push_str(&fs::read_to_string(path)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn the_names_of_one_section_are_read() {
        let manifest = "[dependencies]\na-b.workspace = true\n# comment\nc = { path = \"x\" }\n\n[dev-dependencies]\nd = \"1\"\n";
        let found = names(manifest, "dependencies").expect("a pattern");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a-b", "c"]);
    }
}
