//! Tests of registration, and of what ends it (K01 to K08 and K28).

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use divvy_kubelet::api::connect;
use divvy_kubelet::api::v1beta1::device_plugin_client::DevicePluginClient;
use divvy_kubelet::api::v1beta1::{Empty, PreStartContainerRequest, PreStartContainerResponse};
use divvy_kubelet::plugin::{PluginSettings, PluginTiming};
use tempfile::tempdir;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tonic::{Response, Status};

use crate::fake_kubelet::{Kubelet, Next};
use crate::test_plugin::{RESOURCE, Running, TestPlugin};
use crate::{DEADLINE, registered, registered_with};

/// Return the names of the plugin's files in the directory.
fn plugin_files(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .expect("the directory is there")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("test-memory"))
        .collect();
    names.sort();
    names
}

/// Return a plugin that lets no container start.
fn no_starts() -> TestPlugin {
    TestPlugin {
        starts: Semaphore::new(0),
        ..TestPlugin::default()
    }
}

/// Ask a plugin to prepare a container's start, and return when it does.
async fn call_under_way(kubelet: &Kubelet, running: &Running) -> JoinHandle<Result<Response<PreStartContainerResponse>, Status>> {
    let mut client = kubelet.dial().await;
    let call = tokio::spawn(async move {
        let devices_ids = vec!["x".into()];
        client.pre_start_container(PreStartContainerRequest { devices_ids }).await
    });
    let mut starting = running.plugin.starting.subscribe();
    starting.wait_for(|count| *count == 1).await.expect("started");
    call
}

/// The kubelet registers the plugin at once.
#[tokio::test]
async fn k02_a_plugin_serves_before_it_registers() {
    let dir = tempdir().expect("a temporary directory");
    // A killed process left this socket behind.
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("test-memory-zzzzzz.sock")).expect("bound"));
    let kubelet = Kubelet::new(dir.path());
    kubelet.start();
    let started = Instant::now();
    let mut running = Running::start(dir.path());
    let record = kubelet.wait_registered(1).await;
    let took = started.elapsed();
    assert!(took < Duration::from_millis(500), "took {took:?}");
    let [asked] = record.asked.as_slice() else {
        panic!("{record:?}")
    };
    assert_eq!((asked.version.as_str(), asked.resource_name.as_str()), ("v1beta1", RESOURCE));
    let options = record.options.expect("the kubelet asked");
    assert!(options.pre_start_required && options.get_preferred_allocation_available);
    let status = running.wait_ready().await;
    assert_eq!(
        (status.registrations, status.open_streams, status.last_error.as_deref()),
        (1, 1, None)
    );
    assert_eq!(plugin_files(dir.path()), [asked.endpoint.as_str(), "test-memory.lock"]);
    running.stop().await;
    assert_eq!(plugin_files(dir.path()), [""; 0]);
}

/// The status shows the refusal in the kubelet's words.
#[tokio::test]
async fn k01_a_refused_registration_is_tried_for_ever() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let text = "the requested version v1beta2 is not among the supported ones: [v1beta1]";
    kubelet.next([
        Next::Refuse(text.into()),
        Next::Refuse(text.into()),
        Next::Refuse(text.into()),
    ]);
    let mut running = Running::start(dir.path());
    let status = running.wait("the refusal", |status| status.last_error.is_some()).await;
    assert!(
        status.last_error.as_ref().is_some_and(|error| error.contains(text)) && !status.registered,
        "{status:?}"
    );
    let record = kubelet.wait_registered(1).await;
    assert_eq!(record.asked.len(), 4);
    let endpoints: std::collections::BTreeSet<_> = record.asked.iter().map(|asked| &asked.endpoint).collect();
    assert_eq!(endpoints.len(), 4, "each listener has a name of its own");
    assert_eq!(running.wait_ready().await.last_error, None);
    running.stop().await;
}

/// The kubelet accepts the registration.
#[tokio::test]
async fn k03_a_kubelet_that_never_listens_is_asked_again() {
    assert_eq!(PluginTiming::default().first_stream, Duration::from_secs(5));
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    kubelet.next([Next::NeverListen]);
    let mut settings = PluginSettings::new(dir.path(), "test-memory");
    settings.timing.first_stream = Duration::from_millis(300);
    let mut running = Running::with(TestPlugin::default(), settings);
    let status = running.wait("the first registration", |status| status.registered).await;
    assert!(!status.is_ready());
    let record = kubelet.wait_registered(2).await;
    assert_eq!((record.asked.len(), record.most_open), (2, 1));
    running.stop().await;
}

