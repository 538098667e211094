//! Prepares a container's configuration before the real runtime creates the container.

use std::path::Path;

use divvy_cdi::generate::{Extras, nvidia};
use divvy_cdi::{Edits, Hook, Registry};
use divvy_host::Files;
use divvy_oci::runtime::bundle::Bundle;
use divvy_oci::runtime::call::RuntimeCall;
use divvy_oci::runtime::live::{self, Live};
use divvy_oci::runtime::plan::{self, DecidedRequest, Decides, DevicePlan};
use divvy_oci::runtime::request::{RequestingContainer, WantedDevices};
use divvy_oci::runtime::require::{self, RequirementFacts};
use divvy_oci::runtime::settings::{self, OciRuntimeSettings, RuntimeMode};
use divvy_oci::runtime::{extras, legacy};

use crate::error::{Error, RuntimeLog};
use crate::{files, low_level, probe};

/// Add the container's devices to its `config.json`. If the container requests nothing, the file stays the same, byte for byte.
pub(crate) fn prepare(call: &RuntimeCall, settings: &OciRuntimeSettings, log: &RuntimeLog) -> Result<(), Error> {
    let path = Path::new(call.bundle.as_deref().unwrap_or(".".as_ref())).join("config.json");
    let file = |what| {
        let path = path.clone();
        move |source| Error::File { what, path, source }
    };
    let of_bundle = |source| Error::Bundle {
        path: path.clone(),
        source,
    };
    let text = files::read(&path).map_err(file("read"))?;
    let mut bundle = Bundle::parse(&text).map_err(of_bundle)?;
    let container = bundle.container().map_err(of_bundle)?;
    let DecidedRequest { decides, ignored } = DecidedRequest::of(&container, settings)?;
    for sentence in &ignored {
        log.warning(sentence);
    }
    let specs = || files::specs(&settings.spec_dirs);
    let edits = match decides {
        Decides::Nobody => return alone(bundle, &path, settings),
        Decides::Specs(plan) => {
            // Extras are not available here, so an invalid request for them is only a warning.
            if extras::extras(&container, settings).map_or(true, |(extras, _)| extras != Extras::default()) {
                log.warning(ONLY_LIVE);
            }
            let registry = specs()?;
            let edits = plan::edits(&plan, &registry)?;
            required(log, &container, settings, &RequirementFacts::of_specs(&plan, &registry))?;
            edits
        }
        Decides::Live(plan) => {
            let (registry, facts) = live(log, settings, &container)?;
            let edits = plan::edits(&plan, &registry)?;
            required(log, &container, settings, &facts)?;
            edits
        }
        Decides::Legacy(wanted) => legacy_hook(log, &container, &wanted, settings)?,
        Decides::Allocation { uid, container: name } => {
            let registry = specs()?;
            let plan = plan::allocation(&uid, &name, &registry)?;
            if plan == DevicePlan::LeaveAlone {
                return alone(bundle, &path, settings);
            }
            required(log, &container, settings, &RequirementFacts::of_specs(&plan, &registry))?;
            plan::edits(&plan, &registry)?
        }
    };
    bundle.remove_legacy_hooks().map_err(of_bundle)?;
    bundle.apply(&edits, files::device).map_err(of_bundle)?;
    files::replace(&path, &bundle.text()).map_err(file("written"))?;
    log.info(&format!(
        "{}: added {} device nodes, {} mounts, {} variables and {} hooks",
        path.display(),
        edits.device_nodes.len(),
        edits.mounts.len(),
        edits.env.len(),
        edits.hooks.len()
    ));
    Ok(())
}

/// Handle a container that gets no devices. If an engine added NVIDIA's hook, remove it: the hook would give the container
/// devices that are refused here, or that were not allocated to its pod.
fn alone(mut bundle: Bundle, path: &Path, settings: &OciRuntimeSettings) -> Result<(), Error> {
    let removed = settings.mode != RuntimeMode::Legacy
        && bundle.remove_legacy_hooks().map_err(|source| Error::Bundle {
            path: path.to_owned(),
            source,
        })?;
    if removed {
        files::replace(path, &bundle.text()).map_err(|source| Error::File {
            what: "written",
            path: path.to_owned(),
            source,
        })
    } else {
        Ok(())
    }
}

