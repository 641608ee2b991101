//! The `tidegate` command.
//!
//! | status | means |
//! | --- | --- |
//! | 0 | done; for `explain` and `status`, the call would be admitted |
//! | 1 | something broke: an address is taken, the gate can't be reached; `simulate --check`: goodput didn't recover |
//! | 2 | wrong words: the command line, the policy, a scenario, or a question that the gate can't decide |
//! | 3 | `explain` and `status`: the call would be refused |
//! | 130 | `serve` was told twice to stop |
//!
//! `retry` ends with its command's status, or as GNU's `timeout` and `env` do: 124 for an attempt that took too long, 125
//! for wrong words, 126 and 127 for a command that can't be run or found.

mod api_client;
mod policy;
#[cfg(feature = "simulate")]
mod replay;
mod retry;
mod serve;
#[cfg(feature = "simulate")]
mod simulate;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::policy::EnvOverrides;

/// A call makes some twenty small allocations on its way through; this allocator takes a fifth of the gateway's own time
/// less than the C library's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Paces traffic: limits, growing penalties and true waits in front of a web server.
#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    max_term_width = 100,
    after_help = "\
Exit status: 0 done (explain, status: would be admitted), 1 something broke, 2 wrong words, 3 would be refused."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gate: the proxy, the decision API with forward-auth, and health.
    Serve {
        /// The policy. Without it ./tidegate.toml, and without that a built-in default, which guards
        /// http://127.0.0.1:3000 on http://127.0.0.1:8080.
        #[arg(long, short, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Also take outbound settings from PREFIX_TOKEN, PREFIX_API_MAX_RETRIES and the others that `env` lists.
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
    },
    /// Check a policy and say in words what it limits.
    Check {
        /// The policy; `-` reads standard input.
        #[arg(value_name = "FILE", default_value = "tidegate.toml")]
        file: PathBuf,
        /// The policy, named as for `serve`.
        #[arg(long, short, value_name = "FILE", conflicts_with = "file")]
        config: Option<PathBuf>,
        /// Ignore TIDEGATE__… and the other variables that would override the file.
        #[arg(long)]
        no_env: bool,
        /// Also take outbound settings from PREFIX_TOKEN, PREFIX_API_MAX_RETRIES and the others that `env` lists.
        #[arg(long, value_name = "PREFIX", conflicts_with = "no_env")]
        env_prefix: Option<String>,
    },
    /// Ask a running gate about every limit that a call would meet. Changes nothing.
    Explain(CallArgs),
    /// Ask a running gate whether a call would be admitted. Changes nothing.
    Status(CallArgs),
    /// Make a running gate forget a caller under an action's own limits.
    Reset(CallArgs),
    /// Run a scenario: the production machines in a simulated world, on a virtual clock.
    #[cfg(feature = "simulate")]
    #[command(after_help = simulate::help())]
    Simulate {
        /// The scenario: a file, `-` for standard input, or the name of one that comes with Tidegate.
        #[arg(required_unless_present = "list")]
        scenario: Option<PathBuf>,
        /// What its random numbers grow from; the scenario's own if unsaid. The same seed gives the same bytes.
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// Also write the report to this file: .html, .svg, .png or .json. May be repeated.
        #[arg(long, value_name = "FILE")]
        out: Vec<PathBuf>,
        /// Exit with 1 unless goodput recovers after the load, outage or partition that disturbs it is over.
        #[arg(long)]
        check: bool,
        /// List the scenarios that come with Tidegate.
        #[arg(long, conflicts_with_all = ["scenario", "seed", "out", "check"])]
        list: bool,
    },
    /// Say what a policy would have done to the requests of access logs, on the logs' own clock.
    #[cfg(feature = "simulate")]
    #[command(after_help = replay::HELP)]
    Replay(replay::ReplayArgs),
    /// Run a scenario. Not in this build: it needs the feature `simulate`.
    #[cfg(not(feature = "simulate"))]
    Simulate(MissingCommand),
    /// Say what a policy would have done to access logs. Not in this build: it needs the feature `simulate`.
    #[cfg(not(feature = "simulate"))]
    Replay(MissingCommand),
    /// Run a command until it succeeds, with waits that grow in between.
    #[command(after_help = retry::HELP)]
    Retry(retry::RetryArgs),
    /// Print every environment variable with its default, as a .env file.
    Env,
}

