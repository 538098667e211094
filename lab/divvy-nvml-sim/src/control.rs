//! The control socket, which accepts changes at run time. Each request is one line of JSON.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use divvy_model::machine::MachineHealth;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::changes::{Division, EventErrors, GaugeChanges, GpuChanges, Instance, LimitMode, MachineChanges};
use crate::machine::NvmlMachine;
use crate::sim::{ChangeRefusal, XidEvent, complain, now_ms, sim};

const MAX_LINE: u64 = 64 * 1024;

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum ControlRequest {
    Xid {
        gpu: u32,
        xid: u64,
        /// The GPU instance and the compute instance.
        #[serde(default)]
        instances: Option<(u32, u32)>,
    },
    Lost {
        gpu: u32,
        lost: bool,
    },
    Memory {
        gpu: u32,
        pid: u32,
        used_mib: u64,
        /// The position among the GPU's MIG devices of the one that the process uses.
        mig: Option<u32>,
        /// Whether the process is a client of MPS.
        #[serde(default)]
        mps: bool,
        /// Whether the process computes as well as it renders. Without a value, it does not render.
        graphics: Option<bool>,
    },
    #[serde(rename = "mig_mode")]
    MigMode {
        gpu: u32,
        error: u32,
    },
    Mig {
        gpu: u32,
        devices: Option<Vec<Instance>>,
    },
    Temperature {
        gpu: u32,
        celsius: u32,
    },
    Utilization {
        gpu: u32,
        percent: u32,
    },
    Ecc {
        gpu: u32,
        corrected: u64,
        uncorrected: u64,
    },
    Health {
        gpu: u32,
        health: MachineHealth,
    },
    Gauges {
        gpu: u32,
        gauges: GaugeChanges,
    },
    Init {
        error: u32,
    },
    Events(EventErrors),
    Register {
        gpu: u32,
        error: u32,
    },
    #[serde(rename = "limit_mode")]
    LimitMode {
        mode: Option<LimitMode>,
    },
    #[serde(rename = "limit")]
    Limit {
        gpu: u32,
        error: u32,
    },
    #[serde(rename = "process_utilization")]
    ProcessUtilization {
        gpu: u32,
        error: u32,
    },
    Hang {
        seconds: u64,
    },
    State {},
    Describe {},
}

/// Listen at `path` in a new thread as soon as no other process listens there.
pub(crate) fn start(path: PathBuf) -> io::Result<()> {
    // Usually no other process listens. Binding here lets clients connect as soon as nvmlInit has returned.
    let first = bind(&path)?;
    let name = "nvml-sim-control".to_owned();
    thread::Builder::new()
        .name(name)
        .spawn(move || listen(&path, first))
        .map(drop)
}

