//! The signals that stop a server.

use std::io::{self, IsTerminal as _};

/// Returns a future that ends with the first SIGTERM or SIGINT. A second one ends the process at once, with status 130.
/// SIGHUP does the same if standard error is a terminal, which has been closed then. Otherwise it asks for a reload, and
/// is ignored and logged. Needs a tokio runtime.
///
/// # Errors
/// The signal handlers can't be installed.
pub fn stop_signal() -> io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let has_terminal = io::stderr().is_terminal();
    let mut next = async move || {
        loop {
            tokio::select! {
                _ = terminate.recv() => return,
                _ = interrupt.recv() => return,
                _ = hangup.recv() => {
                    if has_terminal {
                        return;
                    }
                    tracing::warn!("SIGHUP is ignored: restart to use a changed policy");
                }
            }
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
