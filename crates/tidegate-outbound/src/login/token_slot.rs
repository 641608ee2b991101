//! The token of one credential, for which there is one login at a time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tidegate_core::retry::TransportFault;
use tidegate_core::{Span, Time};
use tidegate_policy::Secret;

use super::LoginError;

/// The shortest time between logins after one failed or its token was rejected. Providers lock accounts that log in too
/// often.
const MIN_RETRY_INTERVAL: Span = Span::from_secs(5);
/// The longest time that a call waits for an early renewal before it continues with the token that is still valid.
const EARLY_REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// A token and its validity.
#[derive(Clone, Debug)]
pub(crate) struct LoginToken {
    secret: Arc<Secret>,
    /// The credential that the token was issued for. The slot's credential may have changed since.
    credential: Secret,
    /// The number of the login that gave it, which distinguishes a rejected token from its successor.
    pub(super) login_number: u64,
    /// The time when it replaced a rejected token; `None` if it didn't.
    replaced_at: Option<Time>,
    refresh_at: Time,
    expires_at: Time,
}

impl LoginToken {
    /// The secret that is sent in the credential's place.
    pub(crate) fn secret(&self) -> &Arc<Secret> {
        &self.secret
    }
}

/// The token that a login gave.
pub(super) struct NewToken {
    pub secret: Secret,
    pub credential: Secret,
    pub refresh_at: Time,
    pub expires_at: Time,
    /// True if it replaces a rejected token.
    pub replaces_rejected: bool,
}

/// The login state of one credential.
#[derive(Default)]
pub(super) struct TokenSlot {
    login_lock: tokio::sync::Mutex<()>,
    state: Mutex<TokenState>,
}

#[derive(Default)]
struct TokenState {
    token: Option<LoginToken>,
    last_failure: Option<(LoginError, Time)>,
    /// The number of logins that have finished.
    finished_logins: u64,
}

impl TokenSlot {
    /// Returns the token. Uses this login if there is no valid token, or if renewal is due and no other call renews it.
    pub(super) async fn token(
        &self,
        credential: &Secret,
        now: Time,
        login: impl Future<Output = Result<NewToken, LoginError>>,
    ) -> Result<LoginToken, LoginError> {
        let is_by = |token: &LoginToken| token.credential.matches(credential.expose().as_bytes());
        let usable_token =
            |state: &TokenState| state.token.clone().filter(|token| now < token.expires_at && is_by(token));
        let Some(token) = usable_token(&self.state()) else {
            return self.wait_or_log_in(now, usable_token, login).await;
        };
        if now < token.refresh_at {
            return Ok(token);
        }
        let Ok(_turn) = self.login_lock.try_lock() else { return Ok(token) };
        {
            // Another call's login may have ended between the first check and the lock.
            let state = self.state();
            let renewed = usable_token(&state).filter(|found| found.login_number > token.login_number);
            if renewed.is_some() || state.recent_failure(now).is_some() {
                return Ok(renewed.unwrap_or(token));
            }
        }
        let login_result = tokio::time::timeout(EARLY_REFRESH_TIMEOUT, login).await;
        match self.record_login(login_result.unwrap_or(Err(LoginError::NoReply(TransportFault::TimedOut))), now) {
            Ok(next) => Ok(next),
            Err(error) => {
                tracing::warn!(%error, "a login ahead of time failed; the token is still good");
                Ok(token)
            }
        }
    }

    /// Returns the token that replaces a rejected one, by this login unless another call has already renewed it. If the
    /// rejected token itself has just replaced another one, logins don't help.
    pub(super) async fn renew(
        &self,
        rejected: &LoginToken,
        now: Time,
        login: impl Future<Output = Result<NewToken, LoginError>>,
    ) -> Result<LoginToken, LoginError> {
        let usable_token =
            |state: &TokenState| state.token.clone().filter(|token| token.login_number > rejected.login_number);
        if usable_token(&self.state()).is_none()
            && rejected.replaced_at.is_some_and(|at| now.since(at) < MIN_RETRY_INTERVAL)
        {
            return Err(LoginError::TokenRejected);
        }
        self.wait_or_log_in(now, usable_token, async { Ok(NewToken { replaces_rejected: true, ..login.await? }) }).await
    }

    /// Waits for the login that is under way, or performs this one.
    async fn wait_or_log_in(
        &self,
        now: Time,
        usable_token: impl Fn(&TokenState) -> Option<LoginToken>,
        login: impl Future<Output = Result<NewToken, LoginError>>,
    ) -> Result<LoginToken, LoginError> {
        let finished_before = self.state().finished_logins;
        let _turn = self.login_lock.lock().await;
        {
            let state = self.state();
            if let Some(token) = usable_token(&state) {
                return Ok(token);
            }
            let shared =
                state.last_failure.as_ref().filter(|_| state.finished_logins > finished_before).map(|(error, _)| error);
            if let Some(error) = shared.or(state.recent_failure(now)) {
                return Err(error.clone());
            }
        }
        self.record_login(login.await, now)
    }

    /// Records the result of a login.
    fn record_login(&self, result: Result<NewToken, LoginError>, now: Time) -> Result<LoginToken, LoginError> {
        let mut state = self.state();
        state.finished_logins += 1;
        match result {
            Ok(NewToken { secret, credential: by, refresh_at, expires_at, replaces_rejected: replaces }) => {
                let (secret, replaced_at) = (Arc::new(secret), replaces.then_some(now));
                let token = LoginToken {
                    secret,
                    credential: by,
                    login_number: state.finished_logins,
                    replaced_at,
                    refresh_at,
                    expires_at,
                };
                state.last_failure = None;
                Ok(state.token.insert(token).clone())
            }
            Err(error) => {
                state.last_failure = Some((error.clone(), now));
                Err(error)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, TokenState> {
        self.state.lock()
    }
}

impl TokenState {
    /// The error of a login that failed too recently to be repeated.
    fn recent_failure(&self, now: Time) -> Option<&LoginError> {
        let (error, at) = self.last_failure.as_ref()?;
        (now.since(*at) < MIN_RETRY_INTERVAL).then_some(error)
    }
}
