use std::net::TcpStream;
use std::sync::Arc;

use divvy_bench::ask::HttpConnection;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::Outcome;

/// The extender's address, and, for TLS, the certificates of a client.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    pub(crate) address: String,
    pub(crate) tls: Option<(Arc<ClientConfig>, &'static str)>,
}

impl Door {
    pub(crate) fn open(&self) -> Outcome<HttpConnection> {
        let Some((config, name)) = &self.tls else {
            return Ok(HttpConnection::open(&self.address)?);
        };
        let stream = TcpStream::connect(&self.address)?;
        stream.set_nodelay(true)?;
        let tls = ClientConnection::new(config.clone(), ServerName::try_from(*name)?)?;
        Ok(HttpConnection::over(Box::new(StreamOwned::new(tls, stream))))
    }
}
