//! A policy made in Rust. It is written down as a policy file and read like one, so both mean the same and are
//! checked alike; errors show the line that was written.

mod provider;

use std::fmt::Write as _;

pub use provider::ProviderSpec;

use crate::environment::Env;
use crate::error::Errors;
use crate::policy::Policy;
use crate::settings::{self, Form};

/// What errors call the text that a builder writes.
const NAME: &str = "policy builder";

/// Makes a [`Policy`] in Rust, in the same words as a policy file:
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
/// Nothing is checked before [`build`](Self::build), which tells everything that is wrong at once.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct PolicyBuilder {
    settings: String,
    tables: String,
    env: Env,
}

impl PolicyBuilder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Sets any setting by its path in a policy file, such as `("inbound.timeouts.connect", "2s")`; [`settings::all`]
    /// lists them.
    pub fn setting(mut self, path: &str, value: impl ToString) -> Self {
        line(&mut self.settings, &dotted(path), &written(path, value));
        self
    }

    /// The limit over all actions, per client address: `"1000 per 1h"`, or a [`LimitSpec`] with a penalty.
    pub fn global(mut self, limit: impl Into<LimitSpec>) -> Self {
        self.tables.push_str("[inbound.global]\n");
        for (key, value) in limit.into().entries {
            line(&mut self.tables, key, &value);
        }
        self
    }

    /// An action. Of those that match a request, the one that was added first wins.
    pub fn action(mut self, name: &str, action: ActionSpec) -> Self {
        // Writing to a string can't fail.
        let _ = writeln!(self.tables, "[inbound.action.{}]", string(name));
        let ActionSpec { limit, matching, limits } = action;
        for (key, value) in limit.entries {
            line(&mut self.tables, key, &value);
        }
        if !matching.is_empty() {
            line(&mut self.tables, "match", &table(&matching));
        }
        if !limits.is_empty() {
            let limits: Vec<String> = limits.iter().map(|limit| table(&limit.entries)).collect();
            line(&mut self.tables, "limits", &format!("[{}]", limits.join(", ")));
        }
        self
    }

    /// Somebody's API that is called.
    pub fn provider(mut self, name: &str, provider: ProviderSpec) -> Self {
        // Writing to a string can't fail.
        let _ = writeln!(self.tables, "[outbound.provider.{}]", string(name));
        for (key, value) in provider.entries {
            line(&mut self.tables, &dotted(&key), &value);
        }
        self
    }

    /// Networks and addresses that are never limited.
    pub fn allow(self, networks: impl IntoWords) -> Self {
        self.words("inbound.allow", networks)
    }

    /// Networks and addresses that are always refused.
    pub fn deny(self, networks: impl IntoWords) -> Self {
        self.words("inbound.deny", networks)
    }

    /// Networks and addresses of proxies whose forwarding headers are believed.
    pub fn trusted_proxies(self, networks: impl IntoWords) -> Self {
        self.words("inbound.trusted_proxies", networks)
    }

    /// Lets environment variables override what was built, as they override a file; see
    /// [`Sources::env`](crate::Sources::env).
    pub fn env<K: Into<String>, V: Into<String>>(mut self, variables: impl IntoIterator<Item = (K, V)>) -> Self {
        self.env.variables.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// The policy.
    ///
    /// # Errors
    /// Everything that is wrong with it, as [`Policy::load`] would tell.
    pub fn build(self) -> Result<Policy, Errors> {
        crate::read::policy(NAME, self.text().as_bytes(), self.env)
    }

    /// The policy file that says the same.
    pub fn text(&self) -> String {
        format!("{}{}", self.settings, self.tables)
    }

    fn words(mut self, path: &str, words: impl IntoWords) -> Self {
        line(&mut self.settings, path, &list(words));
        self
    }
}

/// One string or several.
pub trait IntoWords {
    /// The strings.
    fn into_words(self) -> Vec<String>;
}

impl IntoWords for &str {
    fn into_words(self) -> Vec<String> {
        vec![self.to_owned()]
    }
}

impl IntoWords for String {
    fn into_words(self) -> Vec<String> {
        vec![self]
    }
}

impl<T: Into<String>> IntoWords for Vec<T> {
    fn into_words(self) -> Vec<String> {
        self.into_iter().map(Into::into).collect()
    }
}

impl<T: Into<String>, const N: usize> IntoWords for [T; N] {
    fn into_words(self) -> Vec<String> {
        self.into_iter().map(Into::into).collect()
    }
}

impl IntoWords for &[&str] {
    fn into_words(self) -> Vec<String> {
        self.iter().map(|word| (*word).to_owned()).collect()
    }
}

