//! Splits a stream of bytes into lines of bounded length.

use crate::Error;

/// The maximum length of a line in bytes, without its `\n`: 1 MiB.
pub const MAX_LINE: usize = 1 << 20;

/// Collects bytes and returns them as lines. After an error, the start of the next line is unknown, so the caller closes the connection.
#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// Bytes before this position were already returned.
    start: usize,
    /// Bytes before this position contain no `\n`.
    searched: usize,
}

impl LineBuffer {
    /// Add the bytes of one read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
            self.searched = 0;
            // Do not keep the memory of a long line indefinitely.
            self.bytes.shrink_to(64 * 1024);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Return the next complete line without its `\n`, or `None` if more bytes are needed.
    pub fn next_line(&mut self) -> Result<Option<String>, Error> {
        let found = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let end = match found {
            Some(offset) => self.searched + offset,
            None => self.bytes.len(),
        };
        if end - self.start > MAX_LINE {
            return Err(Error::Protocol(format!("a line is longer than {MAX_LINE} bytes")));
        }
        if found.is_none() {
            self.bytes.drain(..self.start);
            self.start = 0;
            self.searched = self.bytes.len();
            return Ok(None);
        }
        let line = self.bytes[self.start..end].to_vec();
        self.start = end + 1;
        self.searched = self.start;
        match String::from_utf8(line) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(Error::Protocol("a line is not UTF-8".to_owned())),
        }
    }

    /// Report whether the buffer ends in the middle of a line.
    pub fn is_partial(&self) -> bool {
        self.start < self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_line_above_the_greatest_length_is_refused() {
        for (length, fits) in [(MAX_LINE, true), (MAX_LINE + 1, false)] {
            let mut lines = LineBuffer::default();
            lines.push(&vec![b'x'; length]);
            assert_eq!(lines.next_line().is_ok(), fits, "before the end of the line is there");
            lines.push(b"\nnext");
            assert_eq!(
                lines.next_line().map(|line| line.map(|line| line.len())).ok(),
                fits.then_some(Some(length))
            );
        }
    }

    #[test]
    fn what_is_not_utf8_is_refused() {
        let mut lines = LineBuffer::default();
        lines.push(b"ok\n\xff\xfe\n");
        assert_eq!(lines.next_line().expect("first"), Some("ok".to_owned()));
        assert!(lines.next_line().is_err());
    }

    proptest! {
        #[test]
        fn lines_come_out_whole_however_they_are_cut(
            lines in proptest::collection::vec("[a-z]{0,40}", 0..20),
            cuts in proptest::collection::vec(1usize..30, 1..60),
        ) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let mut buffer = LineBuffer::default();
            let (mut rest, mut out) = (text.as_bytes(), Vec::new());
            for cut in cuts.iter().cycle().take(text.len()) {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                buffer.push(now);
                rest = later;
                while let Some(line) = buffer.next_line().expect("lines") {
                    out.push(line);
                }
            }
            prop_assert_eq!(out, lines);
            prop_assert!(!buffer.is_partial());
        }
    }
}
