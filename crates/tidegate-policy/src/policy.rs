//! A whole policy and its sources.

use std::sync::Arc;

use crate::alerts::{AlertConfig, WebhookPlace};
use crate::builder::PolicyBuilder;
use crate::edit::LimitSections;
use crate::environment::EnvVars;
use crate::error::{Errors, Note};
use crate::outbound::OutboundConfig;
use crate::plan::Plan;
use crate::secret::SecretSource;
use crate::sections::{
    AdminConfig, ApiConfig, CompatibleServer, InboundCaps, InboundConfig, InboundTimeouts, LogConfig, ReloadConfig,
    RespConfig, RlsConfig,
};
use crate::store::StoreConfig;

/// The policy that is used if there is no file: a gate on 127.0.0.1:8080 in front of 127.0.0.1:3000.
const DEFAULT_POLICY: &str = include_str!("default.toml");

/// The sources of a policy: at most one file's text, and environment variables. The caller reads them, so a policy
/// can come from anywhere.
#[derive(Clone, Debug, Default)]
pub struct PolicySources {
    pub(crate) file: Option<(String, Vec<u8>)>,
    pub(crate) variables: EnvVars,
}

impl PolicySources {
    /// Creates empty sources, which read as the embedded default policy ([`Policy::default_text`]).
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads this text instead of the embedded default policy. Errors call it `name`, which is usually its path.
    #[must_use]
    pub fn file(self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.file_bytes(name, text.into())
    }

    /// [`PolicySources::file`] for bytes that may not be text: a byte that isn't UTF-8 is reported like any other
    /// mistake.
    #[must_use]
    pub fn file_bytes(mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        self.file = Some((name.into(), bytes.into()));
        self
    }

    /// Lets environment variables override the file. Only names that begin with `TIDEGATE_` and the plain names
    /// (`GLOBAL_RATE_LIMIT`, `GLOBAL_RATE_WINDOW`, `BACKOFF_BASE`, `BACKOFF_MAX`) are read, so the whole environment
    /// may be given: `std::env::vars()`. A name that begins with `TIDEGATE_` and is no setting's is an error.
    #[must_use]
    pub fn env<K: Into<String>, V: Into<String>>(mut self, variables: impl IntoIterator<Item = (K, V)>) -> Self {
        self.variables.variables.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    fn read(self, predecessor: Option<&Policy>) -> Result<Policy, Errors> {
        let (name, body) =
            self.file.unwrap_or_else(|| ("the built-in default policy".to_owned(), DEFAULT_POLICY.into()));
        crate::read::policy(&name, &body, self.variables, predecessor)
    }

    /// Also reads names that begin with a custom prefix, such as `PIXIVFE`. `PIXIVFE_TOKEN` and the others that
    /// [`settings`](crate::settings) lists apply to every provider of `[outbound]`.
    #[must_use]
    pub fn env_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.variables.prefix = Some(prefix.into());
        self
    }
}

/// A whole policy: all of its sections, checked, and the plan that the engine runs.
#[derive(Clone, Debug)]
pub struct Policy {
    pub(crate) store: StoreConfig,
    pub(crate) inbound: InboundConfig,
    pub(crate) api: ApiConfig,
    pub(crate) rls: Option<RlsConfig>,
    pub(crate) resp: Option<RespConfig>,
    pub(crate) admin: AdminConfig,
    pub(crate) log: LogConfig,
    pub(crate) reload: ReloadConfig,
    pub(crate) plan: Arc<Plan>,
    pub(crate) outbound: Option<OutboundConfig>,
    pub(crate) alerts: Vec<AlertConfig>,
    pub(crate) notes: Vec<Note>,
    pub(crate) restart_needed: Vec<&'static str>,
    pub(crate) removed: Vec<&'static str>,
    /// The parts that [`Policy::removed`] may name and its own sources have, without what it keeps of an earlier one.
    /// Empty for a policy within another document.
    pub(crate) own_parts: Vec<&'static str>,
    /// The text that it was read from; `None` for a policy within another document.
    pub(crate) source: Option<Arc<LimitSections>>,
}

