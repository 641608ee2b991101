//! Reads a policy from a document. Every value is checked, and every error is reported.

mod actions;
mod assemble;
mod keys;
mod lanes;
mod login;
mod matching;
mod outbound;
mod pace;
mod penalties;
mod provider;
mod provider_limits;
mod replies;
mod resilience;
mod server;
mod store;
mod urls;
mod values;

use std::sync::Arc;

use tidegate_core::OnOutage;

use crate::address::Ipv6Prefix;
use crate::document::{
    SourceKind, SourceText, SourceTexts, TextRange, TomlDocument, TomlEntry, TomlNode, TomlTable, TomlValue, parse_file,
};
use crate::environment::{EnvVars, apply_variables};
use crate::error::{Error, Errors, Note};
use crate::nearest::{nearest, similar};
use crate::outbound::preset;
use crate::policy::Policy;
use crate::settings;

/// Reads a policy from a file's content and from the environment.
pub(crate) fn policy(name: &str, body: &[u8], env: EnvVars) -> Result<Policy, Errors> {
    let mut texts = SourceTexts::default();
    let mut root = parse_file(&mut texts, name, body).map_err(Errors::new)?;
    let mut errors = Vec::new();
    apply_variables(&mut texts, &mut errors, &mut root, env);
    let whole = texts.add(SourceText::new(SourceKind::File, name, "", false));
    let presets = root.get("outbound").map(|_| preset::load_presets(&mut texts)).unwrap_or_default();
    let mut reader = DocumentReader {
        texts: &texts,
        errors,
        notes: Vec::new(),
        section_name: NAME_PLACEHOLDER.to_owned(),
        presets,
        on_outage: OnOutage::Local,
        full_range: whole,
    };
    let read = reader.read_policy(&root, whole);
    match read {
        Some(policy) if reader.errors.is_empty() => Ok(policy),
        _ => Err(Errors::new(reader.errors)),
    }
}

/// Reads values and collects the errors in them. A method that returns `None` has reported an error.
#[derive(Debug)]
pub struct DocumentReader<'t> {
    texts: &'t SourceTexts,
    errors: Vec<Error>,
    notes: Vec<Note>,
    /// The name of the action or provider that is being read, for errors.
    section_name: String,
    /// The preset providers, by name.
    presets: TomlTable,
    /// The behaviour while the store can't be reached, where a section sets none of its own.
    on_outage: OnOutage,
    /// The place that is reported for missing parts.
    full_range: TextRange,
}

/// Stands for the name of an action or a provider.
const NAME_PLACEHOLDER: &str = "NAME";

impl<'t> DocumentReader<'t> {
    /// Creates a reader of this document, without errors.
    pub fn new(document: &'t TomlDocument) -> Self {
        Self {
            texts: &document.texts,
            errors: Vec::new(),
            notes: Vec::new(),
            section_name: NAME_PLACEHOLDER.to_owned(),
            presets: document.presets.clone(),
            on_outage: OnOutage::Local,
            full_range: document.full_range,
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// All errors that were reported.
    pub fn finish(self) -> Result<(), Errors> {
        if self.errors.is_empty() { Ok(()) } else { Err(Errors::new(self.errors)) }
    }
}

impl DocumentReader<'_> {
    /// Reads the policy of these sections. The environment has no effect on it.
    pub fn policy(&mut self, root: &TomlTable) -> Option<Policy> {
        self.read_policy(root, self.full_range)
    }

    /// Reports keys of the table that are not `known`; errors call the table `called`. Returns true if there were none.
    pub fn check_names(&mut self, table: &TomlTable, called: &str, known: &[&str]) -> bool {
        let before = self.errors.len();
        for entry in table.entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            let found = crate::error::quoted(&entry.key);
            let error =
                Error::new(self.texts, entry.key_at, format!("unknown key {found} in {called}"), join_names(known));
            self.push_error(error.did_you_mean(nearest(&entry.key, known.iter().copied())));
        }
        self.errors.len() == before
    }

