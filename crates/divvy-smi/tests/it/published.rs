//! The table has the bytes of tables that people published.
//!
//! `tables/` has what nvidia-smi printed on their machines, found in public repositories. Some publications lack the time or the spaces at the end of
//! lines; the comparison of those leaves both out.

use divvy_smi::{
    Ecc, Instances, MigEngines, ProcessType, Reading, Smi, SmiComputeMode, SmiGpu, SmiMemory, SmiMigDevice, SmiProcess, table,
};

use Reading::{Absent, Failed, Value};

/// A published table, and the values that it shows.
struct Published {
    /// The name of the table's file.
    name: &'static str,
    smi: Smi,
}

impl Published {
    fn text(&self) -> String {
        let path = format!("{}/tests/it/tables/{}.txt", env!("CARGO_MANIFEST_DIR"), self.name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn with(mut self, processes: Vec<SmiProcess>) -> Published {
        self.smi.processes = processes;
        self
    }
}

fn published(name: &'static str, time: &str, driver: &str, cuda: &str, gpus: Vec<SmiGpu>) -> Published {
    let smi = Smi {
        time: time.to_owned(),
        driver: driver.to_owned(),
        cuda: Some(cuda.to_owned()).filter(|cuda| !cuda.is_empty()),
        gpus,
        processes: Vec::new(),
    };
    Published { name, smi }
}

/// A GPU: whether persistence mode is on; the temperature, performance state, power, and its limit; the memory and its total; the utilization.
fn gpu(
    index: u32,
    name: &str,
    bus: &str,
    persistence: bool,
    [celsius, state, watts, limit]: [u32; 4],
    [used, total]: [u64; 2],
) -> SmiGpu {
    SmiGpu {
        index,
        name: Value(name.to_owned()),
        persistence: Value(persistence),
        bus: bus.to_owned(),
        display: Value(false),
        ecc: Value(Ecc::Uncorrected(0)),
        fan: Absent,
        temperature: Value(celsius),
        performance: Value(state),
        power: Value(watts),
        power_limit: Value(limit),
        memory: Value(SmiMemory { used, total }),
        utilization: Value(0),
        compute_mode: Value(SmiComputeMode::Default),
        mig: Value(false),
        ..SmiGpu::default()
    }
}

/// A GPU with MIG enabled.
fn divided(gpu: SmiGpu, mig_devices: Vec<SmiMigDevice>) -> SmiGpu {
    SmiGpu {
        ecc: Value(Ecc::On),
        utilization: Absent,
        mig: Value(true),
        mig_devices,
        ..gpu
    }
}

/// A GPU without ECC, MIG, and so on, and with a fan.
fn for_games(gpu: SmiGpu, fan: u32, utilization: u32) -> SmiGpu {
    SmiGpu {
        ecc: Absent,
        fan: Value(fan),
        utilization: Value(utilization),
        mig: Absent,
        ..gpu
    }
}

fn part(index: u32, gi: u32, memory: [u64; 2], bar1: [u64; 2], multiprocessors: u32, engines: [u32; 5]) -> SmiMigDevice {
    let memory_of = |[used, total]: [u64; 2]| Value(SmiMemory { used, total });
    SmiMigDevice {
        index,
        gi,
        memory: memory_of(memory),
        bar1: memory_of(bar1),
        multiprocessors: Value(multiprocessors),
        uncorrected_ecc: Value(0),
        engines: Value(MigEngines {
            copy: engines[0],
            encoders: engines[1],
            decoders: engines[2],
            ofa: engines[3],
            jpeg: engines[4],
        }),
        ..SmiMigDevice::default()
    }
}

fn process(gpu: u32, pid: u32, kind: ProcessType, name: &str, mib: u64) -> SmiProcess {
    SmiProcess {
        gpu,
        pid,
        kind,
        name: name.to_owned(),
        memory: Some(mib),
        ..SmiProcess::default()
    }
}

fn on_part(gi: u32, process: SmiProcess) -> SmiProcess {
    SmiProcess {
        instances: Some(Instances { gi, ci: 0 }),
        ..process
    }
}

/// The tables that were published as they were printed.
fn exact() -> Vec<Published> {
    let a100 = gpu(
        0,
        "NVIDIA A100-PCIE-40GB",
        "00000000:61:00.0",
        true,
        [66, 0, 44, 250],
        [0, 40536],
    );
    let games = |index, name: &str, bus: &str, values, memory| gpu(index, name, bus, true, values, memory);
    let mut x = for_games(
        gpu(
            0,
            "NVIDIA GeForce GTX 1650",
            "00000000:01:00.0",
            false,
            [43, 0, 0, 75],
            [319, 4031],
        ),
        30,
        0,
    );
    (x.display, x.power) = (Value(true), Absent);
    let mut first = games(
        0,
        "NVIDIA GeForce GTX 1050 Ti",
        "00000000:03:00.0",
        [85, 0, 0, 75],
        [2528, 4096],
    );
    first.power = Absent;
    let second = games(
        1,
        "NVIDIA GeForce GTX 1060 6GB",
        "00000000:04:00.0",
        [52, 2, 49, 120],
        [5226, 6144],
    );
    let a30 = gpu(0, "NVIDIA A30", "00000000:0B:00.0", false, [48, 0, 33, 165], [0, 24576]);
    let t4 = |bus: &str, persistence, celsius, watts, used| SmiGpu {
        mig: Absent,
        ..gpu(0, "Tesla T4", bus, persistence, [celsius, 8, watts, 70], [used, 15360])
    };
    let mut gb10 = gpu(0, "NVIDIA GB10", "0000000F:01:00.0", true, [51, 0, 11, 0], [0, 0]);
    (gb10.ecc, gb10.power_limit, gb10.memory, gb10.mig) = (Absent, Absent, Absent, Absent);
    let a100_80 = |index, bus: &str, celsius, watts| {
        gpu(
            index,
            "NVIDIA A100 80GB PCIe",
            bus,
            true,
            [celsius, 0, watts, 300],
            [0, 81920],
        )
    };
    let failed = |index, bus: &str, celsius| SmiGpu {
        display: Absent,
        ecc: Absent,
        fan: Failed,
        power: Absent,
        power_limit: Absent,
        utilization: Absent,
        mig: Failed,
        ..a100_80(index, bus, celsius, 0)
    };
    let blackwell = |index, bus: &str, fan, utilization, values, memory| SmiGpu {
        ecc: Value(Ecc::Off),
        ..for_games(
            games(
                index,
                "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
                bus,
                values,
                memory,
            ),
            fan,
            utilization,
        )
    };
    let (c, g) = (ProcessType::Compute, ProcessType::Graphics);
    vec![
        published("470", "Fri Mar 11 12:53:49 2022", "470.82.01", "", vec![a100]),
        published("470-processes", "Wed Dec  1 18:33:54 2021", "470.82.00", "11.4", vec![x]).with(vec![
            process(0, 985, g, "/usr/lib/xorg/Xorg", 35),
            process(0, 3792, g, "/usr/lib/xorg/Xorg", 122),
            process(0, 3931, g, "/usr/bin/gnome-shell", 32),
            process(0, 6247, g, "/browser --token=AAAAAAAAAAAA= --shared-files", 39),
            process(0, 6942, g, "/browser --token=AAAAAAAAAAAA= --shared-files", 78),
        ]),
        published(
            "535-processes",
            "Fri Dec 13 18:25:30 2024",
            "535.183.01",
            "12.2",
            vec![for_games(first, 57, 93), for_games(second, 33, 100)],
        )
        .with(vec![
            process(0, 2421, g, "/usr/lib/xorg/Xorg", 30),
            process(0, 2767, g, "xfwm4", 1),
            process(0, 190_709, c, "/tmp/ollama/runners/cuda_v12/ollama_llama_server", 2492),
            process(1, 2421, g, "/usr/lib/xorg/Xorg", 4),
            process(1, 7699, c, "python", 5218),
        ]),
        published(
            "535-mig-none",
            "Thu Nov 21 06:50:36 2024",
            "535.183.01",
            "12.2",
            vec![divided(a30, vec![])],
        ),
        published(
            "570",
            "Tue Jun  3 03:39:54 2025",
            "570.86.15",
            "12.8",
            vec![t4("00000000:00:1D.0", true, 25, 13, 1)],
        ),
        published(
            "580",
            "Mon Jun 22 04:00:43 2026",
            "580.82.07",
            "13.0",
            vec![t4("00000000:00:04.0", false, 39, 10, 3)],
        ),
        published("580-processes", "Thu Sep 24 11:42:01 2026", "580.126.09", "13.0", vec![gb10]).with(vec![
            process(0, 5459, c, "python3", 2079),
            process(0, 8099, g, "/usr/lib/xorg/Xorg", 338),
            process(0, 8320, g, "/usr/bin/gnome-shell", 206),
            process(0, 8856, g, "/usr/libexec/xdg-desktop-portal-gnome", 57),
            process(0, 10315, g, "/usr/bin/ghostty", 838),
            process(0, 147_875, g, "/browser --crash-track-uuid=3190708988185955192", 198),
            process(0, 3_239_403, c, "/home/me/llama.cpp/build/bin/llama-server", 829),
            process(0, 3_732_597, g, "/usr/bin/nautilus", 41),
            process(0, 3_733_171, g, "/snap/firefox/8862/usr/lib/firefox/firefox", 186),
            process(0, 3_734_121, g, "/usr/bin/gnome-text-editor", 42),
        ]),
        published(
            "595-failed",
            "Mon Sep 14 15:21:27 2026",
            "595.71.05",
            "13.2",
            vec![
                a100_80(0, "00000000:17:00.0", 35, 52),
                a100_80(1, "00000000:65:00.0", 35, 54),
                failed(2, "00000000:CA:00.0", 43),
                failed(3, "00000000:E3:00.0", 45),
            ],
        ),
        published(
            "610-no-handle",
            "Thu Aug 27 18:05:38 2026",
            "610.57.04",
            "13.3",
            vec![
                blackwell(0, "00000000:16:00.0", 58, 100, [87, 1, 299, 300], [88450, 97887]),
                SmiGpu {
                    index: 1,
                    bus: "00000000:34:00.0".to_owned(),
                    no_handle: Some("Unknown Error".to_owned()),
                    ..SmiGpu::default()
                },
                blackwell(2, "00000000:AC:00.0", 63, 100, [86, 1, 298, 300], [88450, 97887]),
                blackwell(3, "00000000:CA:00.0", 30, 0, [33, 8, 6, 300], [10, 97887]),
            ],
        )
        .with(vec![
            process(0, 6194, c, "VLLM::Worker_TP1", 88438),
            process(2, 6193, c, "VLLM::Worker_TP0", 88438),
        ]),
    ]
}

/// The tables that were published without the spaces at the end of lines, or without the time.
fn trimmed() -> Vec<Published> {
    let mut a4500 = for_games(
        gpu(
            0,
            "NVIDIA RTX A4500",
            "00000000:01:00.0",
            true,
            [40, 8, 28, 200],
            [1597, 20470],
        ),
        30,
        1,
    );
    a4500.ecc = Value(Ecc::Off);
    let a100 = gpu(
        0,
        "A100-SXM4-40GB",
        "00000000:00:04.0",
        false,
        [47, 0, 194, 400],
        [27254, 40536],
    );
    let mut vgpu = gpu(0, "GRID A100-2-10C", "00000000:02:00.0", true, [0, 0, 0, 0], [0, 0]);
    (vgpu.temperature, vgpu.power, vgpu.power_limit, vgpu.memory) = (Absent, Absent, Absent, Absent);
    let mut newer_vgpu = gpu(0, "NVIDIA H100L-1-12C", "00000000:00:06.0", true, [0, 0, 0, 0], [1, 12288]);
    (newer_vgpu.temperature, newer_vgpu.power, newer_vgpu.power_limit) = (Absent, Absent, Absent);
    let h100 = |index, bus: &str, celsius, watts| {
        gpu(
            index,
            "NVIDIA H100 80GB HBM3",
            bus,
            true,
            [celsius, 0, watts, 699],
            [532, 81559],
        )
    };
    let h100_mig = gpu(
        0,
        "NVIDIA H100 80GB HBM3",
        "00000000:8B:00.0",
        true,
        [51, 0, 140, 700],
        [1764, 81559],
    );
    let nvl = gpu(0, "NVIDIA H100 NVL", "00000001:00:00.0", true, [31, 0, 62, 400], [64, 95830]);
    let pcie = |index, bus: &str, watts| gpu(index, "NVIDIA H100 PCIe", bus, true, [29, 0, watts, 350], [1, 81559]);
    let mut h200 = gpu(0, "NVIDIA H200", "00000000:2A:00.0", false, [30, 0, 76, 700], [0, 0]);
    h200.memory = Absent;
    let quarter = |index, gi, used, bar1| part(index, gi, [used, 9984], [bar1, 16383], 28, [2, 0, 1, 0, 0]);
    let c = ProcessType::Compute;
    let jacobi = |gpu| process(gpu, 3_658_480 + gpu, c, "/scratch/try2/h100/mpi/openacc/cray/./jacobi", 522);
    vec![
        published(
            "460-mig",
            "",
            "460.91.03",
            "11.2",
            vec![divided(
                a100,
                vec![quarter(0, 3, 9118, 4), quarter(1, 4, 9118, 4), quarter(2, 5, 9016, 2)],
            )],
        )
        .with(vec![
            on_part(3, process(0, 142_213, c, "./quickstart", 9111)),
            on_part(4, process(0, 146_799, c, "./quickstart", 9111)),
            on_part(5, process(0, 132_219, c, "./quickstart", 9009)),
        ]),
        published(
            "510-vgpu-mig",
            "Fri Sep  9 05:56:21 2022",
            "510.73.08",
            "11.6",
            vec![divided(vgpu, vec![part(0, 0, [0, 9195], [0, 4096], 28, [2, 0, 1, 0, 0])])],
        ),
        published("530", "", "530.30.02", "12.1", vec![a4500]),
        published(
            "535-mig",
            "",
            "535.104.12",
            "12.2",
            vec![divided(
                h100_mig,
                vec![
                    part(0, 2, [37, 40320], [0, 65535], 60, [3, 0, 3, 0, 3]),
                    part(1, 3, [25, 20096], [0, 32767], 32, [2, 0, 2, 0, 2]),
                    part(2, 9, [12, 9984], [0, 16383], 16, [1, 0, 1, 0, 1]),
                    part(3, 10, [1688, 9984], [2, 16383], 16, [1, 0, 1, 0, 1]),
                ],
            )],
        )
        .with(vec![on_part(10, process(0, 51445, c, "/usr/bin/python3", 1668))]),
        published(
            "550-processes",
            "",
            "550.54.15",
            "12.4",
            vec![
                h100(0, "00000000:04:00.0", 42, 126),
                h100(1, "00000000:64:00.0", 42, 123),
                h100(2, "00000000:84:00.0", 42, 123),
                h100(3, "00000000:E4:00.0", 43, 119),
            ],
        )
        .with((0..4).map(jacobi).collect()),
        published(
            "560-mig",
            "",
            "560.35.03",
            "12.6",
            vec![divided(
                nvl,
                vec![
                    part(0, 1, [38, 47488], [0, 65535], 60, [3, 0, 3, 0, 3]),
                    part(1, 5, [13, 22144], [0, 32767], 26, [1, 0, 1, 0, 1]),
                    part(2, 13, [13, 11008], [0, 16383], 16, [1, 0, 1, 0, 1]),
                ],
            )],
        ),
        published(
            "565",
            "Mon Jan 20 17:32:08 2025",
            "565.57.01",
            "12.7",
            vec![pcie(0, "00000000:41:00.0", 46), pcie(1, "00000000:A1:00.0", 47)],
        ),
        published(
            "570-mig",
            "Mon Jul 28 01:58:33 2025",
            "570.86.15",
            "12.8",
            vec![divided(h200, vec![part(0, 5, [29, 33280], [0, 65535], 32, [2, 0, 2, 0, 2])])],
        ),
        published(
            "580-vgpu-mig",
            "Thu Apr  2 19:06:00 2026",
            "580.105.08",
            "13.0",
            vec![divided(
                newer_vgpu,
                vec![part(0, 0, [1, 10565], [0, 4096], 16, [1, 0, 1, 0, 1])],
            )],
        ),
    ]
}

#[test]
fn the_same_values_give_the_same_bytes() {
    for published in exact() {
        let (table, text) = (table(&published.smi), published.text());
        let name = published.name;
        assert!(table == text, "{name}: we print\n{table}\nnvidia-smi printed\n{text}");
    }
}

#[test]
fn texts_equal_a_publication_that_lacks_spaces() {
    let trim = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
    for published in trimmed() {
        let mut table = trim(&table(&published.smi));
        if published.smi.time.is_empty() {
            table = table.trim_start().to_owned();
        }
        let (name, published) = (published.name, trim(&published.text()));
        // The table of 530 ends before the processes, which were in another PID namespace.
        let is_same = table == published || name == "530" && table.starts_with(&published);
        assert!(is_same, "{name}: we print\n{table}\nnvidia-smi printed\n{published}");
    }
}

#[test]
fn a_gpu_and_mig_devices_have_the_rows_of_published_tables() {
    let mut a40 = gpu(4, "", "00000000:83:00.0", true, [0, 0, 0, 0], [0, 46068]);
    (a40.name, a40.ecc, a40.fan, a40.temperature, a40.performance) = (Failed, Failed, Failed, Failed, Failed);
    (a40.power, a40.power_limit, a40.utilization, a40.mig) = (Failed, Failed, Failed, Failed);
    let a30 = gpu(0, "NVIDIA A30", "00000000:CA:00.0", true, [30, 0, 37, 165], [51, 24576]);
    let parts = vec![
        part(0, 1, [26, 11968], [0, 16383], 28, [2, 0, 2, 0, 0]),
        part(1, 5, [13, 5952], [0, 8191], 14, [1, 0, 1, 0, 0]),
    ];
    for published in [
        published("525-failed-gpu", "", "525.85.12", "12.0", vec![a40]),
        published("550-mig-devices", "", "550.90.07", "12.0", vec![divided(a30, parts)]),
    ] {
        let (table, rows) = (table(&published.smi), published.text());
        assert!(table.contains(&rows), "{table}\nlacks\n{rows}");
    }
}
