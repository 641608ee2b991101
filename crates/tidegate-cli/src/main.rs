//! The `tidegate` command.
//!
//! | status | meaning |
//! | --- | --- |
//! | 0 | success; for `explain` and `status`, the call would be admitted |
//! | 1 | failure: an address is in use, the gate can't be reached or isn't ready; `simulate --check`: goodput didn't recover |
//! | 2 | invalid input: the command line, the policy, a scenario, or a request that the gate can't decide |
//! | 3 | `explain` and `status`: the call would be refused |
//! | 130 | `serve` received a second stop signal |
//!
//! `retry` ends with its command's status, or as GNU's `timeout` and `env` do: 124 for an attempt that took too long,
//! 125 for an invalid command line, 126 and 127 for a command that can't be run or found.

mod admin_client;
mod api_client;
mod classify;
mod demo;
mod gate_client;
mod import;
mod operator;
mod policy;
mod replay;
mod retry;
mod serve;
mod shell_help;
#[cfg(feature = "simulate")]
mod simulate;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use tidegate_policy::ratelimit_yaml::is_evaluating;
use tidegate_policy::{PLATFORMS, PolicySources, settings};

/// A call makes about twenty small allocations. With this allocator the gateway's own time per call is a fifth less
/// than with the C library's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Governs traffic: limits, growing penalties and reliable wait times in front of a web server.
#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    max_term_width = 100,
    after_help = "\
Exit status: 0 done (explain, status: would be admitted), 1 failure, 2 invalid input, 3 would be refused."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the gate at work, with a web server and a log of its own. Takes three seconds and changes nothing.
    Demo,
    /// Run the gate: the proxy, the gateway, the decision API with forward-auth, and health checks. Without a policy file,
    /// a built-in policy guards http://127.0.0.1:3000 on http://127.0.0.1:8080.
    Serve {
        #[command(flatten)]
        file: PolicyFile,
        /// Also read outbound settings from PREFIX_TOKEN, PREFIX_API_MAX_RETRIES and the others that `env` lists.
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
    },
    /// Check the policy that `serve` would run, and describe its limits. The first line of the output names its source.
    Check {
        #[command(flatten)]
        file: PolicyFile,
        /// Ignore TIDEGATE__… and all other variables that override the file.
        #[arg(long)]
        no_env: bool,
        /// Also read outbound settings from PREFIX_TOKEN, PREFIX_API_MAX_RETRIES and the others that `env` lists.
        #[arg(long, value_name = "PREFIX", conflicts_with = "no_env")]
        env_prefix: Option<String>,
    },
    /// Show what a reply of a provider means by the rules of a policy: its class, its wait, its scope, and which rule says
    /// so. Sends nothing.
    Classify(classify::ClassifyArgs),
    /// Show every limit of a running gate that applies to a call. Changes nothing.
    #[command(mut_arg("action", |action| action.required_unless_present("path")))]
    Explain(CallArgs),
    /// Show if a running gate would admit a call. Changes nothing.
    #[command(mut_arg("action", |action| action.required_unless_present("path")))]
    Status(CallArgs),
    /// Reset a caller's state under an action's own limits on a running gate. Without an action and a path, under all
    /// limits that count by its --ip or --key.
    #[command(mut_arg("action", |action| action.required_unless_present_any(["path", "ip", "key"])))]
    Reset(CallArgs),
    /// Block a caller under an action's own limits on a running gate, as far as they have a penalty. Without an action and
    /// a path, under all limits that count by its --ip or --key. `reset` ends the block.
    #[command(mut_arg("action", |action| action.required_unless_present_any(["path", "ip", "key"])))]
    #[command(mut_arg("cost", |cost| cost.hide(true)))]
    Block {
        /// The length of the block: 30s, 10m, 2h. At most the longest block of the limits' penalties.
        #[arg(long = "for", value_name = "DURATION")]
        length: String,
        #[command(flatten)]
        call: CallArgs,
    },
    /// Show the clients that a running gate blocks, and those that it has refused most lately.
    Blocks {
        /// Only clients of this action.
        #[arg(long)]
        action: Option<String>,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Show if a running gate can take requests, and exit with 1 if not. Needs no token, and with --url no policy.
    Health {
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Show the nodes that share the store of a running gate: last heard, decisions per second, link to the store.
    Fleet {
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Show the providers of a running gate: breakers, credentials, limits, queues and retries.
    Providers {
        /// The provider; all of them by default.
        name: Option<String>,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Pause a provider on a running gate: calls to it are refused until `resume`. Requests under way continue.
    Pause {
        /// The provider.
        name: String,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Let calls to a paused provider start again.
    Resume {
        /// The provider.
        name: String,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Close the circuit breaker of a provider on a running gate, and end the cool-downs of its credentials. Used limits and
    /// quotas stay.
    ResetProvider {
        /// The provider.
        name: String,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Show what other terms of a limit would have decided about the requests that a running gate has had in the last hour.
    /// Changes nothing.
    #[command(override_usage = "tidegate try [OPTIONS] <ACTION> [LIMIT] <TERMS>")]
    Try {
        /// The action of the limit, or `global`.
        action: String,
        /// The limit; only the terms if the action has one limit.
        #[arg(value_name = "LIMIT")]
        limit_or_terms: String,
        /// The terms: a quantity such as "3 per 60s", or lines of a policy such as 'ban = "10m"'.
        terms: Option<String>,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Read the policy of a running gate again. If it has errors, the gate goes on with the one before.
    Reload {
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Alerts of a running gate.
    Alert {
        #[command(subcommand)]
        command: AlertCommand,
    },
    /// Show the latest changes of state of a running gate: of blocked clients, breakers, credentials, quotas and the store.
    Events {
        /// Continue to show events as they happen.
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        gate: GateArgs,
    },
    /// Run a scenario: the production code in a simulated environment, on a virtual clock.
    #[cfg(feature = "simulate")]
    #[command(after_help = simulate::help())]
    Simulate {
        /// The scenario: a file, `-` for standard input, or the name of a built-in scenario.
        #[arg(required_unless_present_any = ["list", "suite"])]
        scenario: Option<PathBuf>,
        /// Run a suite instead, and print its own table: `control` compares controllers of unknown capacity with an
        /// oracle.
        #[arg(long, value_name = "NAME", conflicts_with_all = ["scenario", "check"], value_parser = simulate::suites())]
        suite: Option<String>,
        /// The seed of the random numbers; the scenario's own by default. The same seed gives the same output, byte for
        /// byte.
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// Also write the report to this file: .html, .svg, .png or .json. May be repeated.
        #[arg(long, value_name = "FILE")]
        out: Vec<PathBuf>,
        /// Exit with 1 unless goodput recovers after the load, outage or partition ends.
        #[arg(long)]
        check: bool,
        /// List the built-in scenarios.
        #[arg(long, conflicts_with_all = ["scenario", "suite", "seed", "out", "check"])]
        list: bool,
    },
    /// Show what a policy would have decided about the requests of access logs, on the logs' own clock.
    #[command(after_help = replay::HELP)]
    Replay(replay::ReplayArgs),
    /// Run a scenario. Not in this build: it needs the feature `simulate`.
    #[cfg(not(feature = "simulate"))]
    Simulate(MissingCommand),
    /// Print the limits of another program's configuration as a policy.
    Import {
        #[command(subcommand)]
        command: import::ImportCommand,
    },
    /// Run a command until it succeeds, with increasing waits between attempts.
    #[command(after_help = retry::HELP)]
    Retry(retry::RetryArgs),
    /// Print every environment variable with its default, as a .env file.
    Env,
    /// Print a script by which a shell completes the command line of `tidegate`.
    #[command(after_help = shell_help::COMPLETIONS_HELP)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of `tidegate` or of one of its commands, or write all of them to a directory.
    Man {
        /// The command, such as `block` or `alert test`.
        command: Vec<String>,
        /// Write all pages to this directory, which is made if it doesn't exist.
        #[arg(long, value_name = "DIRECTORY", conflicts_with = "command")]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
enum AlertCommand {
    /// Send a test message to all receivers of an alert, and show the result of each.
    Test {
        /// The alert.
        name: String,
        #[command(flatten)]
        gate: GateArgs,
    },
}

/// The policy file of a command, as an argument or as an option.
#[derive(Debug, Args)]
struct PolicyFile {
    /// The policy file; `-` reads standard input. The default is ./tidegate.toml, and without that file the built-in
    /// policy.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The same as FILE.
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl PolicyFile {
    /// Returns the file that the command line names.
    fn path(self) -> Result<Option<PathBuf>, CliOutcome> {
        match (self.file, self.config) {
            (Some(file), Some(config)) if file != config => {
                let [file, config] = [file, config].map(|path| policy::display_name(&path));
                Err(policy::invalid_input(format!(
                    "there are two policy files, {file} and --config {config}; name one"
                )))
            }
            (file, config) => Ok(file.or(config)),
        }
    }
}

/// The words of a command that this build lacks.
#[cfg(not(feature = "simulate"))]
#[derive(Debug, Args)]
struct MissingCommand {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _words: Vec<std::ffi::OsString>,
}

/// A call, as a decision request describes it.
#[derive(Debug, Default, Args)]
struct CallArgs {
    /// The action.
    action: Option<String>,
    /// The client's address.
    #[arg(long)]
    ip: Option<String>,
    /// The caller's identity: an account, an API key, a tenant.
    #[arg(long)]
    key: Option<String>,
    /// The kind of client.
    #[arg(long, value_parser = PossibleValuesParser::new(PLATFORMS))]
    platform: Option<String>,
    /// The cost of the call in units of the limit.
    #[arg(long)]
    cost: Option<u64>,
    /// The request's method.
    #[arg(long)]
    method: Option<String>,
    /// The request's path. Without an action, the path selects one.
    #[arg(long)]
    path: Option<String>,
    /// The request's host.
    #[arg(long)]
    host: Option<String>,
    /// A header of the request, as NAME=VALUE; may be repeated.
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    #[command(flatten)]
    gate: GateArgs,
}

/// The running gate that a command asks.
#[derive(Debug, Default, Args)]
struct GateArgs {
    /// The gate's policy, which has the address of its listener and the source of the token. By default the policy that
    /// `serve` would use, unless --url is given.
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The prefix of outbound settings in the environment, as for `serve`.
    #[arg(long, value_name = "PREFIX")]
    env_prefix: Option<String>,
    /// The gate's listener, as http://HOST:PORT, https://HOST:PORT or unix:PATH; the policy's by default.
    #[arg(long)]
    url: Option<String>,
    /// The PEM file of the certificates that sign that of an https listener; the system's by default.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The environment variable with the listener's bearer token; the policy's by default.
    #[arg(long, value_name = "NAME")]
    token_env: Option<String>,
    /// Print the gate's JSON response unchanged.
    #[arg(long)]
    json: bool,
}

/// The result of a command; see the exit statuses in the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CliOutcome {
    Done = 0,
    Failed = 1,
    InvalidInput = 2,
    Refused = 3,
}

/// The outcome of a command, or of the error that ended it and is already printed.
type CommandResult = Result<CliOutcome, CliOutcome>;

impl CliOutcome {
    /// Returns `next` after [`CliOutcome::Done`], otherwise this outcome.
    fn and(self, next: Self) -> Self {
        if self == Self::Done { next } else { self }
    }
}

impl From<CliOutcome> for ExitCode {
    fn from(outcome: CliOutcome) -> Self {
        Self::from(outcome as u8)
    }
}

/// Prints a command-line error, or the help, and returns its exit status.
fn usage_error(error: &clap::Error) -> ExitCode {
    policy::print_usage(error);
    if error.use_stderr() { CliOutcome::InvalidInput.into() } else { CliOutcome::Done.into() }
}

fn main() -> ExitCode {
    let report_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !is_evaluating() {
            report_panic(panic);
        }
    }));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return retry::usage_error(&error).unwrap_or_else(|| usage_error(&error)),
    };
    let result = match cli.command {
        Command::Demo => demo::run(),
        Command::Serve { file, env_prefix } => {
            file.path().and_then(|file| serve::run(file.as_deref(), env_prefix.as_deref()))
        }
        Command::Check { file, no_env, env_prefix } => {
            let environment = || policy::environment(env_prefix.as_deref());
            let sources = if no_env { PolicySources::new() } else { environment() };
            file.path().and_then(|file| policy::check(file.as_deref(), sources, !no_env))
        }
        Command::Classify(arguments) => classify::run(arguments),
        Command::Explain(call) => api_client::explain(&call),
        Command::Status(call) => api_client::status(&call),
        Command::Reset(call) => operator::reset(&call),
        Command::Block { length, call } => operator::block(&call, &length),
        Command::Try { action, limit_or_terms, terms, gate } => {
            let (limit, terms) = match terms {
                Some(terms) => (limit_or_terms, terms),
                None => (String::new(), limit_or_terms),
            };
            admin_client::try_terms(&gate, &action, &limit, &terms)
        }
        Command::Reload { gate } => operator::reload(&gate),
        Command::Pause { name, gate } => operator::change_provider(&gate, &name, operator::ProviderChange::Pause),
        Command::Resume { name, gate } => operator::change_provider(&gate, &name, operator::ProviderChange::Resume),
        Command::ResetProvider { name, gate } => {
            operator::change_provider(&gate, &name, operator::ProviderChange::Reset)
        }
        Command::Alert { command: AlertCommand::Test { name, gate } } => operator::test_alert(&gate, &name),
        Command::Blocks { action, gate } => admin_client::blocks(&gate, action.as_deref()),
        Command::Health { gate } => admin_client::health(&gate),
        Command::Fleet { gate } => admin_client::fleet(&gate),
        Command::Providers { name, gate } => admin_client::providers(&gate, name.as_deref()),
        Command::Events { follow, gate } => admin_client::events(&gate, follow),
        #[cfg(not(feature = "simulate"))]
        Command::Simulate(_) => Err(policy::missing_simulate("the command simulate")),
        #[cfg(feature = "simulate")]
        Command::Simulate { list: true, .. } => simulate::list(),
        #[cfg(feature = "simulate")]
        Command::Simulate { suite: Some(suite), seed, out, .. } => simulate::run_suite(&suite, seed, &out),
        #[cfg(feature = "simulate")]
        Command::Simulate { scenario, seed, out, check, list: _, suite: _ } => {
            simulate::run(&scenario.unwrap_or_default(), seed, &out, check)
        }
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Import { command } => command.run(),
        Command::Retry(arguments) => return retry::run(&arguments),
        Command::Env => Ok(policy::print(&settings::env_example())),
        Command::Completions { shell } => Ok(shell_help::print_completions(Cli::command(), shell)),
        Command::Man { command, out } => shell_help::man(Cli::command(), &command, out.as_deref()),
    };
    result.unwrap_or_else(|outcome| outcome).into()
}
