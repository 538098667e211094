//! The text format, made from OpenMetrics.
//!
//! The samples are the same lines in both formats. The families' descriptions differ:
//!
//! - In OpenMetrics, the samples of a counter have the suffix `_total` and those of an info have `_info`, but the family does not. In the text
//!   format, the family has the name of its samples.
//! - The text format has neither the types `info` and `unknown`, nor the lines `# UNIT` and `# EOF`.
//! - In a help text, OpenMetrics also escapes quotation marks.

/// Convert the output of `prometheus-client`, which describes each family by `# HELP`, then `# TYPE`.
pub(crate) fn to_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = "";
    for line in open_metrics.lines() {
        if let Some((_, found)) = described(line, "# HELP ") {
            help = found;
        } else if let Some((name, kind)) = described(line, "# TYPE ") {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                _ => ("", kind),
            };
            for part in ["# HELP ", name, suffix, " ", &plain_quotes(help), "\n"] {
                text.push_str(part);
            }
            for part in ["# TYPE ", name, suffix, " ", kind, "\n"] {
                text.push_str(part);
            }
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
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
    use super::*;

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
