//! Alerts for [`PolicyBuilder`](super::PolicyBuilder).

use super::{IntoStrings, toml_strings, toml_value};

/// Events that people are told, and the receivers of the messages.
#[derive(Clone, Debug)]
#[must_use]
pub struct AlertSpec {
    pub(super) entries: Vec<(String, String)>,
}

impl AlertSpec {
    /// An alert about these events, such as `["blocked", "store_lost"]`. It needs a receiver.
    pub fn new(events: impl IntoStrings) -> Self {
        Self { entries: vec![("on".to_owned(), toml_strings(events))] }
    }

    /// Writes the messages to the log.
    pub fn log(self) -> Self {
        self.set("log", true)
    }

    /// Sends the messages as JSON to this URL, or to the one at a place such as `"env:OPS_WEBHOOK"`.
    pub fn webhook(self, url: &str) -> Self {
        self.set("webhook", url)
    }

    /// Sends the messages to a chat of Telegram. `token` is the place of the bot's token, such as `"env:BOT_TOKEN"`.
    pub fn telegram(self, token: &str, chat: &str) -> Self {
        self.set("telegram.token", token).set("telegram.chat", chat)
    }

    /// Sets any other setting by its path below the alert, such as `("repeat", "6h")`.
    pub fn set(mut self, path: &str, value: impl ToString) -> Self {
        let value = toml_value(&format!("alert.*.{path}"), value);
        self.entries.push((path.to_owned(), value));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Policy, PolicySources};

    #[test]
    fn the_alert_builder_equals_the_same_file() {
        let built = Policy::builder()
            .alert(
                "ops",
                AlertSpec::new(["blocked", "flood", "retries", "quota"])
                    .log()
                    .webhook("env:OPS_WEBHOOK")
                    .telegram("env:BOT_TOKEN", "-1001")
                    .set("format", "slack")
                    .set("repeat", "6h")
                    .set("flood", 50)
                    .set("retries", 1.5)
                    .set("quota", "90%"),
            )
            .alert("night", AlertSpec::new("store_lost").webhook("https://hooks.example.com/x"));
        let file = "[alert.ops]\non = [\"blocked\", \"flood\", \"retries\", \"quota\"]\nlog = true\n\
            webhook = \"env:OPS_WEBHOOK\"\ntelegram = { token = \"env:BOT_TOKEN\", chat = \"-1001\" }\n\
            format = \"slack\"\nrepeat = \"6h\"\nflood = 50\nretries = 1.5\nquota = \"90%\"\n\
            [alert.night]\non = [\"store_lost\"]\nwebhook = \"https://hooks.example.com/x\"\n";
        let read = Policy::load(PolicySources::new().file("t", file)).unwrap();
        assert_eq!(format!("{:?}", built.build().unwrap().alerts()), format!("{:?}", read.alerts()));

        let wrong = Policy::builder().alert("ops", AlertSpec::new("bloked").log()).build().unwrap_err().to_string();
        assert!(wrong.contains("did you mean `blocked`"), "{wrong}");
    }
}
