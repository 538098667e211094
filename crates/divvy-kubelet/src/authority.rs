//! Connections of gRPC clients that name the socket's path as the authority.
//!
//! A gRPC client sends the host that it connects to as `:authority`. For a Unix socket, grpc-go (unless told otherwise) and the clients
//! based on gRPC's C core, such as Python's, send the path, percent-encoded: `%2Ftmp%2Fplugin.sock`. A server in Go accepts this value.
//! The `h2` crate refuses the request, because the value is not an authority by RFC 3986. The kubelet sends `localhost`
//! (`dial` in kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go), but test kubelets do not.
//!
//! Nothing here uses the value, so [`AnyAuthority`] overwrites it with letters of the same length while the bytes are read. For this it follows
//! the frames of HTTP/2 (RFC 9113, section 4.1) and the fields of HPACK (RFC 7541, section 6).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// The length of what a client sends before its first frame.
const PREFACE: u32 = 24;
/// Frame types.
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
/// Flags of frames.
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The name of the field, and its index in HPACK's static table.
const NAME: &[u8] = b":authority";
const INDEX: u32 = 1;
/// The bit of a text's first byte that says that the text is Huffman-coded.
const HUFFMAN: u8 = 0x80;

/// A server's end of a connection, on which clients may send any authority.
#[derive(Debug)]
pub struct AnyAuthority<S> {
    stream: S,
    frames: Frames,
}

impl<S> AnyAuthority<S> {
    /// Wrap a connection from which nothing has been read.
    pub fn new(stream: S) -> AnyAuthority<S> {
        AnyAuthority {
            stream,
            frames: Frames::default(),
        }
    }
}

/// The position in the frames of a connection.
#[derive(Debug)]
struct Frames {
    /// The bytes of the preface, of the present header, or of the present payload that are still to come.
    left: u32,
    /// The bytes of the header before the payload, as far as they have been read. `None` in the preface and in a payload.
    header: Option<Vec<u8>>,
    /// The bytes before the fields that are still to come: padding's length, and a priority.
    skip: u32,
    /// Whether the next byte is the length of the padding after the fields.
    is_padded: bool,
    /// The bytes of the padding.
    padding: u32,
    /// Whether the payload contains fields, and whether they end with it.
    has_fields: bool,
    is_last: bool,
    fields: Fields,
}

impl Default for Frames {
    fn default() -> Frames {
        Frames {
            left: PREFACE,
            header: None,
            skip: 0,
            is_padded: false,
            padding: 0,
            has_fields: false,
            is_last: false,
            fields: Fields::Begin,
        }
    }
}

impl Frames {
    /// Follow the bytes that were read, and overwrite the authority.
    fn read(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            match &mut self.header {
                Some(header) => {
                    header.push(*byte);
                    if let [a, b, c, kind, flags, ..] = header[..]
                        && header.len() == 9
                    {
                        self.begin(u32::from_be_bytes([0, a, b, c]), kind, flags);
                    }
                }
                None => {
                    self.left -= 1;
                    self.payload(byte);
                }
            }
            if self.header.is_none() && self.left == 0 {
                self.end();
            }
        }
    }

    /// Begin a payload.
    fn begin(&mut self, length: u32, kind: u8, flags: u8) {
        self.header = None;
        self.left = length;
        self.has_fields = matches!(kind, HEADERS | CONTINUATION);
        self.is_last = flags & END_HEADERS != 0;
        self.is_padded = kind == HEADERS && flags & PADDED != 0;
        self.skip = if kind == HEADERS && flags & PRIORITY != 0 { 5 } else { 0 };
        self.padding = 0;
    }

    fn payload(&mut self, byte: &mut u8) {
        if !self.has_fields {
            return;
        }
        if self.is_padded {
            self.is_padded = false;
            self.padding = u32::from(*byte);
        } else if self.skip > 0 {
            self.skip -= 1;
        } else if self.left >= self.padding {
            self.fields.read(byte);
        }
    }

    fn end(&mut self) {
        self.header = Some(Vec::with_capacity(9));
        if self.has_fields && self.is_last {
            self.fields = Fields::Begin;
        }
        self.has_fields = false;
    }
}

/// The position in the fields of a request.
#[derive(Debug)]
enum Fields {
    /// The next byte begins a field.
    Begin,
    /// In a number that goes on: its value so far, the place of the next 7 bits, and what the number is.
    Number(u32, u32, Number),
    /// The next byte begins a text: a name, or the value of a field that is the authority or not.
    Text(HeaderText),
    /// In a name: its bytes that are still to come, and what came so far, cut after the length of [`NAME`] plus one.
    Name(u32, Vec<u8>),
    /// In a value: its bytes that are still to come, and whether it is the authority.
    Value(u32, bool),
}

#[derive(Debug, Clone, Copy)]
enum Number {
    /// The index of a whole field, or the size of a table.
    Other,
    /// The index of the name of a field whose value follows.
    NameIndex,
    Length(HeaderText),
}

#[derive(Debug, Clone, Copy)]
enum HeaderText {
    Name,
    Value { is_authority: bool },
}

