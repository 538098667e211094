//! The only writer to standard output. Standard output gets data; everything else goes to standard error.

use std::io::{self, IsTerminal as _, Write};
use std::sync::OnceLock;

use divvy_host::plain;

static COLOUR: OnceLock<ColorMode> = OnceLock::new();

/// When to color the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorMode {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Set whether to print colors, from `--color`. Only the first call has an effect.
pub fn choose_colour(choice: ColorMode) {
    let _ = COLOUR.set(choice);
}

/// Report whether text for people is colored.
pub fn coloured() -> bool {
    match COLOUR.get().copied().unwrap_or(ColorMode::Auto) {
        ColorMode::Always => true,
        ColorMode::Never => false,
        ColorMode::Auto => io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    }
}

/// Return the text in a color, which is given by its ECMA-48 SGR parameters (`31`, `1;33`).
pub fn paint(colour: &str, text: &str) -> String {
    format!("\x1b[{colour}m{text}\x1b[0m")
}

/// Print text unchanged. The text must not contain control characters from outside this program: it is a file or script that we
/// wrote, or was already passed through [`plain`].
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Print text for people. Control characters are replaced, because names and messages in the text come from the cluster or from
/// files.
pub fn text(text: &str) -> io::Result<()> {
    print(&plain(text))
}

/// Print a line, as [`text`] does.
pub fn line(line: &str) -> io::Result<()> {
    text(&format!("{line}\n"))
}

/// Print a value as JSON, with kubectl's indentation.
pub fn json<T: serde::Serialize>(value: &T) -> anyhow::Result<()> {
    Ok(print(&json_text(value)?)?)
}

/// Print a value as YAML.
pub fn yaml<T: serde::Serialize>(value: &T) -> anyhow::Result<()> {
    Ok(print(&yaml_text(value)?)?)
}

/// Return the text that [`json`] prints.
pub fn json_text<T: serde::Serialize>(value: &T) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))?;
    bytes.push(b'\n');
    Ok(String::from_utf8(bytes)?)
}

/// Return the text that [`yaml`] prints.
pub fn yaml_text<T: serde::Serialize>(value: &T) -> anyhow::Result<String> {
    Ok(serde_saphyr::to_string(value)?)
}

/// Align tab-separated cells in columns, as kubectl and gpushare's tool do with Go's text/tabwriter (minwidth 0, padding 2).
pub fn columns(cells: &str) -> String {
    let mut writer = tabwriter::TabWriter::new(Vec::new()).minwidth(0).padding(2);
    writer
        .write_all(cells.as_bytes())
        .and_then(|()| writer.flush())
        .expect("a Vec takes every write");
    String::from_utf8(writer.into_inner().expect("flushed")).expect("text in, text out")
}

/// Return the width of the terminal in columns. `None` if standard output is a file or a pipe, whose lines are not wrapped.
pub fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}
