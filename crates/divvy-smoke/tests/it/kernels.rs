//! The texts of the kernels agree with what the program says to the driver about them.

use divvy_smoke::driver::{KernelArgument, ModuleText, agrees};

const U32: KernelArgument = KernelArgument::U32(0);
const U64: KernelArgument = KernelArgument::U64(0);

/// Each text also suits the oldest possible driver.
#[test]
fn each_ptx_text_suits_the_oldest_possible_gpu() {
    for (text, head) in [
        (ModuleText::Smoke, [".version 6.0", ".target sm_30", ".address_size 64"]),
        (ModuleText::Tensor, [".version 7.0", ".target sm_80", ".address_size 64"]),
    ] {
        let lines: Vec<&str> = text.ptx().lines().filter(|line| line.starts_with('.')).take(3).collect();
        assert_eq!(lines, head);
        assert!(!text.ptx().contains('\0'));
    }
}

#[test]
fn arguments_in_another_number_order_or_size_are_noticed() {
    let text = ModuleText::Smoke.ptx();
    for (kernel, arguments, expected) in [
        ("vector_add", &[U64, U64, U64, U32][..], true),
        ("fill", &[U64, U64, U32, U32], true),
        ("check", &[U64, U64, U32, U32, U64], true),
        ("matmul_f32", &[U64, U64, U64, U32], true),
        ("matmul_f64", &[U64, U64, U64, U32], true),
        ("vector_add", &[U64, U64, U64], false),
        ("vector_add", &[U64, U64, U64, U64], false),
        ("vector_add", &[U32, U64, U64, U64], false),
        ("vector_add", &[U64, U64, U64, U32, U32], false),
        ("vector", &[U64, U64, U64, U32], false),
        ("tensor", &[U64, U64, U64, U32], false),
    ] {
        assert_eq!(agrees(text, kernel, arguments), expected, "{kernel} {arguments:?}");
    }
    assert!(agrees(ModuleText::Tensor.ptx(), "tensor", &[U64, U64, U64, U32]));
}
