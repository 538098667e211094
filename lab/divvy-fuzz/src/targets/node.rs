//! Input on a node: engines' files, CDI specs, OCI bundles, the loader's cache, the kubelet's checkpoint, and the probe's lines.

use std::collections::BTreeMap;

use divvy_cdi::generate::ldcache::{self, CachedLibrary};
use divvy_cdi::{Edits, Hook, ProblemSeverity, Spec, SpecFormat};
use divvy_engines::{EditPlan, EngineTarget, RuntimeSettings, configure, undo};
use divvy_hardware::protocol::{self, FromProbe, RawAnswer};
use divvy_hardware::{GpuGauges, Snapshot};
use divvy_kubelet::checkpoint::Checkpoint;
use divvy_oci::runtime::bundle::{Bundle, HostDevice, NoDevice};
use divvy_oci::runtime::plan::DecidedRequest;
use divvy_oci::runtime::settings::{OciRuntimeSettings, RuntimeMode};
use divvy_oci::runtime::{extras, legacy, request, require};
use serde_json::Value;

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget::new("config.toml", settings, &[TOML]),
        FuzzTarget::new("config.json", bundle, &[CONFIG]),
        FuzzTarget::new("CDI spec", spec, &[SPEC, YAML]).refusing(&[OCTAL]),
        FuzzTarget {
            accepted: caches(),
            ..FuzzTarget::new("ld.so.cache", cache, &[])
        },
        FuzzTarget::new("daemon.json", docker, &[DAEMON]),
        FuzzTarget::new("containerd's config.toml", containerd, &[CONTAINERD, CONTAINERD_3]),
        FuzzTarget::new("crio.conf", crio, &[CRIO]),
        FuzzTarget::new(
            "what engines say of their configuration",
            said,
            &[CONTAINERD, CONTAINERD_3, CRIO],
        ),
        FuzzTarget::new("the kubelet's checkpoint", checkpoint, &[CHECKPOINT, OLD_CHECKPOINT]),
        FuzzTarget::new("a line to the probe", question, &[QUESTION]),
        FuzzTarget::new("a line of the probe", line, &[ANSWER, MEASURED, REFUSAL, FAULT]),
    ]
}

pub(crate) const TOML: &str = r#"accept-nvidia-visible-devices-as-volume-mounts = true
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
pub(crate) const SPEC: &str = r#"{"cdiVersion":"0.7.0","kind":"nvidia.com/gpu","annotations":{"a":"b"},"devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","major":195,"permissions":"rw"}],"env":["A=b"],"mounts":[{"hostPath":"/a","containerPath":"/b","options":["ro"]}],"hooks":[{"hookName":"prestart","path":"/h","timeout":3}],"additionalGids":[44]}}]}"#;
pub(crate) const YAML: &str = "---\ncdiVersion: 0.5.0\nkind: v.com/c\ndevices:\n- &a\n  name: \"0\"\n  containerEdits:\n    env: [A=1, 'B=2']\n    deviceNodes:\n    - path: /dev/x\n      fileMode: 0666\n- name: b\n  containerEdits: {env: [C=d]}\n";
/// A variable without a value, which YAML takes for a number.
const OCTAL: &str = "cdiVersion: 0.5.0\nkind: v.com/c\ndevices:\n- name: b\n  containerEdits: {env: [0666]}\n";
pub(crate) const DAEMON: &str = "{\n  \"runtimes\": {\"nvidia\": {\"path\": \"/a\", \"runtimeArgs\": [\"-x\"]}},\n  \"default-runtime\": \"nvidia\",\n  \"features\": {\"cdi\": true},\n  \"exec-opts\": [\"native.cgroupdriver=systemd\"]\n}\n";
pub(crate) const CONTAINERD: &str = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n# a comment\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = 'runc' # another\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\noptions = { SystemdCgroup = true, BinaryName = \"\"\"runc\"\"\" }\n";
const CONTAINERD_3: &str = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nSystemdCgroup = false\n";
pub(crate) const CRIO: &str = "[crio]\n[crio.runtime]\ndefault_runtime = \"crun\"\ncgroup_manager = \"systemd\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\nallowed_annotations = [\"a\"]\n";

