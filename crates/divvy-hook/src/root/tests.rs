use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::*;

#[test]
fn without_openat2_no_link_is_followed() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path().join("root");
    std::fs::create_dir_all(at.join("etc/x")).expect("made");
    std::fs::write(at.join("etc/x/file"), "inside").expect("written");
    symlink("x", at.join("etc/link")).expect("linked");
    symlink("/etc/hostname", at.join("etc/name")).expect("linked");
    let root = ImageRoot::open(&at).expect("opened");
    let walk = |path: &str| root.walk(path, OFlags::RDONLY, Mounts::Crossed).map(drop);
    assert_eq!(walk("/etc/x/file"), Ok(()));
    assert_eq!(walk("/"), Ok(()));
    for path in [
        "/etc/link/file",
        "/etc/name",
        "/etc/../etc/x/file",
        "/../root",
        "/etc/nothing",
    ] {
        assert!(walk(path).is_err(), "{path}");
    }
}

/// The test needs mounts in a mount namespace of its own, so this test program runs itself again in one, with only this test.
#[test]
fn without_openat2_the_same_mounts_are_refused() {
    const ROOT: &str = "DIVVY_HOOK_TEST_ROOT";
    if let Some(at) = std::env::var_os(ROOT) {
        return the_same_mounts_are_refused(&ImageRoot::open(Path::new(&at)).expect("opened"));
    }
    let directory = tempfile::tempdir().expect("a directory");
    for path in ["root/etc/ld.so.conf.d", "root/volume", "root/same", "outside/below"] {
        std::fs::create_dir_all(directory.path().join(path)).expect("made");
    }
    // One mount of another file system, and one of another directory on the same file system.
    let mounts =
        "mount -t tmpfs none root/volume && mkdir root/volume/below && mount --bind outside root/same || exit 99; exec \"$@\"";
    let output = std::process::Command::new("unshare")
        .args(["-m", "sh", "-c", mounts, "sh"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "root::tests::without_openat2_the_same_mounts_are_refused"])
        .env(ROOT, directory.path().join("root"))
        .current_dir(directory.path())
        .output()
        .expect("unshare runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(99) || said.starts_with("unshare") {
        return divvy_skip::skipped("nothing can be mounted in a mount namespace: that takes root");
    }
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn the_same_mounts_are_refused(root: &ImageRoot) {
    for (path, refused) in [
        ("/", false),
        ("/etc", false),
        ("/etc/ld.so.conf.d", false),
        ("/volume", true),
        ("/volume/below", true),
        ("/same", true),
        ("/same/below", true),
    ] {
        let expected = if refused { Err(Errno::XDEV) } else { Ok(()) };
        assert_eq!(
            root.resolve(path, DIRECTORY, Mounts::Refused).map(drop),
            expected,
            "openat2: {path}"
        );
        assert_eq!(
            root.walk(path, DIRECTORY, Mounts::Refused).map(drop),
            expected,
            "without: {path}"
        );
        assert_eq!(
            root.walk(path, DIRECTORY, Mounts::Crossed).map(drop),
            Ok(()),
            "for reading: {path}"
        );
    }
}

/// Files outside a root, and files with the same names inside it. Links lead from inside the root to the outside.
struct Trap {
    directory: tempfile::TempDir,
}

const SECRET: &str = "the host's";
const SWAPS: usize = 100_000;

impl Trap {
    fn new() -> Trap {
        let trap = Trap {
            directory: tempfile::tempdir().expect("a directory"),
        };
        for place in ["outside", "root/etc"] {
            std::fs::create_dir_all(trap.at(place)).expect("made");
        }
        for name in ["ld.so.cache", "lib.so"] {
            std::fs::write(trap.at("outside").join(name), SECRET).expect("written");
            std::fs::write(trap.at("root/etc").join(name), "the image's").expect("written");
        }
        trap
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Call `work` repeatedly while another thread exchanges two entries of the root. Return how often `work` succeeded, and how
    /// often it failed.
    fn race(&self, [a, b]: [&str; 2], work: impl Fn(&ImageRoot) -> bool) -> (usize, usize) {
        let root = ImageRoot::open(&self.at("root")).expect("opened");
        let (a, b) = (self.at(a), self.at(b));
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..SWAPS {
                    renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).expect("exchanged");
                }
                ended.store(true, Ordering::Release);
            });
            let (mut done, mut refused) = (0, 0);
            while !ended.load(Ordering::Acquire) {
                if work(&root) { done += 1 } else { refused += 1 }
            }
            (done, refused)
        })
    }

    fn assert_nothing_outside_has_changed(&self) {
        let mut names: Vec<_> = std::fs::read_dir(self.at("outside"))
            .expect("there")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["ld.so.cache", "lib.so"]);
        for name in names {
            let text = std::fs::read_to_string(self.at("outside").join(name)).expect("a file");
            assert_eq!(text, SECRET);
        }
    }
}