fn listen(path: &Path, first: Option<UnixListener>) {
    let listener = match first {
        Some(listener) => listener,
        None => loop {
            thread::sleep(Duration::from_millis(100));
            match bind(path) {
                Ok(Some(listener)) => break listener,
                Ok(None) => {}
                Err(error) => return complain(&format!("control socket {}: {error}", path.display())),
            }
        },
    };
    for stream in listener.incoming() {
        let serving = stream.and_then(|stream| thread::Builder::new().spawn(move || serve(&stream)));
        if let Err(error) = serving {
            complain(&format!("control socket {}: {error}", path.display()));
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Return the listener, or `None` if another process listens at the path. A stale socket file is removed.
fn bind(path: &Path) -> io::Result<Option<UnixListener>> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
        other => return other.map(Some),
    }
    match UnixStream::connect(path) {
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    match UnixListener::bind(path) {
        // Another process has bound the socket meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        other => other.map(Some),
    }
}

fn serve(stream: &UnixStream) {
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(1..) if line.ends_with(b"\n") => {}
            // The connection has ended or failed, or the line is too long.
            _ => return,
        }
        let answer = serde_json::from_slice(&line)
            .map_err(ChangeRefusal::Request)
            .and_then(perform);
        let mut text = answer
            .unwrap_or_else(|refusal| json!({ "err": refusal.to_string() }))
            .to_string();
        text.push('\n');
        if (&mut &*stream).write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

fn perform(request: ControlRequest) -> Result<Value, ChangeRefusal> {
    match request {
        ControlRequest::Xid { gpu, xid, instances } => {
            let delivered = sim().xid(XidEvent {
                gpu: gpu as usize,
                xid,
                instances,
            })?;
            return Ok(json!({ "ok": true, "delivered": delivered }));
        }
        ControlRequest::State {} => {
            let (changes, machine) = sim().state()?;
            let uuids: Vec<_> = machine.cards.iter().map(|card| &card.uuid).collect();
            let state = json!({ "node": machine.name, "uuids": uuids, "changes": changes, "gpm_samples": sim().samples() });
            return Ok(json!({ "ok": true, "state": state }));
        }
        ControlRequest::Lost { gpu, lost } => change_gpu(gpu, |gpu| gpu.lost = lost)?,
        ControlRequest::Memory {
            gpu,
            pid,
            used_mib,
            mig,
            mps,
            graphics,
        } => sim().change(|changes, machine| {
            let total = machine.cards.get(gpu as usize).map_or(0, |card| card.described.memory_mib);
            if used_mib > total {
                return Err(ChangeRefusal::Memory { gpu, total, used_mib });
            }
            let changed = this_gpu(changes, machine, gpu)?;
            changed.processes.insert(pid, used_mib);
            match mig {
                Some(mig) => changed.mig_of.insert(pid, mig),
                None => changed.mig_of.remove(&pid),
            };
            if mps {
                changed.mps.insert(pid)
            } else {
                changed.mps.remove(&pid)
            };
            match graphics {
                Some(computes) => changed.graphics.insert(pid, computes),
                None => changed.graphics.remove(&pid),
            };
            Ok(())
        })?,
        ControlRequest::Mig { gpu, devices } => sim().change(|changes, machine| {
            this_gpu(changes, machine, gpu)?.mig = Some(Division(devices));
            changes.descriptions += 1;
            Ok(())
        })?,
        ControlRequest::Temperature { gpu, celsius } => change_gpu(gpu, |gpu| gpu.temperature = Some(celsius))?,
        ControlRequest::Ecc {
            gpu,
            corrected,
            uncorrected,
        } => sim().change(|changes, machine| {
            let described = machine.cards.get(gpu as usize).map(|card| card.described.health);
            let changed = this_gpu(changes, machine, gpu)?;
            changed.health = Some(MachineHealth {
                ecc_errors: Some((corrected, uncorrected)),
                ..changed.health.or(described).unwrap_or_default()
            });
            Ok(())
        })?,
        ControlRequest::Health { gpu, health } => change_gpu(gpu, |gpu| gpu.health = Some(health))?,
        ControlRequest::Gauges { gpu, gauges } => change_gpu(gpu, |gpu| gpu.gauges = gauges)?,
        ControlRequest::Utilization { gpu, percent } => change_gpu(gpu, |gpu| gpu.utilization = Some(percent.min(100)))?,
        ControlRequest::Init { error } => sim().change(|changes, _| {
            changes.init_error = error;
            Ok(())
        })?,
        ControlRequest::Events(errors) => sim().change(|changes, _| {
            changes.events = errors;
            Ok(())
        })?,
        ControlRequest::MigMode { gpu, error } => change_gpu(gpu, |gpu| gpu.mig_mode_error = error)?,
        ControlRequest::Register { gpu, error } => change_gpu(gpu, |gpu| gpu.register = error)?,
        ControlRequest::LimitMode { mode } => sim().change(|changes, _| {
            changes.limit_mode = mode;
            Ok(())
        })?,
        ControlRequest::ProcessUtilization { gpu, error } => change_gpu(gpu, |gpu| gpu.utilization_error = error)?,
        ControlRequest::Limit { gpu, error } => change_gpu(gpu, |gpu| gpu.limit_error = error)?,
        ControlRequest::Describe {} => sim().change(|changes, _| {
            changes.descriptions += 1;
            Ok(())
        })?,
        ControlRequest::Hang { seconds } => sim().change(|changes, _| {
            let until = now_ms().saturating_add(seconds.saturating_mul(1000));
            changes.hang_until_ms = if seconds == 0 { 0 } else { until };
            Ok(())
        })?,
    }
    Ok(json!({ "ok": true }))
}

fn change_gpu(gpu: u32, edit: impl FnOnce(&mut GpuChanges)) -> Result<(), ChangeRefusal> {
    sim().change(|changes, machine| {
        edit(this_gpu(changes, machine, gpu)?);
        Ok(())
    })
}

fn this_gpu<'c>(changes: &'c mut MachineChanges, machine: &NvmlMachine, gpu: u32) -> Result<&'c mut GpuChanges, ChangeRefusal> {
    let count = machine.cards.len();
    if gpu as usize >= count {
        return Err(ChangeRefusal::NoGpu {
            gpu: gpu as usize,
            count,
        });
    }
    Ok(changes.gpus.entry(gpu).or_default())
}
