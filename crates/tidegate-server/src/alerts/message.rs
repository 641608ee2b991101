//! The forms of a message: text, JSON for webhooks, and the bodies that Slack and Telegram read.

use std::fmt::Write as _;

use serde_json::{Value, json};
use tidegate::Time;
use tidegate_core::time::UtcText;

use super::group::{EventList, Message};

/// The text of a message with line ends.
pub(super) fn text(alert: &str, message: &Message) -> String {
    let mut text = format!("tidegate alert {alert}");
    for (list, prefix) in [(&message.new, ""), (&message.continuing, "still: "), (&message.resolved, "resolved: ")] {
        for (_, event) in &list.named {
            // Writing to a string can't fail.
            let _ = write!(text, "\n{prefix}{event}");
        }
        if let others @ 1.. = list.unnamed() {
            let _ = write!(text, "\n{prefix}{others} more");
        }
    }
    text
}

/// The JSON of a message for a webhook.
pub(super) fn json(alert: &str, message: &Message, now: Time) -> Value {
    json!({
        "alert": alert,
        "time": UtcText::from(now).to_string(),
        "text": text(alert, message),
        "new": list_json(&message.new),
        "continuing": list_json(&message.continuing),
        "resolved": list_json(&message.resolved),
    })
}

fn list_json(list: &EventList) -> Value {
    let event = |(trigger, text): &(tidegate_policy::alerts::AlertTrigger, String)| json!({ "kind": trigger.name(), "message": text });
    json!({ "count": list.count, "events": list.named.iter().map(event).collect::<Vec<_>>() })
}

/// The JSON of a text for Slack, whose `&`, `<` and `>` have a meaning: `<!channel>` calls everybody.
pub(super) fn slack(text: &str) -> Value {
    json!({ "text": text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;") })
}

/// The JSON of `sendMessage` in Telegram's Bot API.
pub(super) fn telegram(chat: &str, text: &str) -> Value {
    json!({ "chat_id": chat, "text": text })
}

#[cfg(test)]
mod tests {
    use tidegate_policy::alerts::AlertTrigger;

    use super::*;

    #[test]
    fn a_message_has_these_forms() {
        let list = |count, text: &str| EventList { count, named: vec![(AlertTrigger::StoreLost, text.to_owned())] };
        let message = Message { new: list(3, "<!channel> & co"), resolved: list(1, "b"), ..Message::default() };
        let text = text("ops", &message);
        assert_eq!(text, "tidegate alert ops\n<!channel> & co\n2 more\nresolved: b");
        assert_eq!(slack(&text)["text"], "tidegate alert ops\n&lt;!channel&gt; &amp; co\n2 more\nresolved: b");
        assert_eq!(telegram("-1001", "x"), json!({ "chat_id": "-1001", "text": "x" }));
        let json = json("ops", &message, Time::from_secs(1_800_000_000));
        assert_eq!((&json["time"], &json["new"]["count"]), (&"2027-01-15 08:00:00Z".into(), &3.into()));
        assert_eq!(json["new"]["events"][0], json!({ "kind": "store_lost", "message": "<!channel> & co" }));
        assert_eq!(json["continuing"], json!({ "count": 0, "events": [] }));
    }
}
