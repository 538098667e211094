//! Import cycles between the source files of one crate. The reader of one file in a circle has to read all of them. Such a circle
//! shows that code which several files need should be in a separate file.
//!
//! An import is every path in a file's code that resolves to an item of another file of the same crate, once re-exports are
//! followed. A `pub use` alone is not an import: a parent module that re-exports its children's items does not depend on them.
//! Test modules are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use syn::visit::Visit;
use syn::{Attribute, Item, UseTree, Visibility};

/// A module of a crate; inline modules are modules of their own in the same file.
struct CrateModule {
    file: PathBuf,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// The names of the items that are defined here.
    items: BTreeSet<String>,
    /// The names that `use` declarations bring in, with their paths.
    names: BTreeMap<String, Vec<String>>,
    /// The paths of `use …::*`.
    globs: Vec<Vec<String>>,
    /// The paths in the code and in private `use` declarations.
    paths: BTreeSet<Vec<String>>,
}

/// Fail if files of one crate import each other in a circle.
pub(crate) fn check() -> Result<()> {
    let mut found = String::new();
    for directory in ["crates", "lab", "."] {
        let mut crates: Vec<PathBuf> = match directory {
            "." => vec!["xtask".into()],
            _ => fs::read_dir(directory)
                .with_context(|| format!("{directory} cannot be listed"))?
                .map(|entry| Ok(entry?.path()))
                .collect::<Result<_>>()?,
        };
        crates.sort();
        for root in crates {
            for entry in ["src/lib.rs", "src/main.rs"] {
                let entry = root.join(entry);
                if entry.exists() {
                    found.extend(circles(&entry)?);
                }
            }
        }
    }
    ensure!(
        found.is_empty(),
        "files import each other in circles; move what they share to a file of its own:\n{found}"
    );
    Ok(())
}

/// Return a description of each circle among the files of the crate with this root file.
fn circles(entry: &Path) -> Result<Vec<String>> {
    let mut modules = Vec::new();
    let directory = entry.parent().unwrap_or(Path::new("."));
    read(entry, directory, None, &mut modules)?;
    let mut imports: BTreeMap<(&Path, &Path), BTreeSet<String>> = BTreeMap::new();
    for (at, module) in modules.iter().enumerate() {
        for path in &module.paths {
            if let Some(to) = resolve(&modules, at, path, 0)
                && modules[to].file != module.file
                && !is_ancestor(&modules, to, at)
            {
                let key = (module.file.as_path(), modules[to].file.as_path());
                imports.entry(key).or_default().insert(path.join("::"));
            }
        }
    }
    let graph: DiGraphMap<&Path, ()> = DiGraphMap::from_edges(imports.keys().copied());
    let circles = tarjan_scc(&graph).into_iter().filter(|files| files.len() > 1);
    Ok(circles
        .map(|files| {
            let mut text = String::new();
            for ((from, to), names) in &imports {
                if files.contains(from) && files.contains(to) {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    text.push_str(&format!("  {} -> {}: {}\n", from.display(), to.display(), names.join(", ")));
                }
            }
            format!("{text}\n")
        })
        .collect())
}

/// Read a file and the files of its modules.
fn read(file: &Path, directory: &Path, parent: Option<usize>, modules: &mut Vec<CrateModule>) -> Result<usize> {
    let text = fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let parsed = syn::parse_file(&text).with_context(|| format!("{} cannot be parsed", file.display()))?;
    module(&parsed.items, file, directory, parent, modules)
}

fn module(items: &[Item], file: &Path, directory: &Path, parent: Option<usize>, modules: &mut Vec<CrateModule>) -> Result<usize> {
    let at = modules.len();
    modules.push(CrateModule {
        file: file.to_owned(),
        parent,
        children: BTreeMap::new(),
        items: BTreeSet::new(),
        names: BTreeMap::new(),
        globs: Vec::new(),
        paths: BTreeSet::new(),
    });
    for item in items {
        if is_test(attributes(item)) {
            continue;
        }
        match item {
            Item::Mod(inner) => {
                let name = inner.ident.to_string();
                let below = directory.join(&name);
                let child = match &inner.content {
                    Some((_, items)) => module(items, file, &below, Some(at), modules)?,
                    None => {
                        let flat = directory.join(format!("{name}.rs"));
                        let nested = below.join("mod.rs");
                        let file = if flat.exists() { flat } else { nested };
                        read(&file, &below, Some(at), modules)?
                    }
                };
                modules[at].children.insert(name, child);
            }
            Item::Use(declaration) => {
                let public = !matches!(declaration.vis, Visibility::Inherited);
                used(&declaration.tree, &mut Vec::new(), public, &mut modules[at]);
            }
            other => {
                if let Some(name) = name_of(other) {
                    modules[at].items.insert(name);
                }
                modules[at].visit_item(other);
            }
        }
    }
    Ok(at)
}

