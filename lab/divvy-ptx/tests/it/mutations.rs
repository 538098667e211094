//! Each small mistake in a kernel of `divvy smoke` is noticed: the kernel is refused, ends with a fault, or gives another result.

use std::cell::Cell;

use divvy_ptx::{KernelLaunch, Module, ThreadOrder};

use crate::kernels::word;
use crate::memory::{Argument, SMOKE, TENSOR, U32, U64, Window, launch};

const AT: u64 = 0x3_0200_0000;
/// Far more than a right kernel needs here.
const LIMIT: u64 = 2_000_000;

/// Words that are exchanged for each other: an instruction, its type, a dimension, or a variable.
const SWAPS: [(&str, &str); 26] = [
    ("add.", "sub."),
    ("sub.", "add."),
    ("mul.", "add."),
    ("mad.lo.u32", "mul.lo.u32"),
    ("fma.rn.f32", "mul.rn.f32"),
    ("fma.rn.f64", "mul.rn.f64"),
    ("and.", "or."),
    ("or.b32", "and.b32"),
    ("xor.", "or."),
    ("shl.", "shr."),
    ("shr.", "shl."),
    ("min.", "max."),
    (".lt.", ".le."),
    (".le.", ".lt."),
    (".gt.", ".ge."),
    (".ge.", ".gt."),
    (".eq.", ".ne."),
    (".ne.", ".eq."),
    ("ctaid.x", "ctaid.y"),
    ("ctaid.y", "ctaid.x"),
    ("tid.x", "tid.y"),
    ("tid.y", "tid.x"),
    ("ntid.x", "nctaid.x"),
    ("nctaid.x", "ntid.x"),
    ("selp.b32 ", "xor.b32 "),
    ("@%", "@!%"),
];

/// Return each text that one small mistake makes of a kernel's lines, with a description.
fn mutants(text: &str, name: &str) -> Vec<(String, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let start = lines
        .iter()
        .position(|line| line.contains(&format!(".entry {name}(")))
        .expect("the entry");
    let end = start + lines[start..].iter().position(|line| *line == "}").expect("its end");
    let mut found = Vec::new();
    for at in start..end {
        let line = lines[at].trim();
        if line.is_empty() || line.starts_with(['.', '/', '{', ')']) || line.ends_with([':', '(']) {
            continue;
        }
        let mut changed = vec![String::new()];
        for (from, to) in SWAPS {
            changed.extend(line.match_indices(from).map(|(place, _)| {
                let (before, after) = line.split_at(place);
                format!("{before}{to}{}", &after[from.len()..])
            }));
        }
        // A number that is an operand or an offset is one more.
        let (opcode, operands) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = operands.split(' ').collect();
        for (index, word) in words.iter().enumerate() {
            let digits = word.trim_end_matches([';', ',', ']']);
            if let Ok(number) = digits.parse::<u64>() {
                let mut words = words.clone();
                let more = word.replace(digits, &(number + 1).to_string());
                words[index] = &more;
                changed.push(format!("{opcode} {}", words.join(" ")));
            }
        }
        // An operand takes the place of the one before it.
        for (index, pair) in words.windows(2).enumerate() {
            if pair[0].starts_with('%') && pair[1].starts_with('%') && pair[0].ends_with(',') {
                let mut words = words.clone();
                let same = format!("{},", pair[1].trim_end_matches([';', ',']));
                words[index] = &same;
                changed.push(format!("{opcode} {}", words.join(" ")));
            }
        }
        for new in changed.into_iter().filter(|new| new != line) {
            let mut lines = lines.clone();
            lines[at] = &new;
            found.push((format!("{line} -> {new}"), lines.join("\n")));
        }
    }
    found
}

thread_local! {
    /// How many instructions the launches of this thread have executed.
    static EXECUTED: Cell<u64> = const { Cell::new(0) };
}

