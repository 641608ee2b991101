//! The reasons why a login gives no token.

use http::StatusCode;
use tidegate_core::Class;
use tidegate_core::Span;
use tidegate_core::retry::TransportFault;

use super::super::TargetError;

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
}
