//! The policy language of Tidegate: policy files, environment variables, presets and keys, read into a plan.
//!
//! Limits are written in TOML, in environment variables or with [`Policy::builder`]. This crate checks every word and
//! turns them into a [`Plan`] of [`tidegate_core`] limits that the engine runs. Nothing is half-configured:
//! [`Policy::load`] returns a whole [`Policy`] or [`Errors`]. Each error has the file, line and column, the text that
//! was found, what was expected and the nearest valid name.
//!
//! ```
//! use tidegate_policy::{Policy, Query, PolicySources};
//!
//! let policy = Policy::load(PolicySources::new().file("tidegate.toml", r#"
//!     [inbound.action.login]
//!     match = { method = "POST", path = "/login" }
//!     limit = "5 per 60s"
//!     penalty = { base = "2s", cap = "1h" }
//! "#))?;
//! let login = policy.plan().matching_actions(&Query { method: Some("POST"), path: Some("/login"), ..Query::default() })?;
//! assert_eq!(login.first().map(|id| policy.plan().action(id).name()), Some("login"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to find | look in |
//! | --- | --- |
//! | the meaning of a quantity string | [`Quantity`] |
//! | every setting, its default and its environment name | [`settings::all`] |
//! | the requests that an action matches | [`Matcher`] |
//! | the address of a client | [`Forwarding`] |
//! | the keys that calls are counted by | [`KeyPart`] |
//! | the periods of quotas | [`calendar`] |
//! | the settings of providers, the APIs that are called | [`outbound`] |
//! | a reader for other documents, as strict as for policies | [`document`] |
//! | the configuration of Envoy's ratelimit service | `ratelimit_yaml` |
#![forbid(unsafe_code)]

mod address;
pub mod alerts;
mod builder;
pub mod calendar;
mod description;
pub mod document;
mod edit;
mod environment;
mod error;
mod forwarding;
mod host;
mod key;
mod listen;
mod matched_actions;
mod matcher;
mod nearest;
pub mod outbound;
mod path;
mod path_encoding;
mod plan;
mod policy;
mod preset;
mod printable;
mod quantity;
mod query;
pub mod ratelimit_yaml;
mod raw_paths;
mod read;
mod readings;
mod regex_hint;
mod regular_file;
mod reservation;
mod router;
mod secret;
pub mod sections;
pub mod settings;
pub mod store;
mod units;
pub mod verdict;

pub use address::{ListStatus, Networks, canonical_ip};
pub use builder::{
    ActionSpec, AlertSpec, IntoStrings, LimitSpec, PenaltyOptions, PolicyBuilder, ProviderSpec, ReservationOptions,
};
pub use edit::{EditedLimit, LimitTermsError};
pub use error::{Error, ErrorLocation, Errors, Note};
pub use forwarding::{Forwarding, ForwardingHeader, MAX_HOPS};
pub use host::{is_host, is_same_host};
pub use key::{
    KeyError, KeyPart, KeySeed, MissingPartError, OnMissing, PLATFORMS, UncountableError, UnknownPlatformError,
    limit_tag, may_be_parameter,
};
pub use listen::{CertificateFiles, Http2Mode, ListenAddress, ListenConfig, TlsConfig, UNIX_PEER, UnixSocketConfig};
pub use matched_actions::{MAX_ACTIONS, MatchedActions, PathError};
pub use matcher::Matcher;
pub use outbound::OutboundConfig;
pub use path::{AmbiguousPaths, PathQuirks};
pub use plan::{Action, ActionId, LimitInfo, LimitScope, Plan, QueryError, RateLimitPolicyItem, UnknownActionError};
pub use policy::{Policy, PolicySources};
pub use preset::Preset;
pub use printable::{printable, printable_json, printable_lines};
pub use quantity::{Quantity, QuantityError};
pub use query::Query;
pub use regular_file::read_regular_file;
pub use reservation::{ReplyReservation, ReservationToken, ReservationTokenError, TIDEGATE_RESERVATION};
pub use secret::{Secret, SecretError, SecretSource};
pub use sections::{
    AccessLogMode, AdminConfig, ApiConfig, CompatibleServer, HeaderDialect, InboundCaps, InboundConfig,
    InboundTimeouts, LogConfig, LogFormat, LogLevel, NamedToken, OnDisconnect, ReloadConfig, RespConfig, RlsAlgorithm,
    RlsConfig, UpstreamAddress, UpstreamTls,
};
pub use store::{StoreConfig, StoreUrl};
pub use tidegate_core::OnOutage;
pub use units::{describe_seconds, parse_bytes, parse_duration};
pub use verdict::Hints;
