//! `tidegate import`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tidegate_policy::ratelimit_yaml::RatelimitConfig;
use tidegate_policy::{Policy, PolicySources};

use crate::CommandResult;
use crate::policy::{
    display_name, file_failure, invalid_document, invalid_input, is_stdin, print, print_error, read_input,
};

/// The most files of one configuration.
const MAX_FILES: usize = 1000;
/// The largest configuration, in bytes, over all files.
const MAX_BYTES: usize = 16 << 20;

/// The end of the help of `import ratelimit`.
const RATELIMIT_HELP: &str = "\
Files that ratelimit refuses are refused here, with the file, line and column of each mistake. Settings that it would
ignore are noted. Each descriptor with a limit becomes an action of the decision API; comments in the policy show the
descriptor, and the settings that have no equal.";

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Read the YAML of Envoy's ratelimit service, and print the same limits as a policy.
    #[command(after_help = RATELIMIT_HELP)]
    Ratelimit(RatelimitArgs),
}

/// The arguments of `tidegate import ratelimit`.
#[derive(Debug, Args)]
pub(crate) struct RatelimitArgs {
    /// The files, which together are one configuration; `-` reads standard input. Of a directory, all files that end with
    /// .yaml or .yml.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read files with the same domain as one, as ratelimit does with MERGE_DOMAIN_CONFIG=true.
    #[arg(long)]
    merge_domains: bool,
}

/// `tidegate import ratelimit FILE…`.
pub(crate) fn ratelimit(arguments: &RatelimitArgs) -> CommandResult {
    let mut files = Vec::new();
    let mut bytes = 0;
    for path in &arguments.files {
        for file in files_at(path).map_err(|error| file_failure("read", path, error))? {
            let body = read_input(&file).map_err(|error| file_failure("read", &file, error))?;
            bytes += body.len();
            files.push((display_name(&file), body));
            if files.len() > MAX_FILES || bytes > MAX_BYTES {
                return Err(invalid_input(format!("there are more than {MAX_FILES} files or 16 MiB")));
            }
        }
    }
    if files.is_empty() {
        return Err(invalid_input("no file ends with .yaml or .yml"));
    }
    let config = RatelimitConfig::read(files, arguments.merge_domains).map_err(invalid_document)?;
    let notes: String = config.notes().iter().map(|note| format!("{note}\n")).collect();
    print_error(&notes);
    let text = config.to_policy();
    // A policy has bounds of its own, such as the number of actions.
    Policy::load(PolicySources::new().file("the policy of these limits", &text)).map_err(invalid_document)?;
    Ok(print(&text))
}

/// The file itself, or the YAML files of a directory, by name.
fn files_at(path: &Path) -> io::Result<Vec<PathBuf>> {
    if is_stdin(path) || !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        let is_yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        let is_hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_yaml && !is_hidden && file.is_file() {
            files.push(file);
        }
        if files.len() > MAX_FILES {
            break;
        }
    }
    files.sort();
    Ok(files)
}
