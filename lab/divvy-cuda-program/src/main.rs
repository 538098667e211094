//! A program that uses a GPU through CUDA's driver library, for `divvy demo --scenario isolation`.
//!
//! `divvy-cuda-program LIBRARY`: the library is usually `libcuda.so.1`, as the CUDA runtime library names it. The program does what it reads from standard
//! input, one request per line, and answers each with a line of JSON: what it did, in words (`says`), and the numbers that the driver's library returned.
//! It ends when standard input does.
//!
//! | request | meaning |
//! |---|---|
//! | `start` | make the primary context of the first GPU |
//! | `memory` | ask how much memory there is (`cuMemGetInfo`) |
//! | `allocate MIB` | allocate this much |
//! | `fill` | allocate until no 2 MiB are left, in pieces of 256 MiB, then in smaller ones |

mod cuda;

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use self::cuda::{Code, Cuda};

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
    let mut program = None;
    let mut output = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input cannot be read")?;
        let answer = match (line.split_whitespace().collect::<Vec<_>>().as_slice(), &mut program) {
            (["start"], program @ None) => program.insert(Program::start(&name)?).started()?,
            (["memory"], Some(program)) => program.memory()?,
            (["allocate", mib], Some(program)) => program.allocate(mib.parse().context("how many MiB?")?)?,
            (["fill"], Some(program)) => program.fill()?,
            _ => bail!("the request {line:?} is unknown, or not possible now"),
        };
        writeln!(output, "{answer}").context("the answer cannot be written")?;
    }
    Ok(())
}

struct Program {
    cuda: Cuda,
    library: String,
    /// What was allocated, in MiB.
    allocated: u64,
}

impl Program {
    fn start(library: &str) -> Result<Program> {
        let cuda = Cuda::load(library)?;
        cuda.init().ok("cuInit", &cuda)?;
        cuda.enter()?;
        Ok(Program {
            cuda,
            library: library.to_owned(),
            allocated: 0,
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

    /// Allocate memory, and keep it.
    fn take(&mut self, mib: u64) -> Code {
        let code = self.cuda.allocate(mib.saturating_mul(MIB));
        if code.is_success() {
            self.allocated += mib;
        }
        code
    }

    fn error(&self, code: Code) -> Option<String> {
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
        });
        ensure!(total >= free, "cuMemGetInfo says that {free} of {total} bytes are free");
        Ok(numbers)
    }
}
