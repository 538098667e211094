//! `cargo xtask web-check`: the web pages in a browser (`lab/divvy-web-check`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::target_directory::{debug_directory, target};

const HELP: &str = "\
Open the web pages of a made-up cluster in Chromium, and check them

usage: cargo xtask web-check [--screenshots DIRECTORY]

Checked, in both themes and at 1,280 and 360 pixels: no violation of axe, no horizontal scroll bar, no report of the content security policy. Also: the pages
without script, names that look like scripts, live updates, a stream that is cut, a token that expires, the form, the order of the keyboard's focus.

  --screenshots DIRECTORY   also write web-light.png, web-dark.png, and web-narrow.png there

Needs Chromium (Debian: apt-get install chromium), node 18 or later, npm, and npm's registry: playwright-core and axe-core are installed into the target directory,
in the versions of lab/divvy-web-check/package-lock.json.

The exit status is 1 if a check fails.

Examples:
  cargo xtask web-check
  cargo xtask web-check --screenshots docs/pictures";

/// The files of the check. They are copied, because npm installs next to them.
const FILES: [&str; 3] = ["check.mjs", "package.json", "package-lock.json"];
/// The names that distributions give Chromium.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    let pictures = match arguments {
        [] => None,
        ["--screenshots", directory] if !directory.starts_with('-') => Some(std::path::absolute(directory)?),
        ["--help" | "-h"] => {
            #[expect(clippy::print_stdout, reason = "requested help is output")]
            {
                println!("{HELP}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        _ => bail!("{HELP}"),
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let browser = BROWSERS.iter().find_map(|name| found(name, &directories));
    let browser = browser
        .context("Chromium was not found in PATH, and the pages are checked in it. Install it: apt-get install chromium")?;
    for program in ["node", "npm"] {
        let hint = || {
            format!("{program} was not found in PATH, and the check is a program for it. Install it: apt-get install nodejs npm")
        };
        found(program, &directories).with_context(hint)?;
    }
    crate::cargo::cargo(&["build", "--quiet", "--locked", "-p", "divvy-web-check"])?;
    let directory = target().join("web-check");
    fs::create_dir_all(&directory).with_context(|| format!("{} could not be made", directory.display()))?;
    for file in FILES {
        let from = Path::new("lab/divvy-web-check").join(file);
        fs::copy(&from, directory.join(file)).with_context(|| format!("{} could not be copied", from.display()))?;
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--silent", "--no-audit", "--no-fund"])
        .current_dir(&directory);
    let status = npm.status().context("npm could not be run")?;
    ensure!(status.success(), "npm ci failed in {}", directory.display());
    let program = std::path::absolute(debug_directory().join("divvy-web-check"))?;
    let mut node = Command::new("node");
    node.arg("check.mjs")
        .arg(program)
        .arg(browser)
        .args(pictures)
        .current_dir(&directory);
    let status = node.status().context("node could not be run")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Find a program in these directories.
fn found(name: &str, directories: &[PathBuf]) -> Option<PathBuf> {
    directories
        .iter()
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_is_not_known_is_answered_with_the_help() {
        for arguments in [&["--bogus"][..], &["--screenshots"], &["--screenshots", "--help"], &["docs"]] {
            let error = run(arguments).expect_err("refused").to_string();
            assert_eq!(error, HELP, "{arguments:?}");
        }
    }

    #[test]
    fn a_program_is_found_in_the_first_directory_that_has_it() {
        let place = tempfile::tempdir().expect("a directory");
        let (first, second) = (place.path().join("first"), place.path().join("second"));
        for directory in [&first, &second] {
            fs::create_dir(directory).expect("made");
        }
        fs::write(second.join("chromium"), "").expect("written");
        fs::create_dir(first.join("chromium")).expect("made");
        let directories = [first, second.clone()];
        assert_eq!(found("chromium", &directories), Some(second.join("chromium")));
        assert_eq!(found("firefox", &directories), None);
    }
}
