//! The meaning of each instruction, as a table.

use divvy_ptx::{KernelFault, ThreadOrder};

use crate::memory::{U64, Window, launch, module};

const AT: u64 = 0x3_0200_0000;

/// Run an instruction on three registers of a type, whose values are given. Return the result register, which begins as all ones.
fn result(instruction: &str, kind: &str, result: &str, values: &[u64]) -> u64 {
    let loads: String = (0..values.len())
        .map(|index| match kind {
            "pred" => format!("ld.global.b32 %t, [%at + {0}];\nsetp.ne.u32 %r{index}, %t, 0;\n", 8 * index),
            _ => format!("ld.global.{kind} %r{index}, [%at + {0}];\n", 8 * index),
        })
        .collect();
    let store = match result {
        "pred" => "selp.b32 %t, 1, 0, %d;\nst.global.b32 [%at + 24], %t;".to_owned(),
        _ => format!("st.global.{result} [%at + 24], %d;"),
    };
    let text = format!(
        ".version 6.0 .target sm_30 .address_size 64\n.entry k(.param .u64 p)\n{{\n.reg .b64 %at, %wide;\n.reg .b32 %t, %shift;\n.reg .pred %p;\n\
         .reg .{kind} %r<3>;\n.reg .{result} %d;\nld.param.u64 %at, [p];\nmov.u32 %shift, 3;\nsetp.eq.u32 %p, %shift, 3;\nmov.u64 %wide, 1000;\n\
         {loads}{instruction}\n{store}\nret;\n}}\n"
    );
    let module = module(&text);
    let mut memory = Window::new(AT, 32);
    memory.put(AT + 24, &[0; 8]);
    for (index, value) in values.iter().enumerate() {
        memory.put(AT + 8 * index as u64, &value.to_le_bytes());
    }
    let kernel = module.kernel("k").expect("it");
    let run = kernel.run(&launch(kernel, [1, 1], [1, 1], &[U64(AT)], ThreadOrder::Forward), &mut memory);
    run.unwrap_or_else(|fault| panic!("{instruction}: {fault}"));
    u64::from_le_bytes(memory.get(AT + 24, 8).try_into().expect("8 bytes"))
}

fn f(value: f32) -> u64 {
    value.to_bits().into()
}

fn d(value: f64) -> u64 {
    value.to_bits()
}

/// The low 32 bits of a negative number.
fn s(value: i32) -> u64 {
    u64::from(value as u32)
}

