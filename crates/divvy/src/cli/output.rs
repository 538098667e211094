//! The value of `-o`: one of the output formats of a command, or `jsonpath=TEMPLATE`.

use std::ffi::OsStr;
use std::marker::PhantomData;

use clap::builder::{EnumValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command, ValueEnum};

use crate::jsonpath::Template;

const JSONPATH: &str = "jsonpath=";

/// The output format that the user chose.
#[derive(Debug, Clone)]
pub enum OutputFormat<F> {
    /// One of the command's own formats.
    Form(F),
    /// `jsonpath=TEMPLATE`: parts of the JSON output, as kubectl prints them.
    JsonPath(Template),
}

/// The clap value parser for [`OutputFormat`].
#[derive(Debug)]
pub struct OutputParser<F>(PhantomData<F>);

impl<F> OutputParser<F> {
    /// Return a parser that accepts the variants of `F` and `jsonpath=TEMPLATE`.
    pub fn new() -> OutputParser<F> {
        OutputParser(PhantomData)
    }
}

impl<F> Default for OutputParser<F> {
    fn default() -> OutputParser<F> {
        OutputParser::new()
    }
}

impl<F> Clone for OutputParser<F> {
    fn clone(&self) -> OutputParser<F> {
        OutputParser::new()
    }
}

impl<F: ValueEnum + Clone + Send + Sync + 'static> TypedValueParser for OutputParser<F> {
    type Value = OutputFormat<F>;

    fn parse_ref(&self, cmd: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<OutputFormat<F>, clap::Error> {
        if let Some(template) = value.to_str().and_then(|text| text.strip_prefix(JSONPATH)) {
            let wrong = |why| {
                cmd.clone()
                    .error(ErrorKind::ValueValidation, format!("-o {JSONPATH}{template}: {why}"))
            };
            return template.parse().map(OutputFormat::JsonPath).map_err(wrong);
        }
        // `PossibleValuesParser` reports an unknown format in the same words as for every other flag with a list of values.
        let known = all::<F>();
        PossibleValuesParser::new(known).parse_ref(cmd, arg, value)?;
        EnumValueParser::<F>::new().parse_ref(cmd, arg, value).map(OutputFormat::Form)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(all::<F>().into_iter()))
    }
}

fn all<F: ValueEnum>() -> Vec<PossibleValue> {
    let words = F::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    let path = PossibleValue::new(JSONPATH).help("Parts of the JSON, such as jsonpath='{.nodes[*].name}'");
    words.chain([path]).collect()
}
