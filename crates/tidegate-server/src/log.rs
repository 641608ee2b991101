//! The log: its set-up, and its protection against text of hostile clients.

mod line_queue;
mod text_fields;

use std::borrow::Cow;
use std::fmt;
use std::io;

use tidegate_policy::{LogConfig, LogFormat, LogLevel, printable_json, printable_lines};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use self::text_fields::TextFields;
pub use line_queue::LogGuard;
pub(crate) use line_queue::dropped_lines;

/// The target of the access log's lines, in the syntax of `RUST_LOG`.
pub(crate) const ACCESS_TARGET: &str = "access";

/// Starts to write log lines to standard error, as the policy's `[log]` says. `filter`, in the syntax of `RUST_LOG`,
/// overrides its level. Logging never blocks: while standard error takes no lines, up to 8,192 wait, and further ones are
/// dropped and counted.
///
/// # Errors
/// The filter is invalid, this process logs already, or the system starts no more threads.
pub fn start(settings: &LogConfig, filter: Option<&str>) -> Result<LogGuard, StartError> {
    let (queue, guard) = line_queue::line_queue(io::stderr()).map_err(|error| StartError::Thread(error.to_string()))?;
    let subscriber = subscriber(settings, filter, queue)?;
    tracing::dispatcher::set_global_default(subscriber).map_err(|_| StartError::AlreadyStarted)?;
    Ok(guard)
}

/// Returns the subscriber that [`start`] would install, for programs and tests that install it themselves.
///
/// # Errors
/// The filter is invalid.
pub fn subscriber<W>(settings: &LogConfig, filter: Option<&str>, writer: W) -> Result<tracing::Dispatch, StartError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let level = match settings.level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    };
    // The access log has a switch of its own. The HTTP/2 library warns of what any client may send, each time.
    let filter = filter.map_or_else(|| format!("{level},{ACCESS_TARGET}=info,h2=error"), str::to_owned);
    let filter = EnvFilter::try_new(filter).map_err(|error| StartError::Filter(error.to_string()))?;
    // A line that can't be written, as to a closed terminal, must not end the task that logs it.
    let lines = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter).with_ansi(false);
    Ok(match settings.format {
        LogFormat::Text => {
            let writer = SanitizingWriter { inner: writer, sanitize: printable_lines };
            lines.with_writer(writer).fmt_fields(TextFields).finish().into()
        }
        LogFormat::Json => {
            let lines = lines.with_writer(SanitizingWriter { inner: writer, sanitize: printable_json });
            lines.json().flatten_event(true).with_current_span(false).with_span_list(false).finish().into()
        }
    })
}

/// A writer, or a maker of writers, that sanitizes lines. Errors of a store can contain text from outside as well.
struct SanitizingWriter<W> {
    inner: W,
    sanitize: fn(&str) -> Cow<'_, str>,
}

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for SanitizingWriter<W> {
    type Writer = SanitizingWriter<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        SanitizingWriter { inner: self.inner.make_writer(), sanitize: self.sanitize }
    }

    fn make_writer_for(&'w self, meta: &tracing::Metadata<'_>) -> Self::Writer {
        SanitizingWriter { inner: self.inner.make_writer_for(meta), sanitize: self.sanitize }
    }
}

impl<W: io::Write> io::Write for SanitizingWriter<W> {
    /// Writes all bytes, because each event arrives in one piece.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write_all((self.sanitize)(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The reason why logging can't start.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StartError {
    /// The filter is invalid.
    #[error("invalid log filter: {0}")]
    Filter(String),
    /// This process logs already.
    #[error("this process has a logger already")]
    AlreadyStarted,
    /// The system starts no more threads.
    #[error("can't start the log's thread: {0}")]
    Thread(String),
}

/// The maximum number of characters of a client's text in a line.
const MAX_TEXT_CHARS: usize = 128;
/// The maximum number of characters of an error's text in a line.
const MAX_ERROR_CHARS: usize = 512;