#[tokio::test]
async fn a_plugin_waits_for_a_kubelet_that_is_not_there_and_says_so() {
    let dir = tempdir().expect("a temporary directory");
    let directory = dir.path().join("device-plugins");
    let mut running = Running::start(&directory);
    let missing = |text: &'static str| {
        move |status: &divvy_kubelet::plugin::PluginStatus| status.last_error.as_ref().is_some_and(|error| error.contains(text))
    };
    running.wait("no directory", missing("device-plugins does not exist")).await;
    fs::create_dir(&directory).expect("made");
    running.wait("no socket", missing("kubelet.sock does not exist")).await;
    assert_eq!(
        plugin_files(&directory),
        [""; 0],
        "nothing is served before there is a kubelet"
    );
    // A kubelet that was killed leaves its socket's file.
    let kubelet = Kubelet::new(&directory);
    drop(std::os::unix::net::UnixListener::bind(kubelet.socket()).expect("bound"));
    running.wait("no listener", missing("Connection refused")).await;
    kubelet.start();
    let appeared = Instant::now();
    kubelet.wait_registered(1).await;
    assert!(appeared.elapsed() < Duration::from_secs(1), "{:?}", appeared.elapsed());
    running.wait_ready().await;
    running.stop().await;
}

#[tokio::test]
async fn k05_a_dropped_stream_is_replaced_and_never_doubled() {
    let (_dir, kubelet, mut running) = registered().await;
    for times in 2..=4 {
        let dropped = Instant::now();
        kubelet.drop_streams();
        kubelet.wait_registered(times).await;
        assert!(dropped.elapsed() < Duration::from_secs(2), "{:?}", dropped.elapsed());
    }
    let record = kubelet.record.borrow().clone();
    assert_eq!((record.most_open, record.taken), (1, 4));
    assert_eq!(running.wait_ready().await.registrations, 4);
    running.stop().await;
}

#[tokio::test]
async fn a_restarted_kubelet_has_its_plugin_back_within_a_second() {
    let (_dir, kubelet, mut running) = registered().await;
    // The kubelet is killed and stays away for a while: its socket's file stays, but no process listens.
    kubelet.kill();
    running.wait("the stream's end", |status| status.open_streams == 0).await;
    kubelet.start();
    let restarted = Instant::now();
    kubelet.wait_registered(2).await;
    assert!(restarted.elapsed() < Duration::from_secs(1), "{:?}", restarted.elapsed());
    assert_eq!(kubelet.record.borrow().most_open, 1);
    running.stop().await;
}

#[tokio::test]
async fn a_plugin_whose_socket_is_removed_listens_and_registers_again() {
    let (_dir, kubelet, running) = registered().await;
    let first = kubelet.plugin_socket();
    fs::remove_file(&first).expect("removed");
    let removed = Instant::now();
    let record = kubelet
        .wait("the second registration", |record| record.taken == 2 && record.open == 1)
        .await;
    assert!(removed.elapsed() < Duration::from_secs(1), "{:?}", removed.elapsed());
    assert_eq!(record.most_open, 1);
    assert_ne!(kubelet.plugin_socket(), first);
    running.stop().await;
}

/// The socket has this name after each registration and replaces a socket that was left behind.
#[tokio::test]
async fn a_fixed_socket_keeps_its_name() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let socket = dir.path().join("nvidia-gpu.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("a socket that a killed process left"));
    let settings = PluginSettings {
        is_socket_fixed: true,
        ..PluginSettings::new(dir.path(), "nvidia-gpu")
    };
    let mut running = Running::with(TestPlugin::default(), settings);
    kubelet.wait_registered(1).await;
    assert_eq!(kubelet.plugin_socket(), socket);
    running.wait_ready().await;
    fs::remove_file(&socket).expect("removed");
    kubelet.wait_registered(2).await;
    assert_eq!(kubelet.plugin_socket(), socket);
    running.stop().await;
    assert!(!socket.exists());
}

