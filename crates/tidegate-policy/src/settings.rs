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

pub(crate) mod key;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::LazyLock;

use crate::read;
use key::KeyGroup;

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
#[derive(Clone, Debug)]
pub struct Setting {
    path: String,
    pub(crate) value_type: SettingType,
    form: String,
    default: &'static str,
    description: &'static str,
}

/// The settings against which the reader checks names. `*` stands for an action's name, `#` for an item of a list.
static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut settings = Vec::new();
    read::ROOT.add_settings("", &mut settings);
    settings
});

/// The plain names: name, default, meaning.
pub(crate) const PLAIN_VARIABLES: [(&str, &str, &str); 4] = [
    (
        "GLOBAL_RATE_LIMIT",
        "1000",
        "the number of calls of one client address over all actions; without it and [inbound.global], there is no such limit",
    ),
    ("GLOBAL_RATE_WINDOW", "3600", "the window of GLOBAL_RATE_LIMIT, in seconds"),
    ("BACKOFF_BASE", "2", "the base of the power in the blocks of every penalty: with 3, blocks of 3, 9, 27 s"),
    ("BACKOFF_MAX", "3600", "the longest block of every penalty, in seconds"),
];

/// A name after a custom prefix, and the setting of every provider that it sets.
pub(crate) struct PrefixedSetting {
    pub(crate) name: &'static str,
    /// The setting's path below the provider.
    pub(crate) path: &'static str,
    description: &'static str,
}

impl PrefixedSetting {
    pub(crate) fn setting(&self) -> &'static Setting {
        find(&format!("outbound.provider.*.{}", self.path)).expect("invariant: a prefixed name sets a setting")
    }
}

const fn prefixed(name: &'static str, path: &'static str, description: &'static str) -> PrefixedSetting {
    PrefixedSetting { name, path, description }
}

/// The names after a custom prefix. Of two names for the same setting, the later wins.
pub(crate) static PREFIXED_SETTINGS: [PrefixedSetting; 11] = [
    prefixed("API_MAX_RETRIES", "retry.max_attempts", "the number of retries of a call after its first attempt"),
    prefixed("API_BASE_TIMEOUT", "retry.base", "the first wait before a retry"),
    prefixed("API_MAX_BACKOFF_TIME", "retry.cap", "the longest wait before a retry"),
    prefixed("TOKEN", "credentials", "the tokens themselves, with commas between them"),
    prefixed("TOKEN_LOAD_BALANCING", "balance", "round-robin, random or least-recently-used"),
    prefixed(
        "MAX_RETRIES",
        "retry.max_token_retries",
        "the maximum number of retries of a throttled call with another token",
    ),
    prefixed("TOKEN_MAX_RETRIES", "retry.max_token_retries", "the same, and overrides MAX_RETRIES"),
    prefixed("BASE_TIMEOUT", "cooldown.base", "the first cool-down of a throttled token"),
    prefixed("TOKEN_BASE_TIMEOUT", "cooldown.base", "the same, and overrides BASE_TIMEOUT"),
    prefixed("MAX_BACKOFF_TIME", "cooldown.cap", "the longest cool-down of a throttled token"),
    prefixed("TOKEN_MAX_BACKOFF_TIME", "cooldown.cap", "the same, and overrides MAX_BACKOFF_TIME"),
];

/// The prefix of all other variables' names.
pub(crate) const VARIABLE_PREFIX: &str = "TIDEGATE__";

impl Setting {
    /// Its path in the file; `*` stands for an action's or a provider's name, `#` for each item of a list.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its environment variable, with `NAME` for an action's or a provider's name. `None` inside lists, which a
    /// variable sets as a whole.
    pub fn variable(&self) -> Option<String> {
        let in_list = self.path.contains('#');
        (!in_list).then(|| variable_name(&self.path, "NAME"))
    }

    /// Its form in plain English, such as "a duration".
    pub fn form(&self) -> &str {
        &self.form
    }

    /// Its default in the form of a variable's value; empty if there is none.
    pub fn default(&self) -> &'static str {
        self.default
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
    SETTINGS.iter()
}

/// The keys that a table may have, by the table's path; `""` for the whole file.
pub(crate) fn table_keys(table: &str) -> Vec<&'static str> {
    let inside =
        |path: &'static str| if table.is_empty() { Some(path) } else { path.strip_prefix(table)?.strip_prefix('.') };
    let mut keys: Vec<&str> = all().filter_map(|setting| inside(&setting.path)?.split('.').next()).collect();
    // The settings below one key stand together.
    keys.dedup();
    keys
}

/// True if a word is part of a setting's path.
pub(crate) fn has_word(word: &str) -> bool {
    static WORDS: LazyLock<HashSet<&str>> =
        LazyLock::new(|| all().flat_map(|setting| setting.path.split('.')).collect());
    WORDS.contains(word)
}

pub(crate) fn find(path: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.path == path)
}

/// Returns every environment variable with its default and its meaning, as an `.env` file with all of them commented
/// out.
pub fn env_example() -> String {
    let mut text = String::from(
        "# Every environment variable that Tidegate reads, with its default. The environment overrides the policy file.\n\
         # NAME stands for the name of an action, a provider or an alert in the policy file, in capitals.\n\n",
    );
    let plain = PLAIN_VARIABLES.iter().map(|(name, default, meaning)| ((*name).to_owned(), *default, *meaning));
    let rest = all().filter_map(|setting| Some((setting.variable()?, setting.default, setting.description)));
    for (name, default, meaning) in plain.chain(rest) {
        // Writing to a string can't fail.
        let _ = writeln!(text, "# {meaning}\n#{name}={default}");
    }
    text.push_str("\n# With --env-prefix PREFIX, over every provider:\n");
    for prefixed in &PREFIXED_SETTINGS {
        let PrefixedSetting { name, description, .. } = prefixed;
        let _ = writeln!(text, "# {description}\n#PREFIX_{name}={}", prefixed.setting().default);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_keys_come_from_the_settings_list() {
        assert_eq!(
            table_keys(""),
            ["store", "inbound", "api", "rls", "resp", "admin", "log", "reload", "outbound", "alert"]
        );
        assert_eq!(
            table_keys("api"),
            [
                "listen",
                "unix",
                "tls",
                "http2",
                "proxy_protocol",
                "token",
                "hosts",
                "connections_per_client",
                "forward_auth",
                "deny_status",
                "compat"
            ]
        );
        assert_eq!(table_keys("inbound.action.*.match"), ["method", "path", "host"]);
    }

    #[test]
    fn settings_have_environment_variable_names() {
        let setting = find("inbound.action.*.match.path").unwrap();
        assert_eq!(setting.variable().as_deref(), Some("TIDEGATE__INBOUND__ACTION__NAME__MATCH__PATH"));
        assert_eq!(variable_name(&setting.path, "otp-request"), "TIDEGATE__INBOUND__ACTION__OTP_REQUEST__MATCH__PATH");
        assert_eq!(find("inbound.action.*.limits.#.name").unwrap().variable(), None);
        for line in env_example().lines() {
            assert!(line.is_empty() || line.starts_with('#'), "{line}");
        }
    }
}
