//! The emulated node where a test or a demo cannot show what it does.

use divvy_testbed::api::{ApiServer, ApiServerOptions};
use divvy_testbed::node::{NodeDescription, TestbedNode};

#[tokio::test]
async fn a_directory_that_is_too_deep_for_a_socket_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let api = ApiServer::new(ApiServerOptions::default());
    let root = directory.path().join("d".repeat(100));
    let error = TestbedNode::start(api.client(), NodeDescription::new("n1", &root))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("at most 107") && text.contains("shorter directory"), "{text}");
    assert!(!root.exists());
}
