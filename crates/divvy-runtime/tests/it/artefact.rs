//! Tests of the released programs, as `cargo xtask test` and `cargo xtask image` build them.

use std::path::Path;
use std::process::Command;

const MOST: u64 = 2 * 1024 * 1024;

/// Each program has a size of at most 2 MiB.
#[test]
fn rule_10_the_programs_have_no_interpreter() {
    if !divvy_skip::program("readelf", "binutils") {
        return;
    }
    let directory = format!("../../target/image/{}-unknown-linux-musl/node", std::env::consts::ARCH);
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    for name in ["divvy-runtime", "divvy-hook"] {
        let path = directory.join(name);
        let Ok(found) = path.metadata() else {
            divvy_skip::skipped(format_args!("{} was not built (cargo xtask test builds it)", path.display()));
            continue;
        };
        assert!(
            found.len() <= MOST,
            "{name} has {} bytes, but may have at most {MOST}",
            found.len()
        );
        let output = Command::new("readelf")
            .args(["-l", "-W"])
            .arg(&path)
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("LOAD") && !text.contains("INTERP"), "{text}");
    }
}
