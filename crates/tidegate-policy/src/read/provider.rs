//! `[outbound.provider.*]`: a provider's address, its credentials and the rules of its calls.

use std::time::Duration;

use http::{HeaderName, HeaderValue};
use tidegate_core::call::{CallRules, MAX_LEAD};
use tidegate_core::credential_pool::MAX_CREDENTIALS;
use tidegate_core::{Balance, Lane, Span};

use super::forms::{Bytes, Custom, DURATION, FLAG, LIMITS, Maybe, Quantities, TABLE, TableOr, Words};
use super::lanes::{BACKGROUND, USER, WEBHOOK};
use super::login::{CREDENTIAL_PLACEHOLDER, LOGIN};
use super::pace::{PACE, PACE_KINDS, PaceKind};
use super::provider_limits::{OutboundLimits, ProviderTraits};
use super::replies::{CACHE, COST, THROTTLED};
use super::resilience::{ADAPTIVE, BREAKER, BUDGET, COOLDOWN, OFF_OR_ON, RETRY};
use super::rules::{ALLOWANCE, RULE, SCOPE};
use super::urls::KEY_PLACEHOLDER;
use super::{DocumentReader, join_names};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::error::quoted;
use crate::nearest::nearest;
use crate::outbound::preset::{PresetRequirement, has_alias, take_requirement};
use crate::outbound::{Auth, BaseUrl, ErrorFormat, Login, PaceConfig, ProviderConfig};
use crate::secret::SecretSource;
use crate::settings::SettingType::{Strings, Text};
use crate::settings::key::{Below, read_keys, setting_keys};

pub(super) const PROVIDER_PATH: &str = "outbound.provider.*";

setting_keys! {
    PROVIDER: ProviderKeys {
        preset: Option<String> = "",
            Maybe(Custom(Text, "the name of a preset", |reader, node, _| reader.provider_preset(node))),
            "a ready-made provider, such as tmdb or github; settings beside it override it";
        base_url: Option<BaseUrl> = "",
            Maybe(Custom(Text, "a URL as https://HOST/PATH", |reader, node, _| reader.base_url(node))),
            "the root of the API, as https://HOST/PATH";
        auth: Auth = "none", Custom(Text, "a place in requests", |reader, node, _| reader.auth(node)),
            "the place of a credential: none, bearer, header:NAME, header:NAME PREFIX, query:NAME or path";
        credentials: Vec<SecretSource> = "",
            Custom(Strings, "a place of a secret, or a list of them", |reader, node, _| reader.credentials(node)),
            "the places of its credentials: env:NAME or file:PATH";
        balance: Balance = "round-robin", Words(&BALANCES),
            "the order of credentials for calls: round-robin, random or least-recently-used";
        limit: Quantities = "", LIMITS, "its limits for all calls together";
        credential_limit: Quantities = "", LIMITS, "its limits for each credential";
        scope_limit: Quantities = "", LIMITS, "the limits for all calls of each scope";
        credential_scope_limit: Quantities = "", LIMITS, "the limits for the calls of each scope with each credential";
        cost_limit: Quantities = "", LIMITS, "the limits on the cost of all its calls";
        credential_cost_limit: Quantities = "", LIMITS,
            "the limits on the cost of calls with each credential";
        background: () = "", TABLE, "the rules of calls in the background", Below::Table(&BACKGROUND);
        user: () = "", TABLE, "the rules of calls for a user that waits", Below::Table(&USER);
        webhook: () = "", TABLE, "the rules of calls for another system that waits", Below::Table(&WEBHOOK);
        learn_limits: bool = "false", FLAG,
            "true to obey the remaining amount of each credential in the headers of replies";
        shared: bool = "false", FLAG, "true to keep its state in the store that nodes share";
        sequential: bool = "false", FLAG, "true for one call at a time, without lanes";
        timeout: Option<Duration> = "", Maybe(DURATION), "the time for a whole call, in every lane";
        connect_timeout: Duration = "5s", DURATION, "the time for connecting";
        attempt_timeout: Duration = "30s", DURATION,
            "the time from the last progress of the request's body to the beginning of its reply, and the longest pause of \
             the reply";
        replay: usize = "64KiB", Bytes(0, 64 << 20), "the longest request body that is kept for another attempt";
        lead: Span = "500ms", Custom(Text, "a duration", lead), "the longest time that a request is on its way to it";
        user_agent: Option<HeaderValue> = "",
            Maybe(Custom(Text, "a text", |reader, node, _| reader.user_agent(node))),
            "the value of User-Agent, replacing the caller's";
        error_format: ErrorFormat = "tidegate", Words(&ERROR_FORMATS),
            "the form of the gateway's own errors, for the SDK that reads them: tidegate, openai or anthropic";
        hedge_after: Option<Duration> = "", Maybe(DURATION), "the time without a reply after which a second request is sent";
        pace: PaceKind = "", TableOr(&PACE_KINDS),
            "the way in which the pace is found below the limits: responsive, adaptive or limits", Below::Table(&PACE);
        retry: () = "", TABLE, "the rules of retries", Below::Table(&RETRY);
        budget: bool = "", TableOr(&OFF_OR_ON), "the bound on retries, or off", Below::Table(&BUDGET);
        breaker: bool = "", TableOr(&OFF_OR_ON), "the breaker that stops calls to it, or off", Below::Table(&BREAKER);
        adaptive: bool = "", TableOr(&OFF_OR_ON),
            "the adaptive cap on calls at a time, or off", Below::Table(&ADAPTIVE);
        cooldown: () = "", TABLE, "the cool-down of a throttled credential", Below::Table(&COOLDOWN);
        cache: bool = "off", TableOr(&OFF_OR_ON),
            "the cache of its replies: off, on, or a table", Below::Table(&CACHE);
        login: () = "", TABLE, "the exchange of a credential for a token: a POST", Below::Table(&LOGIN);
        rule: () = "", TABLE, "what replies mean; the first rule that matches decides", Below::Items(&RULE);
        throttled_when: () = "", TABLE, "replies that report too many calls only in their body: a table, or a list of them", Below::Table(&THROTTLED);
        scope: () = "", TABLE, "parts of the API that have limits of their own", Below::Items(&SCOPE);
        allowance: () = "", TABLE, "what is left, as replies tell it, in place of the usual headers", Below::Items(&ALLOWANCE);
        max_pause: Span = "1d",
            Custom(Text, "a duration of at most 31 days", |reader, node, key| reader.max_pause(node, key)),
            "the longest time for which one reply closes anything";
        cost: () = "", TABLE, "the cost of a call, for limits on cost", Below::Table(&COST);
    }
}

