//! The probe's command line. It is parsed by hand, because a parser library would double the size of the probe.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// The text of `--help`.
pub(super) const HELP: &str = "\
divvy-probe reads the GPUs of this machine: NVIDIA's through the driver's library (NVML), AMD's
and Intel's from /sys. It is the only part of Divvy that does, so a driver that hangs or crashes
affects no other process.

Usage:
  divvy-probe --once                          print the state of the GPUs as JSON, and exit
  divvy-probe --once --cuda                   describe only NVIDIA's GPUs, through CUDA instead of
                                              NVML: for a Tegra, whose NVML says too little
  divvy-probe --watch                         print that state, then each error that a driver reports
                                              until standard input closes, then the state again:
                                              each as a line of JSON
  divvy-probe --listen unix:/run/divvy/probe.sock
                                              serve the agent on this socket until SIGTERM

Options:
  --listen unix:PATH     Socket to listen on. Its mode is 0600: only root and the probe's own
                         user may connect. Its directory must exist. A stale socket is replaced.
  --nvml-library PATH    NVIDIA's library. Default: libnvidia-ml.so.1 from the dynamic
                         loader's search path, then from the usual directories below the
                         driver root
  --driver-root PATH     Root directory of NVIDIA's driver files: the path at which the host's or a
                         driver container's root is mounted. Default: /
  --sys-root PATH        Path at which the host's root is mounted. Its /sys describes the GPUs of AMD
                         and Intel, its /proc shows which pod a GPU process belongs to, and
                         paths in CDI specs are relative to it.
                         Default: /
  --share-files PATH     Directory for the files of pods that Divvy's guard holds to their
                         shares: PATH/POD/GPU gets a small tmpfs, so that a pod cannot fill
                         the node's disk through its files. In a container, PATH is the
                         host's directory PATH, a volume with mountPropagation: Bidirectional,
                         and the tmpfs must appear at PATH below --sys-root.
                         Without this option, the files lie on the disk.
  --watchdog SECONDS     Exit with status 70 if a driver call takes longer (initialization: six
                         times as long), so that the probe is restarted. Default: 10
  --exit-with-stdin      Exit when standard input closes, so that a probe that the agent started
                         never outlives the agent. This agent sees what the probe mounts.
  --help, --version

Examples:
  divvy-probe --once | jq '.gpus[] | {uuid, model, totalMiB}'
  divvy-probe --once --driver-root /run/nvidia/driver

Exit status: 0 success, 1 no driver or no socket (standard error has the reason),
2 wrong command line, 70 a driver call hung.
";

/// The probe's command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeCommand {
    /// Serve requests on a socket.
    Listen(ProbeOptions),
    /// Print one snapshot.
    Once(ProbeOptions),
    /// Print a snapshot, then the faults until standard input closes, and then a snapshot again.
    Watch(ProbeOptions),
    /// Print one snapshot of NVIDIA's GPUs through CUDA.
    Cuda(ProbeOptions),
    /// Print the help.
    Help,
    /// Print the version.
    Version,
}

/// The options of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeOptions {
    /// The path of the socket. Empty without `--listen`.
    pub listen: PathBuf,
    /// The driver's library. `None` searches for it.
    pub nvml_library: Option<PathBuf>,
    /// The root directory of the driver's files.
    pub driver_root: PathBuf,
    /// The path at which the host's root is mounted.
    pub sys_root: PathBuf,
    /// The directory of the files of shares.
    pub share_files: Option<PathBuf>,
    /// Whether to exit when standard input closes.
    pub exit_with_stdin: bool,
    /// The longest time that a driver call may take.
    pub watchdog: Duration,
}

/// The error for a wrong command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}\nTry: divvy-probe --help")]
pub struct ProbeUsageError(String);

const FLAGS: [&str; 12] = [
    "--listen",
    "--once",
    "--watch",
    "--cuda",
    "--nvml-library",
    "--driver-root",
    "--sys-root",
    "--share-files",
    "--watchdog",
    "--exit-with-stdin",
    "--help",
    "--version",
];

