//! The scenarios. Their numbers are those of docs/compatibility/device-plugin.md.

use std::fmt::Write as _;

pub(crate) const GPU: &str = "nvidia.com/gpu";

/// A scenario that is played to a device plugin.
#[derive(Debug, Clone)]
pub(crate) struct PluginScenario {
    pub(crate) name: &'static str,
    /// The program to which the scenario is played.
    pub(crate) program: ComparedProgram,
    pub(crate) machine: ScenarioMachine,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(&'static str, &'static str)>,
    pub(crate) config: Option<&'static str>,
    /// The number of resources that the plugin registers; 0 if it is expected to end, or to wait.
    pub(crate) resources: usize,
    pub(crate) steps: Vec<ScenarioStep>,
}

/// NVIDIA's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ComparedProgram {
    DevicePlugin,
    /// GPU feature discovery, which prints labels and ends.
    FeatureDiscovery,
    /// The MPS control daemon. It is ended when it is ready.
    MpsControlDaemon,
}

impl ComparedProgram {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ComparedProgram::DevicePlugin => "nvidia-device-plugin",
            ComparedProgram::FeatureDiscovery => "gpu-feature-discovery",
            ComparedProgram::MpsControlDaemon => "mps-control-daemon",
        }
    }
}

/// A step of a scenario.
#[derive(Debug, Clone)]
pub(crate) enum ScenarioStep {
    Options,
    PreStart,
    /// The device ids of each container.
    Allocate(&'static str, Vec<Vec<String>>),
    Preferred {
        available: Vec<String>,
        must: Vec<String>,
        size: i32,
    },
    /// The driver reports an XID of the GPU with this index.
    Xid(usize, u64),
    /// The driver reports an XID of a GPU instance and a compute instance of the GPU with this index.
    XidOfMig(usize, u64, (u32, u32)),
    /// The simulated driver gets this request.
    Driver(&'static str),
    /// The simulated driver gets this request, and the plugin has time to notice a change that no event reports.
    Notice(&'static str),
    /// The plugin has more than a minute to notice what has been wrong since its start.
    Wait,
    /// A GPU of this model is plugged in.
    Plug(&'static str),
    /// The program gets SIGQUIT.
    Quit,
    /// The kubelet ends its ListAndWatch stream and opens another one.
    Reconnect,
    RestartKubelet,
    Hangup,
    /// The configuration file gets this content, and the plugin gets SIGHUP.
    Configure(&'static str),
    /// The configuration file gets this content.
    Rewrite(&'static str),
    /// The GPUs are divided into other MIG devices.
    Divide(&'static str),
    /// A control daemon of MPS runs from now on, and its marker is there, or both go away.
    ControlDaemon(bool),
}

/// A machine. Its GPUs are NVIDIA A100 unless a field says otherwise.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScenarioMachine {
    pub(crate) gpus: u32,
    /// Pairs of GPUs, with the number of NVLinks between them.
    pub(crate) links: Vec<(u32, u32, u32)>,
    /// The size of the groups of GPUs that are near each other on the PCI bus, and what the GPUs of a group share.
    pub(crate) near: Option<(u32, &'static str)>,
    pub(crate) models: Vec<(u32, &'static str)>,
    pub(crate) driver: Option<&'static str>,
    /// `0=0,0,1;1=2`: the GPU instance profiles of the MIG devices of each GPU.
    pub(crate) mig: &'static str,
    /// The simulated driver's state file, which says what is wrong with the driver when the program starts.
    pub(crate) state: Option<&'static str>,
    /// The memory of each GPU in MiB, if it is not 40 GiB.
    pub(crate) memory: Option<u64>,
    /// The fabrics of GPUs, as in the machine description.
    pub(crate) fabrics: Vec<(u32, &'static str)>,
    /// Whether the driver's root as a pod sees it contains the driver's files and device nodes. CDI specs need them.
    pub(crate) has_files: bool,
    /// Whether the driver's root also contains IMEX channel 0.
    pub(crate) has_channel: bool,
    /// Whether a control daemon of MPS runs before the program starts.
    pub(crate) has_control_daemon: bool,
    /// Whether the machine is a Tegra without NVML: the library is missing, and the driver's root has the release file.
    pub(crate) is_old_tegra: bool,
}

impl ScenarioMachine {
    /// Return the content of `/proc/driver/nvidia-caps/mig-minors`. The numbers count up over all instances.
    pub(crate) fn mig_minors(&self) -> String {
        let divided = self.mig.split(';').filter_map(|part| part.split_once('='));
        let instances = divided.flat_map(|(gpu, profiles)| {
            let count = profiles.split(',').filter(|profile| !profile.is_empty()).count();
            (1..=count).flat_map(move |gi| [format!("gpu{gpu}/gi{gi}/access"), format!("gpu{gpu}/gi{gi}/ci0/access")])
        });
        let lines = (3..).zip(instances).map(|(minor, file)| format!("{file} {minor}\n"));
        std::iter::once("config 1\nmonitor 2\n".to_owned()).chain(lines).collect()
    }

    /// Return the driver's version.
    pub(crate) fn driver(&self) -> &str {
        self.driver.unwrap_or("550.54.15")
    }

    /// Return the machine description for the simulated driver.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "v = 1\n[[node]]\nname = \"n\"\ndriver = \"{}\"\n",
            self.driver.unwrap_or("550.54.15")
        );
        for index in 0..self.gpus {
            let model = self.models.iter().find(|(gpu, _)| *gpu == index);
            let model = model.map_or("NVIDIA A100-SXM4-40GB", |(_, model)| model);
            let _ = write!(
                text,
                "[[node.gpu]]\nmodel = \"{model}\"\nuuid = \"{}\"\nmemory_mib = {}\npci = \"0000:{:02x}:00.0\"\n",
                gpu(index),
                self.memory.unwrap_or(40960),
                0x80 + index
            );
            let mut links: Vec<String> = self
                .links
                .iter()
                .filter(|(a, ..)| *a == index)
                .map(|(_, b, count)| format!("[{b}, \"nvlink\", {count}]"))
                .collect();
            if let Some((size, kind)) = self.near {
                let peers = (0..index).map(|peer| (peer, if peer / size == index / size { kind } else { "system" }));
                links.extend(peers.map(|(peer, kind)| format!("[{peer}, \"{kind}\", 0]")));
            }
            let _ = writeln!(
                text,
                "links = [{}]\nmig_capable = {}",
                links.join(", "),
                model.contains("A100")
            );
            if let Some((_, fabric)) = self.fabrics.iter().find(|(gpu, _)| *gpu == index) {
                let _ = writeln!(text, "fabric = {fabric}");
            }
            let profiles = self.mig.split(';').find_map(|part| part.strip_prefix(&format!("{index}=")));
            if let Some(profiles) = profiles {
                let devices = profiles.split(',').filter(|profile| !profile.is_empty()).enumerate();
                let devices = devices.map(|(at, profile)| {
                    let gi = at + 1;
                    format!(
                        "{{ gpu_instance = {gi}, compute_instance = 0, profile = {profile}, uuid = \"MIG-{index:08x}-0000-4000-8000-{gi:08x}0000\" }}"
                    )
                });
                let _ = writeln!(text, "mig = [{}]", devices.collect::<Vec<_>>().join(", "));
            }
        }
        text
    }
}

/// Return the UUID of a GPU.
pub(crate) fn gpu(index: u32) -> String {
    format!("GPU-{index:08x}-0000-4000-8000-000000000000")
}

fn gpus(indices: &[u32]) -> Vec<String> {
    indices.iter().copied().map(gpu).collect()
}

fn replica(index: u32, number: u32) -> String {
    format!("{}::{number}", gpu(index))
}

fn machine(gpus: u32) -> ScenarioMachine {
    ScenarioMachine {
        gpus,
        ..ScenarioMachine::default()
    }
}

/// Return a scenario in which nothing happens, on a machine with this many GPUs, of which groups of eight are connected.
pub(crate) fn idle(gpus: u32) -> PluginScenario {
    let pairs = (0..gpus).flat_map(|a| (0..a).map(move |b| (a, b)));
    let links = pairs.filter(|(a, b)| a / 8 == b / 8).map(|(a, b)| (a, b, 2));
    scenario(
        "idle",
        ScenarioMachine {
            links: links.collect(),
            ..machine(gpus)
        },
    )
}

fn with_files(gpus: u32) -> ScenarioMachine {
    ScenarioMachine {
        has_files: true,
        ..machine(gpus)
    }
}

fn divided(gpus: u32, mig: &'static str) -> ScenarioMachine {
    ScenarioMachine {
        gpus,
        mig,
        ..ScenarioMachine::default()
    }
}

fn scenario(name: &'static str, machine: ScenarioMachine) -> PluginScenario {
    PluginScenario {
        name,
        program: ComparedProgram::DevicePlugin,
        machine,
        args: Vec::new(),
        env: Vec::new(),
        config: None,
        resources: 1,
        steps: Vec::new(),
    }
}

impl PluginScenario {
    /// Report whether the program uses the driver's programs for MPS.
    pub(crate) fn uses_mps(&self) -> bool {
        self.program == ComparedProgram::MpsControlDaemon || self.config.is_some_and(|config| config.contains("mps:"))
    }

    fn args(mut self, args: &[&str]) -> PluginScenario {
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    fn env(mut self, env: &[(&'static str, &'static str)]) -> PluginScenario {
        self.env = env.to_vec();
        self
    }

    fn config(mut self, text: &'static str) -> PluginScenario {
        self.config = Some(text);
        self
    }

    fn resources(mut self, count: usize) -> PluginScenario {
        self.resources = count;
        self
    }

    fn step(mut self, step: ScenarioStep) -> PluginScenario {
        self.steps.push(step);
        self
    }

    fn allocate(self, ids: &[u32]) -> PluginScenario {
        self.step(ScenarioStep::Allocate(GPU, vec![gpus(ids)]))
    }

    fn preferred(self, available: &[u32], must: &[u32], size: i32) -> PluginScenario {
        self.step(ScenarioStep::Preferred {
            available: gpus(available),
            must: gpus(must),
            size,
        })
    }
}

/// The state of a driver that is not loaded.
const NOT_LOADED: &str = r#"{"initError":9}"#;
const SLICES: &str = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 3\n";
const A100_ONLY: &str = "version: v1\nresources: {gpus: [{pattern: \"*A100*\", name: gpu}]}\n";
const SECOND_SHARED: &str = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, devices: \
                             [GPU-00000001-0000-4000-8000-000000000000], replicas: 2}]}}\n";
const RENAMED: &str = "version: v1\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    failRequestsGreaterThanOne: true\n    resources:\n    - \
                       name: nvidia.com/gpu\n      replicas: 2\n";

/// Return all scenarios.
pub(crate) fn all() -> Vec<PluginScenario> {
    let mut all = vec![
        scenario("T1 four GPUs", machine(4))
            .step(ScenarioStep::Options)
            .step(ScenarioStep::PreStart)
            .allocate(&[2, 0])
            .step(ScenarioStep::Allocate(GPU, vec![gpus(&[1]), gpus(&[3])]))
            .step(ScenarioStep::Allocate(GPU, vec![vec!["nope".to_owned()]]))
            .allocate(&[]),
        scenario("a GPU without memory of its own", ScenarioMachine { state: Some(r#"{"gpus":{"0":{"memory_errors":{"1":3,"2":3}}}}"#), ..machine(1) })
            .allocate(&[0]),
        scenario("a newer memory call is refused", ScenarioMachine { state: Some(r#"{"gpus":{"0":{"memory_errors":{"2":25}}}}"#), ..machine(1) }),
        scenario("the kernel module is older than the library", ScenarioMachine { state: Some(r#"{"initError":18}"#), ..machine(1) }).resources(0),
        scenario("T6 devices by index", machine(4))
            .args(&["--device-id-strategy=index"])
            .allocate(&[2, 0]),
        scenario("T7 volume mounts", machine(4))
            .args(&["--device-list-strategy=volume-mounts"])
            .allocate(&[2, 0]),
        scenario("T7 environment and volume mounts", machine(4))
            .args(&["--device-list-strategy=envvar,volume-mounts"])
            .allocate(&[2, 0]),
        scenario("T8 GDS, MOFED, GDRCopy", machine(2))
            .args(&["--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled"])
            .allocate(&[0]),
        scenario("T9 device nodes", machine(2))
            .args(&["--pass-device-specs", "--nvidia-driver-root=/run/nvidia/driver"])
            .allocate(&[0, 1]),
        scenario("T10 CDI by the kubelet's field", with_files(2))
            .args(&["--device-list-strategy=cdi-cri"])
            .allocate(&[1]),
        scenario("T10 CDI by index", with_files(2))
            .args(&["--device-list-strategy=cdi-cri", "--device-id-strategy=index", "--gds-enabled"])
            .allocate(&[1]),
        scenario("T11 CDI by field and annotation, and the environment", with_files(2))
            .args(&[
                "--device-list-strategy=cdi-cri,cdi-annotations,envvar",
                "--cdi-annotation-prefix=custom.cdi/",
            ])
            .allocate(&[1, 0])
            .allocate(&[]),
        scenario("T30 an IMEX channel by CDI", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--device-list-strategy=cdi-cri", "--imex-channel-ids=0"])
            .allocate(&[0]),
        scenario("T30 an IMEX channel by the environment", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--imex-channel-ids=0", "--imex-required"])
            .allocate(&[0]),
        scenario("T30 an IMEX channel by mounts", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--imex-channel-ids=0", "--device-list-strategy=volume-mounts"])
            .allocate(&[0]),
        scenario("T30 no IMEX channel", with_files(1)).args(&["--imex-channel-ids=0"]).allocate(&[0]),
        scenario("T30 a required IMEX channel is missing", with_files(1))
            .args(&["--imex-channel-ids=0", "--imex-required"])
            .resources(0),
        scenario("T16 time-slicing", machine(2))
            .config(SLICES)
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 0), replica(0, 2), replica(1, 1)]])),
        scenario("T18 renamed", machine(2))
            .config(RENAMED)
            .step(ScenarioStep::Allocate("nvidia.com/gpu.shared", vec![vec![replica(0, 0)]]))
            .step(ScenarioStep::Allocate("nvidia.com/gpu.shared", vec![vec![replica(0, 0), replica(1, 0)]])),
        scenario("T19 XIDs of applications", machine(1))
            .step(ScenarioStep::Xid(0, 13))
            .step(ScenarioStep::Xid(0, 31))
            .step(ScenarioStep::Xid(0, 43))
            .step(ScenarioStep::Xid(0, 45))
            .step(ScenarioStep::Xid(0, 68))
            .step(ScenarioStep::Xid(0, 109)),
        scenario("T20 XIDs", machine(3))
            .step(ScenarioStep::Xid(1, 79))
            .step(ScenarioStep::Xid(2, 94)),
        scenario("T21 an XID of a shared GPU", machine(2)).config(SLICES).step(ScenarioStep::Xid(1, 79)),
        scenario("T22 waiting for events fails", machine(2))
            .step(ScenarioStep::Driver(r#"{"op":"events","wait":999}"#))
            .step(ScenarioStep::Driver(r#"{"op":"events"}"#))
            .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 there is no event set",
            ScenarioMachine { state: Some(r#"{"events":{"create":999}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Driver(r#"{"op":"events"}"#))
        .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 there is no event set for a minute",
            ScenarioMachine { state: Some(r#"{"events":{"create":999}}"#), ..machine(2) },
        )
        .env(&[("DIVVY_HEALTH_RECOVERY", "1s"), ("DIVVY_PROBE_INTERVAL", "1s")])
        .step(ScenarioStep::Wait)
        .step(ScenarioStep::Notice(r#"{"op":"events"}"#)),
        scenario(
            "T22 a GPU cannot be registered for events",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"register":999}}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 a GPU does not report events",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"register":3}}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Xid(0, 79)),
        scenario("T21 XIDs of MIG devices", divided(3, "0=0;1=0;2=0,0"))
            .args(&["--mig-strategy=mixed"])
            .step(ScenarioStep::XidOfMig(0, 79, (1, 0)))
            .step(ScenarioStep::Xid(1, 79)),
        scenario("T21 an XID of a MIG device that does not exist", divided(1, "0=0"))
            .args(&["--mig-strategy=mixed"])
            .step(ScenarioStep::XidOfMig(0, 79, (2, 0))),
        scenario("T25 another stream after an XID", machine(2))
            .step(ScenarioStep::Xid(1, 79))
            .step(ScenarioStep::Reconnect),
        scenario("T23 health checks by variables", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "79,13"), ("DP_ENABLE_HEALTHCHECKS", "13")])
            .step(ScenarioStep::Xid(0, 79))
            .step(ScenarioStep::Xid(1, 13)),
        scenario("T23 all health checks, although one is disabled", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "79"), ("DP_ENABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Xid(0, 79))
            .step(ScenarioStep::Xid(1, 13)),
        scenario("T23 no health checks, and a GPU is lost", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Notice(r#"{"op":"lost","gpu":1,"lost":true}"#)),
        scenario("T23 no health checks", machine(1))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Xid(0, 79)),
        scenario("T24 SIGQUIT", machine(2)).step(ScenarioStep::Quit),
        scenario("T24 a configuration that does not suit the node", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Configure("version: v1\nimex: {channelIDs: [0], required: true}\n"))
            .allocate(&[0]),
        scenario("another model is plugged in", machine(2))
            .config(A100_ONLY)
            .step(ScenarioStep::Plug("Tesla T4")),
        scenario("T24 SIGHUP", machine(2)).step(ScenarioStep::Xid(0, 79)).step(ScenarioStep::Hangup),
        scenario("T24 a restarted kubelet", machine(2)).step(ScenarioStep::RestartKubelet),
        scenario("T24 another configuration", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Configure(SLICES)),
        scenario("the configuration file changes", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Rewrite(SLICES)),
        scenario("MIG devices are created and destroyed while the plugin runs", divided(2, "0=0,0"))
            .args(&["--mig-strategy=mixed"])
            .resources(2)
            .step(ScenarioStep::Divide("0=0;1=2,2"))
            .step(ScenarioStep::Divide("")),
        scenario("T26 MIG mixed", divided(3, "0=0,0,1;1=2,2")).args(&["--mig-strategy=mixed"]).resources(4),
        scenario("T26 MIG mixed, media engines", divided(1, "0=7")).args(&["--mig-strategy=mixed"]),
        scenario("T27 MIG single", divided(2, "0=0,0;1=0"))
            .args(&["--mig-strategy=single", "--device-id-strategy=index"])
            .step(ScenarioStep::Allocate(GPU, vec![vec!["MIG-00000001-0000-4000-8000-000000010000".to_owned()]])),
        scenario("T28 MIG single, several profiles", divided(2, "0=0,0,1,7;1=2,2"))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T28 MIG single, one GPU without MIG", divided(2, "0=0,0,0"))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T28 MIG single, one GPU without MIG devices", divided(2, "0=0;1="))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T27 MIG single, device nodes", divided(2, "0=0,0;1=0"))
            .args(&["--mig-strategy=single", "--pass-device-specs"])
            .step(ScenarioStep::Allocate(GPU, vec![vec!["MIG-00000000-0000-4000-8000-000000020000".to_owned()]])),
        scenario("MIG none, one GPU divided", divided(2, "0=0,0")),
        scenario("MIG mixed, a new profile", divided(1, "0=17")).args(&["--mig-strategy=mixed"]),
        scenario("T32 unknown keys", machine(1)).config("version: v1\nnonsense: 1\nflags: {plugin: {nonsense: true}}\n"),
        scenario("T33 a flag wins", machine(1))
            .config("version: v1\nflags:\n  plugin:\n    deviceListStrategy: volume-mounts\n    deviceIDStrategy: index\n")
            .env(&[("DEVICE_LIST_STRATEGY", "envvar,volume-mounts")])
            .args(&["--device-list-strategy=envvar"])
            .allocate(&[0]),
        scenario("T33 a variable wins over the file", machine(1))
            .config("version: v1\nflags:\n  plugin:\n    deviceListStrategy: volume-mounts\n    deviceIDStrategy: index\n")
            .env(&[("DEVICE_LIST_STRATEGY", "envvar")])
            .allocate(&[0]),
        scenario("per-GPU names and sharing", machine(2)).config(
            "version: v1\nresources:\n  gpus:\n  - {pattern: '*A100*', name: a100}\nsharing:\n  timeSlicing:\n    resources:\n    - {name: \
             a100, rename: mygpu, devices: [0], replicas: 2}\n",
        ),
        scenario("the driver is not loaded", ScenarioMachine { state: Some(NOT_LOADED), ..machine(2) }).resources(0),
        scenario("the driver is loaded later", ScenarioMachine { state: Some(NOT_LOADED), ..machine(2) })
            .args(&["--fail-on-init-error=false"])
            .resources(0)
            .step(ScenarioStep::Notice(r#"{"op":"init","error":0}"#)),
        scenario("no GPUs", machine(0)).resources(0),
        scenario("one GPU is lost", ScenarioMachine { state: Some(r#"{"gpus":{"2":{"lost":true}}}"#), ..machine(3) }),
        scenario(
            "one GPU is lost, and GPUs are named by model",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"lost":true}}}"#), ..machine(3) },
        )
        .config(A100_ONLY),
        scenario(
            "one GPU is lost that is to be shared",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"lost":true}}}"#), ..machine(3) },
        )
        .config(SECOND_SHARED),
        scenario("a GPU is lost while the plugin runs", machine(3))
            .step(ScenarioStep::Notice(r#"{"op":"lost","gpu":2,"lost":true}"#))
            .preferred(&[0, 1], &[], 1),
        scenario("T29 MPS", machine(2))
            .config("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
            .args(&["--mps-root=/run/nvidia/mps"])
            .resources(0),
    ];
    all.extend(mps());
    all.extend(wrong_arguments());
    all.extend(unusual_files());
    all.extend(choices());
    all.extend(labels());
    all.extend(tegra());
    all
}

const MPS_OF_2: &str = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";

fn mps() -> Vec<PluginScenario> {
    let daemon = |name: &'static str, machine: ScenarioMachine, config: &'static str| PluginScenario {
        program: ComparedProgram::MpsControlDaemon,
        ..scenario(name, machine).config(config)
    };
    let ready = ScenarioMachine {
        has_control_daemon: true,
        ..machine(2)
    };
    let plugin = |name: &'static str, machine: ScenarioMachine| {
        scenario(name, machine).config(MPS_OF_2).args(&["--mps-root=/run/nvidia/mps"])
    };
    vec![
        plugin("T29 MPS with a daemon that is ready", ready.clone())
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 1)]]))
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 0), replica(1, 0)]])),
        plugin("T29 the MPS daemon goes away and returns", ready)
            .step(ScenarioStep::ControlDaemon(false))
            .step(ScenarioStep::ControlDaemon(true)),
        plugin("T29 the MPS daemon starts later", machine(2))
            .resources(0)
            .step(ScenarioStep::ControlDaemon(true)),
        daemon(
            "MPS daemon, 4 replicas",
            machine(2),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
        ),
        daemon(
            "MPS daemon, 7 replicas",
            machine(1),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 7}]}}\n",
        ),
        daemon(
            "MPS daemon, renamed",
            machine(1),
            "version: v1\nsharing: {mps: {renameByDefault: true, resources: [{name: gpu, replicas: 2}]}}\n",
        ),
        daemon(
            "MPS daemon, 49 replicas",
            machine(1),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}\n",
        )
        .resources(0),
        daemon("MPS daemon, MIG single", divided(1, "0=0,0"), MPS_OF_2)
            .args(&["--mig-strategy=single"])
            .resources(0),
        daemon("MPS daemon, MIG mixed", divided(2, "0=0,0"), MPS_OF_2)
            .args(&["--mig-strategy=mixed"])
            .resources(0),
        daemon("MPS daemon, nothing is shared", machine(1), "version: v1\n"),
        daemon("MPS daemon, wrong values for other programs", machine(1), FOR_OTHERS),
    ]
}

/// A part of a fabric.
const GROUP: &str = "{ cluster = \"0a0b0c0d-0102-4304-8506-1718191a1b1c\", clique = 7 }";
const OTHER_GROUP: &str = "{ cluster = \"0a0b0c0d-0102-4304-8506-1718191a1b1c\", clique = 8 }";
/// The fabric manager has not registered the GPU yet.
const JOINING: &str = "{ cluster = \"00000000-0000-0000-0000-000000000000\", state = 2 }";

/// Return a machine whose GPUs are in these fabrics.
fn fabric(fabrics: &[&'static str]) -> ScenarioMachine {
    let fabrics: Vec<(u32, &str)> = (0..).zip(fabrics.iter().copied()).collect();
    let gpus = u32::try_from(fabrics.len()).unwrap_or(u32::MAX);
    ScenarioMachine {
        fabrics,
        ..machine(gpus)
    }
}

fn labels() -> Vec<PluginScenario> {
    let print = |name: &'static str, machine: ScenarioMachine| PluginScenario {
        program: ComparedProgram::FeatureDiscovery,
        ..scenario(name, machine).args(&[
            "--oneshot",
            "--no-timestamp",
            "--use-node-feature-api=false",
            "--output-file=",
        ])
    };
    let with = |mut scenario: PluginScenario, arg: &str| {
        scenario.args.push(arg.to_owned());
        scenario
    };
    let slices = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let renamed =
        "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let mps = "version: v1\nflags: {mpsRoot: /m}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let mig = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n";
    let driver = |version| ScenarioMachine {
        driver: Some(version),
        ..machine(2)
    };
    let long = ScenarioMachine {
        models: vec![(
            0,
            "NVIDIA A product whose name is longer than the value of a label may be in Kubernetes",
        )],
        ..machine(1)
    };
    let unnamed = ScenarioMachine {
        models: vec![(0, "")],
        ..machine(1)
    };
    let two = ScenarioMachine {
        models: vec![(1, "Tesla T4"), (2, "Tesla T4"), (3, "Tesla T4")],
        ..machine(4)
    };
    vec![
        print("T34 labels of eight GPUs", machine(8)),
        print("T34 labels of no GPU", machine(0)),
        print("T34 labels with time-slicing", machine(2)).config(slices),
        print("T34 labels of renamed GPUs", machine(2)).config(renamed),
        print("T34 labels with MPS", machine(2)).config(mps),
        print("T34 labels, wrong values for the device plugin", machine(1)).config(FOR_THE_PLUGIN),
        with(
            print("T34 labels with MIG mixed", divided(3, "0=0,0,1;1=2,2")),
            "--mig-strategy=mixed",
        ),
        with(
            print("T34 labels with MIG mixed, media engines", divided(3, "0=0,0,1,7;1=2,2")),
            "--mig-strategy=mixed",
        ),
        with(
            print("T34 labels with MIG mixed and time-slicing", divided(2, "0=0,0;1=2")),
            "--mig-strategy=mixed",
        )
        .config(mig),
        with(
            print("T34 labels with MIG single", divided(2, "0=0,0,0;1=0,0")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with an invalid MIG single", divided(2, "0=0,0,1,7;1=2,2")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with MIG single on one GPU", divided(2, "0=0,0,0")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with MIG single, none created", divided(2, "0=0;1=")),
            "--mig-strategy=single",
        ),
        with(
            print("T34 labels with MIG single, but without MIG", machine(2)),
            "--mig-strategy=single",
        ),
        print("T34 labels of a divided GPU without a strategy", divided(2, "0=0,0")),
        print("T34 labels of divided GPUs with time-slicing", divided(2, "0=0;1=2")).config(SLICES),
        print("T35 labels of the driver 455.06", driver("455.06")),
        print("T35 labels of the driver 550", driver("550")),
        print("T35 labels of the driver 1.2.3.4", driver("1.2.3.4")),
        print("T35 labels with MPS and MIG", divided(1, "0=0")).config(mps),
        with(
            print("T34 labels with a new MIG profile", divided(2, "0=17")),
            "--mig-strategy=mixed",
        ),
        print(
            "T34 labels without memory",
            ScenarioMachine {
                memory: Some(0),
                ..machine(1)
            },
        ),
        print("T34 labels of a fabric", fabric(&[GROUP; 2])),
        print("T34 labels of two cliques", fabric(&[GROUP, OTHER_GROUP])),
        print("T34 labels of a GPU outside the fabric", fabric(&[GROUP, JOINING])),
        print(
            "labels of a driver that is not loaded",
            ScenarioMachine {
                state: Some(NOT_LOADED),
                ..machine(2)
            },
        ),
        with(
            print(
                "labels of a driver that may be missing",
                ScenarioMachine {
                    state: Some(NOT_LOADED),
                    ..machine(2)
                },
            ),
            "--fail-on-init-error=false",
        ),
        with(
            print("T35 labels of GPUs for virtual machines", machine(2)),
            "--device-discovery-strategy=vfio",
        ),
        print("T34 labels of a GPU without a name", unnamed),
        print("T34 labels of a long name", long),
        print("T34 labels of two models", two),
    ]
}

fn tegra() -> Vec<PluginScenario> {
    let old = ScenarioMachine {
        is_old_tegra: true,
        ..machine(0)
    };
    let orin = ScenarioMachine {
        models: vec![(0, "Orin (nvgpu)")],
        memory: Some(3072),
        ..machine(1)
    };
    let flag = "--device-discovery-strategy=tegra";
    let ids = |ids: &[&str]| -> Vec<String> { ids.iter().map(|id| (*id).to_owned()).collect() };
    let allocate = |wanted: &[&str]| ScenarioStep::Allocate(GPU, vec![ids(wanted)]);
    let slices = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n";
    let print = |name: &'static str, machine: ScenarioMachine, more: &[&str]| {
        let fixed = [
            "--oneshot",
            "--no-timestamp",
            "--use-node-feature-api=false",
            "--output-file=",
        ];
        let printed = PluginScenario {
            program: ComparedProgram::FeatureDiscovery,
            ..scenario(name, machine)
        };
        printed.args(&[&fixed[..], more].concat())
    };
    vec![
        scenario("T36 Tegra by a flag", machine(2))
            .args(&[flag, "--pass-device-specs"])
            .step(ScenarioStep::Options)
            .step(allocate(&["tegra"]))
            .step(allocate(&[]))
            .step(allocate(&["nope"]))
            .step(ScenarioStep::Preferred {
                available: ids(&["tegra"]),
                must: Vec::new(),
                size: 1,
            }),
        scenario("T36 Tegra without NVML", old.clone()).step(allocate(&["tegra"])),
        scenario("T36 Tegra with NVML", orin.clone())
            .args(&["--device-id-strategy=index", "--device-list-strategy=volume-mounts"])
            .step(allocate(&["tegra"])),
        scenario("T36 Tegra, a flag for NVML", orin.clone()).args(&["--device-discovery-strategy=nvml"]),
        scenario("T36 Tegra, MIG mixed", machine(1)).args(&[flag, "--mig-strategy=mixed"]),
        scenario("T36 Tegra, time-slicing", old.clone())
            .config(slices)
            .step(allocate(&["tegra::1"]))
            .step(allocate(&["tegra::0", "tegra::2"]))
            .step(ScenarioStep::Preferred {
                available: ids(&["tegra::0", "tegra::1", "tegra::2"]),
                must: ids(&["tegra::1"]),
                size: 2,
            }),
        scenario("T36 Tegra, CDI without NVML", old)
            .args(&["--device-list-strategy=cdi-cri"])
            .resources(0),
        scenario("T36 Tegra, CDI with NVML", orin.clone())
            .args(&["--device-list-strategy=cdi-cri"])
            .resources(0),
        scenario("T36 Tegra, MPS", machine(1))
            .config(MPS_OF_2)
            .args(&[flag, "--mps-root=/run/nvidia/mps"])
            .resources(0),
        print("T36 labels of a Tegra by a flag", orin.clone(), &[flag]),
        print("T36 labels of a Tegra", orin.clone(), &[]),
        print(
            "T36 labels of a Tegra with MIG mixed and time-slicing",
            orin,
            &["--mig-strategy=mixed"],
        )
        .config(slices),
    ]
}

fn wrong_arguments() -> Vec<PluginScenario> {
    let wrong = |name: &'static str, arg: &'static str| scenario(name, machine(2)).args(&[arg]).resources(0);
    let file = |name: &'static str, text: &'static str| scenario(name, machine(2)).config(text).resources(0);
    let variable = |name: &'static str, env| scenario(name, machine(2)).env(env).resources(0);
    vec![
        wrong("T31 --device-list-strategy=foo", "--device-list-strategy=foo"),
        wrong("T31 --device-id-strategy=foo", "--device-id-strategy=foo"),
        wrong("T31 --mig-strategy=foo", "--mig-strategy=foo"),
        wrong("T31 --device-discovery-strategy=foo", "--device-discovery-strategy=foo"),
        wrong("T31 --imex-channel-ids=2", "--imex-channel-ids=2"),
        file(
            "T31 a long name",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: \
             nvidia.com/a-name-that-is-much-longer-than-the-sixty-three-characters-which-are-allowed, replicas: 2}]}}\n",
        ),
        wrong("T31 --imex-channel-ids=x", "--imex-channel-ids=x"),
        wrong("T31 an unknown flag", "--no-such-flag"),
        wrong("T31 a flag without a value", "--mig-strategy"),
        wrong("T31 --pass-device-specs=maybe", "--pass-device-specs=maybe"),
        wrong("T31 --device-list-strategy=", "--device-list-strategy="),
        wrong("T31 a file that does not exist", "--config-file=/does/not/exist"),
        variable("T31 MIG_STRATEGY=", &[("MIG_STRATEGY", "")]),
        variable("T31 DEVICE_LIST_STRATEGY=", &[("DEVICE_LIST_STRATEGY", "")]),
        variable("T31 DEVICE_ID_STRATEGY=", &[("DEVICE_ID_STRATEGY", "")]),
        variable("T31 DEVICE_DISCOVERY_STRATEGY=", &[("DEVICE_DISCOVERY_STRATEGY", "")]),
        file("T31 version 1", "version: 1\n"),
        file(
            "T31 a list strategy of another type",
            "flags: {plugin: {deviceListStrategy: 5}}\n",
        ),
        file(
            "T31 a wrong value below a key in another case",
            "flags: {plugin: {deviceIdStrategy: foo}}\n",
        ),
        file("T31 nothing below timeSlicing", "sharing:\n  timeSlicing:\n"),
        file("T31 no replicas", "sharing: {timeSlicing: {resources: [{name: gpu}]}}\n"),
        file("T31 no name", "sharing: {timeSlicing: {resources: [{replicas: 2}]}}\n"),
        file("T31 a pattern without a name", "resources: {gpus: [{pattern: '*'}]}\n"),
        file(
            "T31 devices: -1",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: -1}]}}\n",
        ),
        file(
            "T31 devices: 1.5",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1.5}]}}\n",
        ),
        file(
            "T31 a name with another domain",
            "sharing: {timeSlicing: {resources: [{name: example.com/gpu, replicas: 2}]}}\n",
        ),
        file("T31 a file that is not YAML", "version: [v1\n"),
        file(
            "T31 a field of another type",
            "version: v1\nflags: {failOnInitError: perhaps}\n",
        ),
        file("T31 version v2", "version: v2\n"),
        file(
            "T31 one replica",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}\n",
        ),
        file("T31 no resources", "version: v1\nsharing: {timeSlicing: {}}\n"),
        file(
            "T31 a bad name",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/$x, replicas: 2}]}}\n",
        ),
        file(
            "T31 MPS without a root",
            "version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n",
        ),
        scenario("T31 MPS and MIG mixed", machine(2))
            .config("version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n")
            .args(&["--mig-strategy=mixed", "--mps-root=/run/nvidia/mps"])
            .resources(0),
    ]
}

