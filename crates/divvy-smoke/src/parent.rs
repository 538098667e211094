//! The process that the user starts. It finds the driver's library, starts the child that calls it, and prints what it hears.

use std::env;
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, StepStatus, TERMINATION_MESSAGE, TestedGpu};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::find;
use crate::given::{self, Signs};
use crate::health::{self, HealthWatch};
use crate::lines;
use crate::options::{SmokeOptions, WORKER};
use crate::page;
use crate::run::{Message, result};
use crate::supervise::{self, supervise};
use crate::worker::ChildTask;

/// Which command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SmokeMode {
    Here,
    /// CUDA's sample.
    Sample,
}

/// Run a command, and return the exit status.
pub(crate) fn run(mode: SmokeMode, options: &SmokeOptions) -> i32 {
    let began = Instant::now();
    end_on_signals();
    let mut printer = Printer {
        mode,
        json: options.json,
        gpu: None,
        steps: Vec::new(),
    };
    let program = env::current_exe().unwrap_or_default();
    let program = find::own_program(&program, env::args_os().next().as_deref());
    let steps = match mode {
        SmokeMode::Here => options.steps.clone(),
        SmokeMode::Sample => vec![StepId::S01, StepId::S02],
    };
    let library_path = env::var_os("LD_LIBRARY_PATH");
    let searched = find::directories(Path::new("/"), library_path.as_deref());
    let (library, refused) = find::library(&searched);
    let mut watched = None;
    match library {
        Some(library) => {
            if steps.contains(&StepId::S08) {
                // A driver that no program keeps loaded takes seconds for each GPU. One that takes longer is read while the steps run.
                let watch = HealthWatch::start(health::find(&program).as_deref(), options.timeout / 4);
                watched = Some((watch, began.elapsed()));
            }
            let start = find::start(&program, Path::new("/"), &library, library_path.as_deref(), runs);
            for step in child(mode, options, &steps, library, &start, began, &mut printer) {
                printer.take(Message::Step(step));
            }
        }
        None => {
            let outcome = given::no_library(&Signs::of_this_process(), &refused);
            let first = result(StepId::S01, outcome);
            let verb = if first.status == StepStatus::Fail {
                "failed"
            } else {
                "was skipped"
            };
            let rest = steps.iter().filter(|id| !matches!(id, StepId::S01 | StepId::S08));
            let rest: Vec<SmokeStep> = rest
                .map(|id| SmokeStep::skip(*id, format!("not run, because S01 {verb}")))
                .collect();
            for step in std::iter::once(first).chain(rest) {
                printer.take(Message::Step(step));
            }
        }
    }
    if steps.contains(&StepId::S08) {
        let started = Instant::now();
        let left = options.timeout.saturating_sub(began.elapsed());
        let (outcome, before) = match watched {
            Some((watch, took)) => (watch.end(printer.gpu.as_ref(), left), took),
            None => (Err(health::no_gpu()), Duration::ZERO),
        };
        let took = started.elapsed() + before;
        printer.take(Message::Step(SmokeStep {
            ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            ..result(StepId::S08, outcome)
        }));
    }
    printer.finish(options)
}

/// Report whether the program runs when it is started so.
fn runs(start: &find::StartCommand) -> bool {
    let mut command = process::Command::new(&start.program);
    command.args(&start.arguments).arg("--version").stdin(Stdio::null());
    let runs = command.output().is_ok_and(|output| output.status.success());
    if !runs {
        complain("note: this program does not run with the C library of the image, and uses Divvy's");
    }
    runs
}

/// End when the user or the kubelet asks for it. As the first process of a container, the program would not end without a handler. Its child ends with it.
fn end_on_signals() {
    match Signals::new([SIGINT, SIGTERM]) {
        Ok(mut signals) => drop(std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // As shells report the end by a signal.
                low_level::exit(128 + signal);
            }
        })),
        Err(error) => complain(&format!("signals have their default effect: {error}")),
    }
}

/// Run the child, and return the steps that it did not report.
fn child(
    mode: SmokeMode,
    options: &SmokeOptions,
    steps: &[StepId],
    library: PathBuf,
    start: &find::StartCommand,
    began: Instant,
    printer: &mut Printer,
) -> Vec<SmokeStep> {
    let mut command_line = vec![start.program.clone()];
    command_line.extend(start.arguments.iter().map(PathBuf::from));
    let task = ChildTask {
        library,
        via: options.via,
        steps: steps.to_vec(),
        isolation: options.isolation,
        tensor: options.tensor,
        all_memory: options.all_memory,
        sample: mode == SmokeMode::Sample,
        gpu: options.gpu.clone(),
        visible: env::var_os("CUDA_VISIBLE_DEVICES").map(|text| text.to_string_lossy().into_owned()),
        grant: given::grant(&given::variables()),
        start: command_line,
        second: false,
    };
    let page = page::make().ok();
    let started = spawn(&task, start, page.as_ref());
    let (messages, process) = match started {
        Ok(started) => started,
        Err(error) => {
            let why = "without that process nothing can be tried";
            let fix = "check that the program and its loader may be executed, and the limit on processes of the container";
            let failed = SmokeStep::fail(
                StepId::S01,
                format!("{} could not be started: {error}", start.program.display()),
                why,
                fix,
            );
            let rest = steps.iter().filter(|id| !matches!(id, StepId::S01 | StepId::S08));
            let rest = rest.map(|id| SmokeStep::skip(*id, "not run, because S01 failed"));
            return std::iter::once(failed).chain(rest).collect();
        }
    };
    let mut child = ChildProcess { child: process, page };
    supervise(&messages, &mut child, steps, options.timeout, began, &mut |message| {
        printer.take(message)
    })
}

