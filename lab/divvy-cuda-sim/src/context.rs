//! Contexts, and which one is current in a thread.

use std::ffi::c_void;
use std::ptr::from_mut;
use std::sync::OnceLock;

use crate::codes::{CuCode, INVALID_CONTEXT};
use crate::slab::{Slabs, pages};

/// The key under which each thread has its stack of contexts, by handle. It is a key of pthread and not a `thread_local`, because glibc's loader makes no
/// thread-local variables for a library that a statically linked program loads.
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

/// A context that exists.
#[derive(Debug)]
pub(crate) struct DeviceContext {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// What cuCtxGetApiVersion returns.
    pub(crate) api_version: u32,
    /// The pages that its small allocations share.
    pub(crate) slabs: Slabs,
    /// What cuCtxSetLimit has set.
    pub(crate) limits: ContextLimits,
    /// With what a kernel has failed. Each later call returns it, until the context is destroyed.
    pub(crate) fault: Option<CuCode>,
}

/// The limits that take memory: CU_LIMIT_STACK_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContextLimits(pub(crate) [u64; 3]);

/// What contexts are made with.
const USUAL: [u64; 3] = [1 << 10, 1 << 20, 8 << 20];

impl Default for ContextLimits {
    fn default() -> ContextLimits {
        ContextLimits(USUAL)
    }
}

impl ContextLimits {
    /// Return what they take in addition to what each context has: a stack for each thread that can run at the same time.
    pub(crate) fn extra(self, threads: u64) -> u64 {
        let counts = [threads, 1, 1];
        let all = self.0.iter().zip(USUAL).zip(counts);
        all.map(|((limit, usual), count)| pages(limit.saturating_sub(usual).saturating_mul(count)).unwrap_or(u64::MAX / 4))
            .fold(0, u64::saturating_add)
    }
}

/// Free the stack of a thread that ends.
extern "C" fn free(stack: *mut c_void) {
    // SAFETY: the key has only pointers that `with_stack` has made from boxes, and pthread calls this once for each of them.
    drop(unsafe { Box::from_raw(stack.cast::<Vec<usize>>()) });
}

/// Do something with this thread's stack.
fn with_stack<T>(body: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    let key = *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the place for the key is valid, and so is the function.
        let code = unsafe { libc::pthread_key_create(&raw mut key, Some(free)) };
        assert_eq!(code, 0, "the process has no more keys");
        key
    });
    // SAFETY: the key exists.
    let mut stack = unsafe { libc::pthread_getspecific(key) }.cast::<Vec<usize>>();
    if stack.is_null() {
        stack = from_mut(Box::leak(Box::default()));
        // SAFETY: the key exists. `free` frees what it gets.
        let code = unsafe { libc::pthread_setspecific(key, stack.cast()) };
        assert_eq!(code, 0, "there is no memory");
    }
    // SAFETY: it is this thread's, and no function here calls another one with it.
    body(unsafe { &mut *stack })
}

/// Return this thread's current context, which may have been destroyed.
pub(crate) fn top() -> Option<usize> {
    with_stack(|stack| stack.last().copied())
}

/// Make a context current.
pub(crate) fn push(handle: usize) {
    with_stack(|stack| stack.push(handle));
}

/// Make the context below the current one current.
pub(crate) fn pop() -> Result<usize, CuCode> {
    with_stack(Vec::pop).ok_or(INVALID_CONTEXT)
}

/// Replace the current context; 0 removes it.
pub(crate) fn set(handle: usize) {
    with_stack(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
}
