//! A kernel that computes for a chosen time, and the work that launches it.

#![allow(unsafe_code, reason = "it calls a C ABI")]

use std::ffi::{CString, c_char, c_uint, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cuda::{CallResult, CudaLibrary, call};

/// The kernel: so many rounds of a calculation in each thread. The store is there so that the compiler keeps the rounds. PTX for sm_50 runs on every later GPU.
/// The name says how long a launch is meant to take: the simulated driver does not run the code, and takes that long.
const PTX: &str = "
.version 4.0
.target sm_50
.address_size 64
.global .u32 sink;
.visible .entry NAME(.param .u32 rounds)
{
    .reg .pred %again, %kept;
    .reg .u32 %left, %value;
    ld.param.u32 %left, [rounds];
    mov.u32 %value, %tid.x;
    setp.eq.u32 %again, %left, 0;
    @%again bra ENDED;
ROUND:
    mad.lo.u32 %value, %value, 1664525, 1013904223;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %again, %left, 0;
    @%again bra ROUND;
ENDED:
    setp.eq.u32 %kept, %value, 3735928559;
    @%kept st.global.u32 [sink], %value;
    ret;
}
";

/// The blocks and the threads of a launch. They need not fill a GPU: the driver gives a GPU to one process at a time.
const BLOCKS: c_uint = 64;
const THREADS: c_uint = 128;

/// The rounds of the first launch that is timed.
const FIRST_ROUNDS: u32 = 1000;

/// How work is given to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkMode {
    /// Each kernel is launched.
    Kernels,
    /// The kernels are nodes of one graph, which is launched.
    Graph,
}

/// `cuLaunchKernel`: the function, the grid, the blocks, the shared memory, the stream, and the parameters in two forms.
type LaunchFunction = unsafe extern "C" fn(
    usize,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    usize,
    *mut *mut c_void,
    *mut *mut c_void,
) -> std::ffi::c_int;

