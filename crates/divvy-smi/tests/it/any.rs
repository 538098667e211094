//! What any values do to the table.

use divvy_smi::{
    Ecc, Instances, MigEngines, ProcessPod, ProcessType, Reading, Smi, SmiComputeMode, SmiGpu, SmiMemory, SmiMigDevice,
    SmiProcess, table,
};
use proptest::prelude::*;

fn reading<T: std::fmt::Debug + Clone + 'static>(value: impl Strategy<Value = T> + 'static) -> impl Strategy<Value = Reading<T>> {
    prop_oneof![4 => value.prop_map(Reading::Value), 1 => Just(Reading::Absent), 1 => Just(Reading::Failed)]
}

fn memory() -> impl Strategy<Value = Reading<SmiMemory>> {
    reading((any::<u64>(), any::<u64>()).prop_map(|(used, total)| SmiMemory { used, total }))
}

fn mig_device() -> impl Strategy<Value = SmiMigDevice> {
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>());
    let values = (
        memory(),
        memory(),
        reading(any::<u32>()),
        reading(any::<u64>()),
        reading(
            any::<[u32; 5]>().prop_map(|[copy, encoders, decoders, ofa, jpeg]| MigEngines {
                copy,
                encoders,
                decoders,
                ofa,
                jpeg,
            }),
        ),
    );
    (numbers, values).prop_map(
        |((index, gi, ci), (memory, bar1, multiprocessors, uncorrected_ecc, engines))| SmiMigDevice {
            index,
            uuid: String::new(),
            gi,
            ci,
            memory,
            bar1,
            multiprocessors,
            uncorrected_ecc,
            engines,
        },
    )
}

fn gpu() -> impl Strategy<Value = SmiGpu> {
    let number = || reading(any::<u32>());
    let ecc = prop_oneof![Just(Ecc::Off), Just(Ecc::On), any::<u64>().prop_map(Ecc::Uncorrected)];
    let mode = prop_oneof![Just(SmiComputeMode::Prohibited), Just(SmiComputeMode::ExclusiveThread)];
    let names = (
        any::<u32>(),
        reading(".*"),
        ".*",
        reading(any::<bool>()),
        reading(any::<bool>()),
        reading(ecc),
        prop::option::weighted(0.2, ".*"),
    );
    let values = (number(), number(), number(), number(), number(), memory(), number());
    let mig = (
        reading(mode),
        reading(any::<bool>()),
        prop::collection::vec(mig_device(), 0..3),
    );
    (names, values, mig).prop_map(|(names, values, mig)| {
        let (index, name, bus, persistence, display, ecc, no_handle) = names;
        let (fan, temperature, performance, power, power_limit, memory, utilization) = values;
        let (compute_mode, mig, mig_devices) = mig;
        SmiGpu {
            index,
            uuid: String::new(),
            name,
            persistence,
            bus,
            display,
            ecc,
            fan,
            temperature,
            performance,
            power,
            power_limit,
            memory,
            utilization,
            compute_mode,
            mig,
            mig_devices,
            error: None,
            no_handle,
        }
    })
}

fn process() -> impl Strategy<Value = SmiProcess> {
    let kind = prop_oneof![
        Just(ProcessType::Compute),
        Just(ProcessType::Graphics),
        Just(ProcessType::Both),
        Just(ProcessType::Mps)
    ];
    let text = || prop::option::of(".*");
    let owner = (".*", text(), text(), prop::collection::vec(".*", 0..3));
    let owner = owner.prop_map(|(uid, namespace, name, containers)| ProcessPod {
        uid,
        namespace,
        name,
        containers,
    });
    let instances = any::<(u32, u32)>().prop_map(|(gi, ci)| Instances { gi, ci });
    let numbers = (any::<u32>(), prop::option::of(instances), any::<u32>());
    let values = (kind, ".*", prop::option::of(any::<u64>()), prop::option::of(owner));
    (numbers, values).prop_map(|((gpu, instances, pid), (kind, name, memory, pod))| SmiProcess {
        gpu,
        instances,
        pid,
        kind,
        name,
        memory,
        pod,
    })
}

fn smi() -> impl Strategy<Value = Smi> {
    let driver = prop_oneof![
        3 => (400u32..700).prop_map(|branch| format!("{branch}.1.2")),
        1 => ".*"
    ];
    let lists = (prop::collection::vec(gpu(), 0..3), prop::collection::vec(process(), 0..4));
    (driver, prop::option::of(".*"), lists).prop_map(|(driver, cuda, (gpus, processes))| Smi {
        time: "Fri Mar 11 12:53:49 2022".to_owned(),
        driver,
        cuda,
        gpus,
        processes,
    })
}