/// Run a kernel in both orders of threads. `check` looks at the memory afterwards. Return whether all was as it must be.
fn right(
    module: &Module,
    name: &str,
    grid: ([u32; 2], [u32; 2]),
    arguments: &[Argument],
    only: Option<[u32; 3]>,
    fill: &dyn Fn() -> Window,
    check: &dyn Fn(&mut Window) -> bool,
) -> bool {
    let Some(kernel) = module.kernel(name) else { return false };
    [ThreadOrder::Forward, ThreadOrder::Backward].into_iter().all(|order| {
        let mut memory = fill();
        let launched = KernelLaunch {
            limit: LIMIT,
            only,
            ..launch(kernel, grid.0, grid.1, arguments, order)
        };
        let ended = kernel.run(&launched, &mut memory);
        ended.is_ok_and(|outcome| {
            EXECUTED.set(EXECUTED.get() + outcome.instructions);
            check(&mut memory)
        })
    })
}

fn vector_add(module: &Module) -> bool {
    let (count, size) = (100, 400);
    let number = |index: u32, factor: u32| (factor * index + 7) as f32;
    let fill = || {
        let mut memory = Window::new(AT, 3 * size + 400);
        for index in 0..count {
            let place = AT + 4 * u64::from(index);
            memory.put(place, &number(index, 3).to_le_bytes());
            memory.put(place + size as u64, &number(index, 1000).to_le_bytes());
        }
        memory
    };
    let check = |memory: &mut Window| {
        let sums: Vec<u32> = (0..count).map(|i| (number(i, 3) + number(i, 1000)).to_bits()).collect();
        memory.words(AT + 2 * size as u64, count as usize) == sums && memory.untouched_but(AT, 3 * size)
    };
    let size = size as u64;
    let arguments = [U64(AT), U64(AT + size), U64(AT + 2 * size), U32(count)];
    right(module, "vector_add", ([4, 1], [32, 1]), &arguments, None, &fill, &check)
}

/// A launch of `fill` or `check`: the index of the first word that it uses, the number of words, the kind, the seed, and the only block that runs.
type Filling = (u64, u64, u32, u32, Option<[u32; 3]>);

fn fillings() -> Vec<Filling> {
    let mut cases = Vec::new();
    for kind in 0..3 {
        // More than one round of all threads; and with an index of more than 32 bits, which has no words before it.
        for seed in [
            12,
            0x8765_4321,
            0_u32.wrapping_sub(24),
            0_u32.wrapping_sub(25),
            0_u32.wrapping_sub(26),
            0_u32.wrapping_sub(27),
        ] {
            cases.push((0, 100, kind, seed, None));
        }
        let first = 1 << 34;
        cases.push((first, first + 32, kind, 5, Some([(first / 32) as u32, 0, 0])));
    }
    // The kind is not known.
    cases.push((0, 100, 3, 7, None));
    cases
}

/// The sizes of the grids: fewer threads than there are four words, and more.
fn blocks(only: Option<[u32; 3]>) -> Vec<u32> {
    only.map_or(vec![2, 5], |[block, ..]| vec![block + 1])
}

fn fill(module: &Module) -> bool {
    fillings().into_iter().all(|(first, words, kind, seed, only)| {
        let start = AT + 4 * first;
        let (length, known) = ((words - first) as usize, kind < 3);
        let expected: Vec<u32> = (first..words).map(|index| word(index, kind, seed)).collect();
        let check = |memory: &mut Window| {
            if known {
                memory.words(start, length) == expected && memory.untouched_but(start, 4 * length)
            } else {
                memory.untouched_but(start, 0)
            }
        };
        let arguments = [U64(AT), U64(words), U32(kind), U32(seed)];
        let window = || Window::new(start - 512, 4 * length + 1024);
        blocks(only)
            .into_iter()
            .all(|blocks| right(module, "fill", ([blocks, 1], [8, 1]), &arguments, only, &window, &check))
    })
}

