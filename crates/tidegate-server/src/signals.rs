//! The signals that stop a server.

use std::io::{self, IsTerminal as _};
use std::sync::Arc;

use tokio::sync::Notify;

/// Returns a future that ends with the first SIGTERM or SIGINT. A second one ends the process at once, with status 130.
/// SIGHUP does the same if standard error was a terminal that is closed. Otherwise it asks for a reload, and wakes
/// `reload`. Needs a tokio runtime.
///
/// # Errors
/// The signal handlers can't be installed.
pub fn stop_signal(reload: Arc<Notify>) -> io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let had_terminal = io::stderr().is_terminal();
    let mut next = async move || {
        loop {
            tokio::select! {
                _ = terminate.recv() => return,
                _ = interrupt.recv() => return,
                _ = hangup.recv() => {
                    // A closed terminal isn't one any more.
                    if had_terminal && !io::stderr().is_terminal() {
                        return;
                    }
                    reload.notify_one();
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
