//! The events of a scenario while it is played: values that the listener prints.

use std::fmt;

use serde::Serialize;

/// An event with its number and time.
#[derive(Debug, Clone, Serialize)]
pub struct TimedEvent {
    /// The event's number, starting at 1.
    pub seq: u64,
    /// Milliseconds since the scenario began.
    pub ms: u64,
    /// The event itself.
    #[serde(flatten)]
    pub event: StoryEvent,
}

/// Something that happened in a play.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum StoryEvent {
    /// A scene begins.
    Scene {
        /// The scene's title.
        text: String,
    },
    /// Something happened in the cluster.
    Step {
        /// One word that says what happened: `created`, `bound`, `started`, `ended`, …
        what: String,
        /// The pod, node, or program.
        subject: String,
        /// The rest of the sentence.
        text: String,
        /// Details, one per line.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        details: Vec<String>,
    },
    /// The play ran a command as a user would.
    Command {
        /// The command line that a user would type.
        text: String,
        /// The command's output.
        output: String,
    },
    /// The play checked a condition.
    Check {
        /// Whether the condition holds.
        ok: bool,
        /// The condition, in words.
        text: String,
        /// What the play found instead, if the condition does not hold.
        #[serde(skip_serializing_if = "Option::is_none")]
        found: Option<String>,
    },
}

/// Format the event as whole lines for people.
impl fmt::Display for StoryEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoryEvent::Scene { text } => write!(f, "\n== {text}\n"),
            StoryEvent::Step {
                what,
                subject,
                text,
                details,
            } => {
                writeln!(f, "{what:>10}  {subject}  {text}")?;
                details.iter().try_for_each(|detail| writeln!(f, "            {detail}"))
            }
            StoryEvent::Command { text, output } => {
                write!(f, "\n    $ {text}\n")?;
                output.lines().try_for_each(|line| writeln!(f, "    {line}"))?;
                writeln!(f)
            }
            StoryEvent::Check { ok: true, text, .. } => writeln!(f, "        ok  {text}"),
            StoryEvent::Check { ok: false, text, found } => writeln!(
                f,
                "    FAILED  {text}\n            found: {}",
                found.as_deref().unwrap_or("something else")
            ),
        }
    }
}

/// A receiver of events.
pub trait StoryListener {
    /// Receive one event. An error means that no one is listening anymore, and ends the play.
    fn hear(&mut self, told: &TimedEvent) -> std::io::Result<()>;
}
