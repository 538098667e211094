//! Values as text. maud escapes what HTML would interpret; here, control characters and characters that change the writing direction become visible.

use std::borrow::Cow;

use divvy_host::{plain, plain_line};
use divvy_view::amounts;
use jiff::Timestamp;

/// Make a text from outside printable, on one line.
pub(crate) fn shown(text: &str) -> String {
    // Most texts need no change, and a page has thousands of them.
    match plain(text) {
        Cow::Borrowed(text) if !text.contains('\n') => text.to_owned(),
        _ => plain_line(text.chars()),
    }
}

/// Format an amount of memory: `32 GiB`, `4.2 GiB`.
pub(crate) fn memory(bytes: u64) -> String {
    amounts::memory(bytes).replace(".0 ", " ")
}

/// Format an amount that may not have been measured.
pub(crate) fn measured(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "–".to_owned(), memory)
}

/// Format a part of an amount, with the unit once if it is the same: `24 / 40 GiB`.
pub(crate) fn part(part: u64, all: u64) -> String {
    let (part, all) = (memory(part), memory(all));
    if part == "0 MiB" {
        return format!("0 / {all}");
    }
    let short = part.split_once(' ').filter(|(_, unit)| all.ends_with(unit));
    format!("{} / {all}", short.map_or(part.as_str(), |(number, _)| number))
}

/// Format a percentage that may not have been measured.
pub(crate) fn percent(percent: Option<u32>) -> String {
    percent.map_or_else(|| "–".to_owned(), |percent| format!("{percent} %"))
}

/// Format a time span in at most two units: `2 h 5 min`.
pub(crate) fn span(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => "less than a minute".to_owned(),
        60..3600 => format!("{minutes} min"),
        3600..86_400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// Format a time: `2026-11-28 06:02:10 UTC`.
pub(crate) fn time(at: u64) -> String {
    let time = i64::try_from(at).ok().and_then(|at| Timestamp::from_second(at).ok());
    time.map_or_else(
        || "an unknown time".to_owned(),
        |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
    )
}

/// Format the time of day: `06:02`.
pub(crate) fn clock(at: u64) -> String {
    format!("{:02}:{:02}", at / 3600 % 24, at / 60 % 60)
}

/// Count things: `1 GPU`, `8 GPUs`.
pub(crate) fn counted(count: usize, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}
