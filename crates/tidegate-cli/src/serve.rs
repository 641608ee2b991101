//! `tidegate serve`.

use std::fmt::Write as _;
use std::path::Path;

use tidegate::store::AnyStore;
use tidegate_policy::Policy;
use tidegate_server::{BoundServer, Server, descriptors, log, signals};

use crate::CliOutcome;
use crate::policy::{self, EnvOverrides, LoadedPolicy, print_error};

/// Runs the server until a stop signal.
pub(crate) fn run(config: Option<&Path>, prefix: Option<&str>) -> CliOutcome {
    let LoadedPolicy { policy, source_name: from } = match policy::load(config, EnvOverrides::Used { prefix }) {
        Ok(read) => read,
        Err(outcome) => return outcome,
    };
    let filter = std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
    if let Err(error) = log::start(policy.log(), filter.as_deref()) {
        print_error(&format!("error: {error}\n"));
        return CliOutcome::InvalidInput;
    }
    descriptors::raise_limit(&policy);
    // On one processor the multi-threaded runtime only adds costs.
    let is_single_core = std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
    let mut runtime = if is_single_core {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    match runtime.enable_all().build() {
        Ok(runtime) => runtime.block_on(serve(&policy, &from)),
        Err(error) => {
            print_error(&format!("error: can't start: {error}\n"));
            CliOutcome::Failed
        }
    }
}

async fn serve(policy: &Policy, from: &str) -> CliOutcome {
    let stop = match signals::stop_signal() {
        Ok(stop) => stop,
        Err(error) => {
            print_error(&format!("error: can't listen for signals: {error}\n"));
            return CliOutcome::Failed;
        }
    };
    let server = match Server::open(policy).await {
        Ok(server) => server,
        Err(error) => {
            print_error(&format!("error: {error}\n"));
            return CliOutcome::Failed;
        }
    };
    let bound = match server.bind() {
        Ok(bound) => bound,
        Err(error) => {
            print_error(&format!("error: {error}\n"));
            return CliOutcome::Failed;
        }
    };
    policy::print(&startup_message(policy, from, &bound));
    bound.run(stop).await;
    CliOutcome::Done
}

fn startup_message(policy: &Policy, from: &str, bound: &BoundServer<AnyStore>) -> String {
    let mut text = format!("tidegate {} runs {from}\n\n", env!("CARGO_PKG_VERSION"));
    match (bound.inbound(), &policy.inbound().upstream) {
        (Some(address), Some(upstream)) => {
            let _ = writeln!(text, "  gate     http://{address} in front of {upstream}");
        }
        _ => text.push_str("  gate     none: the policy has no inbound.upstream\n"),
    }
    if let (Some(address), Some(outbound)) = (bound.outbound(), policy.outbound()) {
        let reached = outbound.providers().iter().filter(|provider| provider.base_url.is_some());
        let paths: Vec<String> = reached.map(|provider| format!("/{}/…", provider.name)).collect();
        let _ = writeln!(text, "  outbound http://{address} ({})", paths.join(", "));
    }
    let api = if policy.api().forward_auth { "/v1/check, /v1/auth" } else { "/v1/check" };
    let other = [("API", bound.api(), api), ("health", bound.admin(), "/healthz, /readyz")];
    for (name, address, paths) in other {
        if let Some(address) = address {
            let _ = writeln!(text, "  {name:<8} http://{address} ({paths})");
        }
    }
    let _ = write!(text, "\n{}\n", policy::describe(policy));
    text
}
