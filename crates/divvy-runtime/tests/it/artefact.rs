//! What is delivered, where it was built: `cargo build --profile runtime --target x86_64-unknown-linux-musl -p divvy-runtime -p divvy-hook`.

use std::path::Path;
use std::process::Command;

const MOST: u64 = 2 * 1024 * 1024;

#[test]
#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn rule_10_the_programs_have_no_interpreter_and_two_mebibytes_at_most() {
    let target = Path::new(env!("CARGO_BIN_EXE_divvy-runtime"))
        .ancestors()
        .nth(2)
        .expect("target/PROFILE/program");
    let folder = target.join(format!("{}-unknown-linux-musl/runtime", std::env::consts::ARCH));
    for name in ["divvy-runtime", "divvy-hook"] {
        let path = folder.join(name);
        let Ok(found) = path.metadata() else {
            eprintln!("SKIPPED: {} was not built (--profile runtime)", path.display());
            continue;
        };
        assert!(found.len() <= MOST, "{name} has {} bytes, and may have {MOST}", found.len());
        let Ok(output) = Command::new("readelf").args(["-l", "-W"]).arg(&path).output() else {
            eprintln!("SKIPPED: it needs readelf (binutils)");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("LOAD") && !text.contains("INTERP"), "{text}");
    }
}