/// Note what a `use` declaration brings in.
fn used(tree: &UseTree, before: &mut Vec<String>, public: bool, module: &mut CrateModule) {
    let mut note = |name: String, path: Vec<String>| {
        if !public {
            module.paths.insert(path.clone());
        }
        module.names.insert(name, path);
    };
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            used(&path.tree, before, public, module);
            before.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| used(tree, before, public, module)),
        UseTree::Glob(_) => module.globs.push(before.clone()),
        UseTree::Name(name) if name.ident == "self" => {
            if let Some(last) = before.last() {
                note(last.clone(), before.clone());
            }
        }
        UseTree::Name(name) => note(name.ident.to_string(), [&before[..], &[name.ident.to_string()]].concat()),
        UseTree::Rename(rename) if rename.ident == "self" => note(rename.rename.to_string(), before.clone()),
        UseTree::Rename(rename) => note(rename.rename.to_string(), [&before[..], &[rename.ident.to_string()]].concat()),
    }
}

impl<'ast> Visit<'ast> for CrateModule {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // The paths of `pub(super)` and the like name no item.
        if !segments
            .iter()
            .all(|segment| matches!(segment.as_str(), "crate" | "self" | "super"))
        {
            self.paths.insert(segments);
        }
        syn::visit::visit_path(self, path);
    }
}

/// Return the module that defines what a path names. Return `None` for another crate's item, and for an item whose declaration is
/// not found.
fn resolve(modules: &[CrateModule], mut at: usize, path: &[String], depth: usize) -> Option<usize> {
    // A chain of re-exports is short; a glob may lead back to where it came from.
    if depth > 8 {
        return None;
    }
    let mut rest = path;
    let mut begun = false;
    while let Some((first, after)) = rest.split_first() {
        let module = &modules[at];
        match first.as_str() {
            "crate" if !begun => at = root(modules, at),
            "self" if !begun => {}
            "super" => at = module.parent?,
            name => {
                if let Some(child) = module.children.get(name) {
                    at = *child;
                } else if module.items.contains(name) {
                    return Some(at);
                } else if let Some(target) = module.names.get(name).filter(|target| target.as_slice() != path || begun) {
                    return resolve(modules, at, &[&target[..], after].concat(), depth + 1);
                } else {
                    return module.globs.iter().find_map(|glob| {
                        let of = resolve(modules, at, glob, depth + 1)?;
                        (of != at).then(|| resolve(modules, of, rest, depth + 1)).flatten()
                    });
                }
            }
        }
        begun = true;
        rest = after;
    }
    Some(at)
}

/// Report whether one module contains another.
fn is_ancestor(modules: &[CrateModule], of: usize, mut at: usize) -> bool {
    while let Some(parent) = modules[at].parent {
        at = parent;
        if at == of {
            return true;
        }
    }
    false
}

fn root(modules: &[CrateModule], mut at: usize) -> usize {
    while let Some(parent) = modules[at].parent {
        at = parent;
    }
    at
}

/// Report whether an item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|condition| condition.is_ident("test"))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return the number of circles in a crate of these files.
    fn count(files: &[(&str, &str)]) -> usize {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        }
        circles(&directory.path().join("lib.rs")).expect("read").len()
    }

    #[test]
    fn files_that_need_each_other_are_found_and_others_are_not() {
        for (what, expected, files) in [
            (
                "one direction",
                0,
                &[
                    ("lib.rs", "mod a; mod b;"),
                    ("a.rs", "use crate::b::B; struct A(B);"),
                    ("b.rs", "pub struct B;"),
                ][..],
            ),
            (
                "two directions",
                1,
                &[
                    ("lib.rs", "mod a; mod b;"),
                    ("a.rs", "use crate::b::B; pub struct A(B);"),
                    ("b.rs", "pub struct B; fn f(_: crate::a::A) {}"),
                ],
            ),
            (
                "through a re-export",
                1,
                &[
                    ("lib.rs", "mod a; mod b; pub use b::B;"),
                    ("a.rs", "pub struct A(crate::B);"),
                    ("b.rs", "use crate::a::A; pub struct B; fn f(_: A) {}"),
                ],
            ),
            (
                "a parent that only re-exports",
                0,
                &[
                    ("lib.rs", "mod a; pub use a::A; pub struct E;"),
                    ("a.rs", "use super::E; pub struct A(E);"),
                ],
            ),
            (
                "a parent that uses its child, which is a part of it",
                0,
                &[
                    ("lib.rs", "mod a; pub struct E; fn f(_: a::A) {}"),
                    ("a.rs", "use super::E; pub struct A(E);"),
                ],
            ),
            (
                "tests",
                0,
                &[
                    ("lib.rs", "mod a; fn f() -> a::A { a::A }"),
                    ("a.rs", "pub struct A; #[cfg(test)] mod tests { use crate::f; }"),
                ],
            ),
        ] {
            assert_eq!(count(files), expected, "{what}");
        }
    }
}
