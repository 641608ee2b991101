//! The current secrets of a provider's credentials.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tidegate_core::{Span, Time};
use tidegate_policy::outbound::ProviderConfig;
use tidegate_policy::{Secret, SecretError, SecretSource};
use tidegate_runtime::file_watcher::FileStamp;

use super::{Target, TargetError};

/// The interval of the checks of a token file, while there are calls.
const CHECK_INTERVAL: Span = Span::from_secs(1);
/// The longest wait of the checking call for a slow file system. After it, the call uses the known secret.
const CHECK_TIMEOUT: Duration = Duration::from_millis(250);

/// The secrets of a provider's credentials, in the order of its list. Cheap to clone; all clones share one state.
///
/// Secrets from files follow their files. One call checks a file, at most once a second, on tokio's threads for
/// blocking work. The file is read again if its length or modification time differs from the last read. If the file is
/// missing, empty or not sendable, the secret stays as it was, the log has a warning, and every check tries again.
#[derive(Clone)]
pub(crate) struct Credentials(Arc<[Arc<CredentialSlot>]>);

struct CredentialSlot {
    source: SecretSource,
    target: Option<Target>,
    secret: RwLock<Arc<Secret>>,
    /// Microseconds since the Unix epoch.
    checked_at: AtomicU64,
    file_state: Mutex<TokenFileState>,
}

/// The known state of a token file.
struct TokenFileState {
    /// The stamp of the last successful read.
    read_stamp: Option<FileStamp>,
    /// The stamp of the last warning. Each unusable stamp is logged once.
    warned_stamp: Option<Option<FileStamp>>,
}

/// The reason that a credential can't be used. Never contains the secret.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// The credential is missing or can't be read.
    #[error(transparent)]
    Missing(#[from] SecretError),
    /// The credential can't be sent.
    #[error("the token from {origin} can't be used: {reason}")]
    Unusable {
        /// The variable or file, as the policy writes it.
        origin: String,
        /// The reason.
        reason: TargetError,
    },
}

/// The message, so that `fn main() -> Result<…>` shows it.
impl fmt::Debug for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Credentials {
    /// Reads the secrets of a provider. `env` looks up an environment variable.
    ///
    /// # Errors
    /// The first secret that can't be read, or can't be sent in the form that the provider needs.
    pub(crate) fn from_provider(
        provider: &ProviderConfig,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let target = provider.login.is_none().then(|| Target::from_provider(provider));
        Self::resolve(&provider.credentials, target.as_ref(), env)
    }

    /// Reads secrets, which must be usable for `target`, if there is one.
    pub(crate) fn resolve(
        sources: &[SecretSource],
        target: Option<&Target>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let slot = |source: &SecretSource| CredentialSlot::resolve(source.clone(), target.cloned(), &env).map(Arc::new);
        Ok(Self(sources.iter().map(slot).collect::<Result<_, _>>()?))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The secret at this index in the list. `None` if there is none, so that the call is anonymous.
    pub(crate) async fn current(&self, credential: usize, now: Time) -> Option<Arc<Secret>> {
        let slot = self.0.get(credential)?;
        if slot.is_due(now) {
            let checked_slot = Arc::clone(slot);
            let check_task = tokio::task::spawn_blocking(move || checked_slot.reload_if_changed());
            // After the timeout, the check continues and serves later calls.
            let _ = tokio::time::timeout(CHECK_TIMEOUT, check_task).await;
        }
        Some(Arc::clone(&slot.secret.read()))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|slot| &slot.source)).finish()
    }
}

