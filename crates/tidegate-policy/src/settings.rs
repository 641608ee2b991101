//! Every setting of a policy: its name in the file, its environment variable, its default and its purpose.
//!
//! The environment beats the file, and the file beats the default. A variable's name is `TIDEGATE__` and the setting's
//! path in capitals, joined by two underscores: `TIDEGATE__INBOUND__TIMEOUTS__CONNECT=2s`,
//! `TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT=10 per 60s`. Values are written without quotes; lists with commas between
//! their items or as in TOML. The name of an action or provider matches in any case, with `_` for characters that a
//! variable's name can't hold. The environment changes actions and providers but never adds one. An empty value counts
//! as not set. Any other name that begins with `TIDEGATE_`, in any case, is an error, because it would have no effect.
//! Only a variable that holds a `token` or another secret may have such a name.
//!
//! Four plain names are also read; names that begin with `TIDEGATE__` win over them:
//!
//! | name | means |
//! | --- | --- |
//! | `GLOBAL_RATE_LIMIT` | the count of `inbound.global`'s limit; adds it, with a penalty, if the file has no such limit |
//! | `GLOBAL_RATE_WINDOW` | its window in seconds; 3600 if neither this nor the file says one |
//! | `BACKOFF_BASE` | the base of the power: with 3, blocks of 3, 9, 27 s …, that is `base = "3s"` and `factor = 3` |
//! | `BACKOFF_MAX` | the longest block in seconds |
//!
//! With [`PolicySources::env_prefix`](crate::PolicySources::env_prefix), names with a custom prefix apply to every
//! provider. Names that begin with `TIDEGATE__` win over these too. Durations are written as in Go:
//!
//! | name after `PREFIX_` | sets |
//! | --- | --- |
//! | `API_MAX_RETRIES` | `retry.max_attempts`: one more than this number of retries |
//! | `API_BASE_TIMEOUT`, `API_MAX_BACKOFF_TIME` | `retry.base`, `retry.cap` |
//! | `TOKEN` | `credentials` of the one provider that takes credentials: the tokens themselves, separated by commas |
//! | `TOKEN_LOAD_BALANCING` | `balance` |
//! | `MAX_RETRIES`, or with priority `TOKEN_MAX_RETRIES` | `retry.max_token_retries` |
//! | `BASE_TIMEOUT`, or with priority `TOKEN_BASE_TIMEOUT` | `cooldown.base` |
//! | `MAX_BACKOFF_TIME`, or with priority `TOKEN_MAX_BACKOFF_TIME` | `cooldown.cap` |
//!
//! As environment variables, `BACKOFF_BASE` and `BACKOFF_MAX` beat the file for every growing penalty in it. Bans and
//! limits without a penalty stay as they are.

use std::fmt::Write as _;

mod outbound;

/// The form in which a setting's value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettingType {
    /// One string.
    Text,
    /// A string or a list of strings.
    Strings,
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Integer,
    /// A table, or a list of tables.
    TableOrTables,
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    path: &'static str,
    pub(crate) value_type: SettingType,
    default: &'static str,
    description: &'static str,
}

const fn setting(path: &'static str, form: SettingType, default: &'static str, meaning: &'static str) -> Setting {
    Setting { path, value_type: form, default, description: meaning }
}

use SettingType::{Flag, Integer, Strings, TableOrTables, Text};

