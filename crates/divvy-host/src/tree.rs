//! A read-only view of a machine's files, and path resolution below a root directory.

use std::fmt;

/// The metadata of a path. Links are not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathMetadata {
    /// The file type.
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u32,
    /// Group ID.
    pub gid: u32,
}

/// A file type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link, with its target.
    Link(String),
    /// A device node, a socket, or a pipe.
    Special,
}

/// A machine's files. Paths begin with `/` and must not contain links: the caller resolves them, usually through [`Root`].
pub trait Tree: fmt::Debug + Sync {
    /// Return the names in a directory, sorted; empty if the path is not a directory.
    fn names(&self, directory: &str) -> Vec<String>;
    /// Return at most `most` names in a directory, in the order in which the file system lists them. A large directory is not read to its end.
    fn first_names(&self, directory: &str, most: usize) -> Vec<String> {
        let mut names = self.names(directory);
        names.truncate(most);
        names
    }
    /// Return the metadata of a path, or `None` if it does not exist.
    fn stat(&self, path: &str) -> Option<PathMetadata>;
    /// Return at most the first `limit` bytes of a file, or `None` if it cannot be read.
    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>>;
    /// Return the major and minor number of a device node. The result is `None` if the path is not a device node, as in a copy of a machine that has
    /// regular files in place of device nodes.
    fn device(&self, _path: &str) -> Option<(u32, u32)> {
        None
    }
    /// Return the modification time of a file, in seconds since 1970.
    fn modified(&self, _path: &str) -> Option<i64> {
        None
    }
    /// Return the modification time of a file or directory, in ns since 1970, and its size in bytes.
    fn stamp(&self, _path: &str) -> Option<(i64, u64)> {
        None
    }
    /// Return the paths that exist but could not be read since the last call, each with the reason.
    fn troubles(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The maximum number of links that are followed for one path. The kernel has the same limit.
const MOST_LINKS: usize = 40;

/// A directory that acts as the root directory: paths and links are resolved inside it and cannot leave it.
#[derive(Debug, Clone)]
pub struct Root<'t> {
    tree: &'t dyn Tree,
    /// The path of the directory on the machine, without links; empty for the machine's own root.
    at: String,
    /// The path as the caller named it, with links. Paths in a spec use this form.
    named: String,
}

impl<'t> Root<'t> {
    /// Open the directory at a path of the machine; `None` if it does not exist or is not a directory.
    pub fn open(tree: &'t dyn Tree, path: &str) -> Option<Root<'t>> {
        let machine = Root {
            tree,
            at: String::new(),
            named: String::new(),
        };
        let (at, entry) = machine.resolve(path)?;
        (entry.kind == FileKind::Directory).then(|| Root {
            tree,
            at: at.trim_end_matches('/').to_owned(),
            named: normal(path).trim_end_matches('/').to_owned(),
        })
    }

    /// Return the path on the machine for a path below the root.
    pub fn host(&self, path: &str) -> String {
        format!("{}{path}", self.named)
    }

    /// Follow all links, without leaving the root. Return the path below the root without links, and its metadata.
    pub fn resolve(&self, path: &str) -> Option<(String, PathMetadata)> {
        let mut todo: Vec<String> = parts(path).rev().map(str::to_owned).collect();
        let mut done: Vec<String> = Vec::new();
        let mut entry = PathMetadata {
            kind: FileKind::Directory,
            mode: 0o755,
            gid: 0,
        };
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part == ".." {
                done.pop();
                // The remaining path is a directory, since a component below it was resolved.
                entry.kind = FileKind::Directory;
                continue;
            }
            done.push(part);
            entry = self.tree.stat(&format!("{}/{}", self.at, done.join("/")))?;
            if let FileKind::Link(target) = &entry.kind {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                done.pop();
                if target.starts_with('/') {
                    done.clear();
                }
                todo.extend(parts(target).rev().map(str::to_owned));
                entry.kind = FileKind::Directory;
            }
        }
        Some((format!("/{}", done.join("/")), entry))
    }

    /// Return the major and minor number of the device node at a path; links are followed.
    pub fn device(&self, path: &str) -> Option<(u32, u32)> {
        let (path, _) = self.resolve(path)?;
        self.tree.device(&format!("{}{path}", self.at))
    }

    /// Return the modification time of the file at a path, in seconds since 1970; links are followed.
    pub fn modified(&self, path: &str) -> Option<i64> {
        let (path, _) = self.resolve(path)?;
        self.tree.modified(&format!("{}{path}", self.at))
    }

    /// Return the target of the link at a path, or `None` if it is not a link. Links in the directories before it are followed.
    pub fn link(&self, path: &str) -> Option<String> {
        let (directory, name) = path.rsplit_once('/')?;
        let (directory, _) = self.resolve(directory)?;
        match self.stat_in(&directory, name)?.kind {
            FileKind::Link(target) => Some(target),
            _ => None,
        }
    }

    /// Return the names in a directory, sorted; empty if the path is not a directory.
    pub fn names(&self, directory: &str) -> Vec<String> {
        self.directory(directory).map_or_else(Vec::new, |path| self.tree.names(&path))
    }

    /// Return at most `most` names in a directory, as [`Tree::first_names`] does; empty if the path is not a directory.
    pub fn first_names(&self, directory: &str, most: usize) -> Vec<String> {
        self.directory(directory)
            .map_or_else(Vec::new, |path| self.tree.first_names(&path, most))
    }

    /// Return the path on the machine of a directory below the root, without links.
    fn directory(&self, path: &str) -> Option<String> {
        let (path, entry) = self.resolve(path)?;
        let mut path = format!("{}{path}", self.at);
        if path.len() > 1 {
            path = path.trim_end_matches('/').to_owned();
        }
        (entry.kind == FileKind::Directory).then_some(path)
    }

    /// Return the metadata of the entry `name` of a directory, without following a link. The directory's path must not contain links.
    pub fn stat_in(&self, directory: &str, name: &str) -> Option<PathMetadata> {
        self.tree
            .stat(&format!("{}{}/{name}", self.at, directory.trim_end_matches('/')))
    }

    /// Return at most the first `limit` bytes of a regular file; links are followed.
    pub fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        let (path, entry) = self.resolve(path)?;
        (entry.kind == FileKind::File)
            .then(|| self.tree.read(&format!("{}{path}", self.at), limit))
            .flatten()
    }

    /// Return the text of a small file, such as one in `/proc` or `/sys`, without white space at its end.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = self.read(path, 64 * 1024)?;
        let text = String::from_utf8(bytes).ok()?;
        Some(text.trim_end().to_owned())
    }

    /// Return the path of a regular file without links, or `None` if the path is not a regular file.
    pub fn file(&self, path: &str) -> Option<String> {
        let (real, entry) = self.resolve(path)?;
        (entry.kind == FileKind::File).then_some(real)
    }
}

fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".")
}

fn normal(path: &str) -> String {
    let parts: Vec<&str> = parts(path).collect();
    format!("/{}", parts.join("/"))
}
