//! Values that are never printed, and their sources.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use percent_encoding::percent_decode;
use subtle::ConstantTimeEq as _;

use crate::path::decode_all_escapes;
use crate::read_regular_file;

/// The longest token file, in bytes.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// A value that is never printed: `Debug` and `Display` show `…` in its place.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The length of the shortest secret that is found in other texts. A shorter one is public, like the `2` of a free tier, and
    /// occurs in harmless texts by accident.
    pub const MIN_FOUND_LENGTH: usize = 8;

    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, to compare and send, but never to print.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns true if `other` is the same value. The time of the comparison reveals only whether the lengths are
    /// equal.
    pub fn matches(&self, other: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(other).into()
    }

    /// Returns true if a text contains the value, also percent-encoded any number of times, with the escapes `\/` and
    /// `\uXXXX` of JSON, or without the padding of Base64. The time of the search reveals parts of it.
    pub fn is_in(&self, text: &[u8]) -> bool {
        let unpadded = self.0.trim_end_matches('=').as_bytes();
        let value = if unpadded.len() < Self::MIN_FOUND_LENGTH { self.0.as_bytes() } else { unpadded };
        // The first byte alone makes it four times as fast.
        let holds = |text: &[u8]| text.windows(value.len()).any(|found| found[0] == value[0] && found == value);
        let is_long = (Self::MIN_FOUND_LENGTH..=text.len()).contains(&value.len());
        let is_escaped = |text: &[u8]| text.iter().any(|byte| matches!(byte, b'%' | b'\\'));
        // Decoded once as well: a value may look encoded itself.
        is_long
            && (holds(text)
                || is_escaped(text) && {
                    let once = Cow::from(percent_decode(text));
                    holds(&once) || is_escaped(&once) && holds(&decode_all_escapes(&without_backslashes(&once)))
                })
    }
}

/// A text with `%u` for the `\u` of JSON, and `/` for its `\/`.
fn without_backslashes(text: &[u8]) -> Vec<u8> {
    let replaced = text.iter().enumerate().filter_map(|(at, byte)| match (byte, text.get(at + 1)) {
        (b'\\', Some(b'u')) => Some(b'%'),
        (b'\\', Some(b'/')) => None,
        _ => Some(*byte),
    });
    replaced.collect()
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The source of a secret. A policy file never holds the secret itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// `env:NAME`: an environment variable.
    Env(String),
    /// `env:NAME[2]`: one item of an environment variable that holds several, separated by commas.
    EnvItem {
        /// The variable.
        name: String,
        /// The number of the item, counted from 1.
        index: usize,
    },
    /// `file:PATH`: the content of a file, without surrounding white space.
    File(PathBuf),
}