fn spawn(
    task: &ChildTask,
    start: &find::StartCommand,
    page: Option<&OwnedFd>,
) -> std::io::Result<(Receiver<Message>, process::Child)> {
    let mut command = process::Command::new(&start.program);
    command.args(&start.arguments).arg(WORKER).arg(serde_json::to_string(task)?);
    // The root may be read-only, and there may be no home directory.
    command.env("CUDA_CACHE_DISABLE", "1");
    if let Some(path) = &start.library_path {
        command.env("LD_LIBRARY_PATH", path);
    }
    match page.map(OwnedFd::try_clone) {
        Some(Ok(page)) => command.stdin(page),
        _ => command.stdin(Stdio::null()),
    };
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
    // A driver may print something itself. It is not ours, and not for standard output.
    let message = |line: &[u8]| {
        let parsed = serde_json::from_slice(line).ok();
        if parsed.is_none() {
            complain(divvy_host::plain(&String::from_utf8_lossy(line)).trim_end());
        }
        parsed
    };
    Ok((lines::read(output, message), child))
}

/// The child as a process.
struct ChildProcess {
    child: process::Child,
    page: Option<OwnedFd>,
}

impl supervise::SupervisedChild for ChildProcess {
    fn kill(&mut self) {
        // It fails only for a child that has ended.
        let _ = self.child.kill();
    }

    fn ended(&mut self) -> Option<Option<String>> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) if status.success() => Some(None),
            Ok(Some(status)) => Some(Some(status.to_string())),
            Err(error) => Some(Some(error.to_string())),
        }
    }

    fn place(&mut self) -> String {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap_or_default();
        place(&read("stat"), &read("wchan"))
    }

    fn call(&mut self) -> Option<(StepId, String)> {
        page::read(self.page.as_ref()?)
    }
}

/// Describe where a process is, from its files `stat` and `wchan` in `/proc`.
fn place(stat: &str, wchan: &str) -> String {
    // The name of the program is in parentheses, and may contain some.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let state = state.map_or_else(|| "state unknown".to_owned(), |state| format!("state {state}"));
    match wchan.trim() {
        "" | "0" => format!("{state}, wchan unknown"),
        wchan => format!("{state}, wchan {wchan}"),
    }
}

/// Prints what is heard.
struct Printer {
    mode: SmokeMode,
    json: bool,
    gpu: Option<TestedGpu>,
    steps: Vec<SmokeStep>,
}

impl Printer {
    fn take(&mut self, message: Message) {
        let lines = self.mode == SmokeMode::Here && !self.json;
        match message {
            Message::Gpu(gpu) => {
                if lines {
                    print(&gpu.text());
                }
                self.gpu = Some(gpu);
            }
            Message::Step(step) => {
                if lines {
                    print(&step.text());
                }
                if self.mode == SmokeMode::Sample && step.status != StepStatus::Pass {
                    complain(step.text().trim_end());
                }
                // A child that crashes at its end takes back what it said of its last step.
                self.steps.retain(|known| known.id != step.id);
                self.steps.push(step);
            }
            Message::Line(line) => print(&format!("{line}\n")),
            Message::Error(error) => complain(&error),
            Message::Held(_) => {}
        }
    }

    fn finish(mut self, options: &SmokeOptions) -> i32 {
        self.steps.sort_by_key(|step| step.id);
        let mut report = SmokeReport::new(self.gpu, self.steps);
        report.node = env::var("NODE_NAME").ok();
        report.pod = env::var("POD_NAME").ok();
        if let Some(file) = &options.termination_message
            && let Err(error) = std::fs::write(file, report.termination_message(TERMINATION_MESSAGE))
        {
            complain(&format!("{} cannot be written: {error}", file.display()));
        }
        match self.mode {
            SmokeMode::Here if self.json => print(&format!("{}\n", report.json())),
            SmokeMode::Here => print(&report.summary()),
            SmokeMode::Sample => return i32::from(!sample_passed(&report)),
        }
        i32::from(report.result.exit_status())
    }
}

/// Report whether the sample's step was done, and passed.
fn sample_passed(report: &SmokeReport) -> bool {
    report.result.exit_status() < 2 && report.step(StepId::S02).is_some_and(|step| step.status == StepStatus::Pass)
}

/// Print text. A reader that has gone away (`divvy-smoke here | head`) does not change the result.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        complain(&format!("standard output cannot be written: {error}"));
    }
}

/// Write a line to standard error. A failure cannot be told to anyone.
pub(crate) fn complain(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Return the arguments of this process.
pub(crate) fn arguments() -> impl Iterator<Item = OsString> {
    env::args_os().skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The description has the state of the process and its place in the kernel.
    #[test]
    fn a_process_in_the_kernel_is_described() {
        for (stat, wchan, expected) in [
            (
                "7 (divvy-smoke) D 1 7 7 0",
                "nv_open_q_enqueue",
                "state D, wchan nv_open_q_enqueue",
            ),
            ("7 (a) b) Z 1", "0", "state Z, wchan unknown"),
            ("", "", "state unknown, wchan unknown"),
        ] {
            assert_eq!(place(stat, wchan), expected);
        }
    }

    #[test]
    fn a_late_crash_takes_back_the_childs_pass() {
        let mut printer = Printer {
            mode: SmokeMode::Here,
            json: true,
            gpu: None,
            steps: Vec::new(),
        };
        printer.take(Message::Step(SmokeStep::pass(StepId::S02, "", 1)));
        printer.take(Message::Step(SmokeStep::fail(StepId::S02, "", "", "")));
        let report = SmokeReport::new(None, printer.steps);
        assert_eq!((report.steps.len(), report.result.exit_status()), (1, 2));
        assert!(SmokeReport::read(&report.json()).is_ok());
    }
}