/// Values that only the device plugin checks.
const FOR_THE_PLUGIN: &str = "flags: {plugin: {deviceListStrategy: a, deviceIDStrategy: b}}\nimex: {channelIDs: [2]}\n";
/// Values that the MPS control daemon does not check.
const FOR_OTHERS: &str = "flags: {migStrategy: a, deviceDiscoveryStrategy: b, plugin: {deviceListStrategy: c}}\n";

/// Files that look wrong, and work.
fn unusual_files() -> Vec<PluginScenario> {
    let file = |name: &'static str, text: &'static str| scenario(name, machine(2)).config(text);
    vec![
        file(
            "T32 keys with nothing below them",
            "version:\nflags:\n  plugin:\n    # nothing\n  gfd:\nresources:\n  gpus:\nsharing:\n  mps:\nimex:\n",
        ),
        file(
            "T32 keys in another case",
            "Flags: {MIGSTRATEGY: none, Plugin: {deviceIdStrategy: index}}\n",
        )
        .allocate(&[1]),
        file(
            "T32 a key twice",
            "flags: {plugin: {deviceIDStrategy: x}}\nflags: {plugin: {deviceIDStrategy: uuid, deviceIDStrategy: index}}\n",
        )
        .allocate(&[1]),
        file("T32 two documents", "# first\n---\nversion: v1\n---\nversion: v2\n"),
        file(
            "T32 2.0 replicas",
            "flags: {failOnInitError: no}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.0}]}}\n",
        ),
        file(
            "T32 an empty list of devices",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}\n",
        ),
        file(
            "T32 more devices than there are",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 3}]}}\n",
        ),
        file(
            "T32 a device of the list does not exist",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, 7]}]}}\n",
        ),
        file("T32 no pattern matches", "resources: {gpus: [{pattern: '*T4*', name: t4}]}\n"),
        file(
            "T32 a long name that the node does not have",
            "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: a-name-of-fifty-characters-aaaaaaaaaaaaaaaaaaaaaaa, replicas: 2}]}}\n",
        ),
        scenario("T33 an argument that is no flag", machine(2))
            .args(&["--pass-device-specs", "false", "--no-such-flag"])
            .allocate(&[0]),
        scenario("T33 no socket of the kubelet", machine(1))
            .args(&["--kubelet-socket="])
            .resources(0),
        scenario("T33 variables without a value", machine(1))
            .env(&[
                ("CONFIG_FILE", ""),
                ("NVIDIA_DRIVER_ROOT", ""),
                ("PASS_DEVICE_SPECS", ""),
                ("IMEX_CHANNEL_IDS", ""),
            ])
            .allocate(&[0]),
    ]
}

