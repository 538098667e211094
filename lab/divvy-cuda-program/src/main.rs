//! A program that uses a GPU through CUDA's driver library, for `divvy demo --scenario isolation` and for `cargo xtask gpu`.
//!
//! `divvy-cuda-program LIBRARY`: the library is usually `libcuda.so.1`, as the CUDA runtime library names it. The program does what it reads from standard
//! input, one request per line, and answers each with a line of JSON. The first four answers say what it did, in words (`says`), and the numbers that the
//! driver's library returned. It ends when standard input does. A call that fails ends it, except where a refusal is an answer.
//!
//! | request | meaning |
//! |---|---|
//! | `start` | make the primary context of the first GPU |
//! | `memory` | ask how much memory there is (`cuMemGetInfo`) |
//! | `allocate MIB` | allocate this much |
//! | `fill` | allocate until no 2 MiB are left, in pieces of 256 MiB, then in smaller ones |
//! | `pieces BYTES COUNT` | allocate so many pieces, ask how much is free, and free them |
//! | `kind NAME MIB` | allocate in one of the ways in [`kinds::KINDS`] |
//! | `calibrate NS` | find how many rounds of the kernel take this long |
//! | `kernel NS ROUNDS` | load the kernel |
//! | `work MODE COUNT WARM_UP_MS MS` | launch the kernel so often (`kernels`, or as one `graph`), wait, and begin again; count the launches |
//! | `pulse BUSY_MS PERIOD_MS MS` | keep the GPU busy for a part of each period |
//! | `pairs COUNT BYTES` | time `cuMemAlloc` with `cuMemFree` |
//! | `launches COUNT` | time launches of a kernel that does nothing |
//! | `attack NAME NUMBER` | attack the files of the container's share ([`attack`]), in the background; this and the next ones are possible before `start` |
//! | `attack-end` | end the attack, and say what came of it |
//! | `limits` | say what the file of limits says |
//! | `nvml LIBRARY` | load NVML |
//! | `nvml-describe`, `nvml-state UUID`, `nvml-calls UUID`, `nvml-samples UUID EVERY_MS MS` | ask NVML ([`nvml`]) |

mod attack;
mod cuda;
mod kernel;
mod kinds;
mod nvml;

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nvml_wrapper::Nvml;
use serde_json::{Value, json};

use self::attack::RunningAttack;
use self::cuda::{CallResult, CudaLibrary};
use self::kernel::LoadedKernel;

const MIB: u64 = 1 << 20;
/// The first piece of `fill`, in MiB.
const LARGE: u64 = 256;
/// The last piece of `fill`, in MiB: CUDA's pages have this size.
const SMALL: u64 = 2;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the final error message")]
            {
                eprintln!("divvy-cuda-program: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let name = std::env::args().nth(1).context("usage: divvy-cuda-program LIBRARY")?;
    let (mut program, mut nvml, mut attack) = (None, None, None);
    let mut output = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input cannot be read")?;
        let words = line.split_whitespace().collect::<Vec<_>>();
        if let Some(answer) = ask_nvml(&words, &mut nvml)? {
            writeln!(output, "{answer}").context("the answer cannot be written")?;
            continue;
        }
        if let Some(answer) = ask_attack(&words, &mut attack)? {
            writeln!(output, "{answer}").context("the answer cannot be written")?;
            continue;
        }
        let answer = match (words.as_slice(), &mut program) {
            (["start"], program @ None) => program.insert(ProgramState::start(&name)?).started()?,
            (["memory"], Some(program)) => program.memory()?,
            (["allocate", mib], Some(program)) => program.allocate(number(mib)?)?,
            (["fill"], Some(program)) => program.fill()?,
            (["pieces", bytes, count], Some(program)) => program.pieces(number(bytes)?, number(count)?)?,
            (["kind", name, mib], Some(program)) => program.kind(name, number(mib)?)?,
            (["calibrate", ns], Some(program)) => json!({"rounds": LoadedKernel::calibrate(&program.cuda, number(ns)?)?}),
            (["kernel", ns, rounds], Some(program)) => {
                let rounds = u32::try_from(number(rounds)?)?;
                program.kernel = Some(LoadedKernel::load(&program.cuda, number(ns)?, rounds)?);
                json!({})
            }
            (["work", mode, count, warm_up, length], Some(program)) => {
                let (warm_up, length) = (milliseconds(warm_up)?, milliseconds(length)?);
                program
                    .loaded()?
                    .work(&program.cuda, mode.parse()?, number(count)?, warm_up, length)?
            }
            (["pulse", busy, period, length], Some(program)) => {
                let (busy, period) = (milliseconds(busy)?, milliseconds(period)?);
                program.loaded()?.pulse(&program.cuda, busy, period, milliseconds(length)?)?
            }
            (["pairs", count, bytes], Some(program)) => {
                let count = u32::try_from(number(count)?)?;
                json!({"ns": kinds::pairs(&program.cuda, count, number(bytes)?)?})
            }
            (["launches", count], Some(program)) => LoadedKernel::cost(&program.cuda, number(count)?)?,
            _ => bail!("the request {line:?} is unknown, or not possible now"),
        };
        writeln!(output, "{answer}").context("the answer cannot be written")?;
    }
    Ok(())
}

fn number(text: &str) -> Result<u64> {
    text.parse().with_context(|| format!("{text} is not a number"))
}

fn milliseconds(text: &str) -> Result<Duration> {
    Ok(Duration::from_millis(number(text)?))
}

