//! Reads a policy from a document. Every value is checked, and every error is reported.

mod actions;
mod alerts;
mod assemble;
mod checks;
mod forms;
mod keys;
mod lanes;
mod limit_list;
mod listen;
mod login;
mod matching;
mod outbound;
mod pace;
mod penalties;
mod provider;
mod provider_limits;
mod replies;
mod reservations;
mod resilience;
mod rls;
mod rules;
mod server;
mod store;
mod store_url;
mod tokens;
mod urls;
mod values;

pub(crate) use rules::built_in_rules;

use std::sync::Arc;

use tidegate_core::OnOutage;

use crate::address::Ipv6Prefix;
use crate::document::{
    SourceKind, SourceText, SourceTexts, TextRange, TomlDocument, TomlEntry, TomlNode, TomlTable, TomlValue, parse_file,
};
use crate::edit::LimitSections;
use crate::environment::{EnvVars, apply_variables, is_secret_key};
use crate::error::{Error, ErrorList, Errors, MAX_ERRORS, Note, is_secret_source, quoted};
use crate::key::KeyPart;
use crate::nearest::{nearest, similar};
use crate::outbound::preset;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::sections::{ApiConfig, CompatibleServer, LogConfig};
use crate::settings;
use crate::settings::key::{Below, SettingKey, setting_keys};
use provider::PROVIDER_PATH;

setting_keys! {
    /// The sections of a policy.
    ROOT: RootKeys {
        store: () = "", forms::TABLE, "", Below::Table(&store::STORE);
        inbound: () = "", forms::TABLE, "", Below::Table(&server::INBOUND);
        api: () = "", forms::TABLE, "", Below::Table(&server::API);
        rls: () = "", forms::TABLE, "", Below::Table(&rls::RLS);
        resp: () = "", forms::TABLE, "", Below::Table(&server::RESP);
        admin: () = "", forms::TABLE, "", Below::Table(&server::ADMIN);
        log: () = "", forms::TABLE, "", Below::Table(&server::LOG);
        reload: () = "", forms::TABLE, "", Below::Table(&server::RELOAD);
        outbound: () = "", forms::TABLE, "", Below::Table(&outbound::OUTBOUND);
        alert: () = "", forms::TABLE, "", Below::Names(&alerts::ALERT);
    }
}

/// Reads a policy from a file's content and from the environment. It may follow an earlier one.
pub(crate) fn policy(name: &str, body: &[u8], env: EnvVars, predecessor: Option<&Policy>) -> Result<Policy, Errors> {
    let mut texts = SourceTexts::default();
    let mut root = parse_file(&mut texts, name, body).map_err(Errors::new)?;
    let is_empty = root.entries.is_empty();
    let (mut errors, mut notes) = (ErrorList::default(), Vec::new());
    apply_variables(&mut texts, &mut errors, &mut notes, &mut root, env);
    let whole = texts.add(SourceText::new(SourceKind::File, name, "", false));
    let presets = root.get("outbound").map(|_| preset::load_presets(&mut texts)).unwrap_or_default();
    let mut reader =
        DocumentReader { errors, notes, presets, predecessor, ..DocumentReader::with_texts(&texts, whole) };
    match reader.policy(&root) {
        Some(mut policy) if reader.errors.count() == 0 => {
            policy.own_parts = policy.find_parts(is_empty);
            Ok(Policy { source: Some(Arc::new(LimitSections::new(texts, root))), ..policy })
        }
        _ => Err(Errors::new(reader.errors)),
    }
}

/// Reads the plan of these sections, which follows that of a policy and has its settings beside the limits.
pub(crate) fn plan(texts: &SourceTexts, root: &TomlTable, predecessor: &Policy) -> Result<Plan, Errors> {
    let (store, inbound) = (predecessor.store(), predecessor.inbound());
    let mut reader = DocumentReader {
        on_outage: store.on_outage,
        predecessor: Some(predecessor),
        ..DocumentReader::with_texts(texts, texts.last_range())
    };
    match reader.plan(
        root,
        (inbound.path_quirks, inbound.ambiguous_paths),
        Some(store),
        predecessor.rls(),
        predecessor.has_caller_rates(),
    ) {
        Some(plan) if reader.errors.count() == 0 => Ok(Plan { ipv6_prefix: predecessor.plan().ipv6_prefix, ..plan }),
        _ => Err(Errors::new(reader.errors)),
    }
}

/// The `[log]` section of a policy that has none.
pub(crate) fn default_log() -> LogConfig {
    let mut texts = SourceTexts::default();
    let whole = texts.add(SourceText::new(SourceKind::File, "", "", false));
    let log = DocumentReader::with_texts(&texts, whole).log(&TomlTable::default());
    log.expect("invariant: an absent section has no errors")
}