impl SecretSource {
    /// Parses the text after `env:`: a variable's name, with an optional item number in brackets.
    pub(crate) fn from_variable(text: &str) -> Option<Self> {
        let (name, index) = match text.strip_suffix(']') {
            Some(inside) => {
                let (name, index) = inside.split_once('[')?;
                let is_number = index.bytes().all(|byte| byte.is_ascii_digit());
                (name, Some(index.parse().ok().filter(|index| is_number && *index > 0)?))
            }
            None => (text, None),
        };
        let fits = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !fits || name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
            return None;
        }
        let name = name.to_owned();
        Some(index.map_or_else(|| Self::Env(name.clone()), |index| Self::EnvItem { name: name.clone(), index }))
    }

    /// Fetches the secret; `env` looks up an environment variable.
    ///
    /// # Errors
    /// The variable isn't set or has fewer items, the file can't be read or is longer than 64 KiB, or the secret is
    /// empty.
    pub fn resolve(&self, env: impl FnOnce(&str) -> Option<String>) -> Result<Secret, SecretError> {
        let text = match self {
            Self::Env(name) => env(name).ok_or_else(|| SecretError::NotSet { name: name.clone() })?,
            Self::EnvItem { name, index } => {
                let list = env(name).ok_or_else(|| SecretError::NotSet { name: name.clone() })?;
                list.split(',').nth(index - 1).unwrap_or_default().to_owned()
            }
            Self::File(path) => {
                let unreadable = |why: String| SecretError::Unreadable { path: path.clone(), why };
                let bytes = read_regular_file(path, MAX_TOKEN_BYTES).map_err(|error| unreadable(error.to_string()))?;
                String::from_utf8(bytes).map_err(|_| unreadable("it isn't UTF-8".to_owned()))?
            }
        };
        match text.trim() {
            "" => Err(SecretError::Empty { origin: self.to_string() }),
            token => Ok(Secret::new(token)),
        }
    }
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::EnvItem { name, index } => write!(f, "env:{name}[{index}]"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// The reason that a secret is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The environment variable isn't set.
    #[error("the environment variable {name}, which should hold the secret, isn't set")]
    NotSet {
        /// The variable.
        name: String,
    },
    /// The file can't be read.
    #[error("the secret file {} can't be read: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system, or that the file is too long.
        why: String,
    },
    /// The secret is empty.
    #[error("the secret from {origin} is empty")]
    Empty {
        /// The variable or file, as the policy writes it.
        origin: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_never_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret} {secret:?}"), "… Secret(…)");
    }

    #[test]
    fn a_secret_matches_only_itself() {
        let secret = Secret::new("hunter2");
        assert!(secret.matches(b"hunter2"));
        for other in [&b"hunter"[..], b"hunter22", b"", b"hunter3", b"hunter2hunter2"] {
            assert!(!secret.matches(other));
        }
        assert!(!Secret::new("").matches(b"x"));
    }

    #[test]
    fn a_secret_is_found_in_other_spellings() {
        let secret = Secret::new("s3cr3t+T0ken/abc==");
        for text in [
            "k=s3cr3t+T0ken/abc==",
            "s3cr3t%2bT0ken%2Fabc%3D%3D",
            "/login?next=%2Fx%3Fk%3Ds3cr3t%252BT0ken%252Fabc%253D%253D",
            "%2525252573%2533cr3t%2BT0ken/abc%25253D=",
            "k=s3cr3t+T0ken/abc",
            r#"{"k":"s3cr3t\u002bT0ken\/abc\u003d="}"#,
        ] {
            assert!(secret.is_in(text.as_bytes()), "{text}");
        }
        assert!(!secret.is_in(b"s3cr3t%2") && !secret.is_in(b"s3cr3t%252BT0ken/ab"));
        assert!(Secret::new("a%2541b%41c").is_in(b"a%252541b%2541c"), "a secret may look encoded itself");
        assert!(Secret::new("abcdef==").is_in(b"abcdef==") && !Secret::new("abcdef==").is_in(b"abcdef"));
    }

    #[test]
    fn secrets_come_from_environment_or_file() {
        let source = SecretSource::Env("TOKEN".into());
        assert_eq!(source.resolve(|name| Some(format!(" {name}\n"))).unwrap().expose(), "TOKEN");
        assert_eq!(source.resolve(|_| None), Err(SecretError::NotSet { name: "TOKEN".into() }));
        let item = SecretSource::from_variable("TOKENS[2]").unwrap();
        assert_eq!(item.to_string(), "env:TOKENS[2]");
        assert_eq!(item.resolve(|_| Some("a, b ,c".into())).unwrap().expose(), "b");
        assert!(matches!(item.resolve(|_| Some("a".into())), Err(SecretError::Empty { .. })));
        assert!(matches!(item.resolve(|_| None), Err(SecretError::NotSet { .. })));
        for text in ["", "1A", "A B", "A[]", "A[0]", "A[+1]", "[1]", "A[1", "A]", "A[1]x"] {
            assert_eq!(SecretSource::from_variable(text), None, "{text}");
        }
        assert!(matches!(source.resolve(|_| Some(" ".into())), Err(SecretError::Empty { .. })));
        let missing = SecretSource::File("/nowhere/at/all".into());
        assert!(matches!(missing.resolve(|_| None), Err(SecretError::Unreadable { .. })));
    }
}