fn choices() -> Vec<PluginScenario> {
    let dgx1 = ScenarioMachine {
        links: vec![
            (0, 1, 1),
            (0, 2, 1),
            (0, 3, 2),
            (0, 4, 2),
            (1, 2, 2),
            (1, 3, 1),
            (1, 5, 2),
            (2, 3, 2),
            (2, 6, 1),
            (3, 7, 1),
            (4, 5, 1),
            (4, 6, 1),
            (4, 7, 2),
            (5, 6, 2),
            (5, 7, 1),
            (6, 7, 2),
        ],
        near: Some((4, "node")),
        ..machine(8)
    };
    let pairs = ScenarioMachine {
        links: vec![(0, 2, 12), (1, 3, 12), (4, 5, 12), (6, 7, 12)],
        ..machine(8)
    };
    let bus = ScenarioMachine {
        near: Some((2, "single-switch")),
        ..machine(4)
    };
    let one_pair = ScenarioMachine {
        links: vec![(12, 13, 1)],
        ..machine(14)
    };
    let all: Vec<u32> = (0..14).collect();
    let replicas: Vec<String> = (0..2)
        .flat_map(|gpu| (0..3).map(move |number| replica(gpu, number)))
        .collect();
    let one = |must: &[String], size| ScenarioStep::Preferred {
        available: replicas.clone(),
        must: must.to_vec(),
        size,
    };
    let mut dgx = scenario("T12 the GPUs of a DGX-1", dgx1);
    for size in 1..9 {
        dgx = dgx.preferred(&all[..8], &[], size);
    }
    vec![
        dgx.preferred(&all[1..8], &[], 2)
            .preferred(&all[..8], &[5], 2)
            .preferred(&all[..8], &[0, 7], 4)
            .preferred(&all[..8], &[], 9)
            .preferred(&all[..8], &[], 0)
            .preferred(&all[1..8], &[0], 2),
        scenario("T13 pairs", pairs)
            .preferred(&all[..8], &[], 2)
            .preferred(&all[1..8], &[], 2)
            .preferred(&all[..8], &[5], 2)
            .preferred(&all[..8], &[], 3)
            .preferred(&all[..8], &[0, 7], 4),
        scenario("T14 the bus", bus)
            .preferred(&all[..4], &[], 2)
            .preferred(&all[1..4], &[], 2),
        scenario("T15 fourteen GPUs", one_pair).preferred(&all, &[], 2),
        scenario("T17 replicas", machine(2))
            .config(SLICES)
            .step(one(&[], 2))
            .step(one(&[], 4))
            .step(one(&[replica(0, 0)], 2))
            .step(one(&[], 7)),
    ]
}
