//! `[inbound.global]` and `[inbound.action.*]`: limits, penalties, keys, matches.

use tidegate_core::{CountMode, MAX_COST, MAX_OPS, PenaltySpec, Sharing, Span};

use super::{DocumentReader, join_names};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::environment::fold_member_name;
use crate::error::{Error, quoted};
use crate::key::{KeyPart, OnMissing};
use crate::matcher::Matcher;
use crate::nearest::nearest;
use crate::path::PathQuirks;
use crate::preset::Preset;
use crate::quantity::Quantity;

/// The most actions in a policy.
const MAX_ACTIONS: usize = 4095;
/// The longest name of an action or a limit, in bytes.
const MAX_NAME: usize = 64;

/// The penalty for exceeding a limit, as read.
#[derive(Clone, Copy, Debug)]
pub(super) enum ParsedPenalty {
    None,
    Growing(PenaltySpec, TextRange),
    Ban(Span, TextRange),
}

/// Limits that share a key and a penalty.
#[derive(Debug)]
pub(super) struct LimitGroup {
    pub(super) name: Option<String>,
    pub(super) key: Vec<KeyPart>,
    /// The place of the key in the policy; `None` if the key is a default.
    pub(super) key_at: Option<TextRange>,
    pub(super) missing: OnMissing,
    pub(super) quantities: Vec<(Quantity, TextRange)>,
    pub(super) penalty: ParsedPenalty,
    pub(super) count: CountMode,
    pub(super) sharing: Sharing,
}

#[derive(Debug)]
pub(super) struct ParsedGlobal {
    pub(super) group: Option<LimitGroup>,
    pub(super) shadow: bool,
}

#[derive(Debug)]
pub(super) struct ParsedAction {
    pub(super) name: String,
    /// The name as it appears in a variable's name.
    folded_name: String,
    pub(super) name_at: TextRange,
    pub(super) matcher: Option<(Matcher, TextRange)>,
    pub(super) preset: Option<Preset>,
    pub(super) cost: u64,
    pub(super) cost_at: Option<TextRange>,
    pub(super) shadow: bool,
    pub(super) groups: Vec<LimitGroup>,
}

impl ParsedAction {
    /// The number of operations that its limits take in a batch.
    pub(super) fn op_count(&self) -> usize {
        self.groups.iter().map(LimitGroup::op_count).sum()
    }
}

impl LimitGroup {
    pub(super) fn op_count(&self) -> usize {
        self.quantities.iter().filter(|(quantity, _)| *quantity != Quantity::Unlimited).count()
    }
}

