//! Replies in the Redis protocol, version 2 or 3.

use std::fmt::Display;
use std::io::Write as _;

use serde_json::Value;
use tidegate_policy::printable;

/// The version of the protocol that a connection uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Version {
    #[default]
    Resp2 = 2,
    Resp3 = 3,
}

/// Writes replies. Version 2 has no maps, truth values and fractions: a map is an array of its names and values, true is 1,
/// and a fraction is text.
pub(super) struct ReplyWriter<'o> {
    pub(super) output: &'o mut Vec<u8>,
    pub(super) version: Version,
}

impl ReplyWriter<'_> {
    fn line(&mut self, kind: char, text: impl Display) {
        // A vector takes all that is written.
        let _ = write!(self.output, "{kind}{text}\r\n");
    }

    pub(super) fn simple(&mut self, text: &str) {
        self.line('+', text);
    }

    /// An error: a code in capitals, and a message, which may repeat the request's text.
    pub(super) fn error(&mut self, code: &str, message: &str) {
        self.line('-', format_args!("{code} {}", printable(message)));
    }

    pub(super) fn integer(&mut self, number: impl Display) {
        self.line(':', number);
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.line('$', bytes.len());
        self.output.extend_from_slice(bytes);
        self.output.extend_from_slice(b"\r\n");
    }

    pub(super) fn null(&mut self) {
        let null: &[u8] = if self.version == Version::Resp3 { b"_\r\n" } else { b"$-1\r\n" };
        self.output.extend_from_slice(null);
    }

    pub(super) fn boolean(&mut self, value: bool) {
        match self.version {
            Version::Resp3 => self.line('#', if value { 't' } else { 'f' }),
            Version::Resp2 => self.integer(if value { 1 } else { 0 }),
        }
    }

    /// Begins an array; its items follow.
    pub(super) fn array(&mut self, length: usize) {
        self.line('*', length);
    }

    /// Begins a map; its names and values follow in turns.
    pub(super) fn map(&mut self, length: usize) {
        match self.version {
            Version::Resp3 => self.line('%', length),
            Version::Resp2 => self.array(2 * length),
        }
    }

    /// Writes a value of JSON.
    pub(super) fn json(&mut self, value: &Value) {
        match value {
            Value::Null => self.null(),
            Value::Bool(value) => self.boolean(*value),
            Value::Number(number) if number.is_f64() && self.version == Version::Resp3 => self.line(',', number),
            Value::Number(number) if number.is_f64() => self.bulk(number.to_string().as_bytes()),
            Value::Number(number) => self.integer(number),
            Value::String(text) => self.bulk(text.as_bytes()),
            Value::Array(items) => {
                self.array(items.len());
                items.iter().for_each(|item| self.json(item));
            }
            Value::Object(entries) => {
                self.map(entries.len());
                for (name, value) in entries {
                    self.bulk(name.as_bytes());
                    self.json(value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_have_exact_bytes() {
        let value = json!({ "a": [1, -2, true, null], "b": "x\r\n", "c": 0.5 });
        for (version, expected) in [
            (
                Version::Resp3,
                "%3\r\n$1\r\na\r\n*4\r\n:1\r\n:-2\r\n#t\r\n_\r\n$1\r\nb\r\n$3\r\nx\r\n\r\n$1\r\nc\r\n,0.5\r\n",
            ),
            (
                Version::Resp2,
                "*6\r\n$1\r\na\r\n*4\r\n:1\r\n:-2\r\n:1\r\n$-1\r\n$1\r\nb\r\n$3\r\nx\r\n\r\n$1\r\nc\r\n$3\r\n0.5\r\n",
            ),
        ] {
            let mut output = Vec::new();
            ReplyWriter { output: &mut output, version }.json(&value);
            assert_eq!(String::from_utf8(output).unwrap(), expected, "{version:?}");
        }
        let mut output = Vec::new();
        ReplyWriter { output: &mut output, version: Version::Resp2 }.error("ERR", "a\r\nb");
        assert!(output.starts_with(b"-ERR a") && output.iter().filter(|byte| **byte == b'\n').count() == 1);
    }
}
