//! What `/metrics` and `/metrics/dcgm` say about GPUs and containers.

use super::*;

/// Return the value of a series, if the text has it.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(line.parse().unwrap_or_else(|error| panic!("{series} {line}: {error}")))
}

/// Wait until the page has what `find` returns.
async fn until<T>(bed: &Bed, path: &str, find: impl Fn(&str) -> Option<T>) -> T {
    let ask = async {
        loop {
            let (_, text) = bed.get(path).await.expect("served");
            match find(&text) {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, ask).await.expect("in time")
}

/// The labels of the container.
const ONE: &str = "{namespace=\"default\",pod=\"a\",container=\"main\",uuid=\"GPU-0\"}";

#[tokio::test]
async fn metrics_show_a_containers_use_until_it_ends() {
    let mut bed = Bed::new(&[16384, 15109]).await;
    bed.memory_is(30, 30).await;
    let uid = bed.create("a", Some(0), 3);
    bed.running("a").await;
    bed.machine.send_modify(|machine| {
        machine.process_of = Some(uid.clone());
        machine.busy = Some((uid.clone(), 50));
        machine.gauges = vec![
            json!({"uuid": "GPU-0", "values": {
                "memory": {"total": 17_179_869_184_u64, "used": 419_430_400, "free": 16_760_438_784_u64},
                "gpuPercent": 70, "powerMilliwatts": 61_500, "energyMillijoules": 7_000, "temperatureCelsius": 41,
                "smClockMHz": 1410, "clocksEventReasons": 8,
            }}),
            json!({"uuid": "GPU-1", "values": {}, "error": "the GPU is lost"}),
        ];
        machine.xids = vec![(0, 31), (0, 31), (0, 13)];
    });
    let series = |name: &str| format!("divvy_container_gpu_{name}{ONE}");
    let text = until(&bed, "/metrics", |text| {
        let busy = value(text, &series("busy_seconds_total"))?;
        let used = value(text, &series("memory_used_bytes"))?;
        (busy > 0.2 && used > 0.0 && value(text, "divvy_gpu_power_watts{uuid=\"GPU-0\"}").is_some()).then(|| text.to_owned())
    })
    .await;
    for (series, expected) in [
        (series("memory_limit_bytes"), 3_221_225_472.0),
        (series("memory_used_bytes"), 314_572_800.0),
        (series("memory_peak_bytes"), 314_572_800.0),
        ("divvy_gpu_memory_bytes{uuid=\"GPU-0\"}".to_owned(), 17_179_869_184.0),
        ("divvy_gpu_memory_used_bytes{uuid=\"GPU-0\"}".to_owned(), 419_430_400.0),
        ("divvy_gpu_busy_ratio{uuid=\"GPU-0\"}".to_owned(), 0.7),
        ("divvy_gpu_power_watts{uuid=\"GPU-0\"}".to_owned(), 61.5),
        ("divvy_gpu_energy_joules_total{uuid=\"GPU-0\"}".to_owned(), 7.0),
        (
            "divvy_gpu_temperature_celsius{uuid=\"GPU-0\",sensor=\"gpu\"}".to_owned(),
            41.0,
        ),
        ("divvy_gpu_clock_hertz{uuid=\"GPU-0\",domain=\"sm\"}".to_owned(), 1.41e9),
        (
            "divvy_gpu_throttled{uuid=\"GPU-0\",reason=\"hardware_slowdown\"}".to_owned(),
            1.0,
        ),
        ("divvy_gpu_throttled{uuid=\"GPU-0\",reason=\"power_cap\"}".to_owned(), 0.0),
        ("divvy_gpu_xid_errors_total{uuid=\"GPU-0\",xid=\"31\"}".to_owned(), 2.0),
        ("divvy_gpu_allocated_bytes{uuid=\"GPU-0\"}".to_owned(), 3_221_225_472.0),
        ("divvy_gpu_allocated_bytes{uuid=\"GPU-1\"}".to_owned(), 0.0),
    ] {
        assert_eq!(value(&text, &series), Some(expected), "{series}: {text}");
    }
    // What the driver does not return is absent, and so is all that it cannot return of a lost GPU.
    for absent in [
        "divvy_gpu_sm_active_ratio",
        "sensor=\"memory\"",
        "divvy_gpu_power_watts{uuid=\"GPU-1\"}",
    ] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    let of = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let usage = of(&until(&bed, "/v1/usage", |usage| usage.contains("busyNs").then(|| usage.to_owned())).await);
    let (container, gpu) = (&usage["containers"][0], &usage["gpus"][0]);
    for (found, expected) in [
        (&container["pod"], json!("a")),
        (&container["container"], json!("main")),
        (&container["uid"], json!(uid)),
        (&container["gpu"], json!("GPU-0")),
        (&container["limitBytes"], json!(3_221_225_472_u64)),
        (&container["usedBytes"], json!(314_572_800)),
        (&container["peakBytes"], json!(314_572_800)),
        (&gpu["uuid"], json!("GPU-0")),
        (&gpu["memoryBytes"], json!(17_179_869_184_u64)),
        (&gpu["usedBytes"], json!(419_430_400)),
        (&gpu["busyPercent"], json!(70)),
        (&gpu["powerMilliwatts"], json!(61_500)),
        (&gpu["temperatureCelsius"], json!(41)),
        (&gpu["smClockMHz"], json!(1410)),
        (&gpu["smActiveMillionths"], Value::Null),
        (&usage["gpus"][1], json!({"uuid": "GPU-1", "error": "the GPU is lost"})),
    ] {
        assert_eq!(*found, expected, "{usage}");
    }
    let (status, text) = bed.get("/metrics/dcgm").await.expect("served");
    assert!(status == 404 && text.contains("--dcgm-metrics"), "{status} {text}");

    // A driver that does not measure leaves no value behind.
    bed.machine
        .send_modify(|machine| machine.refuses_samples = Some("not on this GPU".to_owned()));
    until(&bed, "/metrics", |text| {
        (!text.contains("_busy_seconds_total{")).then_some(())
    })
    .await;

    let options = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    bed.api.delete("pods", "default", "a", &options).expect("deleted");
    // A reader of /v1/usage does not take away the last numbers of a container, which the metrics show once more.
    let usage = until(&bed, "/v1/usage", |usage| {
        usage.contains("\"containers\":[]").then(|| usage.to_owned())
    })
    .await;
    assert_eq!(of(&usage)["v"], json!(1));
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert_eq!(value(&text, &series("memory_limit_bytes")), Some(3_221_225_472.0), "{text}");
    until(&bed, "/metrics", |text| {
        (!text.contains("divvy_container_gpu_")).then_some(())
    })
    .await;
    // Nothing changes any more, so a reader who has this sample gets no body.
    let address = bed.config.metrics.expect("an address");
    let (head, _) = exchange(address, "/v1/usage", "").await.expect("served");
    let tag = |head: &str| head.lines().find_map(|line| Some(line.strip_prefix("etag: ")?.to_owned()));
    let first = tag(&head).expect("a tag");
    let (head, body) = exchange(address, "/v1/usage", &format!("if-none-match: {first}\r\n"))
        .await
        .expect("served");
    assert!(head.starts_with("HTTP/1.1 304 ") && body.is_empty(), "{head} {body}");
    assert_eq!(tag(&head), Some(first));
    bed.stop_agent().await;
}

/// The GPU has only the series that a MIG device cannot have.
#[tokio::test]
async fn a_mig_device_has_its_own_series() {
    let mut bed = Bed::new(&[16384, 40960]).await;
    bed.stop_agent().await;
    mig::make_capabilities(&bed);
    bed.config.mig_strategy = divvy_agent::MigStrategyArg::Mixed;
    bed.config.dcgm_metrics = true;
    bed.start_agent();
    mig::divide(&bed, &[mig::device(0, 7), mig::device(1, 8)]);
    bed.memory_is(24, 24).await;
    let uid = bed.create_on("a", Some("MIG-8".to_owned()), 3);
    bed.running("a").await;
    let memory = |used: u64| json!({"total": 5_u64 << 30, "used": used, "free": 4_u64 << 30});
    let gpm = json!({"graphicsActive": 250_000, "smActive": 125_000});
    bed.machine.send_modify(|machine| {
        machine.process_of = Some(uid.clone());
        machine.process_on = Some("MIG-8".to_owned());
        machine.refuses_samples = Some("not on MIG devices".to_owned());
        machine.gauges = vec![
            json!({"uuid": "GPU-0", "values": {"gpuPercent": 70, "gpm": {"graphicsActive": 710_000, "smActive": 500_000}}}),
            json!({"uuid": "GPU-1", "values": {"memory": memory(3 << 30), "powerMilliwatts": 61_500, "gpm": gpm}, "parts": [
                {"uuid": "MIG-7", "gpuInstance": 7, "memory": memory(1 << 30)},
                {"uuid": "MIG-8", "gpuInstance": 8, "memory": memory(2 << 30), "gpm": gpm},
            ]}),
        ];
    });
    let of_container = "{namespace=\"default\",pod=\"a\",container=\"main\",uuid=\"MIG-8\"}";
    let used = format!("divvy_container_gpu_memory_used_bytes{of_container}");
    let text = until(&bed, "/metrics", |text| {
        let is_there = value(text, &used).is_some_and(|used| used > 0.0) && text.contains("divvy_gpu_power_watts");
        is_there.then(|| text.to_owned())
    })
    .await;
    for (series, expected) in [
        (used.as_str(), 314_572_800.0),
        (
            &format!("divvy_container_gpu_memory_limit_bytes{of_container}"),
            3_221_225_472.0,
        ),
        ("divvy_gpu_memory_bytes{uuid=\"MIG-7\"}", 5_368_709_120.0),
        ("divvy_gpu_memory_used_bytes{uuid=\"MIG-7\"}", 1_073_741_824.0),
        ("divvy_gpu_memory_used_bytes{uuid=\"MIG-8\"}", 2_147_483_648.0),
        ("divvy_gpu_sm_active_ratio{uuid=\"MIG-8\"}", 0.125),
        ("divvy_gpu_sm_active_ratio{uuid=\"GPU-0\"}", 0.5),
        ("divvy_gpu_busy_ratio{uuid=\"GPU-0\"}", 0.7),
        ("divvy_gpu_busy_ratio{uuid=\"MIG-8\",source=\"gpm\"}", 0.25),
        ("divvy_gpu_power_watts{uuid=\"GPU-1\"}", 61.5),
    ] {
        assert_eq!(value(&text, series), Some(expected), "{series}: {text}");
    }
    // Nothing is counted twice, and what the driver does not measure is absent.
    for absent in [
        "divvy_gpu_memory_bytes{uuid=\"GPU-1\"",
        "divvy_gpu_memory_used_bytes{uuid=\"GPU-1\"",
        "divvy_gpu_busy_ratio{uuid=\"GPU-1\"",
        "divvy_gpu_busy_ratio{uuid=\"MIG-7\"",
        "divvy_gpu_sm_active_ratio{uuid=\"GPU-1\"",
        "divvy_container_gpu_busy_seconds_total{",
    ] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    let (_, usage) = bed.get("/v1/usage").await.expect("served");
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let entries = usage["gpus"].as_array().expect("a list").iter().map(|gpu| {
        json!([
            gpu["uuid"],
            gpu["memoryBytes"],
            gpu["usedBytes"],
            gpu["busyPercent"],
            gpu["powerMilliwatts"]
        ])
    });
    // GPM measures how busy a MIG device is, and a GPU that is divided. The driver's utilization comes first.
    let expected = [
        json!(["GPU-0", null, null, 70, null]),
        json!(["GPU-1", 5_u64 << 30, 3_u64 << 30, 25, 61_500]),
        json!(["MIG-7", 5_u64 << 30, 1_u64 << 30, null, null]),
        json!(["MIG-8", 5_u64 << 30, 2_u64 << 30, 25, null]),
    ];
    assert!(entries.eq(expected), "{usage}");
    let (_, text) = bed.get("/metrics/dcgm").await.expect("served");
    let of_instance = |number: u32, of_pod: &str| {
        format!(
            "{{gpu=\"1\",UUID=\"GPU-1\",pci_bus_id=\"\",device=\"nvidia1\",modelName=\"NVIDIA T4\",GPU_I_PROFILE=\"1g.5gb\",GPU_I_ID=\"{number}\",\
             Hostname=\"n1\",hostname=\"n1\",DCGM_FI_DRIVER_VERSION=\"550.54.15\"{of_pod}}}"
        )
    };
    let of_pod = ",container=\"main\",namespace=\"default\",pod=\"a\"";
    for (series, expected) in [
        (format!("DCGM_FI_DEV_FB_USED{}", of_instance(7, "")), 1024.0),
        (format!("DCGM_FI_DEV_FB_USED{}", of_instance(8, of_pod)), 300.0),
        (format!("DCGM_FI_PROF_GR_ENGINE_ACTIVE{}", of_instance(8, "")), 0.25),
    ] {
        assert_eq!(value(&text, &series), Some(expected), "{series}: {text}");
    }
    // The driver says nothing about the utilization of MIG devices.
    assert_eq!(text.matches("DCGM_FI_DEV_GPU_UTIL{").count(), 1, "{text}");
    bed.stop_agent().await;
}

/// Metrics of a shared GPU name its containers; metrics of any other GPU name only the GPU.
#[tokio::test]
async fn dcgm_names_show_containers_or_else_the_gpu() {
    let mut bed = Bed::new(&[16384, 15109]).await;
    bed.stop_agent().await;
    bed.config.dcgm_metrics = true;
    bed.start_agent();
    bed.memory_is(30, 30).await;
    let uid = bed.create("a", Some(0), 3);
    bed.running("a").await;
    let memory = json!({"total": 17_179_869_184_u64, "used": 419_430_400, "free": 16_760_438_784_u64});
    bed.machine.send_modify(|machine| {
        machine.process_of = Some(uid.clone());
        let gauges = |uuid| json!({"uuid": uuid, "values": {"memory": memory, "powerMilliwatts": 61_500, "gpuPercent": 70}});
        machine.gauges = vec![gauges("GPU-0"), gauges("GPU-1")];
        machine.xids = vec![(1, 31)];
    });
    let text = until(&bed, "/metrics/dcgm", |text| {
        (text.contains("DCGM_FI_DEV_FB_USED{") && text.contains("pod=\"a\"} 300\n") && text.contains("} 31\n"))
            .then(|| text.to_owned())
    })
    .await;
    let of_gpu = |index: u32| {
        format!(
            "gpu=\"{index}\",UUID=\"GPU-{index}\",pci_bus_id=\"\",device=\"nvidia{index}\",modelName=\"NVIDIA T4\",Hostname=\"n1\",hostname=\"n1\",\
             DCGM_FI_DRIVER_VERSION=\"550.54.15\""
        )
    };
    let (first, second) = (of_gpu(0), of_gpu(1));
    let of_pod = format!("{first},container=\"main\",namespace=\"default\",pod=\"a\"");
    for (series, expected) in [
        (format!("DCGM_FI_DEV_FB_USED{{{of_pod}}}"), 300.0),
        (format!("DCGM_FI_DEV_FB_USED{{{second}}}"), 400.0),
        (format!("DCGM_FI_DEV_GPU_UTIL{{{second}}}"), 70.0),
        (format!("DCGM_FI_DEV_POWER_USAGE{{{first}}}"), 61.5),
        (format!("DCGM_FI_DEV_XID_ERRORS{{{first}}}"), 0.0),
        (format!("DCGM_FI_DEV_XID_ERRORS{{{second}}}"), 31.0),
    ] {
        assert_eq!(value(&text, &series), Some(expected), "{series}: {text}");
    }
    // Nothing is counted twice, and what the driver does not return is absent.
    for absent in [
        &format!("_FB_USED{{{first}}}"),
        &format!("_GPU_UTIL{{{first}}}"),
        "_PROF_",
        "_GPU_TEMP",
    ] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    assert!(text.contains("\n# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"), "{text}");
    bed.stop_agent().await;
}

#[tokio::test]
async fn only_the_metrics_that_are_allowed_are_served() {
    let mut bed = Bed::new(&[16384, 15109]).await;
    bed.stop_agent().await;
    bed.config.dcgm_metrics = true;
    bed.config.metrics_allow =
        "divvy_gpu_info, divvy_agent_steering_misses_total,divvy_container_gpu_allocated_byte_seconds_total,divvy_agent_pre_start_duration_seconds,\
         divvy_agent_probe_up,DCGM_FI_DEV_GPU_UTIL"
            .to_owned();
    bed.start_agent();
    bed.memory_is(30, 30).await;
    bed.create("a", Some(0), 3);
    bed.running("a").await;
    bed.machine.send_modify(|machine| {
        machine.gauges = vec![json!({"uuid": "GPU-1", "values": {"gpuPercent": 70, "temperatureCelsius": 41}})]
    });
    let families = |text: &str| -> Vec<String> {
        let names = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort_unstable();
        names
    };
    let text = until(&bed, "/metrics", |text| {
        text.contains("byte_seconds").then(|| text.to_owned())
    })
    .await;
    let expected = [
        "divvy_agent_pre_start_duration_seconds",
        "divvy_agent_probe_up",
        "divvy_agent_steering_misses",
        "divvy_container_gpu_allocated_byte_seconds",
        "divvy_gpu_info",
    ];
    let without_suffix = |name: String| name.strip_suffix("_total").map_or(name.clone(), str::to_owned);
    let found: Vec<String> = families(&text).into_iter().map(without_suffix).collect();
    assert_eq!(found, expected, "{text}");
    let text = until(&bed, "/metrics/dcgm", |text| {
        text.contains("GPU_UTIL{").then(|| text.to_owned())
    })
    .await;
    assert_eq!(families(&text), ["DCGM_FI_DEV_GPU_UTIL"], "{text}");
    bed.stop_agent().await;
}
