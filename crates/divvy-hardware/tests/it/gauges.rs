//! What the driver measures of GPUs, through the probe's socket.

use std::path::Path;

use divvy_hardware::GpuGauges;
use serde_json::{Map, Value, json};

use crate::support::{
    GPU0, GPU1, Library, Lines, Machine, Running, TWO, connect, eventually, fast, listen, sim_library, snapshot,
};

/// An H100 with all that the driver measures, and a T4 in the state that the description says.
fn described() -> String {
    let rows = "{ correctable = 1, uncorrectable = 2, pending = true, failure = false }";
    let health = format!("health = {{ ecc_errors = [7, 3], remapped_rows = {rows}, clocks_event_reasons = 72 }}");
    let hopper = format!("cc = \"9.0\"\nsms = 132\nclock_mhz = 1980\nutilization = 40\n{health}\nprocesses = ");
    TWO.replacen("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", 1)
        .replacen("processes = ", &hopper, 1)
}

/// What is measured of the H100 without GPU Performance Monitoring, if a test sets nothing. The energy changes.
fn first() -> Map<String, Value> {
    let values = json!({
        "memory": {"total": 40960_u64 << 20, "used": 510 << 20, "reserved": 0, "free": 40450_u64 << 20},
        "gpuPercent": 40, "memoryPercent": 0, "encoderPercent": 0, "decoderPercent": 0,
        "powerMilliwatts": 132 * (400 + 26 * 40), "temperatureCelsius": 35, "memoryTemperatureCelsius": 43,
        "smClockMHz": 1980, "memoryClockMHz": 1215, "pcieReplays": 0,
        "correctedEcc": 7, "uncorrectedEcc": 3, "correctedEccAggregate": 7, "uncorrectedEccAggregate": 3,
        "remappedRows": {"correctable": 1, "uncorrectable": 2, "pending": true, "failure": false},
        "clocksEventReasons": 72, "performanceState": 0, "powerLimitMilliwatts": 132 * 3000, "displayActive": false, "eccEnabled": true,
        "persistence": true, "computeMode": "default",
    });
    values.as_object().expect("an object").clone()
}

struct Bed {
    machine: Machine,
    _probe: Running,
    client: Lines,
}

impl Bed {
    fn new(description: &str) -> Bed {
        Bed::with(Machine::new(description), sim_library())
    }

    /// A probe that has read the GPUs once, with another library.
    fn with(machine: Machine, library: &Path) -> Bed {
        let probe = listen(&machine, library);
        let mut client = Lines::new(connect(&machine.path("s")));
        client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
        Bed {
            machine,
            _probe: probe,
            client,
        }
    }

    fn ask(&mut self) -> Vec<Value> {
        let answer = self.client.ask("{\"v\":1,\"id\":2,\"op\":\"metrics\"}");
        let gpus: Vec<GpuGauges> =
            serde_json::from_value(answer["ok"].clone()).unwrap_or_else(|error| panic!("{error}: {answer}"));
        GpuGauges::validate(&gpus).expect("the client accepts it");
        answer["ok"].as_array().expect("a list").clone()
    }

    /// Return the values of the first GPU without those that depend on the time of the question.
    fn values(&mut self) -> Map<String, Value> {
        let gpu = self.ask().swap_remove(0);
        assert_eq!((&gpu["uuid"], &gpu["error"]), (&json!(GPU0), &Value::Null));
        let mut values = gpu["values"].as_object().expect("values").clone();
        values.retain(|name, _| name != "energyMillijoules" && name != "gpm");
        values
    }

    fn set(&self, gauges: &Value) {
        self.machine.control(&json!({"op": "gauges", "gpu": 0, "gauges": gauges}));
    }

    /// How many samples of GPU Performance Monitoring the probe has, and ever had.
    fn samples(&self) -> (u64, u64) {
        let state = self.machine.control(&json!({"op": "state"}));
        let of = |index: usize| state["state"]["gpm_samples"][index].as_u64().expect("a number");
        (of(0), of(1))
    }

    /// Ask until the probe has compared two samples. Return the result.
    fn gpm(&mut self) -> Value {
        let before = self.samples().1.max(1);
        let mut gpm = Value::Null;
        eventually("another sample", || {
            gpm = self.ask()[0]["values"]["gpm"].clone();
            self.samples().1 > before
        });
        assert_eq!(self.samples().0, 1, "only the latest sample is kept");
        gpm
    }
}

