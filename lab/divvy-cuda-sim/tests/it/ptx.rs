//! Modules that are executed, and the memory that they use.

use crate::bed::{Arg, Bed, MIB, Num, Out, PAGE, Process, Text, Words};

const NOT_READY: i32 = 600;

/// `fill` of `divvy smoke`, in its simplest form; one that uses a wrong address; one that waits; and one that is not executed, because of its name.
const CODE: &str = "// Kernels for tests.
.version 6.0
.target sm_30
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
    .reg .pred %outside; .reg .b32 %i, %x, %y, %n; .reg .b64 %a, %b, %c, %o;
    mov.u32 %i, %ctaid.x; mov.u32 %x, %ntid.x; mov.u32 %y, %tid.x; mad.lo.u32 %i, %i, %x, %y;
    ld.param.u32 %n, [n]; setp.ge.u32 %outside, %i, %n; @%outside ret;
    ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %c, [c]; mul.wide.u32 %o, %i, 4;
    add.u64 %a, %a, %o; add.u64 %b, %b, %o; add.u64 %c, %c, %o;
    ld.global.u32 %x, [%a]; ld.global.u32 %y, [%b]; add.u32 %x, %x, %y; st.global.u32 [%c], %x;
    ret;
}
.visible .entry stray(.param .u64 p)
{
    .reg .b64 %p;
    ld.param.u64 %p, [p]; st.global.u64 [%p], 1; ret;
}
.visible .entry spin(.param .u64 ns)
{
    .reg .pred %more; .reg .b64 %ns, %start, %now;
    ld.param.u64 %ns, [ns]; mov.u64 %start, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer; sub.u64 %now, %now, %start; setp.lt.u64 %more, %now, %ns; @%more bra AGAIN;
    ret;
}
.global .u32 sink;
.visible .entry gemm_7ns(.param .u64 p) { this body is not read }
.visible .entry gemm_0ns() { { nor this one } }
";

/// A text as a buffer, with a zero byte at its end.
fn code(text: &str) -> Arg {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize((bytes.len() + 1).next_multiple_of(8), 0);
    Words(
        bytes
            .chunks(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
            .collect(),
    )
}

/// A process, with a part of its main memory and one of the GPU.
struct User {
    process: Process,
    module: u64,
    host: u64,
    device: u64,
}

const SCRATCH: u64 = 8192;

impl User {
    fn new(bed: &Bed, variables: &[(&str, &str)]) -> User {
        let mut process = bed.user_with(variables);
        let module = process.ok("cuModuleLoadData", &[Out, code(CODE)]);
        let host = process.ok("cuMemAllocHost_v2", &[Out, Num(SCRATCH)]);
        let device = process.ok("cuMemAlloc_v2", &[Out, Num(SCRATCH)]);
        User {
            process,
            module,
            host,
            device,
        }
    }

    fn allocate(&mut self, bytes: u64) -> u64 {
        self.process.ok("cuMemAlloc_v2", &[Out, Num(bytes)])
    }

    /// Write words to the GPU's memory.
    fn put(&mut self, to: u64, words: &[u64]) {
        let bytes = Num(8 * words.len() as u64);
        self.process.ok("cuMemcpyHtoD_v2", &[Num(to), Words(words.to_vec()), bytes]);
    }

    /// Read words of the GPU's memory.
    fn get(&mut self, from: u64, count: usize) -> Vec<u64> {
        let arguments = [Words(vec![7; count]), Num(from), Num(8 * count as u64)];
        let answer = self.process.call("cuMemcpyDtoH_v2", &arguments);
        assert_eq!(answer.code, 0);
        answer.words
    }

    /// Put words into main memory of the process. Return their address.
    fn host(&mut self, words: &[u64]) -> u64 {
        self.put(self.device, words);
        let arguments = [Num(self.host), Num(self.device), Num(8 * words.len() as u64)];
        self.process.ok("cuMemcpyDtoH_v2", &arguments);
        self.host
    }

    fn launch(&mut self, name: &'static str, blocks: u64, threads: u64, stream: u64, values: &[u64]) -> i32 {
        let function = self.process.ok("cuModuleGetFunction", &[Out, Num(self.module), Text(name)]);
        let host = self.host(values);
        let pointers = Words((0..values.len() as u64).map(|index| host + 8 * index).collect());
        let mut arguments: Vec<Arg> = [function, blocks, 1, 1, threads, 1, 1, 0, stream].map(Num).to_vec();
        arguments.extend([pointers, Num(0)]);
        self.process.code("cuLaunchKernel", &arguments)
    }
}

/// Two numbers of 32 bits as a word.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[test]
fn a_kernel_computes_with_what_was_copied() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let [a, b, c] = [0; 3].map(|_| user.allocate(400));
    let numbers = |factor: u32| {
        (0..50)
            .map(|i| pair(2 * i * factor, (2 * i + 1) * factor))
            .collect::<Vec<u64>>()
    };
    user.put(a, &numbers(3));
    user.put(b, &numbers(1000));
    assert_eq!(user.get(c, 50), [0; 50], "nothing was written there");
    assert_eq!(user.launch("add", 4, 32, 0, &[a, b, c, 99]), 0);
    let mut sums = numbers(1003);
    sums[49] &= 0xffff_ffff;
    assert_eq!(user.get(c, 50), sums);
    // The other form of parameters: one buffer.
    let buffer = user.host(&[a, c, b, 100, 28]);
    let function = user.process.ok("cuModuleGetFunction", &[Out, Num(user.module), Text("add")]);
    let launch = |size: u64| {
        let mut arguments: Vec<Arg> = [function, 4, 1, 1, 32, 1, 1, 0, 0, 0].map(Num).to_vec();
        arguments.push(Words(vec![1, buffer, 2, size, 0]));
        arguments
    };
    assert_eq!(user.process.code("cuLaunchKernel", &launch(buffer + 32)), 0);
    let twice: Vec<u64> = (0..50).map(|i| pair(2 * i * 1006, (2 * i + 1) * 1006)).collect();
    assert_eq!(user.get(b, 49), twice[..49]);
    assert_eq!(
        user.process.code("cuLaunchKernel", &launch(buffer + 24)),
        1,
        "another size than the kernel's"
    );
    assert_eq!(user.launch("add", 4, 2000, 0, &[a, b, c, 99]), 1, "too many threads");
    assert_eq!(
        user.process
            .code("cuModuleGetFunction", &[Out, Num(user.module), Text("sub")]),
        500
    );
}