/// Reads values and collects the errors in them. A method that returns `None` has reported an error.
#[derive(Debug)]
pub struct DocumentReader<'t> {
    texts: &'t SourceTexts,
    errors: ErrorList,
    notes: Vec<Note>,
    /// The name of the action or provider that is being read, for errors.
    section_name: String,
    /// The preset providers, by name.
    presets: TomlTable,
    /// The behaviour while the store can't be reached, where a section sets none of its own.
    on_outage: OnOutage,
    /// The default mode of actions: true in shadow.
    in_shadow: bool,
    /// The place that is reported for missing parts.
    full_range: TextRange,
    /// The policy that this one replaces, if it does.
    predecessor: Option<&'t Policy>,
}

/// An error that was reported; `None` if it is only counted.
struct Reported<'e>(Option<&'e mut Error>);

impl Reported<'_> {
    fn help(mut self, help: impl Into<String>) -> Self {
        if let Some(error) = &mut self.0 {
            error.add_help(help);
        }
        self
    }

    fn help_if(self, help: Option<impl Into<String>>) -> Self {
        match help {
            Some(help) => self.help(help),
            None => self,
        }
    }

    fn did_you_mean(self, meant: Option<&str>) -> Self {
        self.help_if(meant.map(|meant| format!("did you mean `{meant}`?")))
    }

    /// Ends a reader: there is no value.
    fn none<T>(self) -> Option<T> {
        None
    }
}

/// Stands for the name of an action or a provider.
const NAME_PLACEHOLDER: &str = "NAME";

impl<'t> DocumentReader<'t> {
    /// Creates a reader of this document, without errors.
    pub fn new(document: &'t TomlDocument) -> Self {
        Self { presets: document.presets.clone(), ..Self::with_texts(&document.texts, document.full_range) }
    }

    pub(crate) fn with_texts(texts: &'t SourceTexts, full_range: TextRange) -> Self {
        Self {
            texts,
            errors: ErrorList::default(),
            notes: Vec::new(),
            section_name: NAME_PLACEHOLDER.to_owned(),
            presets: TomlTable::default(),
            on_outage: OnOutage::Local,
            in_shadow: false,
            full_range,
            predecessor: None,
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// All errors that were reported.
    pub fn finish(self) -> Result<(), Errors> {
        if self.errors.count() == 0 { Ok(()) } else { Err(Errors::new(self.errors)) }
    }
}

impl DocumentReader<'_> {
    /// Reads the policy of these sections. The environment has no effect on it.
    pub fn policy(&mut self, root: &TomlTable) -> Option<Policy> {
        self.check_keys(root, "");
        let store = self.store(root);
        // The store of a running program stays until a restart.
        let present_store = self.predecessor.map(Policy::store).or(store.as_ref());
        self.on_outage = present_store.map(|store| store.on_outage).unwrap_or_default();
        let inbound = self.inbound(root);
        let api = self.api(root);
        let rls = self.rls(root);
        let resp = self.resp(root);
        let admin = self.admin(root);
        let log = self.log(root);
        let reload = self.reload(root);
        let outbound = self.outbound(root);
        // `admin.metrics` stays until a restart, too.
        let present_admin = self.predecessor.map(|present| &present.admin).or(admin.as_ref());
        let alerts = self.alerts(root, present_admin.is_none_or(|admin| admin.metrics));
        let internal = [
            ("api", api.as_ref().map(|api| &api.listen)),
            ("rls", rls.as_ref().and_then(Option::as_ref).map(|rls| &rls.listen)),
            ("resp", resp.as_ref().and_then(Option::as_ref).map(|resp| &resp.listen)),
            ("admin", admin.as_ref().map(|admin| &admin.listen)),
        ];
        self.check_listeners(root, inbound.as_ref(), internal, outbound.as_ref());
        let paths = inbound.as_ref().map(|inbound| (inbound.path_quirks, inbound.ambiguous_paths)).unwrap_or_default();
        // The section of a running program appears or disappears with a restart.
        let present_rls = match (self.predecessor.map(|present| &present.rls), &rls) {
            (Some(present), Some(next)) if present.is_some() != next.is_some() => present.as_ref(),
            (_, next) => next.as_ref().and_then(Option::as_ref),
        };
        if let Some(api) = &api {
            self.note_missing_limits(root, api, present_rls);
        }
        let has_caller_rates = match self.predecessor {
            Some(present) => present.has_caller_rates(),
            None => {
                let answers_throttle = |api: &ApiConfig| api.compat.contains(&CompatibleServer::Throttlecrab);
                matches!((&resp, &rls), (Some(Some(_)), _) | (_, Some(Some(_))))
                    || api.as_ref().is_some_and(answers_throttle)
            }
        };
        let plan = self.plan(root, paths, present_store, present_rls, has_caller_rates);
        let (mut api, inbound, mut plan) = (api?, inbound?, plan?);
        plan.ipv6_prefix = Ipv6Prefix::new(inbound.ipv6_prefix)?;
        api.forward_auth &= !plan.requests_meet_concurrency();
        Some(Policy {
            store: store?,
            inbound,
            api,
            rls: rls?,
            resp: resp?,
            admin: admin?,
            log: log?,
            reload: reload?,
            plan: Arc::new(plan),
            outbound: outbound?,
            alerts: alerts?,
            notes: std::mem::take(&mut self.notes),
            restart_needed: Vec::new(),
            removed: Vec::new(),
            own_parts: Vec::new(),
            source: None,
        })
    }

    /// Reports keys of the table that are not `known`; errors call the table `called`. Returns true if there were none.
    pub fn check_names(&mut self, table: &TomlTable, called: &str, known: &[&str]) -> bool {
        let before = self.errors.count();
        for entry in unknown_entries(table, known) {
            let message = format!("unknown key {} in {called}", quoted(&entry.key));
            self.report_unknown(entry.key_at, &message, &entry.key, known);
        }
        self.errors.count() == before
    }

    /// Reports that something is missing from the document.
    pub fn report_missing(&mut self, what: &str, expected: &str) {
        self.report(self.full_range, what, expected);
    }

    /// Reports an error at a place with all `known` names, and suggests the one nearest to `found`.
    pub fn report_unknown(&mut self, at: TextRange, message: &str, found: &str, known: &[&str]) {
        self.error(at, message, join_names(known)).did_you_mean(nearest(found, known.iter().copied()));
    }

    /// Reports an error at a place and the form that is expected.
    pub fn report(&mut self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) {
        self.error(at, message, expected);
    }

    /// Reports an error to which help can be added.
    fn error(&mut self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) -> Reported<'_> {
        Reported(self.errors.add(|| Error::new(self.texts, at, message, expected)))
    }

