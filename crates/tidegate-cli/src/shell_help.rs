//! Completions for shells, and manual pages, both made from the definition of the command line.

use std::path::Path;
use std::{fs, io};

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

/// Prints the manual page of a command, such as `alert test`, or writes all pages to a directory.
pub(crate) fn man(cli: Command, words: &[String], directory: Option<&Path>) -> CommandResult {
    // A page about `help` would repeat the others.
    let mut cli = cli.disable_help_subcommand(true).mut_subcommands(|command| command.disable_help_subcommand(true));
    cli.build();
    if let Some(directory) = directory {
        return match fs::create_dir_all(directory).and_then(|()| write_pages(cli, directory)) {
            Ok(()) => Ok(CliOutcome::Done),
            Err(error) => Err(policy::file_failure("write to", directory, error)),
        };
    }
    let Some(found) = words.iter().try_fold(&cli, |command, word| command.find_subcommand(word)) else {
        return Err(policy::invalid_input(format!("there is no command {}; see tidegate --help", words.join(" "))));
    };
    let mut text = Vec::new();
    match page(found.clone()).render(&mut text) {
        Ok(()) => Ok(policy::write_stdout(&String::from_utf8_lossy(&text))),
        Err(error) => Err(policy::failure(error.to_string())),
    }
}

/// Writes the page of a command and those of all its commands.
fn write_pages(command: Command, directory: &Path) -> io::Result<()> {
    for nested in command.get_subcommands() {
        write_pages(nested.clone(), directory)?;
    }
    let page = page(command);
    page.render(&mut fs::File::create(directory.join(page.get_filename()))?)
}

fn page(mut command: Command) -> Man {
    // The synopsis that the page would have shows no values of options.
    let usage = command.render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned();
    // An empty date would leave its place in the title to the next field.
    Man::new(command.override_usage(usage))
        .date(" ")
        .source(concat!("tidegate ", env!("CARGO_PKG_VERSION")))
        .manual("Tidegate")
}
