//! Scenarios of arguments and configuration files, wrong ones and unusual ones.

use crate::scenario::{PluginScenario, machine, scenario};

pub(super) fn wrong_arguments() -> Vec<PluginScenario> {
    let wrong = |name: &'static str, arg: &'static str| scenario(name, machine(2)).args(&[arg]).resources(0);
    let file = |name: &'static str, text: &'static str| scenario(name, machine(2)).config(text).resources(0);
    let variable = |name: &'static str, env| scenario(name, machine(2)).env(env).resources(0);
    vec![
        wrong("T31 --device-list-strategy=foo", "--device-list-strategy=foo"),
        wrong("T31 --device-id-strategy=foo", "--device-id-strategy=foo"),
        wrong("T31 --mig-strategy=foo", "--mig-strategy=foo"),
        wrong("T31 --device-discovery-strategy=foo", "--device-discovery-strategy=foo"),
        wrong("T31 --imex-channel-ids=2", "--imex-channel-ids=2"),
        file(
            "T31 a long name",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: \
             nvidia.com/a-name-that-is-much-longer-than-the-sixty-three-characters-which-are-allowed, replicas: 2}]}}\n",
        ),
        wrong("T31 --imex-channel-ids=x", "--imex-channel-ids=x"),
        wrong("T31 an unknown flag", "--no-such-flag"),
        wrong("T31 a flag without a value", "--mig-strategy"),
        wrong("T31 --pass-device-specs=maybe", "--pass-device-specs=maybe"),
        wrong("T31 --device-list-strategy=", "--device-list-strategy="),
        wrong("T31 a file that does not exist", "--config-file=/does/not/exist"),
        variable("T31 MIG_STRATEGY=", &[("MIG_STRATEGY", "")]),
        variable("T31 DEVICE_LIST_STRATEGY=", &[("DEVICE_LIST_STRATEGY", "")]),
        variable("T31 DEVICE_ID_STRATEGY=", &[("DEVICE_ID_STRATEGY", "")]),
        variable("T31 DEVICE_DISCOVERY_STRATEGY=", &[("DEVICE_DISCOVERY_STRATEGY", "")]),
        file("T31 version 1", "version: 1\n"),
        file(
            "T31 a list strategy of another type",
            "flags: {plugin: {deviceListStrategy: 5}}\n",
        ),
        file(
            "T31 a wrong value below a key in another case",
            "flags: {plugin: {deviceIdStrategy: foo}}\n",
        ),
        file("T31 nothing below timeSlicing", "sharing:\n  timeSlicing:\n"),
        file("T31 no replicas", "sharing: {timeSlicing: {resources: [{name: gpu}]}}\n"),
        file("T31 no name", "sharing: {timeSlicing: {resources: [{replicas: 2}]}}\n"),
        file("T31 a pattern without a name", "resources: {gpus: [{pattern: '*'}]}\n"),
        file(
            "T31 devices: -1",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: -1}]}}\n",
        ),
        file(
            "T31 devices: 1.5",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1.5}]}}\n",
        ),
        file(
            "T31 a name with another domain",
            "sharing: {timeSlicing: {resources: [{name: example.com/gpu, replicas: 2}]}}\n",
        ),
        file("T31 a file that is not YAML", "version: [v1\n"),
        file(
            "T31 a field of another type",
            "version: v1\nflags: {failOnInitError: perhaps}\n",
        ),
        file("T31 version v2", "version: v2\n"),
        file(
            "T31 one replica",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}\n",
        ),
        file("T31 no resources", "version: v1\nsharing: {timeSlicing: {}}\n"),
        file(
            "T31 a bad name",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/$x, replicas: 2}]}}\n",
        ),
        file(
            "T31 MPS without a root",
            "version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n",
        ),
        scenario("T31 MPS and MIG mixed", machine(2))
            .config("version: v1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n")
            .args(&["--mig-strategy=mixed", "--mps-root=/run/nvidia/mps"])
            .resources(0),
    ]
}

/// Files that look wrong, and work.
pub(super) fn unusual_files() -> Vec<PluginScenario> {
    let file = |name: &'static str, text: &'static str| scenario(name, machine(2)).config(text);
    vec![
        file(
            "T32 keys with nothing below them",
            "version:\nflags:\n  plugin:\n    # nothing\n  gfd:\nresources:\n  gpus:\nsharing:\n  mps:\nimex:\n",
        ),
        file(
            "T32 keys in another case",
            "Flags: {MIGSTRATEGY: none, Plugin: {deviceIdStrategy: index}}\n",
        )
        .allocate(&[1]),
        file(
            "T32 a key twice",
            "flags: {plugin: {deviceIDStrategy: x}}\nflags: {plugin: {deviceIDStrategy: uuid, deviceIDStrategy: index}}\n",
        )
        .allocate(&[1]),
        file("T32 two documents", "# first\n---\nversion: v1\n---\nversion: v2\n"),
        file(
            "T32 2.0 replicas",
            "flags: {failOnInitError: no}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.0}]}}\n",
        ),
        file(
            "T32 an empty list of devices",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}\n",
        ),
        file(
            "T32 more devices than there are",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 3}]}}\n",
        ),
        file(
            "T32 a device of the list does not exist",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, 7]}]}}\n",
        ),
        file("T32 no pattern matches", "resources: {gpus: [{pattern: '*T4*', name: t4}]}\n"),
        file(
            "T32 a long name that the node does not have",
            "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: a-name-of-fifty-characters-aaaaaaaaaaaaaaaaaaaaaaa, replicas: 2}]}}\n",
        ),
        scenario("T33 an argument that is no flag", machine(2))
            .args(&["--pass-device-specs", "false", "--no-such-flag"])
            .allocate(&[0]),
        scenario("T33 no socket of the kubelet", machine(1))
            .args(&["--kubelet-socket="])
            .resources(0),
        scenario("T33 variables without a value", machine(1))
            .env(&[
                ("CONFIG_FILE", ""),
                ("NVIDIA_DRIVER_ROOT", ""),
                ("PASS_DEVICE_SPECS", ""),
                ("IMEX_CHANNEL_IDS", ""),
            ])
            .allocate(&[0]),
    ]
}
