//! Sets the commit that `divvy version` shows for a release build: `DIVVY_COMMIT` if a packager sets it, else the commit from
//! git, else `unknown`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=DIVVY_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    let given = std::env::var("DIVVY_COMMIT").ok().filter(|commit| !commit.is_empty());
    // Not in a development build, because each commit would build the program again.
    let release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| release.then(commit).flatten());
    println!("cargo:rustc-env=DIVVY_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// Return the commit from git if this directory is a checkout of the repository itself. A source tarball may be unpacked inside
/// another repository.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)?
        .canonicalize()
        .ok()?;
    let top = Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if top != root {
        return None;
    }
    // Name only existing files, because Cargo runs this script again whenever a named file is missing.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
