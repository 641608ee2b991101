//! `[outbound.provider.*]`: a provider's address, its credentials and the rules of its calls.

use std::time::Duration;

use http::{HeaderName, HeaderValue};
use tidegate_core::call::{CallRules, MAX_LEAD};
use tidegate_core::credential_pool::MAX_CREDENTIALS;
use tidegate_core::{Balance, Lane, Span};

use super::provider_limits::OutboundLimitCollector;
use super::urls::KEY_PLACEHOLDER;
use super::{DocumentReader, join_names};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::nearest::nearest;
use crate::outbound::preset::{PresetRequirement, has_alias, take_requirement};
use crate::outbound::{Auth, BaseUrl, ProviderConfig};
use crate::secret::SecretSource;

/// The path of a provider's settings.
pub(super) const PROVIDER_PATH: &str = "outbound.provider.*";

/// A provider's own section, merged over its preset.
pub(super) struct ProviderSection<'e> {
    pub(super) name: &'e str,
    pub(super) name_at: TextRange,
    pub(super) table: TomlTable,
    pub(super) preset: Option<String>,
    requirement: Option<PresetRequirement>,
}

impl DocumentReader<'_> {
    pub(super) fn provider(
        &mut self,
        entry: &TomlEntry,
        collected: &mut OutboundLimitCollector,
    ) -> Option<ProviderConfig> {
        let name_is_fine = self.check_provider_name(entry)?;
        let section = self.merge_preset(entry)?;
        let table = &section.table;

        let base_url = self.read_optional(table, "base_url", Self::base_url);
        let auth = self.read_optional(table, "auth", Self::auth);
        let credentials = self.read_optional(table, "credentials", Self::credentials);
        let balance = self.read_or_default(Some(table), "balance", Balance::RoundRobin, |reader, node| {
            reader.choice(node, "balance", &BALANCES)
        });
        let user_agent = self.read_optional(table, "user_agent", Self::user_agent);
        let login = self.login(table);
        let timeouts = self.provider_timeouts(table);
        let lead = self.read_or_default(Some(table), "lead", Span::from_millis(500), |reader, node| {
            let lead = reader.duration(node, "lead")?;
            if lead > MAX_LEAD {
                reader.report(node.at, format!("`lead` is longer than {MAX_LEAD}"), "a shorter duration");
                return None;
            }
            Some(lead)
        });
        let replay = self.read_or_default(Some(table), "replay", 64 << 10, |reader, node| {
            reader.bytes(node, "replay", 0..=64 << 20)
        });
        let pace = self.pace(table);
        let sequential =
            self.read_or_default(Some(table), "sequential", false, |reader, node| reader.boolean(node, "sequential"));
        let shared = self.read_or_default(Some(table), "shared", false, |reader, node| reader.boolean(node, "shared"));
        let learns = self
            .read_or_default(Some(table), "learn_limits", false, |reader, node| reader.boolean(node, "learn_limits"));
        let breaker = self.breaker(table);
        let inflight = self.adaptive_limit(table);
        let cache = self.cache(table);
        let throttled_when = self.throttled_when(table);
        let cost = self.cost_rules(table);

        let (base_url, auth, credentials) = (base_url?, auth?, credentials?);
        let (auth, credentials) = self.check_auth(&section, base_url.as_ref(), auth, credentials, login.as_ref())?;
        self.check_preset_requirements(&section, base_url.as_ref(), user_agent.as_ref())?;
        let login = login?;
        let rules = self.rules(&section, collected, credentials.len(), login.is_some(), sequential?, cost.as_ref())?;
        let (rules, hours) = rules;
        let throttled_when = throttled_when?;
        let spends = throttled_when.as_ref().is_some_and(|rule| rule.spends_quota);
        if spends && !collected.has_quota(&rules) {
            let at = table.table("throttled_when").and_then(|table| table.get("spends_quota"));
            let at = at.map_or(section.name_at, |entry| entry.key_at);
            let message = "`spends_quota` is true, but no limit of the provider is a quota";
            self.report(at, message, "a calendar quota beside it, such as limit = \"1000 per calendar day\"");
            return None;
        }
        let (connect_timeout, attempt_timeout, hedge_after) = timeouts?;
        name_is_fine.then_some(ProviderConfig {
            name: section.name.to_owned(),
            preset: section.preset.clone(),
            base_url,
            auth,
            credentials,
            balance: balance?,
            login,
            user_agent: user_agent?,
            breaker: breaker?,
            adaptive_limit: inflight?.filter(|_| sequential != Some(true)),
            connect_timeout,
            attempt_timeout,
            replay_bytes: usize::try_from(replay?).ok()?,
            cache: cache?,
            throttled_when,
            hedge_after,
            sequential: sequential?,
            shared: shared?,
            hours,
            cost: cost?,
            pace: pace?,
            rules_without_keys: CallRules { lead: lead?.min(rules.lead), tracks_remaining: learns?, ..rules },
        })
    }

    /// Returns true if the name is valid; `None` if there is no table under it.
    fn check_provider_name(&mut self, entry: &TomlEntry) -> Option<bool> {
        let name = &entry.key;
        self.section_name.clone_from(name);
        if entry.node.as_table().is_some() {
            return Some(self.check_name(name, entry.key_at, "provider"));
        }
        let error = if crate::settings::table_keys(PROVIDER_PATH).contains(&name.as_str()) {
            let message = format!("{} stands outside of any provider", quoted(name));
            Error::new(self.texts, entry.key_at, message, "a section for each API, [outbound.provider.NAME]")
                .help("give the provider a name, such as [outbound.provider.tmdb]")
        } else {
            let found = entry.node.describe(self.texts);
            let expected = format!("a section of its own, [outbound.provider.{name}]");
            Error::new(self.texts, entry.key_at, format!("the provider {} is {found}", quoted(name)), expected)
        };
        self.push_error(error);
        None
    }

    /// Merges the section over its preset. A key of the section wins; nested tables are merged key by key.
    fn merge_preset<'e>(&mut self, entry: &'e TomlEntry) -> Option<ProviderSection<'e>> {
        let own = entry.node.as_table()?;
        self.check_keys(own, PROVIDER_PATH);
        let preset = self.read_optional(own, "preset", Self::provider_preset)?;
        let mut table = preset.as_deref().and_then(|name| self.presets.table(name)).cloned().unwrap_or_default();
        let requirement = take_requirement(&mut table);
        if own.node("sequential").is_some_and(|node| matches!(node.value, TomlValue::Boolean(true))) {
            Lane::ALL.iter().for_each(|lane| table.remove(lane.name()));
        }
        for entry in &own.entries {
            let below = table.get_mut(&entry.key).map(|below| &mut below.node.value);
            match (below, &entry.node.value) {
                (Some(TomlValue::Table(below)), TomlValue::Table(above)) => {
                    for inner in &above.entries {
                        below.remove(&inner.key);
                        below.entries.push(inner.clone());
                    }
                }
                _ => {
                    table.remove(&entry.key);
                    table.entries.push(entry.clone());
                }
            }
        }
        Some(ProviderSection { name: &entry.key, name_at: entry.key_at, table, preset, requirement })
    }

    fn provider_preset(&mut self, node: &TomlNode) -> Option<String> {
        let names: Vec<&str> = self.presets.entries.iter().map(|preset| preset.key.as_str()).collect();
        let expected = join_names(&names);
        let text = self.string(node, "preset", &expected)?;
        if self.presets.get(text).is_some() {
            return Some(text.to_owned());
        }
        let names = || self.presets.entries.iter();
        let alias = names().find(|preset| has_alias(preset, text)).map(|preset| preset.key.as_str());
        let meant = alias.or_else(|| nearest(text, names().map(|preset| preset.key.as_str())));
        let error = Error::new(self.texts, node.at, format!("unknown preset {}", quoted(text)), expected);
        let error = error.did_you_mean(meant).help("without a preset, say `base_url` and `limit`");
        self.push_error(error);
        None
    }

    /// Reads `none`, `bearer`, `header:NAME`, `header:NAME PREFIX`, `query:NAME` or `path`, with its place in the
    /// policy.
    fn auth(&mut self, node: &TomlNode) -> Option<(Auth, TextRange)> {
        const FORMS: &str = "\"none\", \"bearer\", \"header:x-api-key\", \"header:Authorization Token\", \
                             \"query:api_key\" or \"path\"";
        let text = self.string(node, "auth", FORMS)?;
        let error = |message: String| Error::new(self.texts, node.at, message, FORMS);
        let error = match text.split_once(':') {
            None => match text {
                "none" => return Some((Auth::None, node.at)),
                "bearer" => return Some((Auth::Bearer, node.at)),
                "path" => return Some((Auth::Path, node.at)),
                "header" => {
                    error("`auth` is `header` without a name".to_owned()).did_you_mean(Some("header:x-api-key"))
                }
                "query" => error("`auth` is `query` without a name".to_owned()).did_you_mean(Some("query:api_key")),
                other => error(format!("`auth` is {}", quoted(other)))
                    .did_you_mean(nearest(other, ["none", "bearer", "path", "header", "query"])),
            },
            Some(("header", rest)) => {
                let (name, prefix) = rest.split_once(' ').unwrap_or((rest, ""));
                let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix} ") };
                match HeaderName::from_bytes(name.as_bytes()) {
                    _ if HeaderValue::from_str(&prefix).is_err() => {
                        error("`auth`: what comes before the credential can't stand in a header".to_owned())
                    }
                    Ok(name) if CONNECTION_HEADERS.contains(&name.as_str()) => {
                        error(format!("`auth`: the header `{name}` is the connection's own"))
                    }
                    Ok(name) => return Some((Auth::Header { name, prefix }, node.at)),
                    Err(_) => error(format!("`auth`: {} is no header's name", quoted(name))),
                }
            }
            Some(("query", name)) => {
                let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~[]".contains(&byte);
                if !name.is_empty() && name.bytes().all(fits) {
                    return Some((Auth::Query { name: name.to_owned() }, node.at));
                }
                error(format!("`auth`: {} is no query parameter's name", quoted(name)))
            }
            Some((other, _)) => error(format!("`auth` begins with {}", quoted(other)))
                .did_you_mean(nearest(other, ["header:NAME", "query:NAME"])),
        };
        self.push_error(error);
        None
    }

    /// Reads the sources of credentials, in order, with their place in the policy.
    fn credentials(&mut self, node: &TomlNode) -> Option<(Vec<SecretSource>, TextRange)> {
        let items = match &node.value {
            TomlValue::List(items) => items.as_slice(),
            _ => std::slice::from_ref(node),
        };
        if items.is_empty() || items.len() > MAX_CREDENTIALS {
            let message = format!("`credentials` has {} items", items.len());
            self.report(node.at, message, format!("1 to {MAX_CREDENTIALS} places, such as \"env:API_TOKEN\""));
            return None;
        }
        let mut sources: Vec<SecretSource> = Vec::new();
        let mut fine = true;
        for item in items {
            match self.secret_source(item, "credentials") {
                Some(source) if sources.contains(&source) => {
                    let message = format!("`credentials` has {source} twice");
                    self.report(item.at, message, "each credential once");
                    fine = false;
                }
                Some(source) => sources.push(source),
                None => fine = false,
            }
        }
        fine.then_some((sources, node.at))
    }

    fn user_agent(&mut self, node: &TomlNode) -> Option<HeaderValue> {
        const EXPECTED: &str = "what a header can hold, such as \"MyApp/1.0 ( me@example.com )\"";
        let text = self.string(node, "user_agent", EXPECTED)?;
        let value = HeaderValue::from_str(text).ok().filter(|value| !value.is_empty());
        if value.is_none() {
            self.report(node.at, format!("`user_agent` is {}", quoted(text)), EXPECTED);
        }
        value
    }

    fn provider_timeouts(&mut self, table: &TomlTable) -> Option<(Duration, Duration, Option<Duration>)> {
        let connect = self.read_or_default(Some(table), "connect_timeout", Duration::from_secs(5), |reader, node| {
            reader.timeout(node, "connect_timeout")
        });
        let attempt = self.read_or_default(Some(table), "attempt_timeout", Duration::from_secs(30), |reader, node| {
            reader.timeout(node, "attempt_timeout")
        });
        let hedge = self.read_optional(table, "hedge_after", |reader, node| reader.timeout(node, "hedge_after"));
        let (connect, attempt, hedge) = (connect?, attempt?, hedge?);
        if let Some(node) = table.node("hedge_after").filter(|_| hedge.is_some_and(|hedge| hedge >= attempt)) {
            let message = "`hedge_after` is no shorter than `attempt_timeout`, so it would never be reached";
            self.report(node.at, message, "a shorter duration");
            return None;
        }
        Some((connect, attempt, hedge))
    }

    /// Checks that the provider's address, `auth`, `login` and credentials fit together.
    fn check_auth(
        &mut self,
        section: &ProviderSection<'_>,
        base_url: Option<&BaseUrl>,
        auth: Option<(Auth, TextRange)>,
        credentials: Option<(Vec<SecretSource>, TextRange)>,
        login: Option<&Option<crate::outbound::Login>>,
    ) -> Option<(Auth, Vec<SecretSource>)> {
        let ProviderSection { name, name_at, table, .. } = section;
        if base_url.is_none() && section.preset.is_none() && table.get("limit").is_none() {
            if ["preset", "base_url", "limit"].iter().any(|key| self.has_misspelling_of(table, PROVIDER_PATH, key)) {
                return None;
            }
            let message = format!("the provider {} has neither a preset nor a base_url", quoted(name));
            let expected = "a preset in it, or the root of the API: base_url = \"https://api.example.com/v1\"";
            let error = Error::new(self.texts, *name_at, message, expected);
            let known = nearest(name, self.presets.entries.iter().map(|preset| preset.key.as_str()))
                .map(|preset| format!("preset = \"{preset}\""));
            self.push_error(error.did_you_mean(known.as_deref()));
            return None;
        }
        let keys = base_url.map_or(0, |url| url.path.matches(KEY_PLACEHOLDER).count());
        let url_at = table.node("base_url").map_or(*name_at, |node| node.at);
        let is_path = matches!(auth, Some((Auth::Path, _)));
        if is_path && keys != 1 {
            let message = format!("`auth` is `path`, but the base_url's path has {keys} places for the credential");
            let error = Error::new(self.texts, url_at, message, "`{key}` once in it");
            self.push_error(error.help("such as base_url = \"https://api.example.com/v1/{key}\""));
            return None;
        }
        if !is_path && keys > 0 {
            let message = "the base_url has a place for a credential, `{key}`, but `auth` isn't `path`";
            self.report(url_at, message, "auth = \"path\" beside it");
            return None;
        }
        let has_login = matches!(login, Some(Some(_)));
        match (auth, credentials) {
            (Some((Auth::None, at)), Some(_)) => {
                self.report(at, "`auth` is `none`, but there are `credentials`", "where they go, or no credentials");
                None
            }
            (None, Some((_, at))) => {
                let message = "there are `credentials`, but nothing says where they go";
                let error = Error::new(self.texts, at, message, "`auth` beside them, such as auth = \"bearer\"");
                self.push_error(error);
                None
            }
            (Some((Auth::None, _)) | None, None) if has_login => {
                let at = table.get("login").map_or(*name_at, |entry| entry.key_at);
                let message = "`login` gets a token, but nothing says where it goes";
                self.report(at, message, "`auth` beside it, such as auth = \"bearer\"");
                None
            }
            (Some((Auth::None, _)) | None, None) => Some((Auth::None, Vec::new())),
            (Some((auth, _)), None) if has_login && !login_takes_credential(login) => Some((auth, Vec::new())),
            (Some((_, at)), None) => {
                if self.has_misspelling_of(table, PROVIDER_PATH, "credentials") {
                    return None;
                }
                let variable = format!("{}_TOKEN", name.to_ascii_uppercase().replace(['-', '.'], "_"));
                let from_preset = section.preset.as_ref().filter(|_| table.node("auth").is_some());
                let at = from_preset.map_or(at, |_| *name_at);
                let message = format!("the provider {} wants a credential, and has none", quoted(name));
                let expected = format!("credentials = [\"env:{variable}\"] in it");
                let error = Error::new(self.texts, at, message, expected);
                self.push_error(error.help("to call it without, write auth = \"none\""));
                None
            }
            (Some((auth, _)), Some((credentials, _))) => Some((auth, credentials)),
        }
    }

    /// Checks the requirements of presets that a preset can't fulfil by itself.
    fn check_preset_requirements(
        &mut self,
        section: &ProviderSection<'_>,
        base_url: Option<&BaseUrl>,
        user_agent: Option<&Option<HeaderValue>>,
    ) -> Option<()> {
        let preset = section.preset.as_deref().unwrap_or_default();
        match (section.requirement, user_agent, base_url) {
            (Some(PresetRequirement::Contact), Some(agent), _) => {
                const FORM: &str = "user_agent = \"App/Version ( contact )\"";
                if agent.as_ref().is_some_and(|agent| agent.to_str().is_ok_and(names_app_and_contact)) {
                    return Some(());
                }
                let at = section.table.node("user_agent").map_or(section.name_at, |node| node.at);
                let message =
                    format!("the preset `{preset}` requires a `user_agent` that names the application and a contact");
                let error = Error::new(self.texts, at, message, FORM);
                self.push_error(error.help("such as user_agent = \"MyTagger/1.2.0 ( https://example.com/mytagger )\""));
                None
            }
            (Some(PresetRequirement::Loopback), _, Some(url)) if !url.is_loopback() => {
                let at = section.table.node("base_url").map_or(section.name_at, |node| node.at);
                let message =
                    format!("{} isn't on this machine, as the preset `{preset}` requires", url.authority.host());
                let error =
                    Error::new(self.texts, at, message, "a host on loopback, such as \"http://127.0.0.1:9000\"");
                self.push_error(error.help("for a server elsewhere, leave the preset out and say its limit"));
                None
            }
            _ => Some(()),
        }
    }
}

const BALANCES: [(&str, Balance); 3] = [
    ("round-robin", Balance::RoundRobin),
    ("random", Balance::Random),
    ("least-recently-used", Balance::LeastRecentlyUsed),
];

/// Headers about the transport of a message, not about the request (RFC 9110 §7.6.1, RFC 9112).
const CONNECTION_HEADERS: [&str; 9] = [
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

fn login_takes_credential(login: Option<&Option<crate::outbound::Login>>) -> bool {
    login.and_then(Option::as_ref).is_none_or(|login| login.body.contains(super::login::CREDENTIAL_PLACEHOLDER))
}

/// Returns true for `App/Version ( contact )`, with a web or mail address as contact.
fn names_app_and_contact(agent: &str) -> bool {
    let Some((product, contact)) = agent.trim().strip_suffix(')').and_then(|agent| agent.split_once('(')) else {
        return false;
    };
    let product = product.trim().split_once('/').is_some_and(|(app, version)| !app.is_empty() && !version.is_empty());
    let contact = contact.trim();
    product && contact.contains(['@', '.']) && !contact.contains(char::is_whitespace)
}
