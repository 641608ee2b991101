//! The words of Tidegate: policy files, environment, presets and keys, read into a plan.
//!
//! A person writes limits in TOML, in environment variables or with [`Policy::builder`]; this crate checks every
//! word and turns them into a [`Plan`] of [`tidegate_core`] limits that a machine runs. Nothing is half-configured:
//! [`Policy::load`] gives a whole [`Policy`] or [`Errors`], each of which names the file, line and column, what was
//! found, what was expected and the nearest valid name.
//!
//! ```
//! use tidegate_policy::{Policy, Query, Sources};
//!
//! let policy = Policy::load(Sources::new().file("tidegate.toml", r#"
//!     [inbound.action.login]
//!     match = { method = "POST", path = "/login" }
//!     limit = "5 per 60s"
//!     penalty = { base = "2s", cap = "1h" }
//! "#))?;
//! let login = policy.plan().matching(&Query { method: Some("POST"), path: Some("/login"), ..Query::default() })?;
//! assert_eq!(login.first().map(|id| policy.plan().action(id).name()), Some("login"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to find | look in |
//! | --- | --- |
//! | what a quantity string means | [`Quantity`] |
//! | every setting, its default and its environment name | [`settings::all`] |
//! | which requests an action matches | [`Matcher`] |
//! | which address a client has | [`Forwarding`] |
//! | what is counted together | [`KeyPart`] |
//! | which period a quota counts in | [`calendar`] |
//! | what is known of other people's APIs | [`outbound`] |
//! | how a document of one's own is read as strictly | [`document`] |
#![forbid(unsafe_code)]

mod address;
mod builder;
pub mod calendar;
pub mod document;
mod environment;
mod error;
mod forwarding;
mod hints;
mod host;
mod key;
mod matcher;
mod nearest;
pub mod outbound;
mod path;
mod plan;
mod policy;
mod preset;
mod printable;
mod quantity;
mod query;
mod read;
mod readings;
mod router;
mod secret;
pub mod sections;
pub mod settings;
mod several;
mod spelling;
pub mod store;
mod texts;
mod units;
mod words;

pub use address::{AddressLists, Listed, Networks, canonical};
pub use builder::{ActionSpec, IntoWords, LimitSpec, PenaltyText, PolicyBuilder, ProviderSpec};
pub use error::{Error, Errors, Place};
pub use forwarding::{ForwardedBy, Forwarding, MAX_HOPS};
pub use hints::Hints;
pub use host::{is_host, is_same_host};
pub use key::{KeyError, KeyPart, KeySeed, Missing, MissingPart, PLATFORMS, Uncountable, UnknownPlatform, limit_tag};
pub use matcher::Matcher;
pub use outbound::Outbound;
pub use path::{AmbiguousPaths, PathQuirks};
pub use plan::{Action, ActionId, LimitInfo, Plan, PolicyItem, Source, UnknownAction};
pub use policy::{Policy, Sources};
pub use preset::Preset;
pub use printable::{printable, printable_json, printable_lines};
pub use quantity::{Quantity, QuantityError};
pub use query::Query;
pub use secret::{Secret, TokenError, TokenSource};
pub use sections::{Admin, Api, Caps, HeaderDialect, Inbound, Log, LogFormat, LogLevel, Timeouts, Upstream};
pub use several::{Actions, MAX_ACTIONS, PathError};
pub use store::{Store, StoreUrl};
pub use tidegate_core::OnOutage;
pub use units::{parse_bytes, parse_duration};
