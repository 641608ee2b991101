//! Completions for shells, and manual pages, both made from the definition of the command line.

use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::{CliOutcome, CommandResult, policy};

/// The places where shells read their completions.
pub(crate) const COMPLETIONS_HELP: &str = "\
bash:  tidegate completions bash > ~/.local/share/bash-completion/completions/tidegate
zsh:   tidegate completions zsh > ~/.zfunc/_tidegate     (with ~/.zfunc in fpath)
fish:  tidegate completions fish > ~/.config/fish/completions/tidegate.fish";

/// Prints the completion script for a shell.
pub(crate) fn print_completions(mut cli: Command, shell: Shell) -> CliOutcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut cli, "tidegate", &mut script);
    policy::write_stdout(&String::from_utf8_lossy(&script))
}

/// Prints one manual page, or writes all of them to a directory.
pub(crate) fn man(mut cli: Command, command: Option<&str>, directory: Option<&Path>) -> CommandResult {
    // `help` has no page: it shows those of the others.
    cli = cli.disable_help_subcommand(true).mut_subcommands(|command| command.disable_help_subcommand(true));
    cli.build();
    if let Some(directory) = directory {
        return match clap_mangen::generate_to(cli, directory) {
            Ok(()) => Ok(CliOutcome::Done),
            Err(error) => Err(policy::file_failure("write to", directory, error)),
        };
    }
    let page = match command {
        None => cli,
        Some(name) => match cli.find_subcommand(name) {
            Some(found) => found.clone(),
            None => return Err(policy::invalid_input(format!("there is no command {name}; see tidegate --help"))),
        },
    };
    let mut text = Vec::new();
    match Man::new(page).render(&mut text) {
        Ok(()) => Ok(policy::write_stdout(&String::from_utf8_lossy(&text))),
        Err(error) => Err(policy::failure(error.to_string())),
    }
}
