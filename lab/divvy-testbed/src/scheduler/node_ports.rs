//! The plugin NodePorts: host ports that pods on a node have taken (`plugins/nodeports`, `framework/types.go`: `HostPortInfo`).

use k8s_openapi::api::core::v1::{Container, Pod};

/// The reason that Filter returns.
pub const TAKEN: &str = "node(s) didn't have free ports for the requested pod ports";

const EVERY_ADDRESS: &str = "0.0.0.0";

/// A host port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedHostPort {
    /// The host's address; `0.0.0.0` stands for all addresses.
    pub address: String,
    /// `TCP`, `UDP`, or `SCTP`.
    pub protocol: String,
    /// The port number, 1 to 65535.
    pub port: i32,
}

/// Return the host ports that a pod requests: those of its containers and of its sidecars (`GetHostPorts`).
pub fn host_ports(pod: &Pod) -> Vec<UsedHostPort> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let sidecar = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let containers = spec.init_containers.iter().flatten().filter(sidecar).chain(&spec.containers);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    let or = |text: Option<&String>, default: &str| text.filter(|text| !text.is_empty()).map_or(default, |text| text).to_owned();
    ports
        .filter_map(|port| {
            Some(UsedHostPort {
                address: or(port.host_ip.as_ref(), EVERY_ADDRESS),
                protocol: or(port.protocol.as_ref(), "TCP"),
                port: port.host_port.filter(|port| *port > 0)?,
            })
        })
        .collect()
}

/// Report whether one of the ports is taken: the protocol must be equal, and the addresses must be equal or one of them must stand for all
/// (`HostPortInfo.CheckConflict`).
pub fn clash(wanted: &[UsedHostPort], taken: &[UsedHostPort]) -> bool {
    let same_address = |one: &UsedHostPort, other: &UsedHostPort| {
        one.address == other.address || [one, other].iter().any(|of| of.address == EVERY_ADDRESS)
    };
    let clashes = |one: &UsedHostPort, other: &UsedHostPort| {
        one.port == other.port && one.protocol == other.protocol && same_address(one, other)
    };
    wanted.iter().any(|one| taken.iter().any(|other| clashes(one, other)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Parse ports such as `UDP/127.0.0.1/8080`, the notation of upstream's tests.
    fn ports(of: &[&str]) -> Vec<UsedHostPort> {
        let ports: Vec<_> = of.iter().map(|text| text.split('/').collect::<Vec<_>>()).collect();
        let ports: Vec<_> = ports
            .iter()
            .map(|of| json!({"protocol": of[0], "hostIP": of[1], "hostPort": of[2].parse::<i32>().expect("port"), "containerPort": 80}))
            .collect();
        let pod = json!({"spec": {"containers": [{"name": "c", "image": "i", "ports": ports}]}});
        host_ports(&serde_json::from_value(pod).expect("pod"))
    }

    /// `TestNodePorts` and `TestHostPortInfo_Check` upstream.
    #[test]
    fn a_port_is_taken_by_protocol_number_and_address() {
        for (wanted, taken, expected) in [
            (&[][..], &["UDP/127.0.0.1/8080"][..], false),
            (&["UDP/127.0.0.1/8080"], &["UDP/127.0.0.1/9090"], false),
            (&["UDP/127.0.0.1/8080"], &["UDP/127.0.0.1/8080"], true),
            (&["TCP/127.0.0.1/8080"], &["TCP/127.0.0.1/8080"], true),
            (&["TCP/127.0.0.1/8080"], &["TCP/127.0.0.2/8080"], false),
            (&["UDP/127.0.0.1/8080"], &["TCP/127.0.0.1/8080"], false),
            (&["UDP/127.0.0.1/8000", "UDP/127.0.0.1/8080"], &["UDP/127.0.0.1/8080"], true),
            (
                &["TCP/127.0.0.1/8001", "UDP/127.0.0.1/8080"],
                &["TCP/127.0.0.1/8001", "UDP/127.0.0.1/8081"],
                true,
            ),
            (&["TCP/0.0.0.0/8001"], &["TCP/127.0.0.1/8001"], true),
            (&["TCP/10.0.10.10/8001"], &["TCP/0.0.0.0/8001"], true),
            (&["TCP/127.0.0.1/8001"], &["UDP/0.0.0.0/8001"], false),
            (&["TCP//8001"], &["TCP/127.0.0.1/8001"], true),
            (&["/127.0.0.1/8001"], &["TCP/127.0.0.1/8001"], true),
            (&["TCP/127.0.0.1/0"], &["TCP/127.0.0.1/0"], false),
        ] {
            assert_eq!(clash(&ports(wanted), &ports(taken)), expected, "{wanted:?} {taken:?}");
        }
    }

    #[test]
    fn init_containers_count_where_they_are_always_restarted() {
        let port = |number: i32| json!([{"hostPort": number, "containerPort": 80}]);
        let pod = json!({"spec": {
            "initContainers": [
                {"name": "once", "image": "i", "ports": port(1)},
                {"name": "sidecar", "image": "i", "restartPolicy": "Always", "ports": port(2)},
            ],
            "containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 80}, {"hostPort": 3, "containerPort": 80}]}],
        }});
        let found = host_ports(&serde_json::from_value(pod).expect("pod"));
        let numbers: Vec<i32> = found.iter().map(|port| port.port).collect();
        assert_eq!(numbers, [2, 3]);
    }
}
