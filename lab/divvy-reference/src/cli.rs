//! The command line: one source for `--help`, for docs/reference/cli.md, and for the man pages.

use std::path::Path;

use clap::CommandFactory as _;
use divvy::cli::Cli;

/// Return docs/reference/cli.md.
pub fn markdown() -> String {
    let options = clap_markdown::MarkdownOptions::new()
        .title("The command line of divvy".to_owned())
        .show_footer(false);
    let mut command = command();
    show_own_name(&mut command);
    let text = clap_markdown::help_markdown_command_custom(&command, &options);
    let mut lines: Vec<&str> = Vec::new();
    let mut in_examples = false;
    for line in text.lines().map(str::trim_end) {
        // Examples are columns of text.
        match line {
            "Examples:" => {
                lines.extend(["**Examples:**", "", "```text"]);
                in_examples = true;
                continue;
            }
            "" if in_examples => {
                lines.push("```");
                in_examples = false;
            }
            _ => {}
        }
        lines.push(line);
    }
    let note = "<!-- Made by `cargo xtask reference` from crates/divvy/src/cli.rs and the daemons' args.rs. Do not edit. -->";
    format!("{note}\n\n{}\n", lines.join("\n").trim_end())
}

/// Write a man page for `divvy` and for each of its commands into a directory.
///
/// # Errors
/// The directory cannot be written to.
pub fn man_pages(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(command(), directory)
}

/// Return the grammar without the values of this process's environment, which clap would print.
fn command() -> clap::Command {
    Cli::command().mut_args(|arg| arg.hide_env_values(true))
}

/// Show `inspect gpushare` under its own name. In its `--help`, the command has the name of the kubectl plugin.
fn show_own_name(command: &mut clap::Command) {
    let inspect = command
        .get_subcommands_mut()
        .filter(|command| command.get_name() == "inspect");
    for gpushare in inspect.flat_map(clap::Command::get_subcommands_mut) {
        *gpushare = std::mem::take(gpushare).display_name("gpushare");
    }
}
