//! What a scenario tells while it is played: values, printed by whoever listens.

use std::fmt;

use serde::Serialize;

/// One thing that happened, or that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Told {
    /// Its number, from 1.
    pub seq: u64,
    /// Milliseconds since the scenario began.
    pub ms: u64,
    /// What it is.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Event {
    /// A new part of the story begins.
    Scene {
        /// Its title.
        text: String,
    },
    /// Something happened in the cluster.
    Step {
        /// One word: `created`, `bound`, `started`, `ended`, …
        what: String,
        /// The pod, node or program.
        subject: String,
        /// The rest of the sentence.
        text: String,
        /// More, a line each.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        details: Vec<String>,
    },
    /// A command was run as a user would.
    Command {
        /// What a user would type.
        text: String,
        /// What it printed.
        output: String,
    },
    /// The scenario looked whether something is as it should be.
    Check {
        /// Whether it is.
        ok: bool,
        /// What should be.
        text: String,
        /// What was found, when it is not so.
        #[serde(skip_serializing_if = "Option::is_none")]
        found: Option<String>,
    },
}

/// For people: whole lines.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Scene { text } => write!(f, "\n== {text}\n"),
            Event::Step {
                what,
                subject,
                text,
                details,
            } => {
                writeln!(f, "{what:>10}  {subject}  {text}")?;
                details.iter().try_for_each(|detail| writeln!(f, "            {detail}"))
            }
            Event::Command { text, output } => {
                write!(f, "\n    $ {text}\n")?;
                output.lines().try_for_each(|line| writeln!(f, "    {line}"))?;
                writeln!(f)
            }
            Event::Check { ok: true, text, .. } => writeln!(f, "        ok  {text}"),
            Event::Check { ok: false, text, found } => writeln!(
                f,
                "    FAILED  {text}\n            found: {}",
                found.as_deref().unwrap_or("something else")
            ),
        }
    }
}

/// Somebody who listens.
pub trait Listener {
    /// Hears one event. An error ends the play: nobody listens any more.
    fn hear(&mut self, told: &Told) -> std::io::Result<()>;
}
