use super::*;

/// The environment belongs to the whole process, so a skip is tested in a separate process: this test program with only this test.
#[test]
fn skips_here() {
    match std::env::var("DIVVY_SKIP_SELF_TEST").as_deref() {
        Ok("plain") => skipped("a reason\tof two\nlines"),
        Ok("emulated") => assert_eq!(emulated("it is slow"), is_set(EMULATED)),
        Ok("checks") => {
            assert!(program("sh", "dash"), "it is there");
            assert!(!program("divvy-no-such-program", "nothing"));
            assert_eq!(directory("CARGO_PKG_NAME", "files"), Some(PathBuf::from("some-crate")));
            assert_eq!(directory("DIVVY_NO_SUCH_VARIABLE", "files"), None);
        }
        _ => {}
    }
}

fn tried(variables: &[(&str, &OsStr)]) -> (bool, String) {
    tried_as("plain", variables)
}

fn tried_as(kind: &str, variables: &[(&str, &OsStr)]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "tests::skips_here", "--test-threads=2"])
        .env("DIVVY_SKIP_SELF_TEST", kind)
        .env("CARGO_PKG_NAME", "some-crate")
        .env_remove(FILE)
        .env_remove(REFUSED)
        .env_remove(EMULATED)
        .envs(variables.iter().copied());
    let output = command.output().expect("it runs");
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

const LINE: &str = "some-crate::tests::skips_here\ta reason of two lines\n";

#[test]
fn a_skip_is_a_line_in_the_file_that_the_environment_names() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("skips");
    for expected in [LINE.to_owned(), LINE.repeat(2)] {
        let (passed, printed) = tried(&[(FILE, file.as_os_str())]);
        assert!(passed, "{printed}");
        assert_eq!(std::fs::read_to_string(&file).expect("written"), expected);
    }
}

#[test]
fn a_skip_is_shown_where_no_file_is_named() {
    let (passed, printed) = tried(&[]);
    assert!(passed && printed.contains(&format!("skipped: {LINE}")), "{printed}");
}

#[test]
fn what_an_emulator_lacks_has_a_name_of_its_own() {
    let line = "arm64::some-crate::tests::skips_here\tit is slow\n";
    for (value, is_skipped) in [("arm64", true), ("0", false), ("", false)] {
        let (passed, printed) = tried_as("emulated", &[(EMULATED, value.as_ref())]);
        assert!(passed && printed.contains(line) == is_skipped, "{printed}");
    }
}

#[test]
fn a_forbidden_or_unrecorded_skip_fails() {
    let missing = Path::new("/nowhere/skips");
    for (variable, value, said) in [
        (REFUSED, OsStr::new("1"), "would be skipped: some-crate::tests::skips_here"),
        (
            FILE,
            missing.as_os_str(),
            "/nowhere/skips, which DIVVY_SKIPS names, cannot be written",
        ),
    ] {
        let (passed, printed) = tried(&[(variable, value)]);
        assert!(!passed && printed.contains(said), "{printed}");
    }
    let (passed, printed) = tried(&[(REFUSED, OsStr::new("0"))]);
    assert!(passed, "0 is off: {printed}");
}

#[test]
fn a_test_in_the_main_thread_is_named_by_its_file() {
    let here = Location::caller();
    assert_eq!(name("p", Some("a::b"), here), "p::a::b");
    for thread in [None, Some("main")] {
        assert_eq!(name("p", thread, here), format!("p::{}:{}", here.file(), here.line()));
    }
}

#[test]
fn a_reason_is_one_line_of_limited_length() {
    let long = line("n", &"word\n\t".repeat(1000));
    assert_eq!((long.matches('\n').count(), long.matches('\t').count()), (1, 1));
    assert_eq!(long.chars().count(), "n\t\n".len() + MOST);
}

#[test]
fn only_what_is_missing_is_recorded() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("skips");
    let (passed, printed) = tried_as("checks", &[(FILE, file.as_os_str())]);
    assert!(passed, "{printed}");
    let name = LINE.split('\t').next().expect("a name");
    assert_eq!(
        std::fs::read_to_string(&file).expect("written"),
        format!(
            "{name}\tdivvy-no-such-program is not in the PATH (Debian: nothing)\n\
             {name}\tDIVVY_NO_SUCH_VARIABLE does not name a directory with files\n"
        )
    );
}
