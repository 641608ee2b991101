//! The reader of a configuration. Each rule is the original's own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::Value;

use super::check::ROOT;
use super::limitador::{ConditionalLimit, Identity};
use super::scalar::Scalar;
use super::yaml::{self, YamlMap, YamlNode, YamlValue};
use super::{Amount, Descriptor, Domain, MAX_DESCRIPTORS, MAX_NOTES, RateLimit, RatelimitConfig, Unit};
use crate::document::{SourceTexts, TextRange, add_file};
use crate::error::{Error, ErrorList, Errors, Note, quoted};
use crate::nearest::nearest;

/// The composite keys of a level, and their places.
pub(super) type Level = HashMap<String, TextRange>;

#[derive(Default)]
pub(super) struct Reader {
    merge_domains: bool,
    texts: SourceTexts,
    errors: ErrorList,
    notes: Vec<Note>,
    domains: Vec<Domain>,
    /// For each domain its index, its place and its first level.
    pub(super) known_domains: HashMap<String, (usize, TextRange, Level)>,
    /// The limits of limitador's files, each with its place.
    pub(super) conditional: Vec<(ConditionalLimit, TextRange)>,
    pub(super) identities: HashMap<Identity, TextRange>,
    descriptors: usize,
}

impl Reader {
    pub(super) fn new(merge_domains: bool) -> Self {
        Self { merge_domains, ..Self::default() }
    }

    pub(super) fn finish(mut self) -> Result<RatelimitConfig, Errors> {
        self.check_namespaces();
        let conditional = self.conditional.into_iter().map(|(limit, _)| limit).collect();
        match self.errors.count() {
            0 => Ok(RatelimitConfig { domains: self.domains, conditional, notes: self.notes }),
            _ => Err(Errors::new(self.errors)),
        }
    }

    /// Reports an error at a value.
    pub(super) fn error(
        &mut self,
        node: &YamlNode,
        message: impl Into<String>,
        expected: impl Into<String>,
        help: &[impl AsRef<str>],
    ) {
        self.error_at(node.at, message, expected, help);
    }

    pub(super) fn error_count(&self) -> usize {
        self.errors.count()
    }

    pub(super) fn error_at(
        &mut self,
        at: TextRange,
        message: impl Into<String>,
        expected: impl Into<String>,
        help: &[impl AsRef<str>],
    ) {
        let texts = &self.texts;
        self.errors.add(|| {
            let error = Error::new(texts, at, message, expected);
            help.iter().fold(error, |error, help| error.help(help.as_ref()))
        });
    }

    pub(super) fn note(&mut self, node: &YamlNode, message: &str) {
        self.note_at(node.at, message);
    }