/// A client's text, safe to log. Control characters, ANSI sequences, line and direction marks and quotes are escaped.
/// Text over 128 characters is cut off with `…`.
#[derive(Clone, Copy)]
pub(crate) struct EscapedText<'a>(pub(crate) &'a str);

impl fmt::Display for EscapedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(self.0, MAX_TEXT_CHARS, f)
    }
}

/// The text of an error, which may repeat a client's text. Escaped as [`EscapedText`], but up to 512 characters.
pub(crate) struct EscapedError<'a>(pub(crate) &'a str);

impl fmt::Display for EscapedError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(self.0, MAX_ERROR_CHARS, f)
    }
}

fn escape(text: &str, max_chars: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use fmt::Write as _;
    let mut chars = text.chars();
    for char in chars.by_ref().take(max_chars) {
        match char {
            '"' | '\\' => write!(f, "\\{char}")?,
            ' '..='~' => f.write_char(char)?,
            char if char.is_alphanumeric() => f.write_char(char)?,
            char => write!(f, "{}", char.escape_unicode())?,
        }
    }
    if chars.next().is_some() { f.write_char('…') } else { Ok(()) }
}

/// A caller's key, which may be a secret. Displays its first four characters and its length.
#[derive(Clone, Copy)]
pub(crate) struct MaskedKey<'a>(pub(crate) &'a str);

impl fmt::Display for MaskedKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.char_indices().nth(4).map_or(self.0.len(), |(at, _)| at);
        let (shown, hidden) = self.0.split_at(end);
        write!(f, "{}", EscapedText(shown))?;
        if hidden.is_empty() { Ok(()) } else { write!(f, "…({})", self.0.chars().count()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn hostile_text_is_escaped_and_shortened() {
        for (text, shown) in [
            ("user-42 ünïcode 漢", "user-42 ünïcode 漢"),
            ("a\r\nFAKE LINE", "a\\u{d}\\u{a}FAKE LINE"),
            ("\x1b[31mred", "\\u{1b}[31mred"),
            ("\u{9b}31m\u{2028}\u{202e}\0\x7f", "\\u{9b}31m\\u{2028}\\u{202e}\\u{0}\\u{7f}"),
            (r#"" level=error \"#, r#"\" level=error \\"#),
        ] {
            assert_eq!(EscapedText(text).to_string(), shown);
        }
        let long = EscapedText(&"x".repeat(1 << 20)).to_string();
        assert_eq!((long.chars().count(), long.chars().last()), (MAX_TEXT_CHARS + 1, Some('…')));
    }

    #[test]
    fn log_lines_contain_no_control_characters() {
        for (format, shown) in [(LogFormat::Text, "a store\u{fffd} is"), (LogFormat::Json, "a store\\u2066 is")] {
            let lines = Arc::new(Mutex::new(Vec::new()));
            let mut settings = LogConfig::default();
            settings.format = format;
            let writer = Arc::clone(&lines);
            let dispatch = subscriber(&settings, None, move || SharedOutput(Arc::clone(&writer))).unwrap();
            tracing::dispatcher::with_default(&dispatch, || {
                tracing::warn!(error = "\u{1b}[2J\u{202e}nwod\u{9b}1m", "{}", "a store\u{2066} is down\u{7f}");
            });
            let text = String::from_utf8(lines.lock().clone()).unwrap();
            assert!(text.ends_with('\n') && text.contains(shown), "{text:?}");
            let is_unsafe = |letter: char| {
                letter.is_control() || matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            };
            assert!(!text.trim_end().contains(is_unsafe), "{text:?}");
        }
    }

    /// An output that keeps what is written. Writing waits while its lock is held.
    pub(super) struct SharedOutput(pub(super) Arc<Mutex<Vec<u8>>>);

    impl io::Write for SharedOutput {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn keys_are_masked() {
        assert_eq!(MaskedKey("bob").to_string(), "bob");
        assert_eq!(MaskedKey("sk_live_51H8").to_string(), "sk_l…(12)");
        assert_eq!(MaskedKey("\n\n").to_string(), "\\u{a}\\u{a}");
    }
}
