//! GPUs that are divided by MIG, and which GPUs a process sees.

use crate::bed::{Bed, MIB, Num, Out, PAGE, Process, Words};

const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;
/// The attribute MULTIPROCESSOR_COUNT.
const MULTIPROCESSORS: u64 = 16;
const CONTEXT: u64 = 16 * MIB;

/// A UUID that ends with a number.
fn uuid(kind: &str, number: u8) -> String {
    format!("{kind}-0000{number:04}-0000-4000-8000-000000000000")
}

/// The description of a GPU, with the profiles of its MIG devices if it is in MIG mode.
fn gpu(number: u8, profiles: Option<&[u32]>) -> String {
    let part = |(at, profile): (u8, &u32)| {
        let uuid = uuid("MIG", 10 * number + at);
        format!("{{ gpu_instance = {at}, compute_instance = 0, profile = {profile}, uuid = \"{uuid}\" }}")
    };
    let parts = profiles.map(|profiles| (0..).zip(profiles).map(part).collect::<Vec<_>>().join(", "));
    described(number, &parts.map_or(String::new(), |parts| format!("mig = [{parts}]")))
}

fn described(number: u8, more: &str) -> String {
    format!(
        "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"{}\"\nmemory_mib = 40960\ncontext_mib = 16\n{more}\n",
        uuid("GPU", number)
    )
}

