//! Writes the CDI specs for the CDI device names in the plugin's answers.

use std::collections::BTreeSet;
use std::path::Path;

use divvy_cdi::generate::nvidia::NvidiaGpu;
use divvy_cdi::generate::parts::{self, SpecSubject};
use divvy_cdi::generate::{Channels, Extras, GenerateOptions, Generated, Naming, nvidia, proc};
use divvy_cdi::moved::{MovedSide, move_root};
use divvy_cdi::{Spec, SpecFormat};
use divvy_host::Files;
use divvy_model::MigDevice;
use divvy_nvidia_config::{DeviceIdStrategy, DeviceListStrategy, NvidiaConfig};
use tracing::{info, warn};

use super::Surroundings;
use super::facts::DriverFacts;
use crate::files;

/// The vendor in the specs' `kind`. The class is that of the devices.
const VENDOR: &str = "k8s.device-plugin.nvidia.com";

/// The specs that this process has written.
#[derive(Debug, Default)]
pub(super) struct Specs {
    /// The driver version and the GPUs for which the specs were written.
    basis: Option<(String, Vec<NvidiaGpu>)>,
    /// The classes of devices, except GPUs, that have a spec.
    classes: BTreeSet<String>,
}

impl Specs {
    /// Write the specs if the configuration needs them and the GPUs have changed. Return the classes that have a spec, except
    /// `gpu`.
    pub(super) fn update(&mut self, config: &NvidiaConfig, surroundings: &Surroundings, facts: &DriverFacts) -> BTreeSet<String> {
        let is_cdi = |strategy| matches!(strategy, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri);
        if !config.plugin.device_list_strategies.iter().copied().any(is_cdi) {
            return BTreeSet::new();
        }
        let place = DriverPlace::find(config, surroundings);
        let basis = (facts.driver.clone(), place.gpus(facts));
        if self.basis.as_ref() != Some(&basis) {
            let (classes, is_complete) = place.write(config, surroundings, &basis.0, &basis.1);
            self.classes = classes;
            // A spec that could not be written is tried again.
            self.basis = is_complete.then_some(basis);
        }
        self.classes.clone()
    }
}

/// Where this process finds the driver's files.
struct DriverPlace {
    files: Files,
    /// The directory of the driver within `files`.
    driver_root: String,
    /// Whether the root of `files` is the driver's root. If so, the paths in a spec must be changed to those on the host.
    is_mounted: bool,
}

impl DriverPlace {
    /// Find the driver's root: in a pod, where it is mounted in the container; otherwise, where the configuration says.
    fn find(config: &NvidiaConfig, surroundings: &Surroundings) -> DriverPlace {
        let mounted = Path::new(&config.plugin.container_driver_root);
        let is_mounted = mounted.is_dir();
        DriverPlace {
            files: Files::below(if is_mounted { mounted } else { &surroundings.root }),
            driver_root: if is_mounted {
                "/".to_owned()
            } else {
                config.driver_root.clone()
            },
            is_mounted,
        }
    }

    fn gpus(&self, facts: &DriverFacts) -> Vec<NvidiaGpu> {
        let known = facts.gpus().filter_map(|gpu| Some((gpu, gpu.minor?)));
        let gpus = known.map(|(gpu, minor)| NvidiaGpu {
            index: gpu.index,
            uuid: Some(gpu.uuid.clone()),
            minor,
            pci: gpu.pci.clone(),
            mig: proc::mig_of(&self.files, minor, MigDevice::of(gpu.mig, &gpu.mig_devices)),
        });
        gpus.collect()
    }

