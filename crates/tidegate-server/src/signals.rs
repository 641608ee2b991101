//! The signals that stop a server.

use std::io;

/// Returns a future that ends with the first SIGTERM or SIGINT. A second one ends the process at once, with status 130.
/// SIGHUP, by which some service managers reload, is ignored and logged. Needs a tokio runtime.
///
/// # Errors
/// The signal handlers can't be installed.
pub fn stop_signal() -> io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            tracing::warn!("SIGHUP is ignored: restart to use a changed policy");
        }
    });
    let mut next = async move || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(async move {
        next().await;
        tokio::spawn(async move {
            next().await;
            std::process::exit(130);
        });
    })
}