fn caches() -> Vec<Vec<u8>> {
    let libraries = ["libc.so.6", "libcuda.so.1", "libz.so.1.2"].map(|name| CachedLibrary {
        name,
        path: "/usr/lib/x",
        flags: 0x0303,
        os_version: 0,
        hwcap: 1 << 62,
    });
    let made = ldcache::with(None, &libraries).expect("a cache");
    // A real cache also has extensions.
    std::iter::once(made).chain(std::fs::read("/etc/ld.so.cache").ok()).collect()
}

fn settings(bytes: &[u8]) -> bool {
    text(bytes).is_some_and(|text| OciRuntimeSettings::parse(text).is_ok())
}

fn refuse(_: &str) -> Result<HostDevice, NoDevice> {
    Ok(HostDevice {
        kind: 'c',
        major: 1,
        minor: 3,
        mode: 0o666,
    })
}

/// Rule: a bundle that was read can be edited, and the result can be read.
fn bundle(bytes: &[u8]) -> bool {
    let Some(mut bundle) = text(bytes).and_then(|text| Bundle::parse(text).ok()) else {
        return false;
    };
    let Ok(container) = bundle.container() else { return false };
    for mode in [
        RuntimeMode::Auto,
        RuntimeMode::Cdi,
        RuntimeMode::JitCdi,
        RuntimeMode::Legacy,
        RuntimeMode::Divvy,
    ] {
        let settings = OciRuntimeSettings {
            mode,
            accept_mounts: true,
            accept_environment: Some(true),
            ..OciRuntimeSettings::default()
        };
        let _ = DecidedRequest::of(&container, &settings);
        if let Ok((_, ignored)) = extras::extras(&container, &settings) {
            assert!(ignored.iter().all(|sentence| !sentence.is_empty()));
        }
        if let Ok(expressions) = require::expressions(&container, &settings) {
            assert!(expressions.len() <= container.env.len() + 1);
        }
        let wanted = request::DeviceRequest::of(&container, &settings).wanted;
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
    let edited = bundle
        .remove_legacy_hooks()
        .and_then(|_| bundle.apply(&edits, refuse))
        .is_ok();
    if edited {
        let again = Bundle::parse(&bundle.text()).and_then(|bundle| bundle.container());
        assert!(again.is_ok_and(|container| container.variable("A") == Some("b")));
    }
    edited
}

/// Rule: a spec is printed so that it reads back the same, except for the last bit of fractions, which only unknown keys have.
fn spec(bytes: &[u8]) -> bool {
    let Some(spec) = text(bytes).and_then(|text| Spec::parse(text).ok()) else {
        return false;
    };
    for problem in spec.problems() {
        let said = problem.to_string();
        assert!(!said.chars().any(char::is_control), "{said:?}");
    }
    for format in [SpecFormat::Json, SpecFormat::Yaml] {
        let printed = spec.print(format);
        let again = Spec::parse(&printed).expect("what was printed can be read");
        assert_eq!(without_fractions(&again), without_fractions(&spec), "{printed}");
    }
    spec.problems()
        .iter()
        .all(|problem| problem.severity != ProblemSeverity::Error)
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

/// Rule: a cache is written so that it reads back the same, with the added entries.
fn cache(bytes: &[u8]) -> bool {
    let Ok(before) = ldcache::parse(bytes) else { return false };
    let added = CachedLibrary {
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
    edited(bytes, &EngineTarget::Docker { config })
}

fn containerd(bytes: &[u8]) -> bool {
    let target = EngineTarget::Containerd {
        config: "/etc/containerd/config.toml".to_owned(),
        drop_in: Some("/etc/containerd/conf.d/zz-divvy.toml".to_owned()),
        merge: None,
        version: 2,
    };
    edited(bytes, &target)
}

fn crio(bytes: &[u8]) -> bool {
    let target = EngineTarget::Crio {
        config: "/etc/crio/crio.conf".to_owned(),
        drop_in: None,
    };
    edited(bytes, &target)
}

/// Rule: values copied from an engine's report are written so that the engine has the wanted settings, whatever else it reports.
fn said(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let settings = RuntimeSettings {
        name: "nvidia".to_owned(),
        path: "/usr/bin/divvy-runtime".to_owned(),
        set_default: Some(true),
        cdi: None,
        systemd_cgroup: None,
        overwrite: true,
        printed: Some(text.to_owned()),
        command: "divvy configure containerd".to_owned(),
    };
    let containerd = EngineTarget::Containerd {
        config: "/etc/containerd/config.toml".to_owned(),
        drop_in: Some("/etc/containerd/conf.d/99-nvidia.toml".to_owned()),
        merge: None,
        version: 2,
    };
    let crio = EngineTarget::Crio {
        config: "/etc/crio/crio.conf".to_owned(),
        drop_in: Some("/etc/crio/crio.conf.d/99-nvidia.toml".to_owned()),
    };
    let mut good = false;
    for target in [containerd, crio] {
        let mut files = BTreeMap::new();
        match configure(&files, &target, &settings, None) {
            Ok(plan) => {
                carry_out(&mut files, &plan);
                let read = target.read(&files).expect("what was written can be read");
                assert_eq!(
                    read.runtimes.get("nvidia").and_then(|runtime| runtime.path.as_deref()),
                    Some(&*settings.path)
                );
                good = true;
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    good
}

/// Rules: an edited file is not edited a second time, and is restored byte for byte.
fn edited(bytes: &[u8], target: &EngineTarget) -> bool {
    let Some(text) = text(bytes) else { return false };
    let before = BTreeMap::from([(target.config().to_owned(), text.to_owned())]);
    let settings = RuntimeSettings {
        name: "nvidia".to_owned(),
        path: "/usr/bin/divvy-runtime".to_owned(),
        set_default: Some(true),
        cdi: Some(true),
        systemd_cgroup: None,
        overwrite: false,
        printed: None,
        command: "divvy configure containerd".to_owned(),
    };
    let Ok(plan) = configure(&before, target, &settings, None) else {
        return false;
    };
    let mut files = before.clone();
    carry_out(&mut files, &plan);
    let record = plan.record.unwrap_or_default();
    let again = configure(&files, target, &settings, Some(&record)).expect("what was written can be read");
    assert_eq!(again.edits, [], "a second run changes nothing");
    let undone = undo(&files, target, &settings.name, Some(&record)).expect("undone");
    carry_out(&mut files, &undone);
    assert_eq!(files, before, "undone to the byte");
    true
}

fn carry_out(files: &mut BTreeMap<String, String>, plan: &EditPlan) {
    for edit in &plan.edits {
        match &edit.after {
            Some(text) => files.insert(edit.path.clone(), text.clone()),
            None => files.remove(&edit.path),
        };
    }
}

pub(crate) const CHECKPOINT: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u-1","ContainerName":"c","ResourceName":"aliyun.com/gpu-mem","DeviceIDs":{"-1":["a-_-0","a-_-1"],"0":["a-_-2"]},"AllocResp":"CgYKAUESAWI="},{"PodUID":"u-2","ContainerName":"c","ResourceName":"r","DeviceIDs":null,"AllocResp":null}],"RegisteredDevices":{"aliyun.com/gpu-mem":["a-_-0"],"r":null}},"Checksum":2254567890}"#;
const OLD_CHECKPOINT: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["a","b"],"AllocResp":""}],"RegisteredDevices":null},"Checksum":0}"#;
const QUESTION: &str = r#"{"v":1,"id":7,"op":"snapshot"}"#;
const ANSWER: &str = r#"{"id":7,"ok":{"v":2,"drivers":{"nvidia":{"version":"550.54.15","cuda":"12.4"},"amd":{"version":""}},"gpus":[{"uuid":"GPU-0","index":0,"minor":0,"pci":"0000:06:00.0","cc":"8.0","totalMiB":15360,"mig":[true,false]},{"vendor":"amd","uuid":"0x1","index":0,"nodes":["dri/card1","dri/renderD128"],"cc":"gfx90a","totalMiB":65520}],"unreadable":[{"vendor":"amd","index":1,"lost":true,"error":"x"}]}}"#;
const MEASURED: &str = r#"{"id":7,"ok":[{"uuid":"GPU-0","values":{"memory":{"total":16106127360,"used":0,"reserved":1,"free":16106127359},"gpuPercent":90,"energyMillijoules":7,"smClockMHz":1590,"remappedRows":{"correctable":1,"uncorrectable":2,"pending":true,"failure":false},"gpm":{"smActive":1000000,"pcieTxBytes":1}}},{"uuid":"GPU-1","error":"lost"}]}"#;
const REFUSAL: &str = r#"{"id":null,"err":{"code":"protocol","text":"the question is not JSON"}}"#;
const FAULT: &str =
    r#"{"event":"fault","seq":1,"vendor":"nvidia","uuid":"GPU-1234","code":79,"fatal":true,"name":"XID 79","partition":[1,0]}"#;

/// Rule: a checkpoint is printed so that it reads back the same.
fn checkpoint(bytes: &[u8]) -> bool {
    let Ok(mut checkpoint) = Checkpoint::parse(bytes) else {
        return false;
    };
    let again = Checkpoint::parse(checkpoint.to_text().as_bytes()).expect("what was printed can be read");
    // Entries that could not be read are not printed.
    let whole = checkpoint.skipped.is_empty();
    checkpoint.skipped.clear();
    assert_eq!(again, checkpoint);
    whole
}

/// Rule: a refusal carries the number of the request if there is one, so that the client can match it.
fn question(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    match protocol::parse_request(text) {
        Ok(request) => {
            assert_eq!(protocol::parse_request(&protocol::request_line(&request)).ok(), Some(request));
            true
        }
        Err((id, failure)) => {
            let value: Option<Value> = serde_json::from_str(text).ok();
            assert_eq!(id, value.and_then(|value| value.get("id")?.as_u64()));
            assert!(!failure.text.is_empty());
            false
        }
    }
}

/// Rule: a line is printed so that it reads back the same.
fn line(bytes: &[u8]) -> bool {
    let Some(read) = text(bytes).and_then(|text| protocol::parse_from_probe(text).ok()) else {
        return false;
    };
    let said = match &read {
        FromProbe::Answer { id, result } => match result.as_ref().map(RawAnswer::read) {
            Ok(Ok(value)) => protocol::answer_line(*id, &Ok(value)),
            Err(failure) => protocol::answer_line(*id, &Err(failure.clone())),
            // The agent returns this error to the function that sent the request.
            Ok(Err(_)) => return false,
        },
        FromProbe::Fault(event) => protocol::event_line(event),
        FromProbe::OtherEvent => return true,
    };
    // Continue as the agent does.
    let mut accepted = true;
    if let FromProbe::Answer { result: Ok(answer), .. } = &read {
        let snapshot = answer.read::<Snapshot>().ok();
        let measured = answer.read::<Vec<GpuGauges>>().ok();
        accepted = snapshot.is_some() || measured.is_some();
        if let Some(snapshot) = snapshot {
            let written = serde_json::to_value(&snapshot).expect("JSON");
            assert_eq!(serde_json::from_value::<Snapshot>(written).ok(), Some(snapshot));
        }
        if let Some(measured) = measured {
            let written = serde_json::to_value(&measured).expect("JSON");
            assert_eq!(serde_json::from_value::<Vec<GpuGauges>>(written).ok(), Some(measured));
        }
    }
    match (protocol::parse_from_probe(&said).expect("what was said can be read"), &read) {
        // Reading shortens texts that are too long, and a shortened text stays the same.
        (again @ FromProbe::Answer { result: Err(_), .. }, _) => assert_eq!(again, read),
        // The last bit of fractions may differ.
        (FromProbe::Answer { id, result: Ok(_) }, FromProbe::Answer { id: asked, .. }) => assert_eq!(id, *asked),
        (again, _) => assert_eq!(again, read),
    }
    accepted
}