impl DocumentReader<'_> {
    pub(super) fn global(
        &mut self,
        inbound: Option<&TomlTable>,
        forward_auth: Option<TextRange>,
    ) -> Option<ParsedGlobal> {
        let Some(table) = inbound.and_then(|inbound| self.section(inbound, "global", "inbound.global")) else {
            let is_wrong = inbound.is_some_and(|inbound| inbound.get("global").is_some());
            return (!is_wrong).then_some(ParsedGlobal { group: None, shadow: false });
        };
        let shadow = self.shadow(table);
        let count = self.count_mode(table, CountMode::Admitted);
        let cost = self.penalty_or_ban(table, "inbound.global", ParsedPenalty::None);
        let sharing = self.sharing(table, "inbound.global");
        let Some(limit) = table.node("limit") else {
            let at = inbound.and_then(|inbound| inbound.get("global")).map(|entry| entry.key_at)?;
            let error = Error::new(
                self.texts,
                at,
                "[inbound.global] has no limit",
                "a limit in it, such as limit = \"1000 per 1h\"",
            );
            self.push_error(
                error.help("to have no global limit, leave the section out or write limit = \"unlimited\""),
            );
            return None;
        };
        let quantities = self.quantities(limit, "limit")?;
        let group = LimitGroup {
            name: None,
            key: vec![KeyPart::ClientIp],
            key_at: None,
            missing: OnMissing::default(),
            quantities,
            penalty: cost?,
            count: count?,
            sharing: sharing?,
        };
        let groups = std::slice::from_ref(&group);
        if !self.check_count(table, groups)
            | !self.check_lease(table, groups)
            | !self.check_forward_auth(forward_auth, groups)
        {
            return None;
        }
        Some(ParsedGlobal { group: Some(group), shadow: shadow? })
    }

    pub(super) fn actions(
        &mut self,
        inbound: Option<&TomlTable>,
        quirks: PathQuirks,
        global_op_count: usize,
        forward_auth: Option<TextRange>,
    ) -> Option<Vec<ParsedAction>> {
        let has_proxy = inbound.is_some_and(|inbound| inbound.get("upstream").is_some());
        let Some(entry) = inbound.and_then(|inbound| inbound.get("action")) else {
            return Some(Vec::new());
        };
        let Some(table) = entry.node.as_table() else {
            let found = entry.node.describe(self.texts);
            self.report(
                entry.key_at,
                format!("`action` is {found}"),
                "a section for each action, [inbound.action.NAME]",
            );
            return None;
        };
        if table.entries.len() > MAX_ACTIONS {
            let message = format!("the policy has {} actions", table.entries.len());
            self.report(entry.key_at, message, format!("at most {MAX_ACTIONS}"));
            return None;
        }
        let mut actions: Vec<ParsedAction> = Vec::new();
        let mut fine = true;
        for entry in &table.entries {
            match self.action(entry, quirks) {
                Some(action) => {
                    fine &= self.check_action(&action, &actions, global_op_count);
                    fine &= !has_proxy || self.check_request_parts(&action);
                    fine &= action.matcher.is_none() || self.check_forward_auth(forward_auth, &action.groups);
                    actions.push(action);
                }
                None => fine = false,
            }
        }
        fine.then_some(actions)
    }

    fn action(&mut self, entry: &TomlEntry, quirks: PathQuirks) -> Option<ParsedAction> {
        let settings = crate::settings::table_keys("inbound.action.*");
        if settings.contains(&entry.key.as_str()) && self.is_misplaced_setting(entry) {
            let message = format!("{} stands outside of any action", quoted(&entry.key));
            let error =
                Error::new(self.texts, entry.key_at, message, "a section for each action, [inbound.action.NAME]");
            self.push_error(error.help("give the action a name, such as [inbound.action.login]"));
            return None;
        }
        let name_is_fine = self.check_name(&entry.key, entry.key_at, "action");
        self.section_name.clone_from(&entry.key);
        let name = &entry.key;
        let Some(table) = entry.node.as_table() else {
            let found = entry.node.describe(self.texts);
            let expected = format!("a section of its own, [inbound.action.{name}]");
            let error =
                Error::new(self.texts, entry.key_at, format!("the action {} is {found}", quoted(name)), expected);
            self.push_error(error);
            return None;
        };
        self.check_keys(table, "inbound.action.*");
        let preset = self.read_or_default(table.into(), "preset", None, |reader, node| reader.preset(node).map(Some));
        let key = self.read_or_default(table.into(), "key", vec![KeyPart::ClientIp], Self::key);
        let missing = self.on_missing(table, OnMissing::default());
        let shadow = self.shadow(table);
        let count = self.count_mode(table, CountMode::Admitted);
        let cost =
            self.read_or_default(table.into(), "cost", 1, |reader, node| reader.integer(node, "cost", 1..=MAX_COST));
        let matcher = self.read_or_default(table.into(), "match", None, |reader, node| {
            reader.matcher(node, quirks).map(|matcher| Some((matcher, node.at)))
        });
        // A preset's ban is the default penalty.
        let preset_cost = match preset {
            Some(Some(preset)) => self.preset_ban(preset, entry.key_at),
            _ => ParsedPenalty::None,
        };
        let penalty = self.penalty_or_ban(table, "inbound.action.*", preset_cost);
        let sharing = self.sharing(table, "inbound.action.*");
        let ipv6_network = self.ipv6_network(table, preset.flatten());
        let groups = match (preset, penalty, count, &key, sharing) {
            (Some(preset), Some(penalty), Some(count), Some(key), Some(sharing)) => self.limit_groups(
                entry,
                table,
                preset,
                LimitGroup {
                    name: None,
                    key: key.clone(),
                    key_at: table.node("key").map(|node| node.at),
                    missing: missing.unwrap_or_default(),
                    quantities: Vec::new(),
                    penalty,
                    count,
                    sharing,
                },
            ),
            _ => {
                // `limit` is still read, so that its own errors are reported as well.
                let _ = table.node("limit").map(|node| self.quantities(node, "limit"));
                None
            }
        };
        let counts =
            groups.as_ref().is_none_or(|groups| self.check_count(table, groups) & self.check_lease(table, groups));
        let missing_fits = groups.as_ref().is_none_or(|groups| self.check_missing(table, groups));
        let groups = groups.map(|mut groups| {
            groups.extend(ipv6_network.clone().flatten().map(|quantities| LimitGroup {
                name: Some("ipv6".to_owned()),
                key: vec![KeyPart::Ipv6Network(48)],
                key_at: None,
                missing: OnMissing::Skip,
                quantities,
                // No penalty, because a /48 may belong to a whole town.
                penalty: ParsedPenalty::None,
                count: count.unwrap_or(CountMode::Admitted),
                sharing: sharing.unwrap_or_default(),
            }));
            groups
        });
        let action = ParsedAction {
            name: name.clone(),
            folded_name: fold_member_name(name),
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

    /// Reports `count = "all"` if all limits are on calls in flight. A refused call is never in flight.
    fn check_count(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let is_all = |node: &TomlNode| matches!(&node.value, TomlValue::String(text) if text == "all");
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
        self.push_error(error.help("leave `count` out"));
        false
    }

    /// Reports an action that matches proxied requests but counts by a part that they don't have.
    fn check_request_parts(&mut self, action: &ParsedAction) -> bool {
        if action.matcher.is_none() {
            return true;
        }
        let mut fine = true;
        for group in action.groups.iter().filter(|group| group.op_count() > 0) {
            if let (Some(part), Some(at)) = (group.key.iter().find(|part| !part.is_in_requests()), group.key_at) {
                let message = format!(
                    "the action {} counts by `{part}`, which the proxied requests that it matches don't have",
                    quoted(&action.name)
                );
                let error =
                    Error::new(self.texts, at, message, "parts of a request, such as \"client_ip\" or \"header:NAME\"");
                self.push_error(error.help(format!(
                    "`{part}` comes from the decision API: for that alone, leave `match` out of the action"
                )));
                fine = false;
            }
        }
        fine
    }

    /// Reports limits on calls in flight if the policy asks for forward-auth, which never learns when a call ends.
    fn check_forward_auth(&mut self, wanted: Option<TextRange>, groups: &[LimitGroup]) -> bool {
        let Some(wanted) = wanted else { return true };
        let mut fine = true;
        for (quantity, at) in groups.iter().flat_map(|group| &group.quantities) {
            if matches!(quantity, Quantity::InFlight { .. }) {
                let message = "forward-auth can't keep a limit on calls in flight: it never learns when a call ends";
                let error = Error::new(self.texts, *at, message, "another limit, such as \"5 per 60s\"");
                let pointer = self.texts.describe_location(wanted);
                self.push_error(error.help(format!(
                    "forward-auth is asked for {pointer}; the proxy and the decision API keep such a limit: \
                     for them alone, write forward_auth = false in [api]"
                )));
                fine = false;
            }
        }
        fine
    }

    /// Returns true if the entry in an action's place is a setting of an action without a name.
    fn is_misplaced_setting(&self, entry: &TomlEntry) -> bool {
        let inner = crate::settings::table_keys(&format!("inbound.action.*.{}", entry.key));
        match entry.node.as_table() {
            Some(table) => {
                !table.entries.is_empty() && table.entries.iter().all(|entry| inner.contains(&entry.key.as_str()))
            }
            None => true,
        }
    }

    /// The limits of an action: `limit`, `limits`, or the preset's.
    fn limit_groups(
        &mut self,
        entry: &TomlEntry,
        table: &TomlTable,
        preset: Option<Preset>,
        defaults: LimitGroup,
    ) -> Option<Vec<LimitGroup>> {
        match (table.get("limit"), table.get("limits")) {
            (Some(_), Some(limits)) => {
                let error =
                    Error::new(self.texts, limits.key_at, "`limit` and `limits` stand side by side", "one of them");
                self.push_error(error.help("give the one in `limit` a table in `limits`: { limit = \"5 per 60s\" }"));
                None
            }
            (Some(limit), None) => {
                Some(vec![LimitGroup { quantities: self.quantities(&limit.node, "limit")?, ..defaults }])
            }
            (None, Some(limits)) => self.limits(&limits.node, &defaults),
            (None, None) => match preset {
                Some(preset) => {
                    let quantity = preset.limit().parse().expect("invariant: presets are tested to parse");
                    Some(vec![LimitGroup { quantities: vec![(quantity, entry.key_at)], ..defaults }])
                }
                None if ["limit", "limits", "preset"]
                    .iter()
                    .any(|key| self.has_misspelling_of(table, "inbound.action.*", key)) =>
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
                    self.push_error(error.help("to let everything pass, write limit = \"unlimited\""));
                    None
                }
            },
        }
    }

    fn limits(&mut self, node: &TomlNode, model: &LimitGroup) -> Option<Vec<LimitGroup>> {
        const PATH: &str = "inbound.action.*.limits.#";
        const EXPECTED: &str = "a list of tables: [{ name = \"per-account\", key = [\"key\"], limit = \"5 per 60s\" }]";
        let TomlValue::List(items) = &node.value else {
            let found = node.describe(self.texts);
            self.report(node.at, format!("`limits` is {found}"), EXPECTED);
            return None;
        };
        if items.is_empty() || items.len() > MAX_OPS {
            self.report(node.at, format!("`limits` has {} items", items.len()), format!("1 to {MAX_OPS} tables"));
            return None;
        }
        let mut groups: Vec<LimitGroup> = Vec::new();
        let mut fine = true;
        for item in items {
            let Some(table) = item.as_table() else {
                let found = item.describe(self.texts);
                let error = Error::new(self.texts, item.at, format!("an item of `limits` is {found}"), EXPECTED);
                self.push_error(match &item.value {
                    TomlValue::String(text) => {
                        error.help(format!("write {{ limit = \"{text}\" }}, or use `limit` for a list of strings"))
                    }
                    _ => error,
                });
                fine = false;
                continue;
            };
            self.check_keys(table, PATH);
            let name = self.read_or_default(table.into(), "name", None, |reader, node| {
                let name = reader.string(node, "name", "a name in quotes, such as \"per-account\"")?;
                reader.check_name(name, node.at, "limit").then(|| Some(name.to_owned()))
            });
            if let Some(Some(name)) = &name
                && groups.iter().any(|group| group.name.as_ref() == Some(name))
            {
                self.report(
                    item.at,
                    format!("two limits of this action are named {}", quoted(name)),
                    "names that differ",
                );
                fine = false;
            }
            let key = self.read_or_default(table.into(), "key", model.key.clone(), Self::key);
            let missing = self.on_missing(table, model.missing);
            let count = self.count_mode(table, model.count);
            let cost = self.penalty_or_ban(table, PATH, model.penalty);
            let quantities = match table.node("limit") {
                Some(limit) => self.quantities(limit, "limit"),
                None => {
                    self.report(
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
                    let group = LimitGroup {
                        name,
                        key,
                        key_at,
                        missing,
                        quantities,
                        penalty: cost,
                        count,
                        sharing: model.sharing,
                    };
                    fine &= self.check_count(table, std::slice::from_ref(&group));
                    fine &= self.check_missing(table, std::slice::from_ref(&group));
                    groups.push(group);
                }
                _ => fine = false,
            }
        }
        fine.then_some(groups)
    }

    /// Reports a name that doesn't fit into headers, logs, variables and URLs. Returns true if it fits.
    pub(super) fn check_name(&mut self, name: &str, at: TextRange, what: &str) -> bool {
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
        self.report(at, message, expected);
        false
    }

    fn preset(&mut self, node: &TomlNode) -> Option<Preset> {
        let names = Preset::ALL.map(Preset::as_str);
        let text = self.string(node, "preset", &join_names(&names))?;
        let preset = Preset::from_name(text);
        if preset.is_none() {
            let error = Error::new(self.texts, node.at, format!("unknown preset {}", quoted(text)), join_names(&names));
            let meant = match text {
                "signup" | "sign_up" | "sign-up" | "registration" => Some("register"),
                "signin" | "sign_in" | "sign-in" | "auth" => Some("login"),
                "otp" | "sms" | "code" => Some("otp_request"),
                "reset" | "forgot_password" => Some("password_reset"),
                other => nearest(other, names),
            };
            self.push_error(error.did_you_mean(meant));
        }
        preset
    }

    fn preset_ban(&mut self, preset: Preset, at: TextRange) -> ParsedPenalty {
        let ban = crate::units::parse_duration(preset.ban()).expect("invariant: presets are tested to parse");
        ParsedPenalty::Ban(ban, at)
    }

    fn shadow(&mut self, table: &TomlTable) -> Option<bool> {
        self.read_or_default(table.into(), "mode", false, |reader, node| {
            if matches!(&node.value, TomlValue::String(text) if text == "strict" || text == "parole") {
                let error = Error::new(reader.texts, node.at, "this mode is the penalty's", "`enforce` or `shadow`");
                reader.push_error(error.help("write it inside the penalty: penalty = { mode = \"strict\" }"));
                return None;
            }
            reader.choice(node, "mode", &[("enforce", false), ("shadow", true)])
        })
    }

    fn count_mode(&mut self, table: &TomlTable, default: CountMode) -> Option<CountMode> {
        self.read_or_default(table.into(), "count", default, |reader, node| {
            reader.choice(node, "count", &[("admitted", CountMode::Admitted), ("all", CountMode::All)])
        })
    }

    /// Reports an action whose name or match clashes with one before it, or whose limits don't fit into one batch.
    fn check_action(&mut self, action: &ParsedAction, before: &[ParsedAction], taken: usize) -> bool {
        let mut fine = true;
        if let Some(other) = before.iter().find(|other| other.folded_name == action.folded_name) {
            let message = format!(
                "{} and {} differ only in ways that a variable's name can't show",
                quoted(&action.name),
                quoted(&other.name)
            );
            let error =
                Error::new(self.texts, action.name_at, message, "names that differ in more than case and dashes");
            let pointer = self.texts.describe_location(other.name_at);
            self.push_error(error.help(format!("the other stands {pointer}")));
            fine = false;
        }
        if let Some((matcher, at)) = &action.matcher
            && let Some((other, cover, other_at)) = before.iter().find_map(|other| {
                other.matcher.as_ref().filter(|(cover, _)| cover.covers(matcher)).map(|(cover, at)| (other, cover, *at))
            })
        {
            let pointer = self.texts.describe_location(other_at);
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
            self.push_error(error.help(help));
            fine = false;
        }
        let operations = action.op_count();
        if operations + taken > MAX_OPS {
            let message = format!(
                "the action {} has {operations} limits{}; one decision asks at most {MAX_OPS}",
                quoted(&action.name),
                if taken > 0 { format!(", and [inbound.global] {taken} more") } else { String::new() },
            );
            self.report(
                action.name_at,
                message,
                format!("at most {} limits in the action", MAX_OPS - taken.min(MAX_OPS)),
            );
            fine = false;
        }
        fine
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
        let Some(capacity) = quantity.capacity() else {
            return true;
        };
        if matches!(quantity, Quantity::InFlight { .. }) || capacity == 0 || cost <= capacity {
            return true;
        }
        let message =
            format!("each call weighs {cost}, but {whose} \"{quantity}\" never has room for more than {capacity}");
        self.report(cost_at.unwrap_or(at), message, "a cost that fits: a heavier call would never pass");
        false
    }
}
