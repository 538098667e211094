//! Throws broken files at everything that reads files of others, for a while: `cargo run --release -p divvy-container --example fuzz -- 60 [SEED]`.
//!
//! The inputs are good files that are changed by chance (bytes, cuts, doubled pieces, words of the formats), and changed files that were read all
//! the same are changed further. It needs no nightly compiler, as cargo-fuzz does, and sees no coverage; what a seed finds it finds again. An input
//! that breaks a rule is written to a file and named, and the exit status is 1.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::exit,
    reason = "a program for a terminal"
)]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use divvy_container::cdi::generate::ldcache::{self, Library};
use divvy_container::cdi::{Edits, Format, Hook, Spec};
use divvy_container::engines::{Plan, Target as Files, Wish, configure, undo};
use divvy_container::runtime::bundle::{Bundle, Device};
use divvy_container::runtime::plan::Asked;
use divvy_container::runtime::settings::{Mode, Settings};
use divvy_container::runtime::{legacy, request};
use serde_json::Value;

/// Reads an input, and says whether it was good. Panics if a rule does not hold.
type Target = fn(&[u8]) -> bool;

const TARGETS: [(&str, Target, &[&str]); 7] = [
    ("config.toml", settings, &[TOML]),
    ("config.json", bundle, &[CONFIG]),
    ("CDI spec", spec, &[SPEC, YAML]),
    ("ld.so.cache", cache, &[]),
    ("daemon.json", docker, &[DAEMON]),
    ("containerd's config.toml", containerd, &[CONTAINERD, CONTAINERD_3]),
    ("crio.conf", crio, &[CRIO]),
];