impl CredentialSlot {
    fn resolve(
        source: SecretSource,
        target: Option<Target>,
        env: impl FnOnce(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        // The stamp is taken before the read, so that the next check finds a change in between.
        let initial_stamp = file_path(&source).and_then(FileStamp::read);
        let secret = fetch_secret(&source, target.as_ref(), env)?;
        Ok(Self {
            source,
            target,
            secret: RwLock::new(Arc::new(secret)),
            checked_at: AtomicU64::new(0),
            file_state: Mutex::new(TokenFileState { read_stamp: initial_stamp, warned_stamp: None }),
        })
    }

    /// True if a check of the file is due. Only one caller gets true.
    fn is_due(&self, now: Time) -> bool {
        if file_path(&self.source).is_none() {
            return false;
        }
        let last = self.checked_at.load(Ordering::Relaxed);
        // A check is due after a step back of the clock too, not only once the clock has caught up.
        let due = now.as_micros().abs_diff(last) >= CHECK_INTERVAL.as_micros();
        due && self.checked_at.compare_exchange(last, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn reload_if_changed(&self) {
        let Some(path) = file_path(&self.source) else { return };
        let mut file_state = self.file_state.lock();
        let current_stamp = FileStamp::read(path);
        if file_state.read_stamp == current_stamp {
            return;
        }
        match fetch_secret(&self.source, self.target.as_ref(), |_| None) {
            Ok(secret) => {
                *self.secret.write() = Arc::new(secret);
                *file_state = TokenFileState { read_stamp: current_stamp, warned_stamp: None };
            }
            Err(error) => {
                if file_state.warned_stamp.replace(current_stamp) != Some(current_stamp) {
                    tracing::warn!(%error, "a token file was changed, but the token stays as it was");
                }
            }
        }
    }
}

fn fetch_secret(
    source: &SecretSource,
    target: Option<&Target>,
    env: impl FnOnce(&str) -> Option<String>,
) -> Result<Secret, CredentialError> {
    let secret = source.resolve(env)?;
    match target.map_or(Ok(()), |target| target.check_credential(&secret)) {
        Ok(()) => Ok(secret),
        Err(reason) => Err(CredentialError::Unusable { origin: source.to_string(), reason }),
    }
}

fn file_path(source: &SecretSource) -> Option<&Path> {
    match source {
        SecretSource::File(path) => Some(path),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use tidegate_policy::outbound::Auth;

    const NOW: Time = Time::from_secs(1_767_225_600);

    async fn secret_text(credentials: &Credentials, index: usize, now: Time) -> String {
        credentials.current(index, now).await.unwrap().expose().to_owned()
    }

    #[tokio::test]
    async fn changes_of_a_credential_file_are_followed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "first\n").unwrap();
        let sources = [SecretSource::Env("TOKEN".to_owned()), SecretSource::File(file.path().to_owned())];
        let bearer = Target::new(None, Auth::Bearer, None);
        let credentials = Credentials::resolve(&sources, Some(&bearer), |name| Some(name.to_lowercase())).unwrap();
        assert_eq!(credentials.len(), 2);
        assert_eq!(secret_text(&credentials, 0, NOW).await, "token");
        assert_eq!(secret_text(&credentials, 1, NOW).await, "first");
        std::fs::write(&file, "second token").unwrap();
        assert_eq!(
            secret_text(&credentials, 1, NOW + Span::from_millis(999)).await,
            "first",
            "looked at less than 1 s ago"
        );
        let mut now = NOW + Span::from_secs(1);
        assert_eq!(secret_text(&credentials, 1, now).await, "second token");
        for unusable in ["", "two\nlines"] {
            std::fs::write(&file, unusable).unwrap();
            now = now + Span::from_secs(1);
            assert_eq!(secret_text(&credentials, 1, now).await, "second token", "{unusable:?} is no token");
        }
        std::fs::remove_file(&file).unwrap();
        now = now + Span::from_secs(1);
        assert_eq!(secret_text(&credentials, 1, now).await, "second token");
        std::fs::write(&file, "third").unwrap();
        assert_eq!(secret_text(&credentials, 1, NOW).await, "third", "a clock that stepped back by some seconds");
        assert!(credentials.current(2, now).await.is_none());
    }

    #[tokio::test]
    async fn a_failed_read_is_repeated_despite_unchanged_metadata() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "first").unwrap();
        let source = [SecretSource::File(file.path().to_owned())];
        let credentials = Credentials::resolve(&source, None, |_| None).unwrap();
        assert_eq!(secret_text(&credentials, 0, NOW).await, "first");
        let same = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let write = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            file.as_file().set_modified(same).unwrap();
        };
        write(b"\xff\xfe\xfd\xfc\xfb\xfa");
        assert_eq!(secret_text(&credentials, 0, NOW + Span::from_secs(1)).await, "first", "that is no text");
        write(b"second");
        assert_eq!(secret_text(&credentials, 0, NOW + Span::from_secs(2)).await, "second");
    }

    #[test]
    fn unusable_credentials_are_reported_at_startup() {
        let env = [SecretSource::Env("TOKEN".to_owned())];
        let bearer = Target::new(None, Auth::Bearer, None);
        let missing = Credentials::resolve(&env, Some(&bearer), |_| None).unwrap_err();
        assert!(matches!(missing, CredentialError::Missing(SecretError::NotSet { .. })));
        let planted = "pl4nted\ns3cr3t";
        let unusable = Credentials::resolve(&env, Some(&bearer), |_| Some(planted.to_owned())).unwrap_err();
        assert_eq!(
            unusable,
            CredentialError::Unusable { origin: "env:TOKEN".to_owned(), reason: TargetError::UnusableCredential }
        );
        let good = Credentials::resolve(&env, Some(&bearer), |_| Some("pl4nted-s3cr3t".to_owned())).unwrap();
        for text in [format!("{unusable} {unusable:?}"), format!("{good:?}")] {
            assert!(!text.contains("s3cr3t"), "{text}");
            assert!(text.contains("TOKEN"), "{text}");
        }
    }
}
