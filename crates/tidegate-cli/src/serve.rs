//! `tidegate serve`.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use sd_notify::NotifyState;
use tidegate::store::AnyStore;
use tidegate_policy::{ListenAddress, ListenConfig, Policy};
use tidegate_server::{BoundServer, FileWatcher, Server, descriptors, log, signals};
use tokio::sync::Notify;

use crate::policy::{self, failure, invalid_input};
use crate::{CliOutcome, CommandResult};

/// The time that the program waits at its end for reads of files.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the server until a stop signal.
pub(crate) fn run(config: Option<&Path>, prefix: Option<&str>) -> CommandResult {
    let watched = policy::watcher(config);
    let (policy, source_name) = policy::load(config, policy::environment(prefix))?;
    let filter = std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
    let _log = log::start(policy.log(), filter.as_deref()).map_err(invalid_input)?;
    descriptors::raise_limit();
    // On one processor the multi-threaded runtime only adds costs.
    let is_single_core = std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
    let mut runtime = if is_single_core {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    let runtime = runtime.enable_all().build().map_err(|error| failure(format!("can't start: {error}")))?;
    let had_file = AtomicBool::new(policy::existing_file(config).is_some());
    let (config, prefix) = (config.map(Path::to_owned), prefix.map(str::to_owned));
    let read_again = move |present: &Policy| {
        policy::load_next(present, config.as_deref(), &had_file, policy::environment(prefix.as_deref()))
    };
    let outcome = runtime.block_on(serve(&policy, &source_name, read_again, watched));
    // A file system that hangs must not keep the program.
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
    outcome
}

async fn serve(
    policy: &Policy,
    source_name: &str,
    read_again: impl Fn(&Policy) -> Result<Policy, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
    watched: FileWatcher,
) -> CommandResult {
    let hangup = Arc::new(Notify::new());
    let stop = signals::stop_signal(Arc::clone(&hangup));
    let stop = stop.map_err(|error| failure(format!("can't listen for signals: {error}")))?;
    let server = Server::open(policy).await.map_err(failure)?;
    let bound = server.policy_source(read_again).policy_files(watched).bind().map_err(failure)?;
    policy::print(&startup_message(policy, source_name, &bound));
    // Without a service manager, no other program waits for it.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let handle = bound.reload_handle();
    tokio::spawn(async move {
        loop {
            hangup.notified().await;
            // The server logs the result.
            let _ = handle.reload().await;
        }
    });
    bound.run(stop).await;
    Ok(CliOutcome::Done)
}

fn startup_message(policy: &Policy, source_name: &str, bound: &BoundServer<AnyStore>) -> String {
    let mut text = format!("tidegate {} runs {source_name}\n\n", env!("CARGO_PKG_VERSION"));
    for note in policy.notes() {
        let _ = writeln!(text, "{note}\n");
    }
    match (bound.inbound_addresses(), &policy.inbound().upstream) {
        (addresses @ [_, ..], Some(upstream)) => {
            let _ = writeln!(
                text,
                "  gate     {} in front of {upstream}",
                urls(addresses, "http", &policy.inbound().listen)
            );
        }
        _ => text.push_str("  gate     none: the policy has no inbound.upstream\n"),
    }
    if let (addresses @ [_, ..], Some(outbound)) = (bound.outbound_addresses(), policy.outbound()) {
        let reached = outbound.providers().iter().filter(|provider| provider.base_url.is_some());
        let paths: Vec<String> = reached.map(|provider| format!("/{}/…", provider.name)).collect();
        let _ = writeln!(text, "  outbound {} ({})", urls(addresses, "http", &outbound.listen), paths.join(", "));
    }
    let api = if policy.api().forward_auth { "/v1/check, /v1/auth" } else { "/v1/check" };
    let admin = "dashboard, /healthz, /readyz, /metrics";
    let rls =
        policy.rls().map(|rls| ("RLS", bound.rls_addresses(), "http", &rls.listen, "Envoy's rate limit service, gRPC"));
    let resp =
        policy.resp().map(|resp| ("Redis", bound.resp_addresses(), "redis", &resp.listen, "TG.CHECK, CL.THROTTLE"));
    let other = [
        Some(("API", bound.api_addresses(), "http", &policy.api().listen, api)),
        rls,
        resp,
        Some(("admin", bound.admin_addresses(), "http", &policy.admin().listen, admin)),
    ];
    for (name, addresses, scheme, config, paths) in other.into_iter().flatten() {
        if !addresses.is_empty() {
            let _ = writeln!(text, "  {name:<8} {} ({paths})", urls(addresses, scheme, config));
        }
    }
    let _ = write!(text, "\n{}\n", policy::describe(policy));
    text
}

/// The addresses of a listener as a client would write them.
fn urls(addresses: &[ListenAddress], scheme: &str, config: &ListenConfig) -> String {
    let secure = if config.tls.is_some() { "s" } else { "" };
    let url = |address: &ListenAddress| match address {
        ListenAddress::Tcp(address) => format!("{scheme}{secure}://{address}"),
        ListenAddress::Unix(_) => address.to_string(),
    };
    addresses.iter().map(url).collect::<Vec<_>>().join(", ")
}
