//! A connection to an extender that stays open, as kube-scheduler's connections do.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A TCP stream, or TLS over one.
pub trait ByteStream: Read + Write + Send {}
impl<T: Read + Write + Send> ByteStream for T {}

/// An HTTP/1.1 client that uses one connection.
pub struct HttpConnection {
    stream: BufReader<Box<dyn ByteStream>>,
    /// The lines of each request about the server and the client.
    head: String,
}

impl fmt::Debug for HttpConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl HttpConnection {
    /// Open a connection over plain TCP.
    ///
    /// # Errors
    /// Fails if no program listens at the address.
    pub fn open(address: &str) -> io::Result<HttpConnection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(HttpConnection::over(Box::new(stream)))
    }

    /// Send requests over an existing stream.
    pub fn over(stream: Box<dyn ByteStream>) -> HttpConnection {
        HttpConnection {
            stream: BufReader::with_capacity(1 << 16, stream),
            head: "Host: extender\r\n".to_owned(),
        }
    }

    /// Send requests to a server that checks its name and a token.
    #[must_use]
    pub fn bearing(self, host: &str, token: &str) -> HttpConnection {
        let head = format!("Host: {host}\r\nAuthorization: Bearer {token}\r\n");
        HttpConnection { head, ..self }
    }

    /// Send a GET request. Return the response's status and body.
    ///
    /// # Errors
    /// Fails if the connection breaks or the response is not HTTP.
    pub fn get(&mut self, path: &str) -> io::Result<(u16, String)> {
        self.send("GET", path, "")
    }

    /// Send a POST request. Return the response's status and body.
    ///
    /// # Errors
    /// Fails if the connection breaks or the response is not HTTP.
    pub fn post(&mut self, path: &str, body: &str) -> io::Result<(u16, String)> {
        self.send("POST", path, body)
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.head,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| unexpected("the answer has no status"))?;
        let (mut length, mut chunked) = (0, false);
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let header = line.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().map_err(|_| unexpected("the length is not a number"))?;
            }
            chunked |= header.starts_with("transfer-encoding:") && header.contains("chunked");
        }
        let mut body = Vec::new();
        if chunked {
            loop {
                let size = self.chunk_size(&mut line)?;
                let from = body.len();
                body.resize(from + size, 0);
                self.stream.read_exact(&mut body[from..])?;
                line.clear();
                self.stream.read_line(&mut line)?;
                if size == 0 {
                    break;
                }
            }
        } else {
            body.resize(length, 0);
            self.stream.read_exact(&mut body)?;
        }
        let body = String::from_utf8(body).map_err(|_| unexpected("the answer is not UTF-8"))?;
        Ok((status, body))
    }

    fn chunk_size(&mut self, line: &mut String) -> io::Result<usize> {
        line.clear();
        self.stream.read_line(line)?;
        usize::from_str_radix(line.trim(), 16).map_err(|_| unexpected("a chunk has no size"))
    }
}