/// Answer a request about the files of the share; `None` if it is about something else.
fn ask_attack(words: &[&str], attack: &mut Option<RunningAttack>) -> Result<Option<Value>> {
    let answer = match words {
        ["attack", name, size] if attack.is_none() => {
            let (begun, standing) = RunningAttack::begin(name, number(size)?)?;
            *attack = Some(begun);
            standing
        }
        ["attack-end"] => attack.take().context("there is no attack")?.end()?,
        ["limits"] => attack::limits()?,
        _ => return Ok(None),
    };
    Ok(Some(answer))
}

/// Answer a request about NVML; `None` if it is about something else.
fn ask_nvml(words: &[&str], nvml: &mut Option<Nvml>) -> Result<Option<Value>> {
    let answer = match (words, nvml) {
        (["nvml", library], nvml) => {
            *nvml = Some(nvml::load(library)?);
            json!({})
        }
        (["nvml-describe"], Some(nvml)) => nvml::describe(nvml)?,
        (["nvml-state", uuid], Some(nvml)) => nvml::state(nvml, uuid)?,
        (["nvml-calls", uuid], Some(nvml)) => nvml::calls(nvml, uuid)?,
        (["nvml-samples", uuid, every, length], Some(nvml)) => {
            nvml::samples(nvml, uuid, milliseconds(every)?, milliseconds(length)?)?
        }
        _ => return Ok(None),
    };
    Ok(Some(answer))
}

struct ProgramState {
    cuda: CudaLibrary,
    library: String,
    /// What was allocated, in MiB.
    allocated: u64,
    kernel: Option<LoadedKernel>,
    /// How long `cuInit` and the context took.
    start: Duration,
}

impl ProgramState {
    fn start(library: &str) -> Result<ProgramState> {
        let cuda = CudaLibrary::load(library)?;
        let began = Instant::now();
        cuda.init().ok("cuInit", &cuda)?;
        cuda.enter()?;
        Ok(ProgramState {
            cuda,
            library: library.to_owned(),
            allocated: 0,
            kernel: None,
            start: began.elapsed(),
        })
    }

    fn started(&mut self) -> Result<Value> {
        let (free, total) = self.cuda.memory()?;
        let text = format!(
            "{}: cuMemGetInfo says {} MiB, of which {} MiB are free",
            self.library,
            total / MIB,
            free / MIB
        );
        self.answer(&text, None)
    }

    fn memory(&mut self) -> Result<Value> {
        let (free, total) = self.cuda.memory()?;
        let text = format!("cuMemGetInfo says {} MiB, of which {} MiB are free", total / MIB, free / MIB);
        self.answer(&text, None)
    }

    fn allocate(&mut self, mib: u64) -> Result<Value> {
        let code = self.take(mib);
        let text = match self.error(code) {
            None => format!("cuMemAlloc of {mib} MiB: success"),
            Some(error) => format!("cuMemAlloc of {mib} MiB: {error}"),
        };
        self.answer(&text, self.error(code).map(|error| (mib, error)))
    }

    fn fill(&mut self) -> Result<Value> {
        let (before, mut pieces, mut size) = (self.allocated, 0_u64, LARGE);
        loop {
            let code = self.take(size);
            let Some(error) = self.error(code) else {
                pieces += 1;
                continue;
            };
            if size > SMALL {
                size /= 2;
                continue;
            }
            let text = format!(
                "allocated {} MiB more in {pieces} pieces; then cuMemAlloc of {size} MiB: {error}",
                self.allocated - before
            );
            return self.answer(&text, Some((size, error)));
        }
    }

    fn loaded(&self) -> Result<&LoadedKernel> {
        self.kernel.as_ref().context("no kernel was loaded")
    }

    /// Allocate pieces, and free them. The numbers are bytes that are free.
    fn pieces(&mut self, bytes: u64, count: u64) -> Result<Value> {
        let (before, _) = self.cuda.memory()?;
        let mut pieces = Vec::new();
        let mut refused = None;
        for _ in 0..count {
            let (code, pointer) = self.cuda.allocate(bytes);
            if let Some(error) = self.error(code) {
                refused = Some(error);
                break;
            }
            pieces.push(pointer);
        }
        let (after, _) = self.cuda.memory()?;
        let got = pieces.len();
        for pointer in pieces {
            kinds::free(&self.cuda, pointer)?;
        }
        Ok(json!({"before": before, "after": after, "got": got, "refused": refused, "freed": self.cuda.memory()?.0}))
    }

    /// Allocate in another way, and keep it. The numbers are bytes that are free.
    fn kind(&mut self, name: &str, mib: u64) -> Result<Value> {
        let (before, _) = self.cuda.memory()?;
        let refused = kinds::allocate(&self.cuda, name, mib).err().map(|error| error.to_string());
        let (after, _) = self.cuda.memory()?;
        Ok(json!({"before": before, "after": after, "refused": refused}))
    }

    /// Allocate memory, and keep it.
    fn take(&mut self, mib: u64) -> CallResult {
        let (code, _) = self.cuda.allocate(mib.saturating_mul(MIB));
        if code.is_success() {
            self.allocated += mib;
        }
        code
    }

    fn error(&self, code: CallResult) -> Option<String> {
        (!code.is_success()).then(|| self.cuda.name(code))
    }

    fn answer(&self, text: &str, refused: Option<(u64, String)>) -> Result<Value> {
        let (free, total) = self.cuda.memory()?;
        let refused = refused.map(|(mib, error)| json!({"mib": mib, "error": error}));
        let numbers = json!({
            "says": text,
            "total_mib": total / MIB,
            "free_mib": free / MIB,
            "allocated_mib": self.allocated,
            "refused": refused,
            "start_us": u64::try_from(self.start.as_micros())?,
        });
        ensure!(total >= free, "cuMemGetInfo says that {free} of {total} bytes are free");
        Ok(numbers)
    }
}
