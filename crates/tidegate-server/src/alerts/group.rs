//! The state machine of one alert: the events that make a message, and the time when it is due. It reads no clock.

use std::collections::BTreeMap;

use tidegate::{Span, Time};
use tidegate_policy::alerts::AlertTrigger;
use tidegate_policy::printable;

/// The maximum number of events that a message names.
const MAX_NAMED: usize = 5;
/// The maximum number of characters of an event's text.
const MAX_TEXT: usize = 300;
/// The maximum number of states that an alert remembers. Beyond it, the one that was reported first is forgotten, so that
/// it may be reported again too early.
const MAX_STATES: usize = 1024;

/// An event, as an alert sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AlertEvent {
    pub(super) trigger: AlertTrigger,
    /// The client, provider or limit. With the trigger, it names a state.
    pub(super) subject: String,
    pub(super) text: String,
    pub(super) phase: Phase,
}

/// The part of a state that an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The state has no end that is noticed.
    Happened,
    /// The state begins, or continues.
    Begins,
    /// The state is over.
    Ends,
}

/// A message: events, reminders of states that continue, and states that are over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) new: EventList,
    pub(super) continuing: EventList,
    pub(super) resolved: EventList,
}

/// Events: their number, and the first few by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EventList {
    pub(super) count: u64,
    pub(super) named: Vec<(AlertTrigger, String)>,
}

impl EventList {
    fn add(&mut self, trigger: AlertTrigger, text: &str) {
        self.count = self.count.saturating_add(1);
        if self.named.len() < MAX_NAMED {
            self.named.push((trigger, text.to_owned()));
        }
    }

    /// The number of events without a name.
    pub(super) fn unnamed(&self) -> u64 {
        self.count.saturating_sub(self.named.len() as u64)
    }
}

/// The events of an alert since its last message, and the states that it has reported.
#[derive(Debug)]
pub(super) struct Group {
    length: Span,
    repeat: Span,
    /// The end of the time within which events are collected.
    open_until: Option<Time>,
    pending: Message,
    states: BTreeMap<(AlertTrigger, String), KnownState>,
}

#[derive(Debug)]
struct KnownState {
    /// The time when receivers were told of it last.
    reported_at: Time,
    progress: Progress,
    text: String,
}

/// The part of a state that receivers were told last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// A single event, or the end of the state.
    Over,
    /// The state has begun. If it did so soon after its end was told, the next end is told when it has lasted, so that a
    /// state that comes and goes doesn't make a message each time.
    Active { is_unsteady: bool },
    /// The state has begun. It has ended since, but may begin again.
    Ending { since: Time },
}

impl KnownState {
    fn is_active(&self) -> bool {
        self.progress != Progress::Over
    }

    /// Notes that the state has begun or ended. Returns true if receivers are to be told so.
    fn changes(&mut self, now: Time, phase: Phase, repeat: Span) -> bool {
        let is_recent = now.since(self.reported_at) < repeat;
        let (progress, is_news) = match (self.progress, phase) {
            (Progress::Over, Phase::Happened) => (Progress::Over, !is_recent),
            (Progress::Over, Phase::Begins) => (Progress::Active { is_unsteady: is_recent }, true),
            (Progress::Active { is_unsteady: false }, Phase::Ends) => (Progress::Over, true),
            (Progress::Active { .. }, Phase::Ends) => (Progress::Ending { since: now }, false),
            (Progress::Ending { .. }, Phase::Begins) => (Progress::Active { is_unsteady: true }, false),
            (progress, _) => (progress, false),
        };
        self.progress = progress;
        if is_news {
            self.reported_at = now;
        }
        is_news
    }
}

impl Group {
    /// Returns a group of events within `length`. The same state is reported again after `repeat`.
    pub(super) fn new(length: Span, repeat: Span) -> Self {
        Self { length, repeat, open_until: None, pending: Message::default(), states: BTreeMap::new() }
    }

