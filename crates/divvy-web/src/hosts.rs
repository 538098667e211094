//! Which names a client may use for the server.

use std::collections::BTreeSet;

/// The values of the header `Host` that are answered. Another name means that a page of another site reaches this server by a DNS name of its own
/// ("DNS rebinding"), and gets status 421.
#[derive(Debug, Clone)]
pub struct Hosts {
    pub(crate) names: BTreeSet<String>,
    pub(crate) tls: bool,
}

impl Hosts {
    /// The names of this machine for itself, with a port: for `divvy web`.
    pub fn loopback(port: u16) -> Hosts {
        let names = ["127.0.0.1", "localhost", "[::1]"];
        Hosts::named(names.into_iter().map(|name| format!("{name}:{port}")))
    }

    /// These names: `divvy.example.com`, or with a port `divvy.example.com:8443`. A name without a port stands for all ports.
    pub fn named(names: impl IntoIterator<Item = String>) -> Hosts {
        Hosts {
            names: names.into_iter().map(|name| name.to_ascii_lowercase()).collect(),
            tls: false,
        }
    }

    /// Say that clients use TLS. Cookies are then sent over TLS only.
    #[must_use]
    pub fn over_tls(self) -> Hosts {
        Hosts { tls: true, ..self }
    }
}
