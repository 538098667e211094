//! Tests of a kubelet's calls and the plugin's answers (K04, K18, K19, K21).

use std::sync::Arc;
use std::time::Duration;

use divvy_kubelet::api::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use divvy_kubelet::plugin::PluginSettings;
use tempfile::tempdir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tonic::Code;

use crate::fake_kubelet::Kubelet;
use crate::test_plugin::{Running, TestPlugin, devices};
use crate::{DEADLINE, registered, registered_with};

fn allocation(containers: &[&[String]]) -> AllocateRequest {
    AllocateRequest {
        container_requests: containers
            .iter()
            .map(|ids| ContainerAllocateRequest {
                devices_ids: ids.to_vec(),
            })
            .collect(),
    }
}

#[tokio::test]
async fn k04_one_list_at_first_then_one_for_each_real_change() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let running = Running::start(dir.path());
    let first = kubelet.wait("the first list", |record| record.lists.len() == 1).await;
    assert_eq!(first.lists[0].len(), 4);
    assert!(first.lists[0].iter().all(|device| device.health == "Healthy"));
    assert_eq!(
        first.lists[0][0].topology.as_ref().map(|topology| topology.nodes[0].id),
        Some(0)
    );

    let mut sick = devices(4);
    sick[2].healthy = false;
    let publish =
        |devices: &[divvy_kubelet::plugin::PluginDevice]| running.plugin.devices.send_replace(Arc::new(devices.to_vec()));
    publish(&sick);
    let second = kubelet.wait("the second list", |record| record.lists.len() == 2).await;
    let health: Vec<&str> = second.lists[1].iter().map(|device| device.health.as_str()).collect();
    assert_eq!(health, ["Healthy", "Healthy", "Unhealthy", "Healthy"]);

    // The same list in another order, the same list again, and a change that is undone immediately: the kubelet need not hear of any.
    let mut turned = sick.clone();
    turned.reverse();
    publish(&turned);
    tokio::time::sleep(Duration::from_millis(20)).await;
    publish(&sick);
    tokio::time::sleep(Duration::from_millis(20)).await;
    publish(&devices(4));
    publish(&sick);
    tokio::time::sleep(Duration::from_millis(20)).await;
    publish(&devices(4));
    let third = kubelet.wait("the third list", |record| record.lists.len() >= 3).await;
    assert_eq!(third.lists.len(), 3);
    assert!(third.lists[2].iter().all(|device| device.health == "Healthy"));
    running.stop().await;
}

/// This holds with four thousand ids, too.
#[tokio::test]
async fn k19_each_container_request_has_its_answer() {
    let plugin = TestPlugin::default();
    plugin.devices.send_replace(Arc::new(devices(4096)));
    let (_dir, kubelet, running) = registered_with(plugin).await;
    let mut client = kubelet.dial().await;
    let ids: Vec<String> = devices(4096).into_iter().map(|device| device.id).collect();
    for containers in [&[][..], &[&ids[..]], &[&ids[..3], &ids[3..]], &[&[][..]]] {
        let answer = client.allocate(allocation(containers)).await.expect("allocated").into_inner();
        let names: Vec<&str> = answer
            .container_responses
            .iter()
            .map(|response| response.cdi_devices[0].name.as_str())
            .collect();
        let want: Vec<String> = containers
            .iter()
            .map(|ids| format!("vendor.example/class={}", ids.len()))
            .collect();
        assert_eq!(names, want);
    }
    running.stop().await;
}

#[tokio::test]
async fn k19_a_refused_allocation_says_why_in_the_plugins_words() {
    let (_dir, kubelet, running) = registered().await;
    let mut client = kubelet.dial().await;
    let good = devices(1)[0].id.clone();
    let status = client
        .allocate(allocation(&[&[good], &["of another".to_owned()]]))
        .await
        .expect_err("refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(
        status.message(),
        "\"of another\" is not a device of vendor.example/memory; nothing was allocated"
    );
    let status = client
        .pre_start_container(PreStartContainerRequest { devices_ids: Vec::new() })
        .await
        .expect_err("refused");
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "memory still held by default/other:\n3 MiB – wait")
    );
    client
        .pre_start_container(PreStartContainerRequest {
            devices_ids: vec!["x".into()],
        })
        .await
        .expect("started");
    running.stop().await;
}

