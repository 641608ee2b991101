//! Limits in the YAML of [limitador](https://github.com/Kuadrant/limitador): a list, each with its conditions.

use std::collections::HashMap;

use super::expressions::Expression;
use super::read::{NO_HELP, Reader, field};
use super::scalar::Scalar;
use super::yaml::{YamlMap, YamlNode, YamlValue};
use super::{Amount, MAX_DESCRIPTORS};
use crate::document::TextRange;
use crate::error::quoted;
use crate::nearest::nearest;
use tidegate_core::MAX_LIMIT;

const NAMES: [&str; 7] = ["namespace", "max_value", "seconds", "conditions", "variables", "name", "id"];
/// The longest window in seconds: about 68 years.
const MAX_SECONDS: u64 = 1 << 31;

/// A limit in limitador's YAML.
#[derive(Clone, Debug)]
pub struct ConditionalLimit {
    /// The namespace: the domain of requests that it may apply to.
    pub namespace: String,
    /// The name.
    pub name: Option<String>,
    /// The id.
    pub id: Option<String>,
    /// The number of hits in each window, 0 to 2^40.
    pub max_value: u64,
    /// The length of the window in seconds, 1 to 2^31.
    pub seconds: u64,
    /// The conditions, which must all hold, in the order of their texts.
    pub(super) conditions: Vec<Expression>,
    /// The expressions whose values have counts of their own, in the order of their texts.
    pub(super) variables: Vec<Expression>,
}

/// The identity of a limit: another one with the same has no effect.
pub(super) type Identity = (String, u64, Vec<String>, Vec<String>);

impl ConditionalLimit {
    /// The texts of the conditions.
    pub fn conditions(&self) -> impl Iterator<Item = &str> {
        self.conditions.iter().map(Expression::source)
    }

    /// The texts of the expressions whose values have counts of their own.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(Expression::source)
    }

    /// The number of hits and the length of the window.
    pub fn amount(&self) -> Amount {
        Amount::PerSeconds { hits: self.max_value, seconds: self.seconds }
    }

    /// The namespace, and the name, the id, or else the length of the window.
    pub(super) fn path(&self) -> String {
        let seconds = || format!("per-{}s", self.seconds);
        let last = self.name.clone().or_else(|| self.id.clone()).unwrap_or_else(seconds);
        format!("{}.{last}", self.namespace)
    }

    fn identity(&self) -> Identity {
        let texts = |expressions: &[Expression]| expressions.iter().map(|it| it.source().to_owned()).collect();
        (self.namespace.clone(), self.seconds, texts(&self.conditions), texts(&self.variables))
    }
}

impl Reader {
    /// Reads a file of limitador's.
    pub(super) fn conditional_limits(&mut self, items: &[YamlNode]) {
        for item in items {
            let YamlValue::Map(entries) = &item.value else {
                let message = format!("a limit is {}", item.describe());
                self.error(item, message, "a mapping with `namespace`, `max_value` and `seconds`", NO_HELP);
                continue;
            };
            if self.conditional.len() == MAX_DESCRIPTORS {
                return self.error(item, "there are too many limits", format!("at most {MAX_DESCRIPTORS}"), NO_HELP);
            }
            let before = self.error_count();
            let limit = self.conditional_limit(item, entries);
            if self.error_count() > before {
                continue;
            }
            match self.identities.insert(limit.identity(), item.at) {
                Some(first) => {
                    let first = self.pointer(first);
                    self.note(item, &format!("the limit has no effect, because one like it stands {first}"));
                }
                None => self.conditional.push((limit, item.at)),
            }
        }
    }

    fn conditional_limit(&mut self, item: &YamlNode, entries: &YamlMap) -> ConditionalLimit {
        for (key, _) in entries {
            let name = key.name().unwrap_or_default();
            if !NAMES.contains(&name) {
                let meant = nearest(name, NAMES).map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
                self.note(key, &format!("{} has no effect{meant}", quoted(name)));
            }
        }
        let text = |reader: &mut Self, name| {
            Some(reader.text(name, field(entries, name))).filter(|text: &String| !text.is_empty())
        };
        let namespace = text(self, "namespace").unwrap_or_else(|| {
            self.error(item, "the limit has no namespace", "`namespace: NAME`", NO_HELP);
            String::new()
        });
        let max_value = match field(entries, "max_value") {
            Some(node) => self.whole(node, "max_value", 0, MAX_LIMIT),
            None => {
                self.note(item, "without `max_value` the limit is 0, which refuses every request");
                0
            }
        };
        let seconds = match field(entries, "seconds") {
            Some(node) => self.whole(node, "seconds", 1, MAX_SECONDS),
            None => {
                self.error(item, "the limit has no `seconds`", "the length of its window in seconds", NO_HELP);
                0
            }
        };
        let (name, id) = (text(self, "name"), text(self, "id"));
        let conditions = self.expressions(item, entries, "conditions");
        let variables = self.expressions(item, entries, "variables");
        ConditionalLimit { namespace, name, id, max_value, seconds, conditions, variables }
    }

    fn whole(&mut self, node: &YamlNode, name: &str, min: u64, max: u64) -> u64 {
        let number = match node.value {
            YamlValue::Scalar(_, Scalar::Integer(Some(number))) => u64::try_from(number).ok(),
            _ => None,
        };
        number.filter(|number| (min..=max).contains(number)).unwrap_or_else(|| {
            let expected = format!("a whole number from {min} to {max}");
            self.error(node, format!("`{name}` is {}", node.describe()), expected, NO_HELP);
            min
        })
    }

    /// Reads a list of expressions, which must be there and may be empty.
    fn expressions(&mut self, item: &YamlNode, entries: &YamlMap, name: &str) -> Vec<Expression> {
        let node = field(entries, name);
        if node.is_none() {
            self.error(item, format!("the limit has no `{name}`"), format!("`{name}: []` for none"), NO_HELP);
        }
        let mut expressions = Vec::new();
        for item in self.list(name, node).unwrap_or_default() {
            let text = self.text(name, Some(item));
            match Expression::parse(&text) {
                Ok(expression) => expressions.push((text, expression, item)),
                Err(why) => {
                    let expected = "an expression of CEL, such as descriptors[0]['user_id']";
                    self.error(item, format!("{} is no expression: {why}", quoted(&text)), expected, NO_HELP);
                }
            }
        }
        for (text, expression, item) in &expressions {
            if let Some(other) = expression.unknown_variable() {
                let message = format!(
                    "the limit never applies: {} asks for `{other}`, and there are only `descriptors` and `limit`",
                    quoted(text)
                );
                self.note(item, &message);
            }
        }
        expressions.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        expressions.dedup_by(|(one, ..), (other, ..)| one == other);
        expressions.into_iter().map(|(_, expression, _)| expression).collect()
    }

    /// Reports namespaces that are also domains of files in the other format.
    pub(super) fn check_namespaces(&mut self) {
        let domains: HashMap<&str, TextRange> =
            self.known_domains.iter().map(|(name, known)| (name.as_str(), known.1)).collect();
        let clashes: Vec<_> = self
            .conditional
            .iter()
            .filter_map(|(limit, at)| Some((limit.namespace.clone(), *at, *domains.get(limit.namespace.as_str())?)))
            .collect();
        for (namespace, at, domain) in clashes {
            let message = format!("the namespace {} is also a domain, {}", quoted(&namespace), self.pointer(domain));
            self.error_at(at, message, "another name", NO_HELP);
        }
    }
}