/// The table against which the reader checks names, together with [`outbound::SETTINGS`]. `*` stands for an action's
/// name, `#` for an item of a list.
static SETTINGS: &[Setting] = &[
    setting(
        "store.url",
        Text,
        "memory",
        "where counts live: memory, file:PATH, or the URL of a server that nodes share",
    ),
    setting("store.max_bytes", Text, "64MiB", "the most memory that counts may take"),
    setting("store.on_outage", Text, "local", "what holds while a shared store is away: local, allow or deny"),
    setting("store.timeout", Text, "50ms", "how long a decision waits for a shared store"),
    setting("store.prefix", Text, "tidegate", "what all names in a shared store begin with"),
    setting(
        "store.hash_key",
        Text,
        "",
        "the secret that keys are hashed under, as env:NAME; kept in the store if unsaid",
    ),
    setting("store.nodes", Integer, "1", "how many nodes share the store, until it tells by itself"),
    setting("store.sync", Text, "100ms", "how long after a change a file is written at the latest, or always"),
    setting(
        "store.on_full",
        Text,
        "",
        "what holds while a file can't be written: continue or deny; unsaid, deny with sync = always and else continue",
    ),
    setting("store.cluster", Text, "together", "a cluster's keys: together, or reserve to take them one by one"),
    setting("inbound.listen", Text, "127.0.0.1:8080", "where the gate listens"),
    setting("inbound.upstream", Text, "", "the server behind the gate, as http://HOST:PORT; without one no proxy runs"),
    setting("inbound.trusted_proxies", Strings, "", "networks whose forwarding headers are believed"),
    setting(
        "inbound.forwarded",
        Text,
        "x-forwarded-for",
        "the header that trusted proxies write: x-forwarded-for or forwarded (RFC 7239)",
    ),
    setting("inbound.allow", Strings, "", "networks that are never limited"),
    setting("inbound.deny", Strings, "", "networks that are always refused"),
    setting(
        "inbound.path_quirks",
        Strings,
        "encoded_slash",
        "what the upstream takes for the same path: encoded_slash, parameters, case, caddy, windows; [] for nothing",
    ),
    setting(
        "inbound.ambiguous_paths",
        Text,
        "union",
        "paths that servers read differently: union to count every reading, refuse, or normalise to forward one",
    ),
    setting("inbound.ipv6_prefix", Integer, "64", "how many bits of an IPv6 address are one client: 32 to 64"),
    setting("inbound.headers", Text, "draft-10", "rate-limit headers on answers: draft-10, draft-7 or none"),
    setting("inbound.x_ratelimit", Flag, "false", "whether answers also carry X-RateLimit-* headers"),
    setting("inbound.timeouts.header", Text, "10s", "for the head of a request to arrive"),
    setting("inbound.timeouts.body", Text, "30s", "between two pieces of a body"),
    setting("inbound.timeouts.connect", Text, "5s", "for connecting to the upstream"),
    setting("inbound.timeouts.response", Text, "60s", "until the head of the upstream's answer"),
    setting("inbound.timeouts.idle", Text, "75s", "how long a connection is kept without a request"),
    setting("inbound.timeouts.shutdown", Text, "30s", "how long a shutdown waits for requests in flight"),
    setting("inbound.caps.connections", Integer, "10000", "connections open at once"),
    setting(
        "inbound.caps.connections_per_client",
        Integer,
        "",
        "connections of one client address open at once, or off; a quarter of connections if unsaid",
    ),
    setting("inbound.caps.header_bytes", Text, "64KiB", "bytes in the head of a request"),
    setting("inbound.caps.headers", Integer, "100", "header lines in a request"),
    setting("inbound.caps.body", Text, "unlimited", "bytes in the body of a request"),
    setting(
        "inbound.caps.body_rate",
        Text,
        "100B",
        "bytes a second that a request's body comes with at the least, or off",
    ),
    setting("inbound.caps.pool_idle", Integer, "128", "idle connections kept to the upstream"),
    setting("inbound.global.limit", Strings, "", "how much one client address may do over all actions"),
    setting("inbound.global.count", Text, "admitted", "which calls count: admitted, or all for refused ones too"),
    setting("inbound.global.mode", Text, "enforce", "enforce, or shadow to decide, log and let pass"),
    setting("inbound.global.penalty", TableOrTables, "", "what exceeding it costs: blocks that grow"),
    setting("inbound.global.penalty.base", Text, "2s", "the first block"),
    setting("inbound.global.penalty.factor", Integer, "2", "what each further block is multiplied by"),
    setting("inbound.global.penalty.cap", Text, "1h", "the longest block"),
    setting(
        "inbound.global.penalty.forgive_after",
        Text,
        "",
        "how long without a refusal takes one strike off; the longer of cap and window if unsaid",
    ),
    setting("inbound.global.penalty.mode", Text, "parole", "parole, or strict to tell the longer of block and window"),
    setting("inbound.global.ban", Text, "", "instead of a penalty: how long each block is"),
    setting(
        "inbound.global.on_outage",
        Text,
        "",
        "what holds while a shared store is away; the store's word if unsaid",
    ),
    setting(
        "inbound.global.lease",
        TableOrTables,
        "",
        "slices of the limit that a node takes from a shared store in one go",
    ),
    setting("inbound.global.lease.share", Text, "0.1", "how much of the limit one slice is, up to 0.5"),
    setting("inbound.global.lease.max_age", Text, "250ms", "how long a slice may be spent"),
    setting(
        "inbound.action.*.match",
        TableOrTables,
        "",
        "which requests it matches; without one only the decision API reaches it",
    ),
    setting("inbound.action.*.match.method", Strings, "", "the methods it matches, HEAD with GET; any if unsaid"),
    setting(
        "inbound.action.*.match.path",
        Strings,
        "",
        "the paths it matches, such as /login or /api/*; any if unsaid",
    ),
    setting("inbound.action.*.match.host", Strings, "", "the hosts it matches; any if unsaid"),
    setting("inbound.action.*.key", Strings, "client_ip", "what its calls are counted by"),
    setting(
        "inbound.action.*.missing",
        Text,
        "by_ip",
        "what becomes of requests without a header, cookie or parameter of the key: share, by_ip, refuse or skip",
    ),
    setting("inbound.action.*.limit", Strings, "", "how much is allowed"),
    setting("inbound.action.*.limits", TableOrTables, "", "several limits with keys of their own"),
    setting(
        "inbound.action.*.preset",
        Text,
        "",
        "a ready-made limit: login, otp_request, password_reset, register or api_call",
    ),
    setting(
        "inbound.action.*.ipv6_network",
        Strings,
        "",
        "a second limit, on each IPv6 /48: how much is allowed, or `preset` for ten times the preset's limit",
    ),
    setting("inbound.action.*.cost", Integer, "1", "how much a call weighs"),
    setting("inbound.action.*.count", Text, "admitted", "which calls count: admitted, or all for refused ones too"),
    setting("inbound.action.*.mode", Text, "enforce", "enforce, or shadow to decide, log and let pass"),
    setting("inbound.action.*.penalty", TableOrTables, "", "what exceeding it costs: blocks that grow"),
    setting("inbound.action.*.penalty.base", Text, "2s", "the first block"),
    setting("inbound.action.*.penalty.factor", Integer, "2", "what each further block is multiplied by"),
    setting("inbound.action.*.penalty.cap", Text, "1h", "the longest block"),
    setting(
        "inbound.action.*.penalty.forgive_after",
        Text,
        "",
        "how long without a refusal takes one strike off; the longer of cap and window if unsaid",
    ),
    setting(
        "inbound.action.*.penalty.mode",
        Text,
        "parole",
        "parole, or strict to tell the longer of block and window",
    ),
    setting("inbound.action.*.ban", Text, "", "instead of a penalty: how long each block is"),
    setting(
        "inbound.action.*.on_outage",
        Text,
        "",
        "what holds while a shared store is away; the store's word if unsaid",
    ),
    setting(
        "inbound.action.*.lease",
        TableOrTables,
        "",
        "slices of the limit that a node takes from a shared store in one go",
    ),
    setting("inbound.action.*.lease.share", Text, "0.1", "how much of the limit one slice is, up to 0.5"),
    setting("inbound.action.*.lease.max_age", Text, "250ms", "how long a slice may be spent"),
    setting("inbound.action.*.limits.#.name", Text, "", "its name in decisions and headers"),
    setting("inbound.action.*.limits.#.key", Strings, "", "what its calls are counted by; the action's key if unsaid"),
    setting(
        "inbound.action.*.limits.#.missing",
        Text,
        "",
        "what becomes of requests without a part of the key; the action's word if unsaid",
    ),
    setting("inbound.action.*.limits.#.limit", Strings, "", "how much is allowed"),
    setting(
        "inbound.action.*.limits.#.penalty",
        TableOrTables,
        "",
        "what exceeding it costs; the action's penalty if unsaid",
    ),
    setting("inbound.action.*.limits.#.penalty.base", Text, "2s", "the first block"),
    setting("inbound.action.*.limits.#.penalty.factor", Integer, "2", "what each further block is multiplied by"),
    setting("inbound.action.*.limits.#.penalty.cap", Text, "1h", "the longest block"),
    setting(
        "inbound.action.*.limits.#.penalty.forgive_after",
        Text,
        "",
        "how long without a refusal takes one strike off",
    ),
    setting("inbound.action.*.limits.#.penalty.mode", Text, "parole", "parole, or strict"),
    setting("inbound.action.*.limits.#.ban", Text, "", "instead of a penalty: how long each block is"),
    setting("inbound.action.*.limits.#.count", Text, "", "which calls count; the action's word if unsaid"),
    setting("api.listen", Text, "127.0.0.1:8082", "where the decision API and forward-auth listen, or off"),
    setting("api.token", Text, "", "where the bearer token is: env:NAME or file:PATH; required beyond loopback"),
    setting(
        "api.hosts",
        Strings,
        "",
        "names that a request's Host may have besides loopback's, unless it is forward-auth's or shows the token",
    ),
    setting(
        "api.forward_auth",
        Flag,
        "",
        "whether forward-auth is answered; if unsaid, unless requests can meet a limit on calls in flight",
    ),
    setting("api.deny_status", Integer, "429", "the status with which forward-auth refuses; nginx wants 401 or 403"),
    setting("admin.listen", Text, "127.0.0.1:8083", "where health and readiness listen, or off"),
    setting("admin.token", Text, "", "where the bearer token is: env:NAME or file:PATH; required beyond loopback"),
    setting(
        "admin.hosts",
        Strings,
        "",
        "names that a request's Host may have besides loopback's, unless it shows the token",
    ),
    setting("log.format", Text, "text", "text or json"),
    setting("log.level", Text, "info", "the least important level written: error, warn, info, debug or trace"),
    setting("log.refusals_per_second", Integer, "10", "the most lines about refusals in a second"),
];

