//! The child: it alone loads the driver's library, and it may hang or crash in it.

use std::cell::Cell;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use divvy_share::limits::ShareLimits;
use divvy_smoke_report::StepId;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::cuda::CudaDriver;
use crate::driver::{CallFailure, Driver, Hooked};
use crate::options::{Via, WORKER};
use crate::page;
use crate::run::{self, Message, SmokePlan, SmokeWorld};
use crate::steps::accounting::{HeldMemory, SecondProcess};
use crate::steps::open::{self, AskedGpu, NoLimits};
use crate::steps::share::{self, GivenShare, GuardLimit};
use crate::steps::{StepOutcome, StepProblem};

/// What the child is to do. It is the child's argument, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChildTask {
    pub(crate) library: PathBuf,
    pub(crate) via: Via,
    pub(crate) steps: Vec<StepId>,
    pub(crate) isolation: bool,
    pub(crate) tensor: bool,
    pub(crate) all_memory: bool,
    pub(crate) sample: bool,
    pub(crate) gpu: Option<String>,
    pub(crate) visible: Option<String>,
    pub(crate) grant: GivenShare,
    /// The arguments with which the program was started, before those of its own.
    pub(crate) start: Vec<PathBuf>,
    /// Whether this is the second process of S09.
    pub(crate) second: bool,
}

/// Do what the argument says.
pub(crate) fn main(task: &str) -> i32 {
    // A parent that was killed leaves no child behind.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let task: ChildTask = match serde_json::from_slice(task.as_bytes()) {
        Ok(task) => task,
        Err(error) => {
            tell(Message::Error(format!("this command is for divvy-smoke itself: {error}")));
            return 3;
        }
    };
    let current = Cell::new(StepId::S01);
    let at = |call: &str| page::write(rustix::stdio::stdin(), current.get(), call);
    at("dlopen");
    let cuda = match CudaDriver::load(&task.library, task.via) {
        Ok(cuda) => cuda,
        Err(error) => {
            let problem = StepProblem::finding(
                format!("{} cannot be used: {error}", task.library.display()),
                "no program in this container can use CUDA",
                "check that the node's driver is complete, and that the image brings no libcuda.so.1 along; divvy doctor --node has the details",
            );
            stop(&task, problem);
            return 0;
        }
    };
    let driver = Hooked {
        driver: cuda,
        before: |call: &'static str| -> Result<(), CallFailure> {
            at(call);
            Ok(())
        },
    };
    if task.second {
        return hold(&driver, &task);
    }
    let plan = SmokePlan {
        steps: task.steps.clone(),
        isolation: task.isolation,
        tensor: task.tensor,
        all_memory: task.all_memory,
        sample: task.sample,
        sizes: None,
        asked: AskedGpu {
            gpu: task.gpu.clone(),
            visible: task.visible.clone(),
            grant: task.grant.clone(),
        },
    };
    let library = task.library.display().to_string();
    let mut second = WorkerProcess {
        task: &task,
        child: None,
    };
    run::run(
        &driver,
        &plan,
        &mut SmokeWorld {
            library: &library,
            limit: &limit,
            begin: &|id| current.set(id),
            second: &mut second,
            tell: &mut tell,
        },
    );
    0
}

/// Say that nothing could be done.
fn stop(task: &ChildTask, problem: StepProblem) {
    let mut outcome: Option<StepOutcome> = Some(Err(problem));
    for id in task.steps.iter().filter(|id| **id != StepId::S08) {
        let skipped = || Err(StepProblem::Skip("not run, because S01 failed".to_owned()));
        tell(Message::Step(run::result(*id, outcome.take().unwrap_or_else(skipped))));
    }
}

/// Write a message for the parent. Without a parent there is nobody to tell.
fn tell(message: Message) {
    if let Ok(mut line) = serde_json::to_vec(&message) {
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

/// Read what the guard holds this container to.
fn limit(uuid: &str) -> Result<Option<GuardLimit>, NoLimits> {
    let file = PathBuf::from(divvy_share::DIRECTORY).join(uuid).join(divvy_share::LIMITS);
    let unreadable = |error: &dyn std::fmt::Display| NoLimits {
        path: file.display().to_string(),
        why: error.to_string(),
    };
    let bytes = match std::fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(&error)),
    };
    let (_, limits) = ShareLimits::from_bytes(&bytes).map_err(|error| unreadable(&error))?;
    Ok(Some(GuardLimit {
        bytes: limits.bytes,
        context: limits.context,
    }))
}

/// The second process of S09, as the first one sees it.
struct WorkerProcess<'t> {
    task: &'t ChildTask,
    child: Option<(Child, BufReader<ChildStdout>)>,
}

impl WorkerProcess<'_> {
    fn start(&self) -> std::io::Result<(Child, BufReader<ChildStdout>)> {
        let task = ChildTask {
            second: true,
            ..self.task.clone()
        };
        let (program, arguments) = self.task.start.split_first().ok_or(std::io::ErrorKind::NotFound)?;
        let mut child = Command::new(program)
            .args(arguments)
            .arg(WORKER)
            .arg(serde_json::to_string(&task)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok((child, BufReader::new(output)))
    }
}

fn no_second(found: impl std::fmt::Display) -> StepProblem {
    StepProblem::finding(
        format!("the second process: {found}"),
        "two processes of a container cannot use its GPU at the same time",
        "check the compute mode (nvidia-smi -c 0), and the limit on processes of the container",
    )
}

impl SecondProcess for WorkerProcess<'_> {
    fn hold(&mut self) -> Result<HeldMemory, StepProblem> {
        let (child, mut output) = self.start().map_err(no_second)?;
        let mut line = String::new();
        let read = output.read_line(&mut line).map_err(no_second)?;
        self.child = Some((child, output));
        match serde_json::from_slice::<Message>(line.as_bytes()) {
            Ok(Message::Held(held)) => Ok(held),
            Ok(Message::Error(error)) => Err(no_second(error)),
            _ if read == 0 => Err(no_second("it ended without an answer")),
            _ => Err(no_second(format!("it answered {:?}", line.trim_end()))),
        }
    }

    fn end(&mut self) -> Result<(), StepProblem> {
        let Some((mut child, _output)) = self.child.take() else {
            return Ok(());
        };
        // This closes its standard input, at which it ends.
        let status = child.wait().map_err(no_second)?;
        if status.success() { Ok(()) } else { Err(no_second(status)) }
    }
}

/// Hold memory up to the limit until standard input is closed.
fn hold(driver: &dyn Driver, task: &ChildTask) -> i32 {
    match filled(driver, task) {
        Ok(held) => tell(Message::Held(held)),
        Err(problem) => {
            let step = run::result(StepId::S09, Err(problem));
            tell(Message::Error(step.found));
            return 1;
        }
    }
    let mut ignored = [0; 64];
    while matches!(std::io::stdin().lock().read(&mut ignored), Ok(1..)) {}
    0
}

fn filled(driver: &dyn Driver, task: &ChildTask) -> Result<HeldMemory, StepProblem> {
    driver.init()?;
    let mut uuids = Vec::new();
    for index in 0..driver.count()?.min(open::MOST_GPUS as i32) {
        uuids.push(open::uuid_text(driver.uuid(driver.device(index)?)?));
    }
    let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
    let index = open::select(&uuids, task.gpu.as_deref())?;
    let context = driver.retain(driver.device(index as i32)?)?;
    driver.enter(context)?;
    let held = share::hold(driver)?;
    Ok(HeldMemory {
        bytes: held.bytes,
        refused: held.refused.map(|code| code.0),
    })
}