impl Policy {
    /// Reads a policy. The environment overrides the file, and the file overrides the defaults. Without a file, the
    /// embedded default policy is read.
    ///
    /// # Errors
    /// All errors, not only the first; see [`Errors`].
    pub fn load(sources: PolicySources) -> Result<Self, Errors> {
        sources.read(None)
    }

    /// Reads a policy that replaces this one while the program runs, as [`Policy::load`] does. A limit of the same name
    /// keeps its [`LimitId`](tidegate_core::LimitId), and so its state. A limit that isn't there any more stays in the
    /// plan as a [retired](Plan::is_retired) one, for calls that began with it.
    ///
    /// Settings that a running program can't change keep their present values: the store, the addresses and caps of
    /// listeners, the log except `access`, and sections that appear or disappear. [`Policy::restart_needed`] names those that differ.
    ///
    /// ```
    /// use tidegate_policy::{Policy, PolicySources};
    ///
    /// let read = |text: &str| PolicySources::new().file("tidegate.toml", text);
    /// let earlier = Policy::load(read("[inbound.action.login]\nlimit = \"5 per 60s\"\n"))?;
    /// let later = earlier.load_next(read(
    ///     "[inbound.action.search]\nlimit = \"9 per 1s\"\n[inbound.action.login]\nlimit = \"3 per 60s\"\n",
    /// ))?;
    /// let (login, _) = earlier.plan().limits().iter().next().expect("a limit");
    /// assert_eq!(later.plan().limit_info(login).name(), "login");
    /// # Ok::<(), tidegate_policy::Errors>(())
    /// ```
    ///
    /// # Errors
    /// As [`Policy::load`]. Retired limits count among the 4095 that a policy may have.
    pub fn load_next(&self, sources: PolicySources) -> Result<Self, Errors> {
        let mut next = sources.read(Some(self))?;
        next.removed = self.own_parts.iter().copied().filter(|part| !next.own_parts.contains(part)).collect();
        next.keep_fixed_settings(self);
        Ok(next)
    }

    /// The settings of a [next](Self::load_next) policy that differ from those in force, which stay until a restart.
    pub fn restart_needed(&self) -> &[&'static str] {
        &self.restart_needed
    }

    /// The parts of the present policy's text that the text of a [next](Self::load_next) one lacks, as a half-written file
    /// does: `every setting`, `inbound.upstream`, `api.listen`, `rls`, `resp`, `admin.listen`, `outbound`, `outbound.listen` and
    /// `every limit`. Those that can't be removed without a restart are named, too.
    pub fn removed(&self) -> &[&'static str] {
        &self.removed
    }