    fn note_at(&mut self, at: TextRange, message: &str) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(Note::new(&self.texts, at, message));
        }
    }

    /// Reads one file. Its values are read only if all its names are valid, since they may not be what was meant.
    pub(super) fn file(&mut self, name: &str, body: &[u8]) {
        let added = add_file(&mut self.texts, name, body, "a configuration of ratelimit", "this program");
        let parsed = added.and_then(|whole| Ok((whole, yaml::parse(&self.texts, whole)?)));
        let (whole, document) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => {
                self.errors.add(|| error);
                return;
            }
        };
        if let Some(at) = document.second {
            self.note_at(at, "a second document begins here; only the first one of a file is read");
        }
        let entries = match document.root {
            None => YamlMap::new(),
            Some(node) if node.is_null() => YamlMap::new(),
            Some(YamlNode { value: YamlValue::Map(entries), .. }) => entries,
            Some(YamlNode { value: YamlValue::List(limits), .. }) => return self.conditional_limits(&limits),
            Some(node) => {
                let message = format!("the file is {}", node.describe());
                return self.error(
                    &node,
                    message,
                    "a mapping with `domain` and `descriptors`, or limitador's list",
                    NO_HELP,
                );
            }
        };
        let before = self.errors.count();
        self.check_names(&entries, Some(ROOT));
        if self.errors.count() == before {
            self.domain(whole, &entries);
        }
    }

    fn domain(&mut self, whole: TextRange, entries: &YamlMap) {
        let node = field(entries, "domain");
        let at = node.map_or_else(|| self.texts.subrange(whole, 0..1), |node| node.at);
        let name = self.text("domain", node);
        let (index, mut level) = match self.known_domains.remove(&name) {
            _ if name.is_empty() => return self.error_at(at, "the file has no domain", "`domain: NAME`", NO_HELP),
            Some((index, first, level)) if self.merge_domains => {
                self.known_domains.insert(name.clone(), (index, first, Level::new()));
                (index, level)
            }
            Some(known) => {
                let message = format!("the domain {} stands twice, first {}", quoted(&name), self.pointer(known.1));
                self.known_domains.insert(name, known);
                let help = "merge_domains = true in [rls], or --merge-domains of an import, reads them as one";
                return self.error_at(at, message, "each domain in one file", &[help]);
            }
            None => {
                self.domains.push(Domain { name: name.clone(), descriptors: Vec::new() });
                (self.domains.len() - 1, Level::new())
            }
        };
        let descriptors = self.descriptors(field(entries, "descriptors"), &name, &mut level);
        let first = self.known_domains.get(&name).map_or(at, |known| known.1);
        self.known_domains.insert(name, (index, first, level));
        if let Some(domain) = self.domains.get_mut(index) {
            domain.descriptors.extend(descriptors);
        }
    }

    /// Describes the place of something that an error compares with.
    pub(super) fn pointer(&self, at: TextRange) -> String {
        format!("in {} on line {}", quoted(&self.texts.get(at).name), self.texts.line(at))
    }

    fn descriptors(&mut self, node: Option<&YamlNode>, parent: &str, level: &mut Level) -> Vec<Descriptor> {
        let Some(items) = self.list("descriptors", node) else { return Vec::new() };
        let mut descriptors = Vec::new();
        for item in items {
            let YamlValue::Map(entries) = &item.value else { continue };
            if self.descriptors == MAX_DESCRIPTORS {
                self.error(item, "there are too many descriptors", format!("at most {MAX_DESCRIPTORS}"), NO_HELP);
                break;
            }
            self.descriptors += 1;
            descriptors.push(self.descriptor(item, entries, parent, level));
        }
        descriptors
    }

    fn descriptor(&mut self, item: &YamlNode, entries: &YamlMap, parent: &str, level: &mut Level) -> Descriptor {
        let key = self.text("key", field(entries, "key"));
        if key.is_empty() {
            self.error(field(entries, "key").unwrap_or(item), "the descriptor has no key", "`key: NAME`", NO_HELP);
        }
        let value = Some(self.text("value", field(entries, "value"))).filter(|value| !value.is_empty());
        let mut descriptor = Descriptor { key, value, ..Descriptor::default() };
        let composite = descriptor.composite_key();
        let path = format!("{parent}.{composite}");
        match level.entry(composite) {
            Entry::Occupied(first) => {
                let first = *first.get();
                let message = format!("the descriptor {} stands twice, first {}", quoted(&path), self.pointer(first));
                self.error(item, message, "another `key` or `value`", NO_HELP);
            }
            Entry::Vacant(new) => {
                new.insert(item.at);
            }
        }
        descriptor.limit = field(entries, "rate_limit").and_then(|node| self.limit(node));
        for (name, flag) in [
            ("shadow_mode", &mut descriptor.shadow_mode),
            ("quota_mode", &mut descriptor.quota_mode),
            ("detailed_metric", &mut descriptor.detailed_metric),
            ("value_to_metric", &mut descriptor.value_to_metric),
            ("share_threshold", &mut descriptor.share_threshold),
        ] {
            *flag = self.flag(name, field(entries, name));
        }
        for (name, flag) in [("shadow_mode", descriptor.shadow_mode), ("quota_mode", descriptor.quota_mode)] {
            if let Some(node) = field(entries, name).filter(|_| flag && field(entries, "rate_limit").is_none()) {
                self.note(node, &format!("`{name}` has no effect on a descriptor without `rate_limit`"));
            }
        }
        if let Some(node) = field(entries, "share_threshold")
            && descriptor.share_threshold
            && !descriptor.is_wildcard()
        {
            let message = "`share_threshold` has nothing to share, because the value has no `*`";
            self.error(node, message, "a value with `*`, such as `value: files/*`", NO_HELP);
        }
        descriptor.metadata = self.metadata(field(entries, "metadata"));
        descriptor.descriptors = self.descriptors(field(entries, "descriptors"), &path, &mut Level::new());
        descriptor
    }

    fn limit(&mut self, node: &YamlNode) -> Option<RateLimit> {
        let entries = match &node.value {
            YamlValue::Map(entries) => entries,
            _ if node.is_null() => return None,
            _ => {
                let expected = "a mapping with `unit` and `requests_per_unit`";
                self.error(node, format!("`rate_limit` is {}", node.describe()), expected, NO_HELP);
                return None;
            }
        };
        let name = Some(self.text("name", field(entries, "name"))).filter(|name| !name.is_empty());
        let replaces = self.replaces(field(entries, "replaces"), name.as_deref());
        let requests_node = field(entries, "requests_per_unit");
        let requests = self.requests(requests_node);
        let unit_node = field(entries, "unit");
        let unit_name = self.text("unit", unit_node);
        let unit = Unit::from_name(&unit_name);
        let at = unit_node.unwrap_or(node);
        if self.flag("unlimited", field(entries, "unlimited")) {
            if unit.is_some() {
                self.error(at, "the limit is `unlimited` and has a unit", "one of the two", NO_HELP);
            } else if let Some(node) = unit_node.or(requests_node) {
                self.note(node, "it has no effect, because the limit is `unlimited`");
            }
            return Some(RateLimit { name, replaces, amount: Amount::Unlimited });
        }
        let Some(unit) = unit else {
            let names = Unit::ALL.map(Unit::name);
            let meant = nearest(&unit_name, names).map(|meant| format!("did you mean `{meant}`?"));
            let message = match unit_name.as_str() {
                "" => "the limit has no unit".to_owned(),
                name => format!("unknown unit {}", quoted(name)),
            };
            self.error(at, message, names.join(", "), meant.as_slice());
            return None;
        };
        if requests_node.is_none() {
            self.note(node, "without `requests_per_unit` the limit is 0, which refuses every request");
        }
        Some(RateLimit { name, replaces, amount: Amount::PerUnit { requests, unit } })
    }

    fn replaces(&mut self, node: Option<&YamlNode>, own_name: Option<&str>) -> Vec<String> {
        let mut names = Vec::new();
        for item in self.list("replaces", node).unwrap_or_default() {
            let YamlValue::Map(entries) = &item.value else { continue };
            let node = field(entries, "name");
            let name = self.text("name", node);
            if name.is_empty() {
                self.error(
                    node.unwrap_or(item),
                    "`replaces` has an item without a name",
                    "the name of a limit",
                    NO_HELP,
                );
            } else if Some(name.as_str()) == own_name {
                self.error(node.unwrap_or(item), "the limit replaces itself", "the name of another limit", NO_HELP);
            }
            names.push(name);
        }
        names
    }

    /// Reads a text. Numbers and truth values are texts, too, as they are written.
    pub(super) fn text(&mut self, name: &str, node: Option<&YamlNode>) -> String {
        match node.map(|node| (&node.value, node)) {
            None | Some((YamlValue::Scalar(_, Scalar::Null), _)) => String::new(),
            Some((YamlValue::Scalar(text, _), _)) => text.clone(),
            Some((_, node)) => {
                self.error(node, format!("`{name}` is {}", node.describe()), "a text", NO_HELP);
                String::new()
            }
        }
    }

    fn flag(&mut self, name: &str, node: Option<&YamlNode>) -> bool {
        match node.map(|node| (&node.value, node)) {
            None | Some((YamlValue::Scalar(_, Scalar::Null), _)) => false,
            Some((YamlValue::Scalar(_, Scalar::Boolean(flag)), _)) => *flag,
            Some((_, node)) => {
                self.error(node, format!("`{name}` is {}", node.describe()), "true or false", NO_HELP);
                false
            }
        }
    }

    fn requests(&mut self, node: Option<&YamlNode>) -> u32 {
        let Some(node) = node.filter(|node| !node.is_null()) else { return 0 };
        let number = match node.value {
            YamlValue::Scalar(_, Scalar::Integer(Some(number))) => u32::try_from(number).ok(),
            _ => None,
        };
        number.unwrap_or_else(|| {
            let expected = format!("a whole number from 0 to {}", u32::MAX);
            self.error(node, format!("`requests_per_unit` is {}", node.describe()), expected, NO_HELP);
            0
        })
    }

    /// The items of a list; `None` if there is no value, or another one, which is an error.
    pub(super) fn list<'n>(&mut self, name: &str, node: Option<&'n YamlNode>) -> Option<&'n [YamlNode]> {
        let node = node.filter(|node| !node.is_null())?;
        if let YamlValue::List(items) = &node.value {
            return Some(items);
        }
        let help = "each item of a list begins with `- `";
        self.error(node, format!("`{name}` is {}", node.describe()), "a list", &[help]);
        None
    }

    fn metadata(&mut self, node: Option<&YamlNode>) -> serde_json::Map<String, Value> {
        let Some(node) = node.filter(|node| !node.is_null()) else { return serde_json::Map::new() };
        if let Value::Object(data) = to_json(node) {
            return data;
        }
        self.error(node, format!("`metadata` is {}", node.describe()), "a mapping", NO_HELP);
        serde_json::Map::new()
    }
}

/// No suggestions for an error.
pub(super) const NO_HELP: &[&str] = &[];

/// The value of a name; the last one if there are several.
pub(super) fn field<'n>(entries: &'n YamlMap, name: &str) -> Option<&'n YamlNode> {
    entries.iter().rev().find(|(key, _)| key.name() == Some(name)).map(|(_, value)| value)
}

/// The same value as JSON. Numbers that JSON doesn't know are texts.
fn to_json(node: &YamlNode) -> Value {
    match &node.value {
        YamlValue::List(items) => items.iter().map(to_json).collect(),
        YamlValue::Map(entries) => {
            let named =
                |(key, value): &(YamlNode, YamlNode)| (key.name().unwrap_or_default().to_owned(), to_json(value));
            Value::Object(entries.iter().map(named).collect())
        }
        YamlValue::Scalar(_, Scalar::Null) => Value::Null,
        YamlValue::Scalar(_, Scalar::Boolean(flag)) => Value::Bool(*flag),
        YamlValue::Scalar(_, Scalar::Integer(Some(number))) => Value::from(*number),
        YamlValue::Scalar(_, Scalar::Float(number)) if number.is_finite() => Value::from(*number),
        YamlValue::Scalar(text, _) => Value::String(text.clone()),
    }
}