fn check(module: &Module) -> bool {
    // Which words are wrong, and by what. The last ones differ in one bit each.
    let wrongs: [&[usize]; 8] = [
        &[],
        &[0],
        &[1, 30],
        &[6],
        &[7, 9],
        &[31, 6, 5],
        &[0, 1, 2, 3, 12, 17, 23],
        &[4, 68],
    ];
    // What another thread writes as the least index while this one compares.
    let races = [None, Some(u64::MAX - 1), Some(0)];
    let cases = wrongs.iter().flat_map(|wrong| races.iter().map(move |race| (wrong, race)));
    fillings().into_iter().all(|(first, words, kind, seed, only)| {
        let inside = |(wrong, _): &(&&[usize], _)| wrong.iter().all(|index| (*index as u64) < words - first);
        cases.clone().filter(inside).all(|(wrong, race)| {
            let start = AT + 4 * first;
            let (length, known) = ((words - first) as usize, kind < 3);
            // The result is far behind the words, and has other numbers than 0 already, so that adding to it differs from setting it.
            let result = start + 4 * words.wrapping_sub(first) + 64;
            let fill = || {
                let mut memory = Window::new(start - 512, 4 * length + 1024);
                for index in 0..length {
                    let right = word(first + index as u64, kind, seed);
                    let flipped = u32::from(wrong.contains(&index)) << (index % 32);
                    memory.put(start + 4 * index as u64, &(right ^ flipped).to_le_bytes());
                }
                for (index, value) in [1000, u64::MAX, 50].into_iter().enumerate() {
                    memory.put(result + 8 * index as u64, &u64::to_le_bytes(value));
                }
                memory.race = race.map(|value| (result + 8, value));
                memory
            };
            let count = if known { wrong.len() as u64 } else { 0 };
            let least = wrong.iter().min().filter(|_| known);
            let raced = race.filter(|_| least.is_some()).unwrap_or(u64::MAX);
            let least = least.map_or(u64::MAX, |index| raced.min(first + *index as u64));
            let compared = if known { words - first } else { 0 };
            let expected = [1000 + count, least, 50 + compared].map(u64::to_le_bytes).concat();
            let check = |memory: &mut Window| memory.get(result, 24) == expected;
            let arguments = [U64(AT), U64(words), U32(kind), U32(seed), U64(result)];
            blocks(only)
                .into_iter()
                .all(|blocks| right(module, "check", ([blocks, 1], [8, 1]), &arguments, only, &fill, &check))
        })
    })
}

fn matmul(module: &Module, name: &str, size: u64) -> bool {
    let n = 32_u32;
    let count = n * n;
    let number = |index: u32, salt: u32| (index.wrapping_mul(2_654_435_761) ^ salt) >> 24;
    let encode = |value: u32| match size {
        4 => (value as f32).to_le_bytes().to_vec(),
        _ => f64::from(value).to_le_bytes().to_vec(),
    };
    let length = size * u64::from(count);
    let fill = || {
        let mut memory = Window::new(AT, 3 * length as usize + 256);
        for index in 0..count {
            let place = AT + size * u64::from(index);
            memory.put(place, &encode(number(index, 1)));
            memory.put(place + length, &encode(number(index, 0x8000_0000)));
        }
        memory
    };
    let check = |memory: &mut Window| {
        let product = |index: u32| {
            let one = |k| number(index / n * n + k, 1) * number(k * n + index % n, 0x8000_0000);
            encode((0..n).map(one).sum())
        };
        let products: Vec<u8> = (0..count).flat_map(product).collect();
        memory.get(AT + 2 * length, length as usize) == products && memory.untouched_but(AT, 3 * length as usize)
    };
    let arguments = [U64(AT), U64(AT + length), U64(AT + 2 * length), U32(n)];
    right(module, name, ([n / 16, n / 16], [16, 16]), &arguments, None, &fill, &check)
}