    /// The parts of a policy as it was read. `is_empty` is true if its file has no setting.
    pub(crate) fn find_parts(&self, is_empty: bool) -> Vec<&'static str> {
        let outbound = self.outbound.as_ref();
        let parts = [
            ("every setting", !is_empty),
            ("inbound.upstream", self.inbound.upstream.is_some()),
            ("api.listen", !self.api.listen.is_off()),
            ("rls", self.rls.is_some()),
            ("resp", self.resp.is_some()),
            ("admin.listen", !self.admin.listen.is_off()),
            ("outbound", outbound.is_some()),
            ("outbound.listen", outbound.is_some_and(|outbound| !outbound.listen.is_off())),
            ("every limit", self.plan.active_limits().next().is_some()),
        ];
        parts.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect()
    }

    /// Takes over the settings of the present policy that a running program can't change.
    fn keep_fixed_settings(&mut self, present: &Self) {
        let mut differ = Vec::new();
        keep("store", &mut self.store, present.store.clone(), &mut differ);
        let (inbound, fixed) = (&mut self.inbound, &present.inbound);
        keep("inbound.listen", &mut inbound.listen, fixed.listen.clone(), &mut differ);
        if inbound.upstream.is_some() != fixed.upstream.is_some() {
            keep("inbound.upstream", &mut inbound.upstream, fixed.upstream.clone(), &mut differ);
        }
        let caps = InboundCaps { pool_idle: inbound.caps.pool_idle, body: inbound.caps.body, ..fixed.caps };
        keep("inbound.caps", &mut inbound.caps, caps, &mut differ);
        let timeouts = InboundTimeouts { connect: inbound.timeouts.connect, ..fixed.timeouts };
        keep("inbound.timeouts", &mut inbound.timeouts, timeouts, &mut differ);
        keep("api.listen", &mut self.api.listen, present.api.listen.clone(), &mut differ);
        let (per_client, fixed) = (&mut self.api.connections_per_client, present.api.connections_per_client);
        keep("api.connections_per_client", per_client, fixed, &mut differ);
        keep("api.compat", &mut self.api.compat, present.api.compat.clone(), &mut differ);
        keep("admin.listen", &mut self.admin.listen, present.admin.listen.clone(), &mut differ);
        let (per_client, fixed) = (&mut self.admin.connections_per_client, present.admin.connections_per_client);
        keep("admin.connections_per_client", per_client, fixed, &mut differ);
        keep("admin.metrics", &mut self.admin.metrics, present.admin.metrics, &mut differ);
        keep("admin.history_bytes", &mut self.admin.history_bytes, present.admin.history_bytes, &mut differ);
        let log = LogConfig { access: self.log.access, ..present.log };
        keep("log", &mut self.log, log, &mut differ);
        match (&mut self.rls, &present.rls) {
            (Some(rls), Some(fixed)) => {
                keep("rls.listen", &mut rls.listen, fixed.listen.clone(), &mut differ);
                let per_client = &mut rls.connections_per_client;
                keep("rls.connections_per_client", per_client, fixed.connections_per_client, &mut differ);
            }
            (None, None) => {}
            (rls, fixed) => {
                rls.clone_from(fixed);
                differ.push("rls");
            }
        }
        match (&mut self.resp, &present.resp) {
            (Some(resp), Some(fixed)) => {
                keep("resp.listen", &mut resp.listen, fixed.listen.clone(), &mut differ);
                let per_client = &mut resp.connections_per_client;
                keep("resp.connections_per_client", per_client, fixed.connections_per_client, &mut differ);
            }
            (None, None) => {}
            (resp, fixed) => {
                resp.clone_from(fixed);
                differ.push("resp");
            }
        }
        match (&mut self.outbound, &present.outbound) {
            (Some(outbound), Some(fixed)) => {
                keep("outbound.listen", &mut outbound.listen, fixed.listen.clone(), &mut differ);
                keep("outbound.connections", &mut outbound.connections, fixed.connections, &mut differ);
                let per_client = &mut outbound.connections_per_client;
                keep("outbound.connections_per_client", per_client, fixed.connections_per_client, &mut differ);
                keep("outbound.cache_bytes", &mut outbound.cache_bytes, fixed.cache_bytes, &mut differ);
                keep("outbound.snapshot", &mut outbound.snapshot, fixed.snapshot.clone(), &mut differ);
            }
            (None, None) => {}
            (outbound, fixed) => {
                outbound.clone_from(fixed);
                differ.push("outbound");
            }
        }
        self.restart_needed = differ;
    }

    /// Makes a policy in Rust, in the same words and with the same checks as a file.
    pub fn builder() -> PolicyBuilder {
        PolicyBuilder::new()
    }

    /// The text of the embedded default policy: a gate on 127.0.0.1:8080 in front of 127.0.0.1:3000.
    pub fn default_text() -> &'static str {
        DEFAULT_POLICY
    }

    /// `[store]`.
    pub fn store(&self) -> &StoreConfig {
        &self.store
    }

    /// `[inbound]` except its limits, which are in the [`plan`](Self::plan). A proxy runs only if it has an upstream.
    pub fn inbound(&self) -> &InboundConfig {
        &self.inbound
    }

    /// `[api]`.
    pub fn api(&self) -> &ApiConfig {
        &self.api
    }

    /// `[rls]`, if the policy has one.
    pub fn rls(&self) -> Option<&RlsConfig> {
        self.rls.as_ref()
    }

    /// `[resp]`, if the policy has one.
    pub fn resp(&self) -> Option<&RespConfig> {
        self.resp.as_ref()
    }

    /// True if callers may state a rate of their own.
    pub(crate) fn has_caller_rates(&self) -> bool {
        self.resp.is_some() || self.rls.is_some() || self.api.compat.contains(&CompatibleServer::Throttlecrab)
    }

    /// `[admin]`.
    pub fn admin(&self) -> &AdminConfig {
        &self.admin
    }

    /// `[log]`.
    pub fn log(&self) -> &LogConfig {
        &self.log
    }

    /// `[reload]`.
    pub fn reload(&self) -> &ReloadConfig {
        &self.reload
    }

    /// `[outbound]`, if the policy has one.
    pub fn outbound(&self) -> Option<&OutboundConfig> {
        self.outbound.as_ref()
    }

    /// The alerts, in file order.
    pub fn alerts(&self) -> &[AlertConfig] {
        &self.alerts
    }

    /// Remarks on texts that are valid, but may be read differently from what their author expects. `tidegate check`
    /// prints them.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// The places of the secrets that a server reads at its start, each with its setting, such as `admin.token`. Tokens of
    /// listeners that are off aren't read, nor are the credentials of providers that the gateway doesn't serve.
    pub fn secrets(&self) -> Vec<(String, &SecretSource)> {
        let (api, admin) = (&self.api, &self.admin);
        let mut found = Vec::new();
        let mut add = |setting: &str, source| found.push((setting.to_owned(), source));
        self.store.hash_key.iter().for_each(|source| add("store.hash_key", source));
        if !api.listen.is_off() {
            api.token.iter().for_each(|source| add("api.token", source));
        }
        if let Some(rls) = self.rls.as_ref().filter(|rls| !rls.listen.is_off()) {
            rls.token.iter().for_each(|source| add("rls.token", source));
        }
        if let Some(resp) = self.resp.as_ref().filter(|resp| !resp.listen.is_off()) {
            resp.token.iter().for_each(|source| add("resp.token", source));
        }
        if !admin.listen.is_off() {
            admin.token.iter().for_each(|source| add("admin.token", source));
            admin.tokens.iter().for_each(|token| add(&format!("admin.tokens.{}", token.name), &token.source));
        }
        if let Some(outbound) = &self.outbound {
            if !outbound.listen.is_off() {
                outbound.token.iter().for_each(|source| add("outbound.token", source));
            }
            for provider in outbound.served_providers() {
                let section = format!("outbound.provider.{}", provider.name);
                provider.credentials.iter().for_each(|source| add(&format!("{section}.credentials"), source));
                let secrets = provider.login.iter().flat_map(|login| &login.secrets);
                secrets.for_each(|(name, source)| add(&format!("{section}.login.secrets.{name}"), source));
            }
        }
        for alert in &self.alerts {
            if let Some(WebhookPlace::Secret(source)) = alert.webhook.as_ref().map(|webhook| &webhook.place) {
                add(&format!("alert.{}.webhook", alert.name), source);
            }
            let telegram = alert.telegram.iter();
            telegram.for_each(|telegram| add(&format!("alert.{}.telegram.token", alert.name), &telegram.token));
        }
        found
    }

    /// The plan that the engine runs for incoming calls.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }
}

