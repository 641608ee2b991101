//! The fields of lines in text form, so that each value ends where it seems to.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// Writes `message name=value name="a value"`. A value is quoted if it is empty or has spaces, quotes, `=` or control
/// characters. Without quotes, a client's text could look like further fields.
pub(super) struct TextFields;

impl<'w> FormatFields<'w> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut fields_writer = FieldsWriter { writer, separator: "", result: Ok(()) };
        fields.record(&mut fields_writer);
        fields_writer.result
    }
}

struct FieldsWriter<'w> {
    writer: Writer<'w>,
    separator: &'static str,
    result: fmt::Result,
}

impl Visit for FieldsWriter<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let (separator, text) = (std::mem::replace(&mut self.separator, " "), format!("{value:?}"));
        let written = match field.name() {
            "message" => write!(self.writer, "{separator}{text}"),
            name if is_plain(&text) || is_quoted(&text) => write!(self.writer, "{separator}{name}={text}"),
            name => write!(self.writer, "{separator}{name}={}", Quoted(&text)),
        };
        self.result = self.result.and(written);
    }
}

fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(|letter: char| letter.is_whitespace() || letter.is_control() || "\"=".contains(letter))
}

/// True for one string in quotes, with all quotes in it escaped.
fn is_quoted(text: &str) -> bool {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.is_some_and(|inner| Quoted(inner).to_string() == text)
}

/// A text in quotes. Its characters that are escaped already stay as they are.
struct Quoted<'t>(&'t str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        let mut letters = self.0.chars();
        while let Some(letter) = letters.next() {
            match letter {
                '\\' => write!(f, "\\{}", letters.next().filter(|next| !next.is_control()).unwrap_or('\\'))?,
                '"' => f.write_str("\\\"")?,
                control if control.is_control() => write!(f, "{}", control.escape_default())?,
                letter => f.write_char(letter)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tidegate_policy::LogConfig;

    use crate::log::tests::SharedOutput;
    use crate::log::{EscapedText, subscriber};

    /// The fields of a line, read as `name=value` with optional quotes.
    fn parse(line: &str) -> Vec<(String, String)> {
        let (mut fields, mut rest) = (Vec::new(), line);
        while let Some((name, after)) = rest.split_once('=') {
            let name = name.rsplit(' ').next().unwrap().to_owned();
            let end = match after.strip_prefix('"') {
                None => after.find(' ').unwrap_or(after.len()),
                Some(inner) => {
                    let escaped =
                        |at: usize| inner[..at].bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1;
                    inner.match_indices('"').map(|(at, _)| at).find(|at| !escaped(*at)).unwrap() + 2
                }
            };
            fields.push((name, after[..end].to_owned()));
            rest = &after[end..];
        }
        fields
    }

    #[test]
    fn no_value_looks_like_further_fields() {
        let values = [
            "plain",
            "",
            "a b",
            "x level=error",
            "a=b",
            r#"" forged=1 ""#,
            r#"\" forged=1 \"#,
            r"ends\",
            "a\nforged=1",
            "ü漢",
            r#""a" forged=1 "b""#,
        ];
        for value in values {
            let lines = Arc::new(Mutex::new(Vec::new()));
            let writer = Arc::clone(&lines);
            let output = move || SharedOutput(Arc::clone(&writer));
            let dispatch = subscriber(&LogConfig::default(), None, output).unwrap();
            tracing::dispatcher::with_default(&dispatch, || {
                tracing::info!(a = %value, b = value, c = %EscapedText(value), d = 7, e = Some(value), "words");
            });
            let text = String::from_utf8(lines.lock().clone()).unwrap();
            let fields = parse(text.trim_end_matches('\n').split_once("words ").unwrap().1);
            let names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["a", "b", "c", "d", "e"], "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
        }
    }
}