/// The plain names: name, default, meaning.
pub(crate) const PLAIN_VARIABLES: [(&str, &str, &str); 4] = [
    ("GLOBAL_RATE_LIMIT", "1000", "how many calls one client address may make over all actions"),
    ("GLOBAL_RATE_WINDOW", "3600", "the window of GLOBAL_RATE_LIMIT, in seconds"),
    ("BACKOFF_BASE", "2", "the base of the power in blocks: with 3, blocks of 3, 9, 27 s"),
    ("BACKOFF_MAX", "3600", "the longest block, in seconds"),
];

/// A name after a custom prefix, and the setting of every provider that it sets.
pub(crate) struct PrefixedSetting {
    pub(crate) name: &'static str,
    /// The setting's path below the provider.
    pub(crate) path: &'static str,
    pub(crate) value_type: SettingType,
    default: &'static str,
    description: &'static str,
}

const fn prefixed_setting(
    name: &'static str,
    path: &'static str,
    form: SettingType,
    default: &'static str,
    meaning: &'static str,
) -> PrefixedSetting {
    PrefixedSetting { name, path, value_type: form, default, description: meaning }
}

/// The names after a custom prefix. Of two names for the same setting, the later wins.
pub(crate) static PREFIXED_SETTINGS: &[PrefixedSetting] = &[
    prefixed_setting(
        "API_MAX_RETRIES",
        "retry.max_attempts",
        Integer,
        "",
        "how often a call is retried after its first attempt",
    ),
    prefixed_setting("API_BASE_TIMEOUT", "retry.base", Text, "500ms", "the first wait before a retry"),
    prefixed_setting("API_MAX_BACKOFF_TIME", "retry.cap", Text, "8s", "the longest wait before a retry"),
    prefixed_setting("TOKEN", "credentials", Text, "", "the tokens themselves, with commas between them"),
    prefixed_setting(
        "TOKEN_LOAD_BALANCING",
        "balance",
        Text,
        "round-robin",
        "round-robin, random or least-recently-used",
    ),
    prefixed_setting(
        "MAX_RETRIES",
        "retry.max_token_retries",
        Integer,
        "5",
        "throttled calls sent again with another token",
    ),
    prefixed_setting("TOKEN_MAX_RETRIES", "retry.max_token_retries", Integer, "5", "the same; beats MAX_RETRIES"),
    prefixed_setting("BASE_TIMEOUT", "cooldown.base", Text, "1s", "how long a throttled token rests at first"),
    prefixed_setting("TOKEN_BASE_TIMEOUT", "cooldown.base", Text, "1s", "the same; beats BASE_TIMEOUT"),
    prefixed_setting("MAX_BACKOFF_TIME", "cooldown.cap", Text, "32s", "how long a throttled token rests at most"),
    prefixed_setting("TOKEN_MAX_BACKOFF_TIME", "cooldown.cap", Text, "32s", "the same; beats MAX_BACKOFF_TIME"),
];