impl Fields {
    fn read(&mut self, byte: &mut u8) {
        *self = match std::mem::replace(self, Fields::Begin) {
            Fields::Begin => match *byte {
                0x80.. => number(*byte, 7, Number::Other),
                0x40.. => number(*byte, 6, Number::NameIndex),
                0x20.. => number(*byte, 5, Number::Other),
                _ => number(*byte, 4, Number::NameIndex),
            },
            Fields::Number(value, place, what) => {
                let more = u32::from(*byte & 0x7f).checked_shl(place).unwrap_or(u32::MAX);
                let value = value.saturating_add(more);
                match *byte & 0x80 {
                    0 => after(value, what),
                    _ => Fields::Number(value, place.saturating_add(7), what),
                }
            }
            Fields::Text(text) => {
                let length = *byte;
                if let HeaderText::Value { is_authority: true } = text {
                    *byte &= !HUFFMAN;
                }
                number(length, 7, Number::Length(text))
            }
            Fields::Name(left, mut name) => {
                if name.len() <= NAME.len() {
                    name.push(*byte);
                }
                match left {
                    ..=1 => Fields::Text(HeaderText::Value {
                        is_authority: name == NAME,
                    }),
                    _ => Fields::Name(left - 1, name),
                }
            }
            Fields::Value(left, is_authority) => {
                if is_authority {
                    *byte = b'a';
                }
                match left {
                    ..=1 => Fields::Begin,
                    _ => Fields::Value(left - 1, is_authority),
                }
            }
        }
    }
}

/// Begin a number in the last bits of a byte. If they are all ones, it goes on in the next byte.
fn number(byte: u8, bits: u32, what: Number) -> Fields {
    let most = (1 << bits) - 1;
    match u32::from(byte) & most {
        value if value == most => Fields::Number(value, 0, what),
        value => after(value, what),
    }
}

/// Return what follows a number.
fn after(value: u32, what: Number) -> Fields {
    match (what, value) {
        (Number::Other, _) => Fields::Begin,
        (Number::NameIndex, 0) => Fields::Text(HeaderText::Name),
        (Number::NameIndex, index) => Fields::Text(HeaderText::Value {
            is_authority: index == INDEX,
        }),
        (Number::Length(HeaderText::Name), 0) => Fields::Text(HeaderText::Value { is_authority: false }),
        (Number::Length(HeaderText::Name), length) => Fields::Name(length, Vec::new()),
        (Number::Length(HeaderText::Value { .. }), 0) => Fields::Begin,
        (Number::Length(HeaderText::Value { is_authority }), length) => Fields::Value(length, is_authority),
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnyAuthority<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.frames.read(&mut buffer.filled_mut()[before..]);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnyAuthority<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S> Connected for AnyAuthority<S> {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frames.concat()].concat()
    }

    /// Read a connection in pieces.
    fn read(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let mut frames = Frames::default();
        bytes.chunks_mut(piece).for_each(|piece| frames.read(piece));
        bytes
    }

    /// `:method: POST`, a literal field with a name, and the authority as grpc-go (by index) or gRPC's C core (by name) writes it.
    fn fields(authority: &[u8]) -> Vec<u8> {
        [b"\x83\x40\x02te\x08trailers".as_slice(), authority, b"\x86"].concat()
    }

    #[test]
    fn every_form_of_the_authority_is_overwritten() {
        let settings = frame(4, 0, &[0, 3, 0, 0, 0, 100]);
        let data = frame(0, 1, b"\x41\x04%2Fx");
        let by_index: (&[u8], &[u8]) = (b"\x41\x06%2Ft.s", b"\x41\x06aaaaaa");
        let by_name: (&[u8], &[u8]) = (b"\x40\x0a:authority\x06%2Ft.s", b"\x40\x0a:authority\x06aaaaaa");
        let without_indexing: (&[u8], &[u8]) = (b"\x01\x03%2F", b"\x01\x03aaa");
        let in_huffman: (&[u8], &[u8]) = (b"\x41\x83\x54\x58\x3f", b"\x41\x03aaa");
        let long = [b"\x41\x7f\x49".to_vec(), vec![b'%'; 200]].concat();
        let long_after = [b"\x41\x7f\x49".to_vec(), vec![b'a'; 200]].concat();
        for (before, after) in [by_index, by_name, without_indexing, in_huffman, (&long, &long_after)] {
            let connection = |authority: &[u8]| {
                let fields = fields(authority);
                let (first, second) = fields.split_at(fields.len() / 2);
                let padded = [&[2, 0, 0, 0, 0, 7], &fields[..], &[0x41, 0x02]].concat();
                connection(&[
                    settings.clone(),
                    frame(HEADERS, END_HEADERS, &fields),
                    data.clone(),
                    frame(HEADERS, 0, first),
                    frame(CONTINUATION, END_HEADERS, second),
                    frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &padded),
                    frame(HEADERS, END_HEADERS, &fields),
                ])
            };
            for piece in [1, 2, 7, 10_000] {
                assert_eq!(
                    read(&connection(before), piece),
                    connection(after),
                    "{before:?} in pieces of {piece}"
                );
            }
        }
    }

    #[test]
    fn other_fields_stay_as_they_are() {
        let others = b"\x83\xff\x10\x3f\xe1\x1f\x04\x03/x?\x40\x0b:authorityX\x01%\x40\x00\x01%\x7f\x00\x02%2\x0f\x2b\x01%";
        let connection = connection(&[frame(HEADERS, END_HEADERS, others)]);
        assert_eq!(read(&connection, 3), connection);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_alike_in_one_piece_and_in_many(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1usize..20) {
            let connection = connection(&[bytes]);
            prop_assert_eq!(read(&connection, piece), read(&connection, connection.len()));
        }
    }
}