#[tokio::test]
async fn k07_a_replaced_directory_is_followed() {
    let dir = tempdir().expect("a temporary directory");
    let directory = dir.path().join("device-plugins");
    fs::create_dir(&directory).expect("made");
    let kubelet = Kubelet::started(&directory);
    let running = Running::start(&directory);
    kubelet.wait_registered(1).await;
    for times in 2..=4 {
        kubelet.kill();
        fs::remove_dir_all(&directory).expect("removed");
        fs::create_dir(&directory).expect("made");
        kubelet.start();
        let replaced = Instant::now();
        kubelet.wait_registered(times).await;
        assert!(replaced.elapsed() < Duration::from_secs(1), "{:?}", replaced.elapsed());
    }
    assert_eq!(kubelet.record.borrow().most_open, 1);
    running.stop().await;
    assert_eq!(plugin_files(&directory), [""; 0]);
}

/// The variable that is set for a process in which nothing else opens files.
const ALONE: &str = "DIVVY_KUBELET_TEST_ALONE";

/// File descriptors are counted per process, so this test runs itself in a separate process.
#[test]
fn k06_fifty_new_kubelet_sockets_leak_nothing() {
    if std::env::var_os(ALONE).is_none() {
        let name = "plugin_lifecycle::k06_fifty_new_kubelet_sockets_leak_nothing";
        let me = std::env::current_exe().expect("the test's own program");
        let output = Command::new(me)
            .args(["--exact", name, "--nocapture"])
            .env(ALONE, "1")
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (_dir, kubelet, mut running) = registered().await;
        let mut before = (0, 0);
        for times in 2..=51 {
            match times % 3 {
                0 => kubelet.restart(),
                remainder => kubelet.replace_socket(remainder == 1),
            }
            let replaced = Instant::now();
            kubelet.wait_registered(times).await;
            assert!(
                replaced.elapsed() < Duration::from_secs(1),
                "{:?} at {times}",
                replaced.elapsed()
            );
            running
                .wait("this registration", |status| {
                    status.registrations == times as u64 && status.is_ready()
                })
                .await;
            // File times have the resolution of the kernel's tick. Within one tick, a new socket with a reused inode is not distinguishable.
            tokio::time::sleep(Duration::from_millis(20)).await;
            if times == 6 {
                before = resources();
            }
        }
        let record = kubelet.record.borrow().clone();
        assert_eq!((record.most_open, record.taken), (1, 51));
        // Closing may take a moment.
        let deadline = Instant::now() + DEADLINE;
        while resources() != before && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(resources(), before, "file descriptors and tasks");
        running.stop().await;
    });
}

fn resources() -> (usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    (descriptors, tokio::runtime::Handle::current().metrics().num_alive_tasks())
}

#[tokio::test]
async fn k08_a_second_process_waits_for_the_end_of_the_first() {
    let (dir, kubelet, first) = registered().await;
    let mut second = Running::start(dir.path());
    let waiting = |status: &divvy_kubelet::plugin::PluginStatus| {
        status
            .last_error
            .as_ref()
            .is_some_and(|error| error.contains("another process still serves"))
    };
    second.wait("waiting", waiting).await;
    assert_eq!(kubelet.record.borrow().taken, 1);
    first.stop().await;
    second.wait_ready().await;
    let record = kubelet.record.borrow().clone();
    assert_eq!((record.taken, record.most_open), (2, 1));
    second.stop().await;
}

#[tokio::test]
async fn events_that_change_nothing_do_not_register_again() {
    let (dir, kubelet, mut running) = registered().await;
    for number in 0..50 {
        let file = dir.path().join(format!("file{number}"));
        fs::write(&file, "x").expect("written");
        fs::rename(&file, dir.path().join("kubelet_internal_checkpoint")).expect("renamed");
    }
    fs::set_permissions(kubelet.socket(), fs::Permissions::from_mode(0o700)).expect("changed");
    // A kubelet that closes its listener while its stream is open: registration is impossible and unnecessary.
    fs::rename(kubelet.socket(), dir.path().join("elsewhere")).expect("renamed");
    tokio::time::sleep(Duration::from_millis(100)).await;
    fs::rename(dir.path().join("elsewhere"), kubelet.socket()).expect("renamed");
    // Longer than the check every 500 ms.
    tokio::time::sleep(Duration::from_millis(700)).await;
    let record = kubelet.record.borrow().clone();
    assert_eq!((record.asked.len(), record.lists.len(), record.open), (1, 1, 1));
    assert!(running.wait_ready().await.is_ready());
    running.stop().await;
}