/// How a refused call is paid for.
#[derive(Clone, Debug)]
#[must_use]
pub struct PenaltyText(Vec<(&'static str, String)>);

impl PenaltyText {
    /// Blocks that begin with `base` and double up to `cap`: `("2s", "1h")`.
    pub fn new(base: &str, cap: &str) -> Self {
        Self(vec![("base", string(base)), ("cap", string(cap))])
    }

    /// What each further block is multiplied by, instead of 2.
    pub fn factor(mut self, factor: u32) -> Self {
        self.0.push(("factor", factor.to_string()));
        self
    }

    /// How long without a refusal takes one strike off, instead of the longer of cap and window.
    pub fn forgive_after(mut self, span: &str) -> Self {
        self.0.push(("forgive_after", string(span)));
        self
    }

    /// Tells the longer of block and window, and leaves no parole.
    pub fn strict(mut self) -> Self {
        self.0.push(("mode", string("strict")));
        self
    }
}

/// One limit: of [`PolicyBuilder::global`], or of an action with several that have keys of their own.
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
    /// How much is allowed: `"5 per 60s"`, or several quantities that must all agree. See
    /// [`Quantity`](crate::Quantity).
    pub fn new(limit: impl IntoWords) -> Self {
        Self { entries: vec![("limit", list(limit))] }
    }

    /// Its name in decisions and headers.
    pub fn named(self, name: &str) -> Self {
        self.with("name", string(name))
    }

    /// What its calls are counted by, such as `["client_ip"]`; see [`KeyPart`](crate::KeyPart).
    pub fn key(self, parts: impl IntoWords) -> Self {
        self.with("key", list(parts))
    }

    /// The fate of requests without a part of the key: `"share"`, `"by_ip"`, `"refuse"` or `"skip"`; see
    /// [`Missing`](crate::Missing).
    pub fn missing(self, word: &str) -> Self {
        self.with("missing", string(word))
    }

    /// Blocks that begin with `base` and double up to `cap`: `("2s", "1h")`.
    pub fn penalty(self, base: &str, cap: &str) -> Self {
        self.penalty_of(PenaltyText::new(base, cap))
    }

    /// A penalty with more to say.
    pub fn penalty_of(self, penalty: PenaltyText) -> Self {
        self.with("penalty", table(&penalty.0))
    }

    /// Blocks that are all this long.
    pub fn ban(self, length: &str) -> Self {
        self.with("ban", string(length))
    }

    /// Counts refused calls too.
    pub fn count_all(self) -> Self {
        self.with("count", string("all"))
    }

    fn with(mut self, key: &'static str, value: String) -> Self {
        self.entries.push((key, value));
        self
    }
}

/// One action: its limits, what they count by and cost, and which requests it matches.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ActionSpec {
    limit: LimitSpec,
    matching: Vec<(&'static str, String)>,
    limits: Vec<LimitSpec>,
}

impl ActionSpec {
    /// An action with one key: `"5 per 60s"`, or several quantities that must all agree.
    pub fn new(limit: impl IntoWords) -> Self {
        Self { limit: LimitSpec::new(limit), ..Self::default() }
    }

    /// An action made from a preset: `"login"`; see [`Preset`](crate::Preset).
    pub fn preset(name: &str) -> Self {
        Self { limit: LimitSpec::default().with("preset", string(name)), ..Self::default() }
    }

    /// An action with several limits that have keys of their own.
    pub fn limits(limits: impl IntoIterator<Item = LimitSpec>) -> Self {
        Self { limits: limits.into_iter().collect(), ..Self::default() }
    }

    /// What its calls are counted by, such as `["client_ip"]`, which is the default; see
    /// [`KeyPart`](crate::KeyPart).
    pub fn key(self, parts: impl IntoWords) -> Self {
        self.with(|limit| limit.key(parts))
    }

    /// The fate of requests without a part of the key: `"share"`, `"by_ip"`, `"refuse"` or `"skip"`; see
    /// [`Missing`](crate::Missing).
    pub fn missing(self, word: &str) -> Self {
        self.with(|limit| limit.missing(word))
    }

    /// A second limit, on each IPv6 /48: `"50 per 60s"`, or `"preset"` for ten times the preset's.
    pub fn ipv6_network(self, limit: impl IntoWords) -> Self {
        self.with(|own| own.with("ipv6_network", list(limit)))
    }

    /// Blocks that begin with `base` and double up to `cap`: `("2s", "1h")`.
    pub fn penalty(self, base: &str, cap: &str) -> Self {
        self.with(|limit| limit.penalty(base, cap))
    }

    /// A penalty with more to say.
    pub fn penalty_of(self, penalty: PenaltyText) -> Self {
        self.with(|limit| limit.penalty_of(penalty))
    }

    /// Blocks that are all this long.
    pub fn ban(self, length: &str) -> Self {
        self.with(|limit| limit.ban(length))
    }

    /// Counts refused calls too.
    pub fn count_all(self) -> Self {
        self.with(LimitSpec::count_all)
    }

    /// How much a call weighs, instead of 1.
    pub fn cost(self, cost: u64) -> Self {
        self.with(|limit| limit.with("cost", cost.to_string()))
    }

    /// Decides and logs, and lets everything pass.
    pub fn shadow(self) -> Self {
        self.with(|limit| limit.with("mode", string("shadow")))
    }

    /// The methods it matches, such as `"POST"`.
    pub fn method(self, methods: impl IntoWords) -> Self {
        self.matching("method", methods)
    }

    /// The paths it matches, such as `"/login"` or `"/api/*"`; see [`Matcher`](crate::Matcher).
    pub fn path(self, paths: impl IntoWords) -> Self {
        self.matching("path", paths)
    }

    /// The hosts it matches.
    pub fn host(self, hosts: impl IntoWords) -> Self {
        self.matching("host", hosts)
    }

    fn with(mut self, change: impl FnOnce(LimitSpec) -> LimitSpec) -> Self {
        self.limit = change(self.limit);
        self
    }

    fn matching(mut self, key: &'static str, words: impl IntoWords) -> Self {
        self.matching.push((key, list(words)));
        self
    }
}

/// A setting's value as TOML: in quotes unless it is a number or a flag that the setting takes as such.
fn written(path: &str, value: impl ToString) -> String {
    let value = value.to_string();
    let is_bare = match settings::find(path).map(|setting| setting.form) {
        Some(Form::Flag) => matches!(value.as_str(), "true" | "false"),
        Some(Form::Count) => !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()),
        _ => false,
    };
    if is_bare { value } else { string(&value) }
}

