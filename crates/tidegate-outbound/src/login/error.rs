//! The reasons why a login gives no token.

use http::StatusCode;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::{Class, Delivery, TransportFault};
use tidegate_core::{Span, Time};

use super::super::TargetError;

/// The shortest time between logins after one failed or its token was rejected. Providers lock accounts that log in too
/// often.
pub(super) const MIN_LOGIN_INTERVAL: Span = Span::from_secs(5);

/// The reason why a login gave no token. Contains nothing that was sent or received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoginError {
    /// There was no reply.
    #[error("the login got no reply")]
    NoReply(TransportFault),
    /// The reply's status is no success.
    #[error("the login was answered {}", status.as_u16())]
    Refused {
        /// The status.
        status: StatusCode,
        /// The class of the failure. A 403 that says when to come back counts as throttled.
        class: Class,
        /// The time that the provider asks callers to wait.
        retry_after: Option<Span>,
    },
    /// The provider rejects the token of the login. The login isn't repeated for five seconds.
    #[error("the token that the login gave isn't accepted")]
    TokenRejected,
    /// The reply isn't JSON, or is longer than 256 KiB.
    #[error("the reply to the login is no JSON, or longer than 256 KiB")]
    NotJson,
    /// The reply has no token where it should be.
    #[error("the reply to the login has no token at `{pointer}`")]
    NoToken {
        /// The JSON pointer to the expected token.
        pointer: String,
    },
    /// The token can't be sent in the place of the credential.
    #[error("the token that the login gave can't be used: {0}")]
    UnusableToken(TargetError),
}

impl LoginError {
    /// The class of the attempt that needed the token.
    pub(crate) fn class(&self) -> Class {
        match self {
            Self::NoReply(fault) => fault.class(),
            Self::Refused { class, .. } => *class,
            Self::TokenRejected => Class::Auth,
            Self::NotJson | Self::NoToken { .. } | Self::UnusableToken(_) => Class::Permanent,
        }
    }

    /// The time until which there is no other login.
    pub(super) fn quiet_time(&self) -> Span {
        match self {
            Self::Refused { retry_after: Some(asked), .. } => MIN_LOGIN_INTERVAL.max(*asked),
            _ => MIN_LOGIN_INTERVAL,
        }
    }
}

/// A login without a token, and the time of the next one.
#[derive(Clone, Debug)]
pub(crate) struct LoginFailure {
    pub error: LoginError,
    /// The time before which there is no other login.
    pub next_login_at: Time,
}

impl LoginFailure {
    /// The report for the attempt that needed the token. Nothing of its request was sent. Another attempt waits for the
    /// next login.
    pub(crate) fn attempt_report(&self, now: Time) -> AttemptReport {
        let class = self.error.class();
        AttemptReport {
            is_repeatable: true,
            rejects_credential: class == Class::Auth,
            retry_after: class.is_retryable().then(|| self.next_login_at.since(now)),
            ..AttemptReport::new(class, Delivery::Unsent)
        }
    }
}