    /// Write the specs. Return the classes that have a spec, except `gpu`, and whether all files could be written.
    fn write(
        &self,
        config: &NvidiaConfig,
        surroundings: &Surroundings,
        driver: &str,
        gpus: &[NvidiaGpu],
    ) -> (BTreeSet<String>, bool) {
        let (mut written, mut is_complete) = (BTreeSet::new(), true);
        let options = |class: &str| GenerateOptions {
            class: class.to_owned(),
            naming: vec![match config.plugin.device_id_strategy {
                DeviceIdStrategy::Uuid => Naming::Uuid,
                DeviceIdStrategy::Index => Naming::Index,
            }],
            driver_root: self.driver_root.clone(),
            extras: Extras {
                imex: Channels::Some(BTreeSet::new()),
                ..Extras::default()
            },
            ..GenerateOptions::new(VENDOR)
        };
        let mut parts = vec![(
            "gpu",
            nvidia::generate(
                &self.files,
                gpus,
                Some(driver).filter(|driver| !driver.is_empty()),
                &options("gpu"),
            ),
        )];
        let channels = GenerateOptions {
            only: config.imex.channel_ids.iter().map(u32::to_string).collect(),
            ..options("imex-channel")
        };
        let others = [
            (
                !config.imex.channel_ids.is_empty(),
                "imex-channel",
                SpecSubject::Imex,
                channels,
            ),
            (config.gdrcopy, "gdrcopy", SpecSubject::Gdrcopy, options("gdrcopy")),
            (config.gds, "gds", SpecSubject::Storage, options("gds")),
            (config.mofed, "mofed", SpecSubject::Rdma, options("mofed")),
        ];
        let wanted = others.into_iter().filter(|(is_on, ..)| *is_on);
        parts.extend(wanted.map(|(_, class, part, options)| (class, parts::generate(&self.files, part, &options))));
        for (class, generated) in parts {
            let Generated { mut spec, notes } = match generated {
                Ok(generated) => generated,
                Err(error) => {
                    warn!(
                        "the CDI spec for {VENDOR}/{class} cannot be generated, so containers with such devices do not start: {error}"
                    );
                    continue;
                }
            };
            notes.iter().for_each(|note| info!("{note}"));
            self.move_to_host(config, &mut spec);
            let name = format!("{VENDOR}-{class}.json");
            let made = files::make_directory(&surroundings.cdi_dir, 0o755)
                .and_then(|()| files::write_atomic(&surroundings.cdi_dir, &name, spec.print(SpecFormat::Json).as_bytes(), 0o644));
            match made {
                Ok(()) => {
                    info!("wrote {}", surroundings.cdi_dir.join(&name).display());
                    if class != "gpu" {
                        written.insert(class.to_owned());
                    }
                }
                Err(error) => {
                    is_complete = false;
                    warn!("{error}; containers with devices of {VENDOR}/{class} do not start");
                }
            }
        }
        (written, is_complete)
    }

    /// Replace this container's paths in the spec with the host's paths.
    fn move_to_host(&self, config: &NvidiaConfig, spec: &mut Spec) {
        if !self.is_mounted {
            return;
        }
        move_root(spec, "/", &config.driver_root, MovedSide::Host);
        let below = |root: &str| format!("{}/dev", root.trim_end_matches('/'));
        let (driver, dev) = (below(&config.driver_root), below(&config.dev_root));
        if driver != dev {
            move_root(spec, &driver, &dev, MovedSide::Host);
        }
    }
}

#[cfg(test)]
mod tests {
    use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};

    use super::*;

    #[test]
    fn a_spec_that_could_not_be_written_is_tried_again() {
        let arguments = ["--device-list-strategy=cdi-cri", "--gds-enabled"].map(str::to_owned);
        let invocation = Invocation::parse(NvidiaProgram::DevicePlugin, "1", &arguments, &Environment::new()).expect("arguments");
        let (config, _) = invocation.config(None).expect("a configuration");
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir_all(at("root/dev")).expect("made");
        std::fs::write(at("root/dev/nvidia-fs0"), "").expect("written");
        // The directory cannot be made, because a file has its name.
        std::fs::write(at("cdi"), "").expect("written");
        let surroundings = Surroundings {
            probe: at("probe"),
            probe_dir: at("probe-dir"),
            sockets: at("sockets"),
            cdi_dir: at("cdi"),
            root: at("root"),
            mps: crate::nvidia::MpsSurroundings::below(&at("root")),
            pace: crate::nvidia::Pace::default(),
            metrics: None,
            events: None,
        };
        let mut specs = Specs::default();
        let mut update = || specs.update(&config, &surroundings, &DriverFacts::default());
        assert_eq!(update(), BTreeSet::new());
        std::fs::remove_file(at("cdi")).expect("removed");
        assert_eq!(update(), BTreeSet::from(["gds".to_owned()]));
        assert!(at("cdi").join(format!("{VENDOR}-gds.json")).exists());
    }
}
