//! The secrets of a provider's credentials, as they stand now.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use tidegate_core::{Span, Time};
use tidegate_policy::outbound::ProviderConfig;
use tidegate_policy::{Secret, SecretError, SecretSource};

use super::{Target, TargetError};

/// How often a token file is looked at, while there are calls.
const LOOKED_AT_EVERY: Span = Span::from_secs(1);
/// How long the call that has it looked at waits for a slow file system, before it goes with what is known.
const PATIENCE: Duration = Duration::from_millis(250);

/// The secrets of a provider's credentials, in the order of its list. Cheap to clone; clones are the same.
///
/// Those from files follow them: a file is looked at once a second at most, by one call, on tokio's threads for
/// blocking work, and read again if its length or its time of change differs from when it was last read. A file that is
/// gone, empty or holds what can't be sent leaves the secret as it was, with a warning in the log, and is tried again with
/// every look.
#[derive(Clone)]
pub struct Credentials(Arc<[Arc<Slot>]>);

struct Slot {
    source: SecretSource,
    target: Option<Target>,
    secret: RwLock<Arc<Secret>>,
    /// In microseconds since the Unix epoch.
    looked_at: AtomicU64,
    seen: Mutex<Seen>,
}

/// What is known of a token file.
struct Seen {
    /// As it was read.
    read: Option<Stamp>,
    /// As the log was told that it can't be used: once is enough.
    warned: Option<Option<Stamp>>,
}

/// By what it shows that a file was changed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: Option<SystemTime>,
}

/// Why a credential can't be used. Never tells what it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// It can't be had.
    #[error(transparent)]
    Missing(#[from] SecretError),
    /// It can't be sent.
    #[error("the token from {origin} can't be used: {why}")]
    Unfit {
        /// The variable or file, as the policy writes it.
        origin: String,
        /// Why not.
        why: TargetError,
    },
}

impl Credentials {
    /// Fetches the secrets of a provider; `env` looks an environment variable up.
    ///
    /// # Errors
    /// The first that can't be had, or can't be sent where the provider wants it.
    pub fn of(provider: &ProviderConfig, env: impl Fn(&str) -> Option<String>) -> Result<Self, CredentialError> {
        let target = provider.login.is_none().then(|| Target::of(provider));
        Self::resolve(&provider.credentials, target.as_ref(), env)
    }

    /// Fetches secrets that must be fit for `target`, if there is one.
    ///
    /// # Errors
    /// As [`of`](Self::of) has them.
    pub fn resolve(
        sources: &[SecretSource],
        target: Option<&Target>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let slot = |source: &SecretSource| Slot::resolve(source.clone(), target.cloned(), &env).map(Arc::new);
        Ok(Self(sources.iter().map(slot).collect::<Result<_, _>>()?))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none, so that calls are anonymous.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The secret at a place in the list; `None` if there is none, so that the call is anonymous.
    pub async fn current(&self, credential: usize, now: Time) -> Option<Arc<Secret>> {
        let slot = self.0.get(credential)?;
        if slot.is_due(now) {
            let looking = Arc::clone(slot);
            let look = tokio::task::spawn_blocking(move || looking.look());
            // Out of patience, the look goes on and serves later calls.
            let _ = tokio::time::timeout(PATIENCE, look).await;
        }
        Some(slot.secret())
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|slot| &slot.source)).finish()
    }
}