/// Sets a setting to its fixed value, and notes its name if it differed.
fn keep<T: PartialEq>(name: &'static str, setting: &mut T, fixed: T, differ: &mut Vec<&'static str>) {
    if *setting != fixed {
        *setting = fixed;
        differ.push(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> PolicySources {
        PolicySources::new().file("test.toml", text)
    }

    #[test]
    fn a_cut_policy_names_removed_parts() {
        let whole = "[inbound]\nupstream = \"http://a\"\n[inbound.action.a]\nlimit = \"5 per 1m\"\n\
            [outbound]\nlisten = \"127.0.0.1:8090\"\n[outbound.provider.b]\nbase_url = \"http://b\"\n";
        let policy = Policy::load(read(whole)).expect("a policy");
        let all = ["every setting", "inbound.upstream", "outbound", "outbound.listen", "every limit"];
        for (text, removed) in [
            ("", &all[..]),
            ("# a comment\n", &all),
            ("[inbound]\n", &all[1..]),
            (whole, &[]),
            (whole.split("[outbound]").next().unwrap(), &["outbound", "outbound.listen"]),
            (&format!("{whole}[api]\nlisten = \"off\"\n"), &["api.listen"]),
        ] {
            assert_eq!(policy.load_next(read(text)).expect("a policy").removed(), removed, "{text}");
        }
    }

    #[test]
    fn an_accepted_removal_is_named_once() {
        let whole = "[inbound]\nupstream = \"http://a\"\n[outbound.provider.b]\nbase_url = \"http://b\"\n";
        let next = || read("[api]\nlisten = \"off\"\n");
        let accepted = Policy::load(read(whole)).expect("a policy").load_next(next()).expect("a policy");
        let removed = ["inbound.upstream", "api.listen", "outbound", "outbound.listen"];
        assert_eq!(accepted.removed(), removed);
        let later = accepted.load_next(next()).expect("a policy");
        assert_eq!((later.removed(), later.restart_needed()), (&[][..], accepted.restart_needed()));
        assert_eq!(
            later.load_next(read(whole)).expect("a policy").load_next(next()).expect("a policy").removed(),
            removed
        );
    }

    #[test]
    fn certificates_of_clients_replace_a_token() {
        let load = |section: &str, certificates: &str| {
            let files = "certificates = \"a.pem\", keys = \"a.key\", client_ca = \"ca.pem\"";
            let text = format!("[{section}]\nlisten = \"0.0.0.0:8443\"\ntls = {{ {files}{certificates} }}\n");
            Policy::load(read(&text))
        };
        for section in ["api", "rls", "resp", "admin"] {
            assert!(load(section, "").is_ok(), "{section}");
            let optional = load(section, ", client_certificates = \"optional\"").expect_err(section).to_string();
            assert!(optional.contains("without a token") && optional.contains("tls.client_ca"), "{optional}");
        }
    }

    #[test]
    fn a_next_policy_keeps_fixed_settings() {
        let first = "[admin]\nlisten = \"0.0.0.0:8083\"\ntoken = \"env:A\"\n[store]\non_outage = \"deny\"\n\
            [inbound.action.a]\nlimit = \"5 per 1m\"\n";
        let next = "[admin]\nlisten = \"127.0.0.1:8083\"\n[api]\nlisten = \"off\"\n[inbound]\nupstream = \"http://a\"\n\
            [inbound.caps]\nbody = \"1MiB\"\nconnections = 7\n[outbound.provider.b]\nbase_url = \"http://b\"\n\
            [inbound.action.a]\nlimit = \"6 per 1m\"\n";
        let first = Policy::load(read(first)).expect("a policy");
        for _ in 0..2 {
            let next = first.load_next(read(next)).expect("a policy");
            let names = ["store", "inbound.upstream", "inbound.caps", "api.listen", "admin.listen", "outbound"];
            assert_eq!(next.restart_needed(), names);
            assert_eq!((&next.admin().listen, &next.admin().token), (&first.admin().listen, &None));
            assert_eq!((&next.api().listen, next.store()), (&first.api().listen, first.store()));
            assert_eq!(next.inbound().caps, InboundCaps { body: next.inbound().caps.body, ..first.inbound().caps });
            assert!(next.inbound().caps.body == Some(1 << 20) && next.outbound().is_none());
            let on_outage =
                |policy: &Policy| policy.plan().limits().iter().map(|(_, it)| it.sharing().on_outage).next();
            assert_eq!(on_outage(&next), on_outage(&first));
        }
    }
}
