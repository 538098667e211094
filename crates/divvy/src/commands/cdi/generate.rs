//! `divvy cdi generate`: finds the machine's GPUs, and writes a CDI spec for them.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use divvy_cdi::generate::parts::{self, SpecSubject};
use divvy_cdi::generate::{GenerateError, GenerateOptions, Generated, Naming, amd, intel, nvidia, proc, wsl};
use divvy_cdi::{SpecFormat, is_spec_file};
use divvy_hardware::client::{Spawn, snapshot};
use divvy_hardware::{Failure, FailureCode, GpuFacts, Snapshot};
use divvy_host::Files;
use divvy_host::Tree;
use divvy_model::{MigDevice, Vendor};

use super::{read_directory, say, warn_about_files, write_whole};
use crate::cli::cdi::{CdiFormat, CdiGenerateArgs, CdiHooks, CdiMode, CdiNaming, CdiSource, CdiVendor};
use crate::commands::probe::{self, PATIENCE};
use crate::printer;

/// Generate the spec, and print it or write it to a file.
pub(super) async fn run(mut args: CdiGenerateArgs) -> anyhow::Result<()> {
    args.driver_root = whole(&args.sys_root, &args.driver_root);
    args.dev_root = args.dev_root.map(|root| whole(&args.sys_root, &root));
    let format = format(&args)?;
    for flag in &args.without_effect {
        say(&format!(
            "warning: {flag} has no effect: Divvy finds these files itself below --driver-root"
        ))?;
    }
    let files = Files::below(&args.sys_root);
    let generated = generate(&args, &files).await;
    warn_about_files(&files)?;
    let Generated { spec, notes } = generated?;
    for note in &notes {
        say(&format!("warning: {note}"))?;
    }
    let text = spec.print(format);
    if args.output == Path::new("-") {
        return Ok(printer::print(&text)?);
    }
    let names: Vec<String> = spec
        .devices
        .iter()
        .map(|device| format!("{}={}", spec.kind, device.name))
        .collect();
    refuse_conflict(&args.output, &names)?;
    if let Some(directory) = args.output.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory).with_context(|| format!("the directory {} cannot be created", directory.display()))?;
    }
    write_whole(&args.output, &text, 0o644).with_context(|| format!("{} was not written", args.output.display()))?;
    say(&format!(
        "note: {}: CDI {}, devices {}",
        args.output.display(),
        spec.cdi_version,
        names.join(" ")
    ))?;
    Ok(())
}

fn format(args: &CdiGenerateArgs) -> anyhow::Result<SpecFormat> {
    let asked = args.format.map(|format| match format {
        CdiFormat::Json => SpecFormat::Json,
        CdiFormat::Yaml => SpecFormat::Yaml,
    });
    if args.output == Path::new("-") {
        return Ok(asked.unwrap_or(SpecFormat::Yaml));
    }
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    anyhow::ensure!(
        is_spec_file(&name),
        "--output {}: engines read only files whose names end in .yaml or .json; choose such a name",
        args.output.display()
    );
    let by_name = if name.ends_with(".json") {
        SpecFormat::Json
    } else {
        SpecFormat::Yaml
    };
    anyhow::ensure!(
        asked.is_none_or(|asked| asked == by_name),
        "--output {} and --format contradict each other; omit --format",
        args.output.display()
    );
    Ok(by_name)
}

async fn generate(args: &CdiGenerateArgs, files: &Files) -> anyhow::Result<Generated> {
    let part = part(args.mode);
    let vendor = match args.vendor {
        CdiVendor::Auto if args.mode == CdiMode::Auto => detect(args, files)?,
        CdiVendor::Auto => CdiVendor::Nvidia,
        CdiVendor::Amd | CdiVendor::Intel if args.mode != CdiMode::Auto => {
            anyhow::bail!("--mode is only for --vendor nvidia; omit --mode")
        }
        vendor => vendor,
    };
    let usual = match vendor {
        CdiVendor::Amd => "amd.com",
        CdiVendor::Intel => "intel.com",
        CdiVendor::Nvidia | CdiVendor::Auto => "nvidia.com",
    };
    let options = GenerateOptions {
        class: args.class.clone(),
        naming: naming(&args.device_name_strategy),
        only: args.device.clone(),
        all: !args.no_all_device,
        groups: !args.no_additional_gids,
        newest: args.cdi_version,
        driver_root: args.driver_root.clone(),
        dev_root: args.dev_root.clone(),
        hook: hook(args)?,
        ..GenerateOptions::new(args.vendor_name.as_deref().unwrap_or(usual))
    };
    if let Some(part) = part {
        return Ok(parts::generate(files, part, &options)?);
    }
    anyhow::ensure!(
        args.mode != CdiMode::Wsl || wsl::is_there(files),
        "--mode wsl: there is no /dev/dxg, so this is not WSL 2; omit --mode"
    );
    Ok(match vendor {
        CdiVendor::Amd => amd::generate(files, &options)?,
        CdiVendor::Intel => intel::generate(files, &options)?,
        CdiVendor::Nvidia | CdiVendor::Auto => nvidia(args, files, &options).await?,
    })
}