    /// Notes something that is probably not meant.
    fn note(&mut self, at: TextRange, message: &str) {
        self.notes.push(Note::new(self.texts, at, message));
    }

    /// Reports an error at a place that may hold a secret.
    fn hidden_error(&mut self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) -> Reported<'_> {
        Reported(self.errors.add(|| Error::hiding_secret(self.texts, at, at, message, expected)))
    }

    fn wrong_type(&mut self, node: &TomlNode, key: &str, expected: impl Into<String>) -> Reported<'_> {
        self.error(node.at, format!("`{key}` is {}", node.describe(self.texts)), expected)
    }

    /// Reports a text that a key can't have.
    fn wrong_text(&mut self, node: &TomlNode, key: &str, text: &str, expected: impl Into<String>) -> Reported<'_> {
        self.error(node.at, format!("`{key}` is {}", quoted(text)), expected)
    }

    /// Reports keys that the table of this path doesn't have.
    fn check_keys(&mut self, table: &TomlTable, path: &str) {
        let known = settings::table_keys(path);
        let mut errors = std::mem::take(&mut self.errors);
        for entry in unknown_entries(table, &known) {
            errors.add(|| self.unknown_key(entry, path, &known));
        }
        self.errors = errors;
    }

    /// Returns true if an unknown key of the table is probably a misspelling of this one. The missing key is then not
    /// reported.
    fn has_misspelling_of(&self, table: &TomlTable, path: &str, key: &str) -> bool {
        let known = settings::table_keys(path);
        // Of further unknown keys, no error is shown.
        unknown_entries(table, &known)
            .take(MAX_ERRORS)
            .any(|entry| nearest(&entry.key, known.iter().copied()) == Some(key))
    }

    fn unknown_key(&self, entry: &TomlEntry, path: &str, known: &[&'static str]) -> Error {
        let key = entry.key.as_str();
        let found = quoted(key);
        let message = if path.is_empty() {
            format!("unknown section {found}")
        } else {
            format!("unknown key {found} in [{}]", path.replace('*', &self.section_name).replace(".#", ""))
        };
        let expected = match known {
            [only] => format!("only `{only}`"),
            known => join_names(known),
        };
        let meant = similar(key, known.iter().copied());
        let error = if may_be_secret(entry, meant, known) && !is_secret_source(self.texts.text_at(entry.node.at)) {
            Error::hiding_secret(self.texts, entry.key_at, entry.node.at, message, expected)
        } else {
            Error::new(self.texts, entry.key_at, message, expected)
        };
        if meant.is_some() {
            return error.did_you_mean(meant);
        }
        let is_part = |part: &&str| part.strip_suffix(":NAME") == Some(key);
        if let Some(part) = KeyPart::NAMES.iter().copied().find(is_part).filter(|_| known.contains(&"key")) {
            return error.help(format!("to count by it, write key = \"{part}\""));
        }
        // The other common mistake is a key in the wrong section.
        let homes = settings::all().filter_map(|setting| setting.path().rsplit_once('.'));
        let sections_with_key: Vec<String> = homes
            .filter_map(|(home, last)| (last == key).then_some(home))
            .filter(|home| {
                !home.contains('#')
                    && !home.starts_with("alert.")
                    && *home != path
                    && !are_different_directions(home, path)
            })
            .map(|home| format!("[{}]", home.replace('*', NAME_PLACEHOLDER)))
            .collect();
        let has_section = |home: &&str| {
            let is_setting = settings::find(&format!("{home}.{key}")).is_some();
            path.is_empty() && settings::table_keys(home).contains(&key) && !is_setting
        };
        let member = if matches!(key, "action" | "provider") { ".NAME" } else { "" };
        let parents = ["inbound", "outbound"].into_iter().filter(has_section);
        let section_homes: Vec<String> = parents.map(|home| format!("[{home}.{key}{member}]")).collect();
        match (sections_with_key.as_slice(), section_homes.as_slice()) {
            ([], []) => error.did_you_mean(nearest(key, known.iter().copied())),
            ([], sections) => error.help(format!("the section's whole name is {}", sections.join(" or "))),
            (homes, _) => error.help(format!("`{key}` belongs in {}", homes.join(" or "))),
        }
    }

    /// Returns the table under a key, checked for unknown keys. `None` if the key is absent or holds another value,
    /// which is reported.
    fn section<'n>(&mut self, parent: Option<&'n TomlTable>, key: &str, path: &str) -> Option<&'n TomlTable> {
        let node = parent?.node(key)?;
        let Some(table) = node.as_table() else {
            let keys = settings::table_keys(path).join(", ");
            let path = path.replace('*', &self.section_name);
            let expected = format!("a section, [{path}], or a table, {{ … }}");
            return self.wrong_type(node, key, expected).help(format!("its keys are {keys}")).none();
        };
        self.check_keys(table, path);
        Some(table)
    }

    /// Reads the value under a provider's key: a table, checked for unknown keys, or one of a few words.
    fn table_or_word<'n, T: Clone>(
        &mut self,
        provider: &'n TomlTable,
        key: &SettingKey<T>,
        default: T,
    ) -> Option<TableOrWord<'n, T>> {
        let Some(node) = provider.node(key.name()) else { return Some(TableOrWord::Word(default)) };
        match node.as_table() {
            Some(table) => {
                self.check_keys(table, &format!("{PROVIDER_PATH}.{}", key.name()));
                Some(TableOrWord::Table(table))
            }
            None => self.parse(node, key).map(TableOrWord::Word),
        }
    }

    /// Reads a provider's key that holds `on`, `off` or a table. `None` inside for `off`, else the table, if there is
    /// one.
    fn table_unless_off<'n>(
        &mut self,
        provider: &'n TomlTable,
        key: &SettingKey<bool>,
        default: bool,
    ) -> Option<Option<Option<&'n TomlTable>>> {
        Some(match self.table_or_word(provider, key, default)? {
            TableOrWord::Word(is_on) => is_on.then_some(None),
            TableOrWord::Table(table) => Some(Some(table)),
        })
    }
}

