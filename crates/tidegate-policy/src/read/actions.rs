//! `[inbound.global]` and `[inbound.action.*]`: limits, penalties, keys, matches.

use tidegate_core::{CountMode, MAX_COST, MAX_OPS, OnOutage, PenaltySpec, Sharing, Span};

use super::forms::{Custom, LIMITS, Maybe, OrWord, Quantities, TABLE, Whole, Words};
use super::keys::{KEY, MISSING_WORDS};
use super::matching::MATCH;
use super::penalties::{BAN, PENALTY};
use super::reservations::{ParsedReservations, RESERVE, SPREAD};
use super::store::{LEASE, OUTAGES};
use super::{DocumentReader, join_names, unknown_entries};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::environment::fold_member_name;
use crate::error::quoted;
use crate::key::{KeyPart, OnMissing};
use crate::matcher::Matcher;
use crate::nearest::nearest;
use crate::path::PathQuirks;
use crate::preset::Preset;
use crate::quantity::Quantity;
use crate::settings::SettingType::Text;
use crate::settings::key::{Below, read_keys, setting_keys};
use crate::units::parse_duration;

/// The most actions in a policy.
pub(super) const MAX_ACTIONS: usize = 4095;
const COUNT_WORDS: [(&str, CountMode); 2] = [("admitted", CountMode::Admitted), ("all", CountMode::All)];

/// The type of `mode`: true in shadow.
pub(super) const MODE: Custom<bool> = Custom(Text, "`enforce` or `shadow`", shadow);

setting_keys! {
    /// The keys that `[inbound.global]` and an action have in common.
    RULES: RuleKeys {
        count: CountMode = "admitted", Words(&COUNT_WORDS), "the calls that count: admitted, or all to include those that other limits refuse";
        mode: bool = "", MODE, "enforce, or shadow: decide, log and admit; default the mode of [inbound]";
        penalty: () = "", TABLE, "the penalty for exceeding it: growing blocks", Below::Table(&PENALTY);
        ban: Option<Span> = "", BAN, "instead of a penalty: the length of each block";
        on_outage: OnOutage = "", OUTAGES, "the rule while a shared store is away; default the store's";
        lease: () = "", TABLE, "slices of the limit that a node takes from a shared store at once", Below::Table(&LEASE);
    }

    GLOBAL: GlobalKeys {
        limit: Quantities = "", LIMITS, "the limit of one client address over all actions";
        rules: () = "", TABLE, "", Below::Beside(&RULES);
    }

    ACTION: ActionKeys {
        r#match: () = "", TABLE, "the requests that it matches; without this only the decision API reaches it", Below::Table(&MATCH);
        key: Vec<KeyPart> = "client_ip", KEY, "the parts that its calls are counted by";
        missing: OnMissing = "by_ip", Words(&MISSING_WORDS),
            "the rule for requests without a header, cookie or parameter of the key: share, by_ip, refuse or skip";
        limit: Quantities = "", LIMITS, "the limit, as a quantity";
        limits: () = "", TABLE, "several limits with keys of their own", Below::Items(&ITEM);
        preset: Option<Preset> = "",
            Maybe(Custom(Text, "the name of a preset", |reader, node, _| reader.preset(node))),
            "a ready-made limit: login, otp_request, password_reset, register or api_call";
        ipv6_network: Option<Quantities> = "", OrWord("preset", LIMITS),
            "a second limit, on each IPv6 /48: a quantity, or `preset` for ten times the preset's limit";
        cost: u64 = "1", Whole(1, MAX_COST), "the cost of a call";
        reserve: () = "", TABLE, "reservations for refused callers: instants at which the limit keeps room for each", Below::Table(&RESERVE);
        spread: Option<Span> = "", SPREAD, "true, or a horizon: refused callers are told instants one after the other";
        rules: () = "", TABLE, "", Below::Beside(&RULES);
    }

    /// The keys of an item of `limits`.
    ITEM: ItemKeys {
        name: Option<String> = "", Maybe(Custom(Text, "a name", limit_name)), "its name in decisions and headers";
        key: Vec<KeyPart> = "", KEY, "the parts that its calls are counted by; default the action's key";
        missing: OnMissing = "", Words(&MISSING_WORDS),
            "the rule for requests without a part of the key; default the action's";
        limit: Quantities = "", LIMITS, "the limit, as a quantity";
        penalty: () = "", TABLE, "the penalty for exceeding it; default the action's penalty", Below::Table(&PENALTY);
        ban: Option<Span> = "", BAN, "instead of a penalty: the length of each block";
        count: CountMode = "", Words(&COUNT_WORDS), "the calls that count; default the action's";
        reserve: () = "", TABLE, "reservations for refused callers: instants at which the limit keeps room for each", Below::Table(&RESERVE);
        spread: Option<Span> = "", SPREAD, "true, or a horizon: refused callers are told instants one after the other";
    }
}