fn naming(strategies: &[CdiNaming]) -> Vec<Naming> {
    let mut naming = Vec::new();
    for strategy in strategies {
        let named: &[Naming] = match strategy {
            CdiNaming::Index => &[Naming::Index],
            CdiNaming::Uuid => &[Naming::Uuid],
            CdiNaming::TypeIndex => &[Naming::TypeIndex],
            CdiNaming::Both => &[Naming::Index, Naming::Uuid],
        };
        for one in named {
            if !naming.contains(one) {
                naming.push(*one);
            }
        }
    }
    naming
}

fn part(mode: CdiMode) -> Option<SpecSubject> {
    Some(match mode {
        CdiMode::Auto | CdiMode::Nvml | CdiMode::Wsl => return None,
        CdiMode::Management => SpecSubject::Management,
        CdiMode::Gds => SpecSubject::Storage,
        CdiMode::Mofed => SpecSubject::Rdma,
        CdiMode::Gdrcopy => SpecSubject::Gdrcopy,
        CdiMode::Nvswitch => SpecSubject::Nvswitch,
        CdiMode::Imex => SpecSubject::Imex,
    })
}

/// Return the path of divvy-hook, if the spec is to contain hooks.
fn hook(args: &CdiGenerateArgs) -> anyhow::Result<Option<String>> {
    let path = match (args.hooks, &args.hook_program) {
        (CdiHooks::None, None) => return Ok(None),
        (CdiHooks::None, Some(path)) => anyhow::bail!("--hook-program {} needs --hooks minimal; add it", path.display()),
        (CdiHooks::Minimal, Some(path)) => path.clone(),
        (CdiHooks::Minimal, None) => {
            let own = std::env::current_exe()
                .context("this program's own path is unknown, so divvy-hook cannot be found next to it")?;
            let beside = own.with_file_name("divvy-hook");
            anyhow::ensure!(
                beside.is_file(),
                "--hooks minimal: there is no {}; every container with this spec would fail to start. Give the path of divvy-hook with --hook-program",
                beside.display()
            );
            beside
        }
    };
    anyhow::ensure!(
        path.is_absolute(),
        "--hook-program {}: container runtimes need an absolute path",
        path.display()
    );
    let path = path.into_os_string().into_string();
    path.map(Some).map_err(|path| {
        anyhow::anyhow!(
            "--hook-program {}: a spec cannot contain this path, because it is not UTF-8 text",
            path.display()
        )
    })
}

/// Return the first vendor with a driver on this machine, and print a note if there are more such vendors.
fn detect(args: &CdiGenerateArgs, tree: &dyn Tree) -> anyhow::Result<CdiVendor> {
    let has_nvidia = divvy_cdi::driver_version::loaded_driver(tree).is_some()
        || wsl::is_there(tree)
        || args.driver_root != "/"
        || args.nvml_library.is_some();
    let found: Vec<(CdiVendor, &str)> = [
        (CdiVendor::Nvidia, "nvidia", has_nvidia),
        (CdiVendor::Amd, "amd", amd::is_there(tree)),
        (CdiVendor::Intel, "intel", intel::is_there(tree)),
    ]
    .into_iter()
    .filter_map(|(vendor, name, there)| there.then_some((vendor, name)))
    .collect();
    let Some(((vendor, name), rest)) = found.split_first() else {
        anyhow::bail!(
            "no GPU driver is loaded on this machine (no /sys/module/nvidia, no AMD GPU in /sys/class/kfd, no Intel GPU in /sys/bus/pci): load it, \
             or give its place with --driver-root or --sys-root; with --vendor the error is more specific"
        );
    };
    if !rest.is_empty() {
        let others: Vec<&str> = rest.iter().map(|(_, name)| *name).collect();
        say(&format!(
            "note: this spec is for {name}; for {}, add --vendor",
            others.join(" and ")
        ))?;
    }
    Ok(*vendor)
}