proptest! {
    #[test]
    fn every_line_has_the_same_width_and_only_printable_characters(smi in smi()) {
        let table = table(&smi);
        let mut lines = table.lines();
        let without = smi.gpus.iter().filter(|gpu| gpu.no_handle.is_some()).count();
        for line in lines.by_ref().take(without) {
            prop_assert!(line.starts_with("Unable to determine the device handle for GPU"), "{}", line);
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{}", line);
        }
        if without > 0 && without == smi.gpus.len() {
            prop_assert_eq!(lines.collect::<Vec<_>>(), ["", ""]);
            return Ok(());
        }
        let mut lines = lines.skip(1);
        let width = lines.next().expect("the first rule").len();
        prop_assert!([79, 89, 91].contains(&width));
        for line in lines.filter(|line| !line.trim_end().is_empty()) {
            prop_assert_eq!(line.len(), width, "{}", line);
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{}", line);
        }
    }
}

fn owned(pid: u32, pod: Option<(&str, &str)>, containers: &[&str]) -> SmiProcess {
    SmiProcess {
        pid,
        name: "python3".to_owned(),
        memory: Some(1),
        pod: Some(ProcessPod {
            uid: "0b1f6d3e-5a4c-4f52-9d4e-1c2b3a495867".to_owned(),
            namespace: pod.map(|(namespace, _)| namespace.to_owned()),
            name: pod.map(|(_, name)| name.to_owned()),
            containers: containers.iter().map(|name| (*name).to_owned()).collect(),
        }),
        ..SmiProcess::default()
    }
}

/// Pods without a record are listed by UID.
#[test]
fn pods_are_listed_below_the_processes() {
    let long = "a".repeat(60);
    let smi = |driver: &str| Smi {
        driver: driver.to_owned(),
        processes: vec![
            owned(985, Some(("research", "trainer-0")), &["main"]),
            SmiProcess {
                pid: 986,
                ..SmiProcess::default()
            },
            owned(987, None, &[]),
            owned(988, Some(("team", &long)), &["a", "b"]),
            owned(989, Some(("team", "notebook")), &[]),
        ],
        ..Smi::default()
    };
    let pods = |driver: &str| {
        let table = table(&smi(driver));
        let (_, pods) = table.split_once("| Pods:").expect("a list of pods");
        pods.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>()
    };
    let narrow = "\
|  GPU   GI   CI        PID   Namespace/Pod/Container                         |
|        ID   ID                                                              |
|=============================================================================|
|    0   N/A  N/A       985   research/trainer-0/main                         |
|    0   N/A  N/A       987   UID 0b1f6d3e-5a4c-4f52-9d4e-1c2b3a495867        |
|    0   N/A  N/A       988   ...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/a,b |
|    0   N/A  N/A       989   team/notebook                                   |
+-----------------------------------------------------------------------------+
";
    assert_eq!(pods("470.82.01"), narrow);
    let wide = "\
|  GPU   GI   CI              PID   Namespace/Pod/Container                               |
|        ID   ID                                                                          |
|=========================================================================================|
|    0   N/A  N/A             985   research/trainer-0/main                               |
|    0   N/A  N/A             987   UID 0b1f6d3e-5a4c-4f52-9d4e-1c2b3a495867              |
|    0   N/A  N/A             988   ...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/a,b |
|    0   N/A  N/A             989   team/notebook                                         |
+-----------------------------------------------------------------------------------------+
";
    assert_eq!(pods("580.82.07"), wide);
}

#[test]
fn without_processes_of_pods_there_is_no_list_of_pods() {
    let smi = Smi {
        processes: vec![SmiProcess::default()],
        ..Smi::default()
    };
    assert!(!table(&smi).contains("Pods:"));
}

#[test]
fn in_json_what_was_not_read_is_null() {
    let gpu = SmiGpu {
        name: Reading::Value("NVIDIA T4".to_owned()),
        fan: Reading::Failed,
        ..SmiGpu::default()
    };
    let value = serde_json::to_value(&gpu).expect("JSON");
    let fields = ["name", "fan", "ecc"].map(|field| value[field].clone());
    assert_eq!(fields, ["NVIDIA T4".into(), serde_json::Value::Null, serde_json::Value::Null]);
}
