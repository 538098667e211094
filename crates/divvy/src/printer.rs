//! The only writer to standard output. Data goes there; everything else goes to standard error.

use std::io::{self, IsTerminal as _, Write};
use std::sync::OnceLock;

use divvy_host::plain;

use crate::cli::Color;

static COLOUR: OnceLock<Color> = OnceLock::new();

/// As `--color` says. Only the first choice counts.
pub fn choose_colour(choice: Color) {
    let _ = COLOUR.set(choice);
}

/// Whether what is printed for people has colours.
pub fn coloured() -> bool {
    match COLOUR.get().copied().unwrap_or(Color::Auto) {
        Color::Always => true,
        Color::Never => false,
        Color::Auto => io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    }
}

/// A part of a text in a colour, by its number in ECMA-48 (`31`, `1;33`).
pub fn paint(colour: &str, text: &str) -> String {
    format!("\x1b[{colour}m{text}\x1b[0m")
}

/// Writes text as it is: files and scripts, what is coloured, and what moves no cursor already.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes text for people. What objects and files put into it moves no cursor.
pub fn text(text: &str) -> io::Result<()> {
    print(&plain(text))
}

/// Writes a line, as [`text`].
pub fn line(line: &str) -> io::Result<()> {
    text(&format!("{line}\n"))
}

/// A value as JSON, indented as kubectl does.
pub fn json<T: serde::Serialize>(value: &T) -> anyhow::Result<()> {
    Ok(print(&json_text(value)?)?)
}

/// A value as YAML.
pub fn yaml<T: serde::Serialize>(value: &T) -> anyhow::Result<()> {
    Ok(print(&yaml_text(value)?)?)
}

/// The text of [`json`].
pub fn json_text<T: serde::Serialize>(value: &T) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))?;
    bytes.push(b'\n');
    Ok(String::from_utf8(bytes)?)
}

/// The text of [`yaml`].
pub fn yaml_text<T: serde::Serialize>(value: &T) -> anyhow::Result<String> {
    Ok(serde_saphyr::to_string(value)?)
}

/// Tab-separated cells as columns: Go's text/tabwriter with minwidth 0 and padding 2, as kubectl and gpushare's tool use it.
pub fn columns(cells: &str) -> String {
    let mut writer = tabwriter::TabWriter::new(Vec::new()).minwidth(0).padding(2);
    writer
        .write_all(cells.as_bytes())
        .and_then(|()| writer.flush())
        .expect("a Vec takes every write");
    String::from_utf8(writer.into_inner().expect("flushed")).expect("text in, text out")
}

/// How wide the terminal is; none where standard output is a file or a program, which get whole lines.
pub fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}
