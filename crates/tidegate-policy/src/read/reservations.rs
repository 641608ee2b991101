//! The reservations of callers that a shared limit refuses: `reserve`; and instants in turn: `spread`.

use tidegate_core::reservation::MAX_HORIZON;
use tidegate_core::{CountMode, LimitKind, Rate, ReservationRules, Span};

use super::DocumentReader;
use super::actions::{LimitGroup, ParsedPenalty};
use super::forms::{Custom, Maybe, SHARE_OR_ZERO, SPAN};
use super::keys::KEY;
use crate::Quantity;
use crate::description::join_parts;
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::key::KeyPart;
use crate::settings::SettingType::Text;
use crate::settings::key::{read_keys, setting_keys};
use crate::units::{describe_duration, parse_duration};

const DEFAULT_HORIZON: Span = Span::from_secs(30);
/// The bounds of a grace that isn't written: enough for a network, and no more than a client needs.
const LEAST_GRACE: Span = Span::from_millis(250);
const USUAL_GRACE: Span = Span::from_secs(1);

setting_keys! {
    /// The keys of `reserve`.
    RESERVE: ReserveKeys {
        horizon: Span = "30s", HORIZON, "the longest time ahead for which a reservation is given";
        share: u16 = "0.5", SHARE_OR_ZERO, "the share of the limit that may be set aside; 0 only tells instants, as `spread`";
        grace: Option<Span> = "", Maybe(SPAN),
            "the time after its instant for which a reservation is kept; default 1s or, for a rate, what its burst can hold, at \
             least 250ms";
        by: Vec<KeyPart> = "client_ip", KEY, "the parts of requests that tell one caller from another";
    }
}

const HORIZON: Custom<Span> = Custom(Text, "a duration of at most an hour", |reader, node, key| {
    let span = reader.duration(node, key)?;
    if span.is_zero() || span > MAX_HORIZON {
        return reader.error(node.at, format!("`{key}` is out of range"), "a duration of at most \"1h\"").none();
    }
    Some(span)
});

/// The type of `spread`: the horizon, if it is on.
pub(super) const SPREAD: Custom<Option<Span>> =
    Custom(Text, "true, false or a duration", |reader, node, key| match &node.value {
        TomlValue::Boolean(true) => Some(Some(DEFAULT_HORIZON)),
        TomlValue::Boolean(false) => Some(None),
        // Variables have texts only.
        TomlValue::String(text) if text == "true" => Some(Some(DEFAULT_HORIZON)),
        TomlValue::String(text) if text == "false" => Some(None),
        TomlValue::String(text) if parse_duration(text).is_err() => {
            reader.wrong_type(node, key, "true, false or a duration such as \"10s\"").none()
        }
        _ => (HORIZON.2)(reader, node, key).map(Some),
    });

/// The reservations of callers that a limit refuses.
#[derive(Clone, Debug)]
pub(super) struct ParsedReservations {
    horizon: Span,
    /// The share and the grace; `None` if nothing is set aside.
    kept: Option<(u16, Option<Span>)>,
    pub(super) by: Vec<KeyPart>,
    pub(super) at: TextRange,
}

