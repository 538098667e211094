use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::Outcome;

/// A connection that is kept, as kube-scheduler keeps it.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    pub(crate) fn open(address: &str) -> Outcome<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
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