const ONLY_LIVE: &str = "Ignoring the request for IMEX channels, NVIDIA_GDS, NVIDIA_MOFED, NVIDIA_GDRCOPY or NVIDIA_NVSWITCH: they are available only if \
                         the container's GPUs come from the driver (mode \"jit-cdi\"), but these GPUs come from CDI specs";

/// Refuse an image whose requirements the driver does not meet. This error is easier to find and to understand than the later
/// failure of CUDA.
fn required(
    log: &RuntimeLog,
    container: &RequestingContainer,
    settings: &OciRuntimeSettings,
    facts: &RequirementFacts,
) -> Result<(), Error> {
    match require::expressions(container, settings) {
        Ok(expressions) => Ok(require::check(&expressions, facts)?),
        // Some images use CUDA_VERSION in their own way. NVIDIA's program would refuse them.
        Err(error @ require::RequirementError::CudaVersion(_)) => {
            log.warning(&format!("{error}; the image's requirements on the driver are not checked"));
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Return the GPUs that the driver reports now, and the facts about them.
fn live(
    log: &RuntimeLog,
    settings: &OciRuntimeSettings,
    container: &RequestingContainer,
) -> Result<(Registry, RequirementFacts), Error> {
    let (extras, ignored) = extras::extras(container, settings).map_err(plan::DevicePlanError::from)?;
    let said = probe::ask(settings)?;
    let machine = Files::below("/");
    let root = settings.cli.root.as_deref().filter(|root| !root.is_empty()).unwrap_or("/");
    let Live { registry, facts, notes } = live::registry(&machine, &said, root, extras)?;
    for note in ignored.iter().chain(&notes).chain(&machine.troubles()) {
        log.warning(note);
    }
    let registry = if settings.no_additional_groups {
        without_groups(registry)
    } else {
        registry
    };
    Ok((registry, facts))
}

fn without_groups(registry: Registry) -> Registry {
    let mut files = registry.files().to_vec();
    for spec in files.iter_mut().filter_map(|file| file.spec.as_mut().ok()) {
        spec.container_edits.additional_gids.clear();
        for device in &mut spec.devices {
            device.container_edits.additional_gids.clear();
        }
    }
    Registry::new(files)
}

pub(crate) fn ldconfig() -> &'static str {
    settings::ldconfig(|path| Path::new(path).exists())
}

/// Return the hook that calls `nvidia-container-cli` once the container has a process and a root. If the settings require it,
/// also return the hook that makes the loader prefer the image's own libcuda.
fn legacy_hook(
    log: &RuntimeLog,
    container: &RequestingContainer,
    wanted: &WantedDevices,
    settings: &OciRuntimeSettings,
) -> Result<Edits, Error> {
    let words = legacy::words(container, wanted, settings, ldconfig()).map_err(plan::DevicePlanError::Legacy)?;
    let cli = low_level::nvidia_container_cli(&settings.cli, Error::NoCli)?;
    let mut args = vec!["divvy-hook".to_owned(), "legacy".to_owned()];
    args.extend(settings.cli.environment.iter().map(|entry| format!("--env={entry}")));
    args.extend(["--".to_owned(), cli]);
    args.extend(words);
    let hook = |stage: &str, args| -> Result<Hook, Error> {
        Ok(Hook {
            hook_name: stage.to_owned(),
            path: files::beside("divvy-hook")?.to_string_lossy().into_owned(),
            args,
            // Some runtimes pass their own environment to a hook that has none.
            env: vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
            ..Hook::default()
        })
    };
    let mut hooks = vec![hook("prestart", args)?];
    if legacy::compat_hook(settings) {
        let root = settings.cli.root.as_deref().filter(|root| !root.is_empty()).unwrap_or("/");
        match nvidia::installed(&Files::below("/"), root) {
            Some(driver) => {
                let version = format!("--host-driver-version={}", driver.version);
                let words = ["divvy-hook".to_owned(), "enable-cuda-compat".to_owned(), version];
                hooks.push(hook("createContainer", words.to_vec())?);
            }
            None => log.warning(&format!(
                "cuda-compat-mode = \"hook\" has no effect: there is no driver below {root}"
            )),
        }
    }
    Ok(Edits {
        hooks,
        ..Edits::default()
    })
}