impl DocumentReader<'_> {
    /// Reads `reserve` and `spread` of an action or of an item of its `limits`.
    pub(super) fn reservations(&mut self, table: &TomlTable, path: &str) -> Option<Option<ParsedReservations>> {
        let spread = match table.get("spread") {
            Some(entry) => (SPREAD.2)(self, &entry.node, "spread")?.map(|horizon| (horizon, entry.key_at)),
            None => None,
        };
        match (table.get("reserve"), spread) {
            (Some(_), Some((_, at))) => {
                let error = self.error(at, "`reserve` and `spread` stand side by side", "one of them");
                error.help("reservations are spread, too; `spread` is for limits that keep no room").none()
            }
            (Some(reserve), None) => self.reserve(&reserve.node, path).map(Some),
            (None, Some((horizon, at))) => {
                Some(Some(ParsedReservations { horizon, kept: None, by: vec![KeyPart::ClientIp], at }))
            }
            (None, None) => Some(None),
        }
    }

    fn reserve(&mut self, node: &TomlNode, path: &str) -> Option<ParsedReservations> {
        let Some(table) = node.as_table() else {
            let expected = "a table such as { horizon = \"30s\", share = 0.5, grace = \"1s\" }";
            return self.wrong_type(node, "reserve", expected).none();
        };
        self.check_keys(table, &format!("{path}.reserve"));
        read_keys!(self, table, RESERVE: horizon, share, grace, by);
        let (horizon, grace) = (horizon?, grace?);
        if let (Some(grace), Some(written)) = (grace, table.node("grace"))
            && (grace.is_zero() || grace > horizon)
        {
            let expected = format!("a duration of at most the horizon, {}", describe_duration(horizon));
            return self.error(written.at, "`grace` is out of range", expected).none();
        }
        let kept = share.map(|share| (share > 0).then_some((share, grace)))?;
        Some(ParsedReservations { horizon, kept, by: by?, at: node.at })
    }

    /// Reports reservations of limits that can't have them, and of more than one limit of an action.
    pub(super) fn check_reservations(&mut self, groups: &[LimitGroup]) -> bool {
        let reserving = || groups.iter().filter_map(|group| Some((group, group.reservations.as_ref()?)));
        let mut is_valid = true;
        for (group, ParsedReservations { by, at, .. }) in reserving() {
            let in_flight = group.quantities.iter().any(|(quantity, _)| quantity.is_in_flight());
            let is_own = by.iter().all(|part| group.key.contains(part));
            let (why, expected) = if is_own {
                ("each caller has this limit for itself", "a limit that callers share")
            } else if !matches!(group.penalty, ParsedPenalty::None) {
                ("a caller that is blocked can't be told an instant of its own", "a limit without penalty and ban")
            } else if in_flight {
                ("nothing tells when a call in flight ends, so that no instant can be told", "a rate, window or quota")
            } else if group.count == CountMode::All {
                (
                    "calls that another limit refuses would take the room of those that were told an instant",
                    "a limit that counts admitted calls",
                )
            } else if group.sharing.lease.is_some() {
                ("a node with a slice of the limit doesn't know the others' instants", "a limit without `lease`")
            } else {
                continue;
            };
            let help = is_own.then(|| {
                let by = join_parts(by, " and ");
                format!("its key tells callers apart by {by}; a key such as [\"action\"] counts all calls of an action together")
            });
            self.error(*at, why, expected).help_if(help);
            is_valid = false;
        }
        let has_several = reserving().find(|(group, _)| group.op_count() > 1);
        if let Some((_, reservations)) = has_several.or_else(|| reserving().nth(1)) {
            let message = match has_several {
                Some(_) => {
                    "the action has several limits, and only one of them can tell callers an instant of their own"
                }
                None => "two limits of this action tell callers an instant of their own",
            };
            let expected = if has_several.is_some() {
                "an item of `limits` for each term, and this in one of them"
            } else {
                "one of them"
            };
            let error = self.error(reservations.at, message, expected);
            error.help("a caller would have to come at both, which are different times");
            is_valid = false;
        }
        is_valid
    }

    /// Builds the rules for a limit of this quantity and kind, and of calls with this cost.
    pub(super) fn build_reservations(
        &mut self,
        parsed: &ParsedReservations,
        (quantity, kind): (&Quantity, &LimitKind),
        cost: u64,
        is_shadow: bool,
    ) -> Option<ReservationRules> {
        let &ParsedReservations { horizon, kept, at, .. } = parsed;
        if is_shadow {
            self.note(at, "no call is refused in shadow mode, so that this has no effect");
        }
        let usual = USUAL_GRACE.min(horizon);
        let made = match kept {
            None => ReservationRules::spread(horizon),
            Some((share, grace)) => ReservationRules::new(horizon, share, grace.unwrap_or(usual)),
        };
        let mut rules = made.map_err(|error| self.report(at, error.to_string(), "other terms")).ok()?;
        let limit = quantity.capacity().unwrap_or_default();
        let part = if let LimitKind::Rate(_) = kind { rules.part_of_burst(limit) } else { rules.part_of(limit) };
        if part < cost && cost <= limit {
            let message = format!("at most {part} of {limit} may be kept for reservations, and a call costs {cost}");
            return self.error(at, message, "a larger limit or burst, or `share = 1`").none();
        }
        let next_room = match (kind, kept) {
            (LimitKind::Rate(rate), Some((share, grace))) => {
                let held = rules.spacing(rate, 1).times(part);
                let grace = grace.unwrap_or((held - time_of_a_call(rate)).max(LEAST_GRACE).min(usual));
                self.note_slow_reservations(rate, &rules, grace, at);
                rules = ReservationRules::new(horizon, share, grace).ok()?;
                rules.spacing(rate, cost)
            }
            (LimitKind::Rate(rate), None) => time_of_a_call(rate).times(cost),
            _ => quantity.forget_time(),
        };
        if next_room > horizon {
            let message = format!(
                "room can come back as late as {} after a refusal, and instants are told at most {} ahead; callers are told none \
                 if theirs is later",
                describe_duration(next_room),
                describe_duration(horizon)
            );
            self.note(at, &message);
        }
        Some(rules)
    }

    /// Notes that a burst can't hold as many reservations as the share allows within a grace.
    fn note_slow_reservations(&mut self, rate: &Rate, rules: &ReservationRules, grace: Span, at: TextRange) {
        let (burst, part) = (rate.burst(), rules.part_of_burst(rate.burst()));
        if rules.spacing(rate, 1).times(part) >= grace + time_of_a_call(rate) {
            return;
        }
        let message = format!(
            "a burst of {burst} holds at most {part} reservations within a grace of {} and the time of a call, so that less \
             than the share is reserved; a shorter grace or a larger burst prevents that",
            describe_duration(grace)
        );
        self.note(at, &message);
    }
}

