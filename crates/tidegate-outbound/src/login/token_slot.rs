//! The token of one credential, for which there is one login at a time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::{Delivery, TransportFault};
use tidegate_core::{Class, Scope, Span, Time, Verdict};
use tidegate_policy::Secret;

use super::LoginError;

/// The shortest time between logins after one failed or its token was rejected. Providers lock accounts that log in too
/// often.
const MIN_LOGIN_INTERVAL: Span = Span::from_secs(5);
/// The longest time that a call waits for an early renewal before it continues with the token that is still valid.
const EARLY_REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// A token and its validity.
#[derive(Clone, Debug)]
pub(crate) struct LoginToken {
    /// The secret that is sent in the credential's place.
    pub secret: Arc<Secret>,
    /// The credential that the token was issued for. The slot's credential may have changed since.
    pub(super) credential: Secret,
    /// The number of the login that gave it, which distinguishes a rejected token from its successor. 0 until the login
    /// is recorded.
    pub(super) login_number: u64,
    /// The time when it replaced a rejected token; `None` if it didn't.
    pub(super) replaced_at: Option<Time>,
    pub(super) refresh_at: Time,
    pub(super) expires_at: Time,
}

/// A login without a token, and the time of the next one.
#[derive(Clone, Debug)]
pub(crate) struct LoginFailure {
    pub error: LoginError,
    /// The time before which there is no other login.
    pub next_login_at: Time,
}

impl LoginFailure {
    fn new(error: LoginError, failed_at: Time) -> Self {
        let interval = match error {
            LoginError::Refused { retry_after: Some(asked), .. } => MIN_LOGIN_INTERVAL.max(asked),
            _ => MIN_LOGIN_INTERVAL,
        };
        Self { error, next_login_at: failed_at + interval }
    }

    /// The report for the attempt that needed the token. Nothing of its request was sent. Another attempt waits for the
    /// next login.
    pub(crate) fn attempt_report(&self, now: Time) -> AttemptReport {
        let class = self.error.class();
        let verdict = Verdict {
            wait: class.is_retryable().then(|| self.next_login_at.since(now)),
            scope: Scope::Credential,
            rejects_credential: class == Class::Auth,
            ..Verdict::new(class)
        };
        AttemptReport { is_repeatable: true, ..AttemptReport::from_verdict(verdict, Delivery::Unsent) }
    }
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
    last_failure: Option<LoginFailure>,
    /// The number of logins that have finished.
    finished_logins: u64,
}

impl TokenSlot {
    /// Returns the token. Uses this login if there is no valid token, or if renewal is due and no other call renews it.
    pub(super) async fn token(
        &self,
        credential: &Secret,
        now: Time,
        login: impl Future<Output = Result<LoginToken, LoginError>>,
    ) -> Result<LoginToken, LoginFailure> {
        let is_by = |token: &LoginToken| token.credential.matches(credential.expose().as_bytes());
        let usable_token =
            |state: &TokenState| state.token.clone().filter(|token| now < token.expires_at && is_by(token));
        let Some(token) = usable_token(&self.state.lock()) else {
            return self.wait_or_log_in(now, usable_token, login).await;
        };
        if now < token.refresh_at {
            return Ok(token);
        }
        let Ok(_turn) = self.login_lock.try_lock() else { return Ok(token) };
        {
            // Another call's login may have ended between the first check and the lock.
            let state = self.state.lock();
            let renewed = usable_token(&state).filter(|found| found.login_number > token.login_number);
            if renewed.is_some() || state.recent_failure(now).is_some() {
                return Ok(renewed.unwrap_or(token));
            }
        }
        let login_result = tokio::time::timeout(EARLY_REFRESH_TIMEOUT, login).await;
        match self.record_login(login_result.unwrap_or(Err(LoginError::NoReply(TransportFault::TimedOut))), now) {
            Ok(next) => Ok(next),
            Err(LoginFailure { error, .. }) => {
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
        login: impl Future<Output = Result<LoginToken, LoginError>>,
    ) -> Result<LoginToken, LoginFailure> {
        let usable_token =
            |state: &TokenState| state.token.clone().filter(|token| token.login_number > rejected.login_number);
        let next_login_at = rejected.replaced_at.map_or(Time::ZERO, |at| at + MIN_LOGIN_INTERVAL);
        if now < next_login_at && usable_token(&self.state.lock()).is_none() {
            return Err(LoginFailure { error: LoginError::TokenRejected, next_login_at });
        }
        let login = async { Ok(LoginToken { replaced_at: Some(now), ..login.await? }) };
        self.wait_or_log_in(now, usable_token, login).await
    }

    /// Waits for the login that is under way, or performs this one.
    async fn wait_or_log_in(
        &self,
        now: Time,
        usable_token: impl Fn(&TokenState) -> Option<LoginToken>,
        login: impl Future<Output = Result<LoginToken, LoginError>>,
    ) -> Result<LoginToken, LoginFailure> {
        let finished_before = self.state.lock().finished_logins;
        let _turn = self.login_lock.lock().await;
        {
            let state = self.state.lock();
            if let Some(token) = usable_token(&state) {
                return Ok(token);
            }
            let shared = state.last_failure.as_ref().filter(|_| state.finished_logins > finished_before);
            if let Some(failure) = shared.or(state.recent_failure(now)) {
                return Err(failure.clone());
            }
        }
        self.record_login(login.await, now)
    }

    /// Records the result of a login.
    fn record_login(&self, result: Result<LoginToken, LoginError>, now: Time) -> Result<LoginToken, LoginFailure> {
        let mut state = self.state.lock();
        state.finished_logins += 1;
        let result = result.map_err(|error| LoginFailure::new(error, now));
        state.last_failure = result.as_ref().err().cloned();
        let token = LoginToken { login_number: state.finished_logins, ..result? };
        Ok(state.token.insert(token).clone())
    }
}

impl TokenState {
    /// The failure of a login that is too recent to be repeated.
    fn recent_failure(&self, now: Time) -> Option<&LoginFailure> {
        self.last_failure.as_ref().filter(|failure| now < failure.next_login_at)
    }
}
