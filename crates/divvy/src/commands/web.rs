//! `divvy web`: serves the web page on this machine, with the user's own rights.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use divvy_kube::{client, list};
use divvy_program::until_stopped;
use divvy_web::{Hosts, LocalToken, PageHub, router};

use super::inspect::choice;
use crate::cli::web::WebArgs;
use crate::printer;

/// Serve the page until the user stops the program.
pub async fn run(args: WebArgs) -> anyhow::Result<()> {
    let client = client::connect(&choice(&args.cluster)).await?.client;
    // A missing right is an error here, and not an empty page.
    list::can_list(&client).await?;
    let stop = until_stopped(false)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    let listener = divvy_serve::listen(address).with_context(|| match args.port {
        0 => "no port on 127.0.0.1 can be opened".to_owned(),
        port => format!("port {port} on 127.0.0.1 cannot be opened; choose another one with --port, or leave it out"),
    })?;
    let port = listener.local_addr().context("the port is not known")?.port();
    let token = LocalToken::random().context("no token can be made")?;
    let hub = Arc::new(PageHub::new());
    printer::print(&format!("http://127.0.0.1:{port}/?token={}\n", token.text()))?;
    super::say("Open this address in a browser on this machine. Ctrl-C ends the page.")?;
    let router = router(hub.clone(), Arc::new(token), Hosts::loopback(port));
    let served = divvy_web::serve(listener, router, stop.clone());
    tokio::select! {
        () = served => Ok(()),
        () = divvy_feed::feed(client, hub) => anyhow::bail!("the watches of nodes and pods have ended; start the command again"),
    }
}
