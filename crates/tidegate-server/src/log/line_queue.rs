//! A queue of log lines in front of an output that may block.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// The maximum number of lines that wait for the output. Further ones are dropped and counted.
const MAX_LINES: usize = 8192;
/// The maximum time that the end of the process waits for the output.
const MAX_FLUSH_WAIT: Duration = Duration::from_secs(1);

/// The number of lines that this process has dropped.
static DROPPED_LINES: AtomicU64 = AtomicU64::new(0);

/// The number of log lines that were dropped since the start, because the output didn't take them.
pub(crate) fn dropped_lines() -> u64 {
    DROPPED_LINES.load(Ordering::Relaxed)
}

enum Message {
    Line(Vec<u8>),
    /// Asks for a signal when all lines before it are written.
    Flush(Sender<()>),
}

/// A writer that never blocks: a thread of its own writes the lines to the output.
#[derive(Clone)]
pub(super) struct LineQueue(SyncSender<Message>);

/// Keeps the log complete: when it is dropped, waits up to a second until all lines are written.
#[must_use = "the last lines of the log are lost without it"]
#[derive(Debug)]
pub struct LogGuard(SyncSender<Message>);

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Message")
    }
}

/// Returns a queue of lines for an output, and its guard.
///
/// # Errors
/// The system starts no more threads.
pub(super) fn line_queue(output: impl Write + Send + 'static) -> io::Result<(LineQueue, LogGuard)> {
    let (sender, receiver) = sync_channel(MAX_LINES);
    thread::Builder::new().name("log".to_owned()).spawn(move || write_lines(&receiver, output))?;
    Ok((LineQueue(sender.clone()), LogGuard(sender)))
}

fn write_lines(messages: &Receiver<Message>, output: impl Write) {
    let mut lines = LineOutput { output, ends_within_line: false };
    for message in messages {
        match message {
            Message::Line(line) => {
                if lines.write_line(line).is_err() {
                    DROPPED_LINES.fetch_add(1, Ordering::Relaxed);
                }
            }
            // An error can't be reported anywhere.
            Message::Flush(written) => drop(lines.output.flush().and(written.send(()).map_err(io::Error::other))),
        }
    }
}

/// An output that can fail within a line, as on a full disk. The next line then begins on its own.
struct LineOutput<W> {
    output: W,
    ends_within_line: bool,
}

impl<W: Write> LineOutput<W> {
    fn write_line(&mut self, mut line: Vec<u8>) -> io::Result<()> {
        if self.ends_within_line {
            line.insert(0, b'\n');
        }
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            match self.output.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    let (written, unwritten) = rest.split_at(count);
                    self.ends_within_line = !written.ends_with(b"\n");
                    rest = unwritten;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Write for LineQueue {
    /// Takes all bytes, because each line arrives in one piece.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.try_send(Message::Line(bytes.to_vec())).is_err() {
            DROPPED_LINES.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for LineQueue {
    type Writer = Self;

    fn make_writer(&'w self) -> Self {
        self.clone()
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        let (written, flushed) = channel();
        // With a full queue the output is stuck, and there is no use in a wait.
        if self.0.try_send(Message::Flush(written)).is_ok() {
            let _ = flushed.recv_timeout(MAX_FLUSH_WAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::log::tests::SharedOutput;

    /// Held by each test that reads the counter of the process.
    static DROP_COUNTER: Mutex<()> = Mutex::new(());

    #[test]
    fn a_blocked_output_loses_counted_lines() {
        let _counter = DROP_COUNTER.lock();
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut queue, guard) = line_queue(SharedOutput(Arc::clone(&written))).unwrap();
        let blocked = written.lock();
        let dropped_before = dropped_lines();
        for _ in 0..MAX_LINES + 100 {
            queue.write_all(b"line\n").unwrap();
        }
        let dropped = dropped_lines() - dropped_before;
        // The thread may hold one more line than the queue.
        assert!((99..=100).contains(&dropped), "{dropped}");
        drop(blocked);
        let lines = || written.lock().iter().filter(|byte| **byte == b'\n').count() as u64;
        while lines() < 2 {
            thread::yield_now();
        }
        // The second line was taken from the queue, which then has room for the message of the guard.
        drop(guard);
        assert_eq!(lines() + dropped, MAX_LINES as u64 + 100);
    }

    /// An output with room for a number of bytes.
    struct LimitedOutput(Arc<Mutex<(Vec<u8>, usize)>>);

    impl Write for LimitedOutput {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (written, room) = &mut *self.0.lock();
            let taken = bytes.len().min(*room);
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *room -= taken;
            written.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn failed_lines_are_counted_and_not_joined() {
        let _counter = DROP_COUNTER.lock();
        let output = Arc::new(Mutex::new((Vec::new(), 9)));
        let (sender, receiver) = sync_channel(MAX_LINES);
        let dropped_before = dropped_lines();
        let mut queue = LineQueue(sender);
        let limited = LimitedOutput(Arc::clone(&output));
        let writer = thread::spawn(move || write_lines(&receiver, limited));
        let mut write = |line: &[u8]| {
            queue.write_all(line).unwrap();
            let (written, flushed) = channel();
            queue.0.send(Message::Flush(written)).unwrap();
            flushed.recv().unwrap();
        };
        write(b"first\n");
        write(b"second\n");
        write(b"third\n");
        output.lock().1 = 1;
        write(b"fourth\n");
        output.lock().1 = usize::MAX;
        write(b"fifth\n");
        assert_eq!(String::from_utf8_lossy(&output.lock().0), "first\nsec\nfifth\n");
        assert_eq!(dropped_lines() - dropped_before, 3);
        drop(queue);
        writer.join().unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lines_to_a_full_disk_are_counted() {
        let _counter = DROP_COUNTER.lock();
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let dropped_before = dropped_lines();
        let (mut queue, guard) = line_queue(full).unwrap();
        for _ in 0..10 {
            queue.write_all(b"line\n").unwrap();
        }
        drop(guard);
        assert_eq!(dropped_lines() - dropped_before, 10);
    }
}
