//! The limit of a request's descriptor. The order of precedence is the original's.

use std::collections::HashMap;

use super::expressions::Values;
use super::names::ActionNames;
use super::{ConditionalLimit, Descriptor, RateLimit, RatelimitConfig};

/// The separator of the values of a key, and the character before one that belongs to a value.
const SEPARATOR: char = '|';
const ESCAPE: char = '\\';

/// The limits of a configuration, in a form that finds the one of a descriptor in as many steps as it has entries.
///
/// ```
/// use tidegate_policy::ratelimit_yaml::{LimitTable, RatelimitConfig};
///
/// let yaml = b"{domain: edge, descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 60}}]}";
/// let table = LimitTable::new(&RatelimitConfig::read([("edge.yaml", yaml)], false)?);
/// let found = table.find("edge", [("user", "alice")]).expect("a limit");
/// assert_eq!((found.limit.name.as_str(), found.key.as_str()), ("edge.user", "alice"));
/// assert!(table.find("edge", [("user", "alice"), ("path", "/")]).is_none(), "no limit has two entries");
/// # Ok::<(), tidegate_policy::Errors>(())
/// ```
#[derive(Debug)]
pub struct LimitTable {
    domains: HashMap<String, usize>,
    levels: Vec<Level>,
    /// The limits with conditions of each namespace, each with its index.
    namespaces: HashMap<String, Vec<(usize, ConditionalLimit)>>,
    limits: Vec<DescriptorLimit>,
}

/// A limit of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorLimit {
    /// The domain, and the key or `KEY_VALUE` of each level, joined by dots.
    pub name: String,
    /// The name of the action in a policy that has this configuration, made of `name`.
    pub action: String,
    /// The limit.
    pub limit: RateLimit,
    /// True to count and never refuse.
    pub shadow_mode: bool,
    /// True to refuse a request only if all its limits of this kind refuse it.
    pub quota_mode: bool,
}

/// The limit of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLimit<'t> {
    /// The index of the limit in [`LimitTable::limits`].
    pub index: usize,
    /// The limit.
    pub limit: &'t DescriptorLimit,
    /// The values by which the limit counts, those of the entries that name no value in the configuration. They are
    /// joined by `|`; a `\` stands before a `|` or `\` of a value. If the configuration's key has a `*`, the entry's
    /// key and `_` stand before the value, because different keys count apart. Empty if all descriptors share one count.
    pub key: String,
}

/// The entries that may come next.
#[derive(Debug, Default)]
struct Level {
    /// By the key alone, or the key, `_` and the value.
    nodes: HashMap<String, Node>,
    /// The nodes with `*`, in the order of the configuration: the texts around each `*`, and the composite key.
    wildcards: Vec<(Vec<String>, String)>,
}

#[derive(Debug)]
struct Node {
    limit: Option<usize>,
    next: Option<usize>,
    shares_count: bool,
    has_key_pattern: bool,
}

impl LimitTable {
    /// The table of a configuration.
    pub fn new(config: &RatelimitConfig) -> Self {
        let mut table =
            Self { domains: HashMap::new(), levels: Vec::new(), namespaces: HashMap::new(), limits: Vec::new() };
        let mut names = ActionNames::default();
        for domain in config.domains() {
            let level = table.add_level(&domain.name, &domain.descriptors, &mut names);
            table.domains.insert(domain.name.clone(), level);
        }
        for conditional in config.conditional_limits() {
            let (path, amount) = (conditional.path(), conditional.amount());
            let limits = table.namespaces.entry(conditional.namespace.clone()).or_default();
            limits.push((table.limits.len(), conditional.clone()));
            table.limits.push(DescriptorLimit {
                action: names.unique(&path),
                name: path,
                limit: RateLimit { name: conditional.name.clone(), replaces: Vec::new(), amount },
                shadow_mode: false,
                quota_mode: false,
            });
        }
        table
    }

    /// All limits, in the order of the configuration.
    pub fn limits(&self) -> &[DescriptorLimit] {
        &self.limits
    }

