//! Checks of actions and limits that were read: names, clashes, and settings that don't go together.

use tidegate_core::{CountMode, MAX_OPS};

use super::DocumentReader;
use super::actions::{LimitGroup, ParsedAction, ParsedPenalty};
use crate::document::{TextRange, TomlEntry, TomlTable};
use crate::error::quoted;
use crate::key::KeyPart;
use crate::quantity::Quantity;

/// The longest name of an action or a limit, in bytes.
const MAX_NAME: usize = 64;

impl DocumentReader<'_> {
    /// Reports `count = "all"` if all limits are on calls in flight. A refused call is never in flight.
    pub(super) fn check_count(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let Some(node) = table.node("count").filter(|node| node.is_word("all")) else { return true };
        let quantities = groups.iter().flat_map(|group| &group.quantities).map(|(quantity, _)| quantity);
        let mut limits = quantities.filter(|quantity| **quantity != Quantity::Unlimited).peekable();
        if limits.peek().is_none() || limits.any(|quantity| !quantity.is_in_flight()) {
            return true;
        }
        let message = "`count` is `all`, but a refused call is never in flight, so there is nothing to count";
        self.error(node.at, message, "no `count` for a limit in flight").help("leave `count` out");
        false
    }

    /// Reports an action that matches proxied requests but counts by a part that they don't have.
    pub(super) fn check_request_parts(&mut self, action: &ParsedAction) -> bool {
        let mut is_valid = true;
        for group in action.groups.iter().filter(|group| action.matcher.is_some() && group.op_count() > 0) {
            if let (Some(part), Some(at)) = (group.key.iter().find(|part| !part.is_in_requests()), group.key_at) {
                let name = quoted(&action.name);
                let message = format!(
                    "the action {name} counts by `{part}`, which the proxied requests that it matches don't have"
                );
                let help =
                    format!("`{part}` comes from the decision API: for that alone, leave `match` out of the action");
                let expected = "parts of a request, such as \"client_ip\" or \"header:NAME\"";
                self.error(at, message, expected).help(help);
                is_valid = false;
            }
        }
        is_valid
    }

    /// Reports limits on calls in flight if the policy asks for forward-auth, which never learns when a call ends.
    pub(super) fn check_forward_auth(&mut self, wanted: Option<TextRange>, groups: &[LimitGroup]) -> bool {
        let Some(wanted) = wanted else { return true };
        let mut is_valid = true;
        let quantities = groups.iter().flat_map(|group| &group.quantities);
        for (_, at) in quantities.filter(|(quantity, _)| quantity.is_in_flight()) {
            let message = "forward-auth can't keep a limit on calls in flight: it never learns when a call ends";
            let help = format!(
                "forward-auth is asked for {}; the proxy and the decision API keep such a limit: for them alone, \
                 write forward_auth = false in [api]",
                self.texts.describe_location(wanted)
            );
            self.error(*at, message, "another limit, such as \"5 per 60s\"").help(help);
            is_valid = false;
        }
        is_valid
    }

    /// Reports a name that doesn't fit into headers, logs, variables and URLs. Returns true if it fits.
    pub(super) fn check_name(&mut self, name: &str, at: TextRange, what: &str) -> bool {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let expected = "letters, digits, and single _ - . between them";
        let article = if what.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
        let (message, expected) = if name.is_empty() {
            (format!("the {what} has no name"), expected)
        } else if name.len() > MAX_NAME {
            (format!("the {what}'s name is longer than {MAX_NAME} characters"), "a shorter one")
        } else if !name.bytes().all(fits) || !name.starts_with(|first: char| first.is_ascii_alphanumeric()) {
            (format!("{} can't be the name of {article} {what}", quoted(name)), expected)
        } else if name.contains("__") {
            let why = "two underscores separate the names in an environment variable";
            (format!("{} can't be the name of {article} {what}: {why}", quoted(name)), expected)
        } else if what == "action" && name == "global" {
            ("no action can be named `global`, which names the limit over all actions".to_owned(), "another name")
        } else {
            return true;
        };
        self.report(at, message, expected);
        false
    }

    /// Returns the table of an action or a provider, which every name in their sections must have.
    pub(super) fn own_table<'n>(&mut self, entry: &'n TomlEntry, section: &str, what: &str) -> Option<&'n TomlTable> {
        let table = entry.node.as_table();
        table.or_else(|| {
            let message = format!("the {what} {} is {}", quoted(&entry.key), entry.node.describe(self.texts));
            let expected = format!("a section of its own, [{section}.{what}.{}]", entry.key);
            self.error(entry.key_at, message, expected).none()
        })
    }

    /// Reports an action whose name or match clashes with one before it, or whose limits don't fit into one batch.
    pub(super) fn check_action(&mut self, action: &ParsedAction, before: &[ParsedAction], taken: usize) -> bool {
        let mut is_valid = true;
        if let Some(other) = before.iter().find(|other| other.folded_name == action.folded_name) {
            self.report_alike((&action.name, action.name_at), (&other.name, other.name_at));
            is_valid = false;
        }
        if let Some((matcher, at)) = &action.matcher
            && let Some((other, cover, other_at)) = before.iter().find_map(|other| {
                other.matcher.as_ref().filter(|(cover, _)| cover.covers(matcher)).map(|(cover, at)| (other, cover, *at))
            })
        {
            let pointer = self.texts.describe_location(other_at);
            let (name, first) = (quoted(&action.name), quoted(&other.name));
            let (message, help) = match cover == matcher {
                true => (
                    format!("the actions {first} and {name} match the same requests"),
                    format!("the first match wins, and {first} stands first, {pointer}"),
                ),
                false => (
                    format!("the action {name} can never match: {first} takes every request first"),
                    format!("the first match wins; put {name} above {first}, which stands {pointer}"),
                ),
            };
            self.error(*at, message, "requests that no action above it matches").help(help);
            is_valid = false;
        }
        let operations = action.op_count();
        if operations + taken > MAX_OPS {
            let name = quoted(&action.name);
            let of_global = if taken > 0 { format!(", and [inbound.global] {taken} more") } else { String::new() };
            let message =
                format!("the action {name} has {operations} limits{of_global}; one decision asks at most {MAX_OPS}");
            let expected = format!("at most {} limits in the action", MAX_OPS - taken.min(MAX_OPS));
            self.report(action.name_at, message, expected);
            is_valid = false;
        }
        is_valid
    }

    /// Reports a name that the environment can't tell from one before it.
    pub(super) fn report_alike(&mut self, (name, at): (&str, TextRange), (other, other_at): (&str, TextRange)) {
        let (name, other) = (quoted(name), quoted(other));
        let message = format!("{name} and {other} differ only in ways that a variable's name can't show");
        let pointer = self.texts.describe_location(other_at);
        self.error(at, message, "names that differ in more than case and dashes")
            .help(format!("the other stands {pointer}"));
    }

    /// Reports a cost above the limit's capacity, because such a call would never pass.
    pub(super) fn check_capacity(
        &mut self,
        cost: u64,
        cost_at: Option<TextRange>,
        quantity: &Quantity,
        at: TextRange,
        whose: &str,
    ) -> bool {
        let Some(capacity) = quantity.capacity() else { return true };
        if quantity.is_in_flight() || capacity == 0 || cost <= capacity {
            return true;
        }
        let message =
            format!("each call costs {cost}, but {whose} \"{quantity}\" never has room for more than {capacity}");
        self.report(cost_at.unwrap_or(at), message, "a cost that fits: a call with a higher cost would never pass");
        false
    }

    /// Reports a `missing` without effect, because every request has all parts of the keys. `by_ip`, the default, is
    /// allowed.
    pub(super) fn check_missing(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let Some(node) = table.node("missing").filter(|node| !node.is_word("by_ip")) else { return true };
        if groups.iter().flat_map(|group| &group.key).any(KeyPart::may_be_missing) {
            return true;
        }
        let expected =
            "a key with a part that requests may lack, such as \"header:NAME\", \"cookie:NAME\" or \"query:NAME\"";
        self.error(node.at, "`missing` stands beside a key whose parts are never missing", expected)
            .help("leave `missing` out");
        false
    }

    /// Reports a `lease` on limits that can't be leased. Returns true if there is no such error.
    pub(super) fn check_lease(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let Some(node) = table.node("lease") else { return true };
        let in_flight = |group: &LimitGroup| group.quantities.iter().any(|(quantity, _)| quantity.is_in_flight());
        let why = if groups.iter().any(|group| !matches!(group.penalty, ParsedPenalty::None)) {
            "a limit with a penalty can't be leased: a slice that is refused would be a strike"
        } else if groups.iter().any(in_flight) {
            "a limit on calls in flight can't be leased: its permits are given back one by one"
        } else if groups.iter().any(|group| group.count == CountMode::All) {
            "a limit that counts calls that others refuse can't be leased: those that a node refuses by itself aren't counted"
        } else {
            return true;
        };
        let expected = "a `lease` for limits without penalties, bans, calls in flight and `count = \"all\"`";
        self.report(node.at, why, expected);
        false
    }
}
