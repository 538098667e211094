//! Texts that fit into their columns.

/// Return the text with `?` for each character that is not printable ASCII. A terminal shows other characters in no column, one, or two, and
/// control characters can change what it shows. Names come from programs in containers.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' })
        .collect()
}

/// Return the text with exactly this width: cut, or filled up with spaces.
pub(crate) fn fit(text: &str, width: usize) -> String {
    format!("{:<width$.width$}", printable(text))
}

/// Keep the beginning of a text that is longer than `width`, and mark the cut with dots, as nvidia-smi does for product names.
pub(crate) fn keep_start(text: &str, width: usize) -> String {
    let text = printable(text);
    if text.len() > width {
        format!("{}...", &text[..width - 3])
    } else {
        text
    }
}

/// Keep the end of a text that is longer than `width`, as nvidia-smi does for the names of processes.
pub(crate) fn keep_end(text: &str, width: usize) -> String {
    let text = printable(text);
    if text.len() > width {
        format!("...{}", &text[text.len() - (width - 3)..])
    } else {
        text
    }
}

/// Add a line with a bar at its ends and between its cells.
pub(crate) fn row(out: &mut String, cells: &[(usize, String)]) {
    for (width, text) in cells {
        out.push('|');
        out.push_str(&fit(text, *width));
    }
    out.push_str("|\n");
}

/// Add a line such as `+---+---+`. `corners` are its first character, those between cells, and its last.
pub(crate) fn rule(out: &mut String, widths: &[usize], corners: [char; 3], dash: char) {
    let [first, between, last] = corners;
    for (at, width) in widths.iter().enumerate() {
        out.push(if at == 0 { first } else { between });
        out.extend(std::iter::repeat_n(dash, *width));
    }
    out.push(last);
    out.push('\n');
}

/// Add the line below the heads of columns: `|===+===|`.
pub(crate) fn double_rule(out: &mut String, widths: &[usize]) {
    rule(out, widths, ['|', '+', '|'], '=');
}

/// Add the line above or below rows: `+---+---+`.
pub(crate) fn line(out: &mut String, widths: &[usize]) {
    rule(out, widths, ['+'; 3], '-');
}