/// The prefix of all other variables' names.
pub(crate) const VARIABLE_PREFIX: &str = "TIDEGATE__";

impl Setting {
    /// Its path in the file; `*` stands for an action's or a provider's name, `#` for each item of a list.
    pub fn path(&self) -> &'static str {
        self.path
    }

    /// Its environment variable, with `NAME` for an action's or a provider's name. `None` inside lists, which a
    /// variable sets as a whole.
    pub fn variable(&self) -> Option<String> {
        let in_list = self.path.contains('#');
        (!in_list).then(|| variable_name(self.path, "NAME"))
    }

    /// Its default in the form of a variable's value; empty if there is none.
    pub fn default(&self) -> &'static str {
        self.default
    }

    /// The form of its value in the file: `text`, `text or list`, `true or false`, `number` or `table`.
    pub fn form(&self) -> &'static str {
        match self.value_type {
            Text => "text",
            Strings => "text or list",
            Flag => "true or false",
            Integer => "number",
            TableOrTables => "table",
        }
    }

    /// Its purpose, in one line.
    pub fn description(&self) -> &'static str {
        self.description
    }
}

/// The name of the variable for a setting of this action or provider.
pub(crate) fn variable_name(path: &str, member: &str) -> String {
    let path = path.replace('*', &crate::environment::fold_member_name(member));
    format!("{VARIABLE_PREFIX}{}", path.to_ascii_uppercase().replace('.', "__"))
}

