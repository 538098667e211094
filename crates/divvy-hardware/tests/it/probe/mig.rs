//! MIG devices in the snapshots of the probe.

use divvy_hardware::Snapshot;
use divvy_model::{MiB, MigDevice};
use serde_json::json;

use super::{printed, served};
use crate::support::Machine;

#[test]
fn a_divided_gpu_has_mig_devices_with_uuid_and_instances() {
    let machine = Machine::new(
        "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\n\
         mig = [{ gpu_instance = 1, compute_instance = 0 }, { gpu_instance = 2, compute_instance = 0 }]\n\
         [[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\nmig_capable = true\n\
         [[node.gpu]]\nmodel = \"T4\"\nmemory_mib = 15360\n",
    );
    let snapshot: Snapshot = printed(&machine, &[]);
    let [divided, whole, other] = &snapshot.gpus[..] else {
        panic!("three GPUs: {snapshot:?}")
    };
    let modes = (divided.mig, whole.mig, other.mig);
    assert_eq!(modes, (Some((true, true)), Some((false, false)), None));
    let found: Vec<(u32, u32, u32)> = divided.mig_devices.iter().map(|mig| (mig.index, mig.gi, mig.ci)).collect();
    assert_eq!(found, [(0, 1, 0), (1, 2, 0)]);
    let uuids: Vec<&str> = divided.mig_devices.iter().map(|mig| mig.uuid.as_str()).collect();
    assert!(
        uuids.iter().all(|uuid| uuid.starts_with("MIG-")) && uuids[0] != uuids[1],
        "{uuids:?}"
    );
    assert!(whole.mig_devices.is_empty());
    let parts: Vec<_> = divided.mig_devices.iter().map(|mig| mig.profile(divided.total)).collect();
    assert_eq!(parts, [Some("1g.5gb".to_owned()), Some("1g.5gb".to_owned())]);
}

pub(super) const DIVIDED: &str = "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\n\
    mig = [{ gpu_instance = 1, compute_instance = 0, uuid = \"MIG-1\" }, { gpu_instance = 2, compute_instance = 0, uuid = \"MIG-2\" }]\n";

#[test]
fn mig_devices_have_the_nodes_the_kernel_module_lists() {
    let machine = Machine::new(DIVIDED);
    let directory = machine.path("host/proc/driver/nvidia-caps");
    std::fs::create_dir_all(&directory).expect("made");
    std::fs::write(
        directory.join("mig-minors"),
        "config 1\ngpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\ngpu0/gi2/access 5\n",
    )
    .expect("written");
    let host = machine.path("host");
    let snapshot: Snapshot = printed(&machine, &["--sys-root", &host.to_string_lossy()]);
    let found: Vec<_> = snapshot.gpus[0]
        .mig_devices
        .iter()
        .map(|device| device.capabilities)
        .collect();
    assert_eq!(found, [Some((3, 4)), None]);
}

#[test]
fn a_divided_gpu_stays_so_while_mig_mode_is_unreadable() {
    let (machine, _probe, mut client) = served(DIVIDED);
    let mut gpu = || client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0].clone();
    let before = gpu();
    for _ in 0..2 {
        machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 999}));
        let now = gpu();
        assert_eq!(
            (&now["mig"], &now["migDevices"]),
            (&json!([true, true]), &before["migDevices"])
        );
        assert!(now["error"].as_str().is_some_and(|text| text.starts_with("MIG: ")), "{now}");
    }
    machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 0}));
    let after = gpu();
    assert_eq!(
        (&after["migDevices"], &after["error"]),
        (&before["migDevices"], &before["error"])
    );
}

/// The simulated driver gives the first MIG device of a GPU the same UUID in each division, as a driver may.
#[test]
fn a_reused_uuid_shows_the_present_mig_device() {
    let (machine, _probe, mut client) = served(DIVIDED);
    let mut divide = |profiles: &[u32]| {
        let device = |(gi, profile): (u32, &u32)| json!({"gpu_instance": gi, "compute_instance": 0, "profile": profile});
        let devices: Vec<_> = (1..).zip(profiles).map(device).collect();
        machine.control(&json!({"op": "mig", "gpu": 0, "devices": devices}));
        let gpu = client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0].clone();
        let devices: Vec<MigDevice> = serde_json::from_value(gpu["migDevices"].clone()).expect("MIG devices");
        (devices[0].uuid.clone(), devices[0].profile(MiB(40960)))
    };
    let ((large_uuid, large), (tiny_uuid, tiny)) = (divide(&[2]), divide(&[0]));
    assert_eq!(large_uuid, tiny_uuid);
    assert_eq!((large.as_deref(), tiny.as_deref()), (Some("3g.20gb"), Some("1g.5gb")));
    assert_eq!(divide(&[0]).1, tiny, "after another look as well");
}
