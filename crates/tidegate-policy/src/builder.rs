//! Policies made in Rust. A builder writes a policy file and reads that, so both mean the same and go through the same
//! checks. Errors show the generated line.

mod alert;
mod provider;

use std::fmt::Write as _;

pub use alert::AlertSpec;
pub use provider::ProviderSpec;

use crate::environment::EnvVars;
use crate::error::Errors;
use crate::policy::Policy;
use crate::settings::{self, SettingType};

/// The name of the generated text in errors.
const SOURCE_NAME: &str = "policy builder";

/// Makes a [`Policy`] in Rust, with the same words as a policy file:
///
/// ```
/// use tidegate_policy::{ActionSpec, Policy};
///
/// let policy = Policy::builder()
///     .global("1000 per 1h")
///     .action("login", ActionSpec::new("5 per 60s").penalty("2s", "1h").method("POST").path("/login"))
///     .action("search", ActionSpec::new("10/s burst 20").key(["header:x-tenant", "client_ip"]))
///     .allow(["10.1.0.0/16"])
///     .build()?;
/// assert_eq!(policy.plan().actions().len(), 2);
/// # Ok::<(), tidegate_policy::Errors>(())
/// ```
///
/// Nothing is checked before [`build`](Self::build), which reports all errors at once.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct PolicyBuilder {
    settings: String,
    tables: String,
    variables: EnvVars,
}

impl PolicyBuilder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Sets any setting by its path in a policy file, such as `("inbound.timeouts.connect", "2s")`; [`settings::all`]
    /// lists them.
    pub fn setting(mut self, path: &str, value: impl ToString) -> Self {
        push_entry(&mut self.settings, path, &toml_value(path, value));
        self
    }

    /// The limit over all actions, per client address: `"1000 per 1h"`, or a [`LimitSpec`] with a penalty.
    pub fn global(self, limit: impl Into<LimitSpec>) -> Self {
        self.table("inbound.global", limit.into().entries)
    }

    /// Adds an action. If several match a request, the one that was added first wins.
    pub fn action(self, name: &str, action: ActionSpec) -> Self {
        let ActionSpec { limit: LimitSpec { mut entries }, match_entries, limits } = action;
        if !match_entries.is_empty() {
            entries.push(("match", toml_table(&match_entries)));
        }
        if !limits.is_empty() {
            let limits: Vec<String> = limits.iter().map(|limit| toml_table(&limit.entries)).collect();
            entries.push(("limits", format!("[{}]", limits.join(", "))));
        }
        self.table(&format!("inbound.action.{}", toml_string(name)), entries)
    }

    /// Adds an alert.
    pub fn alert(self, name: &str, alert: AlertSpec) -> Self {
        self.table(&format!("alert.{}", toml_string(name)), alert.entries)
    }

    /// Adds a provider: an API that is called.
    pub fn provider(self, name: &str, provider: ProviderSpec) -> Self {
        self.table(&format!("outbound.provider.{}", toml_string(name)), provider.entries)
    }

    /// Networks and addresses that are never limited.
    pub fn allow(self, networks: impl IntoStrings) -> Self {
        self.string_list("inbound.allow", networks)
    }

    /// Networks and addresses that are always refused.
    pub fn deny(self, networks: impl IntoStrings) -> Self {
        self.string_list("inbound.deny", networks)
    }

    /// Networks and addresses of the proxies that are trusted to send forwarding headers.
    pub fn trusted_proxies(self, networks: impl IntoStrings) -> Self {
        self.string_list("inbound.trusted_proxies", networks)
    }

    /// Lets environment variables override the built settings, as they override a file; see
    /// [`PolicySources::env`](crate::PolicySources::env).
    pub fn env<K: Into<String>, V: Into<String>>(mut self, variables: impl IntoIterator<Item = (K, V)>) -> Self {
        self.variables.variables.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Checks the settings and makes the policy.
    ///
    /// # Errors
    /// All errors of the policy, as [`Policy::load`] reports them.
    pub fn build(self) -> Result<Policy, Errors> {
        crate::read::policy(SOURCE_NAME, self.to_toml().as_bytes(), self.variables, None)
    }

    /// The equivalent policy file.
    pub fn to_toml(&self) -> String {
        format!("{}{}", self.settings, self.tables)
    }

    fn table(mut self, path: &str, entries: impl IntoIterator<Item = (impl AsRef<str>, String)>) -> Self {
        // Writing to a string can't fail.
        let _ = writeln!(self.tables, "[{path}]");
        for (key, value) in entries {
            push_entry(&mut self.tables, key.as_ref(), &value);
        }
        self
    }

    fn string_list(mut self, path: &str, words: impl IntoStrings) -> Self {
        push_entry(&mut self.settings, path, &toml_strings(words));
        self
    }
}

