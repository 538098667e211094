//! A small parser for the samples and descriptions of both formats. It panics at what neither format allows.

/// Names and values of labels, in the order of the text.
pub(crate) type Labels = Vec<(String, String)>;

/// A sample: its name, labels, and value.
pub(crate) type Sample = (String, Labels, String);

/// A family as it is described: its name, type, and help text.
pub(crate) type Description = (String, String, String);

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Scrape {
    pub(crate) families: Vec<(Description, Vec<Sample>)>,
}

impl Scrape {
    pub(crate) fn samples(&self) -> Vec<&Sample> {
        self.families.iter().flat_map(|(_, samples)| samples).collect()
    }
}

/// Read a text in the text format.
pub(crate) fn text(text: &str) -> Scrape {
    let scrape = read(text);
    for ((name, kind, _), samples) in &scrape.families {
        for (sample, labels, _) in samples {
            let suffix = sample.strip_prefix(name.as_str()).expect("a sample of the family before it");
            let allowed: &[&str] = match kind.as_str() {
                "histogram" => &["_sum", "_count", "_bucket"],
                "counter" | "gauge" | "untyped" => &[""],
                other => panic!("the text format has no type {other}"),
            };
            assert!(allowed.contains(&suffix), "{sample} in {name}, {kind}");
            assert_eq!(suffix == "_bucket", labels.iter().any(|(label, _)| label == "le"));
        }
    }
    scrape
}

/// Read a text in the OpenMetrics format.
pub(crate) fn open_metrics(text: &str) -> Scrape {
    let scrape = read(text.strip_suffix("# EOF\n").expect("the end is marked"));
    for ((name, kind, _), samples) in &scrape.families {
        for (sample, ..) in samples {
            let suffix = sample.strip_prefix(name.as_str()).expect("a sample of the family before it");
            let allowed: &[&str] = match kind.as_str() {
                "histogram" => &["_sum", "_count", "_bucket"],
                "counter" => &["_total"],
                "info" => &["_info"],
                "gauge" | "unknown" => &[""],
                other => panic!("OpenMetrics has no type {other}"),
            };
            assert!(allowed.contains(&suffix), "{sample} in {name}, {kind}");
        }
    }
    scrape
}

fn read(text: &str) -> Scrape {
    let mut scrape = Scrape::default();
    assert!(text.is_empty() || text.ends_with('\n'), "the last line ends");
    for line in text.split_terminator('\n') {
        match line.strip_prefix("# ") {
            Some(rest) => {
                let (keyword, rest) = rest.split_once(' ').expect("a keyword");
                let (name, rest) = rest.split_once(' ').expect("a name");
                let last = scrape.families.last_mut();
                match keyword {
                    "HELP" => {
                        let description = (name.to_owned(), String::new(), rest.to_owned());
                        scrape.families.push((description, Vec::new()));
                    }
                    "TYPE" => {
                        let ((described, kind, _), _) = last.expect("HELP is before TYPE");
                        assert_eq!((described.as_str(), kind.as_str()), (name, ""));
                        rest.clone_into(kind);
                    }
                    "UNIT" => assert_eq!(last.expect("HELP is before UNIT").0.0, name),
                    other => panic!("a line begins with # {other}"),
                }
            }
            None => scrape
                .families
                .last_mut()
                .expect("a description is before a sample")
                .1
                .push(sample(line)),
        }
    }
    scrape
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).expect("a name ends");
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"").expect("a label with a value");
            let mut value = String::new();
            let mut characters = after.char_indices();
            let end = loop {
                match characters.next().expect("the value ends") {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match characters.next() {
                        Some((_, 'n')) => '\n',
                        Some((_, other @ ('\\' | '"'))) => other,
                        other => panic!("{other:?} is not escaped in any format: {line}"),
                    }),
                    (_, other) => value.push(other),
                }
            };
            labels.push((label.to_owned(), value));
            rest = &after[end + 1..];
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').expect("a value");
    value.parse::<f64>().expect("a number, and nothing behind it");
    (name.to_owned(), labels, value.to_owned())
}