fn shadow(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<bool> {
    const WORDS: [(&str, bool); 2] = [("enforce", false), ("shadow", true)];
    if node.is_word("strict") || node.is_word("parole") {
        let error = reader.error(node.at, "this mode is the penalty's", "`enforce` or `shadow`");
        return error.help("write it inside the penalty: penalty = { mode = \"strict\" }").none();
    }
    reader.choice(node, key, &WORDS)
}

fn limit_name(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<String> {
    let name = reader.string(node, key, "a name in quotes, such as \"per-account\"")?;
    reader.check_name(name, node.at, "limit").then(|| name.to_owned())
}

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
    pub(super) quantities: Quantities,
    pub(super) penalty: ParsedPenalty,
    pub(super) count: CountMode,
    pub(super) sharing: Sharing,
    pub(super) shadow: bool,
    pub(super) reservations: Option<ParsedReservations>,
}

#[derive(Debug)]
pub(super) struct ParsedAction {
    pub(super) name: String,
    /// The name as it appears in a variable's name.
    pub(super) folded_name: String,
    pub(super) name_at: TextRange,
    pub(super) matcher: Option<(Matcher, TextRange)>,
    pub(super) cost: u64,
    pub(super) cost_at: Option<TextRange>,
    pub(super) shadow: bool,
    pub(super) groups: Vec<LimitGroup>,
    /// True if its calls also meet `inbound.global`.
    pub(super) meets_global: bool,
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
    ) -> Option<Option<LimitGroup>> {
        let Some(entry) = inbound.and_then(|inbound| inbound.get("global")) else { return Some(None) };
        let table = self.section(inbound, "global", "inbound.global")?;
        read_keys!(self, table, RULES: count);
        let mode = self.value_or(table, &RULES.mode, self.in_shadow);
        let penalty = self.penalty_or_ban(table, "inbound.global", ParsedPenalty::None);
        let sharing = self.sharing(table, "inbound.global");
        let Some(limit) = table.node("limit") else {
            let expected = "a limit in it, such as limit = \"1000 per 1h\"";
            let help = "to have no global limit, leave the section out or write limit = \"unlimited\"";
            return self.error(entry.key_at, "[inbound.global] has no limit", expected).help(help).none();
        };
        let group = LimitGroup {
            name: None,
            key: vec![KeyPart::ClientIp],
            key_at: None,
            missing: OnMissing::default(),
            quantities: self.parse(limit, &GLOBAL.limit)?,
            penalty: penalty?,
            count: count?,
            sharing: sharing?,
            shadow: mode.unwrap_or_default(),
            reservations: None,
        };
        let groups = std::slice::from_ref(&group);
        let fits = self.check_count(table, groups)
            & self.check_lease(table, groups)
            & self.check_forward_auth(forward_auth, groups);
        mode.filter(|_| fits).map(|_| Some(group))
    }

    pub(super) fn actions(
        &mut self,
        inbound: Option<&TomlTable>,
        quirks: PathQuirks,
        global_op_count: usize,
        forward_auth: Option<TextRange>,
    ) -> Option<Vec<ParsedAction>> {
        const FORM: &str = "a section for each action, [inbound.action.NAME]";
        let has_proxy = inbound.is_some_and(|inbound| inbound.get("upstream").is_some());
        let Some(entry) = inbound.and_then(|inbound| inbound.get("action")) else {
            return Some(Vec::new());
        };
        let Some(table) = entry.node.as_table() else {
            let message = format!("`action` is {}", entry.node.describe(self.texts));
            return self.error(entry.key_at, message, FORM).none();
        };
        if table.entries.len() > MAX_ACTIONS {
            let message = format!("the policy has {} actions", table.entries.len());
            return self.error(entry.key_at, message, format!("at most {MAX_ACTIONS}")).none();
        }
        let mut actions: Vec<ParsedAction> = Vec::new();
        let mut is_valid = true;
        for entry in &table.entries {
            if self.is_misplaced_setting(entry) {
                let message = format!("{} stands outside of any action", quoted(&entry.key));
                self.error(entry.key_at, message, FORM).help("give the action a name, such as [inbound.action.login]");
                is_valid = false;
                continue;
            }
            let Some(action) = self.action(entry, quirks) else {
                is_valid = false;
                continue;
            };
            is_valid &= self.check_action(&action, &actions, global_op_count);
            is_valid &= !has_proxy || self.check_request_parts(&action);
            is_valid &= action.matcher.is_none() || self.check_forward_auth(forward_auth, &action.groups);
            actions.push(action);
        }
        is_valid.then_some(actions)
    }

    fn action(&mut self, entry: &TomlEntry, quirks: PathQuirks) -> Option<ParsedAction> {
        const PATH: &str = "inbound.action.*";
        let name = &entry.key;
        let name_is_valid = self.check_name(name, entry.key_at, "action");
        self.section_name.clone_from(name);
        let table = self.own_table(entry, "inbound", "action")?;
        self.check_keys(table, PATH);
        read_keys!(self, table, ACTION: preset, key, missing, cost);
        read_keys!(self, table, RULES: count);
        let mode = self.value_or(table, &RULES.mode, self.in_shadow);
        let matcher = match table.node("match") {
            Some(node) => self.matcher(node, quirks).map(|matcher| Some((matcher, node.at))),
            None => Some(None),
        };
        // A preset's ban is the default penalty.
        let preset_penalty = preset.flatten().map_or(ParsedPenalty::None, |preset| {
            let ban = parse_duration(preset.ban()).expect("invariant: presets are tested to parse");
            ParsedPenalty::Ban(ban, entry.key_at)
        });
        let penalty = self.penalty_or_ban(table, PATH, preset_penalty);
        let sharing = self.sharing(table, PATH);
        let ipv6_network = self.ipv6_network(table, preset.flatten());
        let reservations = self.reservations(table, PATH);
        let groups = match (preset, penalty, count, key, sharing, reservations) {
            (Some(preset), Some(penalty), Some(count), Some(key), Some(sharing), Some(reservations)) => {
                let (key_at, missing) = (table.node("key").map(|node| node.at), missing.unwrap_or_default());
                let (name, quantities, shadow) = (None, Vec::new(), mode.unwrap_or_default());
                let model = LimitGroup {
                    name,
                    key,
                    key_at,
                    missing,
                    quantities,
                    penalty,
                    count,
                    sharing,
                    shadow,
                    reservations,
                };
                self.limit_groups(entry, table, preset, model)
            }
            _ => {
                // `limit` is still read, so that its own errors are reported as well.
                let _ = table.node("limit").map(|node| self.parse(node, &ACTION.limit));
                None
            }
        };
        let fits = groups.as_ref().is_none_or(|groups| {
            self.check_count(table, groups)
                & self.check_lease(table, groups)
                & self.check_missing(table, groups)
                & self.check_reservations(groups)
        });
        let action = ParsedAction {
            name: name.clone(),
            folded_name: fold_member_name(name),
            name_at: entry.key_at,
            matcher: matcher?,
            cost: cost?,
            cost_at: table.node("cost").map(|node| node.at),
            shadow: mode?,
            groups: with_ipv6_network(groups?, ipv6_network?, count?, sharing?, mode?),
            meets_global: true,
        };
        missing?;
        (name_is_valid && fits).then_some(action)
    }

    /// Returns true if the entry in an action's place is a setting of an action without a name.
    fn is_misplaced_setting(&self, entry: &TomlEntry) -> bool {
        if !crate::settings::table_keys("inbound.action.*").contains(&entry.key.as_str()) {
            return false;
        }
        let inner = crate::settings::table_keys(&format!("inbound.action.*.{}", entry.key));
        let Some(table) = entry.node.as_table() else { return true };
        !table.entries.is_empty() && unknown_entries(table, &inner).next().is_none()
    }

    /// The limits of an action: `limit`, `limits`, or the preset's.
    fn limit_groups(
        &mut self,
        entry: &TomlEntry,
        table: &TomlTable,
        preset: Option<Preset>,
        model: LimitGroup,
    ) -> Option<Vec<LimitGroup>> {
        match (table.get("limit"), table.get("limits"), preset) {
            (Some(_), Some(limits), _) => {
                let error = self.error(limits.key_at, "`limit` and `limits` stand side by side", "one of them");
                error.help("give the one in `limit` a table in `limits`: { limit = \"5 per 60s\" }").none()
            }
            (Some(limit), None, _) => {
                Some(vec![LimitGroup { quantities: self.parse(&limit.node, &ACTION.limit)?, ..model }])
            }
            (None, Some(limits), _) => {
                if let Some(reservations) = &model.reservations {
                    let message =
                        "the action has several limits, and only one of them can give reservations to callers";
                    return self.error(reservations.at, message, "this in the item of `limits` that gives them").none();
                }
                self.limits(&limits.node, &model)
            }
            (None, None, Some(preset)) => {
                let quantity = preset.limit().parse().expect("invariant: presets are tested to parse");
                Some(vec![LimitGroup { quantities: vec![(quantity, entry.key_at)], ..model }])
            }
            (None, None, None) => {
                let mut keys = ["limit", "limits", "preset"].iter();
                if keys.any(|key| self.has_misspelling_of(table, "inbound.action.*", key)) {
                    return None;
                }
                let message = format!("the action {} has neither a limit nor a preset", quoted(&entry.key));
                let expected = "a limit in it, such as limit = \"5 per 60s\", or preset = \"login\"";
                let error = self.error(entry.key_at, message, expected);
                error.help("to let everything pass, write limit = \"unlimited\"").none()
            }
        }
    }

    fn limits(&mut self, node: &TomlNode, model: &LimitGroup) -> Option<Vec<LimitGroup>> {
        const EXPECTED: &str = "a list of tables: [{ name = \"per-account\", key = [\"key\"], limit = \"5 per 60s\" }]";
        let TomlValue::List(items) = &node.value else {
            return self.wrong_type(node, "limits", EXPECTED).none();
        };
        self.check_length(node.at, "limits", items.len(), MAX_OPS, " tables")?;
        let mut groups: Vec<LimitGroup> = Vec::new();
        for item in items {
            let Some(table) = item.as_table() else {
                let help = |text| format!("write {{ limit = \"{text}\" }}, or use `limit` for a list of strings");
                let message = format!("an item of `limits` is {}", item.describe(self.texts));
                self.error(item.at, message, EXPECTED).help_if(item.as_str().map(help));
                continue;
            };
            groups.extend(self.limits_item(item, table, &groups, model));
        }
        (groups.len() == items.len()).then_some(groups)
    }

    fn limits_item(
        &mut self,
        item: &TomlNode,
        table: &TomlTable,
        before: &[LimitGroup],
        model: &LimitGroup,
    ) -> Option<LimitGroup> {
        const PATH: &str = "inbound.action.*.limits.#";
        self.check_keys(table, PATH);
        let name = self.value(table, &ITEM.name);
        let twice = name.iter().flatten().find(|name| before.iter().any(|group| group.name.as_ref() == Some(*name)));
        if let Some(name) = twice {
            let message = format!("two limits of this action are named {}", quoted(name));
            self.report(item.at, message, "names that differ");
        }
        let is_twice = twice.is_some();
        let key = self.value_or(table, &ITEM.key, model.key.clone());
        let missing = self.value_or(table, &ITEM.missing, model.missing);
        let count = self.value_or(table, &ITEM.count, model.count);
        let penalty = self.penalty_or_ban(table, PATH, model.penalty);
        let reservations = self.reservations(table, PATH);
        let quantities = match table.node("limit") {
            Some(limit) => self.parse(limit, &ITEM.limit),
            None => {
                let expected = "a limit in it, such as limit = \"5 per 60s\"";
                self.error(item.at, "this item of `limits` has no `limit`", expected).none()
            }
        };
        let group = LimitGroup {
            name: name?,
            key: key?,
            key_at: table.node("key").map(|node| node.at).or(model.key_at),
            missing: missing?,
            quantities: quantities?,
            penalty: penalty?,
            count: count?,
            sharing: model.sharing,
            shadow: model.shadow,
            reservations: reservations?,
        };
        let groups = std::slice::from_ref(&group);
        let fits = self.check_count(table, groups) & self.check_missing(table, groups);
        (fits && !is_twice).then_some(group)
    }

    fn preset(&mut self, node: &TomlNode) -> Option<Preset> {
        let names = Preset::ALL.map(Preset::as_str);
        let text = self.string(node, "preset", &join_names(&names))?;
        let preset = Preset::ALL.into_iter().find(|preset| preset.as_str() == text);
        if preset.is_none() {
            let meant = match text {
                "signup" | "sign_up" | "sign-up" | "registration" => Some("register"),
                "signin" | "sign_in" | "sign-in" | "auth" => Some("login"),
                "otp" | "sms" | "code" => Some("otp_request"),
                "reset" | "forgot_password" => Some("password_reset"),
                other => nearest(other, names),
            };
            let message = format!("unknown preset {}", quoted(text));
            self.error(node.at, message, join_names(&names)).did_you_mean(meant);
        }
        preset
    }
}

/// Adds the limit of each IPv6 /48. It has no penalty, because a /48 may belong to a whole town.
fn with_ipv6_network(
    mut groups: Vec<LimitGroup>,
    ipv6_network: Option<Quantities>,
    count: CountMode,
    sharing: Sharing,
    shadow: bool,
) -> Vec<LimitGroup> {
    groups.extend(ipv6_network.map(|quantities| LimitGroup {
        name: Some("ipv6".to_owned()),
        key: vec![KeyPart::Ipv6Network(48)],
        key_at: None,
        missing: OnMissing::Skip,
        quantities,
        penalty: ParsedPenalty::None,
        count,
        sharing,
        shadow,
        reservations: None,
    }));
    groups
}