const TOML: &str = r#"accept-nvidia-visible-devices-as-volume-mounts = true
supported-driver-capabilities = "compute,utility"
swarm-resource = "A,B"
[nvidia-container-cli]
environment = ["A=b"]
ldconfig = "@/sbin/ldconfig"
load-kmods = true
[nvidia-container-runtime]
mode = "auto"
runtimes = ["runc", "crun"]
[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
"#;
const CONFIG: &str = r#"{"ociVersion":"1.2.0","process":{"user":{"uid":0,"gid":1,"additionalGids":[5]},"env":["PATH=/bin","NVIDIA_VISIBLE_DEVICES=0,GPU-a,all","CUDA_VERSION=9.0"],"capabilities":{"bounding":["CAP_SYS_ADMIN"]}},"root":{"path":"rootfs"},"mounts":[{"destination":"/var/run/nvidia-container-devices/cdi/nvidia.com/gpu=0","source":"/dev/null"}],"annotations":{"cdi.k8s.io/x":"nvidia.com/gpu=1"},"hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook"}]},"linux":{"devices":[{"path":"/dev/x","major":1.0e0}],"resources":{"devices":[{"allow":false}]}}}"#;
const SPEC: &str = r#"{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","annotations":{"a":"b"},"devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","major":195,"permissions":"rw"}],"env":["A=b"],"mounts":[{"hostPath":"/a","containerPath":"/b","options":["ro"]}],"hooks":[{"hookName":"prestart","path":"/h","timeout":3}],"additionalGids":[44]}}]}"#;
const YAML: &str = "---\ncdiVersion: 0.5.0\nkind: v.com/c\ndevices:\n- &a\n  name: \"0\"\n  containerEdits:\n    env: [A=1, 'B=2', 0666]\n    deviceNodes:\n    - path: /dev/x\n      fileMode: 0666\n- name: b\n  containerEdits: {env: [C=d]}\n";
const DAEMON: &str = "{\n  \"runtimes\": {\"nvidia\": {\"path\": \"/a\", \"runtimeArgs\": [\"-x\"]}},\n  \"default-runtime\": \"nvidia\",\n  \"features\": {\"cdi\": true},\n  \"exec-opts\": [\"native.cgroupdriver=systemd\"]\n}\n";
const CONTAINERD: &str = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n# a comment\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = 'runc' # another\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\noptions = { SystemdCgroup = true, BinaryName = \"\"\"runc\"\"\" }\n";
const CONTAINERD_3: &str = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nSystemdCgroup = false\n";
const CRIO: &str = "[crio]\n[crio.runtime]\ndefault_runtime = \"crun\"\ncgroup_manager = \"systemd\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\nallowed_annotations = [\"a\"]\n";
/// What a format makes something of.
const WORDS: [&str; 24] = [
    "null",
    "{}",
    "[]",
    "\"",
    "\\u0000",
    "\\ud800",
    "1e999",
    "-0",
    "18446744073709551616",
    "true",
    "&a ",
    "*a",
    "<<: *a",
    "!!binary ",
    "- ",
    ": ",
    "|\n",
    "'''",
    "\n",
    "=",
    "[[",
    "..",
    "\u{202e}",
    "all,none,void",
];

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn settings(bytes: &[u8]) -> bool {
    text(bytes).is_some_and(|text| Settings::parse(text).is_ok())
}

fn look(_: &str) -> Result<Device, String> {
    Ok(Device {
        kind: 'c',
        major: 1,
        minor: 3,
        mode: 0o666,
    })
}

/// What can be read can be edited, and is then what can be read.
fn bundle(bytes: &[u8]) -> bool {
    let Some(mut bundle) = text(bytes).and_then(|text| Bundle::parse(text).ok()) else {
        return false;
    };
    let Ok(container) = bundle.container() else { return true };
    for mode in [Mode::Auto, Mode::Cdi, Mode::JitCdi, Mode::Legacy, Mode::Divvy] {
        let settings = Settings {
            mode,
            accept_mounts: true,
            accept_environment: true,
            ..Settings::default()
        };
        let _ = Asked::of(&container, &settings);
        let wanted = request::Request::of(&container, &settings).wanted;
        let words = legacy::words(&container, &wanted, &settings, "@/sbin/ldconfig");
        assert!(
            words
                .iter()
                .flatten()
                .all(|word| word.starts_with("--") || word == "configure")
        );
    }
    let edits = Edits {
        env: vec!["A=b".to_owned()],
        hooks: vec![Hook {
            hook_name: "prestart".to_owned(),
            path: "/h".to_owned(),
            ..Hook::default()
        }],
        ..Edits::default()
    };
    if bundle.remove_legacy_hooks().and_then(|_| bundle.apply(&edits, look)).is_ok() {
        let again = Bundle::parse(&bundle.text()).and_then(|bundle| bundle.container());
        assert!(again.is_ok_and(|container| container.variable("A") == Some("b")));
    }
    true
}

/// What can be read is printed so that the same is read, but for the last bit of fractions, which only keys have that nobody knows.
fn spec(bytes: &[u8]) -> bool {
    let Some(spec) = text(bytes).and_then(|text| Spec::parse(text).ok()) else {
        return false;
    };
    let _ = spec.problems();
    for format in [Format::Json, Format::Yaml] {
        let printed = spec.print(format);
        let again = Spec::parse(&printed).expect("what was printed can be read");
        assert_eq!(without_fractions(&again), without_fractions(&spec), "{printed}");
    }
    true
}

fn without_fractions(spec: &Spec) -> Value {
    fn clear(value: &mut Value) {
        match value {
            Value::Number(number) if number.is_f64() => *value = Value::Null,
            Value::Array(list) => list.iter_mut().for_each(clear),
            Value::Object(object) => object.values_mut().for_each(clear),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(spec).expect("a spec is JSON");
    clear(&mut value);
    value
}

/// What can be read is written so that the same is read, and what is added is there.
fn cache(bytes: &[u8]) -> bool {
    let Ok(before) = ldcache::parse(bytes) else { return false };
    let added = Library {
        name: "libcuda.so.1",
        path: "/usr/lib64/libcuda.so.1",
        flags: 0x0303,
        os_version: 0,
        hwcap: 0,
    };
    if let Ok(written) = ldcache::with(Some(bytes), &[added]) {
        let after = ldcache::parse(&written).expect("what was written is a cache");
        assert!(
            after.contains(&added)
                && before.iter().all(|library| after
                    .iter()
                    .any(|other| (other.name, other.path) == (library.name, library.path)))
        );
        assert_eq!(ldcache::with(Some(&written), &[added]).as_deref(), Ok(&*written));
    }
    true
}

fn docker(bytes: &[u8]) -> bool {
    let config = "/etc/docker/daemon.json".to_owned();
    edited(bytes, &Files::Docker { config })
}

fn containerd(bytes: &[u8]) -> bool {
    let target = Files::Containerd {
        config: "/etc/containerd/config.toml".to_owned(),
        drop_in: Some("/etc/containerd/conf.d/zz-divvy.toml".to_owned()),
        merge: None,
        version: 2,
    };
    edited(bytes, &target)
}

fn crio(bytes: &[u8]) -> bool {
    let target = Files::Crio {
        config: "/etc/crio/crio.conf".to_owned(),
        drop_in: None,
    };
    edited(bytes, &target)
}

/// What can be edited is not edited a second time, and is given back to the byte.
fn edited(bytes: &[u8], target: &Files) -> bool {
    let Some(text) = text(bytes) else { return false };
    let before = BTreeMap::from([(target.config().to_owned(), text.to_owned())]);
    let wish = Wish {
        name: "nvidia".to_owned(),
        path: "/usr/bin/divvy-runtime".to_owned(),
        set_default: Some(true),
        cdi: Some(true),
        systemd_cgroup: None,
        anew: false,
    };
    let Ok(plan) = configure(&before, target, &wish, None) else {
        return false;
    };
    let mut files = before.clone();
    carry_out(&mut files, &plan);
    let record = plan.record.unwrap_or_default();
    let again = configure(&files, target, &wish, Some(&record)).expect("what was written can be read");
    assert_eq!(again.edits, [], "a second run changes nothing");
    let undone = undo(&files, target, &wish.name, Some(&record)).expect("undone");
    carry_out(&mut files, &undone);
    assert_eq!(files, before, "undone to the byte");
    true
}

fn carry_out(files: &mut BTreeMap<String, String>, plan: &Plan) {
    for edit in &plan.edits {
        match &edit.after {
            Some(text) => files.insert(edit.path.clone(), text.clone()),
            None => files.remove(&edit.path),
        };
    }
}

/// xorshift64*
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap_or(0) % end.max(1)
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len());
        match self.below(8) {
            0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            1 if !input.is_empty() => input[at] = [0, 1, 0x7f, 0xff, b'"', b'\n', b' ', b'9'][self.below(8)],
            2 => input.truncate(at),
            3 => {
                let end = (at + self.below(40)).min(input.len());
                input.drain(at.min(end)..end);
            }
            4 => {
                let end = (at + self.below(60)).min(input.len());
                let piece = input[at.min(end)..end].to_vec();
                let to = self.below(input.len());
                input.splice(to..to, piece);
            }
            5 if input.len() >= 4 => {
                let at = at.min(input.len() - 4);
                let number = [0, 1, u32::MAX, 0x7fff_ffff, u32::try_from(input.len()).unwrap_or(0)][self.below(5)];
                input[at..at + 4].copy_from_slice(&number.to_le_bytes());
            }
            _ => {
                let word = WORDS[self.below(WORDS.len())];
                input.splice(at..at, word.bytes());
            }
        }
    }
}