#[test]
fn copies_and_fills_change_what_is_in_memory() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let [a, b] = [MIB, 3 * MIB].map(|bytes| user.allocate(bytes));
    let process = &mut user.process;
    process.ok("cuMemsetD8_v2", &[Num(a + 8), Num(0xab), Num(9)]);
    process.ok("cuMemsetD32_v2", &[Num(b + MIB), Num(0x0102_0304), Num(3)]);
    assert_eq!(
        process.code("cuMemsetD32_v2", &[Num(b + 2), Num(1), Num(1)]),
        1,
        "not aligned"
    );
    assert_eq!(
        process.code("cuMemsetD8_v2", &[Num(a + MIB - 1), Num(1), Num(2)]),
        1,
        "behind the end"
    );
    assert_eq!(user.get(a, 4), [0, 0xabab_abab_abab_abab, 0xab, 0]);
    assert_eq!(user.get(b + MIB, 2), [0x0102_0304_0102_0304, 0x0102_0304]);
    let process = &mut user.process;
    process.ok("cuMemcpyDtoDAsync_v2", &[Num(b), Num(a), Num(24), Num(0)]);
    process.ok("cuMemcpyDtoD_v2", &[Num(b + 16), Num(b + 8), Num(16)]);
    process.ok("cuMemsetD8_v2", &[Num(a), Num(0), Num(MIB)]);
    assert_eq!(user.get(b, 4), [0, 0xabab_abab_abab_abab, 0xabab_abab_abab_abab, 0xab]);
    assert_eq!(user.get(a, 3), [0; 3]);
    // What was freed has no contents any more.
    user.process.ok("cuMemFree_v2", &[Num(b)]);
    assert_eq!(user.process.code("cuMemcpyDtoH_v2", &[Words(vec![0]), Num(b), Num(8)]), 1);
    // A copy of memory that was never written overwrites.
    let c = user.allocate(MIB);
    user.put(a, &[1, 2, 3]);
    user.process.ok("cuMemcpyDtoD_v2", &[Num(a + 8), Num(c), Num(8)]);
    assert_eq!(user.get(a, 3), [1, 0, 3]);
}