    /// Reports that something is missing from the document.
    pub fn report_missing(&mut self, what: &str, expected: &str) {
        self.report(self.full_range, what, expected);
    }

    /// Reports an error at a place with all `known` names, and suggests the one nearest to `found`.
    pub fn report_unknown(&mut self, at: TextRange, message: &str, found: &str, known: &[&str]) {
        let error = Error::new(self.texts, at, message, join_names(known));
        self.push_error(error.did_you_mean(nearest(found, known.iter().copied())));
    }

    fn read_policy(&mut self, root: &TomlTable, whole: TextRange) -> Option<Policy> {
        self.check_keys(root, "");
        let store = self.store(root);
        self.on_outage = store.as_ref().map(|store| store.on_outage).unwrap_or_default();
        let inbound = self.inbound(root);
        let api = self.api(root);
        let admin = self.admin(root);
        let log = self.log(root);
        let outbound = self.outbound(root, whole);
        self.check_listeners(root, inbound.as_ref(), api.as_ref(), admin.as_ref(), outbound.as_ref());
        let paths = inbound.as_ref().map(|inbound| (inbound.path_quirks, inbound.ambiguous_paths)).unwrap_or_default();
        let plan = self.plan(root, paths, store.as_ref(), whole);
        let (mut api, inbound, mut plan) = (api?, inbound?, plan?);
        plan.ipv6_prefix = Ipv6Prefix::new(inbound.ipv6_prefix)?;
        api.forward_auth &= !plan.requests_meet_concurrency();
        Some(Policy {
            store: store?,
            inbound,
            api,
            admin: admin?,
            log: log?,
            plan: Arc::new(plan),
            outbound: outbound?,
            notes: std::mem::take(&mut self.notes),
        })
    }

    /// Adds a remark on a text that is valid.
    fn note(&mut self, at: TextRange, message: &str) {
        self.notes.push(Note::new(self.texts, at, message));
    }

    fn push_error(&mut self, error: Error) {
        self.errors.push(error);
    }

    /// Reports an error at a place and the form that is expected.
    pub fn report(&mut self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) {
        self.errors.push(Error::new(self.texts, at, message, expected));
    }

    /// Reports keys that the table of this path doesn't have.
    fn check_keys(&mut self, table: &TomlTable, path: &str) {
        let known = settings::table_keys(path);
        for entry in &table.entries {
            if !known.contains(&entry.key.as_str()) {
                let error = self.unknown_key(entry, path, &known);
                self.push_error(error);
            }
        }
    }

    /// Returns true if an unknown key of the table is probably a misspelling of this one. The missing key is then not
    /// reported.
    fn has_misspelling_of(&self, table: &TomlTable, path: &str, key: &str) -> bool {
        let known = settings::table_keys(path);
        let unknown = table.entries.iter().filter(|entry| !known.contains(&entry.key.as_str()));
        unknown.into_iter().any(|entry| nearest(&entry.key, known.iter().copied()) == Some(key))
    }

