//! Writes the clients and servers of the device plugin API. This needs neither `protoc` nor a `.proto` file: the messages are in
//! `src/api/v1beta1.rs`.

use tonic_build::manual::{Builder, Method, MethodBuilder, Service};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let registration = Service::builder()
        .name("Registration")
        .package("v1beta1")
        .comment("Served by the kubelet on kubelet.sock.")
        .method(method("register", "Register", "RegisterRequest", "Empty").build())
        .build();
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .comment("Served by the plugin on the socket that it named in RegisterRequest.endpoint.")
        .method(
            method(
                "get_device_plugin_options",
                "GetDevicePluginOptions",
                "Empty",
                "DevicePluginOptions",
            )
            .build(),
        )
        .method(
            method("list_and_watch", "ListAndWatch", "Empty", "ListAndWatchResponse")
                .server_streaming()
                .build(),
        )
        .method(
            method(
                "get_preferred_allocation",
                "GetPreferredAllocation",
                "PreferredAllocationRequest",
                "PreferredAllocationResponse",
            )
            .build(),
        )
        .method(method("allocate", "Allocate", "AllocateRequest", "AllocateResponse").build())
        .method(
            method(
                "pre_start_container",
                "PreStartContainer",
                "PreStartContainerRequest",
                "PreStartContainerResponse",
            )
            .build(),
        )
        .build();
    Builder::new().compile(&[registration, plugin]);
}

/// A call with this name in Rust and on the wire. The generated modules are one level below the messages.
fn method(name: &str, route: &str, request: &str, response: &str) -> MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("super::{request}"))
        .output_type(format!("super::{response}"))
        .codec_path("tonic_prost::ProstCodec")
}
