use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::Outcome;

/// TCP, or TLS over it.
trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// Where the extender listens, and with TLS what a client has.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    pub(crate) address: String,
    pub(crate) tls: Option<(Arc<ClientConfig>, &'static str)>,
}

/// A connection that is kept, as kube-scheduler keeps it.
pub(crate) struct Connection {
    stream: BufReader<Box<dyn Stream>>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    pub(crate) fn open(door: &Door) -> Outcome<Connection> {
        let stream = TcpStream::connect(&door.address)?;
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match &door.tls {
            None => Box::new(stream),
            Some((config, name)) => Box::new(StreamOwned::new(
                ClientConnection::new(config.clone(), ServerName::try_from(*name)?)?,
                stream,
            )),
        };
        Ok(Connection {
            stream: BufReader::with_capacity(1 << 16, stream),
        })
    }

    pub(crate) fn get(&mut self, path: &str) -> Outcome<(u16, String)> {
        self.send("GET", path, "")
    }

    pub(crate) fn post(&mut self, path: &str, body: &str) -> Outcome<(u16, String)> {
        self.send("POST", path, body)
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> Outcome<(u16, String)> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: extender\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status: u16 = line.split(' ').nth(1).ok_or("no status")?.parse()?;
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let header = line.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok((status, String::from_utf8(body)?))
    }
}
