//! Input from a container and its image: requirements, libraries, the runtime's command line and settings, and the hook's state.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use divvy_cdi::annotations;
use divvy_cdi::generate::ldcache;
use divvy_oci::hook::{compat, libraries, params, profile, soname, state};
use divvy_oci::runtime::call::RuntimeCall;
use divvy_oci::runtime::edit;
use divvy_oci::runtime::require::{self, RequirementError, RequirementFacts};
use divvy_oci::runtime::settings::OciRuntimeSettings;

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget {
            accepted: vec![libcuda("[535,550]"), libcuda("[]")],
            ..FuzzTarget::new("an image's libcuda", library, &[])
        },
        FuzzTarget {
            accepted: vec![named("libcuda.so.1")],
            ..FuzzTarget::new("a library's own name", soname, &[])
        },
        FuzzTarget::new(
            "a container's state and configuration",
            hook,
            &[
                r#"{"pid":7,"bundle":"/b"} {"root":{"path":"rootfs"},"mounts":[{"destination":"/usr/lib/libcuda.so.1"}],"linux":{"devices":[{"path":"/dev/nvidia0"},{"path":"/dev/nvidia130"}]}}"#,
                r#"{"bundlePath":"/b"} {"root":{"path":"/r"},"mounts":null,"linux":{"devices":null}}"#,
            ],
        ),
        FuzzTarget::new(
            "the driver's parameters",
            parameters,
            &["ResmanDebugLevel: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n"],
        ),
        FuzzTarget::new("a list of musl's loader", musl, &["/lib:/usr/local/lib\n/usr/lib\n", "/x"]),
        FuzzTarget::new(
            "what an image requires",
            requirements,
            &[
                "550.54.15 12.4 8.0 tesla\ncuda>=12.4 brand=tesla,driver>=470,driver<471\narch>=7.0",
                "535.1 12.2 7.5 -\ncuda!=13.0\nbrand!=geforce driver=535.1",
            ],
        ),
        FuzzTarget::new(
            "the runtime's command line",
            call,
            &["--root\0/r\0create\0--bundle\0/b\0--pid-file=/p\0c1", "-log=x\0--version"],
        ),
        FuzzTarget::new(
            "an edit of config.toml",
            edited,
            &[
                &format!("nvidia-container-runtime.mode=cdi\n{}", edit::assumed("@/sbin/ldconfig")),
                &format!("nvidia-container-cli.no-cgroups\n{}", edit::assumed("@/sbin/ldconfig")),
                "nvidia-container-runtime.runtimes=a,b\ndisable-require = true # why\n[nvidia-container-runtime]\nmode = 'auto'\n",
            ],
        ),
        FuzzTarget::new(
            "annotations that ask for CDI devices",
            asked,
            &[r#"{"cdi.k8s.io/a_1":"nvidia.com/gpu=0,amd.com/gpu=x","other/key":"y"}"#],
        ),
    ]
}

/// Return a library as linkers create it: a note, the section names, and the section table.
fn libcuda(drivers: &str) -> Vec<u8> {
    let said = format!("{{\"Format\":1,\"Driver\":{drivers}}}\0");
    let words = [19_u32, u32::try_from(said.len()).expect("short"), 1];
    let note = [
        words.map(u32::to_le_bytes).concat(),
        b"NVIDIA Corporation\0\0".to_vec(),
        said.into_bytes(),
    ]
    .concat();
    let names = b"\0.shstrtab\0.note.cuda.fwd_compatibility\0";
    let section = |name: u32, at: usize, size: usize| {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(&name.to_le_bytes());
        bytes[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&(size as u64).to_le_bytes());
        bytes
    };
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.resize(64, 0);
    let table = 64 + note.len() + names.len();
    header[40..48].copy_from_slice(&(table as u64).to_le_bytes());
    for (at, value) in [(58, 64_u8), (60, 3), (62, 1)] {
        header[at] = value;
    }
    let sections = [
        vec![0; 64],
        section(1, 64 + note.len(), names.len()),
        section(11, 64, note.len()),
    ]
    .concat();
    [header, note, names.to_vec(), sections].concat()
}

