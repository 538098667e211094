//! The pods that wait for GPUs.

use divvy_host::plain_line;
use divvy_view::WaitingPod;
use textwrap::{Options, WordSplitter, WrapAlgorithm};

use crate::row::{Of, TopRow, time};
use crate::seen::SeenCluster;

/// Return a row for each waiting pod.
pub(crate) fn rows(seen: &SeenCluster) -> impl Iterator<Item = TopRow> {
    seen.waiting.iter().flatten().map(|pod| TopRow {
        node: String::new(),
        of: Of::Waiting(pod.full_name()),
        indent: 0,
        name: pod.full_name(),
        amounts: None,
        text: pod.why.clone(),
        age: pod.seconds,
        alarm: false,
    })
}

/// Return why a pod waits and all suggestions, as rows with a line each.
pub(crate) fn explanation(seen: &SeenCluster, key: &str) -> Vec<TopRow> {
    let lines = seen.waiting_pod(key).map(|pod| explained(pod, seen.columns, usize::MAX));
    let row = |(number, text): (usize, String)| TopRow {
        node: String::new(),
        of: Of::Line(number),
        indent: 0,
        name: text,
        amounts: None,
        text: String::new(),
        age: None,
        alarm: false,
    };
    lines.unwrap_or_default().into_iter().enumerate().map(row).collect()
}

/// Return the sentence why a pod waits, wrapped, and below it at most `most` suggestions.
pub(crate) fn explained(pod: &WaitingPod, columns: u16, most: usize) -> Vec<String> {
    let mut lines = wrapped("", "", &pod.why, columns);
    for help in pod.help.iter().take(most) {
        lines.extend(wrapped("- ", "  ", help, columns));
    }
    lines
}

/// Return the lines of a waiting pod in a table that takes no keys: its name, for how long it waits, the sentence, and the best suggestion.
pub(crate) fn listed(pod: &WaitingPod, columns: u16) -> Vec<String> {
    let first = match pod.seconds {
        Some(seconds) => format!("{}  {}", pod.full_name(), time(seconds)),
        None => pod.full_name(),
    };
    let rest = explained(pod, columns.saturating_sub(2), 1);
    [first]
        .into_iter()
        .chain(rest.into_iter().map(|line| format!("  {line}")))
        .collect()
}

/// Wrap a text. A word that is longer than a line, such as a path, is broken.
pub(crate) fn wrapped(first: &str, rest: &str, text: &str, columns: u16) -> Vec<String> {
    let text = plain_line(
        text.chars()
            .map(|character| if character.is_whitespace() { ' ' } else { character }),
    );
    let options = Options::new(usize::from(columns).max(8))
        .initial_indent(first)
        .subsequent_indent(rest)
        .wrap_algorithm(WrapAlgorithm::FirstFit)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(&text, options).into_iter().map(String::from).collect()
}