#[test]
fn two_addresses_of_one_memory_have_equal_contents() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let process = &mut user.process;
    let memory = process.ok("cuMemCreate", &[Out, Num(2 * PAGE), Words(vec![1, 1, 0, 0]), Num(0)]);
    let addresses = [0; 2].map(|_| {
        let address = process.ok("cuMemAddressReserve", &[Out, Num(2 * PAGE), Num(0), Num(0), Num(0)]);
        process.ok("cuMemMap", &[Num(address), Num(2 * PAGE), Num(0), Num(memory), Num(0)]);
        address
    });
    user.put(addresses[0] + PAGE, &[5, 6]);
    assert_eq!(user.get(addresses[1] + PAGE, 2), [5, 6]);
    let [a, b] = addresses;
    assert_eq!(user.launch("add", 1, 4, 0, &[a + PAGE, b + PAGE, b, 4]), 0);
    assert_eq!(user.get(a, 2), [10, 12]);
}

/// The main memory that a process uses, in bytes.
fn resident(process: &Process) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/statm", process.pid())).expect("the process");
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096
}

#[test]
fn memory_takes_main_memory_only_where_it_was_written() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let big = user.allocate(200 * MIB);
    let before = resident(&user.process);
    user.process.ok("cuMemsetD8_v2", &[Num(big), Num(0), Num(200 * MIB)]);
    user.put(big + 100 * MIB, &[1]);
    assert_eq!(user.get(big, 3), [0; 3]);
    user.launch("stray", 1, 1, 0, &[big + 150 * MIB]);
    assert!(resident(&user.process) < before + 2 * MIB);
    user.process.ok("cuMemsetD8_v2", &[Num(big), Num(1), Num(20 * MIB)]);
    assert!(resident(&user.process) > before + 19 * MIB);
    user.process.ok("cuMemFree_v2", &[Num(big)]);
    assert!(resident(&user.process) < before + 2 * MIB);
}

#[test]
fn a_module_is_refused_as_the_driver_and_the_gpu_demand() {
    let module = |version: &str, target: &str| format!("\n.version {version}\n.target {target}\n.address_size 64\n");
    let cases = [
        ("8.0", "11.0", module("7.0", "sm_80"), 0),
        ("8.0", "10.2", module("7.0", "sm_80"), 222),
        ("7.5", "13.0", module("7.0", "sm_80"), 209),
        ("12.1", "13.0", module("6.0", "sm_30"), 0),
        ("3.5", "10.2", module("6.0", "sm_30"), 0),
        ("8.0", "13.0", module("6.0", "sm_30") + ".entry k { foo.u32 1; }", 218),
        ("8.0", "13.0", ".version x".to_owned(), 218),
        // No PTX.
        ("8.0", "13.0", "\u{7f}ELF".to_owned(), 0),
    ];
    for (cc, version, text, expected) in cases {
        let bed = Bed::described(cc, "");
        let mut process = bed.user_with(&[("DIVVY_CUDA_SIM_VERSION", version)]);
        assert_eq!(
            process.code("cuModuleLoadData", &[Out, code(&text)]),
            expected,
            "{cc} {version} {text}"
        );
        // CUDA 12.0 has libraries.
        if version.starts_with("13") {
            let library = [Out, code(&text), Num(0), Num(0), Num(0), Num(0), Num(0), Num(0)];
            assert_eq!(process.code("cuLibraryLoadData", &library), expected, "{cc} {version} {text}");
        }
    }
    let mut process = Bed::new().user_with(&[("DIVVY_CUDA_SIM_CODE", "unread")]);
    let unread = process.ok("cuModuleLoadData", &[Out, code(".version x")]);
    process.ok("cuModuleGetFunction", &[Out, Num(unread), Text("anything")]);
}

