//! A machine's files, as values, and paths below a root.

use std::fmt;

/// What lies at a path; links are not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Group.
    pub gid: u32,
}

/// Kinds of entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder.
    Folder,
    /// A plain file.
    File,
    /// A link to this.
    Link(String),
    /// A device node, a socket, a pipe.
    Special,
}

/// A machine's files. Paths begin with `/` and pass through no link: whoever asks has followed them.
pub trait Tree: fmt::Debug + Sync {
    /// The names in a folder, sorted; none if it is no folder.
    fn names(&self, folder: &str) -> Vec<String>;
    /// What is there.
    fn look(&self, path: &str) -> Option<Entry>;
    /// The first `limit` bytes of a file.
    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>>;
    /// Major and minor of a device node; none where device nodes are plain files, as in a copy.
    fn device(&self, _path: &str) -> Option<(u32, u32)> {
        None
    }
    /// When a file was last written, in seconds since 1970.
    fn modified(&self, _path: &str) -> Option<i64> {
        None
    }
    /// When a file or folder was last changed, in ns since 1970, and its size.
    fn stamp(&self, _path: &str) -> Option<(i64, u64)> {
        None
    }
    /// What was there and could not be looked at since this was last asked, with the reason.
    fn troubles(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Links that are followed for one path; the kernel's own number.
const MOST_LINKS: usize = 40;

/// A folder that is the root for every path and every link below it.
#[derive(Debug, Clone)]
pub struct Root<'t> {
    tree: &'t dyn Tree,
    /// Empty for the machine's own root.
    at: String,
    /// As it was named: what goes into a spec.
    named: String,
}

impl<'t> Root<'t> {
    /// The folder at this path of the machine.
    pub fn open(tree: &'t dyn Tree, path: &str) -> Option<Root<'t>> {
        let machine = Root {
            tree,
            at: String::new(),
            named: String::new(),
        };
        let (at, entry) = machine.resolve(path)?;
        (entry.kind == Kind::Folder).then(|| Root {
            tree,
            at: at.trim_end_matches('/').to_owned(),
            named: normal(path).trim_end_matches('/').to_owned(),
        })
    }

    /// Where a path below the root is on the machine.
    pub fn host(&self, path: &str) -> String {
        format!("{}{path}", self.named)
    }

    /// Follows all links, each as seen from the root, never out of it: the path below the root without links, and what is there.
    pub fn resolve(&self, path: &str) -> Option<(String, Entry)> {
        let mut todo: Vec<String> = parts(path).rev().map(str::to_owned).collect();
        let mut done: Vec<String> = Vec::new();
        let mut entry = Entry {
            kind: Kind::Folder,
            mode: 0o755,
            gid: 0,
        };
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part == ".." {
                done.pop();
                // What is left was a folder, since something below it was named.
                entry.kind = Kind::Folder;
                continue;
            }
            done.push(part);
            entry = self.tree.look(&format!("{}/{}", self.at, done.join("/")))?;
            if let Kind::Link(target) = &entry.kind {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                done.pop();
                if target.starts_with('/') {
                    done.clear();
                }
                todo.extend(parts(target).rev().map(str::to_owned));
                entry.kind = Kind::Folder;
            }
        }
        Some((format!("/{}", done.join("/")), entry))
    }

    /// Major and minor of the device node that a path leads to.
    pub fn device(&self, path: &str) -> Option<(u32, u32)> {
        let (path, _) = self.resolve(path)?;
        self.tree.device(&format!("{}{path}", self.at))
    }

    /// When the file that a path leads to was last written, in seconds since 1970.
    pub fn modified(&self, path: &str) -> Option<i64> {
        let (path, _) = self.resolve(path)?;
        self.tree.modified(&format!("{}{path}", self.at))
    }

    /// What a link says that is the last part of a path; the folders before it are followed.
    pub fn link(&self, path: &str) -> Option<String> {
        let (folder, name) = path.rsplit_once('/')?;
        let (folder, _) = self.resolve(folder)?;
        match self.look(&folder, name)?.kind {
            Kind::Link(target) => Some(target),
            _ => None,
        }
    }

    /// The names in a folder, if it is one.
    pub fn names(&self, folder: &str) -> Vec<String> {
        match self.resolve(folder) {
            Some((path, entry)) if entry.kind == Kind::Folder => {
                let mut path = format!("{}{path}", self.at);
                if path.len() > 1 {
                    path = path.trim_end_matches('/').to_owned();
                }
                self.tree.names(&path)
            }
            _ => Vec::new(),
        }
    }

    /// What is at `folder/name`, without following it; `folder` has no links.
    pub fn look(&self, folder: &str, name: &str) -> Option<Entry> {
        self.tree.look(&format!("{}{}/{name}", self.at, folder.trim_end_matches('/')))
    }

    /// The beginning of a plain file.
    pub fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        let (path, entry) = self.resolve(path)?;
        (entry.kind == Kind::File)
            .then(|| self.tree.read(&format!("{}{path}", self.at), limit))
            .flatten()
    }

    /// A small file of the kernel's, without the line break at its end.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = self.read(path, 64 * 1024)?;
        let text = String::from_utf8(bytes).ok()?;
        Some(text.trim_end().to_owned())
    }

    /// The plain file that a path leads to.
    pub fn file(&self, path: &str) -> Option<String> {
        let (real, entry) = self.resolve(path)?;
        (entry.kind == Kind::File).then_some(real)
    }
}

fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".")
}

fn normal(path: &str) -> String {
    let parts: Vec<&str> = parts(path).collect();
    format!("/{}", parts.join("/"))
}