#[test]
fn the_probe_answers_what_the_driver_measures() {
    let mut bed = Bed::new(&described());
    assert_eq!(Value::from(bed.values()), Value::from(first()));
    let other = bed.ask().swap_remove(1);
    let values = other["values"].as_object().expect("values");
    // A T4 has no sensor in its memory and no GPU Performance Monitoring, and its memory clock, ECC, and so on are not described.
    let energy = values["energyMillijoules"].as_u64().expect("a number");
    let expected = json!({
        "memory": {"total": 15360_u64 << 20, "used": 0, "reserved": 0, "free": 15360_u64 << 20},
        "gpuPercent": 90, "memoryPercent": 0, "encoderPercent": 0, "decoderPercent": 0,
        "powerMilliwatts": 40 * (400 + 26 * 90), "energyMillijoules": energy, "temperatureCelsius": 60,
        "smClockMHz": 1590, "pcieReplays": 0, "performanceState": 0, "powerLimitMilliwatts": 40 * 3000, "displayActive": false,
        "persistence": true, "computeMode": "default",
    });
    assert_eq!(other, json!({"uuid": GPU1, "values": expected}));

    bed.set(&json!({
        "reserved_mib": 450, "memory_percent": 21, "encoder_percent": 22, "decoder_percent": 23, "power_milliwatts": 654_321,
        "energy_millijoules": u64::MAX, "memory_celsius": 61, "sm_clock_mhz": 1755, "memory_clock_mhz": 2619, "pcie_replays": 5,
        "ecc_aggregate": [70, 30], "fan_percent": 104, "performance_state": 12, "power_limit_milliwatts": 700_000,
        "display_active": true, "ecc_off": true, "persistence_off": true, "compute_mode": 3,
    }));
    let gpu = bed.ask().swap_remove(0);
    assert_eq!(gpu["values"]["energyMillijoules"], u64::MAX);
    let mut expected = first();
    let changed = json!({
        "memory": {"total": 40960_u64 << 20, "used": 510 << 20, "reserved": 450 << 20, "free": 40000_u64 << 20},
        "memoryPercent": 21, "encoderPercent": 22, "decoderPercent": 23, "powerMilliwatts": 654_321, "memoryTemperatureCelsius": 61,
        "smClockMHz": 1755, "memoryClockMHz": 2619, "pcieReplays": 5, "correctedEccAggregate": 70, "uncorrectedEccAggregate": 30,
        "fanPercent": 104, "performanceState": 12, "powerLimitMilliwatts": 700_000, "displayActive": true, "eccEnabled": false,
        "persistence": false, "computeMode": "exclusive-process",
    });
    expected.extend(changed.as_object().expect("an object").clone());
    assert_eq!(Value::from(bed.values()), Value::from(expected));
}

#[test]
fn energy_grows_with_time() {
    let mut bed = Bed::new(TWO);
    let mut energy = || bed.ask()[0]["values"]["energyMillijoules"].as_u64().expect("a number");
    let before = energy();
    eventually("more energy", || energy() > before);
}

#[test]
fn performance_monitoring_compares_two_samples_and_keeps_one() {
    let mut bed = Bed::new(&described());
    assert_eq!(
        bed.ask()[0]["values"].get("gpm"),
        None,
        "the first question has one sample only"
    );
    assert_eq!(bed.samples(), (1, 1));
    let gpm = json!({
        "graphicsActive": 400_000, "smActive": 360_000, "smOccupancy": 200_000, "tensorActive": 240_000, "dramActive": 160_000,
        "fp64Active": 0, "fp32Active": 100_000, "fp16Active": 50_000, "pcieTxBytes": 320_u64 << 20, "pcieRxBytes": 640_u64 << 20,
    });
    assert_eq!(bed.gpm(), gpm);
    // Values that no GPU can have, and one that the driver does not return.
    bed.set(&json!({"gpm": {"1": null, "2": -0.5, "3": 100.1, "5": 1e300, "10": 12.5, "20": -1, "21": null}}));
    let left = json!({"dramActive": 125_000, "fp64Active": 0, "fp32Active": 100_000, "fp16Active": 50_000});
    assert_eq!(bed.gpm(), left);
    // NVML_ERROR_NOT_SUPPORTED.
    bed.set(&json!({"errors": {"nvmlGpmMetricsGet": 3}}));
    assert_eq!(bed.gpm(), Value::Null);
    bed.set(&json!({"errors": {"nvmlGpmMetricsGet": 15}}));
    eventually("the loss of the GPU", || bed.ask()[0].get("error").is_some());
}

