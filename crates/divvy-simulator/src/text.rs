use std::borrow::Cow;
use std::io::Read as _;

use crate::Error;

/// The maximum size of a decompressed file in bytes, more than any trace has. The content of a gzip file can be a thousand times
/// as large as the file.
const MOST: u64 = 1 << 30;

/// Return the text of a file, which may be compressed with gzip. `what` names the file in an error.
///
/// # Errors
///
/// Fails if the data is cut off, or if it contains more than 1 GiB of text.
pub fn decompress<'a>(what: &str, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>, Error> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(Cow::Borrowed(bytes));
    }
    let wrong = |why: String| Error::Gzip {
        what: what.to_owned(),
        why,
    };
    let mut text = Vec::new();
    let read = flate2::read::MultiGzDecoder::new(bytes).take(MOST).read_to_end(&mut text);
    match read {
        Ok(read) if read as u64 == MOST => Err(wrong("it holds more than 1 GiB of text".to_owned())),
        Ok(_) => Ok(Cow::Owned(text)),
        Err(error) => Err(wrong(error.to_string())),
    }
}