/// Return a library whose strings are at address 0x1000 and at offset 0x200 in the file.
fn named(soname: &str) -> Vec<u8> {
    let mut bytes = vec![0_u8; 0x200];
    let mut put = |at: usize, value: u64, length: usize| bytes[at..at + length].copy_from_slice(&value.to_le_bytes()[..length]);
    for (at, value, length) in [
        (0, 0x0001_0102_464c_457f, 8),
        (16, 3, 2),
        (18, 62, 2),
        (32, 64, 8),
        (54, 56, 2),
        (56, 2, 2),
    ] {
        put(at, value, length);
    }
    for (at, [kind, offset, address, length]) in [(64, [1, 0x200, 0x1000, 0x100]), (120, [2, 0x180, 0x180, 48])] {
        put(at, kind, 4);
        put(at + 8, offset, 8);
        put(at + 16, address, 8);
        put(at + 32, length, 8);
    }
    for (at, tag, value) in [(0x180, 5, 0x1000), (0x190, 14, 1), (0x1a0, 0, 0)] {
        put(at, tag, 8);
        put(at + 8, value, 8);
    }
    [bytes, b"\0".to_vec(), soname.as_bytes().to_vec(), vec![0; 300]].concat()
}

/// Rules: a name that becomes a link's name does not lead elsewhere, and it is in the file.
fn soname(bytes: &[u8]) -> bool {
    let name = "libcuda.so.550.54.15";
    let size = bytes.len() as u64;
    let read = Cell::new(0);
    let found = soname::soname(name, size, |at, length| {
        read.set(read.get() + length);
        let at = usize::try_from(at).expect("in memory");
        Ok::<_, ()>(bytes[at..at + length].to_vec())
    });
    assert!(read.get() <= 64 + 2 * 64 * 1024 + 255, "{} bytes were read", read.get());
    let found = found.expect("reading does not fail");
    if let Some(found) = &found {
        assert!(
            found.starts_with("libcuda.so") && !found.contains('/') && found != name,
            "{found}"
        );
        assert!(bytes.windows(found.len()).any(|part| part == found.as_bytes()));
    }
    found.is_some() && ldcache::flags_of(bytes).is_some()
}

/// Rules: nothing is read beyond the end, and only a little is read of a file of any size.
fn library(bytes: &[u8]) -> bool {
    for size in [bytes.len() as u64, u64::MAX] {
        let read = Cell::new(0);
        let drivers = compat::drivers(size, |at, length| {
            read.set(read.get() + length);
            assert!(at.checked_add(length as u64).is_some_and(|end| end <= size), "{at} {length}");
            let mut part = vec![0; length];
            if let Some(there) = usize::try_from(at).ok().and_then(|at| bytes.get(at..)) {
                let there = &there[..there.len().min(length)];
                part[..there.len()].copy_from_slice(there);
            }
            Ok::<_, ()>(part)
        });
        assert!(read.get() <= 64 + 3 * 64 * 1024, "{} bytes were read", read.get());
        let drivers = drivers.expect("reading does not fail");
        if size != u64::MAX && drivers.is_none() {
            return false;
        }
        for driver in drivers.iter().flatten() {
            assert!(compat::is_wanted("1.2", drivers.as_deref(), &format!("{driver}.1")));
        }
    }
    true
}

/// The input consists of two JSON texts, one after the other.
fn hook(bytes: &[u8]) -> bool {
    let Some((state, config)) = text(bytes).and_then(|text| text.split_once("} {")) else {
        return false;
    };
    let Ok(state) = state::OciState::parse(format!("{state}}}").as_bytes()) else {
        return false;
    };
    assert!(state.bundle().is_none_or(|bundle| !bundle.is_empty()));
    let Ok(config) = state::HookConfig::parse(format!("{{{config}").as_bytes()) else {
        return false;
    };
    for path in &config.mounts {
        if let Some(stem) = libraries::stem(path) {
            assert!(path.starts_with(stem) && !path.contains('/'), "{path}");
        }
    }
    let gpus = config.devices.iter().filter(|path| path.starts_with("/dev/nvidia")).count();
    if let Some(profile) = profile::text(&config.devices) {
        let mask = profile.split("0x").nth(1).and_then(|rest| rest.split(']').next());
        let mask = mask.and_then(|mask| u128::from_str_radix(mask, 16).ok()).expect("a mask");
        assert!(mask != 0 && mask.count_ones() as usize <= gpus, "{profile}");
    }
    true
}

