//! A node whose pods use GPUs through CUDA's Multi-Process Service.

use std::fs;

use super::*;

/// A container waits until the daemon serves.
#[tokio::test]
async fn pods_are_placed_for_mps_while_the_daemon_serves() {
    let mut bed = Bed::new(&[16384]).await;
    bed.stop_agent().await;
    bed.config.mps = true;
    bed.start_agent();
    bed.ready_is(200, "").await;
    bed.inventory(|inventory| inventory.gpus[0].enforcement.is_none()).await;
    bed.kubelet_has(16).await;
    bed.create_with("a", Some(0), 3, &[]);
    let waits = bed.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "a").ok()?;
        let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"].as_str()?;
        Some(message.to_owned())
    });
    let message = waits.await.expect("the container waits");
    assert!(
        message.contains("the MPS control daemon of this node does not serve"),
        "{message}"
    );

    let root = bed.config.sys_root.join("run/nvidia/mps");
    let directory = root.join("divvy.dev/shares");
    for path in [directory.join("pipe"), root.join("shm")] {
        fs::create_dir_all(path).expect("created");
    }
    fs::write(directory.join(".started"), "uid").expect("written");
    let container = bed.running("a").await;
    assert_eq!(env(&container, "CUDA_MPS_PIPE_DIRECTORY"), "/mps/divvy.dev/shares/pipe");
    let mount = |path: &str| {
        container
            .mounts
            .iter()
            .find(|mount| mount.container == path)
            .map(|mount| mount.host.clone())
    };
    assert_eq!(mount("/dev/shm").as_deref(), Some("/run/nvidia/mps/shm"));
    bed.inventory(|inventory| inventory.gpus[0].enforcement == Some(Enforcement::MPS))
        .await;
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert!(
        text.contains("divvy_agent_gpu_enforcement{gpu=\"GPU-0\",mechanism=\"mps\"} 1"),
        "{text}"
    );
    bed.stop_agent().await;
}
