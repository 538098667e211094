//! `divvy completions`, and the completions that appear when a user presses Tab after `divvy ...` or `kubectl divvy ...`.

pub mod cluster;

use std::ffi::OsString;
use std::path::Path;

use clap::{CommandFactory as _, Parser as _};
use clap_complete::CompleteEnv;
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};

use crate::cli::{Cli, CompletionsArgs, DivvyCommand, InspectCommand, Shell, arguments};
use crate::commands::inspect::{access, choice};
use crate::printer;
use cluster::Selected;

pub use cluster::{namespaces, nodes, pods};

/// The prefix of the program that kubectl calls for the completions of a plugin `kubectl-NAME` (`pkg/cmd/plugin/plugin_completion.go`).
const ASKED_BY_KUBECTL: &str = "kubectl_complete-";
/// The environment variable in which a shell's completion script passes the name of the shell.
const ASKED_BY_SHELL: &str = "DIVVY_COMPLETE";
/// cobra's `ShellCompDirectiveNoFileComp`: the shell must not offer file names.
const NO_FILES: u32 = 4;
/// cobra's `ShellCompDirectiveNoSpace`: the shell must not add a space, because the word continues.
const NO_SPACE: u32 = 2;

/// Print the completion script for a shell. The script calls this program each time the user presses Tab.
pub fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let shell: &dyn EnvCompleter = match args.shell {
        Shell::Bash => &Bash,
        Shell::Zsh => &Zsh,
        Shell::Fish => &Fish,
    };
    let mut script = Vec::new();
    shell.write_registration(ASKED_BY_SHELL, "divvy", "divvy", "divvy", &mut script)?;
    Ok(printer::print(&String::from_utf8(script)?)?)
}

/// Print completions if this program was called by a shell's script, or as `kubectl_complete-divvy` or
/// `kubectl_complete-inspect-gpushare`. Return whether it was called in this way.
///
/// # Errors
/// Fails if the completions could not be written.
pub fn answered(given: &[OsString]) -> anyhow::Result<bool> {
    if let Some(answer) = for_kubectl(given) {
        printer::print(&answer?)?;
        return Ok(true);
    }
    let words: Vec<&OsString> = given.iter().skip_while(|word| *word != "--").skip(1).collect();
    let index = std::env::var("_CLAP_COMPLETE_INDEX")
        .ok()
        .and_then(|index| index.parse().ok());
    let at = index.unwrap_or_else(|| words.len().saturating_sub(1));
    let current = words.get(at).is_some_and(|word| is_flag(word));
    let before: Vec<OsString> = words.into_iter().take(at).cloned().collect();
    cluster::select_with(move || selected(&before));
    let here = std::env::current_dir().ok();
    Ok(CompleteEnv::with_factory(|| grammar(current))
        .var(ASKED_BY_SHELL)
        .try_complete(given.iter().cloned(), here.as_deref())?)
}

/// Return the completions for kubectl, or `None` if kubectl did not call. The last argument is the word that is being typed.
fn for_kubectl(given: &[OsString]) -> Option<std::io::Result<String>> {
    let (called, words) = given.split_first()?;
    let name = Path::new(called).file_name()?.to_string_lossy().into_owned();
    let plugin = name.strip_prefix(ASKED_BY_KUBECTL)?;
    let begin: &[&str] = match plugin.replace('_', "-").as_str() {
        "inspect-gpushare" => &["divvy", "inspect", "gpushare"],
        _ => &["divvy"],
    };
    let mut line: Vec<OsString> = begin.iter().map(Into::into).collect();
    line.extend(words.iter().cloned());
    if words.is_empty() {
        line.push(OsString::new());
    }
    Some(complete(line))
}

/// Return the cluster and the namespace that the flags on the command line select. The last flag may lack its value, because
/// the user is still typing it.
fn selected(words: &[OsString]) -> Selected {
    let parsed = (0..2).find_map(|less| {
        let words = words.get(..words.len().checked_sub(less)?)?;
        Cli::try_parse_from(arguments(words.iter().cloned()).ok()?).ok()
    });
    let (choice, namespace) = match parsed.map(|cli| cli.command) {
        Some(DivvyCommand::Why(args)) => (choice(&args.cluster), args.namespace),
        Some(DivvyCommand::SchedulerConfig(args)) => (choice(&args.cluster), args.namespace),
        Some(DivvyCommand::Inspect(InspectCommand::Gpushare(args))) => (choice(&args.cluster), None),
        Some(DivvyCommand::Simulate(args)) => (access(&args.access), None),
        _ => return Selected::default(),
    };
    Selected { choice, namespace }
}