const BALANCES: [(&str, Balance); 3] = [
    ("round-robin", Balance::RoundRobin),
    ("random", Balance::Random),
    ("least-recently-used", Balance::LeastRecentlyUsed),
];

const ERROR_FORMATS: [(&str, ErrorFormat); 3] =
    [("tidegate", ErrorFormat::Tidegate), ("openai", ErrorFormat::OpenAi), ("anthropic", ErrorFormat::Anthropic)];

/// A provider's own section, merged over its preset.
pub(super) struct ProviderSection<'e> {
    pub(super) name: &'e str,
    pub(super) name_at: TextRange,
    pub(super) table: TomlTable,
    pub(super) preset: Option<String>,
    /// The rules of the preset. Those of the section come before them.
    preset_rules: Option<TomlNode>,
    requirement: Option<PresetRequirement>,
}

impl DocumentReader<'_> {
    pub(super) fn provider(&mut self, entry: &TomlEntry, collected: &mut OutboundLimits) -> Option<ProviderConfig> {
        let name_is_valid = self.check_provider_name(entry)?;
        let section = self.merge_preset(entry)?;
        let table = &section.table;
        read_keys!(self, table, PROVIDER: base_url, user_agent, lead, replay, sequential, learn_limits);
        read_keys!(self, table, PROVIDER: balance, shared, connect_timeout, attempt_timeout, hedge_after, error_format);
        let (auth, credentials) = (self.placed(table, &PROVIDER.auth), self.placed(table, &PROVIDER.credentials));
        let login = self.login(table);
        let hedge_after = self.check_hedge(table, hedge_after, connect_timeout.and(attempt_timeout));
        let pace = self.pace(table);
        let breaker = self.breaker(table);
        let adaptive_limit = self.adaptive_limit(table);
        let cache = self.cache(table);
        let verdicts = self.verdict_rules(table, section.preset_rules.as_ref());
        let cost = self.cost_rules(table);

        let (base_url, auth, credentials) = (base_url?, auth?, credentials?);
        let (auth, credentials) = self.check_auth(&section, base_url.as_ref(), auth, credentials, login.as_ref())?;
        self.check_preset_requirements(&section, base_url.as_ref(), user_agent.as_ref())?;
        let (login, sequential, pace) = (login?, sequential?, pace?);
        let traits = ProviderTraits {
            credentials: credentials.len(),
            renews: login.is_some(),
            sequential,
            is_spaced_by_pace: matches!(pace, PaceConfig::Adaptive(_)) && shared == Some(false),
        };
        let (mut rules, hours) = self.rules(&section, collected, traits, cost.as_ref())?;
        let mut breaker = breaker?;
        self.make_room_for_attempts(table, &mut rules, breaker.as_mut());
        let verdicts = verdicts?;
        if let Some(node) = spends_quota(table).filter(|_| !collected.has_quota(&rules)) {
            let message = "`spends_quota` is true, but no limit of the provider is a quota";
            let expected = "a calendar quota beside it, such as limit = \"1000 per calendar day\"";
            return self.error(node.at, message, expected).none();
        }
        let hedge_after = hedge_after?;
        name_is_valid.then_some(ProviderConfig {
            name: section.name.to_owned(),
            preset: section.preset.clone(),
            base_url,
            auth,
            credentials,
            balance: balance?,
            login,
            user_agent: user_agent?,
            error_format: error_format?,
            breaker,
            adaptive_limit: adaptive_limit?.filter(|_| !sequential),
            connect_timeout: connect_timeout?,
            attempt_timeout: attempt_timeout?,
            replay_bytes: replay?,
            cache: cache?,
            verdicts,
            hedge_after,
            sequential,
            shared: shared?,
            hours,
            cost: cost?,
            pace,
            rules_without_keys: CallRules { lead: lead?.min(rules.lead), tracks_remaining: learn_limits?, ..rules },
        })
    }

    /// Checks that a second request is sent before the first is given up.
    fn check_hedge(
        &mut self,
        table: &TomlTable,
        hedge_after: Option<Option<Duration>>,
        attempt_timeout: Option<Duration>,
    ) -> Option<Option<Duration>> {
        let (hedge_after, attempt_timeout) = (hedge_after?, attempt_timeout?);
        if let Some(node) = table.node("hedge_after").filter(|_| hedge_after >= Some(attempt_timeout)) {
            let message = "`hedge_after` is no shorter than `attempt_timeout`, so it would never be reached";
            return self.error(node.at, message, "a shorter duration").none();
        }
        Some(hedge_after)
    }

    /// Returns true if the name is valid; `None` if there is no table under it.
    fn check_provider_name(&mut self, entry: &TomlEntry) -> Option<bool> {
        let name = &entry.key;
        self.section_name.clone_from(name);
        if entry.node.as_table().is_none() && crate::settings::table_keys(PROVIDER_PATH).contains(&name.as_str()) {
            let message = format!("{} stands outside of any provider", quoted(name));
            let error = self.error(entry.key_at, message, "a section for each API, [outbound.provider.NAME]");
            return error.help("give the provider a name, such as [outbound.provider.tmdb]").none();
        }
        self.own_table(entry, "outbound", "provider")?;
        Some(self.check_name(name, entry.key_at, "provider"))
    }

    /// Merges the section over its preset. A key of the section wins; nested tables are merged key by key.
    fn merge_preset<'e>(&mut self, entry: &'e TomlEntry) -> Option<ProviderSection<'e>> {
        let own = entry.node.as_table()?;
        self.check_keys(own, PROVIDER_PATH);
        let preset = self.value(own, &PROVIDER.preset)?;
        let mut table = preset.as_deref().and_then(|name| self.presets.table(name)).cloned().unwrap_or_default();
        let requirement = take_requirement(&mut table);
        if own.node("sequential").is_some_and(|node| matches!(node.value, TomlValue::Boolean(true))) {
            Lane::ALL.iter().for_each(|lane| table.remove(lane.name()));
        }
        let preset_rules = table.node("rule").cloned();
        table.remove("rule");
        table.merge(own, 1);
        Some(ProviderSection { name: &entry.key, name_at: entry.key_at, table, preset, preset_rules, requirement })
    }

    fn provider_preset(&mut self, node: &TomlNode) -> Option<String> {
        let names: Vec<&str> = self.presets.entries.iter().map(|preset| preset.key.as_str()).collect();
        let expected = join_names(&names);
        let text = self.string(node, "preset", &expected)?;
        if self.presets.get(text).is_some() {
            return Some(text.to_owned());
        }
        let alias = self.presets.entries.iter().find(|preset| has_alias(preset, text));
        let names = self.presets.entries.iter().map(|preset| preset.key.as_str());
        let meant = alias.map(|preset| preset.key.as_str()).or_else(|| nearest(text, names)).map(str::to_owned);
        let error = self.error(node.at, format!("unknown preset {}", quoted(text)), expected);
        error.did_you_mean(meant.as_deref()).help("without a preset, say `base_url` and `limit`").none()
    }

    /// Reads `none`, `bearer`, `header:NAME`, `header:NAME PREFIX`, `query:NAME` or `path`.
    fn auth(&mut self, node: &TomlNode) -> Option<Auth> {
        const FORMS: &str = "\"none\", \"bearer\", \"header:x-api-key\", \"header:Authorization Token\", \
                             \"query:api_key\" or \"path\"";
        let text = self.string(node, "auth", FORMS)?;
        let (message, meant) = match text.split_once(':') {
            None => match text {
                "none" => return Some(Auth::None),
                "bearer" => return Some(Auth::Bearer),
                "path" => return Some(Auth::Path),
                "header" => ("`auth` is `header` without a name".to_owned(), Some("header:x-api-key")),
                "query" => ("`auth` is `query` without a name".to_owned(), Some("query:api_key")),
                other => {
                    let meant = nearest(other, ["none", "bearer", "path", "header", "query"]);
                    (format!("`auth` is {}", quoted(other)), meant)
                }
            },
            Some(("header", rest)) => {
                let (name, prefix) = rest.split_once(' ').unwrap_or((rest, ""));
                let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix} ") };
                let message = match HeaderName::from_bytes(name.as_bytes()) {
                    _ if HeaderValue::from_str(&prefix).is_err() => {
                        "`auth`: what comes before the credential can't stand in a header".to_owned()
                    }
                    Ok(name) if CONNECTION_HEADERS.contains(&name.as_str()) => {
                        format!("`auth`: the header `{name}` is the connection's own")
                    }
                    Ok(name) => return Some(Auth::Header { name, prefix }),
                    Err(_) => format!("`auth`: {} is no header's name", quoted(name)),
                };
                (message, None)
            }
            Some(("query", name)) => {
                let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~[]".contains(&byte);
                if !name.is_empty() && name.bytes().all(fits) {
                    return Some(Auth::Query { name: name.to_owned() });
                }
                (format!("`auth`: {} is no query parameter's name", quoted(name)), None)
            }
            Some((other, _)) => {
                (format!("`auth` begins with {}", quoted(other)), nearest(other, ["header:NAME", "query:NAME"]))
            }
        };
        self.error(node.at, message, FORMS).did_you_mean(meant).none()
    }

    fn credentials(&mut self, node: &TomlNode) -> Option<Vec<SecretSource>> {
        let expected = " places, such as \"env:API_TOKEN\"";
        self.check_length(node.at, "credentials", node.items().len(), MAX_CREDENTIALS, expected)?;
        let sources = node.items().iter().map(|item| (self.secret_source(item, "credentials"), item));
        let sources = sources.map(|(source, item)| (source, item.at, item.as_str().unwrap_or_default())).collect();
        self.distinct(sources, |source| format!("`credentials` has {source} twice"), "each credential once")
    }

    fn user_agent(&mut self, node: &TomlNode) -> Option<HeaderValue> {
        const EXPECTED: &str = "the value of a header, such as \"MyApp/1.0 ( me@example.com )\"";
        let text = self.string(node, "user_agent", EXPECTED)?;
        let value = HeaderValue::from_str(text).ok().filter(|value| !value.is_empty());
        value.or_else(|| self.wrong_text(node, "user_agent", text, EXPECTED).none())
    }

    /// Checks that the provider's address, `auth`, `login` and credentials fit together.
    fn check_auth(
        &mut self,
        section: &ProviderSection<'_>,
        base_url: Option<&BaseUrl>,
        auth: Option<(Auth, TextRange)>,
        credentials: Option<(Vec<SecretSource>, TextRange)>,
        login: Option<&Option<Login>>,
    ) -> Option<(Auth, Vec<SecretSource>)> {
        let ProviderSection { name, name_at, table, .. } = section;
        if base_url.is_none() && section.preset.is_none() && table.get("limit").is_none() {
            if ["preset", "base_url", "limit"].iter().any(|key| self.has_misspelling_of(table, PROVIDER_PATH, key)) {
                return None;
            }
            let message = format!("the provider {} has neither a preset nor a base_url", quoted(name));
            let expected = "a preset in it, or the root of the API: base_url = \"https://api.example.com/v1\"";
            let known = nearest(name, self.presets.entries.iter().map(|preset| preset.key.as_str()))
                .map(|preset| format!("preset = \"{preset}\""));
            return self.error(*name_at, message, expected).did_you_mean(known.as_deref()).none();
        }
        let keys = base_url.map_or(0, |url| url.path.matches(KEY_PLACEHOLDER).count());
        let url_at = table.node("base_url").map_or(*name_at, |node| node.at);
        let is_path = matches!(auth, Some((Auth::Path, _)));
        if is_path && keys != 1 {
            let message = format!("`auth` is `path`, but the base_url's path has {keys} places for the credential");
            let error = self.error(url_at, message, "`{key}` once in it");
            return error.help("such as base_url = \"https://api.example.com/v1/{key}\"").none();
        }
        if !is_path && keys > 0 {
            let message = "the base_url has a place for a credential, `{key}`, but `auth` isn't `path`";
            return self.error(url_at, message, "auth = \"path\" beside it").none();
        }
        let has_login = matches!(login, Some(Some(_)));
        match (auth, credentials) {
            (Some((Auth::None, at)), Some(_)) => {
                let expected = "where they go, or no credentials";
                self.error(at, "`auth` is `none`, but there are `credentials`", expected).none()
            }
            (None, Some((_, at))) => {
                let message = "there are `credentials`, but nothing says where they go";
                self.error(at, message, "`auth` beside them, such as auth = \"bearer\"").none()
            }
            (Some((Auth::None, _)) | None, None) if has_login => {
                let at = table.get("login").map_or(*name_at, |entry| entry.key_at);
                let message = "`login` gets a token, but nothing says where it goes";
                self.error(at, message, "`auth` beside it, such as auth = \"bearer\"").none()
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
                self.error(at, message, expected).help("to call it without, write auth = \"none\"").none()
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
                let help = "such as user_agent = \"MyTagger/1.2.0 ( https://example.com/mytagger )\"";
                self.error(at, message, FORM).help(help).none()
            }
            (Some(PresetRequirement::Loopback), _, Some(url)) if !url.is_loopback() => {
                let at = section.table.node("base_url").map_or(section.name_at, |node| node.at);
                let message =
                    format!("{} isn't on this machine, as the preset `{preset}` requires", url.authority.host());
                self.error(at, message, "a host on loopback, such as \"http://127.0.0.1:9000\"")
                    .help("for a server elsewhere, leave the preset out and say its limit")
                    .none()
            }
            _ => Some(()),
        }
    }
}

/// The first `spends_quota` of a provider that is true.
fn spends_quota(provider: &TomlTable) -> Option<&TomlNode> {
    let items = provider.node("throttled_when")?.items().iter();
    let flags = items.filter_map(|item| item.as_table()?.node("spends_quota"));
    flags.into_iter().find(|node| matches!(node.value, TomlValue::Boolean(true)))
}

fn lead(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Span> {
    let lead = reader.duration(node, key)?;
    if lead > MAX_LEAD {
        return reader.error(node.at, format!("`lead` is longer than {MAX_LEAD}"), "a shorter duration").none();
    }
    Some(lead)
}

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

fn login_takes_credential(login: Option<&Option<Login>>) -> bool {
    login.and_then(Option::as_ref).is_none_or(|login| login.body.contains(CREDENTIAL_PLACEHOLDER))
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
