//! Values that are never printed, and where they come from.

use std::fmt;
use std::path::PathBuf;

/// The longest token file that is read.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// A value that is never printed: `Debug` and `Display` show `…` in its place.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, for comparing and sending, never for printing.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether `other` is the same value, in a time that depends on its length alone.
    pub fn matches(&self, other: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let mut differ = own.len() ^ other.len();
        for (index, byte) in other.iter().enumerate() {
            differ |= usize::from(byte ^ own.get(index % own.len().max(1)).copied().unwrap_or(0));
        }
        std::hint::black_box(differ) == 0
    }
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

/// Where a secret comes from; a policy file never holds the secret itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// `env:NAME`: an environment variable.
    Env(String),
    /// `file:PATH`: a file's content without surrounding white space.
    File(PathBuf),
}

impl TokenSource {
    /// Fetches the secret; `env` looks an environment variable up.
    ///
    /// # Errors
    /// The variable isn't set, the file can't be read or is over 64 KiB, or what was found is empty.
    pub fn resolve(&self, env: impl FnOnce(&str) -> Option<String>) -> Result<Secret, TokenError> {
        let text = match self {
            Self::Env(name) => env(name).ok_or_else(|| TokenError::NotSet { name: name.clone() })?,
            Self::File(path) => {
                let unreadable = |why: String| TokenError::Unreadable { path: path.clone(), why };
                let size = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?.len();
                if size > MAX_TOKEN_BYTES {
                    return Err(unreadable(format!("it has {size} bytes; a token has at most {MAX_TOKEN_BYTES}")));
                }
                std::fs::read_to_string(path).map_err(|error| unreadable(error.to_string()))?
            }
        };
        match text.trim() {
            "" => Err(TokenError::Empty { origin: self.to_string() }),
            token => Ok(Secret::new(token)),
        }
    }
}

impl fmt::Display for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// Why a secret couldn't be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The environment variable isn't set.
    #[error("the environment variable {name}, which should hold the token, isn't set")]
    NotSet {
        /// The variable.
        name: String,
    },
    /// The file can't be read.
    #[error("the token file {} can't be read: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// There is nothing in it.
    #[error("the token from {origin} is empty")]
    Empty {
        /// The variable or file, as the policy writes it.
        origin: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret} {secret:?}"), "… Secret(…)");
    }

    #[test]
    fn matches_only_itself() {
        let secret = Secret::new("hunter2");
        assert!(secret.matches(b"hunter2"));
        for other in [&b"hunter"[..], b"hunter22", b"", b"hunter3", b"hunter2hunter2"] {
            assert!(!secret.matches(other));
        }
        assert!(!Secret::new("").matches(b"x"));
    }

    #[test]
    fn from_the_environment_or_a_file() {
        let source = TokenSource::Env("TOKEN".into());
        assert_eq!(source.resolve(|name| Some(format!(" {name}\n"))).unwrap().expose(), "TOKEN");
        assert_eq!(source.resolve(|_| None), Err(TokenError::NotSet { name: "TOKEN".into() }));
        assert!(matches!(source.resolve(|_| Some(" ".into())), Err(TokenError::Empty { .. })));
        let missing = TokenSource::File("/nowhere/at/all".into());
        assert!(matches!(missing.resolve(|_| None), Err(TokenError::Unreadable { .. })));
    }
}
