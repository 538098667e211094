//! One GPU, and what this process holds of it.

use divvy_gpu_sim::{GpuLedger, LedgerError, LedgerSlot, directory};

use crate::card::CudaCard;
use crate::codes::{CuCode, OPERATING_SYSTEM, OUT_OF_MEMORY, UNKNOWN};
use crate::graph::GraphMemory;
use crate::trace::complain;

/// One GPU.
#[derive(Debug)]
pub(crate) struct SimulatedDevice {
    pub(crate) card: CudaCard,
    pub(crate) primary: Primary,
    /// The pool that cuDeviceSetMemPool has set.
    pub(crate) pool: Option<usize>,
    pub(crate) graphs: GraphMemory,
    /// Until when this process's work runs, if the machine has no ledger.
    busy_until: u64,
    /// What this process holds.
    held: u64,
    /// This process's slot in the ledger, if the machine has a ledger and the process has used the GPU.
    slot: Option<LedgerSlot>,
}

/// The primary context of a GPU. It exists while the handle is in the table of contexts.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// The handle, which stays the same; 0 before the first use.
    pub(crate) handle: usize,
    /// How often it has been retained and not yet released.
    pub(crate) retained: u32,
    pub(crate) flags: u32,
}

impl SimulatedDevice {
    pub(crate) fn new(card: CudaCard) -> SimulatedDevice {
        SimulatedDevice {
            card,
            primary: Primary::default(),
            pool: None,
            graphs: GraphMemory::default(),
            busy_until: 0,
            held: 0,
            slot: None,
        }
    }

    /// Return the slot, or `None` if the machine has no ledger.
    fn slot(&mut self) -> Result<Option<&mut LedgerSlot>, CuCode> {
        if self.slot.is_none() {
            let Some(directory) = directory() else { return Ok(None) };
            let slot = GpuLedger::open(&directory, &self.card.ledger).and_then(GpuLedger::claim);
            self.slot = Some(slot.map_err(failed)?);
        }
        Ok(self.slot.as_mut())
    }

    /// Hold this much instead of what is held now.
    fn hold(&mut self, bytes: u64) -> Result<(), CuCode> {
        let (capacity, grows) = (self.card.capacity, bytes > self.held);
        let fits = match self.slot()? {
            Some(slot) => slot.hold(bytes, capacity).map_err(failed)?,
            None => !grows || bytes <= capacity,
        };
        if !fits {
            return Err(OUT_OF_MEMORY);
        }
        self.held = bytes;
        Ok(())
    }

    /// Take memory of the GPU.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<(), CuCode> {
        self.hold(self.held.checked_add(bytes).ok_or(OUT_OF_MEMORY)?)
    }

    /// Give memory back.
    pub(crate) fn give(&mut self, bytes: u64) -> Result<(), CuCode> {
        let left = self.held.checked_sub(bytes).ok_or_else(|| {
            complain(&format!(
                "a mistake of the simulation: {bytes} bytes are given back, but only {} are held",
                self.held
            ));
            UNKNOWN
        })?;
        self.hold(left)
    }

    /// Return the memory that no process holds.
    pub(crate) fn free(&mut self) -> Result<u64, CuCode> {
        let (capacity, held) = (self.card.capacity, self.held);
        match self.slot()? {
            Some(slot) => slot.free(capacity).map_err(failed),
            None => Ok(capacity.saturating_sub(held)),
        }
    }

    /// Run work of this length behind all other work. Return when it ends.
    pub(crate) fn run(&mut self, from: u64, length: u64) -> Result<u64, CuCode> {
        if let Some(slot) = self.slot()? {
            return slot.run(from, length).map_err(failed);
        }
        self.busy_until = self.busy_until.max(from).saturating_add(length);
        Ok(self.busy_until)
    }
}

fn failed(error: LedgerError) -> CuCode {
    complain(&error.to_string());
    OPERATING_SYSTEM
}
