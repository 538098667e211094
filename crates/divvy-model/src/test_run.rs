//! The id of a run of `divvy smoke` that tests a GPU which is out of service.

use std::fmt;

use crate::limits::TEST_RUN_BYTES;

/// The id of the run that tests a GPU. The node's annotation ([`crate::names::UNDER_TEST`]) names it, and so does the pod's
/// ([`crate::names::GPU_TEST`]). There is no value for an empty or malformed text, which therefore equals nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TestRun(Box<str>);

impl TestRun {
    /// Parse an id: lowercase letters and digits, at most [`TEST_RUN_BYTES`] of them. `None` for any other text.
    pub fn parse(text: &str) -> Option<TestRun> {
        let is_legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let fits = (1..=TEST_RUN_BYTES).contains(&text.len()) && text.bytes().all(is_legal);
        fits.then(|| TestRun(text.into()))
    }

    /// Make an id of a number.
    pub fn of(number: u32) -> TestRun {
        TestRun(format!("{number:08x}").into())
    }

    /// Return the id as a text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TestRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_short_lowercase_ids_are_ids() {
        for text in ["1a2b3c4d", "0", &"z".repeat(TEST_RUN_BYTES)] {
            assert_eq!(TestRun::parse(text).expect(text).as_str(), text);
        }
        for number in [0, 0xabcd, u32::MAX] {
            let run = TestRun::of(number);
            assert_eq!(TestRun::parse(run.as_str()), Some(run));
        }
        let long = "z".repeat(TEST_RUN_BYTES + 1);
        for text in ["", " ", "1a2b ", "A", "1-2", "1.2", "ä", "1\n", "true\u{0}", &long] {
            assert_eq!(TestRun::parse(text), None, "{text:?}");
        }
    }
}