/// A kernel in the current context. It is kept until the process ends.
pub(crate) struct LoadedKernel {
    function: usize,
    rounds: u32,
    launch: LaunchFunction,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2` of cuda.h.
#[repr(C)]
struct NodeParameters {
    function: usize,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: usize,
    context: usize,
}

const _: () = assert!(size_of::<NodeParameters>() == 72 && std::mem::offset_of!(NodeParameters, parameters) == 40);

impl LoadedKernel {
    /// Load the kernel under a name that says how many nanoseconds it takes.
    pub(crate) fn load(cuda: &CudaLibrary, ns: u64, rounds: u32) -> Result<LoadedKernel> {
        let name = format!("spin_{ns}ns");
        let code = CString::new(PTX.replace("NAME", &name)).context("the code has a zero byte")?;
        let name = CString::new(name).context("the name has a zero byte")?;
        let (mut module, mut function) = (0_usize, 0_usize);
        // The code ends with a zero byte.
        call!(cuda, "cuModuleLoadData"(&raw mut module => *mut usize, code.as_ptr() => *const c_char))?;
        // The module was just loaded, and the name ends with a zero byte.
        call!(cuda, "cuModuleGetFunction"(&raw mut function => *mut usize, module => usize, name.as_ptr() => *const c_char))?;
        Ok(LoadedKernel {
            function,
            rounds,
            // SAFETY: the type is that of the symbol in cuda.h, and the library stays loaded until the process ends.
            launch: unsafe { cuda.symbol("cuLaunchKernel") }?,
        })
    }

    /// Find how many rounds take this long on this GPU, which nothing else should use meanwhile.
    pub(crate) fn calibrate(cuda: &CudaLibrary, ns: u64) -> Result<u32> {
        let mut kernel = LoadedKernel::load(cuda, ns, FIRST_ROUNDS)?;
        // The GPU raises its clocks only under load.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            kernel.launch(cuda)?;
            synchronize(cuda)?;
        }
        // One long launch, because a launch itself takes microseconds.
        let least = Duration::from_millis(20);
        loop {
            let began = Instant::now();
            kernel.launch(cuda)?;
            synchronize(cuda)?;
            let took = began.elapsed();
            if took >= least {
                let rounds = u128::from(kernel.rounds) * u128::from(ns) / took.as_nanos();
                return Ok(u32::try_from(rounds).unwrap_or(u32::MAX).max(1));
            }
            // Simulated kernels take as long as their name says, whatever the number of rounds is.
            let Some(more) = kernel.rounds.checked_mul(2) else {
                ensure!(
                    took >= Duration::from_nanos(ns / 2),
                    "{} rounds take {took:?}: the driver has removed them",
                    kernel.rounds
                );
                return Ok(FIRST_ROUNDS);
            };
            kernel.rounds = more;
        }
    }

    fn launch(&self, cuda: &CudaLibrary) -> Result<()> {
        let mut rounds = self.rounds;
        let mut parameters = [(&raw mut rounds).cast::<c_void>()];
        // SAFETY: the function is in the current context. The driver copies the parameter before it returns.
        let code = unsafe {
            (self.launch)(
                self.function,
                BLOCKS,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                0,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        CallResult::from(code).ok("cuLaunchKernel", cuda)
    }

    /// Make a graph of so many launches, one after the other.
    fn graph(&self, cuda: &CudaLibrary, launches: u64) -> Result<usize> {
        let (mut graph, mut executable) = (0_usize, 0_usize);
        call!(cuda, "cuGraphCreate"(&raw mut graph => *mut usize, 0 => c_uint))?;
        let mut rounds = self.rounds;
        let mut parameters = [(&raw mut rounds).cast::<c_void>()];
        let node = NodeParameters {
            function: self.function,
            grid: [BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            shared: 0,
            parameters: parameters.as_mut_ptr(),
            extra: ptr::null_mut(),
            kernel: 0,
            context: 0,
        };
        let mut before = 0_usize;
        for index in 0..launches {
            let mut added = 0_usize;
            // The graph is new, the node before was just added to it, and the driver copies the parameters before it returns.
            call!(cuda, "cuGraphAddKernelNode_v2"(&raw mut added => *mut usize, graph => usize, &raw const before => *const usize,
                usize::from(index > 0) => usize, &raw const node => *const NodeParameters))?;
            before = added;
        }
        // The graph is complete.
        call!(cuda, "cuGraphInstantiateWithFlags"(&raw mut executable => *mut usize, graph => usize, 0 => u64))?;
        Ok(executable)
    }

    /// Launch so many kernels, wait for them, and begin again. Count what ended in the time `length` that begins after `warm_up`.
    pub(crate) fn work(
        &self,
        cuda: &CudaLibrary,
        mode: WorkMode,
        at_once: u64,
        warm_up: Duration,
        length: Duration,
    ) -> Result<Value> {
        let graph = match mode {
            WorkMode::Kernels => None,
            WorkMode::Graph => Some(self.graph(cuda, at_once)?),
        };
        let began = Instant::now();
        let (mut launches, mut from) = (0_u64, None);
        loop {
            match graph {
                // The graph was made above.
                Some(graph) => call!(cuda, "cuGraphLaunch"(graph => usize, 0 => usize))?,
                None => (0..at_once).try_for_each(|_| self.launch(cuda))?,
            }
            synchronize(cuda)?;
            let now = began.elapsed();
            if now < warm_up {
                continue;
            }
            // The round in which the warm-up ends does not count.
            let Some(from) = from else {
                from = Some(now);
                continue;
            };
            launches += at_once;
            if now >= warm_up + length {
                let time: Duration = now - from;
                return Ok(json!({"launches": launches, "ns": u64::try_from(time.as_nanos())?}));
            }
        }
    }

    /// Keep the GPU busy for a part of each period, and idle for the rest.
    pub(crate) fn pulse(&self, cuda: &CudaLibrary, busy: Duration, period: Duration, length: Duration) -> Result<Value> {
        let began = Instant::now();
        let mut launches = 0_u64;
        while began.elapsed() < length {
            let start = Instant::now();
            while start.elapsed() < busy {
                self.launch(cuda)?;
                synchronize(cuda)?;
                launches += 1;
            }
            std::thread::sleep(period.saturating_sub(start.elapsed()));
        }
        Ok(json!({"launches": launches}))
    }

    /// Time launches of a kernel that does nothing.
    pub(crate) fn cost(cuda: &CudaLibrary, count: u64) -> Result<Value> {
        const AT_ONCE: u64 = 100;
        let kernel = LoadedKernel::load(cuda, 0, 0)?;
        let (mut launching, mut launches) = (Duration::ZERO, 0_u64);
        kernel.launch(cuda)?;
        synchronize(cuda)?;
        let began = Instant::now();
        while launches < count {
            let start = Instant::now();
            (0..AT_ONCE).try_for_each(|_| kernel.launch(cuda))?;
            launching += start.elapsed();
            synchronize(cuda)?;
            launches += AT_ONCE;
        }
        let each = |time: Duration| u64::try_from(time.as_nanos() / u128::from(launches.max(1)));
        Ok(json!({"launch_ns": each(launching)?, "with_synchronization_ns": each(began.elapsed())?}))
    }
}

/// Wait for all work of the context.
pub(crate) fn synchronize(cuda: &CudaLibrary) -> Result<()> {
    call!(cuda, "cuCtxSynchronize"())
}

impl std::str::FromStr for WorkMode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<WorkMode> {
        match text {
            "kernels" => Ok(WorkMode::Kernels),
            "graph" => Ok(WorkMode::Graph),
            _ => bail!("{text} is neither kernels nor graph"),
        }
    }
}