/// CVE-2024-0132, CVE-2024-0134, CVE-2025-23267: between a check and a write, a directory is replaced with a link out of the
/// root.
#[test]
fn case_37_a_rule_3_a_directory_turned_link_leads_nowhere() {
    let trap = Trap::new();
    // Three kinds of links out of the root: absolute, through .., and through /proc.
    for target in ["outside", "../outside", "/proc/self/root"] {
        let target = match target {
            "outside" => trap.at("outside"),
            other => PathBuf::from(other),
        };
        let _ = std::fs::remove_file(trap.at("root/swap"));
        symlink(&target, trap.at("root/swap")).expect("linked");
        let swapped = ["root/etc", "root/swap"];
        let (written, _) = trap.race(swapped, |root| root.write("/etc/ld.so.cache", b"a cache").is_ok());
        let (linked, _) = trap.race(swapped, |root| root.link("libcuda.so.1", "/etc/new/libcuda.so").is_ok());
        assert!(written > 0 && linked > 0, "{target:?}: {written} {linked}");
        let (read, _) = trap.race(swapped, |root| match root.read("/etc/lib.so", 100) {
            Ok(Some(bytes)) => {
                assert_ne!(bytes, SECRET.as_bytes(), "{target:?}");
                true
            }
            _ => false,
        });
        assert!(read > 0, "{target:?}");
        // While the link is in place, its absolute target is interpreted below the root.
        trap.assert_nothing_outside_has_changed();
    }
}

/// CVE-2024-0133: the file itself is replaced with a link out of the root.
/// The link is not followed.
#[test]
fn case_37_b_rule_3_a_file_turned_link_is_replaced() {
    let trap = Trap::new();
    let outside = trap.at("outside/ld.so.cache");
    symlink(&outside, trap.at("root/etc/swap")).expect("linked");
    let swapped = ["root/etc/ld.so.cache", "root/etc/swap"];
    let (read, _) = trap.race(swapped, |root| match root.read("/etc/ld.so.cache", 100) {
        Ok(Some(bytes)) => {
            assert_ne!(bytes, SECRET.as_bytes());
            true
        }
        _ => false,
    });
    let (written, _) = trap.race(swapped, |root| root.write("/etc/ld.so.cache", b"a cache").is_ok());
    assert!(read > 0 && written > 0, "{read} {written}");
    trap.assert_nothing_outside_has_changed();
}

/// The same attacks, with the fallback for old kernels.
#[test]
fn case_37_c_rule_3_without_openat2_neither_is_followed() {
    let trap = Trap::new();
    symlink(trap.at("outside"), trap.at("root/swap")).expect("linked");
    let (opened, refused) = trap.race(["root/etc", "root/swap"], |root| {
        let Ok(opened) = root.walk("/etc/lib.so", OFlags::RDONLY, Mounts::Crossed) else {
            return false;
        };
        let mut text = String::new();
        File::from(opened).read_to_string(&mut text).expect("read");
        assert_ne!(text, SECRET);
        true
    });
    assert!(opened > 0 && refused > 0, "{opened} {refused}");
}

/// Links of /proc are not followed.
#[test]
fn case_37_d_rule_3_image_links_are_followed_within_it() {
    let trap = Trap::new();
    let root = ImageRoot::open(&trap.at("root")).expect("opened");
    symlink("/", trap.at("root/top")).expect("linked");
    symlink("../../../../..", trap.at("root/up")).expect("linked");
    symlink("/nowhere", trap.at("root/dangling")).expect("linked");
    for path in ["/top/usr/a.so", "/up/usr/b.so", "/../../usr/c.so"] {
        root.link("t", path).expect(path);
    }
    assert_eq!(
        root.names("/usr").expect("there"),
        ["a.so", "b.so", "c.so"],
        "all in the root"
    );
    assert!(
        root.link("t", "/dangling/a.so").is_err(),
        "the link's target cannot be created"
    );
    // A real /proc, as in a container when the hook runs.
    let host = ImageRoot::open(Path::new("/")).expect("opened");
    assert!(host.read("/proc/self/exe", 4).is_err(), "a magic link");
    assert!(host.write("/proc/self/root/tmp/divvy-x", b"x").is_err());
    assert!(host.write("/proc/divvy-x", b"x").is_err(), "another file system");
    for path in ["/", "/etc/..", "/etc/."] {
        assert!(root.write(path, b"x").is_err(), "{path}");
    }
}
