//! What the shadows of NVIDIA's libraries have in common: `divvy-guard` and `divvy-guard-nvml`.
//!
//! A shadow has the name of a library, exports some of its functions, and needs the real library by its absolute path. The loader finds every other
//! name there.
//!
//! A shadow runs in other people's programs. So it must have no code that panics, no allocator, no signal handler, no output, no thread, and no
//! constructor, and it must not need a version of the C library. Here is how it makes system calls ([`sys`]), where the files of a share are ([`path`]), how
//! it finds the real library's functions ([`RealFunction`]), and how it is linked (`link`, for build scripts).

#![cfg_attr(not(any(feature = "link", test)), no_std)]
#![allow(
    unsafe_code,
    reason = "system calls, memory that other processes write, and functions of other libraries"
)]

mod function;
#[cfg(feature = "link")]
pub mod link;
pub mod path;
pub mod sys;

pub use function::RealFunction;

/// No code panics. A panic would call a symbol that no library has, and a test of each shadow checks that it does not need this symbol.
#[cfg(all(feature = "shadow", not(feature = "link")))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        safe fn divvy_guard_can_panic() -> !;
    }
    divvy_guard_can_panic()
}

// On AArch64, the compiler calls a function for each change of an atomic. The function asks this variable whether the processor has instructions for that, which
// early ones lack. The variable of the compiler's own library comes with a constructor, which sets it; with this one, which is 0, no constructor is linked, and the
// functions use the instructions that each processor has. https://gcc.gnu.org/onlinedocs/gcc/AArch64-Options.html, `-moutline-atomics`.
#[cfg(all(feature = "shadow", not(feature = "link"), target_arch = "aarch64"))]
core::arch::global_asm!(
    ".pushsection .bss.__aarch64_have_lse_atomics, \"aw\", @nobits",
    ".globl __aarch64_have_lse_atomics",
    ".hidden __aarch64_have_lse_atomics",
    "__aarch64_have_lse_atomics: .zero 1",
    ".popsection",
);