    /// Finds the limit of a descriptor with these entries: keys and values. At each level the value comes before a value
    /// with `*`, and that before the key alone. `None` if no limit stands at the level of the last entry.
    pub fn find<'e>(
        &self,
        domain: &str,
        entries: impl IntoIterator<Item = (&'e str, &'e str)>,
    ) -> Option<FoundLimit<'_>> {
        let mut next = self.domains.get(domain).copied();
        let (mut limit, mut counted, mut composite) = (None, Vec::new(), String::new());
        for (name, value) in entries {
            composite.clear();
            composite.extend([name, "_", value]);
            let (node, is_counted_by) = self.levels[next?].find(name, &composite)?;
            if is_counted_by {
                counted.push(escaped(if node.has_key_pattern { &composite } else { value }));
            }
            (limit, next) = (node.limit, node.next);
        }
        let index = limit?;
        Some(FoundLimit { index, limit: &self.limits[index], key: counted.join("|") })
    }

    /// Finds the limits with conditions that apply to a request with these descriptors, each a list of entries. `None` if
    /// no file of limitador's has the namespace.
    ///
    /// A condition that has no meaning for the values, such as a number compared with a text, counts as true, and a
    /// variable without a value as empty: so no value of a client escapes a limit.
    pub fn applying<'e>(
        &self,
        namespace: &str,
        descriptors: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>,
    ) -> Option<Vec<FoundLimit<'_>>> {
        let mut values = Values::new(descriptors);
        let mut found = Vec::new();
        for (index, limit) in self.namespaces.get(namespace)? {
            values.set_limit(limit.name.as_deref(), limit.id.as_deref());
            if limit.conditions.iter().all(|condition| condition.holds(&values))
                && let Some(parts) = limit.variables.iter().map(|it| it.value(&values)).collect::<Option<Vec<_>>>()
            {
                let key = parts.iter().map(|part| escaped(part)).collect::<Vec<_>>().join("|");
                found.push(FoundLimit { index: *index, limit: &self.limits[*index], key });
            }
        }
        Some(found)
    }

    /// The limits with conditions of a namespace, each with its index. `None` if no file has it.
    pub fn namespace(&self, namespace: &str) -> Option<&[(usize, ConditionalLimit)]> {
        self.namespaces.get(namespace).map(Vec::as_slice)
    }

    /// True if the configuration has limits with conditions.
    pub fn has_namespaces(&self) -> bool {
        !self.namespaces.is_empty()
    }

    /// True if the configuration has this domain or namespace.
    pub fn has_domain(&self, domain: &str) -> bool {
        self.domains.contains_key(domain) || self.namespaces.contains_key(domain)
    }

    fn add_level(&mut self, path: &str, descriptors: &[Descriptor], names: &mut ActionNames) -> usize {
        let index = self.levels.len();
        self.levels.push(Level::default());
        for descriptor in descriptors {
            let composite = descriptor.composite_key();
            let path = format!("{path}.{composite}");
            let limit = descriptor.limit.clone().map(|limit| {
                let Descriptor { shadow_mode, quota_mode, .. } = *descriptor;
                let action = names.unique(&path);
                self.limits.push(DescriptorLimit { name: path.clone(), action, limit, shadow_mode, quota_mode });
                self.limits.len() - 1
            });
            let has_next = !descriptor.descriptors.is_empty();
            let next = has_next.then(|| self.add_level(&path, &descriptor.descriptors, names));
            let has_key_pattern = descriptor.key.contains('*');
            let node = Node { limit, next, shares_count: descriptor.share_threshold, has_key_pattern };
            let level = &mut self.levels[index];
            if descriptor.is_wildcard() {
                let parts = composite.split('*').map(str::to_owned).collect();
                level.wildcards.push((parts, composite.clone()));
            }
            level.nodes.insert(composite, node);
        }
        index
    }
}

impl Level {
    /// The node of an entry, and whether its limit counts each value apart.
    fn find(&self, name: &str, composite: &str) -> Option<(&Node, bool)> {
        let by_pattern = || {
            let (_, key) = self.wildcards.iter().find(|(parts, _)| matches(parts, composite))?;
            self.nodes.get(key).map(|node| (node, !node.shares_count))
        };
        let by_value = self.nodes.get(composite).map(|node| (node, false));
        by_value.or_else(by_pattern).or_else(|| self.nodes.get(name).map(|node| (node, true)))
    }
}

/// True if these texts stand in a text in this order, the first at its start and the last at its end.
fn matches(parts: &[String], text: &str) -> bool {
    let [first, middle @ .., last] = parts else { return false };
    let inner = text.strip_prefix(first.as_str()).and_then(|rest| rest.strip_suffix(last.as_str()));
    let after = |rest: &'_ str, part: &String| rest.find(part.as_str()).map(|at| at + part.len());
    inner.is_some_and(|inner| {
        middle.iter().try_fold(0, |at, part| after(&inner[at..], part).map(|next| at + next)).is_some()
    })
}

fn escaped(value: &str) -> String {
    let escape = |letter| [SEPARATOR, ESCAPE].contains(&letter).then_some(ESCAPE);
    value.chars().flat_map(|letter| escape(letter).into_iter().chain([letter])).collect()
}
