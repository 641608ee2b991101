//! Why there is no token.

use http::StatusCode;
use tidegate_core::Span;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::{Class, TransportFault};

use super::super::{AttemptClassifier, TargetError};

/// Why a login gave no token. Never tells what was sent or came back.
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
        /// What it means: a 403 that says when to come back is a throttled one.
        class: Class,
        /// How long the provider asks to be left alone.
        retry_after: Option<Span>,
    },
    /// It gave a token that the provider doesn't accept, and isn't repeated for five seconds.
    #[error("the token that the login gave isn't accepted")]
    TokenRejected,
    /// The reply is no JSON.
    #[error("the reply to the login is no JSON, or longer than 256 KiB")]
    NotJson,
    /// The reply has no token where it should be.
    #[error("the reply to the login has no token at `{pointer}`")]
    NoToken {
        /// The JSON pointer that was looked at.
        pointer: String,
    },
    /// The token can't be sent where it belongs.
    #[error("the token that the login gave can't be used: {0}")]
    UnusableToken(TargetError),
}

impl LoginError {
    /// What it means for the call that needed the token, of whose request nothing was sent.
    pub(crate) fn attempt_report(&self, judge: &AttemptClassifier) -> AttemptReport {
        let unsent = judge.classify_fault(TransportFault::Unsent, None);
        match *self {
            Self::NoReply(_) => unsent,
            Self::Refused { class, retry_after, .. } => AttemptReport { class, retry_after, ..unsent },
            Self::TokenRejected => AttemptReport { class: Class::Auth, ..unsent },
            Self::NotJson | Self::NoToken { .. } | Self::UnusableToken(_) => {
                AttemptReport { class: Class::Permanent, ..unsent }
            }
        }
    }
}