/// What is absent if one of these functions is missing.
const FUNCTIONS: [(&str, &[&str]); 24] = [
    ("nvmlDeviceGetUtilizationRates", &["gpuPercent", "memoryPercent"]),
    ("nvmlDeviceGetEncoderUtilization", &["encoderPercent"]),
    ("nvmlDeviceGetDecoderUtilization", &["decoderPercent"]),
    ("nvmlDeviceGetPowerUsage", &["powerMilliwatts"]),
    ("nvmlDeviceGetTotalEnergyConsumption", &["energyMillijoules"]),
    ("nvmlDeviceGetTemperature", &["temperatureCelsius"]),
    ("nvmlDeviceGetFieldValues", &["memoryTemperatureCelsius"]),
    ("nvmlDeviceGetClockInfo", &["smClockMHz", "memoryClockMHz"]),
    ("nvmlDeviceGetPcieReplayCounter", &["pcieReplays"]),
    (
        "nvmlDeviceGetTotalEccErrors",
        &[
            "correctedEcc",
            "uncorrectedEcc",
            "correctedEccAggregate",
            "uncorrectedEccAggregate",
        ],
    ),
    ("nvmlDeviceGetRemappedRows", &["remappedRows"]),
    // The older name of the same function is enough.
    ("nvmlDeviceGetCurrentClocksEventReasons", &[]),
    // The GPU has no fan.
    ("nvmlDeviceGetFanSpeed_v2", &[]),
    ("nvmlDeviceGetPerformanceState", &["performanceState"]),
    // One of the two limits is enough.
    ("nvmlDeviceGetEnforcedPowerLimit", &[]),
    ("nvmlDeviceGetPowerManagementLimit", &[]),
    ("nvmlDeviceGetDisplayActive", &["displayActive"]),
    ("nvmlDeviceGetEccMode", &["eccEnabled"]),
    ("nvmlDeviceGetPersistenceMode", &["persistence"]),
    ("nvmlDeviceGetComputeMode", &["computeMode"]),
    ("nvmlGpmSampleAlloc", &[]),
    ("nvmlGpmSampleGet", &[]),
    ("nvmlGpmSampleFree", &[]),
    ("nvmlGpmQueryDeviceSupport", &[]),
];

#[test]
fn a_function_that_the_driver_lacks_costs_only_its_own_values() {
    let complete: Vec<String> = first()
        .into_iter()
        .map(|(name, _)| name)
        .chain(["energyMillijoules".to_owned()])
        .collect();
    for (function, absent) in FUNCTIONS {
        let machine = Machine::new(&described());
        let library = Library::new(&machine);
        library.hide(function, true);
        let mut bed = Bed::with(machine, &library.path);
        for gpu in bed.ask() {
            assert_eq!(gpu.get("error"), None, "without {function}: {gpu}");
        }
        let gpu = bed.ask().swap_remove(0);
        let missing: Vec<&String> = complete
            .iter()
            .filter(|name| gpu["values"].get(name.as_str()).is_none())
            .collect();
        let mut expected = absent.to_vec();
        expected.sort_by_key(|name| complete.iter().position(|other| other == name));
        assert_eq!(missing, expected, "without {function}");
        let samples = u64::from(!function.starts_with("nvmlGpm"));
        assert_eq!(bed.samples(), (samples, samples), "without {function}");
    }
}

#[test]
fn the_calls_first_version_counts_reserved_memory_as_used() {
    let machine = Machine::new(&described());
    let library = Library::new(&machine);
    library.hide("nvmlDeviceGetMemoryInfo_v2", true);
    let mut bed = Bed::with(machine, &library.path);
    bed.set(&json!({"reserved_mib": 450}));
    let memory = json!({"total": 40960_u64 << 20, "used": 960 << 20, "free": 40000_u64 << 20});
    assert_eq!(bed.values()["memory"], memory);
}