async fn nvidia(args: &CdiGenerateArgs, files: &Files, options: &GenerateOptions) -> anyhow::Result<Generated> {
    let ask = match args.gpus_from {
        CdiSource::Auto => args.sys_root == Path::new("/") || args.nvml_library.is_some(),
        CdiSource::Probe => true,
        CdiSource::Proc => false,
    };
    if args.mode != CdiMode::Nvml && wsl::is_there(files) {
        // Under WSL no file has the driver's version; the probe knows it.
        let driver = if ask {
            Some(ask_probe(args).await?.driver(Vendor::Nvidia).to_owned())
        } else {
            None
        };
        return Ok(wsl::generate(files, driver.as_deref(), options)?);
    }
    if !ask {
        return Ok(nvidia::generate(files, &proc::gpus(files), None, options)?);
    }
    let snapshot = match ask_probe(args).await {
        Ok(snapshot) => snapshot,
        // If there is no driver at all, that is the better reason.
        Err(error) => {
            return match nvidia::generate(files, &[], None, options) {
                Err(without @ (GenerateError::NoDriver(_) | GenerateError::NoRoot { .. })) => Err(without.into()),
                _ => Err(error),
            };
        }
    };
    for nameless in &snapshot.unreadable {
        say(&format!(
            "warning: GPU {} is left out: the driver says {}",
            nameless.index, nameless.error
        ))?;
    }
    let mut gpus = Vec::new();
    for facts in &snapshot.gpus {
        match from_facts(facts, files) {
            Some(gpu) => gpus.push(gpu),
            None => say(&format!(
                "warning: GPU {} is left out: the driver does not report its minor number, which names its device node",
                facts.index
            ))?,
        }
    }
    Ok(nvidia::generate(
        files,
        &gpus,
        Some(snapshot.driver(Vendor::Nvidia)),
        options,
    )?)
}

fn from_facts(facts: &GpuFacts, tree: &dyn Tree) -> Option<nvidia::NvidiaGpu> {
    let minor = facts.minor?;
    Some(nvidia::NvidiaGpu {
        index: facts.index,
        uuid: Some(facts.uuid.clone()),
        minor,
        pci: facts.pci.clone(),
        mig: proc::mig_of(tree, minor, MigDevice::of(facts.mig, &facts.mig_devices)),
    })
}

async fn ask_probe(args: &CdiGenerateArgs) -> anyhow::Result<Snapshot> {
    let probe = probe::named(args.probe.as_deref(), |program| spawn(args, program))?;
    let asked = snapshot(&probe, PATIENCE).await.map(|all| all.only(Vendor::Nvidia));
    asked.map_err(|Failure { code, text }| {
        let hint = match code {
            FailureCode::ProbeUnreachable => {
                "; give the path of divvy-probe with --probe, or use --gpus-from proc, which does not need it"
            }
            _ => "; --gpus-from proc does not need the driver's library",
        };
        anyhow::anyhow!("the driver could not be queried for its GPUs: {text}{hint}")
    })
}

/// Return a root directory as an absolute path, which specs need. A relative path is relative to the current directory, or to
/// `--sys-root` if that is a copy of another machine.
fn whole(sys_root: &Path, root: &str) -> String {
    let relative = !root.is_empty() && !root.starts_with('/');
    match relative {
        false => root.to_owned(),
        true if sys_root == Path::new("/") => {
            let found = Path::new(root).canonicalize().or_else(|_| std::path::absolute(root));
            found.map_or_else(|_| root.to_owned(), |path| path.display().to_string())
        }
        true => format!("/{}", root.trim_start_matches("./")),
    }
}

fn spawn(args: &CdiGenerateArgs, program: PathBuf) -> Spawn {
    let below = |path: &str| args.sys_root.join(path.trim_start_matches('/'));
    let driver_root = below(&args.driver_root);
    Spawn {
        program,
        nvml_library: args.nvml_library.clone(),
        driver_root: (args.nvml_library.is_none() && driver_root != Path::new("/")).then_some(driver_root),
        sys_root: None,
        share_files: None,
        watchdog: None,
        env: Vec::new(),
        dir: PathBuf::new(),
        log: None,
    }
}

/// Fail if another file of the directory defines one of these devices: engines would then use neither definition.
fn refuse_conflict(output: &Path, names: &[String]) -> anyhow::Result<()> {
    let directory = output
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let shown = directory.display().to_string();
    let found = match read_directory(directory, &shown, 0) {
        Ok((found, _)) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(anyhow::Error::new(error).context(format!("the directory {shown} cannot be read"))),
    };
    let own = output.file_name().unwrap_or_default().to_string_lossy();
    for file in found.iter().filter(|file| file.path.rsplit('/').next() != Some(&own)) {
        let Some(spec) = file.usable() else { continue };
        let twice = spec
            .devices
            .iter()
            .map(|device| format!("{}={}", spec.kind, device.name))
            .find(|name| names.contains(name));
        if let Some(name) = twice {
            anyhow::bail!(
                "{} already defines {name}, and engines refuse a device that two files of a directory define: remove that file, write to it \
                 (-o {}), or use --vendor-name or --class. Nothing was written",
                file.path,
                file.path
            );
        }
    }
    Ok(())
}
