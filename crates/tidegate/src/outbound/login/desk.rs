//! The token of one credential, for which there is one login at a time.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::retry::Fault;
use tidegate_core::{Span, Time};
use tidegate_policy::Secret;

use super::LoginError;

/// How long a login that was in vain isn't repeated, because it failed or its token wasn't accepted: a provider locks
/// accounts out that try again and again.
const PAUSE: Span = Span::from_secs(5);
/// How long a call waits for a login ahead of time before it goes with the token that is still good.
const PATIENCE: Duration = Duration::from_secs(5);

/// A token, and until when it is good.
#[derive(Clone, Debug)]
pub struct Token {
    secret: Arc<Secret>,
    /// The credential that it was given for, which may be another by now.
    by: Secret,
    /// Which login gave it, so that a rejected one isn't taken for its successor.
    pub(super) number: u64,
    /// If it took the place of a rejected one, when.
    replaced_at: Option<Time>,
    refresh_at: Time,
    expires_at: Time,
}

impl Token {
    /// What is sent in the credential's place.
    pub fn secret(&self) -> &Arc<Secret> {
        &self.secret
    }
}

/// What a login gives.
pub(super) struct Given {
    pub secret: Secret,
    pub by: Secret,
    pub refresh_at: Time,
    pub expires_at: Time,
    /// Whether it takes the place of a token that wasn't accepted.
    pub replaces: bool,
}

/// What is known of one credential's token.
#[derive(Default)]
pub(super) struct Desk {
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    token: Option<Token>,
    failed: Option<(LoginError, Time)>,
    /// Logins that have ended.
    ended: u64,
}

impl Desk {
    /// The token, by this login if there is none that is good, or if it is time and nobody else renews it.
    pub(super) async fn token(
        &self,
        by: &Secret,
        now: Time,
        login: impl Future<Output = Result<Given, LoginError>>,
    ) -> Result<Token, LoginError> {
        let is_by = |token: &Token| token.by.matches(by.expose().as_bytes());
        let good = |state: &State| state.token.clone().filter(|token| now < token.expires_at && is_by(token));
        let Some(token) = good(&self.state()) else {
            return self.next(now, good, login).await;
        };
        if now < token.refresh_at {
            return Ok(token);
        }
        let Ok(_turn) = self.turn.try_lock() else { return Ok(token) };
        {
            // Another call's login may have ended between the look and the turn.
            let state = self.state();
            let renewed = good(&state).filter(|found| found.number > token.number);
            if renewed.is_some() || state.failure(now).is_some() {
                return Ok(renewed.unwrap_or(token));
            }
        }
        let ended = tokio::time::timeout(PATIENCE, login).await;
        match self.settle(ended.unwrap_or(Err(LoginError::NoReply(Fault::TimedOut))), now) {
            Ok(next) => Ok(next),
            Err(error) => {
                tracing::warn!(%error, "a login ahead of time failed; the token is still good");
                Ok(token)
            }
        }
    }

    /// The token that takes the place of a rejected one, by this login unless there was one meanwhile. One that has just
    /// done so itself shows that logins don't help.
    pub(super) async fn renew(
        &self,
        rejected: &Token,
        now: Time,
        login: impl Future<Output = Result<Given, LoginError>>,
    ) -> Result<Token, LoginError> {
        let good = |state: &State| state.token.clone().filter(|token| token.number > rejected.number);
        if good(&self.state()).is_none() && rejected.replaced_at.is_some_and(|at| now.since(at) < PAUSE) {
            return Err(LoginError::Rejected);
        }
        self.next(now, good, async { Ok(Given { replaces: true, ..login.await? }) }).await
    }

    /// Waits for the login that is under way, or has this one.
    async fn next(
        &self,
        now: Time,
        good: impl Fn(&State) -> Option<Token>,
        login: impl Future<Output = Result<Given, LoginError>>,
    ) -> Result<Token, LoginError> {
        let before = self.state().ended;
        let _turn = self.turn.lock().await;
        {
            let state = self.state();
            if let Some(token) = good(&state) {
                return Ok(token);
            }
            let shared = state.failed.as_ref().filter(|_| state.ended > before).map(|(error, _)| error);
            if let Some(error) = shared.or(state.failure(now)) {
                return Err(error.clone());
            }
        }
        self.settle(login.await, now)
    }

    /// Notes how a login ended.
    fn settle(&self, ended: Result<Given, LoginError>, now: Time) -> Result<Token, LoginError> {
        let mut state = self.state();
        state.ended += 1;
        match ended {
            Ok(Given { secret, by, refresh_at, expires_at, replaces }) => {
                let (secret, replaced_at) = (Arc::new(secret), replaces.then_some(now));
                let token = Token { secret, by, number: state.ended, replaced_at, refresh_at, expires_at };
                state.failed = None;
                Ok(state.token.insert(token).clone())
            }
            Err(error) => {
                state.failed = Some((error.clone(), now));
                Err(error)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The error of a login that failed too recently to be repeated.
    fn failure(&self, now: Time) -> Option<&LoginError> {
        let (error, at) = self.failed.as_ref()?;
        (now.since(*at) < PAUSE).then_some(error)
    }
}
