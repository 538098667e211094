//! Numbers for the products of the cluster's GPUs, so that a pod's rules are evaluated once per product and question, not once
//! per GPU.

use std::collections::BTreeMap;

/// The number of a product, valid while some GPU of it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product(u16);

impl Product {
    /// The number of all products beyond [`Products::MOST`].
    const UNKNOWN: Product = Product(u16::MAX);

    pub(crate) fn is_unknown(self) -> bool {
        self == Product::UNKNOWN
    }

    /// Return the number, for a list with an element for each product.
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The products that GPUs of the ledger's nodes have now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Products {
    /// By product name: the product's number, and the number of GPUs with this product.
    known: BTreeMap<String, (Product, usize)>,
    unused: Vec<Product>,
}

impl Products {
    /// The maximum number of products; more than any cluster has. Nodes write the names, so there could be as many as GPUs. A GPU
    /// beyond this limit has an unknown product, and pods that name products do not accept it.
    pub(crate) const MOST: usize = 512;

    /// Count a GPU with a product of this name, and return the product's number.
    pub(crate) fn hold(&mut self, name: &str) -> Product {
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

    /// Remove a GPU from the counts. `number` is what [`Products::hold`] returned for it.
    pub(crate) fn release(&mut self, name: &str, number: Option<Product>) {
        // A GPU whose product was unknown when it was added is not counted, even if its product is known by now.
        let known = self.known.get_mut(name).filter(|(product, _)| number == Some(*product));
        if let Some((product, count)) = known {
            *count -= 1;
            if *count == 0 {
                self.unused.push(*product);
                self.known.remove(name);
            }
        }
    }
}