fn line(text: &mut String, key: &str, value: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "{key} = {value}");
}

fn table(entries: &[(&'static str, String)]) -> String {
    let entries: Vec<String> = entries.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    format!("{{ {} }}", entries.join(", "))
}

/// A path with each piece that isn't a bare key in quotes.
fn dotted(path: &str) -> String {
    let is_bare = |piece: &str| {
        !piece.is_empty() && piece.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
    };
    let pieces: Vec<String> =
        path.split('.').map(|piece| if is_bare(piece) { piece.to_owned() } else { string(piece) }).collect();
    pieces.join(".")
}

/// One string as it is, several as a list.
fn list(words: impl IntoWords) -> String {
    let words: Vec<String> = words.into_words().iter().map(|word| string(word)).collect();
    match words.as_slice() {
        [word] => word.clone(),
        words => format!("[{}]", words.join(", ")),
    }
}

/// A TOML basic string.
fn string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
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
    fn says_what_a_file_says() {
        let built = Policy::builder()
            .setting("inbound.timeouts.connect", "2s")
            .setting("inbound.x_ratelimit", true)
            .setting("inbound.caps.headers", 50)
            .global(LimitSpec::new("1000 per 1h").penalty("2s", "1h").count_all())
            .action(
                "login",
                ActionSpec::new(["5 per 60s", "100 per day"])
                    .penalty_of(PenaltyText::new("3s", "30m").factor(3).strict().forgive_after("2h"))
                    .key(["client_ip", "platform"])
                    .method(["POST", "PUT"])
                    .path("/login")
                    .cost(2)
                    .shadow(),
            )
            .action("otp", ActionSpec::preset("otp_request").ban("5m"))
            .action("mixed", ActionSpec::limits([LimitSpec::new("1/s").named("a"), "5 per 60s".into()]))
            .deny("192.0.2.0/24");
        let text = built.text();
        let built = built.build().unwrap();
        let loaded = Policy::load(crate::Sources::new().file("x", text)).unwrap();
        assert_eq!(format!("{built:?}"), format!("{loaded:?}"));
        assert_eq!(built.inbound().timeouts.connect.as_secs(), 2);
        assert!(built.inbound().x_ratelimit);
        let names: Vec<&str> = built.plan().limits().iter().map(|(id, _)| built.plan().info(id).name()).collect();
        assert_eq!(names, ["global", "login.1", "login.2", "otp", "mixed.a", "mixed.2"]);
    }

    #[test]
    fn errors_show_what_was_written() {
        let errors = Policy::builder().action("login", ActionSpec::new("5 pr 60s")).build().unwrap_err();
        let shown = errors.to_string();
        assert!(shown.contains("policy builder:2:12") && shown.contains("did you mean `per`?"), "{shown}");
    }

    proptest! {
        #[test]
        fn any_string_is_quoted(text in any::<String>()) {
            let document = format!("x = {}", string(&text));
            let table: toml::Table = document.parse().unwrap();
            prop_assert_eq!(table["x"].as_str(), Some(&*text));
        }

        #[test]
        fn nothing_panics(name in any::<String>(), limit in any::<String>(), path in "[a-z.]{0,20}") {
            let _ = Policy::builder().setting(&path, &name).global(&*limit).action(&name, ActionSpec::new(limit.clone())).build();
        }
    }
}