fn tensor(module: &Module) -> bool {
    let number = |index: u32, salt: u32| (index.wrapping_mul(2_654_435_761) ^ salt) >> 28;
    let bf16 = |value: u32| ((value as f32).to_bits() >> 16) as u16;
    (0..3).all(|loops| {
        let fill = || {
            let mut memory = Window::new(AT, 768 + 512 * 2 + 600);
            for index in 0..256 {
                memory.put(AT + 2 * u64::from(index), &bf16(number(index, 0)).to_le_bytes());
            }
            for index in 0..128 {
                memory.put(
                    AT + 512 + 2 * u64::from(index),
                    &bf16(number(index, 0x9000_0000)).to_le_bytes(),
                );
            }
            memory
        };
        let check = |memory: &mut Window| {
            let element = |index: u32| {
                let one = |k| number(index / 8 * 16 + k, 0) * number(index % 8 * 16 + k, 0x9000_0000);
                ((0..16).map(one).sum::<u32>() as f32 * loops as f32).to_bits()
            };
            let block: Vec<u32> = (0..128).map(element).collect();
            memory.words(AT + 768, 256) == block.repeat(2) && memory.untouched_but(AT, 768 + 1024)
        };
        let arguments = [U64(AT), U64(AT + 512), U64(AT + 768), U32(loops)];
        right(module, "tensor", ([2, 1], [32, 1]), &arguments, None, &fill, &check)
    })
}

/// The mistakes that change nothing, by kernel. In addition, each kernel may lack its last `ret`, and `cvta`, because a global address is its generic
/// address on each GPU.
const SAME: [(&str, &[&str]); 6] = [
    ("vector_add", &[]),
    ("fill", &[]),
    (
        "check",
        &[
            // It replaces a number by the same one.
            "setp.le.u64 %late, %old, %first; -> setp.lt.u64 %late, %old, %first;",
        ],
    ),
    (
        "matmul_f32",
        &[
            // n is a multiple of 16, so 16 * tile + 1 < n just if 16 * tile < n.
            "mov.u32 %tile, 0; -> mov.u32 %tile, 1;",
            // There are as many steps of 17 as of 16 below 272.
            "add.u32 %tile, %tile, 16; -> add.u32 %tile, %tile, 17;",
        ],
    ),
    ("matmul_f64", &[]),
    ("tensor", &[]),
];

/// Report whether a mistake changes nothing in any kernel.
fn is_harmless(what: &str) -> bool {
    what == "ret; -> " || what.starts_with("cvta.") && what.ends_with("-> ")
}

#[test]
fn each_small_mistake_in_a_kernel_is_noticed() {
    let passes = |name: &str, module: &Module| match name {
        "vector_add" => vector_add(module),
        "fill" => fill(module),
        "check" => check(module),
        "matmul_f32" => matmul(module, name, 4),
        "matmul_f64" => matmul(module, name, 8),
        "tensor" => tensor(module),
        other => panic!("{other} has no check"),
    };
    let mut wrong = Vec::new();
    let mut count = 0;
    for (name, same) in SAME {
        let text = if name == "tensor" { TENSOR } else { SMOKE };
        let is_right = |text: &str| Module::parse(text, |other| other != name).is_ok_and(|module| passes(name, &module));
        EXECUTED.set(0);
        assert!(is_right(text), "{name} itself");
        // A mistake that only costs time, such as a step that is too short, is one, too.
        let most = EXECUTED.get() * 11 / 10;
        let mut unnoticed = Vec::new();
        for (what, text) in mutants(text, name) {
            count += 1;
            EXECUTED.set(0);
            if is_right(&text) && EXECUTED.get() <= most && !is_harmless(&what) {
                unnoticed.push(what);
            }
        }
        if unnoticed != same {
            wrong.push(format!("{name}: {unnoticed:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 700, "{count} mistakes");
}