/// Every setting, section by section.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().chain(outbound::SETTINGS)
}

/// The keys that a table may have, by the table's path; `""` for the whole file.
pub(crate) fn table_keys(table: &str) -> Vec<&'static str> {
    let mut keys = Vec::new();
    for setting in all() {
        let inside = if table.is_empty() {
            Some(setting.path)
        } else {
            setting.path.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'))
        };
        if let Some(key) = inside.and_then(|rest| rest.split('.').next())
            && !keys.contains(&key)
        {
            keys.push(key);
        }
    }
    keys
}

/// The setting of this path.
pub(crate) fn find(path: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.path == path)
}

/// Returns every environment variable with its default and its meaning, as an `.env` file with all of them commented
/// out.
pub fn env_example() -> String {
    let mut text = String::from(
        "# Every environment variable that Tidegate reads, with its default. The environment beats the policy file.\n\
         # NAME stands for the name of an action or a provider in the policy file, in capitals.\n\n",
    );
    let plain = PLAIN_VARIABLES.iter().map(|(name, default, meaning)| ((*name).to_owned(), *default, *meaning));
    let rest = all().filter_map(|setting| Some((setting.variable()?, setting.default, setting.description)));
    for (name, default, meaning) in plain.chain(rest) {
        // Writing to a string can't fail.
        let _ = writeln!(text, "# {meaning}\n#{name}={default}");
    }
    text.push_str("\n# With --env-prefix PREFIX, over every provider:\n");
    for PrefixedSetting { name, default, description: meaning, .. } in PREFIXED_SETTINGS {
        let _ = writeln!(text, "# {meaning}\n#PREFIX_{name}={default}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_keys_come_from_the_settings_list() {
        assert_eq!(table_keys(""), ["store", "inbound", "api", "admin", "log", "outbound"]);
        assert_eq!(table_keys("api"), ["listen", "token", "hosts", "forward_auth", "deny_status"]);
        assert_eq!(table_keys("inbound.action.*.match"), ["method", "path", "host"]);
    }

    #[test]
    fn settings_have_environment_variable_names() {
        let setting = find("inbound.action.*.match.path").unwrap();
        assert_eq!(setting.variable().as_deref(), Some("TIDEGATE__INBOUND__ACTION__NAME__MATCH__PATH"));
        assert_eq!(variable_name(setting.path, "otp-request"), "TIDEGATE__INBOUND__ACTION__OTP_REQUEST__MATCH__PATH");
        assert_eq!(find("inbound.action.*.limits.#.name").unwrap().variable(), None);
        for line in env_example().lines() {
            assert!(line.is_empty() || line.starts_with('#'), "{line}");
        }
    }
}
