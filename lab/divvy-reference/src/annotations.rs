//! The annotations of pods and nodes, and the environment variables of containers.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};
use syn::{Attribute, Expr, ExprLit, Item, Lit, Meta};

use crate::cell;

const NAMES: &str = include_str!("../../../crates/divvy-model/src/names.rs");

/// The words with which a doc comment in [`NAMES`] begins, and the heading in the reference for such names. `None` if the
/// reference omits them.
const KINDS: [(&str, Option<&str>); 9] = [
    (
        "Pod annotation that users write",
        Some("Annotations of pods that users write"),
    ),
    (
        "Pod annotation that Divvy writes",
        Some("Annotations of pods that Divvy writes"),
    ),
    ("Node annotation", Some("Annotations of nodes, which the agent writes")),
    (
        "gpushare's annotation",
        Some("Annotations of pods that Divvy writes for gpushare's programs"),
    ),
    (
        "gpushare's annotation and environment variable",
        Some("Annotations of gpushare that are also environment variables of containers"),
    ),
    ("Environment variable", Some("Other environment variables of containers")),
    ("Extended resource", None),
    ("Prefix", None),
    ("CDI kind", None),
];

const INTRODUCTION: &str = "\
<!-- Made by `cargo xtask reference` from crates/divvy-model/src/names.rs. Do not edit. -->

# Annotations

[pods.md](../pods.md) explains with examples what a pod can request. [formats.md](../design/formats.md) describes the JSON that Divvy's
programs write. The admission policies reject every other annotation of a pod that begins with `divvy.dev/`.
";

/// Return docs/reference/annotations.md.
///
/// # Errors
/// A doc comment does not begin with one of the known kinds.
pub fn markdown() -> Result<String> {
    let names = names()?;
    let mut text = INTRODUCTION.to_owned();
    for (kind, heading) in KINDS {
        let Some(heading) = heading else { continue };
        write!(text, "\n## {heading}\n\n| name | meaning |\n|---|---|\n")?;
        for name in names.iter().filter(|name| name.kind == kind) {
            writeln!(text, "| `{}` | {} |", name.value, cell(&name.meaning))?;
        }
    }
    Ok(text)
}

struct AnnotationName {
    kind: &'static str,
    value: String,
    meaning: String,
}

/// Return the constants of [`NAMES`] that are texts, except for values of other constants.
fn names() -> Result<Vec<AnnotationName>> {
    let file = syn::parse_file(NAMES).context("divvy_model::names is not Rust")?;
    let mut names = Vec::new();
    for item in file.items {
        let Item::Const(constant) = item else { continue };
        let Some(value) = text_of(&constant.expr) else { continue };
        let comment = first_paragraph(&constant.attrs);
        if comment.starts_with("Value of ") {
            continue;
        }
        let (kind, meaning) = comment.split_once(": ").unwrap_or_default();
        let Some((kind, _)) = KINDS.into_iter().find(|(known, _)| *known == kind) else {
            bail!(
                "the doc comment of {} must begin with the kind of the name, as in `Node annotation: …`",
                constant.ident
            );
        };
        let mut letters = meaning.chars();
        let first = letters
            .next()
            .map(|letter| letter.to_uppercase().to_string())
            .unwrap_or_default();
        names.push(AnnotationName {
            kind,
            value,
            meaning: first + letters.as_str(),
        });
    }
    Ok(names)
}

fn text_of(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

fn first_paragraph(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => text_of(&pair.value),
        _ => None,
    });
    let lines: Vec<String> = lines
        .map(|line| line.trim().to_owned())
        .take_while(|line| !line.is_empty())
        .collect();
    lines.join(" ")
}