    fn unknown_key(&self, entry: &TomlEntry, path: &str, known: &[&'static str]) -> Error {
        let key = entry.key.as_str();
        let found = crate::error::quoted(key);
        let message = if path.is_empty() {
            format!("unknown section {found}")
        } else {
            format!("unknown key {found} in [{}]", path.replace('*', &self.section_name).replace(".#", ""))
        };
        let expected = match known {
            [only] => format!("only `{only}`"),
            known => join_names(known),
        };
        let error = Error::new(self.texts, entry.key_at, message, expected);
        if let Some(meant) = similar(key, known.iter().copied()) {
            return error.did_you_mean(Some(meant));
        }
        // The other common mistake is a key in the wrong section.
        let sections_with_key: Vec<String> = settings::all()
            .filter_map(|setting| {
                setting.path().rsplit_once('.').filter(|(_, last)| *last == key).map(|(home, _)| home)
            })
            .filter(|home| !home.contains('#') && *home != path && !are_different_directions(home, path))
            .map(|home| format!("[{}]", home.replace('*', "NAME")))
            .collect();
        let section_homes: Vec<String> = ["inbound", "outbound"]
            .into_iter()
            .filter(|home| path.is_empty() && settings::table_keys(home).contains(&key))
            .filter(|home| settings::find(&format!("{home}.{key}")).is_none())
            .map(|home| match key {
                "action" | "provider" => format!("[{home}.{key}.NAME]"),
                other => format!("[{home}.{other}]"),
            })
            .collect();
        match (sections_with_key.as_slice(), section_homes.as_slice()) {
            ([], []) => error.did_you_mean(nearest(key, known.iter().copied())),
            ([], sections) => error.help(format!("the section's whole name is {}", sections.join(" or "))),
            (homes, _) => error.help(format!("`{key}` belongs in {}", homes.join(" or "))),
        }
    }

    /// Returns the table under a key, checked for unknown keys. `None` if the key is absent or holds another value,
    /// which is reported.
    fn section<'n>(&mut self, parent: &'n TomlTable, key: &str, path: &str) -> Option<&'n TomlTable> {
        let entry = parent.get(key)?;
        match entry.node.as_table() {
            Some(table) => {
                self.check_keys(table, path);
                Some(table)
            }
            None => {
                let found = entry.node.describe(self.texts);
                let path = path.replace('*', &self.section_name);
                let form = format!("a section, [{path}], or a table, {{ … }}");
                self.report(entry.node.at, format!("`{key}` is {found}"), form);
                None
            }
        }
    }

    /// Reads the value under a key: a table, checked for unknown keys, or one of a few words.
    fn table_or_word<'n, T: Copy>(
        &mut self,
        parent: &'n TomlTable,
        key: &str,
        path: &str,
        words: &[(&'static str, T)],
    ) -> Option<TableOrWord<'n, T>> {
        let Some(node) = parent.node(key) else { return Some(TableOrWord::Absent) };
        match &node.value {
            TomlValue::Table(table) => {
                self.check_keys(table, path);
                Some(TableOrWord::Table(table))
            }
            TomlValue::String(_) => self.choice(node, key, words).map(TableOrWord::Word),
            _ => {
                let found = node.describe(self.texts);
                let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
                self.report(
                    node.at,
                    format!("`{key}` is {found}"),
                    format!("{}, or a table, {{ … }}", join_names(&names)),
                );
                None
            }
        }
    }

    /// Reads a value if it is present; `None` inside if it is absent.
    fn read_optional<T>(
        &mut self,
        table: &TomlTable,
        key: &str,
        read: impl FnOnce(&mut Self, &TomlNode) -> Option<T>,
    ) -> Option<Option<T>> {
        self.read_or_default(Some(table), key, None, |reader, node| read(reader, node).map(Some))
    }

    /// Reads a value if it is present, or returns the default. `None` if the value is wrong.
    fn read_or_default<T>(
        &mut self,
        table: Option<&TomlTable>,
        key: &str,
        default: T,
        read: impl FnOnce(&mut Self, &TomlNode) -> Option<T>,
    ) -> Option<T> {
        match table.and_then(|table| table.node(key)) {
            Some(node) => read(self, node),
            None => Some(default),
        }
    }
}

/// Returns true if one path is inbound and the other outbound. A key of one side is then no likely mistake for the
/// other.
fn are_different_directions(left: &str, right: &str) -> bool {
    let side = |path: &str| path.split('.').next().filter(|side| matches!(*side, "inbound" | "outbound")).map(str::len);
    side(left).zip(side(right)).is_some_and(|(left, right)| left != right)
}

/// The value of a key that may hold a table or a word.
enum TableOrWord<'n, T> {
    Absent,
    Word(T),
    Table(&'n TomlTable),
}

/// Joins names as in "`a`, `b` or `c`".
fn join_names(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
