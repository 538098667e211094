//! Contexts, and which one is current in a thread.

use std::cell::RefCell;

use crate::codes::{Code, INVALID_CONTEXT};
use crate::slab::Slabs;

thread_local! {
    /// The stack of contexts of this thread, by handle.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A context that exists.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// What cuCtxGetApiVersion returns.
    pub(crate) api_version: u32,
    /// The pages that its small allocations share.
    pub(crate) slabs: Slabs,
}

/// Return this thread's current context, which may have been destroyed.
pub(crate) fn top() -> Option<usize> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// Make a context current.
pub(crate) fn push(handle: usize) {
    STACK.with_borrow_mut(|stack| stack.push(handle));
}

/// Make the context below the current one current.
pub(crate) fn pop() -> Result<usize, Code> {
    STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)
}

/// Replace the current context; 0 removes it.
pub(crate) fn set(handle: usize) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
}