/// The loss of the GPU is reported.
#[test]
fn a_refused_call_costs_only_its_own_values() {
    let mut bed = Bed::new(&described());
    let functions = [
        ("nvmlDeviceGetPowerUsage", &["powerMilliwatts"][..]),
        ("nvmlDeviceGetFieldValues", &["memoryTemperatureCelsius"]),
        ("nvmlDeviceGetClockInfo", &["smClockMHz", "memoryClockMHz"]),
        ("nvmlGpmSampleGet", &[]),
    ];
    // NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_UNKNOWN.
    for error in [3, 4, 999] {
        let errors: Map<String, Value> = functions.iter().map(|(name, _)| ((*name).to_owned(), error.into())).collect();
        bed.set(&json!({ "errors": errors }));
        let mut expected = first();
        for name in functions.iter().flat_map(|(_, values)| *values) {
            expected.remove(*name);
        }
        assert_eq!(Value::from(bed.values()), Value::from(expected), "error {error}");
        let failed = bed.ask()[0].get("failed").cloned();
        assert_eq!(failed, (error != 3).then(|| json!(["power"])), "error {error}");
    }
    // The GPU is lost between two calls. (The test of GPU Performance Monitoring loses it there.)
    for (function, values) in functions.into_iter().filter(|(_, values)| !values.is_empty()) {
        bed.set(&json!({"errors": {function: 15}}));
        let gpus = bed.ask();
        let is_there = |name: &&&str| gpus[0]["values"].get(**name).is_some();
        assert_eq!(values.iter().find(is_there), None, "{function}");
        assert_eq!(
            (&gpus[0]["uuid"], &gpus[0]["values"]["gpuPercent"]),
            (&json!(GPU0), &json!(40))
        );
        assert!(
            gpus[0]["error"]
                .as_str()
                .is_some_and(|error| error.contains("fell off the bus")),
            "{function}: {gpus:?}"
        );
        assert_eq!((&gpus[1]["values"]["gpuPercent"], gpus[1].get("error")), (&json!(90), None));
    }
    bed.set(&json!({}));
    assert_eq!(Value::from(bed.values()), Value::from(first()));
    // NVML no longer says the UUID.
    bed.machine.control(&json!({"op": "lost", "gpu": 0, "lost": true}));
    let gpus = bed.ask();
    assert_eq!((&gpus[0]["uuid"], &gpus[0]["values"]), (&json!(GPU0), &json!({})));
    assert!(
        gpus[0]["error"]
            .as_str()
            .is_some_and(|error| error.contains("fell off the bus")),
        "{gpus:?}"
    );
    assert_eq!(
        (&gpus[1]["uuid"], &gpus[1]["values"]["gpuPercent"]),
        (&json!(GPU1), &json!(90))
    );
}

#[test]
fn a_driver_before_525_has_no_gpu_performance_monitoring() {
    let mut bed = Bed::new(&described().replace("550.54.15", "515.65.01"));
    assert_eq!(Value::from(bed.values()), Value::from(first()));
    assert_eq!(bed.samples(), (0, 0));
}

#[test]
fn gpus_that_are_divided_have_what_nvml_measures_of_them() {
    let device = |gi: u32| format!("{{ gpu_instance = {gi}, compute_instance = 0, profile = 0 }}");
    let devices = (7..14).map(device).collect::<Vec<_>>().join(", ");
    let gpu = format!(
        "[[node.gpu]]\nmodel = \"NVIDIA H100 80GB HBM3\"\nmemory_mib = 81920\ncc = \"9.0\"\nutilization = 40\n\
         health = {{ ecc_errors = [0, 1], remapped_rows = {{}} }}\nmig = [{devices}]\n"
    );
    let mut bed = Bed::new(&format!("v = 1\n[[node]]\nname = \"n\"\n{}", gpu.repeat(8)));
    let gpus = bed.ask();
    assert_eq!(gpus.len(), 8, "the MIG devices have no entries of their own");
    for gpu in gpus {
        assert!(gpu["uuid"].as_str().is_some_and(|uuid| uuid.starts_with("GPU-")), "{gpu}");
        assert_eq!(gpu.get("error"), None);
        let names: Vec<&String> = gpu["values"].as_object().expect("values").keys().collect();
        // nvml.h: the utilization of the GPU, of its encoders and decoders, and the remapped rows are not supported on GPUs with MIG.
        let expected = [
            "computeMode",
            "correctedEcc",
            "correctedEccAggregate",
            "displayActive",
            "eccEnabled",
            "energyMillijoules",
            "memory",
            "memoryTemperatureCelsius",
            "pcieReplays",
            "performanceState",
            "persistence",
            "powerLimitMilliwatts",
            "powerMilliwatts",
            "smClockMHz",
            "temperatureCelsius",
            "uncorrectedEcc",
            "uncorrectedEccAggregate",
        ];
        let mut names: Vec<&str> = names.into_iter().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, expected);
    }
    bed.machine
        .control(&json!({"op": "memory", "gpu": 1, "pid": 7, "used_mib": 100, "mig": 2}));
    let parts = bed.ask()[1]["parts"].clone();
    let of = |at: usize| (parts[at]["memory"]["used"].clone(), parts[at]["memory"]["total"].clone());
    let total = 9728_u64 << 20;
    assert_eq!((of(1), of(2)), ((0.into(), total.into()), ((100 << 20).into(), total.into())));
    assert_eq!(
        (&parts[2]["bar1"]["total"], &parts[2]["uncorrectedEcc"]),
        (&json!(16384_u64 << 20), &json!(0))
    );
    assert_eq!(parts.as_array().map(Vec::len), Some(7));
}

