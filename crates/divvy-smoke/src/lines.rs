//! Reads what a process prints, so that this can be waited for until a time.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::ChildStdout;
use std::sync::mpsc::{self, Receiver};

use crate::run::Message;

/// The longest line that is read, in bytes.
const LONGEST: u64 = 1 << 20;

/// Read the lines in a thread. `message` makes a message of a line, or none.
///
/// All processes have the same type of message, because the code for each type would take ten kilobytes of the program.
pub(crate) fn read(output: ChildStdout, message: fn(&[u8]) -> Option<Message>) -> Receiver<Message> {
    let (sender, messages) = mpsc::channel();
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while matches!((&mut output).take(LONGEST).read_until(b'\n', &mut line), Ok(1..)) {
            if let Some(message) = message(&line)
                && sender.send(message).is_err()
            {
                return;
            }
            line.clear();
        }
    });
    messages
}