    /// Notes an event.
    pub(super) fn record(&mut self, now: Time, event: AlertEvent) {
        let AlertEvent { trigger, subject, text, phase } = event;
        let line: String = text.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
        let text: String = printable(&line).chars().take(MAX_TEXT).collect();
        let list = if phase == Phase::Ends { &mut self.pending.resolved } else { &mut self.pending.new };
        let key = (trigger, subject);
        if let Some(state) = self.states.get_mut(&key) {
            let before = state.progress;
            if state.changes(now, phase, self.repeat) {
                list.add(trigger, &text);
            }
            if before != state.progress {
                state.text = text;
            }
        } else if phase != Phase::Ends {
            list.add(trigger, &text);
            self.make_room();
            let is_single = phase == Phase::Happened;
            let progress = if is_single { Progress::Over } else { Progress::Active { is_unsteady: false } };
            self.states.insert(key, KnownState { reported_at: now, progress, text });
        }
    }

    /// Notes events of which only the number is known.
    pub(super) fn count_unnamed(&mut self, events: u64) {
        self.pending.new.count = self.pending.new.count.saturating_add(events);
    }

    /// Takes over the states of these triggers from an earlier alert.
    pub(super) fn take_states(&mut self, earlier: &mut Self, triggers: &[AlertTrigger]) {
        self.states = std::mem::take(&mut earlier.states);
        self.states.retain(|(trigger, _), _| triggers.contains(trigger));
    }

    fn make_room(&mut self) {
        if self.states.len() >= MAX_STATES {
            let first = self.states.iter().min_by_key(|(_, state)| (state.is_active(), state.reported_at));
            if let Some(key) = first.map(|(key, _)| key.clone()) {
                self.states.remove(&key);
            }
        }
    }

    /// The subjects of this event that have begun and aren't over.
    pub(super) fn active_subjects(&self, trigger: AlertTrigger) -> Vec<String> {
        let active = self.states.iter().filter(|((found, _), state)| *found == trigger && state.is_active());
        active.map(|((_, subject), _)| subject.clone()).collect()
    }

    /// The message that is due, if there is one. The first event after a pause is due at once.
    pub(super) fn poll(&mut self, now: Time) -> Option<Message> {
        // An end that is further away than a group was set by a clock that has been set back since.
        if self.open_until.is_some_and(|end| now < end && end.since(now) <= self.length) {
            return None;
        }
        for ((trigger, _), state) in &mut self.states {
            let (list, told_at, progress) = match state.progress {
                Progress::Over => continue,
                Progress::Active { .. } => {
                    (&mut self.pending.continuing, state.reported_at, Progress::Active { is_unsteady: false })
                }
                Progress::Ending { since } => (&mut self.pending.resolved, since, Progress::Over),
            };
            if now.since(told_at) >= self.repeat {
                list.add(*trigger, &state.text);
                (state.reported_at, state.progress) = (now, progress);
            }
        }
        let message = self.take_pending()?;
        self.open_until = Some(now + self.length);
        Some(message)
    }