impl Slot {
    fn resolve(
        source: SecretSource,
        target: Option<Target>,
        env: impl FnOnce(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        // Looked at before it is read, so that a change in between is found by the next look.
        let read = path_of(&source).and_then(stamp);
        let secret = fetch(&source, target.as_ref(), env)?;
        Ok(Self {
            source,
            target,
            secret: RwLock::new(Arc::new(secret)),
            looked_at: AtomicU64::new(0),
            seen: Mutex::new(Seen { read, warned: None }),
        })
    }

    fn secret(&self) -> Arc<Secret> {
        Arc::clone(&self.secret.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it is time to look at the file; true for one caller only.
    fn is_due(&self, now: Time) -> bool {
        if path_of(&self.source).is_none() {
            return false;
        }
        let last = self.looked_at.load(Ordering::Relaxed);
        // A clock that stepped back must not leave the file unseen until it catches up.
        let due = now.as_micros().abs_diff(last) >= LOOKED_AT_EVERY.as_micros();
        due && self.looked_at.compare_exchange(last, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn look(&self) {
        let Some(path) = path_of(&self.source) else { return };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let found = stamp(path);
        if seen.read == found {
            return;
        }
        match fetch(&self.source, self.target.as_ref(), |_| None) {
            Ok(secret) => {
                *self.secret.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(secret);
                *seen = Seen { read: found, warned: None };
            }
            Err(error) => {
                if seen.warned.replace(found) != Some(found) {
                    tracing::warn!(%error, "a token file was changed, but the token stays as it was");
                }
            }
        }
    }
}

fn fetch(
    source: &SecretSource,
    target: Option<&Target>,
    env: impl FnOnce(&str) -> Option<String>,
) -> Result<Secret, CredentialError> {
    let secret = source.resolve(env)?;
    target
        .map_or(Ok(()), |target| target.accepts(&secret))
        .map_err(|why| CredentialError::Unfit { origin: source.to_string(), why })?;
    Ok(secret)
}

fn path_of(source: &SecretSource) -> Option<&Path> {
    match source {
        SecretSource::File(path) => Some(path),
        _ => None,
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok()?;
    Some(Stamp { length: metadata.len(), modified: metadata.modified().ok() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_policy::outbound::Auth;

    const NOW: Time = Time::from_secs(1_767_225_600);

    async fn told(credentials: &Credentials, index: usize, now: Time) -> String {
        credentials.current(index, now).await.unwrap().expose().to_owned()
    }

    #[tokio::test]
    async fn a_file_is_followed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "first\n").unwrap();
        let sources = [SecretSource::Env("TOKEN".to_owned()), SecretSource::File(file.path().to_owned())];
        let bearer = Target::new(None, Auth::Bearer, None);
        let credentials = Credentials::resolve(&sources, Some(&bearer), |name| Some(name.to_lowercase())).unwrap();
        assert_eq!(credentials.len(), 2);
        assert_eq!(told(&credentials, 0, NOW).await, "token");
        assert_eq!(told(&credentials, 1, NOW).await, "first");
        std::fs::write(&file, "second token").unwrap();
        assert_eq!(told(&credentials, 1, NOW + Span::from_millis(999)).await, "first", "looked at less than 1 s ago");
        let mut now = NOW + Span::from_secs(1);
        assert_eq!(told(&credentials, 1, now).await, "second token");
        for unfit in ["", "two\nlines"] {
            std::fs::write(&file, unfit).unwrap();
            now = now + Span::from_secs(1);
            assert_eq!(told(&credentials, 1, now).await, "second token", "{unfit:?} is no token");
        }
        std::fs::remove_file(&file).unwrap();
        now = now + Span::from_secs(1);
        assert_eq!(told(&credentials, 1, now).await, "second token");
        std::fs::write(&file, "third").unwrap();
        assert_eq!(told(&credentials, 1, NOW).await, "third", "a clock that stepped back by some seconds");
        assert!(credentials.current(2, now).await.is_none());
    }

    #[tokio::test]
    async fn a_file_that_could_not_be_read_is_read_later_even_if_it_looks_the_same() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "first").unwrap();
        let source = [SecretSource::File(file.path().to_owned())];
        let credentials = Credentials::resolve(&source, None, |_| None).unwrap();
        assert_eq!(told(&credentials, 0, NOW).await, "first");
        let same = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let write = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            file.as_file().set_modified(same).unwrap();
        };
        write(b"\xff\xfe\xfd\xfc\xfb\xfa");
        assert_eq!(told(&credentials, 0, NOW + Span::from_secs(1)).await, "first", "that is no text");
        write(b"second");
        assert_eq!(told(&credentials, 0, NOW + Span::from_secs(2)).await, "second");
    }

    #[test]
    fn what_cannot_be_used_is_told_at_the_start() {
        let env = [SecretSource::Env("TOKEN".to_owned())];
        let bearer = Target::new(None, Auth::Bearer, None);
        let missing = Credentials::resolve(&env, Some(&bearer), |_| None).unwrap_err();
        assert!(matches!(missing, CredentialError::Missing(SecretError::NotSet { .. })));
        let planted = "pl4nted\ns3cr3t";
        let unfit = Credentials::resolve(&env, Some(&bearer), |_| Some(planted.to_owned())).unwrap_err();
        assert_eq!(unfit, CredentialError::Unfit { origin: "env:TOKEN".to_owned(), why: TargetError::UnfitCredential });
        let good = Credentials::resolve(&env, Some(&bearer), |_| Some("pl4nted-s3cr3t".to_owned())).unwrap();
        for text in [format!("{unfit} {unfit:?}"), format!("{good:?}")] {
            assert!(!text.contains("s3cr3t"), "{text}");
            assert!(text.contains("TOKEN"), "{text}");
        }
    }
}