#[test]
fn the_compiler_writes_why_it_refuses_a_module() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let log = user.host;
    let load = |text: &str, room: u64| {
        // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_TARGET, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER, and its size.
        let names = Words(vec![pair(6, 9), pair(5, 3), pair(4, 0)]);
        vec![Out, code(text), Num(5), names, Words(vec![room, 80, log, log + 4096, 512])]
    };
    let mut read = |room: u64| {
        let answer = user
            .process
            .call("cuModuleLoadDataEx", &load(".version 6.0\n.target sm_3x\n", room));
        assert_eq!(answer.code, 218);
        let values = &answer.words[answer.words.len() - 5..];
        let (written, information) = (values[0] as usize, values[4]);
        user.process.ok("cuMemcpyHtoD_v2", &[Num(user.device), Num(log), Num(512)]);
        let bytes: Vec<u8> = user.get(user.device, 64).iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!((bytes[written], information), (0, 0), "it ends with a zero byte");
        String::from_utf8(bytes[..written].to_vec()).expect("text")
    };
    let whole = read(512);
    assert!(whole.contains("line 2") && whole.contains("sm_30"), "{whole}");
    assert_eq!(read(10), whole[..9]);
    let answer = user.process.call("cuModuleLoadDataEx", &load(CODE, 512));
    assert_eq!(
        (answer.code, answer.words[answer.words.len() - 5]),
        (0, 0),
        "no errors, no log"
    );
}

#[test]
fn a_kernel_that_fails_makes_its_context_unusable() {
    let cases: [(&str, u64, i32); 5] = [
        ("", 0x10, 700),
        ("", 0, 700),
        ("", 1, 716),
        ("stray:2=214", 8, 0),
        ("stray:1=719", 8, 719),
    ];
    let bed = Bed::new();
    for (fail, address, code) in cases {
        let mut user = User::new(&bed, &[("DIVVY_CUDA_SIM_FAIL", fail)]);
        // A small number is an offset into memory.
        let device = user.allocate(MIB);
        let address = if address == 8 { device } else { address };
        assert_eq!(user.launch("stray", 1, 1, 0, &[address]), 0, "a launch does not wait");
        let calls = [
            ("cuCtxSynchronize", vec![]),
            ("cuStreamSynchronize", vec![Num(0)]),
            ("cuMemAlloc_v2", vec![Out, Num(8)]),
            ("cuMemcpyDtoH_v2", vec![Words(vec![0]), Num(device), Num(8)]),
        ];
        for (name, arguments) in calls {
            assert_eq!(user.process.code(name, &arguments), code, "{fail} {address:#x} {name}");
        }
        user.process.ok("cuDevicePrimaryCtxReset_v2", &[Num(0)]);
        user.process.enter(0);
        user.process.ok("cuMemAlloc_v2", &[Out, Num(8)]);
    }
}

#[test]
fn a_kernel_that_never_ends_is_never_done() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[("DIVVY_CUDA_SIM_HANG", "stray:2,cuMemGetInfo_v2:1")]);
    let device = user.allocate(MIB);
    let stream = user.process.ok("cuStreamCreate", &[Out, Num(0)]);
    for ready in [0, NOT_READY] {
        assert_eq!(user.launch("stray", 1, 1, stream, &[device]), 0);
        assert_eq!(user.process.code("cuStreamQuery", &[Num(stream)]), ready);
        let event = user.process.ok("cuEventCreate", &[Out, Num(0)]);
        user.process.ok("cuEventRecord", &[Num(event), Num(stream)]);
        assert_eq!(user.process.code("cuEventQuery", &[Num(event)]), ready);
    }
    // clock_nanosleep, where the thread is that makes the calls.
    user.process.ask("cuMemGetInfo_v2", &[Out, Out]);
    let tasks = format!("/proc/{}/task", user.process.pid());
    let sleeps = || {
        std::fs::read_dir(&tasks).expect("its threads").any(|task| {
            let call = std::fs::read_to_string(task.expect("a thread").path().join("syscall"));
            call.is_ok_and(|call| call.starts_with(&format!("{} ", nix::libc::SYS_clock_nanosleep)))
        })
    };
    while !sleeps() {
        std::thread::yield_now();
    }
}

