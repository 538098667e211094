//! A pod's rules, evaluated once per product and question, not once per GPU.

use std::cell::Cell;

use crate::ask::Ask;
use crate::hash::rank;
use crate::node::GpuState;
use crate::products::Products;

/// A pod's rules, prepared for comparison with many GPUs: for each product, it caches whether the pod accepts the product. A
/// value is valid only until the ledger changes, because the numbers of unused products are reused.
#[derive(Debug, Clone)]
pub struct Taste<'a> {
    ask: &'a Ask,
    /// By product number: whether the pod accepts the product; `None` if not evaluated yet.
    takes: Vec<Cell<Option<bool>>>,
    /// The UUIDs that the pod names, with their hashes, sorted for binary search; empty if any GPU is accepted.
    uuids: Vec<(u64, &'a str)>,
}

impl<'a> Taste<'a> {
    /// Prepare the rules of a pod.
    pub fn of(ask: &'a Ask) -> Taste<'a> {
        let products = if ask.rules.is_some() { Products::MOST } else { 0 };
        let rules = ask.rules();
        let uuids = rules.iter().flat_map(|rules| &rules.uuids);
        let mut uuids: Vec<(u64, &str)> = uuids.map(|uuid| (rank(uuid), uuid.as_str())).collect();
        uuids.sort_unstable();
        Taste {
            ask,
            uuids,
            takes: vec![Cell::new(None); products],
        }
    }

    /// Return what the pod asks for.
    pub fn ask(&self) -> &'a Ask {
        self.ask
    }

    fn names(&self, gpu: &GpuState) -> bool {
        let first = self.uuids.partition_point(|(hash, _)| *hash < gpu.uuid_hash);
        let alike = self.uuids[first..].iter().take_while(|(hash, _)| *hash == gpu.uuid_hash);
        alike.map(|(_, uuid)| Some(*uuid)).any(|uuid| uuid == gpu.uuid.as_deref())
    }

    /// Report whether the pod accepts this GPU, as [`Ask::takes`] does.
    pub(crate) fn takes(&self, gpu: &GpuState) -> bool {
        if !self.ask.is_for(gpu) {
            return false;
        }
        let Some(rules) = self.ask.rules() else {
            return self.ask.rules.is_none();
        };
        if gpu.total < rules.least_memory || !(self.uuids.is_empty() || self.names(gpu)) {
            return false;
        }
        if !self.ask.is_isolated_on(gpu, rules) {
            return false;
        }
        let known = gpu.product.and_then(|product| self.takes.get(product.index()));
        match known {
            None => self.ask.takes_product_of(gpu),
            Some(known) => known.get().unwrap_or_else(|| {
                let takes = self.ask.takes_product_of(gpu);
                known.set(Some(takes));
                takes
            }),
        }
    }
}
