//! An incremental parser for Kubernetes lists: it parses the items of a list while the JSON text arrives. No I/O.
//!
//! A list of 50,000 pods has 200 MB, and an API server that answers from its watch cache may send it as one response and ignore
//! `limit`. The parser holds at most one item, and the chunk in which the item arrived.

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

/// The maximum size in bytes of an item or of another member of the list. An API server accepts requests of 3 MiB
/// (`MaxRequestBodyBytes` in `k8s.io/apiserver/pkg/server/config.go`), so every object is much smaller.
pub(crate) const LARGEST: usize = 16 << 20;

/// After an incomplete item, the parser waits for at least this many bytes before it tries again.
const STRIDE: usize = 64 << 10;

/// The metadata of a list.
#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListMeta {
    pub(crate) resource_version: Option<String>,
    /// The token for the next page; empty or absent on the last page.
    #[serde(rename = "continue")]
    pub(crate) next: Option<String>,
}

/// Why a text is not a list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Wrong {
    /// Not JSON.
    #[error("the answer is not JSON: {text} (byte {at})")]
    Json { text: String, at: u64 },
    /// The text ended before the list was complete.
    #[error("the answer ended after {at} bytes, in the middle of the list")]
    Cut { at: u64 },
    /// The text is JSON but not a list.
    #[error("the answer is not a list: {0}")]
    NoList(String),
    /// One item is larger than [`LARGEST`].
    #[error("item {number} of the list is larger than {} MiB, but no object of an API server is that large", LARGEST >> 20)]
    TooLarge { number: u64 },
}

/// An item that is JSON but cannot be parsed into the expected type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnreadableItem {
    /// `namespace/name` or `name`; `item 17` if the object has no name.
    pub(crate) name: String,
    /// Why the item cannot be parsed.
    pub(crate) why: String,
}

impl UnreadableItem {
    pub(crate) fn new(name: String, error: &divvy_model::Error) -> UnreadableItem {
        let why = error.to_string();
        UnreadableItem { name, why }
    }
}

/// A part of a list's text.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ListPart<'a> {
    Next(&'a [u8]),
    End,
}

/// The receiver of a list's items, in their order.
pub(crate) trait Sink {
    /// Parse the item at the beginning of a text, and return its length. `last` means that no more text will arrive.
    fn item(&mut self, text: &[u8], last: bool, number: u64) -> ParsedValue<()>;
}

/// A sink that parses each item as soon as it is complete.
pub(crate) struct ParsingSink<'a, T>(pub(crate) &'a mut (dyn FnMut(Result<T, UnreadableItem>) + Send));