#[test]
fn a_mig_device_has_its_gpu_instances_performance_if_unshared() {
    let gpu = |cc: &str| {
        format!(
            "[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 81920\ncc = \"{cc}\"\nutilization = 40\nmig = [{}]\n",
            "{ gpu_instance = 7, compute_instance = 0, profile = 0 }, { gpu_instance = 2, compute_instance = 0, profile = 1 }, \
             { gpu_instance = 2, compute_instance = 1, profile = 1 }"
        )
    };
    let mut bed = Bed::new(&format!("v = 1\n[[node]]\nname = \"n\"\n{}{}", gpu("9.0"), gpu("8.0")));
    bed.set(&json!({"instance_gpm": {"7": {"1": 25, "2": null, "3": 100.1}}}));
    let gpm = |gpus: &[Value], gpu: usize, part: usize| gpus[gpu]["parts"][part].get("gpm").cloned();
    let mut gpus = bed.ask();
    let instances: Vec<&Value> = (0..3).map(|part| &gpus[0]["parts"][part]["gpuInstance"]).collect();
    assert_eq!(instances, [&json!(7), &json!(2), &json!(2)]);
    assert_eq!(gpm(&gpus, 0, 0), None, "the first question has one sample only");
    let taken = bed.samples();
    assert_eq!(taken, (2, 2), "of the GPU, and of the GPU instance that is not shared");
    eventually("a comparison", || {
        gpus = bed.ask();
        gpm(&gpus, 0, 0).is_some()
    });
    assert_eq!(bed.samples().0, 2, "only the latest samples are kept");
    let expected = json!({
        "graphicsActive": 250_000, "tensorActive": 240_000, "dramActive": 160_000,
        "fp64Active": 0, "fp32Active": 100_000, "fp16Active": 50_000, "pcieTxBytes": 320_u64 << 20, "pcieRxBytes": 640_u64 << 20,
    });
    assert_eq!(gpm(&gpus, 0, 0), Some(expected));
    for (gpu, part) in [(0, 1), (0, 2), (1, 0), (1, 1)] {
        assert_eq!(gpm(&gpus, gpu, part), None, "MIG device {part} of GPU {gpu}");
        assert!(gpus[gpu]["parts"][part]["memory"]["total"].is_u64(), "{gpus:?}");
    }
    // A GPU that is put together again needs no samples of its instances.
    bed.machine.control(&json!({"op": "mig", "gpu": 0, "devices": null}));
    bed.ask();
    assert_eq!(bed.samples().0, 1);
}

#[test]
fn unsampled_gpu_instances_lack_only_their_performance() {
    let machine = Machine::new(
        "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 81920\ncc = \"9.0\"\nutilization = 40\n\
         mig = [{ gpu_instance = 7, compute_instance = 0, profile = 0 }]\n",
    );
    let library = Library::new(&machine);
    library.hide("nvmlGpmMigSampleGet", true);
    let mut bed = Bed::with(machine, &library.path);
    let mut gpus = bed.ask();
    eventually("the performance of the GPU", || {
        gpus = bed.ask();
        gpus[0]["values"].get("gpm").is_some()
    });
    let part = &gpus[0]["parts"][0];
    assert_eq!((gpus[0].get("error"), part.get("gpm")), (None, None));
    assert!(part["memory"]["total"].is_u64(), "{part}");
}

#[tokio::test]
async fn the_client_asks_and_reads_the_answer() {
    let machine = Machine::new(&described());
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", |_| true).await;
    let gpus = client.handle().metrics().await.expect("measurements");
    let found: Vec<_> = gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.values.gpu_percent)).collect();
    assert_eq!(found, [(GPU0, Some(40)), (GPU1, Some(90))]);
}