/// One string or several.
pub trait IntoStrings {
    /// The strings.
    fn into_strings(self) -> Vec<String>;
}

impl IntoStrings for &str {
    fn into_strings(self) -> Vec<String> {
        vec![self.to_owned()]
    }
}

impl IntoStrings for String {
    fn into_strings(self) -> Vec<String> {
        vec![self]
    }
}

impl<T: Into<String>> IntoStrings for Vec<T> {
    fn into_strings(self) -> Vec<String> {
        self.into_iter().map(Into::into).collect()
    }
}

impl<T: Into<String>, const N: usize> IntoStrings for [T; N] {
    fn into_strings(self) -> Vec<String> {
        self.into_iter().map(Into::into).collect()
    }
}

impl IntoStrings for &[&str] {
    fn into_strings(self) -> Vec<String> {
        self.iter().map(|word| (*word).to_owned()).collect()
    }
}

/// The options of a penalty for refused calls.
#[derive(Clone, Debug)]
#[must_use]
pub struct PenaltyOptions(Vec<(&'static str, String)>);

impl PenaltyOptions {
    /// Creates a penalty with blocks that begin at `base` and double up to `cap`: `("2s", "1h")`.
    pub fn new(base: &str, cap: &str) -> Self {
        Self(vec![("base", toml_string(base)), ("cap", toml_string(cap))])
    }

    /// The factor between one block and the next. Default 2.
    pub fn factor(mut self, factor: u32) -> Self {
        self.0.push(("factor", factor.to_string()));
        self
    }

    /// The time without a refusal that removes one strike. Default: the longer of the cap and the limit's window.
    pub fn forgive_after(mut self, span: &str) -> Self {
        self.0.push(("forgive_after", toml_string(span)));
        self
    }

    /// Reports the longer of block and window as the wait, and grants no parole.
    pub fn strict(mut self) -> Self {
        self.0.push(("mode", toml_string("strict")));
        self
    }
}

/// The options of a limit that gives reservations to refused callers.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ReservationOptions(Vec<(&'static str, String)>);

impl ReservationOptions {
    /// The defaults: 30 s ahead, half of the limit, callers told apart by their addresses.
    pub fn new() -> Self {
        Self::default()
    }

    /// The longest time ahead for which a reservation is given: `"30s"`.
    pub fn horizon(self, span: &str) -> Self {
        self.with_entry("horizon", toml_string(span))
    }

    /// The share of the limit that may be kept for reservations, from 0.001 to 1; 0 only tells instants, as `spread`.
    pub fn share(self, share: f64) -> Self {
        self.with_entry("share", share.to_string())
    }

    /// The time after its instant for which a reservation is kept, up to the horizon: `"1s"`. Default 1 s or, for a rate, what its
    /// burst can hold if that is less, at least 250 ms.
    pub fn grace(self, span: &str) -> Self {
        self.with_entry("grace", toml_string(span))
    }

    /// The parts of requests that tell one caller from another, such as `["key"]`; see [`KeyPart`](crate::KeyPart).
    pub fn by(self, parts: impl IntoStrings) -> Self {
        self.with_entry("by", toml_strings(parts))
    }

    fn with_entry(mut self, key: &'static str, value: String) -> Self {
        self.0.push((key, value));
        self
    }
}

/// One limit: of [`PolicyBuilder::global`], or of an action that has several limits with keys of their own.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LimitSpec {
    entries: Vec<(&'static str, String)>,
}

impl From<&str> for LimitSpec {
    fn from(limit: &str) -> Self {
        Self::new(limit)
    }
}

impl LimitSpec {
    /// Creates a limit: `"5 per 60s"`, or several quantities that must all allow a call. See
    /// [`Quantity`](crate::Quantity).
    pub fn new(limit: impl IntoStrings) -> Self {
        Self { entries: vec![("limit", toml_strings(limit))] }
    }

    /// Its name in decisions and headers.
    pub fn name(self, name: &str) -> Self {
        self.with_entry("name", toml_string(name))
    }

    /// The parts of the key that calls are counted by, such as `["client_ip"]`; see [`KeyPart`](crate::KeyPart).
    pub fn key(self, parts: impl IntoStrings) -> Self {
        self.with_entry("key", toml_strings(parts))
    }

    /// The handling of requests that lack a part of the key: `"share"`, `"by_ip"`, `"refuse"` or `"skip"`; see
    /// [`OnMissing`](crate::OnMissing).
    pub fn missing(self, word: &str) -> Self {
        self.with_entry("missing", toml_string(word))
    }

    /// Sets a penalty with blocks that begin at `base` and double up to `cap`: `("2s", "1h")`.
    pub fn penalty(self, base: &str, cap: &str) -> Self {
        self.penalty_options(PenaltyOptions::new(base, cap))
    }

    /// Sets a penalty with further options.
    pub fn penalty_options(self, penalty: PenaltyOptions) -> Self {
        self.with_entry("penalty", toml_table(&penalty.0))
    }

    /// Sets a penalty with blocks of this fixed length.
    pub fn ban(self, length: &str) -> Self {
        self.with_entry("ban", toml_string(length))
    }

    /// Gives reservations to refused callers. For limits that callers share.
    pub fn reserve(self, options: ReservationOptions) -> Self {
        self.with_entry("reserve", toml_table(&options.0))
    }

    /// Tells refused callers instants one after the other, at most `horizon` ahead, up to an hour: `"30s"`.
    pub fn spread(self, horizon: &str) -> Self {
        self.with_entry("spread", toml_string(horizon))
    }

    /// Counts calls that other limits refuse too. Calls that this limit itself refuses never count.
    pub fn count_all(self) -> Self {
        self.with_entry("count", toml_string("all"))
    }

    fn with_entry(mut self, key: &'static str, value: String) -> Self {
        self.entries.push((key, value));
        self
    }
}

/// One action: its limits with their keys and cost, and the requests that it matches.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ActionSpec {
    limit: LimitSpec,
    match_entries: Vec<(&'static str, String)>,
    limits: Vec<LimitSpec>,
}

impl ActionSpec {
    /// An action with one key: `"5 per 60s"`, or several quantities that must all allow a call.
    pub fn new(limit: impl IntoStrings) -> Self {
        Self { limit: LimitSpec::new(limit), ..Self::default() }
    }

    /// An action made from a preset: `"login"`; see [`Preset`](crate::Preset).
    pub fn preset(name: &str) -> Self {
        Self { limit: LimitSpec::default().with_entry("preset", toml_string(name)), ..Self::default() }
    }

    /// An action with several limits that have keys of their own.
    pub fn limits(limits: impl IntoIterator<Item = LimitSpec>) -> Self {
        Self { limits: limits.into_iter().collect(), ..Self::default() }
    }

    /// The parts of the key that calls are counted by; default `["client_ip"]`. See
    /// [`KeyPart`](crate::KeyPart).
    pub fn key(self, parts: impl IntoStrings) -> Self {
        self.map_limit(|limit| limit.key(parts))
    }

    /// The handling of requests that lack a part of the key: `"share"`, `"by_ip"`, `"refuse"` or `"skip"`; see
    /// [`OnMissing`](crate::OnMissing).
    pub fn missing(self, word: &str) -> Self {
        self.map_limit(|limit| limit.missing(word))
    }

    /// A second limit, on each IPv6 /48: `"50 per 60s"`, or `"preset"` for ten times the limit of the preset.
    pub fn ipv6_network(self, limit: impl IntoStrings) -> Self {
        self.map_limit(|own| own.with_entry("ipv6_network", toml_strings(limit)))
    }

    /// Sets a penalty with blocks that begin at `base` and double up to `cap`: `("2s", "1h")`.
    pub fn penalty(self, base: &str, cap: &str) -> Self {
        self.map_limit(|limit| limit.penalty(base, cap))
    }

    /// Sets a penalty with further options.
    pub fn penalty_options(self, penalty: PenaltyOptions) -> Self {
        self.map_limit(|limit| limit.penalty_options(penalty))
    }

    /// Sets a penalty with blocks of this fixed length.
    pub fn ban(self, length: &str) -> Self {
        self.map_limit(|limit| limit.ban(length))
    }

    /// Gives reservations to refused callers. For limits that callers share.
    pub fn reserve(self, options: ReservationOptions) -> Self {
        self.map_limit(|limit| limit.reserve(options))
    }

    /// Tells refused callers instants one after the other, at most `horizon` ahead, up to an hour: `"30s"`.
    pub fn spread(self, horizon: &str) -> Self {
        self.map_limit(|limit| limit.spread(horizon))
    }

    /// Counts calls that other limits refuse too. Calls that this limit itself refuses never count.
    pub fn count_all(self) -> Self {
        self.map_limit(LimitSpec::count_all)
    }

    /// The cost of a call. Default 1.
    pub fn cost(self, cost: u64) -> Self {
        self.map_limit(|limit| limit.with_entry("cost", cost.to_string()))
    }

    /// Sets shadow mode: the action decides and logs, and refuses nothing.
    pub fn shadow(self) -> Self {
        self.map_limit(|limit| limit.with_entry("mode", toml_string("shadow")))
    }

    /// The methods it matches, such as `"POST"`.
    pub fn method(self, methods: impl IntoStrings) -> Self {
        self.add_match("method", methods)
    }

    /// The paths it matches, such as `"/login"` or `"/api/*"`; see [`Matcher`](crate::Matcher).
    pub fn path(self, paths: impl IntoStrings) -> Self {
        self.add_match("path", paths)
    }

    /// The hosts it matches.
    pub fn host(self, hosts: impl IntoStrings) -> Self {
        self.add_match("host", hosts)
    }

    fn map_limit(mut self, change: impl FnOnce(LimitSpec) -> LimitSpec) -> Self {
        self.limit = change(self.limit);
        self
    }

    fn add_match(mut self, key: &'static str, words: impl IntoStrings) -> Self {
        self.match_entries.push((key, toml_strings(words)));
        self
    }
}

/// The value of a setting as TOML: in quotes unless the setting takes it as a bare number or flag.
fn toml_value(path: &str, value: impl ToString) -> String {
    let value = value.to_string();
    let is_bare = match settings::find(path).map(|setting| setting.value_type) {
        Some(SettingType::Flag) => matches!(value.as_str(), "true" | "false"),
        Some(SettingType::Integer) => !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()),
        _ => false,
    };
    if is_bare { value } else { toml_string(&value) }
}

fn push_entry(text: &mut String, key: &str, value: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "{} = {value}", toml_key(key));
}

