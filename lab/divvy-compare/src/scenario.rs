//! What a scenario is made of: a machine, a program with its arguments, and steps.

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

pub(crate) fn gpus(indices: &[u32]) -> Vec<String> {
    indices.iter().copied().map(gpu).collect()
}

pub(crate) fn replica(index: u32, number: u32) -> String {
    format!("{}::{number}", gpu(index))
}

pub(crate) fn machine(gpus: u32) -> ScenarioMachine {
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

pub(crate) fn divided(gpus: u32, mig: &'static str) -> ScenarioMachine {
    ScenarioMachine {
        gpus,
        mig,
        ..ScenarioMachine::default()
    }
}

pub(crate) fn scenario(name: &'static str, machine: ScenarioMachine) -> PluginScenario {
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

    pub(crate) fn args(mut self, args: &[&str]) -> PluginScenario {
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    pub(crate) fn env(mut self, env: &[(&'static str, &'static str)]) -> PluginScenario {
        self.env = env.to_vec();
        self
    }

    pub(crate) fn config(mut self, text: &'static str) -> PluginScenario {
        self.config = Some(text);
        self
    }

    pub(crate) fn resources(mut self, count: usize) -> PluginScenario {
        self.resources = count;
        self
    }

    pub(crate) fn step(mut self, step: ScenarioStep) -> PluginScenario {
        self.steps.push(step);
        self
    }

    pub(crate) fn allocate(self, ids: &[u32]) -> PluginScenario {
        self.step(ScenarioStep::Allocate(GPU, vec![gpus(ids)]))
    }

    pub(crate) fn preferred(self, available: &[u32], must: &[u32], size: i32) -> PluginScenario {
        self.step(ScenarioStep::Preferred {
            available: gpus(available),
            must: gpus(must),
            size,
        })
    }
}

/// The state of a driver that is not loaded.
pub(crate) const NOT_LOADED: &str = r#"{"initError":9}"#;
pub(crate) const SLICES: &str =
    "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 3\n";
/// Values that only the device plugin checks.
pub(crate) const FOR_THE_PLUGIN: &str =
    "flags: {plugin: {deviceListStrategy: a, deviceIDStrategy: b}}\nimex: {channelIDs: [2]}\n";
/// Values that the MPS control daemon does not check.
pub(crate) const FOR_OTHERS: &str = "flags: {migStrategy: a, deviceDiscoveryStrategy: b, plugin: {deviceListStrategy: c}}\n";
pub(crate) const MPS_OF_2: &str = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";