/// The entries of a table whose keys aren't known.
fn unknown_entries<'n>(table: &'n TomlTable, known: &[&str]) -> impl Iterator<Item = &'n TomlEntry> {
    table.entries.iter().filter(|entry| !known.contains(&entry.key.as_str()))
}

/// True if the value of an unknown key may be a secret of its table under a wrong name.
fn may_be_secret(entry: &TomlEntry, meant: Option<&str>, known: &[&str]) -> bool {
    let is_secret = |key: &str| key == "url" || is_secret_key(key);
    let is_text = !matches!(entry.node.value, TomlValue::Integer(_) | TomlValue::Float | TomlValue::Boolean(_));
    // The table of a header begins at its key.
    let has_value = is_text && entry.node.at != entry.key_at;
    has_value && known.iter().any(|key| is_secret(key)) && meant.is_none_or(is_secret)
}

/// Returns true if one path is inbound and the other outbound. A key of one side is then no likely mistake for the
/// other.
fn are_different_directions(left: &str, right: &str) -> bool {
    let side = |path: &str| path.split('.').next().filter(|side| matches!(*side, "inbound" | "outbound")).map(str::len);
    side(left).zip(side(right)).is_some_and(|(left, right)| left != right)
}

enum TableOrWord<'n, T> {
    Word(T),
    Table(&'n TomlTable),
}

/// Collects values, or returns `None` if one is missing. All items are evaluated first, so that all errors are
/// reported.
fn all_or_none<T>(items: impl Iterator<Item = Option<T>>) -> Option<Vec<T>> {
    let items: Vec<Option<T>> = items.collect();
    items.into_iter().collect()
}

/// Joins names as in "`a`, `b` or `c`".
fn join_names(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
