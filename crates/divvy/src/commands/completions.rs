//! `divvy completions`, and what kubectl asks for when somebody types `kubectl divvy ...` and a tab.

use std::ffi::OsString;
use std::path::Path;

use crate::cli::{Cli, CompletionsArgs, Shell};
use crate::printer;
use clap::CommandFactory as _;

/// What kubectl calls beside a plugin `kubectl-NAME` (`pkg/cmd/plugin/plugin_completion.go`).
const ASKED_BY_KUBECTL: &str = "kubectl_complete-";
/// cobra's `ShellCompDirective`: no files, where we name none ourselves.
const NO_FILES: u32 = 4;
/// No space after the word: it goes on.
const NO_SPACE: u32 = 2;

/// Prints the script for a shell.
pub fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let shell = match args.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "divvy", &mut script);
    Ok(printer::print(&String::from_utf8(script)?)?)
}

/// The answer when this program was called as `kubectl_complete-divvy` or `kubectl_complete-inspect-gpushare`; none, when it was not. The last
/// argument is the word that is being typed.
pub fn for_kubectl(given: &[OsString]) -> Option<std::io::Result<String>> {
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

/// A candidate per line, with what it is after a tab, and cobra's directive last.
fn complete(line: Vec<OsString>) -> std::io::Result<String> {
    let at = line.len() - 1;
    let here = std::env::current_dir().ok();
    let found = clap_complete::engine::complete(&mut Cli::command(), line, at, here.as_deref())?;
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
        check(&["kubectl_complete-divvy", "why", "--name"], "--namespace\tTheir namespace");
        check(&["kubectl_complete-divvy", "scheduler-config", "--for", "k"], "kubeadm\t");
        for name in ["kubectl_complete-inspect-gpushare", "kubectl_complete-inspect_gpushare"] {
            check(&[name, "-o", ""], "wide\tA line per GPU");
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