impl<T: DeserializeOwned> Sink for ParsingSink<'_, T> {
    fn item(&mut self, text: &[u8], last: bool, number: u64) -> ParsedValue<()> {
        match object(text, last, number) {
            ParsedValue::Value(item, length) => {
                (self.0)(item);
                ParsedValue::Value((), length)
            }
            ParsedValue::Incomplete => ParsedValue::Incomplete,
            ParsedValue::Wrong(error) => ParsedValue::Wrong(error),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListMember {
    Metadata,
    Items,
    Kind,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListParserState {
    /// Before the list's `{`.
    Start,
    /// Before a member's name or, if `first`, the end of the object.
    Name { first: bool },
    /// Before the colon.
    Colon(ListMember),
    /// Before a member's value.
    Value(ListMember),
    /// After a member's value.
    AfterValue,
    /// Before an item or, if `first`, the end of the items.
    Item { first: bool },
    /// After an item.
    AfterItem,
    /// After the list.
    End,
}

/// The parser of one list.
#[derive(Debug)]
pub(crate) struct ListParser {
    buffer: Vec<u8>,
    /// The number of bytes at the start of the buffer that have been parsed.
    at: usize,
    /// The number of bytes that have been parsed and removed from the buffer.
    before: u64,
    /// Do not parse again before the buffer has this length.
    wait_for: usize,
    state: ListParserState,
    number: u64,
    metadata: Option<ListMeta>,
    kind: Option<Option<String>>,
    has_items: bool,
}

/// The result of a step of the parser.
enum ParserStep {
    Done,
    /// The next value has not arrived completely.
    Incomplete,
}

/// A value at the beginning of a text.
pub(crate) enum ParsedValue<T> {
    Value(T, usize),
    /// More text is needed.
    Incomplete,
    Wrong(serde_json::Error),
}

impl ListParser {
    pub(crate) fn new() -> ListParser {
        ListParser {
            buffer: Vec::new(),
            at: 0,
            before: 0,
            wait_for: 0,
            state: ListParserState::Start,
            number: 0,
            metadata: None,
            kind: None,
            has_items: false,
        }
    }

    /// Add the next part of the text, and pass on the items that are complete.
    pub(crate) fn read(&mut self, chunk: &[u8], take: &mut dyn Sink) -> Result<(), Wrong> {
        self.buffer.extend_from_slice(chunk);
        if self.buffer.len() < self.wait_for {
            return Ok(());
        }
        self.advance(take, false)?;
        let left = self.buffer.len() - self.at;
        if left > LARGEST {
            return Err(Wrong::TooLarge { number: self.number + 1 });
        }
        self.before += self.at as u64;
        self.buffer.drain(..self.at);
        self.at = 0;
        // Double the length, so that parsing a large item again and again stays linear in its size. Most items are smaller than the stride.
        self.wait_for = left.saturating_mul(2).max(left + STRIDE).min(LARGEST + 1);
        Ok(())
    }

    /// Process a part of the text, or its end. The returned metadata is only filled in at the end.
    pub(crate) fn take_in(&mut self, part: ListPart<'_>, take: &mut dyn Sink) -> Result<ListMeta, Wrong> {
        match part {
            ListPart::Next(chunk) => self.read(chunk, take).map(|()| ListMeta::default()),
            ListPart::End => std::mem::replace(self, ListParser::new()).end(take),
        }
    }

    /// Process the end of the text. Return the list's metadata, or an error if the list is incomplete.
    pub(crate) fn end(mut self, take: &mut dyn Sink) -> Result<ListMeta, Wrong> {
        self.advance(take, true)?;
        if self.state != ListParserState::End {
            let at = self.before + self.buffer.len() as u64;
            return Err(match self.state {
                ListParserState::Start if at == self.before + self.at as u64 => Wrong::NoList("it is empty".to_owned()),
                _ => Wrong::Cut { at },
            });
        }
        if !self.has_items {
            let found = match &self.kind {
                Some(Some(kind)) => format!("it is an object of kind {kind:?} without items"),
                _ => "it is an object without items".to_owned(),
            };
            return Err(Wrong::NoList(found));
        }
        Ok(self.metadata.unwrap_or_default())
    }

    fn advance(&mut self, take: &mut dyn Sink, last: bool) -> Result<(), Wrong> {
        loop {
            let blank = self.buffer[self.at..]
                .iter()
                .position(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
            let Some(blank) = blank else {
                self.at = self.buffer.len();
                return Ok(());
            };
            self.at += blank;
            match self.step(take, last)? {
                ParserStep::Done => {}
                ParserStep::Incomplete => return Ok(()),
            }
        }
    }

    /// Make one step. The buffer must have a next byte that is not white space.
    fn step(&mut self, take: &mut dyn Sink, last: bool) -> Result<ParserStep, Wrong> {
        let byte = self.buffer[self.at];
        self.state = match (self.state, byte) {
            (ListParserState::Start, b'{') => self.skip(ListParserState::Name { first: true }),
            (ListParserState::Start, _) => return self.not_a_list(last),
            (ListParserState::Name { first: true }, b'}') => self.skip(ListParserState::End),
            (ListParserState::Name { .. }, b'"') => match self.value::<String>(last)? {
                None => return Ok(ParserStep::Incomplete),
                Some(name) => ListParserState::Colon(match name.as_str() {
                    "metadata" => ListMember::Metadata,
                    "items" => ListMember::Items,
                    "kind" => ListMember::Kind,
                    _ => ListMember::Other,
                }),
            },
            (ListParserState::Name { .. }, _) => return Err(self.wrong("the name of a member was expected")),
            (ListParserState::Colon(member), b':') => self.skip(ListParserState::Value(member)),
            (ListParserState::Colon(_), _) => return Err(self.wrong("a colon was expected")),
            (ListParserState::Value(ListMember::Items), _) if self.has_items => return Err(twice("items")),
            (ListParserState::Value(ListMember::Items), b'[') => {
                self.has_items = true;
                self.skip(ListParserState::Item { first: true })
            }
            (ListParserState::Value(ListMember::Items), _) => match self.value::<Option<Vec<IgnoredAny>>>(last)? {
                None => return Ok(ParserStep::Incomplete),
                // Go writes a nil slice as null.
                Some(_) => {
                    self.has_items = true;
                    ListParserState::AfterValue
                }
            },
            (ListParserState::Value(ListMember::Metadata), _) => match self.value::<Option<ListMeta>>(last)? {
                None => return Ok(ParserStep::Incomplete),
                Some(_) if self.metadata.is_some() => return Err(twice("metadata")),
                Some(metadata) => {
                    self.metadata = Some(metadata.unwrap_or_default());
                    ListParserState::AfterValue
                }
            },
            (ListParserState::Value(ListMember::Kind), _) => match self.value::<Option<String>>(last)? {
                None => return Ok(ParserStep::Incomplete),
                Some(_) if self.kind.is_some() => return Err(twice("kind")),
                Some(kind) => {
                    self.kind = Some(kind);
                    ListParserState::AfterValue
                }
            },
            (ListParserState::Value(ListMember::Other), _) => match self.value::<IgnoredAny>(last)? {
                None => return Ok(ParserStep::Incomplete),
                Some(IgnoredAny) => ListParserState::AfterValue,
            },
            (ListParserState::AfterValue, b',') => self.skip(ListParserState::Name { first: false }),
            (ListParserState::AfterValue, b'}') => self.skip(ListParserState::End),
            (ListParserState::AfterValue, _) => return Err(self.wrong("a comma or the end of the object was expected")),
            (ListParserState::Item { first: true }, b']') => self.skip(ListParserState::AfterValue),
            (ListParserState::Item { .. }, _) => match self.item(take, last)? {
                ParserStep::Incomplete => return Ok(ParserStep::Incomplete),
                ParserStep::Done => ListParserState::AfterItem,
            },
            (ListParserState::AfterItem, b',') => self.skip(ListParserState::Item { first: false }),
            (ListParserState::AfterItem, b']') => self.skip(ListParserState::AfterValue),
            (ListParserState::AfterItem, _) => return Err(self.wrong("a comma or the end of the items was expected")),
            (ListParserState::End, _) => return Err(self.wrong("there is more text after the list")),
        };
        Ok(ParserStep::Done)
    }

    fn skip(&mut self, next: ListParserState) -> ListParserState {
        self.at += 1;
        next
    }

    fn not_a_list(&mut self, last: bool) -> Result<ParserStep, Wrong> {
        match self.value::<IgnoredAny>(last)? {
            None => Ok(ParserStep::Incomplete),
            Some(IgnoredAny) => Err(Wrong::NoList("an object was expected".to_owned())),
        }
    }

    fn item(&mut self, take: &mut dyn Sink, last: bool) -> Result<ParserStep, Wrong> {
        let number = self.number + 1;
        let length = match take.item(&self.buffer[self.at..], last, number) {
            ParsedValue::Incomplete => return Ok(ParserStep::Incomplete),
            ParsedValue::Value((), length) => length,
            ParsedValue::Wrong(error) => return Err(self.json(&error)),
        };
        if length > LARGEST {
            return Err(Wrong::TooLarge { number });
        }
        self.number = number;
        self.at += length;
        Ok(ParserStep::Done)
    }

    /// Parse the value at the present position; `None` if it is incomplete.
    fn value<T: DeserializeOwned>(&mut self, last: bool) -> Result<Option<T>, Wrong> {
        match first::<T>(&self.buffer[self.at..], last) {
            ParsedValue::Value(value, length) => {
                self.at += length;
                Ok(Some(value))
            }
            ParsedValue::Incomplete => Ok(None),
            ParsedValue::Wrong(error) => Err(self.json(&error)),
        }
    }

    fn wrong(&self, text: &str) -> Wrong {
        Wrong::Json {
            text: text.to_owned(),
            at: self.before + self.at as u64,
        }
    }

    fn json(&self, error: &serde_json::Error) -> Wrong {
        self.wrong(&short(&without_place(error)))
    }
}

fn twice(member: &str) -> Wrong {
    Wrong::NoList(format!("it has two members {member:?}"))
}

/// Parse the object at the beginning of a text. `last` means that no more text will arrive.
fn object<T: DeserializeOwned>(text: &[u8], last: bool, number: u64) -> ParsedValue<Result<T, UnreadableItem>> {
    match first::<T>(text, last) {
        ParsedValue::Incomplete => ParsedValue::Incomplete,
        ParsedValue::Value(item, length) => ParsedValue::Value(Ok(item), length),
        // The text may be JSON of another type, invalid JSON, or an incomplete object of another type.
        ParsedValue::Wrong(error) => match first::<IgnoredAny>(text, last) {
            ParsedValue::Incomplete => ParsedValue::Incomplete,
            ParsedValue::Value(IgnoredAny, length) => {
                let why = without_place(&error);
                ParsedValue::Value(Err(unreadable(&text[..length], number, &why)), length)
            }
            ParsedValue::Wrong(error) => ParsedValue::Wrong(error),
        },
    }
}

fn unreadable(text: &[u8], number: u64, why: &str) -> UnreadableItem {
    UnreadableItem {
        name: name(text).unwrap_or_else(|| format!("item {number}")),
        why: short(why),
    }
}

/// Parse the value at the beginning of a text. `last` means that no more text will arrive.
fn first<T: DeserializeOwned>(text: &[u8], last: bool) -> ParsedValue<T> {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<T>();
    match values.next() {
        None => ParsedValue::Incomplete,
        Some(Ok(value)) => match values.byte_offset() {
            // A number may continue in the next chunk.
            length if length == text.len() && !last => ParsedValue::Incomplete,
            length => ParsedValue::Value(value, length),
        },
        Some(Err(error)) if error.is_eof() => ParsedValue::Incomplete,
        // For `-`, `1.`, and `1e` at the end of a text, serde_json reports an invalid number and not an unexpected end.
        Some(Err(_))
            if !last
                && text
                    .last()
                    .is_some_and(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')) =>
        {
            ParsedValue::Incomplete
        }
        Some(Err(error)) => ParsedValue::Wrong(error),
    }
}

/// The names in an object's metadata, parsed leniently: each one is used only if it has the right type.
#[derive(Debug, Default, Deserialize)]
struct NamedItem {
    #[serde(default)]
    metadata: ItemNames,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ItemNames {
    namespace: serde_json::Value,
    name: serde_json::Value,
}

/// Return `namespace/name` or `name` of an object; `None` if it has no name.
pub(crate) fn name(object: &[u8]) -> Option<String> {
    let NamedItem { metadata } = serde_json::from_slice(object).ok()?;
    let name = metadata.name.as_str().filter(|name| !name.is_empty())?;
    Some(short(
        &match metadata.namespace.as_str().filter(|namespace| !namespace.is_empty()) {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name.to_owned(),
        },
    ))
}

/// Format an error without its line and column, which would count from the beginning of the item and not of the list.
pub(crate) fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) if error.line() > 0 => text[..end].to_owned(),
        _ => text,
    }
}

/// Make external text safe for a message: at most 400 characters, on one line.
pub fn short(text: &str) -> String {
    const MOST: usize = 400;
    let plain = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let mut short: String = text.chars().take(MOST).map(plain).collect();
    if text.chars().nth(MOST).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests;
