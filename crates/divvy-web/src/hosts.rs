//! Which names a client may use for the server.

use std::collections::BTreeSet;

use http::{HeaderMap, Uri, header};

/// The values of the header `Host` that are answered. Another name means that a page of another site reaches this server by a DNS name of its own
/// ("DNS rebinding"), and gets status 421.
#[derive(Debug, Clone)]
pub struct Hosts {
    names: BTreeSet<String>,
    /// The name of the cookie with the token.
    pub(crate) cookie: String,
    pub(crate) tls: bool,
}

impl Hosts {
    /// The names of this machine for itself, with a port: for `divvy web`.
    pub fn loopback(port: u16) -> Hosts {
        let names = ["127.0.0.1", "localhost", "[::1]"];
        Hosts {
            // A browser sends a cookie to all ports of a machine, and other programs may serve pages there.
            cookie: format!("divvy-{port}"),
            ..Hosts::named(names.into_iter().map(|name| format!("{name}:{port}")))
        }
    }

    /// These names: `divvy.example.com`, or with a port `divvy.example.com:8443`. A name without a port stands for all ports.
    pub fn named(names: impl IntoIterator<Item = String>) -> Hosts {
        Hosts {
            names: names.into_iter().map(|name| name.to_ascii_lowercase()).collect(),
            cookie: "divvy".to_owned(),
            tls: false,
        }
    }

    /// Say that clients use TLS. Cookies are then sent over TLS only.
    #[must_use]
    pub fn over_tls(self) -> Hosts {
        Hosts { tls: true, ..self }
    }

    /// Report whether a request is for this server.
    pub(crate) fn accept(&self, uri: &Uri, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (first, second) = (hosts.next(), hosts.next());
        // HTTP/2 has the name in the address.
        let named = match (first, uri.authority()) {
            (Some(host), _) => host.to_str().ok(),
            (None, Some(authority)) => Some(authority.as_str()),
            (None, None) => None,
        };
        second.is_none() && named.is_some_and(|name| self.has(&name.to_ascii_lowercase()))
    }

    fn has(&self, name: &str) -> bool {
        let without_port = name
            .rsplit_once(':')
            .filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
        self.names.contains(name) || without_port.is_some_and(|(name, _)| self.names.contains(name))
    }
}
