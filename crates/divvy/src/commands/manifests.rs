//! `divvy manifests`.

use std::io::Write as _;

use anyhow::Context as _;

use crate::cli::ManifestsArgs;
use crate::manifests::{Chart, Release, chart, render, values};
use crate::printer;

/// Prints the chart's objects; what is left to do goes to standard error.
pub fn run(args: &ManifestsArgs) -> anyhow::Result<()> {
    if args.show_values {
        return Ok(printer::print(chart::VALUES)?);
    }
    let release = Release {
        name: name("--name", &args.name)?,
        namespace: name("--namespace", &args.namespace)?,
    };
    // As with Helm: --set wins over files, the later over the earlier.
    let files = args.values.iter().map(|path| values::read(path));
    let chosen = files
        .chain(args.set.iter().map(|argument| values::set(argument)))
        .collect::<Result<Vec<_>, _>>()?;
    let rendered = render(&Chart::embedded()?, &release, &chosen)?;
    printer::print(&rendered.objects)?;
    std::io::stderr()
        .write_all(rendered.notes.as_bytes())
        .context("the notes could not be written to standard error")
}

/// A DNS label that leaves room for `-extender-unhealthy-gpus`, as names of objects begin with it.
fn name(flag: &str, text: &str) -> anyhow::Result<String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_name =
        !text.is_empty() && text.len() <= 40 && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-');
    anyhow::ensure!(
        is_name,
        "{flag} {text:?} cannot be part of the names of objects; write at most 40 lower-case letters, digits and dashes, such as divvy"
    );
    Ok(text.to_owned())
}
