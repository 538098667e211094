//! Input of the web page and of `divvy top`: addresses, and what agents say of the use of their GPUs.

use divvy_model::usage::Usage;
use divvy_page::PageAddress;

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget::new(
            "the address of a page",
            address,
            &[
                "/",
                "/?namespace=ml&model=NVIDIA+A30&free=20&health=problem&page=2",
                "/nodes/gpu-%C3%A9",
                "/pods/ml/train-0",
                "/waiting",
            ],
        )
        .refusing(&["/nodes/%ff", "/?free=many", "/pods//a"]),
        FuzzTarget::new(
            "what an agent says of its GPUs' use",
            usage,
            &[USAGE, r#"{"v":2,"sample":1,"temperature":"warm"}"#],
        )
        .refusing(&[r#"{"v":1,"sample":1,"gpus":[{"uuid":"GPU-0"},{"uuid":"GPU-0"}]}"#]),
    ]
}

const USAGE: &str = r#"{"v":1,"sample":7,"gpus":[{"uuid":"GPU-0","memoryBytes":16106127360,"usedBytes":4294967296,"busyPercent":40,"smActiveMillionths":310000,"powerMilliwatts":70000,"temperatureCelsius":55,"smClockMHz":1590},{"uuid":"GPU-1","error":"GPU is lost"}],"containers":[{"namespace":"ml","pod":"train-0","uid":"u","container":"c","gpu":"GPU-0","limitBytes":4294967296,"usedBytes":1073741824,"peakBytes":2147483648,"busyNs":5,"busyPercent":40,"lastBusy":1700000000,"denied":2,"deniedBytes":4096,"throttledNs":9,"escapes":["over","unguarded"]}]}"#;

/// Rule: an accepted address is written so that it reads back the same.
fn address(bytes: &[u8]) -> bool {
    let Some(address) = text(bytes).and_then(|text| PageAddress::parse(text).ok()) else {
        return false;
    };
    assert_eq!(PageAddress::parse(&address.to_string()).as_ref(), Ok(&address));
    true
}

/// Rules: an accepted answer is written so that it reads back the same, and nothing is busy for more than all of the time.
fn usage(bytes: &[u8]) -> bool {
    let Some(usage) = text(bytes).and_then(|text| Usage::parse(text).ok()) else {
        return false;
    };
    let written = serde_json::to_string(&usage).expect("JSON");
    assert_eq!(Usage::parse(&written).as_ref(), Ok(&usage));
    let busy = usage.gpus.iter().map(|gpu| gpu.busy_percent);
    let busy = busy.chain(usage.containers.iter().map(|of| of.busy_percent));
    assert!(busy.flatten().all(|percent| percent <= 100));
    true
}