#[test]
fn a_test_spoils_a_named_launch_or_copy() {
    let bed = Bed::new();
    let rules = "add:2=2+5,cuMemcpyDtoDAsync:1=0+3,cuMemcpyHtoD:*=0+1";
    let mut user = User::new(&bed, &[]);
    let right = |rules: &[(&str, &str)]| {
        let mut broken = User::new(&bed, rules);
        // What is copied from main memory is broken, too, if there is a rule; so the parameters come from the other process's addresses, which are the same.
        let [a, b] = [0; 2].map(|_| broken.allocate(MIB));
        broken.process.ok("cuMemsetD8_v2", &[Num(a), Num(1), Num(64)]);
        broken.process.ok("cuMemcpyDtoDAsync_v2", &[Num(b), Num(a), Num(16), Num(0)]);
        let copied = broken.get(b, 2);
        broken.put(b, &[9, 9]);
        (copied, broken.get(b, 2))
    };
    let ones = 0x0101_0101_0101_0101;
    assert_eq!(right(&[]), (vec![ones; 2], vec![9, 9]));
    let broken = right(&[("DIVVY_CUDA_SIM_WRONG", rules)]);
    assert_eq!(broken, (vec![ones ^ 0xff00_0000, ones], vec![9 ^ 0xff00, 9]));
    let mut wrong = User::new(&bed, &[("DIVVY_CUDA_SIM_WRONG", "add:2=2+5")]);
    for (user, last) in [(&mut user, 2), (&mut wrong, 2 ^ 0xff_0000_0000_0000_u64 >> 8)] {
        let [a, c] = [0; 2].map(|_| user.allocate(MIB));
        user.put(a, &[1]);
        let mut results = Vec::new();
        for _ in 0..3 {
            assert_eq!(user.launch("add", 1, 2, 0, &[a, a, c, 2]), 0);
            results.extend(user.get(c, 1));
        }
        assert_eq!(results, [2, last, 2]);
    }
}

#[test]
fn a_kernel_that_waits_takes_time_but_its_launch_does_not() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[("DIVVY_CUDA_SIM_SLOW", "10")]);
    let events = [0; 2].map(|_| user.process.ok("cuEventCreate", &[Out, Num(0)]));
    user.process.ok("cuEventRecord", &[Num(events[0]), Num(0)]);
    assert_eq!(user.launch("spin", 1, 1, 0, &[200_000_000]), 0);
    user.process.ok("cuEventRecord", &[Num(events[1]), Num(0)]);
    assert_eq!(user.process.code("cuEventQuery", &[Num(events[1])]), NOT_READY);
    user.process.ok("cuEventSynchronize", &[Num(events[1])]);
    let bits = user.process.ok("cuEventElapsedTime", &[Out, Num(events[0]), Num(events[1])]);
    let milliseconds = f32::from_bits(bits as u32);
    assert!(milliseconds >= 2000.0, "{milliseconds}");
    assert!(bed.usage(0)[0].busy_ns >= 200_000_000);
}

#[test]
fn a_kernel_whose_name_says_its_time_is_not_executed() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    assert_eq!(user.launch("gemm_7ns", 1, 1, 0, &[0]), 0);
    assert_eq!(user.launch("gemm_0ns", 1, 1, 0, &[0]), 0);
    user.process.ok("cuCtxSynchronize", &[]);
    assert_eq!(bed.usage(0)[0].busy_ns, 7);
}

#[test]
fn a_kernel_that_is_executed_is_no_node_of_a_graph() {
    let bed = Bed::new();
    let mut user = User::new(&bed, &[]);
    let stream = user.process.ok("cuStreamCreate", &[Out, Num(0)]);
    user.process.ok("cuStreamBeginCapture_v2", &[Num(stream), Num(0)]);
    let device = user.device;
    assert_eq!(user.launch("stray", 1, 1, stream, &[device]), 801);
    assert_eq!(user.launch("gemm_7ns", 1, 1, stream, &[0]), 0);
}

#[test]
fn a_variable_overrides_described_attributes() {
    let bed = Bed::described(
        "9.0",
        "pci = \"0001:82:03.0\"\nmemory_clock_mhz = 2619\nmemory_bus_bits = 5120\nclock_mhz = 1980\nsms = 132",
    );
    let described = [
        (75, 9),
        (76, 0),
        (16, 132),
        (13, 1_980_000),
        (36, 2_619_000),
        (37, 5120),
        (32, 0),
        (33, 0x82),
        (34, 3),
        (50, 1),
        (20, 0),
    ];
    let mut set = described;
    (set[6].1, set[10].1) = (1, 2);
    for (variables, expected) in [(vec![], described), (vec![("DIVVY_CUDA_SIM_ATTRIBUTES", "20=2,32=1")], set)] {
        let mut process = bed.user_with(&variables);
        for (attribute, value) in expected {
            let found = process.ok("cuDeviceGetAttribute", &[Out, Num(attribute), Num(0)]);
            assert_eq!(found, value, "{attribute}");
        }
    }
}