#[tokio::test]
async fn k28_a_stop_lets_short_calls_finish() {
    let (dir, kubelet, running) = registered_with(no_starts()).await;
    let call = call_under_way(&kubelet, &running).await;
    let plugin = std::sync::Arc::clone(&running.plugin);
    let stopped = tokio::spawn(running.stop());
    // Streams end first, while the call continues.
    kubelet.wait("the stream's end", |record| record.open == 0).await;
    assert!(!call.is_finished());
    plugin.starts.add_permits(1);
    call.await.expect("no panic").expect("the call was carried out");
    let took = stopped.await.expect("stopped");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(plugin_files(dir.path()), [""; 0]);
}

/// The stop also closes connections on which the client sends nothing.
#[tokio::test]
async fn k28_a_stop_ends_long_calls_with_a_sentence() {
    let (dir, kubelet, running) = registered_with(no_starts()).await;
    // This client connects and never sends anything.
    let silent = tokio::net::UnixStream::connect(kubelet.plugin_socket())
        .await
        .expect("connected");
    let call = call_under_way(&kubelet, &running).await;
    let took = running.stop().await;
    assert!(took < Duration::from_millis(2500), "{took:?}");
    let status = call.await.expect("no panic").expect_err("it could not finish");
    assert!(status.message().contains("will be tried again"), "{status:?}");
    assert_eq!(plugin_files(dir.path()), [""; 0]);
    drop(silent);
}

#[tokio::test]
async fn a_second_stream_is_refused_and_leaves_the_first_alone() {
    let (_dir, kubelet, mut running) = registered().await;
    let refused = kubelet.dial().await.list_and_watch(Empty {}).await.expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    assert_eq!(running.wait_ready().await.open_streams, 1);
    assert_eq!(kubelet.record.borrow().open, 1);
    running.stop().await;
}

#[tokio::test]
async fn a_too_long_socket_path_is_clearly_refused() {
    let dir = tempdir().expect("a temporary directory");
    let settings = PluginSettings::new(dir.path().join("d".repeat(100)), "test-memory");
    let (status, _) = tokio::sync::watch::channel(divvy_kubelet::plugin::PluginStatus::default());
    let plugin = std::sync::Arc::new(TestPlugin::default());
    let stop = tokio_util::sync::CancellationToken::new();
    let error = divvy_kubelet::plugin::PluginServer::run(plugin, settings, stop, status)
        .await
        .expect_err("refused");
    assert!(error.to_string().contains("at most 107"), "{error}");
}

/// The plugin creates its socket again when the socket is removed.
#[tokio::test]
async fn an_unregistered_plugin_serves_without_a_kubelet() {
    let dir = tempdir().expect("a temporary directory");
    let kubelet = Kubelet::started(dir.path());
    let settings = PluginSettings {
        registers: false,
        is_socket_fixed: true,
        ..PluginSettings::new(dir.path(), "test-memory")
    };
    let running = Running::with(TestPlugin::default(), settings);
    let socket = dir.path().join("test-memory.sock");
    let served = async || {
        let options = async {
            let channel = connect(&socket, DEADLINE).await.ok()?;
            let asked = DevicePluginClient::new(channel).get_device_plugin_options(Empty {}).await;
            Some(asked.ok()?.into_inner().pre_start_required)
        };
        options.await
    };
    let until_served = async || {
        while served().await != Some(true) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    for _ in 0..2 {
        tokio::time::timeout(DEADLINE, until_served()).await.expect("served");
        fs::remove_file(&socket).expect("there");
    }
    tokio::time::timeout(DEADLINE, until_served()).await.expect("served");
    running.stop().await;
    assert_eq!(plugin_files(dir.path()), [""; 0]);
    assert!(kubelet.record.borrow().asked.is_empty());
}
