//! The text format, made from OpenMetrics.
//!
//! The samples are the same lines in both formats. The families' descriptions differ:
//!
//! - In OpenMetrics, the samples of a counter have the suffix `_total` and those of an info have `_info`, but the family does not. In the text
//!   format, the family has the name of its samples.
//! - The text format has neither the types `info` and `unknown`, nor the lines `# UNIT` and `# EOF`.
//! - In a help text, OpenMetrics also escapes quotation marks.

use std::fmt;

/// Takes the output of `prometheus-client`, which describes each family by `# HELP`, then `# TYPE`, and keeps the same in the text format.
#[derive(Debug, Default)]
pub(crate) struct ToText {
    text: String,
    /// The beginning of a line whose end has not come yet.
    line: String,
    help: String,
}

impl ToText {
    /// Return the text. What has no line end is not complete, and is left out.
    pub(crate) fn finish(self) -> String {
        self.text
    }

    fn take_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if let Some((_, found)) = described(&line, "# HELP ") {
            found.clone_into(&mut self.help);
        } else if let Some((name, kind)) = described(&line, "# TYPE ") {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                _ => ("", kind),
            };
            for part in ["# HELP ", name, suffix, " ", &plain_quotes(&self.help), "\n"] {
                self.text.push_str(part);
            }
            for part in ["# TYPE ", name, suffix, " ", kind, "\n"] {
                self.text.push_str(part);
            }
        } else if !line.starts_with('#') {
            self.text.push_str(&line);
            self.text.push('\n');
        }
        // The same memory for the next line.
        self.line = line;
        self.line.clear();
    }
}

impl fmt::Write for ToText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let mut lines = part.split('\n');
        // `split` returns at least one part.
        self.line.push_str(lines.next().unwrap_or_default());
        for line in lines {
            self.take_line();
            self.line.push_str(line);
        }
        Ok(())
    }
}

fn described<'a>(line: &'a str, keyword: &str) -> Option<(&'a str, &'a str)> {
    line.strip_prefix(keyword)?.split_once(' ')
}

/// Write `\"` as `"`, and leave the other escaped characters as they are.
fn plain_quotes(help: &str) -> String {
    let mut plain = String::with_capacity(help.len());
    let mut characters = help.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, characters.peek()) {
            ('\\', Some('"')) => {}
            ('\\', Some('\\')) => {
                characters.next();
                plain.push_str(r"\\");
            }
            _ => plain.push(character),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn to_text(open_metrics: &str) -> String {
        let mut converter = ToText::default();
        // However the parts are cut.
        for character in open_metrics.chars() {
            converter.write_char(character).expect("written");
        }
        let mut whole = ToText::default();
        whole.write_str(open_metrics).expect("written");
        let text = converter.finish();
        assert_eq!(text, whole.finish());
        text
    }

    #[test]
    fn descriptions_are_those_of_the_text_format_and_samples_are_unchanged() {
        let open_metrics = "\
# HELP a Counted \\\"things\\\", \\\\\\n and \\\\\\\" quotes.\n# TYPE a counter\na_total{x=\"\\\"\\\\\\n# TYPE b \u{e4}\r\"} 1\n\
# HELP b_bytes Size.\n# TYPE b_bytes gauge\n# UNIT b_bytes bytes\nb_bytes -1\n\
# HELP c Build.\n# TYPE c info\nc_info{v=\"1\"} 1\n\
# HELP d What.\n# TYPE d unknown\nd 1.5\n\
# HELP e Times.\n# TYPE e histogram\ne_sum 0.5\ne_count 1\ne_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let text = "\
# HELP a_total Counted \"things\", \\\\\\n and \\\\\" quotes.\n# TYPE a_total counter\na_total{x=\"\\\"\\\\\\n# TYPE b \u{e4}\r\"} 1\n\
# HELP b_bytes Size.\n# TYPE b_bytes gauge\nb_bytes -1\n\
# HELP c_info Build.\n# TYPE c_info gauge\nc_info{v=\"1\"} 1\n\
# HELP d What.\n# TYPE d untyped\nd 1.5\n\
# HELP e Times.\n# TYPE e histogram\ne_sum 0.5\ne_count 1\ne_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(to_text(open_metrics), text);
        assert_eq!(to_text("# EOF\n"), "");
    }
}