/// Rules: exactly the line that allows changes is replaced by one that forbids them, and a text that forbids them is not changed again.
fn parameters(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let Some(after) = params::forbidding(text) else { return false };
    assert_eq!(params::forbidding(&after), None, "{after}");
    let changed = text.lines().zip(after.lines()).filter(|(before, after)| before != after);
    assert!(changed.clone().count() > 0 && changed.clone().all(|(_, after)| after == "ModifyDeviceFiles: 0"));
    assert_eq!(text.lines().count(), after.lines().count());
    true
}

/// Rules: the existing lines stay at the front, and the added ones are there once.
fn musl(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let after = libraries::musl_list(Some(text), &["/new", "/lib", "/new"]);
    assert!(after.starts_with(text.trim_end()), "{after}");
    let directories: Vec<&str> = after.split([':', '\n']).collect();
    assert!(directories.contains(&"/new") && directories.contains(&"/lib"));
    assert_eq!(libraries::musl_list(Some(&after), &["/new", "/lib"]), after);
    true
}

/// Rules: a requirement about an unknown fact is satisfied, one satisfied alternative is enough, and an error is one line of bounded length.
fn requirements(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let mut word = || {
        words
            .next()
            .filter(|word| !word.is_empty() && *word != "-")
            .map(str::to_owned)
    };
    let facts = RequirementFacts {
        driver: word(),
        cuda: word(),
        arch: word(),
        brand: word(),
    };
    let expressions: Vec<String> = lines.map(str::to_owned).collect();
    let found = require::check(&expressions, &facts);
    if let Err(error) = &found {
        let said = error.to_string();
        assert!(
            said.chars().count() < 1000 + text.len() && !said.chars().any(char::is_control),
            "{said:?}"
        );
    }
    let of_nobody = require::check(&expressions, &RequirementFacts::default());
    assert!(
        !matches!(of_nobody, Err(RequirementError::Unsatisfied { .. })),
        "{of_nobody:?}"
    );
    assert_eq!(
        matches!(of_nobody, Err(RequirementError::Expression(_))),
        matches!(found, Err(RequirementError::Expression(_))),
        "{found:?}"
    );
    let others: Vec<String> = expressions.iter().map(|all| format!("{all} driver>=0")).collect();
    assert!(!matches!(
        require::check(&others, &facts),
        Err(RequirementError::Unsatisfied { .. })
    ));
    for expression in &expressions {
        let alone = require::check(std::slice::from_ref(expression), &facts);
        assert!(alone.is_ok() || found.is_err(), "{expression}");
    }
    !matches!(found, Err(RequirementError::Expression(_)))
}

/// Rule: only a command that creates a container has a bundle, and the bundle is one of the arguments.
fn call(bytes: &[u8]) -> bool {
    let words: Vec<OsString> = bytes
        .split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect();
    let Ok(call) = RuntimeCall::parse(&words) else { return false };
    assert!(call.creates || call.bundle.is_none(), "{call:?}");
    for said in [&call.bundle, &call.log].into_iter().flatten() {
        let said = said.as_encoded_bytes();
        assert!(words.iter().any(|word| word.as_encoded_bytes().ends_with(said)), "{call:?}");
    }
    true
}

/// The first line has the new settings, the rest is the file. Rules: a valid file remains valid, a second edit changes nothing, and comments
/// stay.
fn edited(bytes: &[u8]) -> bool {
    let Some((option, before)) = text(bytes).and_then(|text| text.split_once('\n')) else {
        return false;
    };
    let options = [option.to_owned()];
    let Ok(after) = edit::set(before, &options) else {
        return false;
    };
    if OciRuntimeSettings::parse(before).is_ok() {
        OciRuntimeSettings::parse(&after).expect("it is as good as before");
    }
    assert_eq!(edit::set(&after, &options).expect("it can be set again"), after);
    let comments = |text: &str| text.lines().filter(|line| line.trim_start().starts_with("# ")).count();
    assert!(comments(before) <= comments(&after) + 1, "{after}");
    true
}

/// Rule: each name is one that reads back the same.
fn asked(bytes: &[u8]) -> bool {
    let Ok(all) = serde_json::from_slice::<BTreeMap<String, String>>(bytes) else {
        return false;
    };
    match annotations::requested(&all) {
        Ok(devices) => {
            for device in &devices {
                assert_eq!(device.to_string().parse().as_ref(), Ok(device));
            }
            !devices.is_empty()
        }
        Err((key, error)) => {
            assert!(all.contains_key(&key) && !error.to_string().is_empty());
            false
        }
    }
}