    /// The message of all events that wait, due or not.
    pub(super) fn take_pending(&mut self) -> Option<Message> {
        if self.pending == Message::default() { None } else { Some(std::mem::take(&mut self.pending)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Phase::{Begins, Ends, Happened};

    const HOUR: u64 = 3600;

    fn group() -> Group {
        Group::new(Span::from_secs(10), Span::from_secs(HOUR))
    }

    fn at(millis: u64) -> Time {
        Time::from_secs(1_800_000_000) + Span::from_millis(millis)
    }

    fn event(trigger: AlertTrigger, subject: &str, phase: Phase) -> AlertEvent {
        let text = format!("{} {subject} {phase:?}", trigger.name());
        AlertEvent { trigger, subject: subject.to_owned(), text, phase }
    }

    /// The numbers of new events, reminders and ends in a message.
    fn counts(message: Option<Message>) -> [u64; 3] {
        message.map_or([0; 3], |it| [it.new.count, it.continuing.count, it.resolved.count])
    }

    #[test]
    fn messages_are_due_at_these_times() {
        use AlertTrigger::{Blocked, BreakerOpen as Breaker, StoreLost as Store};
        // The time in seconds, the event at that time, and the message that is due.
        type Row = (u64, Option<(AlertTrigger, &'static str, Phase)>, [u64; 3]);
        let tables: [&[Row]; 8] = [
            // The first event at once, further ones together.
            &[
                (0, Some((Blocked, "a", Happened)), [1, 0, 0]),
                (1, Some((Blocked, "b", Happened)), [0; 3]),
                (2, Some((Blocked, "c", Happened)), [0; 3]),
                (9, None, [0; 3]),
                (10, None, [2, 0, 0]),
                (20, None, [0; 3]),
                (21, Some((Blocked, "d", Happened)), [1, 0, 0]),
            ],
            // The same client isn't reported again before an hour is over.
            &[
                (0, Some((Blocked, "a", Happened)), [1, 0, 0]),
                (HOUR - 1, Some((Blocked, "a", Happened)), [0; 3]),
                (HOUR, Some((Blocked, "a", Happened)), [1, 0, 0]),
            ],
            // A state that continues is reported again each hour, until it is over.
            &[
                (0, Some((Store, "s", Begins)), [1, 0, 0]),
                (100, Some((Store, "s", Begins)), [0; 3]),
                (HOUR - 1, None, [0; 3]),
                (HOUR, None, [0, 1, 0]),
                (HOUR + 1, None, [0; 3]),
                (HOUR + 20, Some((Store, "s", Ends)), [0, 0, 1]),
                (3 * HOUR, None, [0; 3]),
            ],
            // A state that is over and begins again later is new.
            &[
                (0, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (5, Some((Breaker, "p", Ends)), [0; 3]),
                (10, None, [0, 0, 1]),
                (HOUR + 10, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (HOUR + 30, Some((Breaker, "p", Ends)), [0, 0, 1]),
                (HOUR + 31, Some((Breaker, "p", Ends)), [0; 3]),
                (HOUR + 50, None, [0; 3]),
            ],
            // One that begins again soon is told so, but then as over only when it stays over.
            &[
                (0, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (20, Some((Breaker, "p", Ends)), [0, 0, 1]),
                (40, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (60, Some((Breaker, "p", Ends)), [0; 3]),
                (80, Some((Breaker, "p", Begins)), [0; 3]),
                (100, Some((Breaker, "p", Ends)), [0; 3]),
                (HOUR + 40, None, [0; 3]),
                (HOUR + 99, None, [0; 3]),
                (HOUR + 100, None, [0, 0, 1]),
                (3 * HOUR, Some((Breaker, "p", Begins)), [1, 0, 0]),
            ],
            // One that comes and goes all the time, and is there after an hour, continues.
            &[
                (0, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (20, Some((Breaker, "p", Ends)), [0, 0, 1]),
                (40, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (60, Some((Breaker, "p", Ends)), [0; 3]),
                (80, Some((Breaker, "p", Begins)), [0; 3]),
                (HOUR + 40, None, [0, 1, 0]),
                (HOUR + 60, Some((Breaker, "p", Ends)), [0, 0, 1]),
            ],
            // The end of a state that wasn't reported is no news, and neither is that of another subject.
            &[
                (0, Some((Breaker, "p", Ends)), [0; 3]),
                (1, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (20, Some((Breaker, "q", Ends)), [0; 3]),
                (21, Some((Store, "p", Ends)), [0; 3]),
            ],
            // Different states don't hide each other.
            &[
                (0, Some((Breaker, "p", Begins)), [1, 0, 0]),
                (1, Some((Breaker, "q", Begins)), [0; 3]),
                (2, Some((Store, "p", Begins)), [0; 3]),
                (10, None, [2, 0, 0]),
            ],
        ];
        for (number, table) in tables.into_iter().enumerate() {
            let mut group = group();
            for (seconds, found, expected) in table {
                if let Some((trigger, subject, phase)) = found {
                    group.record(at(seconds * 1000), event(*trigger, subject, *phase));
                }
                assert_eq!(counts(group.poll(at(seconds * 1000))), *expected, "table {number}, second {seconds}");
            }
        }
    }

    #[test]
    fn ten_thousand_events_make_one_message() {
        let mut group = group();
        let mut messages = Vec::new();
        for number in 0..10_000 {
            let now = at(number / 10);
            group.record(now, event(AlertTrigger::Blocked, &number.to_string(), Happened));
            messages.extend(group.poll(now));
        }
        assert!(group.states.len() <= MAX_STATES);
        assert_eq!(messages.len(), 1, "the first event, at once");
        let rest = group.poll(at(10_000)).unwrap();
        assert_eq!((rest.new.count, rest.new.named.len(), rest.new.unnamed()), (9_999, MAX_NAMED, 9_994));
        assert_eq!(rest.new.named[0].1, "blocked 1 Happened");
        assert_eq!(group.poll(at(20_000)), None);
    }

    #[test]
    fn events_without_a_name_are_counted() {
        let mut group = group();
        group.record(at(0), event(AlertTrigger::Blocked, "a", Happened));
        group.count_unnamed(41);
        assert_eq!(counts(group.poll(at(0))), [42, 0, 0]);
        group.count_unnamed(7);
        assert_eq!(counts(group.poll(at(20_000))), [7, 0, 0]);
    }

    #[test]
    fn active_states_outlive_single_events() {
        let mut group = group();
        group.record(at(0), event(AlertTrigger::StoreLost, "s", Begins));
        for number in 0..2 * MAX_STATES {
            group.record(at(1), event(AlertTrigger::Blocked, &number.to_string(), Happened));
        }
        assert_eq!(group.active_subjects(AlertTrigger::StoreLost), ["s"]);
        assert!(group.active_subjects(AlertTrigger::Blocked).is_empty());
    }

    #[test]
    fn a_changed_alert_knows_the_states_before() {
        let (mut earlier, mut next) = (group(), group());
        for (trigger, phase) in
            [(AlertTrigger::StoreLost, Begins), (AlertTrigger::Flood, Begins), (AlertTrigger::Blocked, Happened)]
        {
            earlier.record(at(0), event(trigger, "s", phase));
        }
        assert_eq!(counts(earlier.poll(at(0))), [3, 0, 0]);
        next.take_states(&mut earlier, &[AlertTrigger::StoreLost, AlertTrigger::Blocked]);
        next.record(at(1000), event(AlertTrigger::Blocked, "s", Happened));
        next.record(at(1000), event(AlertTrigger::StoreLost, "s", Begins));
        assert_eq!(counts(next.poll(at(1000))), [0; 3]);
        next.record(at(2000), event(AlertTrigger::Flood, "s", Ends));
        next.record(at(2000), event(AlertTrigger::StoreLost, "s", Ends));
        assert_eq!(counts(next.poll(at(2000))), [0, 0, 1]);
    }

    #[test]
    fn a_clock_set_back_holds_nothing() {
        let mut group = group();
        group.record(at(HOUR * 1000), event(AlertTrigger::Blocked, "a", Happened));
        assert!(group.poll(at(HOUR * 1000)).is_some());
        group.record(at(0), event(AlertTrigger::Blocked, "b", Happened));
        assert_eq!(counts(group.poll(at(0))), [1, 0, 0]);
    }

    #[test]
    fn texts_have_no_direction_marks() {
        let mut group = group();
        let text = "\u{202e}dekcolb si\u{2066} x\n\u{200f}y".to_owned();
        let event = AlertEvent { trigger: AlertTrigger::Blocked, subject: String::new(), text, phase: Happened };
        group.record(at(0), event);
        let message = group.poll(at(0)).unwrap();
        assert_eq!(message.new.named[0].1, "\u{fffd}dekcolb si\u{fffd} x \u{fffd}y");
    }

    #[test]
    fn long_and_hostile_texts_are_cut() {
        let mut group = group();
        let text = format!("a\r\nb{}", "x".repeat(10_000));
        group.record(at(0), AlertEvent { text, ..event(AlertTrigger::ReloadFailed, "policy", Begins) });
        let text = group.poll(at(0)).unwrap().new.named[0].1.clone();
        assert!(text.starts_with("a  bx") && text.chars().count() == MAX_TEXT, "{text}");
    }
}
