//! The program where `CUDA_VISIBLE_DEVICES` is wrong.

use crate::rig::{Rig, UUID};

/// The entry is a failure if it hides the GPU.
#[test]
fn a_wrong_visible_devices_entry_is_a_warning() {
    let rig = Rig::new(12);
    let two = format!("{UUID},gpu1");
    for (visible, status, parts) in [
        ("0", 0, &["Result = PASS"][..]),
        ("GPU-00000000", 0, &["Result = PASS"]),
        (
            "0,first",
            1,
            &["WARN S01", "the entry \"first\", which is neither an index nor a UUID"],
        ),
        (
            &two,
            1,
            &["WARN S01", "the entry \"gpu1\", which is neither an index nor a UUID"],
        ),
        ("first,0", 2, &["FAIL S01", "cuInit returned 100", "the entry \"first\""]),
        ("-1", 2, &["FAIL S01", "cuInit returned 100", "the entry \"-1\""]),
        ("", 2, &["FAIL S01", "CUDA_VISIBLE_DEVICES is empty, which hides every GPU"]),
        ("7", 2, &["FAIL S01", "cuInit returned 100", "at CUDA_VISIBLE_DEVICES"]),
    ] {
        let ran = rig.run("here --steps S02", &[("CUDA_VISIBLE_DEVICES", visible)]);
        assert_eq!(ran.status(), status, "{visible:?}: {ran:?}");
        for part in parts {
            assert!(ran.out().contains(part), "{visible:?}: no {part:?} in {}", ran.out());
        }
    }
}
