//! `[inbound.global]` and `[inbound.action.*]`: limits, penalties, keys, matches.

use tidegate_core::{Count, MAX_COST, MAX_OPS, PenaltySpec, Sharing, Span};

use super::{Reader, listed};
use crate::document::{At, Entry, Node, Table, Value};
use crate::environment::foldable;
use crate::error::{Error, quoted};
use crate::key::{KeyPart, Missing};
use crate::matcher::Matcher;
use crate::nearest::nearest;
use crate::path::PathQuirks;
use crate::preset::Preset;
use crate::quantity::Quantity;

/// The most actions in a policy.
const MAX_ACTIONS: usize = 4095;
/// The longest name of an action or a limit.
const MAX_NAME: usize = 64;

/// What exceeding a limit costs, as read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cost {
    Nothing,
    Growing(PenaltySpec, At),
    Ban(Span, At),
}

/// Limits that share a key and a penalty.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: Option<String>,
    pub(super) key: Vec<KeyPart>,
    /// Where the key is written, if it is.
    pub(super) key_at: Option<At>,
    pub(super) missing: Missing,
    pub(super) quantities: Vec<(Quantity, At)>,
    pub(super) cost: Cost,
    pub(super) count: Count,
    pub(super) sharing: Sharing,
}

#[derive(Debug)]
pub(super) struct GlobalRead {
    pub(super) group: Option<Group>,
    pub(super) shadow: bool,
}

#[derive(Debug)]
pub(super) struct ActionRead {
    pub(super) name: String,
    /// The name as a variable's name holds it.
    folded: String,
    pub(super) name_at: At,
    pub(super) matcher: Option<(Matcher, At)>,
    pub(super) preset: Option<Preset>,
    pub(super) cost: u64,
    pub(super) cost_at: Option<At>,
    pub(super) shadow: bool,
    pub(super) groups: Vec<Group>,
}

impl ActionRead {
    /// How many operations its limits take in a batch.
    pub(super) fn operations(&self) -> usize {
        self.groups.iter().map(Group::operations).sum()
    }
}

impl Group {
    pub(super) fn operations(&self) -> usize {
        self.quantities.iter().filter(|(quantity, _)| *quantity != Quantity::Unlimited).count()
    }
}

