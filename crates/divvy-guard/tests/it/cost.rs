//! What the guard costs.
use divvy_share::limits::{Account, Limits, WHOLE};

use crate::sandbox::{MIB, Sandbox, limits};
use crate::steps::Counter;

#[test]
fn measure() {
    for gpus in [1, 2] {
        let sandbox = Sandbox::new(8192 * MIB);
        let account = Account { balance: i64::MAX, at: u64::MAX, launches: u64::MAX, launch_ns: 1 };
        sandbox.give(0, &Limits { rate: WHOLE / 2, account, ..limits(4096 * MIB) });
        let sandbox = if gpus == 1 { sandbox.with_one_gpu() } else { sandbox };
        let mut program = sandbox.start();
        assert_eq!(program.code("init"), 0);
        let mut counter = Counter::of(&mut program, &sandbox);

        println!("retain {:?}", counter.count(&mut program, "retain 0"));
        println!("info {:?}", counter.count(&mut program, "info"));
        println!("kernel {:?}", counter.count(&mut program, "kernel k_7ns"));
        let kernel = program.call("kernel k_7ns")[1];
        for _ in 0..20 {
            println!("launch {:?}", counter.count(&mut program, &format!("launch cuLaunchKernel {kernel}")));
        }
        for bytes in [4096, 4096, 2 * MIB, 2 * MIB] {
            let (steps, [_, pointer, _]) = counter.count(&mut program, &format!("alloc {bytes}"));
            println!("alloc {steps:?}");
            let (steps, _) = counter.count(&mut program, &format!("free {pointer}"));
            println!("free {steps:?}");
        }
        for name in ["cuMemAlloc", "cuMemFree", "cuCtxGetCurrent", "cuLaunchKernel"] {
            println!("address {name} {:?}", counter.count(&mut program, &format!("address {name} 12000 0 0")));
        }
    }
}