fn main() {
    let mut words = std::env::args().skip(1);
    let number = |word: Option<String>, default: u64| word.map_or(Ok(default), |word| word.parse());
    let (Ok(seconds), Ok(seed)) = (number(words.next(), 10), number(words.next(), 1)) else {
        eprintln!("fuzz [SECONDS [SEED]]: for how long (all targets at once), and where chance begins (1)");
        std::process::exit(2);
    };
    std::panic::set_hook(Box::new(|_| {}));
    let targets: Vec<_> = TARGETS
        .into_iter()
        .map(|target| thread::spawn(move || fuzz(target, Duration::from_secs(seconds), seed)))
        .collect();
    let mut broken = false;
    for target in targets {
        match target
            .join()
            .unwrap_or_else(|_| Err("a target ended before its time".to_owned()))
        {
            Ok(line) => println!("{line} (seed {seed}, {seconds} s)"),
            Err(line) => {
                eprintln!("{line}");
                broken = true;
            }
        }
    }
    std::process::exit(i32::from(broken));
}

/// What was found, as a line: all targets at once.
fn fuzz((name, target, good): (&str, Target, &[&str]), time: Duration, seed: u64) -> Result<String, String> {
    let mut corpus: Vec<Vec<u8>> = good.iter().map(|text| text.as_bytes().to_vec()).collect();
    if corpus.is_empty() {
        let libraries = ["libc.so.6", "libcuda.so.1", "libz.so.1.2"].map(|name| Library {
            name,
            path: "/usr/lib/x",
            flags: 0x0303,
            os_version: 0,
            hwcap: 1 << 62,
        });
        corpus.push(ldcache::with(None, &libraries).expect("a cache"));
        // A real one has extensions, too.
        corpus.extend(std::fs::read("/etc/ld.so.cache").ok());
    }
    for (number, input) in corpus.iter().enumerate() {
        if !target(input) {
            return Err(format!("{name}: good input {number} is refused"));
        }
    }
    let (mut chance, mut read, mut refused) = (Chance(seed.max(1)), 0_u64, 0_u64);
    let end = Instant::now() + time;
    while Instant::now() < end {
        let mut input = corpus[chance.below(corpus.len())].clone();
        for _ in 0..=chance.below(4) {
            chance.change(&mut input);
        }
        match catch_unwind(AssertUnwindSafe(|| target(&input))) {
            Ok(false) => refused += 1,
            Ok(true) => {
                read += 1;
                if corpus.len() < 200 && input.len() < 1 << 16 {
                    corpus.push(input);
                }
            }
            Err(cause) => {
                let path = std::env::temp_dir().join(format!("divvy-fuzz-{}-{}", std::process::id(), name.len()));
                let kept = std::fs::write(&path, &input);
                let cause = cause
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| cause.downcast_ref().copied());
                let cause = cause.unwrap_or("a panic");
                return Err(format!("{name}: {} breaks a rule ({kept:?}): {cause}", path.display()));
            }
        }
    }
    Ok(format!("{name}: {read} inputs read, {refused} refused, no rule broken"))
}
