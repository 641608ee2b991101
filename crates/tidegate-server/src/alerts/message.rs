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
        "time": UtcText::rounded_down(now).to_string(),
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

/// The most UTF-16 units of a chat's message: Slack splits longer ones, and Telegram refuses those of more than 4,096.
const MAX_CHAT_TEXT: usize = 4000;

/// The text, cut to the length of a chat's message.
fn cut(text: &str) -> String {
    let mut units = 0;
    let fits = |letter: &char| {
        units += letter.len_utf16();
        units < MAX_CHAT_TEXT
    };
    let mut shown: String = text.chars().take_while(fits).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// The JSON of a text for Slack, and for chats that read its form. Clients choose parts of the text, so none of it may
/// notify people, format or link. Slack shows `blocks`, where mentions and links are elements of their own and this text is
/// literal. Others show `text`: a block of code that can't be closed, with Slack's three escapes and without mentions.
pub(super) fn slack(text: &str) -> Value {
    let text = cut(text);
    let code = text.replace('`', "'").replace('@', "\u{ff20}");
    let code = code.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let literal = json!([{ "type": "text", "text": text }]);
    let block = json!({ "type": "rich_text", "elements": [{ "type": "rich_text_preformatted", "elements": literal }] });
    json!({ "text": format!("```\n{code}\n```"), "blocks": [block], "unfurl_links": false, "unfurl_media": false })
}

/// The JSON of `sendMessage` in Telegram's Bot API. Clients choose parts of the text. In a `pre` entity, Telegram finds no
/// names, links or commands.
pub(super) fn telegram(chat: &str, text: &str) -> Value {
    let text = cut(text);
    let literal = json!([{ "type": "pre", "offset": 0, "length": text.encode_utf16().count() }]);
    json!({ "chat_id": chat, "text": text, "entities": literal, "link_preview_options": { "is_disabled": true } })
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
        let code = "```\ntidegate alert ops\n&lt;!channel&gt; &amp; co\n2 more\nresolved: b\n```";
        assert_eq!(slack(&text)["text"], code);
        let json = json("ops", &message, Time::from_secs(1_800_000_000));
        assert_eq!((&json["time"], &json["new"]["count"]), (&"2027-01-15 08:00:00Z".into(), &3.into()));
        assert_eq!(json["new"]["events"][0], json!({ "kind": "store_lost", "message": "<!channel> & co" }));
        assert_eq!(json["continuing"], json!({ "count": 0, "events": [] }));
    }

    /// The elements in which Slack and Telegram show a text literally are the only ones, and hold all of it.
    #[test]
    fn texts_of_clients_mean_nothing_to_chats() {
        let text =
            "x <@U123> <!channel> @here ```\n*b* [a](https://evil.example) https://evil.example /start \u{1f600}";
        let slack = slack(text);
        let [block] = &slack["blocks"].as_array().unwrap()[..] else { panic!("{slack}") };
        assert_eq!((&block["type"], block["elements"].as_array().unwrap().len()), (&"rich_text".into(), 1));
        let preformatted = &block["elements"][0];
        assert_eq!(preformatted["type"], "rich_text_preformatted");
        assert_eq!(preformatted["elements"], json!([{ "type": "text", "text": text }]));
        let code = slack["text"].as_str().unwrap().strip_prefix("```\n").and_then(|rest| rest.strip_suffix("\n```"));
        assert!(!code.unwrap().contains(['@', '<', '>', '`']), "{slack}");
        assert_eq!((&slack["unfurl_links"], &slack["unfurl_media"]), (&false.into(), &false.into()));
        let telegram = telegram("-1001", text);
        let whole = json!([{ "type": "pre", "offset": 0, "length": text.chars().count() + 1 }]);
        assert_eq!((&telegram["text"], &telegram["entities"]), (&text.into(), &whole));
        assert_eq!(telegram["link_preview_options"], json!({ "is_disabled": true }));
    }

    #[test]
    fn messages_for_chats_are_short_enough() {
        let list = || EventList { count: 5, named: vec![(AlertTrigger::Blocked, "\u{1f600}".repeat(300)); 5] };
        let long = text("ops", &Message { new: list(), continuing: list(), resolved: list() });
        let slack = &slack(&long)["blocks"][0]["elements"][0]["elements"][0];
        for body in [slack, &telegram("-1001", &long)] {
            let text = body["text"].as_str().unwrap();
            assert!((3998..=4000).contains(&text.encode_utf16().count()) && text.ends_with("\u{1f600}…"), "{text}");
        }
        assert_eq!(cut(&"x".repeat(3999)).len(), 3999);
    }
}