#[test]
fn each_instruction_computes_what_the_isa_says() {
    const MAX32: u64 = 0xffff_ffff;
    let long = |value: i64| value as u64;
    let cases: Vec<(&str, &str, &str, Vec<u64>, u64)> = vec![
        ("add.u32 %d, %r0, %r1;", "b32", "b32", vec![MAX32, 2], 1),
        ("add.u16 %d, %r0, %r1;", "b16", "b16", vec![0xffff, 2], 1),
        ("add.s64 %d, %r0, %r1;", "b64", "b64", vec![long(-5), 3], long(-2)),
        ("add.f32 %d, %r0, %r1;", "f32", "f32", vec![f(1.5), f(2.0)], f(3.5)),
        ("add.rn.f64 %d, %r0, %r1;", "f64", "f64", vec![d(0.1), d(0.2)], d(0.1 + 0.2)),
        ("add.u32 %d, %r0, -1;", "u32", "u32", vec![7], 6),
        ("sub.u32 %d, %r0, %r1;", "b32", "b32", vec![1, 2], MAX32),
        ("sub.f64 %d, %r0, %r1;", "f64", "f64", vec![d(1.0), d(0.25)], d(0.75)),
        ("mul.lo.u32 %d, %r0, %r1;", "u32", "u32", vec![0x1_0001, 0x1_0001], 0x2_0001),
        ("mul.hi.u32 %d, %r0, %r1;", "u32", "u32", vec![MAX32, MAX32], MAX32 - 1),
        ("mul.hi.s32 %d, %r0, %r1;", "s32", "s32", vec![s(-1), 1], MAX32),
        ("mul.hi.u64 %d, %r0, %r1;", "u64", "u64", vec![u64::MAX, 2], 1),
        ("mul.hi.s64 %d, %r0, %r1;", "s64", "s64", vec![u64::MAX, 2], u64::MAX),
        ("mul.wide.u16 %d, %r0, %r1;", "u16", "u32", vec![0xffff, 0xffff], 0xfffe_0001),
        ("mul.wide.u32 %d, %r0, %r1;", "u32", "u64", vec![MAX32, 16], MAX32 * 16),
        ("mul.wide.s32 %d, %r0, %r1;", "s32", "s64", vec![s(-3), 5], long(-15)),
        ("mul.rn.f32 %d, %r0, %r1;", "f32", "f32", vec![f(1.5), f(-2.0)], f(-3.0)),
        ("mad.lo.s32 %d, %r0, %r1, %r2;", "s32", "s32", vec![s(-3), 5, 20], 5),
        (
            "mad.wide.u32 %d, %r0, %r1, %wide;",
            "u32",
            "u64",
            vec![MAX32, 2],
            MAX32 * 2 + 1000,
        ),
        ("mad.wide.s32 %d, %r0, %r1, %wide;", "s32", "s64", vec![s(-2), 500], 0),
        // One rounding: with two, the result is 0.
        (
            "fma.rn.f32 %d, %r0, %r1, %r2;",
            "f32",
            "f32",
            vec![f(16_777_215.0), f(16_777_215.0), f(-281_474_943_156_224.0)],
            f(1.0),
        ),
        (
            "fma.rn.f64 %d, %r0, %r1, %r2;",
            "f64",
            "f64",
            vec![d(3.0), d(4.0), d(5.0)],
            d(17.0),
        ),
        ("div.u32 %d, %r0, %r1;", "u32", "u32", vec![MAX32, 16], 0x0fff_ffff),
        ("div.s32 %d, %r0, %r1;", "s32", "s32", vec![s(-7), 2], s(-3)),
        ("div.rn.f32 %d, %r0, %r1;", "f32", "f32", vec![f(1.0), f(4.0)], f(0.25)),
        ("rem.u64 %d, %r0, %r1;", "u64", "u64", vec![17, 5], 2),
        ("rem.s32 %d, %r0, %r1;", "s32", "s32", vec![s(-7), 2], s(-1)),
        ("sqrt.rn.f64 %d, %r0;", "f64", "f64", vec![d(2.25)], d(1.5)),
        ("min.u32 %d, %r0, %r1;", "u32", "u32", vec![MAX32, 1], 1),
        ("min.s32 %d, %r0, %r1;", "s32", "s32", vec![MAX32, 1], MAX32),
        ("max.s64 %d, %r0, %r1;", "s64", "s64", vec![u64::MAX, 1], 1),
        ("max.f32 %d, %r0, %r1;", "f32", "f32", vec![f(-1.0), f(2.0)], f(2.0)),
        ("abs.s32 %d, %r0;", "s32", "s32", vec![s(-7)], 7),
        ("neg.s64 %d, %r0;", "s64", "s64", vec![7], long(-7)),
        ("neg.f32 %d, %r0;", "f32", "f32", vec![f(1.0)], f(-1.0)),
        ("and.b32 %d, %r0, %r1;", "b32", "b32", vec![0b1100, 0b1010], 0b1000),
        ("or.b64 %d, %r0, %r1;", "b64", "b64", vec![1 << 63, 1], 1 << 63 | 1),
        ("xor.b16 %d, %r0, %r1;", "b16", "b16", vec![0b1100, 0b1010], 0b0110),
        ("not.b32 %d, %r0;", "b32", "b32", vec![0], MAX32),
        ("and.pred %d, %r0, %r1;", "pred", "pred", vec![1, 0], 0),
        ("or.pred %d, %r0, %r1;", "pred", "pred", vec![1, 0], 1),
        ("not.pred %d, %r0;", "pred", "pred", vec![0], 1),
        ("shl.b32 %d, %r0, %shift;", "b32", "b32", vec![0xf000_0001], 0x8000_0008),
        ("shl.b32 %d, %r0, 32;", "b32", "b32", vec![1], 0),
        ("shl.b64 %d, %r0, 64;", "b64", "b64", vec![1], 0),
        ("shl.b64 %d, %r0, 40;", "b64", "b64", vec![1], 1 << 40),
        ("shr.u32 %d, %r0, 31;", "u32", "u32", vec![MAX32], 1),
        ("shr.u32 %d, %r0, 32;", "u32", "u32", vec![MAX32], 0),
        ("shr.s32 %d, %r0, 40;", "s32", "s32", vec![s(-8)], MAX32),
        ("shr.s32 %d, %r0, 2;", "s32", "s32", vec![s(-8)], s(-2)),
        ("shr.u64 %d, %r0, 32;", "u64", "u64", vec![7 << 32], 7),
        ("mov.b32 %d, %r0;", "b32", "b32", vec![9], 9),
        ("mov.f32 %d, 0f40490FDB;", "f32", "f32", vec![], 0x4049_0fdb),
        ("mov.f64 %d, 0d3FF0000000000000;", "f64", "f64", vec![], d(1.0)),
        ("mov.u32 %d, 0x9E3779B9;", "u32", "u32", vec![], 0x9e37_79b9),
        ("mov.u64 %d, %clock64;", "u64", "u64", vec![], 5),
        ("cvta.to.global.u64 %d, %r0;", "u64", "u64", vec![77], 77),
        ("cvta.global.u64 %d, %r0;", "u64", "u64", vec![77], 77),
        ("selp.b32 %d, %r0, %r1, %p;", "b32", "b32", vec![1, 2], 1),
        ("selp.f64 %d, %r0, %r1, %p;", "f64", "f64", vec![d(1.0), d(2.0)], d(1.0)),
        ("@%p mov.u32 %d, %r0;", "u32", "u32", vec![4], 4),
        ("mov.u32 %d, 3; @!%p mov.u32 %d, %r0;", "u32", "u32", vec![4], 3),
        ("setp.eq.u32 %d, %r0, %r1;", "u32", "pred", vec![3, 3], 1),
        ("setp.eq.b64 %d, %r0, %r1;", "b64", "pred", vec![3, 1 << 32 | 3], 0),
        ("setp.ne.s32 %d, %r0, %r1;", "s32", "pred", vec![3, 3], 0),
        ("setp.lt.u32 %d, %r0, %r1;", "u32", "pred", vec![MAX32, 1], 0),
        ("setp.lt.s32 %d, %r0, %r1;", "s32", "pred", vec![MAX32, 1], 1),
        ("setp.le.u64 %d, %r0, %r1;", "u64", "pred", vec![5, 5], 1),
        ("setp.gt.s64 %d, %r0, %r1;", "s64", "pred", vec![u64::MAX, 1], 0),
        ("setp.ge.u32 %d, %r0, %r1;", "u32", "pred", vec![5, 5], 1),
        ("setp.lt.f32 %d, %r0, %r1;", "f32", "pred", vec![f(-1.0), f(0.0)], 1),
        ("setp.ne.f32 %d, %r0, %r1;", "f32", "pred", vec![f(f32::NAN), f(0.0)], 0),
        ("setp.eq.f64 %d, %r0, %r1;", "f64", "pred", vec![d(f64::NAN), d(f64::NAN)], 0),
        ("cvt.u64.u32 %d, %r0;", "u32", "u64", vec![MAX32], MAX32),
        ("cvt.s64.s32 %d, %r0;", "s32", "s64", vec![MAX32], u64::MAX),
        ("cvt.u32.u64 %d, %r0;", "u64", "u32", vec![7 << 32 | 5], 5),
        ("cvt.rn.f32.u32 %d, %r0;", "u32", "f32", vec![16_777_217], f(16_777_216.0)),
        ("cvt.rn.f64.s32 %d, %r0;", "s32", "f64", vec![s(-3)], d(-3.0)),
        ("cvt.rzi.s32.f32 %d, %r0;", "f32", "s32", vec![f(-2.5)], s(-2)),
        ("cvt.rni.u32.f64 %d, %r0;", "f64", "u32", vec![d(2.5)], 2),
        ("cvt.rn.f32.f64 %d, %r0;", "f64", "f32", vec![d(0.1)], f(0.1)),
        ("cvt.f64.f32 %d, %r0;", "f32", "f64", vec![f(0.5)], d(0.5)),
        ("ld.global.u8 %d, [%at + 1];", "u32", "u32", vec![0x80ff], 0x80),
        ("ld.global.s8 %d, [%at + 1];", "u32", "u32", vec![0x80ff], s(-128)),
        ("ld.volatile.global.s16 %d, [%at];", "u64", "u64", vec![0x8000], long(-32768)),
        (
            "st.global.u8 [%at], %r0; ld.global.u32 %d, [%at];",
            "u32",
            "u32",
            vec![0x1234],
            0x1234,
        ),
        ("membar.gl; mov.u32 %d, %r0;", "u32", "u32", vec![1], 1),
        (
            "bra.uni OVER; mov.u32 %r0, 9; OVER: mov.u32 %d, %r0;",
            "u32",
            "u32",
            vec![1],
            1,
        ),
        ("atom.global.add.u32 %d, [%at], %r1;", "u32", "u32", vec![5, 6], 5),
        (
            "red.global.add.u32 [%at], %r1; ld.global.u32 %d, [%at];",
            "u32",
            "u32",
            vec![MAX32, 6],
            5,
        ),
        (
            "red.global.add.f32 [%at], %r1; ld.global.f32 %d, [%at];",
            "f32",
            "f32",
            vec![f(1.0), f(0.5)],
            f(1.5),
        ),
        (
            "red.global.min.s32 [%at], %r1; ld.global.s32 %d, [%at];",
            "s32",
            "s32",
            vec![3, MAX32],
            MAX32,
        ),
        (
            "red.global.max.u64 [%at], %r1; ld.global.u64 %d, [%at];",
            "u64",
            "u64",
            vec![3, 4],
            4,
        ),
        (
            "red.global.xor.b32 [%at], %r1; ld.global.b32 %d, [%at];",
            "b32",
            "b32",
            vec![3, 1],
            2,
        ),
        (
            "red.global.or.b32 [%at], %r1; ld.global.b32 %d, [%at];",
            "b32",
            "b32",
            vec![2, 1],
            3,
        ),
        (
            "red.global.and.b64 [%at], %r1; ld.global.b64 %d, [%at];",
            "b64",
            "b64",
            vec![3, 1],
            1,
        ),
        (
            "atom.global.exch.b32 %d, [%at], %r1; ld.global.b32 %d, [%at];",
            "b32",
            "b32",
            vec![3, 1],
            1,
        ),
        ("atom.global.cas.b64 %d, [%at], %r0, %r1;", "b64", "b64", vec![3, 9], 3),
        (
            "atom.global.cas.b32 %r2, [%at], %r0, %r1; ld.global.b32 %d, [%at];",
            "b32",
            "b32",
            vec![3, 9, 0],
            9,
        ),
        (
            "atom.global.cas.b32 %r2, [%at], 4, %r1; ld.global.b32 %d, [%at];",
            "b32",
            "b32",
            vec![3, 9, 0],
            3,
        ),
        ("exit;", "u32", "u32", vec![], 0),
    ];
    for (instruction, kind, of, values, expected) in cases {
        assert_eq!(result(instruction, kind, of, &values), expected, "{instruction} {values:x?}");
    }
}

