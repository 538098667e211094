//! The text of an answer.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fmt;

use crate::{Float, Histogram, Metric, MetricKind, MetricsFormat};

/// Metrics in one of the formats. The labels' names must be valid; their values may be any text.
#[derive(Debug)]
pub struct MetricsPage<'a> {
    format: MetricsFormat,
    only: Option<&'a BTreeSet<String>>,
    text: String,
}

impl<'a> MetricsPage<'a> {
    /// Return a page without metrics.
    pub fn new(format: MetricsFormat) -> MetricsPage<'a> {
        MetricsPage {
            format,
            only: None,
            text: String::new(),
        }
    }

    /// Return a page that takes only the metrics with these names. If no name is given, it takes all metrics.
    pub fn only(format: MetricsFormat, names: &'a BTreeSet<String>) -> MetricsPage<'a> {
        MetricsPage {
            only: Some(names).filter(|names| !names.is_empty()),
            ..MetricsPage::new(format)
        }
    }

    /// Write all samples of a metric, each with its labels. A metric without samples is left out.
    pub fn write<L, T, V>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = (L, V)>)
    where
        L: AsRef<[(&'static str, T)]>,
        T: AsRef<str>,
        V: fmt::Display,
    {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_some() && self.describe(metric) {
            for (labels, value) in samples {
                self.sample([metric.name, ""], None, labels.as_ref(), value);
            }
        }
    }

    /// Write a metric that has one label.
    pub fn write_by<T, V>(&mut self, metric: &Metric, label: &'static str, samples: impl IntoIterator<Item = (T, V)>)
    where
        T: AsRef<str>,
        V: fmt::Display,
    {
        self.write(metric, samples.into_iter().map(|(of, value)| ([(label, of)], value)));
    }

    /// Write a metric that has no label.
    pub fn write_one(&mut self, metric: &Metric, value: impl fmt::Display) {
        self.write(metric, [([("", ""); 0], value)]);
    }

    /// Write all samples of a histogram.
    pub fn write_histograms<L, T, H>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = (L, H)>)
    where
        L: AsRef<[(&'static str, T)]>,
        T: AsRef<str>,
        H: Borrow<Histogram>,
    {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() || !self.describe(metric) {
            return;
        }
        for (labels, histogram) in samples {
            let (labels, histogram): (_, &Histogram) = (labels.as_ref(), histogram.borrow());
            let Histogram { buckets, sum } = histogram;
            let count: u64 = buckets.iter().map(|(_, count)| count).sum();
            self.sample([metric.name, "_sum"], None, labels, Float(*sum));
            self.sample([metric.name, "_count"], None, labels, count);
            let mut below: u64 = 0;
            for (end, count) in buckets {
                below += count;
                let end = if end.is_infinite() {
                    "+Inf".to_owned()
                } else {
                    Float(*end).to_string()
                };
                self.sample([metric.name, "_bucket"], Some(&end), labels, below);
            }
        }
    }

    /// Return the text.
    pub fn finish(mut self) -> String {
        if self.format == MetricsFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }

    /// Describe a metric, whose samples follow at once; the formats allow no others in between. Return false if the page does not take it.
    fn describe(&mut self, metric: &Metric) -> bool {
        let Metric { name, kind, help } = *metric;
        if self.only.is_some_and(|names| !names.contains(name)) {
            return false;
        }
        // In OpenMetrics, the samples of a counter have the suffix, but the family does not.
        let name = match (self.format, kind) {
            (MetricsFormat::OpenMetrics, MetricKind::Counter) => name.strip_suffix("_total").unwrap_or(name),
            _ => name,
        };
        self.text.extend(["# HELP ", name, " "]);
        escape(&mut self.text, help, false);
        self.text.extend(["\n# TYPE ", name, " ", kind.word(), "\n"]);
        true
    }

    /// Write a sample. `end` is the upper end of a histogram's bucket.
    fn sample<T: AsRef<str>>(
        &mut self,
        name: [&str; 2],
        end: Option<&str>,
        labels: &[(&'static str, T)],
        value: impl fmt::Display,
    ) {
        self.text.extend(name);
        let labels = labels.iter().map(|(name, value)| (*name, value.as_ref()));
        let mut separator = '{';
        for (name, value) in end.map(|end| ("le", end)).into_iter().chain(labels) {
            self.text.push(separator);
            self.text.extend([name, "=\""]);
            escape(&mut self.text, value, true);
            self.text.push('"');
            separator = ',';
        }
        if separator == ',' {
            self.text.push('}');
        }
        self.text.extend([" ", &value.to_string(), "\n"]);
    }
}

fn escape(text: &mut String, value: &str, quotes: bool) {
    for character in value.chars() {
        match character {
            '\\' => text.push_str(r"\\"),
            '\n' => text.push_str(r"\n"),
            '"' if quotes => text.push_str("\\\""),
            _ => text.push(character),
        }
    }
}