#[tokio::test]
async fn k18_a_preference_is_always_answered_whatever_is_asked() {
    let (_dir, kubelet, running) = registered().await;
    let mut client = kubelet.dial().await;
    // More than the 4 MiB that gRPC libraries accept by default.
    let many: Vec<String> = devices(100_000).into_iter().map(|device| device.id).collect();
    for (available, must_include, allocation_size, want) in [
        (many.clone(), vec![many[7].clone()], 3, 3),
        (many[..2].to_vec(), Vec::new(), 5, 2),
        (Vec::new(), Vec::new(), -1, 0),
    ] {
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: available,
            must_include_device_ids: must_include.clone(),
            allocation_size,
        };
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let answer = client.get_preferred_allocation(request).await.expect("answered").into_inner();
        let [response] = answer.container_responses.as_slice() else {
            panic!("{answer:?}")
        };
        assert_eq!(response.device_ids.len(), want);
        assert!(must_include.iter().all(|id| response.device_ids.contains(id)));
    }
    running.stop().await;
}

/// The refusal says what to do.
#[tokio::test]
async fn k21_a_list_that_no_kubelet_accepts_is_refused() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let plugin = TestPlugin::default();
    plugin.devices.send_replace(Arc::new(devices(80_000)));
    let running = Running::with(plugin, PluginSettings::new(dir.path(), "test-memory"));
    let record = kubelet.wait("an error", |record| !record.stream_errors.is_empty()).await;
    let status = &record.stream_errors[0];
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(
        status.message().contains("80000 devices") && status.message().contains("choose larger units"),
        "{status:?}"
    );
    // The plugin tries again with growing waits, and recovers as soon as the list is small enough.
    running.plugin.devices.send_replace(Arc::new(devices(10)));
    kubelet
        .wait("the list", |record| record.lists.iter().any(|list| list.len() == 10))
        .await;
    running.stop().await;
}

/// A client in Python, like one in Go that is not told otherwise, names the socket's path as the authority.
#[tokio::test]
async fn a_socket_path_as_the_authority_is_answered() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let _running = Running::start(dir.path());
    let record = kubelet.wait("a registration", |record| !record.asked.is_empty()).await;
    let mut stream = UnixStream::connect(dir.path().join(&record.asked[0].endpoint))
        .await
        .expect("connected");
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).expect("short");
        [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let fields: &[&[u8]] = &[
        b"\x40\x05:path\x2c/v1beta1.DevicePlugin/GetDevicePluginOptions",
        b"\x40\x0a:authority\x0ftmp%2Fplug.sock",
        b"\x83\x86\x40\x0ccontent-type\x10application/grpc\x40\x02te\x08trailers",
    ];
    let (settings, headers, data, end_headers, end_stream) = (4, 1, 0, 4, 1);
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(settings, 0, 0, &[]),
        frame(headers, end_headers, 1, &fields.concat()),
        frame(data, end_stream, 1, &[0; 5]),
    ];
    stream.write_all(&request.concat()).await.expect("sent");
    let answer = async {
        loop {
            let mut header = [0; 9];
            stream.read_exact(&mut header).await.expect("a frame");
            let [a, b, c, kind, _, _, _, _, on] = header;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            stream.read_exact(&mut payload).await.expect("its payload");
            if on == 1 {
                return kind;
            }
        }
    };
    let kind = tokio::time::timeout(DEADLINE, answer).await.expect("an answer");
    assert_eq!(kind, headers, "a reset (3) means that the request was refused");
}