#[test]
fn wrong_memory_is_a_fault_with_its_line() {
    let text = |body: &str| {
        format!(
            ".version 6.0 .target sm_30 .address_size 64 .entry k(.param .u64 p) {{ .reg .b64 %at; .reg .b32 %a; .shared .b32 word;\n\
             ld.param.u64 %at, [p];\n{body}\n}}"
        )
    };
    let (line, address) = (3, AT);
    let cases = [
        (
            "ld.global.u32 %a, [%at + 8];",
            KernelFault::IllegalAddress {
                line,
                address: address + 8,
            },
            Some(700),
        ),
        (
            "st.global.u32 [%at - 4], 1;",
            KernelFault::IllegalAddress {
                line,
                address: address - 4,
            },
            Some(700),
        ),
        (
            "ld.global.u32 %a, [%at + 2];",
            KernelFault::Misaligned {
                line,
                address: address + 2,
            },
            Some(716),
        ),
        (
            "ld.global.v2.u32 {%a, %a}, [%at + 4];",
            KernelFault::Misaligned {
                line,
                address: address + 4,
            },
            Some(716),
        ),
        (
            "red.global.add.u32 [%at + 8], 1;",
            KernelFault::IllegalAddress {
                line,
                address: address + 8,
            },
            Some(700),
        ),
        (
            "st.shared.u32 [word + 4], 1;",
            KernelFault::IllegalAddress { line, address: 4 },
            Some(700),
        ),
        (
            "ld.shared.u32 %a, [word + 1];",
            KernelFault::Misaligned { line, address: 1 },
            Some(716),
        ),
        ("AGAIN: bra AGAIN;", KernelFault::Endless { line }, None),
    ];
    for (body, fault, code) in cases {
        let module = module(&text(body));
        let kernel = module.kernel("k").expect("it");
        let launched = launch(kernel, [1, 1], [1, 1], &[U64(AT)], ThreadOrder::Forward);
        let found = kernel.run(&launched, &mut Window::new(AT, 8)).expect_err(body);
        assert_eq!((found, found.code()), (fault, code), "{body}");
    }
}
