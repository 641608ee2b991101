//! `tidegate import`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tidegate_policy::ratelimit_yaml::{RatelimitConfig, list_files, read_files};
use tidegate_policy::read_regular_file;
use tidegate_policy::{Policy, PolicySources};

use crate::CommandResult;
use crate::policy::{display_name, file_failure, invalid_document, is_stdin, print, print_error, read_input};

/// The end of the help of `import ratelimit`.
const RATELIMIT_HELP: &str = "\
Files that ratelimit refuses are refused here, with the file, line and column of each mistake. Settings that it would
ignore are noted. Each descriptor with a limit becomes an action of the decision API; comments in the policy show the
descriptor, and the settings that have no equal.";

/// The end of the help of `import limitador`.
const LIMITADOR_HELP: &str = "\
Each limit becomes an action of the decision API; a comment shows its conditions, which callers then know to hold. To keep
the conditions, name the files in rls.files, and see docs/from-limitador.md.";

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Read the YAML of Envoy's ratelimit service, and print the same limits as a policy.
    #[command(after_help = RATELIMIT_HELP)]
    Ratelimit(RatelimitArgs),
    /// Read the limits of limitador's YAML, and print them as a policy.
    #[command(after_help = LIMITADOR_HELP)]
    Limitador(Files),
}

/// The files of an import.
#[derive(Debug, Args)]
pub(crate) struct Files {
    /// The files, which together are one configuration; `-` reads standard input. Of a directory, all files that end with
    /// .yaml or .yml.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// The arguments of `tidegate import ratelimit`.
#[derive(Debug, Args)]
pub(crate) struct RatelimitArgs {
    #[command(flatten)]
    files: Files,
    /// Read files with the same domain as one, as ratelimit does with MERGE_DOMAIN_CONFIG=true.
    #[arg(long)]
    merge_domains: bool,
}

impl ImportCommand {
    /// Reads the files and prints the policy.
    pub(crate) fn run(&self) -> CommandResult {
        match self {
            Self::Ratelimit(RatelimitArgs { files, merge_domains }) => import(files, *merge_domains),
            Self::Limitador(files) => import(files, false),
        }
    }
}

fn import(Files { files }: &Files, merge_domains: bool) -> CommandResult {
    let read = |file: &Path, max| if is_stdin(file) { read_input(file) } else { read_regular_file(file, max) };
    let files = list_files(files).and_then(|files| read_files(files, read));
    let files = files.map_err(|failed| file_failure("read", &failed.path, failed.error))?;
    let files = files.into_iter().map(|(path, body)| (display_name(&path), body));
    let config = RatelimitConfig::read(files, merge_domains).map_err(invalid_document)?;
    let notes: String = config.notes().iter().map(|note| format!("{note}\n")).collect();
    print_error(&notes);
    let text = config.to_policy();
    // A policy has bounds of its own, such as the number of actions.
    Policy::load(PolicySources::new().file("the policy of these limits", &text)).map_err(invalid_document)?;
    Ok(print(&text))
}
