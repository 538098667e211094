//! A `libnvidia-ml.so` without a GPU, for tests and for `divvy demo`.
//!
//! It has NVML's C ABI (symbols: research/nvidia-device-plugin.md section 8.3 and what `nvml-wrapper` 0.13 calls), so
//! the very code that talks to a driver runs against it: loading, enumeration, events, processes, topology.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `DIVVY_NVML_SIM` | the machine description ([`divvy_model::machine`]), read at every first `nvmlInit` |
//! | `DIVVY_NVML_SIM_NODE` | name of the node in it; the first node when absent |
//! | `DIVVY_NVML_SIM_CONTROL` | path of the control socket (below); none when absent |
//! | `DIVVY_NVML_SIM_INIT_ERROR` | code that `nvmlInit` returns until the control socket says otherwise |
//! | `DIVVY_NVML_SIM_HANG` | seconds for which calls block, from the first `nvmlInit` on, likewise |
//!
//! # Control socket
//!
//! The library listens from the first `nvmlInit` on, whether that succeeds or not; of several processes that load it with
//! the same path one listens and another takes over when that one ends. Requests and answers are lines of JSON:
//!
//! ```text
//! {"op":"xid","gpu":0,"xid":79}                 {"ok":true,"delivered":1}
//! {"op":"lost","gpu":0,"lost":true}             {"ok":true}
//! {"op":"memory","gpu":0,"pid":123,"used_mib":100}   0 removes the process
//! {"op":"temperature","gpu":0,"celsius":90}
//! {"op":"utilization","gpu":0,"percent":50}
//! {"op":"init","error":9}                       0: nvmlInit works again
//! {"op":"hang","seconds":30}                    0: calls return
//! {"op":"state"}                                {"ok":true,"state":{…}}
//! ```
//!
//! A refused request is answered `{"err":"…"}`. An XID goes to every event set of the listening process that registered
//! the GPU. All other changes outlive the process: they are kept in `<control>.state`, replaced atomically and read again
//! by every loading process when it changed, so that a lost GPU stays lost when the probe is restarted. Who wants a state before anybody
//! listens may write that file.
//!
//! # Where it simplifies
//!
//! No MIG (`nvmlDeviceGetMigMode` answers NOT_SUPPORTED), no power, fan or ECC readings, no settings. PCI device ids are
//! made up. Symbols that are absent here are reported by `nvml-wrapper` as such, as with an old driver.

#![allow(
    unsafe_code,
    reason = "a C ABI: every symbol is unmangled and writes through the caller's pointers"
)]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

mod abi;
mod changes;
mod control;
mod machine;
mod sim;
