//! Numbers for the products of the cluster's GPUs, so that a pod's rules are evaluated once per product and question, not once
//! per GPU.

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::hash::rank;
use crate::{Ask, GpuState};

/// The number of a product, valid while some GPU of it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product(u16);

impl Product {
    /// The number of all products beyond [`Products::MOST`].
    const UNKNOWN: Product = Product(u16::MAX);

    pub(crate) fn is_unknown(self) -> bool {
        self == Product::UNKNOWN
    }
}

/// The products that GPUs of the ledger's nodes have now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Products {
    /// Name → number, and the number of GPUs with this product.
    known: BTreeMap<String, (Product, usize)>,
    unused: Vec<Product>,
}

impl Products {
    /// The maximum number of products; more than any cluster has. Nodes write the names, so there could be as many as GPUs. A GPU
    /// beyond this limit has an unknown product, and pods that name products do not accept it.
    pub(crate) const MOST: usize = 512;

    /// Count a node's GPUs, and set the numbers of their products.
    pub(crate) fn add(&mut self, gpus: &mut [GpuState]) {
        for gpu in gpus {
            gpu.product = Some(self.hold(&gpu.model));
        }
    }

    fn hold(&mut self, name: &str) -> Product {
        if let Some((product, gpus)) = self.known.get_mut(name) {
            *gpus += 1;
            return *product;
        }
        if self.known.len() >= Self::MOST {
            return Product::UNKNOWN;
        }
        // Released numbers are in `unused`, so the next new number is the count.
        let next = u16::try_from(self.known.len()).map_or(Product::UNKNOWN, Product);
        let product = self.unused.pop().unwrap_or(next);
        self.known.insert(name.to_owned(), (product, 1));
        product
    }

    /// Remove a node's GPUs from the counts.
    pub(crate) fn remove(&mut self, gpus: &[GpuState]) {
        for gpu in gpus {
            let known = self.known.get_mut(&gpu.model);
            // A GPU whose product was unknown when it was added is not counted, even if its product is known by now.
            if let Some((product, count)) = known.filter(|(product, _)| gpu.product == Some(*product)) {
                *count -= 1;
                if *count == 0 {
                    self.unused.push(*product);
                    self.known.remove(&gpu.model);
                }
            }
        }
    }
}

/// A pod's rules, for comparing them with many GPUs: for each product, it caches whether the pod accepts it. Valid only for one
/// moment of one ledger, because the numbers of unused products are reused.
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
        let known = gpu.product.and_then(|product| self.takes.get(usize::from(product.0)));
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