impl ProbeCommand {
    /// Parse the arguments without the program's name. `--flag value` and `--flag=value` are equivalent.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<ProbeCommand, ProbeUsageError> {
        let mut options = ProbeOptions {
            listen: PathBuf::new(),
            nvml_library: None,
            driver_root: PathBuf::from("/"),
            sys_root: PathBuf::from("/"),
            share_files: None,
            exit_with_stdin: false,
            watchdog: Duration::from_secs(10),
        };
        let (mut listen, mut once, mut watch, mut cuda) = (None, false, false, false);
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let (flag, mut inline) = split(&argument);
            let mut value = |what: &str| {
                let value = inline.take().or_else(|| arguments.next());
                value
                    .filter(|value| !value.is_empty())
                    .ok_or_else(|| ProbeUsageError(format!("{flag} needs {what} as its argument")))
            };
            match &*flag {
                "--listen" => listen = Some(socket_path(&value("a socket, such as unix:/run/divvy/probe.sock")?)?),
                "--nvml-library" => options.nvml_library = Some(value("the path of libnvidia-ml.so.1")?.into()),
                "--driver-root" => options.driver_root = value("a directory")?.into(),
                "--sys-root" => options.sys_root = value("a directory")?.into(),
                "--share-files" => options.share_files = Some(absolute(&value("a directory")?)?),
                "--watchdog" => options.watchdog = seconds(&value("a number of seconds")?)?,
                "--once" => once = true,
                "--watch" => watch = true,
                "--cuda" => cuda = true,
                "--exit-with-stdin" => options.exit_with_stdin = true,
                "--help" | "-h" => return Ok(ProbeCommand::Help),
                "--version" | "-V" => return Ok(ProbeCommand::Version),
                _ => return Err(ProbeUsageError(unknown(&flag))),
            }
            if inline.is_some() {
                return Err(ProbeUsageError(format!("{flag} does not take a value")));
            }
        }
        if cuda && !once {
            return Err(ProbeUsageError("--cuda needs --once".to_owned()));
        }
        match (listen, once, watch) {
            (Some(path), false, false) => Ok(ProbeCommand::Listen(ProbeOptions { listen: path, ..options })),
            (None, true, false) if cuda => Ok(ProbeCommand::Cuda(options)),
            (None, true, false) => Ok(ProbeCommand::Once(options)),
            (None, false, true) => Ok(ProbeCommand::Watch(options)),
            (None, false, false) => Err(ProbeUsageError("specify --once, --watch, or --listen unix:PATH".to_owned())),
            _ => Err(ProbeUsageError(
                "--once, --watch, and --listen cannot be used together".to_owned(),
            )),
        }
    }
}

fn split(argument: &OsStr) -> (String, Option<OsString>) {
    let text = argument.to_string_lossy();
    match text.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => (flag.to_owned(), Some(value.into())),
        _ => (text.into_owned(), None),
    }
}

fn socket_path(value: &OsStr) -> Result<PathBuf, ProbeUsageError> {
    let text = value.to_string_lossy();
    let path = text.strip_prefix("unix:").filter(|path| !path.is_empty());
    path.map(PathBuf::from).ok_or_else(|| {
        ProbeUsageError(format!(
            "--listen {text} is not a socket; write unix:PATH, such as unix:/run/divvy/probe.sock"
        ))
    })
}

fn absolute(value: &OsStr) -> Result<PathBuf, ProbeUsageError> {
    let path = PathBuf::from(value);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(ProbeUsageError(format!(
            "--share-files {} is not an absolute path",
            path.display()
        )))
    }
}

fn seconds(value: &OsStr) -> Result<Duration, ProbeUsageError> {
    let text = value.to_string_lossy();
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| (0.1..=86400.0).contains(seconds));
    let seconds =
        seconds.ok_or_else(|| ProbeUsageError(format!("--watchdog {text} is not a number of seconds from 0.1 to 86400")))?;
    Ok(Duration::from_secs_f64(seconds))
}

fn unknown(argument: &str) -> String {
    if !argument.starts_with('-') {
        return format!("unexpected argument {argument:?}; all arguments are flags");
    }
    // Suggest the flag with the longest common prefix.
    let common = |flag: &&&str| flag.bytes().zip(argument.bytes()).take_while(|(a, b)| a == b).count();
    match FLAGS.iter().max_by_key(common).filter(|flag| common(flag) > 3) {
        Some(flag) => format!("there is no flag {argument}; did you mean {flag}?"),
        None => format!("there is no flag {argument}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<ProbeCommand, ProbeUsageError> {
        ProbeCommand::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn flags_are_read_with_and_without_an_equals_sign() {
        let Ok(ProbeCommand::Listen(options)) = parse("--listen=unix:/a --watchdog 2.5 --nvml-library=/x.so --exit-with-stdin")
        else {
            panic!("listen");
        };
        assert_eq!(options.listen, PathBuf::from("/a"));
        assert_eq!(options.watchdog, Duration::from_millis(2500));
        assert_eq!(options.nvml_library, Some(PathBuf::from("/x.so")));
        assert!(options.exit_with_stdin);
        assert!(matches!(parse("--once --driver-root /host"), Ok(ProbeCommand::Once(_))));
        assert!(matches!(parse("--cuda --once"), Ok(ProbeCommand::Cuda(_))));
        assert!(matches!(parse("--watch --watchdog 5"), Ok(ProbeCommand::Watch(_))));
        assert_eq!(parse("--once --help"), Ok(ProbeCommand::Help));
    }

    #[test]
    fn a_wrong_command_line_is_refused_with_what_to_write() {
        for (line, part) in [
            ("", "--once, --watch, or --listen"),
            ("--watch --once", "cannot be used together"),
            ("--watch --listen unix:/a", "cannot be used together"),
            ("--watch --cuda", "--cuda needs --once"),
            ("--once --listen unix:/a", "cannot be used together"),
            ("--listen /run/probe.sock", "unix:PATH"),
            ("--listen", "needs a socket"),
            ("--nvml-libary /x", "did you mean --nvml-library?"),
            ("--once=1", "does not take a value"),
            ("--once --watchdog 0", "0.1 to 86400"),
            ("--once --watchdog nan", "0.1 to 86400"),
            ("--once --share-files shares", "not an absolute path"),
            ("--cuda", "--cuda needs --once"),
            ("--cuda --listen unix:/a", "--cuda needs --once"),
            ("once", "unexpected argument"),
            ("-x", "no flag -x"),
        ] {
            let ProbeUsageError(error) = parse(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