fn is_flag(word: &OsString) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

/// Return the command-line grammar. If the current word is not a flag (`flags` is false), hide the flags: they are then offered
/// only if there is nothing else to offer. kubectl does the same.
fn grammar(flags: bool) -> clap::Command {
    fn without(command: clap::Command) -> clap::Command {
        let command = command.mut_args(|arg| if arg.is_positional() { arg } else { arg.hide(true) });
        command.mut_subcommands(without)
    }
    let mut command = Cli::command();
    if flags {
        return command;
    }
    // `build` adds --help, which is then hidden as well.
    command.build();
    without(command)
}

/// Return one line for each candidate (its text, a tab, and its description), and a last line with cobra's directive.
fn complete(line: Vec<OsString>) -> std::io::Result<String> {
    let at = line.len() - 1;
    let before = line[..at].to_vec();
    cluster::select_with(move || selected(&before));
    let here = std::env::current_dir().ok();
    let mut grammar = grammar(is_flag(&line[at]));
    let found = clap_complete::engine::complete(&mut grammar, line, at, here.as_deref())?;
    let mut text = String::new();
    let mut goes_on = false;
    for candidate in found.iter().filter(|candidate| !candidate.is_hide_set()) {
        let value = candidate.get_value().to_string_lossy();
        goes_on |= value.ends_with(['/', '=']);
        text.push_str(&value);
        if let Some(help) = candidate.get_help() {
            let help = help.to_string();
            text.push('\t');
            text.push_str(help.lines().next().unwrap_or_default());
        }
        text.push('\n');
    }
    let directive = NO_FILES + if goes_on && found.len() == 1 { NO_SPACE } else { 0 };
    text.push_str(&format!(":{directive}\n"));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(words: &[&str]) -> Option<Vec<String>> {
        let words: Vec<OsString> = words.iter().map(Into::into).collect();
        let answer = for_kubectl(&words)?.expect("an answer");
        Some(answer.lines().map(str::to_owned).collect())
    }

    #[test]
    fn kubectl_is_given_words_with_what_they_are_and_a_directive() {
        let check = |words: &[&str], some: &str| {
            let answer = asked(words).expect("asked by kubectl");
            assert!(answer.iter().any(|line| line.starts_with(some)), "{words:?}: {answer:?}");
            assert_eq!(answer.last().map(String::as_str), Some(":4"), "{words:?}");
        };
        check(&["kubectl_complete-divvy", "w"], "why\tExplain why a pod waits");
        check(&["/usr/local/bin/kubectl_complete-divvy"], "inspect\t");
        check(
            &["kubectl_complete-divvy", "why", "--name"],
            "--namespace\tThe namespace of the pods",
        );
        check(&["kubectl_complete-divvy", "scheduler-config", "--for", "k"], "kubeadm\t");
        for name in ["kubectl_complete-inspect-gpushare", "kubectl_complete-inspect_gpushare"] {
            check(&[name, "-o", ""], "wide\tOne line per GPU");
            check(&[name, "--de"], "--details\t");
        }
    }

    #[test]
    fn hidden_flags_stay_hidden_and_other_names_are_other_programs() {
        let all = asked(&["kubectl_complete-divvy", "extender", "--"]).expect("asked");
        assert!(all.iter().any(|line| line.starts_with("--tls-secret")), "{all:?}");
        assert!(!all.iter().any(|line| line.starts_with("--exit-with-stdin")), "{all:?}");
        assert_eq!(
            asked(&["kubectl_complete-divvy", "extender", "--exit"]),
            Some(vec![":4".to_owned()]),
            "nor where it is the only one"
        );
        assert_eq!(asked(&["kubectl-divvy", "w"]), None);
        assert_eq!(asked(&["divvy"]), None);
        assert_eq!(asked(&[]), None);
    }
}