fn toml_table(entries: &[(&'static str, String)]) -> String {
    let entries: Vec<String> = entries.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    format!("{{ {} }}", entries.join(", "))
}

/// A path, with quotes around each part that isn't a bare key.
fn toml_key(path: &str) -> String {
    let is_bare = |piece: &str| {
        !piece.is_empty() && piece.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
    };
    let pieces: Vec<String> =
        path.split('.').map(|piece| if is_bare(piece) { piece.to_owned() } else { toml_string(piece) }).collect();
    pieces.join(".")
}

/// One string as a string, several as a list.
fn toml_strings(words: impl IntoStrings) -> String {
    let words: Vec<String> = words.into_strings().iter().map(|word| toml_string(word)).collect();
    if let [word] = words.as_slice() { word.clone() } else { format!("[{}]", words.join(", ")) }
}

pub(crate) fn toml_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_builder_equals_the_same_file() {
        let built = Policy::builder()
            .setting("inbound.timeouts.connect", "2s")
            .setting("inbound.x_ratelimit", true)
            .setting("inbound.caps.headers", 50)
            .global(LimitSpec::new("1000 per 1h").penalty("2s", "1h").count_all())
            .action(
                "login",
                ActionSpec::new(["5 per 60s", "100 per calendar day"])
                    .penalty_options(PenaltyOptions::new("3s", "30m").factor(3).strict().forgive_after("2h"))
                    .key(["client_ip", "platform"])
                    .method(["POST", "PUT"])
                    .path("/login")
                    .cost(2)
                    .shadow(),
            )
            .action("otp", ActionSpec::preset("otp_request").ban("5m"))
            .action(
                "shared",
                ActionSpec::new("10/s burst 10")
                    .key("action")
                    .reserve(ReservationOptions::new().horizon("20s").share(1.0).grace("500ms").by(["key"])),
            )
            .action("spread", ActionSpec::new("5 per 60s").key("action").spread("60s"))
            .action("mixed", ActionSpec::limits([LimitSpec::new("1/s").name("a"), "5 per 60s".into()]))
            .deny("192.0.2.0/24");
        let text = built.to_toml();
        let built = built.build().unwrap();
        let loaded = Policy::load(crate::PolicySources::new().file("x", text)).unwrap();
        assert_eq!(format!("{built:?}"), format!("{loaded:?}"));
        assert_eq!(built.inbound().timeouts.connect.as_secs(), 2);
        assert!(built.inbound().x_ratelimit);
        let names: Vec<&str> = built.plan().limits().iter().map(|(id, _)| built.plan().limit_info(id).name()).collect();
        assert_eq!(names, ["global", "login.1", "login.2", "otp", "shared", "spread", "mixed.a", "mixed.2"]);
    }

    #[test]
    fn errors_show_the_written_text() {
        let errors = Policy::builder().action("login", ActionSpec::new("5 pr 60s")).build().unwrap_err();
        let shown = errors.to_string();
        assert!(shown.contains("policy builder:2:12") && shown.contains("did you mean `per`?"), "{shown}");
    }

    proptest! {
        #[test]
        fn any_string_is_quoted_as_valid_toml(text in any::<String>()) {
            let document = format!("x = {}", toml_string(&text));
            let table: toml::Table = document.parse().unwrap();
            prop_assert_eq!(table["x"].as_str(), Some(&*text));
        }

        #[test]
        fn arbitrary_builder_input_never_panics(name in any::<String>(), limit in any::<String>(), path in "[a-z.]{0,20}") {
            let _ = Policy::builder().setting(&path, &name).global(&*limit).action(&name, ActionSpec::new(limit.clone())).build();
        }
    }
}