/// The time in which a rate refills one call.
fn time_of_a_call(rate: &Rate) -> Span {
    Span::from_micros(rate.per().as_micros().div_ceil(rate.count()))
}

#[cfg(test)]
mod tests {
    use crate::{Policy, PolicySources};

    #[test]
    fn limits_that_reserve_little_have_notes() {
        for (settings, expected) in [
            ("limit = \"100/s burst 100\"\nreserve = {}", ""),
            ("limit = \"20 per 2s\"\nspread = true", ""),
            ("limit = \"20 per 2s\"\nspread = \"true\"", ""),
            ("limit = \"10/s burst 10\"\nreserve = { share = 1, grace = \"1s\" }", "a burst of 10 holds at most 10"),
            ("limit = \"1000 per calendar day\"\nreserve = {}", "room can come back as late as 1 d"),
            ("limit = \"20 per 2m\"\nspread = \"10s\"", "room can come back as late as 120 s"),
            (
                "limit = \"1 per 10s burst 2\"\ncost = 2\nreserve = { share = 1, horizon = \"15s\" }",
                "room can come back",
            ),
            ("limit = \"20 per 2s\"\nreserve = {}\nmode = \"shadow\"", "no call is refused in shadow mode"),
        ] {
            let text = format!("[inbound.action.a]\nkey = \"action\"\n{settings}\n");
            let loaded = Policy::load(PolicySources::new().file("t.toml", text));
            let policy = loaded.unwrap_or_else(|errors| panic!("{settings}: {errors}"));
            let notes: Vec<_> = policy.notes().iter().map(|note| note.message()).collect();
            let is_expected = if expected.is_empty() { notes.is_empty() } else { notes[0].starts_with(expected) };
            assert!(is_expected, "{settings}: {notes:?}");
        }
    }
}