/// The words of a command that this build lacks.
#[cfg(not(feature = "simulate"))]
#[derive(Debug, Args)]
struct MissingCommand {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _words: Vec<std::ffi::OsString>,
}

/// A call, as the decision API describes it.
#[derive(Debug, Args)]
struct CallArgs {
    /// The action.
    #[arg(required_unless_present = "path")]
    action: Option<String>,
    /// The client's address.
    #[arg(long)]
    ip: Option<String>,
    /// What identifies the caller: an account, an API key, a tenant.
    #[arg(long)]
    key: Option<String>,
    /// web, mobile, api or admin.
    #[arg(long)]
    platform: Option<String>,
    /// How much the call weighs.
    #[arg(long)]
    cost: Option<u64>,
    /// The request's method.
    #[arg(long)]
    method: Option<String>,
    /// The request's path; without an action, it finds one.
    #[arg(long)]
    path: Option<String>,
    /// The request's host.
    #[arg(long)]
    host: Option<String>,
    /// A header of the request, as NAME=VALUE; may be repeated.
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    /// The gate's policy, which says where its API is and where the token for it. Without it the one that `serve` would
    /// take, unless there is a URL.
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The prefix that the policy takes outbound settings by, as for `serve`.
    #[arg(long, value_name = "PREFIX")]
    env_prefix: Option<String>,
    /// The gate's decision API, as http://HOST:PORT; the policy's if unsaid.
    #[arg(long)]
    url: Option<String>,
    /// The environment variable that holds the API's bearer token; the policy's if unsaid.
    #[arg(long, value_name = "NAME")]
    token_env: Option<String>,
    /// Print the gate's JSON as it came.
    #[arg(long)]
    json: bool,
}

/// How a command ended; see the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CliOutcome {
    Done,
    Failed,
    InvalidInput,
    Refused,
}

impl From<CliOutcome> for ExitCode {
    fn from(outcome: CliOutcome) -> Self {
        Self::from(match outcome {
            CliOutcome::Done => 0,
            CliOutcome::Failed => 1,
            CliOutcome::InvalidInput => 2,
            CliOutcome::Refused => 3,
        })
    }
}

/// The status for what is wrong with a command line, which is printed; or for the help.
fn usage_error(error: &clap::Error) -> ExitCode {
    policy::print_usage(error);
    if error.use_stderr() { CliOutcome::InvalidInput.into() } else { CliOutcome::Done.into() }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return retry::usage_error(&error).unwrap_or_else(|| usage_error(&error)),
    };
    let outcome = match cli.command {
        Command::Serve { config, env_prefix } => serve::run(config.as_deref(), env_prefix.as_deref()),
        Command::Check { file, config, no_env, env_prefix } => {
            let env = if no_env { EnvOverrides::Ignored } else { EnvOverrides::Used { prefix: env_prefix.as_deref() } };
            policy::check(&config.unwrap_or(file), env)
        }
        Command::Explain(question) => api_client::explain(&question),
        Command::Status(question) => api_client::status(&question),
        Command::Reset(question) => api_client::reset(&question),
        #[cfg(not(feature = "simulate"))]
        Command::Simulate(_) | Command::Replay(_) => {
            policy::print_error(
                "error: this program was built without the feature `simulate`, which has the commands simulate and replay; \
                 build it with --features simulate\n",
            );
            CliOutcome::InvalidInput
        }
        #[cfg(feature = "simulate")]
        Command::Simulate { list: true, .. } => simulate::list(),
        #[cfg(feature = "simulate")]
        Command::Simulate { scenario, seed, out, check, list: _ } => {
            simulate::run(&scenario.unwrap_or_default(), seed, &out, check)
        }
        #[cfg(feature = "simulate")]
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Retry(arguments) => return retry::run(&arguments),
        Command::Env => policy::env(),
    };
    outcome.into()
}