impl Reader<'_> {
    pub(super) fn global(&mut self, inbound: Option<&Table>, forward_auth: Option<At>) -> Option<GlobalRead> {
        let Some(table) = inbound.and_then(|inbound| self.section(inbound, "global", "inbound.global")) else {
            let is_wrong = inbound.is_some_and(|inbound| inbound.get("global").is_some());
            return (!is_wrong).then_some(GlobalRead { group: None, shadow: false });
        };
        let shadow = self.shadow(table);
        let count = self.counted(table, Count::Admitted);
        let cost = self.cost(table, "inbound.global", Cost::Nothing);
        let sharing = self.sharing(table, "inbound.global");
        let Some(limit) = table.node("limit") else {
            let at = inbound.and_then(|inbound| inbound.get("global")).map(|entry| entry.key_at)?;
            let error = Error::new(
                self.texts,
                at,
                "[inbound.global] has no limit",
                "a limit in it, such as limit = \"1000 per 1h\"",
            );
            self.push(error.help("to have no global limit, leave the section out or write limit = \"unlimited\""));
            return None;
        };
        let quantities = self.quantities(limit, "limit")?;
        let group = Group {
            name: None,
            key: vec![KeyPart::ClientIp],
            key_at: None,
            missing: Missing::default(),
            quantities,
            cost: cost?,
            count: count?,
            sharing: sharing?,
        };
        let groups = std::slice::from_ref(&group);
        if !self.count_fits(table, groups)
            | !self.lease_fits(table, groups)
            | !self.forward_auth_keeps(forward_auth, groups)
        {
            return None;
        }
        Some(GlobalRead { group: Some(group), shadow: shadow? })
    }

    pub(super) fn actions(
        &mut self,
        inbound: Option<&Table>,
        quirks: PathQuirks,
        taken: usize,
        forward_auth: Option<At>,
    ) -> Option<Vec<ActionRead>> {
        let has_proxy = inbound.is_some_and(|inbound| inbound.get("upstream").is_some());
        let Some(entry) = inbound.and_then(|inbound| inbound.get("action")) else {
            return Some(Vec::new());
        };
        let Some(table) = entry.node.as_table() else {
            let found = entry.node.described(self.texts);
            self.wrong(
                entry.key_at,
                format!("`action` is {found}"),
                "a section for each action, [inbound.action.NAME]",
            );
            return None;
        };
        if table.entries.len() > MAX_ACTIONS {
            let message = format!("the policy has {} actions", table.entries.len());
            self.wrong(entry.key_at, message, format!("at most {MAX_ACTIONS}"));
            return None;
        }
        let mut actions: Vec<ActionRead> = Vec::new();
        let mut fine = true;
        for entry in &table.entries {
            match self.action(entry, quirks) {
                Some(action) => {
                    fine &= self.fits(&action, &actions, taken);
                    fine &= !has_proxy || self.requests_have_all_parts(&action);
                    fine &= action.matcher.is_none() || self.forward_auth_keeps(forward_auth, &action.groups);
                    actions.push(action);
                }
                None => fine = false,
            }
        }
        fine.then_some(actions)
    }

    fn action(&mut self, entry: &Entry, quirks: PathQuirks) -> Option<ActionRead> {
        let settings = crate::settings::keys_of("inbound.action.*");
        if settings.contains(&entry.key.as_str()) && self.is_setting(entry) {
            let message = format!("{} stands outside of any action", quoted(&entry.key));
            let error =
                Error::new(self.texts, entry.key_at, message, "a section for each action, [inbound.action.NAME]");
            self.push(error.help("give the action a name, such as [inbound.action.login]"));
            return None;
        }
        let name_is_fine = self.name(&entry.key, entry.key_at, "action");
        self.member.clone_from(&entry.key);
        let name = &entry.key;
        let Some(table) = entry.node.as_table() else {
            let found = entry.node.described(self.texts);
            let expected = format!("a section of its own, [inbound.action.{name}]");
            let error =
                Error::new(self.texts, entry.key_at, format!("the action {} is {found}", quoted(name)), expected);
            self.push(error);
            return None;
        };
        self.check_keys(table, "inbound.action.*");
        let preset = self.or_default(table.into(), "preset", None, |reader, node| reader.preset(node).map(Some));
        let key = self.or_default(table.into(), "key", vec![KeyPart::ClientIp], Self::key);
        let missing = self.missing_part(table, Missing::default());
        let shadow = self.shadow(table);
        let count = self.counted(table, Count::Admitted);
        let cost = self.or_default(table.into(), "cost", 1, |reader, node| reader.count(node, "cost", 1..=MAX_COST));
        let matcher = self.or_default(table.into(), "match", None, |reader, node| {
            reader.matcher(node, quirks).map(|matcher| Some((matcher, node.at)))
        });
        // A preset's ban is the default of what its limit costs.
        let preset_cost = match preset {
            Some(Some(preset)) => self.preset_cost(preset, entry.key_at),
            _ => Cost::Nothing,
        };
        let penalty = self.cost(table, "inbound.action.*", preset_cost);
        let sharing = self.sharing(table, "inbound.action.*");
        let ipv6_network = self.ipv6_network(table, preset.flatten());
        let groups = match (preset, penalty, count, &key, sharing) {
            (Some(preset), Some(penalty), Some(count), Some(key), Some(sharing)) => self.groups(
                entry,
                table,
                preset,
                Group {
                    name: None,
                    key: key.clone(),
                    key_at: table.node("key").map(|node| node.at),
                    missing: missing.unwrap_or_default(),
                    quantities: Vec::new(),
                    cost: penalty,
                    count,
                    sharing,
                },
            ),
            _ => {
                // Told once more only if it is a mistake of its own.
                let _ = table.node("limit").map(|node| self.quantities(node, "limit"));
                None
            }
        };
        let counts =
            groups.as_ref().is_none_or(|groups| self.count_fits(table, groups) & self.lease_fits(table, groups));
        let missing_fits = groups.as_ref().is_none_or(|groups| self.missing_fits(table, groups));
        let groups = groups.map(|mut groups| {
            groups.extend(ipv6_network.clone().flatten().map(|quantities| Group {
                name: Some("ipv6".to_owned()),
                key: vec![KeyPart::Ipv6Network(48)],
                key_at: None,
                missing: Missing::Skip,
                quantities,
                // A /48 may be a whole town's.
                cost: Cost::Nothing,
                count: count.unwrap_or(Count::Admitted),
                sharing: sharing.unwrap_or_default(),
            }));
            groups
        });
        let action = ActionRead {
            name: name.clone(),
            folded: foldable(name),
            name_at: entry.key_at,
            matcher: matcher?,
            preset: preset?,
            cost: cost?,
            cost_at: table.node("cost").map(|node| node.at),
            shadow: shadow?,
            groups: groups?,
        };
        missing?;
        ipv6_network?;
        (name_is_fine && counts && missing_fits).then_some(action)
    }

    /// A refused call is never in flight, so `count = "all"` says nothing of limits in flight.
    fn count_fits(&mut self, table: &Table, groups: &[Group]) -> bool {
        let is_all = |node: &Node| matches!(&node.value, Value::Text(text) if text == "all");
        let Some(node) = table.node("count").filter(|node| is_all(node)) else {
            return true;
        };
        let mut limits = groups
            .iter()
            .flat_map(|group| &group.quantities)
            .map(|(quantity, _)| quantity)
            .filter(|quantity| **quantity != Quantity::Unlimited)
            .peekable();
        if limits.peek().is_none() || limits.any(|quantity| !matches!(quantity, Quantity::InFlight { .. })) {
            return true;
        }
        let message = "`count` is `all`, but a refused call is never in flight, so there is nothing to count";
        let error = Error::new(self.texts, node.at, message, "no `count` for a limit in flight");
        self.push(error.help("leave `count` out"));
        false
    }

    /// What proxied requests match must be counted by what they have.
    fn requests_have_all_parts(&mut self, action: &ActionRead) -> bool {
        if action.matcher.is_none() {
            return true;
        }
        let mut fine = true;
        for group in action.groups.iter().filter(|group| group.operations() > 0) {
            if let (Some(part), Some(at)) = (group.key.iter().find(|part| !part.is_in_requests()), group.key_at) {
                let message = format!(
                    "the action {} counts by `{part}`, which the proxied requests that it matches don't have",
                    quoted(&action.name)
                );
                let error =
                    Error::new(self.texts, at, message, "parts of a request, such as \"client_ip\" or \"header:NAME\"");
                self.push(error.help(format!(
                    "`{part}` comes from the decision API: for that alone, leave `match` out of the action"
                )));
                fine = false;
            }
        }
        fine
    }

    /// What requests meet must be kept by forward-auth, if the policy wants that, and it never learns when a call ends.
    fn forward_auth_keeps(&mut self, wanted: Option<At>, groups: &[Group]) -> bool {
        let Some(wanted) = wanted else { return true };
        let mut fine = true;
        for (quantity, at) in groups.iter().flat_map(|group| &group.quantities) {
            if matches!(quantity, Quantity::InFlight { .. }) {
                let message = "forward-auth can't keep a limit on calls in flight: it never learns when a call ends";
                let error = Error::new(self.texts, *at, message, "another limit, such as \"5 per 60s\"");
                let pointer = self.texts.pointer(wanted);
                self.push(error.help(format!(
                    "forward-auth is asked for {pointer}; the proxy and the decision API keep such a limit: \
                     for them alone, write forward_auth = false in [api]"
                )));
                fine = false;
            }
        }
        fine
    }

    /// Whether what stands in an action's place is a setting of an action that lacks its name.
    fn is_setting(&self, entry: &Entry) -> bool {
        let inner = crate::settings::keys_of(&format!("inbound.action.*.{}", entry.key));
        match entry.node.as_table() {
            Some(table) => {
                !table.entries.is_empty() && table.entries.iter().all(|entry| inner.contains(&entry.key.as_str()))
            }
            None => true,
        }
    }

    /// The limits of an action: `limit`, `limits`, or the preset's.
    fn groups(&mut self, entry: &Entry, table: &Table, preset: Option<Preset>, model: Group) -> Option<Vec<Group>> {
        match (table.get("limit"), table.get("limits")) {
            (Some(_), Some(limits)) => {
                let error =
                    Error::new(self.texts, limits.key_at, "`limit` and `limits` stand side by side", "one of them");
                self.push(error.help("give the one in `limit` a table in `limits`: { limit = \"5 per 60s\" }"));
                None
            }
            (Some(limit), None) => Some(vec![Group { quantities: self.quantities(&limit.node, "limit")?, ..model }]),
            (None, Some(limits)) => self.limits(&limits.node, &model),
            (None, None) => match preset {
                Some(preset) => {
                    let quantity = preset.limit().parse().expect("invariant: presets are tested to parse");
                    Some(vec![Group { quantities: vec![(quantity, entry.key_at)], ..model }])
                }
                None if ["limit", "limits", "preset"]
                    .iter()
                    .any(|key| self.is_misspelt(table, "inbound.action.*", key)) =>
                {
                    None
                }
                None => {
                    let error = Error::new(
                        self.texts,
                        entry.key_at,
                        format!("the action {} has neither a limit nor a preset", quoted(&entry.key)),
                        "a limit in it, such as limit = \"5 per 60s\", or preset = \"login\"",
                    );
                    self.push(error.help("to let everything pass, write limit = \"unlimited\""));
                    None
                }
            },
        }
    }

    fn limits(&mut self, node: &Node, model: &Group) -> Option<Vec<Group>> {
        const PATH: &str = "inbound.action.*.limits.#";
        const EXPECTED: &str = "a list of tables: [{ name = \"per-account\", key = [\"key\"], limit = \"5 per 60s\" }]";
        let Value::List(items) = &node.value else {
            let found = node.described(self.texts);
            self.wrong(node.at, format!("`limits` is {found}"), EXPECTED);
            return None;
        };
        if items.is_empty() || items.len() > MAX_OPS {
            self.wrong(node.at, format!("`limits` has {} items", items.len()), format!("1 to {MAX_OPS} tables"));
            return None;
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut fine = true;
        for item in items {
            let Some(table) = item.as_table() else {
                let found = item.described(self.texts);
                let error = Error::new(self.texts, item.at, format!("an item of `limits` is {found}"), EXPECTED);
                self.push(match &item.value {
                    Value::Text(text) => {
                        error.help(format!("write {{ limit = \"{text}\" }}, or use `limit` for a list of strings"))
                    }
                    _ => error,
                });
                fine = false;
                continue;
            };
            self.check_keys(table, PATH);
            let name = self.or_default(table.into(), "name", None, |reader, node| {
                let name = reader.text(node, "name", "a name in quotes, such as \"per-account\"")?;
                reader.name(name, node.at, "limit").then(|| Some(name.to_owned()))
            });
            if let Some(Some(name)) = &name
                && groups.iter().any(|group| group.name.as_ref() == Some(name))
            {
                self.wrong(
                    item.at,
                    format!("two limits of this action are named {}", quoted(name)),
                    "names that differ",
                );
                fine = false;
            }
            let key = self.or_default(table.into(), "key", model.key.clone(), Self::key);
            let missing = self.missing_part(table, model.missing);
            let count = self.counted(table, model.count);
            let cost = self.cost(table, PATH, model.cost);
            let quantities = match table.node("limit") {
                Some(limit) => self.quantities(limit, "limit"),
                None => {
                    self.wrong(
                        item.at,
                        "this item of `limits` has no `limit`",
                        "a limit in it, such as limit = \"5 per 60s\"",
                    );
                    None
                }
            };
            match (name, key, missing, quantities, cost, count) {
                (Some(name), Some(key), Some(missing), Some(quantities), Some(cost), Some(count)) => {
                    let key_at = table.node("key").map(|node| node.at).or(model.key_at);
                    let group = Group { name, key, key_at, missing, quantities, cost, count, sharing: model.sharing };
                    fine &= self.count_fits(table, std::slice::from_ref(&group));
                    fine &= self.missing_fits(table, std::slice::from_ref(&group));
                    groups.push(group);
                }
                _ => fine = false,
            }
        }
        fine.then_some(groups)
    }

    /// Names end up in headers, logs, variables and URLs.
    pub(super) fn name(&mut self, name: &str, at: At, what: &str) -> bool {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let expected = "letters, digits, and single _ - . between them";
        let article = if what == "action" { "an" } else { "a" };
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
        self.wrong(at, message, expected);
        false
    }

    fn preset(&mut self, node: &Node) -> Option<Preset> {
        let names = Preset::ALL.map(Preset::as_str);
        let text = self.text(node, "preset", &listed(&names))?;
        let preset = Preset::named(text);
        if preset.is_none() {
            let error = Error::new(self.texts, node.at, format!("unknown preset {}", quoted(text)), listed(&names));
            let meant = match text {
                "signup" | "sign_up" | "sign-up" | "registration" => Some("register"),
                "signin" | "sign_in" | "sign-in" | "auth" => Some("login"),
                "otp" | "sms" | "code" => Some("otp_request"),
                "reset" | "forgot_password" => Some("password_reset"),
                other => nearest(other, names),
            };
            self.push(error.hint(meant));
        }
        preset
    }

    fn preset_cost(&mut self, preset: Preset, at: At) -> Cost {
        let ban = crate::units::parse_duration(preset.ban()).expect("invariant: presets are tested to parse");
        Cost::Ban(ban, at)
    }

    fn shadow(&mut self, table: &Table) -> Option<bool> {
        self.or_default(table.into(), "mode", false, |reader, node| {
            if matches!(&node.value, Value::Text(text) if text == "strict" || text == "parole") {
                let error = Error::new(reader.texts, node.at, "this mode is the penalty's", "`enforce` or `shadow`");
                reader.push(error.help("write it inside the penalty: penalty = { mode = \"strict\" }"));
                return None;
            }
            reader.choice(node, "mode", &[("enforce", false), ("shadow", true)])
        })
    }

    fn counted(&mut self, table: &Table, default: Count) -> Option<Count> {
        self.or_default(table.into(), "count", default, |reader, node| {
            reader.choice(node, "count", &[("admitted", Count::Admitted), ("all", Count::All)])
        })
    }

    /// What an action must not share with the ones before it, and what must fit into one batch.
    fn fits(&mut self, action: &ActionRead, before: &[ActionRead], taken: usize) -> bool {
        let mut fine = true;
        if let Some(other) = before.iter().find(|other| other.folded == action.folded) {
            let message = format!(
                "{} and {} differ only in ways that a variable's name can't show",
                quoted(&action.name),
                quoted(&other.name)
            );
            let error =
                Error::new(self.texts, action.name_at, message, "names that differ in more than case and dashes");
            let pointer = self.texts.pointer(other.name_at);
            self.push(error.help(format!("the other stands {pointer}")));
            fine = false;
        }
        if let Some((matcher, at)) = &action.matcher
            && let Some((other, cover, other_at)) = before.iter().find_map(|other| {
                other.matcher.as_ref().filter(|(cover, _)| cover.covers(matcher)).map(|(cover, at)| (other, cover, *at))
            })
        {
            let pointer = self.texts.pointer(other_at);
            let (message, help) = if cover == matcher {
                (
                    format!("the actions {} and {} match the same requests", quoted(&other.name), quoted(&action.name)),
                    format!("the first match wins, and {} stands first, {pointer}", quoted(&other.name)),
                )
            } else {
                (
                    format!(
                        "the action {} can never match: {} takes every request first",
                        quoted(&action.name),
                        quoted(&other.name)
                    ),
                    format!(
                        "the first match wins; put {} above {}, which stands {pointer}",
                        quoted(&action.name),
                        quoted(&other.name)
                    ),
                )
            };
            let error = Error::new(self.texts, *at, message, "requests that no action above it matches");
            self.push(error.help(help));
            fine = false;
        }
        let operations = action.operations();
        if operations + taken > MAX_OPS {
            let message = format!(
                "the action {} has {operations} limits{}; one decision asks at most {MAX_OPS}",
                quoted(&action.name),
                if taken > 0 { format!(", and [inbound.global] {taken} more") } else { String::new() },
            );
            self.wrong(
                action.name_at,
                message,
                format!("at most {} limits in the action", MAX_OPS - taken.min(MAX_OPS)),
            );
            fine = false;
        }
        fine
    }

    /// A call that weighs more than a limit ever holds would never pass.
    pub(super) fn fits_capacity(
        &mut self,
        cost: u64,
        cost_at: Option<At>,
        quantity: &Quantity,
        at: At,
        whose: &str,
    ) -> bool {
        let Some(capacity) = quantity.capacity() else {
            return true;
        };
        if matches!(quantity, Quantity::InFlight { .. }) || capacity == 0 || cost <= capacity {
            return true;
        }
        let message =
            format!("each call weighs {cost}, but {whose} \"{quantity}\" never has room for more than {capacity}");
        self.wrong(cost_at.unwrap_or(at), message, "a cost that fits: a heavier call would never pass");
        false
    }
}