/// A machine, what `CUDA_VISIBLE_DEVICES` says, and the numbers of the devices that a process sees, or the code of cuInit.
type Case<'a> = (&'a str, Option<&'a str>, Result<&'a [u8], i32>);

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The digits of a device's UUID as this function tells it.
fn digits(process: &mut Process, function: &str, device: u64) -> String {
    let answer = process.call(function, &[Words(vec![0; 2]), Num(device)]);
    assert_eq!(answer.code, 0, "{function}");
    bytes(&answer.words).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn name(process: &mut Process, device: u64) -> String {
    let answer = process.call("cuDeviceGetName", &[Words(vec![0; 16]), Num(128), Num(device)]);
    let bytes = bytes(&answer.words);
    let text = bytes.split(|byte| *byte == 0).next().expect("a text");
    String::from_utf8(text.to_owned()).expect("UTF-8")
}

/// What a process sees: the digits of the UUIDs, or the code of cuInit.
fn seen(bed: &Bed, visible: Option<&str>) -> Result<Vec<String>, i32> {
    let variables: Vec<(&str, &str)> = visible.map(|list| ("CUDA_VISIBLE_DEVICES", list)).into_iter().collect();
    let mut process = bed.start_with(&variables);
    match process.code("cuInit", &[Num(0)]) {
        0 => {
            let count = process.ok("cuDeviceGetCount", &[Out]);
            Ok((0..count)
                .map(|device| digits(&mut process, "cuDeviceGetUuid_v2", device))
                .collect())
        }
        code => Err(code),
    }
}

/// A list of GPUs counts only up to its first wrong entry.
#[test]
fn processes_see_one_mig_device_or_named_gpus() {
    let both = [gpu(0, None), gpu(1, None)].concat();
    let divided = [gpu(0, None), gpu(1, Some(&[2, 0]))].concat();
    let mixed = [gpu(0, Some(&[])), gpu(1, None)].concat();
    let none = gpu(0, Some(&[]));
    let [first, second] = [uuid("MIG", 10), uuid("MIG", 11)];
    let (reversed, unknown) = (format!("{second},{first}"), uuid("GPU", 7));
    let cases: [Case<'_>; 22] = [
        (&both, None, Ok(&[0, 1])),
        (&both, Some("1,0"), Ok(&[1, 0])),
        (&both, Some(" 1 "), Ok(&[1])),
        (&both, Some("0,7,1"), Ok(&[0])),
        (&both, Some("0,-1,1"), Ok(&[0])),
        (&both, Some("1,,0"), Ok(&[1])),
        (&both, Some("GPU-00000001"), Ok(&[1])),
        (&both, Some("GPU-0000"), Err(NO_DEVICE)),
        (&both, Some(&unknown), Err(NO_DEVICE)),
        (&both, Some(""), Err(NO_DEVICE)),
        (&both, Some("all"), Err(NO_DEVICE)),
        (&both, Some("7"), Err(NO_DEVICE)),
        (&divided, None, Ok(&[10])),
        (&divided, Some(&first), Ok(&[10])),
        (&divided, Some(&second), Ok(&[11])),
        (&divided, Some(&reversed), Ok(&[11])),
        (&divided, Some("0"), Ok(&[0])),
        (&divided, Some("0,1"), Ok(&[10])),
        (&divided, Some("MIG-0000001"), Err(NO_DEVICE)),
        (&mixed, None, Ok(&[1])),
        (&mixed, Some("0"), Err(NO_DEVICE)),
        (&none, None, Err(NO_DEVICE)),
    ];
    for (machine, visible, expected) in cases {
        let bed = Bed::of(machine);
        let expected = expected.map(|numbers| {
            let digits = |number: &u8| uuid("GPU", *number)[4..].replace('-', "");
            numbers.iter().map(digits).collect::<Vec<_>>()
        });
        assert_eq!(seen(&bed, visible), expected, "{visible:?}: {machine}");
    }
}

#[test]
fn a_mig_device_has_the_name_the_size_and_the_uuid_of_its_own() {
    for (profile, model, mib, sms) in [
        (0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, 14),
        (2, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968, 42),
        (7, "NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", 4864, 14),
    ] {
        let bed = Bed::of(&gpu(3, Some(&[profile])));
        let mut process = bed.start();
        assert_eq!(name(&mut process, 0), model);
        assert_eq!(process.ok("cuDeviceTotalMem_v2", &[Out, Num(0)]), mib * MIB, "{model}");
        let attribute = [Out, Num(MULTIPROCESSORS), Num(0)];
        assert_eq!(process.ok("cuDeviceGetAttribute", &attribute), sms, "{model}");
        let uuids = ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"].map(|function| digits(&mut process, function, 0));
        assert_eq!(
            [&uuids[0][..8], &uuids[1][..8]],
            ["00000030", "00000003"],
            "the older function knows GPUs only"
        );
        process.enter(0);
        let memory = process.call("cuMemGetInfo_v2", &[Out, Out]);
        assert_eq!(memory.words, [mib * MIB - CONTEXT, mib * MIB]);
        let more = mib * MIB - CONTEXT + PAGE;
        assert_eq!(process.code("cuMemAlloc_v2", &[Out, Num(more)]), OUT_OF_MEMORY);
    }
}

/// GPU instances have their own memory.
#[test]
fn compute_instances_share_their_gpu_instances_memory() {
    let part = |gi: u8, ci: u8| {
        let uuid = uuid("MIG", 10 * gi + ci);
        format!("{{ gpu_instance = {gi}, compute_instance = {ci}, uuid = \"{uuid}\" }}")
    };
    let parts = [part(1, 0), part(1, 1), part(2, 0)].join(", ");
    let bed = Bed::of(&described(0, &format!("mig = [{parts}]")));
    let start = |number: u8| bed.user_with(&[("CUDA_VISIBLE_DEVICES", uuid("MIG", number).as_str())]);
    let mut processes = [10, 11, 20].map(start);
    assert_eq!(name(&mut processes[0], 0), "NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb");
    processes[0].ok("cuMemAlloc_v2", &[Out, Num(100 * PAGE)]);
    let free = processes
        .each_mut()
        .map(|process| process.call("cuMemGetInfo_v2", &[Out, Out]).words);
    let (two, one) = (9856 * MIB, 4864 * MIB);
    let left = two - 2 * CONTEXT - 100 * PAGE;
    assert_eq!(free, [vec![left, two], vec![left, two], vec![one - CONTEXT, one]]);
}
