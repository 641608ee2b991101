//! Alerts: their messages, as real receivers see them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tidegate::Span;
use tokio::net::TcpListener;

use crate::common::{
    Lines, PATIENCE, Peer, Running, capture, get, json, nobody, once, policy, post, status, try_start,
};

/// A value that nothing may show.
const PLANTED: &str = "pl4nted-s3cr3t";
const LOGIN: &str = "[inbound.action.login]\nlimit = \"1 per 60s\"\npenalty = { base = \"2s\", cap = \"1h\" }\n";

/// A receiver that answers the n-th request, counted from 0, with a status.
#[derive(Clone)]
struct Receiver {
    address: SocketAddr,
    arrived: Arc<Mutex<Vec<Arrived>>>,
}

#[derive(Clone, Debug)]
struct Arrived {
    target: String,
    headers: HeaderMap,
    body: Value,
}

impl Receiver {
    /// Status 0 is no answer at all.
    async fn start(status: impl Fn(usize) -> u16 + Send + Sync + 'static) -> Self {
        Self::saying(move |number| (status(number), "")).await
    }

    /// A receiver whose replies have bodies.
    async fn saying(reply: impl Fn(usize) -> (u16, &'static str) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let receiver = Self { address: listener.local_addr().unwrap(), arrived: Arc::default() };
        let (arrived, reply) = (Arc::clone(&receiver.arrived), Arc::new(reply));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (arrived, reply) = (Arc::clone(&arrived), Arc::clone(&reply));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (arrived, reply) = (Arc::clone(&arrived), Arc::clone(&reply));
                    async move {
                        let (parts, body) = request.into_parts();
                        let body = body.collect().await.unwrap().to_bytes();
                        let (status, said) = {
                            let mut arrived = arrived.lock().unwrap();
                            let body = serde_json::from_slice(&body).unwrap();
                            let target = format!("{} {}", parts.method, parts.uri);
                            arrived.push(Arrived { target, headers: parts.headers, body });
                            reply(arrived.len() - 1)
                        };
                        if status == 0 {
                            std::future::pending::<()>().await;
                        }
                        let said = Full::new(Bytes::from_static(said.as_bytes()));
                        let json = "application/json";
                        Ok::<_, Infallible>(
                            Response::builder().status(status).header("content-type", json).body(said).unwrap(),
                        )
                    }
                });
                let http = hyper::server::conn::http1::Builder::new();
                tokio::spawn(http.serve_connection(TokioIo::new(stream), service));
            }
        });
        receiver
    }

    fn arrived(&self) -> Vec<Arrived> {
        self.arrived.lock().unwrap().clone()
    }

    /// Waits for this many requests.
    async fn wait_for(&self, count: usize) -> Vec<Arrived> {
        self.wait_within(PATIENCE, count).await
    }

    async fn wait_within(&self, time: Duration, count: usize) -> Vec<Arrived> {
        let waiting = async {
            while self.arrived().len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(time, waiting).await;
        assert!(waited.is_ok(), "{count} requests, but there are {:?}", self.arrived());
        self.arrived()
    }
}

/// An alert about blocks with this webhook.
fn alert(receiver: SocketAddr, more: &str) -> String {
    format!(
        "{LOGIN}[alert.ops]\non = [\"blocked\", \"reload_failed\"]\nwebhook = \"http://{receiver}/in?k={PLANTED}\"\n{more}\n"
    )
}

fn start(text: &str) -> Running {
    try_start(&policy(nobody(), text), |_| Some(PLANTED.to_owned())).unwrap()
}

/// Has a client with this number be blocked.
async fn block(api: &mut Peer, number: u32) {
    let ip = std::net::Ipv4Addr::from(0x0a00_0000 + number);
    let call = post("/v1/check", &format!(r#"{{"action":"login","ip":"{ip}"}}"#));
    api.ask(&call).await;
    let refused = json(&api.ask(&call).await);
    assert_eq!(refused["blocked"], true, "{refused}");
}

/// Has the gate take over this text.
async fn reload(gate: &Running, text: &str) -> Result<(), String> {
    text.clone_into(&mut gate.file.lock().unwrap());
    gate.reload.reload().await.map(drop).map_err(|error| error.to_string())
}

/// Has an alert be tested.
async fn test(gate: &Running, name: &str) -> String {
    let head = "host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2";
    once(gate.admin, format!("POST /v1/alerts/{name}/test HTTP/1.1\r\n{head}\r\n\r\n{{}}")).await
}

/// The value of the metric with these labels.
async fn count(gate: &Running, result: &str) -> Option<u64> {
    let page = once(gate.admin, get("/metrics")).await;
    let labels = format!("tidegate_alerts_total{{alert=\"ops\",sink=\"webhook\",result=\"{result}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&labels)?.parse().ok())
}

/// Waits for a value of the metric.
async fn wait_for_count(gate: &Running, result: &str, expected: u64) {
    let waiting = async {
        while count(gate, result).await != Some(expected) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, waiting).await;
    assert!(waited.is_ok(), "{result} is {:?}", count(gate, result).await);
}

/// The whole log has no planted value.
fn assert_no_secret(log: &Lines, pages: &[String]) {
    for text in pages.iter().chain([&log.text()]) {
        assert!(!text.contains(PLANTED), "{text}");
    }
}

#[tokio::test]
async fn the_first_block_arrives_at_once() {
    let receiver = Receiver::start(|_| 200).await;
    let gate = start(&alert(receiver.address, ""));
    let mut api = Peer::connect(gate.api).await;
    block(&mut api, 1).await;
    let arrived = receiver.wait_within(Duration::from_secs(1), 1).await;
    let Arrived { target, headers, body } = &arrived[0];
    assert_eq!(target, &format!("POST /in?k={PLANTED}"));
    assert_eq!((headers["content-type"].to_str().unwrap(), &body["alert"]), ("application/json", &"ops".into()));
    assert_eq!(body["new"]["count"], 1, "{body}");
    let event = json!({ "kind": "blocked", "message": "10.0.0.1 is blocked under login for 2 s after strike 1" });
    assert_eq!(body["new"]["events"][0], event, "{body}");
    assert!(headers.contains_key("idempotency-key") && headers.contains_key("content-length"), "{headers:?}");
}

#[tokio::test]
async fn ten_thousand_blocks_make_one_grouped_message() {
    let receiver = Receiver::start(|_| 200).await;
    let gate = start(&alert(receiver.address, ""));
    let mut api = Peer::connect(gate.api).await;
    block(&mut api, 0).await;
    receiver.wait_for(1).await;
    for number in 1..10_000 {
        block(&mut api, number).await;
    }
    // The gate publishes five of them, and no event follows.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(receiver.arrived().len(), 1, "the group is open");
    gate.clock.advance(Span::from_secs(10));
    let grouped = receiver.wait_for(2).await[1].body.clone();
    assert_eq!(grouped["new"]["count"], 9_999, "{grouped}");
    assert_eq!(grouped["new"]["events"].as_array().unwrap().len(), 4, "{grouped}");
    assert!(grouped["text"].as_str().unwrap().ends_with("\n9995 more"), "{grouped}");
    gate.clock.advance(Span::from_secs(60));
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(receiver.arrived().len(), 2);
}

#[tokio::test]
async fn a_failing_receiver_gets_the_message_once() {
    let (log, _guard) = capture("text");
    let receiver = Receiver::start(|number| if number < 2 { 500 } else { 200 }).await;
    let gate = start(&alert(receiver.address, "format = \"slack\"\nlog = true"));
    block(&mut Peer::connect(gate.api).await, 1).await;
    let arrived = receiver.wait_for(3).await;
    let text = "```\ntidegate alert ops\n10.0.0.1 is blocked under login for 2 s after strike 1\n```";
    assert!(arrived.iter().all(|request| request.body["text"] == text), "{arrived:?}");
    let keys: Vec<_> = arrived.iter().map(|request| &request.headers["idempotency-key"]).collect();
    assert!(keys[0] == keys[1] && keys[1] == keys[2], "a receiver can tell that it is the same message");
    wait_for_count(&gate, "sent", 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((receiver.arrived().len(), count(&gate, "failed").await), (3, Some(0)));
    assert!(log.text().contains("tidegate alert ops; 10.0.0.1 is blocked"), "{}", log.text());
}

#[tokio::test]
async fn telegram_gets_its_exact_form() {
    let receiver = Receiver::start(|_| 200).await;
    let bot = format!("{{ token = \"env:BOT\", chat = -1001234, base_url = \"http://{}\" }}", receiver.address);
    let text = format!("{LOGIN}[alert.ops]\non = \"blocked\"\ntelegram = {bot}\n");
    let gate = try_start(&policy(nobody(), &text), |_| Some("110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw".to_owned()));
    let gate = gate.unwrap();
    block(&mut Peer::connect(gate.api).await, 1).await;
    let arrived = receiver.wait_for(1).await;
    assert_eq!(arrived[0].target, "POST /bot110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw/sendMessage");
    let text = "tidegate alert ops\n10.0.0.1 is blocked under login for 2 s after strike 1";
    let entities = json!([{ "type": "pre", "offset": 0, "length": text.len() }]);
    let link_preview = json!({ "is_disabled": true });
    let expected =
        json!({ "chat_id": "-1001234", "text": text, "entities": entities, "link_preview_options": link_preview });
    assert_eq!(arrived[0].body, expected);
    assert_eq!(arrived[0].headers["content-type"], "application/json");
}

#[tokio::test]
async fn a_clients_key_mentions_nobody_and_links_nothing() {
    const KEY: &str = "<!channel> @everyone ```*b* https://evil.example";
    let receiver = Receiver::start(|_| 200).await;
    let text = alert(receiver.address, "format = \"slack\"");
    let gate = start(&text.replace("[inbound.action.login]\n", "[inbound.action.login]\nkey = \"key\"\n"));
    let call = post("/v1/check", &json!({ "action": "login", "key": KEY }).to_string());
    for _ in 0..2 {
        once(gate.api, call.clone()).await;
    }
    let body = receiver.wait_for(1).await[0].body.clone();
    let shown = &body["blocks"][0]["elements"];
    let literal = shown[0]["elements"][0]["text"].as_str().unwrap();
    assert!(literal.contains(&format!("key={KEY} is blocked")), "{body}");
    assert_eq!((&shown[0]["type"], &shown[1]), (&"rich_text_preformatted".into(), &Value::Null), "{body}");
    let code = body["text"].as_str().unwrap().strip_prefix("```").and_then(|rest| rest.strip_suffix("```")).unwrap();
    assert!(!code.contains(['@', '<', '>', '`']), "{body}");
}

#[tokio::test]
async fn waits_in_the_bodies_of_receivers_are_obeyed() {
    const TELEGRAM: &str = "{\"ok\":false,\"error_code\":429,\"parameters\":{\"retry_after\":1}}";
    const DISCORD: &str = "{\"message\":\"You are being rate limited.\",\"retry_after\":1.2,\"global\":false}";
    for said in [TELEGRAM, DISCORD] {
        let receiver = Receiver::saying(move |number| if number == 0 { (429, said) } else { (200, "") }).await;
        let bot =
            format!("{{ token = \"env:BOT_TOKEN\", chat = \"@ops\", base_url = \"http://{}\" }}", receiver.address);
        let place = match said {
            TELEGRAM => format!("telegram = {bot}"),
            _ => format!("webhook = \"http://{}/\"\nformat = \"slack\"", receiver.address),
        };
        let gate = start(&format!("{LOGIN}[alert.ops]\non = \"blocked\"\n{place}\n"));
        let mut api = Peer::connect(gate.api).await;
        block(&mut api, 1).await;
        receiver.wait_for(1).await;
        // Back-off alone ends sooner.
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert_eq!(receiver.arrived().len(), 1, "{said}");
        let texts: Vec<_> = receiver.wait_for(2).await.iter().map(|it| it.body["text"].clone()).collect();
        assert_eq!(texts[0], texts[1], "{said}");
    }
}

#[tokio::test]
async fn messages_wait_for_pauses_of_up_to_an_hour() {
    for (said, failed) in [("{\"retry_after\":3000}", 0), ("{\"retry_after\":4000}", 2)] {
        let receiver = Receiver::saying(move |_| (429, said)).await;
        let gate = start(&alert(receiver.address, "group = \"1ms\""));
        let mut api = Peer::connect(gate.api).await;
        for number in 0..2 {
            block(&mut api, number).await;
            gate.clock.advance(Span::from_secs(1));
            tokio::time::sleep(Duration::from_millis(600)).await;
        }
        assert_eq!((count(&gate, "failed").await, receiver.arrived().len()), (Some(failed), 1), "{said}");
    }
}

#[tokio::test]
async fn a_silent_receiver_blocks_nothing() {
    let (log, _guard) = capture("text");
    let receiver = Receiver::start(|_| 0).await;
    let gate = start(&alert(receiver.address, "group = \"1ms\""));
    let mut api = Peer::connect(gate.api).await;
    for number in 0..36 {
        // A message for each block, more than may wait.
        tokio::time::timeout(Duration::from_millis(500), block(&mut api, number)).await.unwrap();
        gate.clock.advance(Span::from_secs(1));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let dropped = count(&gate, "dropped").await.unwrap();
    assert!((1..=4).contains(&dropped), "{dropped}");
    assert!(log.text().contains("too many messages wait"), "{}", log.text());
    assert_no_secret(&log, &[once(gate.admin, get("/metrics")).await]);
}

#[tokio::test]
async fn a_reload_keeps_pending_groups() {
    let receiver = Receiver::start(|_| 200).await;
    let text = alert(receiver.address, "");
    let gate = start(&text);
    let mut api = Peer::connect(gate.api).await;
    block(&mut api, 1).await;
    receiver.wait_for(1).await;
    block(&mut api, 2).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // Another alert beside it, and a policy that can't be used.
    reload(&gate, &format!("{text}[alert.second]\non = \"store_lost\"\nlog = true\n")).await.unwrap();
    reload(&gate, "[inbound.action.login]\n").await.unwrap_err();
    block(&mut api, 3).await;
    gate.clock.advance(Span::from_secs(10));
    let grouped = receiver.wait_for(2).await[1].body.clone();
    assert_eq!((&grouped["new"]["count"], &grouped["resolved"]["count"]), (&3.into(), &0.into()), "{grouped}");
    assert_eq!(grouped["new"]["events"][1]["kind"], "reload_failed", "{grouped}");
    // A changed alert first sends what waits.
    block(&mut api, 4).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    reload(&gate, &text.replace("\"reload_failed\"", "\"store_lost\"")).await.unwrap();
    let last = receiver.wait_for(3).await[2].body.clone();
    assert_eq!(last["new"]["events"][0]["message"], "10.0.0.4 is blocked under login for 2 s after strike 1", "{last}");
    assert_eq!(test(&gate, "second").await.split(' ').nth(1), Some("404"));
}

#[tokio::test]
async fn a_changed_alert_ends_the_states_before() {
    let receiver = Receiver::start(|_| 200).await;
    let text = alert(receiver.address, "log = true");
    let gate = start(&text);
    reload(&gate, "[inbound.action.login]\n").await.unwrap_err();
    let failed = receiver.wait_for(1).await[0].body.clone();
    assert_eq!(failed["new"]["events"][0]["kind"], "reload_failed", "{failed}");
    gate.clock.advance(Span::from_secs(20));
    reload(&gate, &text.replace("log = true", "repeat = \"2h\"")).await.unwrap();
    let over = receiver.wait_for(2).await[1].body.clone();
    assert_eq!(over["resolved"]["events"][0]["message"], "the policy was reloaded", "{over}");
    // The alert has no log any more, so its count is gone.
    let page = once(gate.admin, get("/metrics")).await;
    assert!(page.contains("sink=\"webhook\",result=\"sent\"} 2") && !page.contains("sink=\"log\""), "{page}");
    reload(&gate, LOGIN).await.unwrap();
    assert!(!once(gate.admin, get("/metrics")).await.contains("alert=\"ops\""));
}

#[tokio::test]
async fn shadow_blocks_hide_no_real_ones() {
    let receiver = Receiver::start(|_| 200).await;
    let shadow = LOGIN.replace("login", "page");
    let gate = start(&alert(receiver.address, "").replacen(LOGIN, &format!("{LOGIN}{shadow}mode = \"shadow\"\n"), 1));
    let mut api = Peer::connect(gate.api).await;
    for number in 0..40 {
        let call = post("/v1/check", &format!(r#"{{"action":"page","ip":"10.1.0.{number}"}}"#));
        api.ask(&call).await;
        api.ask(&call).await;
    }
    block(&mut api, 1).await;
    let arrived = receiver.wait_for(1).await[0].body["new"].clone();
    assert_eq!(arrived["count"], 1, "{arrived}");
    assert_eq!(arrived["events"][0]["message"], "10.0.0.1 is blocked under login for 2 s after strike 1", "{arrived}");
    gate.clock.advance(Span::from_secs(20));
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(receiver.arrived().len(), 1);
}

#[tokio::test]
async fn a_returning_limit_is_no_flood() {
    let receiver = Receiver::start(|_| 200).await;
    let shadow = "[inbound.action.page]\nlimit = \"1 per 1h\"\nmode = \"shadow\"\n";
    let webhook = format!("http://{}/", receiver.address);
    let alert = format!("[alert.ops]\non = [\"flood\", \"shadow\"]\nflood = 20\nwebhook = \"{webhook}\"\n");
    let (all, page) = (format!("{LOGIN}{shadow}{alert}"), format!("{shadow}{alert}"));
    let gate = start(&format!("{LOGIN}{shadow}"));
    let mut api = Peer::connect(gate.api).await;
    for number in 0..1000 {
        block(&mut api, number).await;
        api.ask(post("/v1/check", r#"{"action":"page","ip":"10.0.0.1"}"#)).await;
    }
    for text in [&all, &page, &all, &format!("{LOGIN}{alert}"), &all] {
        reload(&gate, text).await.unwrap();
        for _ in 0..2 {
            gate.clock.advance(Span::from_secs(6));
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
    }
    assert_eq!(receiver.arrived().len(), 0, "{:?}", receiver.arrived());
}

#[tokio::test]
async fn waiting_messages_are_sent_at_the_stop() {
    let (log, _guard) = capture("text");
    let receiver = Receiver::start(|_| 200).await;
    let mut gate = start(&alert(receiver.address, ""));
    let mut api = Peer::connect(gate.api).await;
    block(&mut api, 1).await;
    receiver.wait_for(1).await;
    block(&mut api, 2).await;
    // The driver reads its event within this time.
    tokio::time::sleep(Duration::from_millis(600)).await;
    drop(api);
    gate.stop().await.unwrap();
    let last = receiver.arrived().pop().unwrap().body;
    assert_eq!(last["new"]["events"][0]["message"], "10.0.0.2 is blocked under login for 2 s after strike 1", "{last}");
    assert!(!log.text().contains("the last messages"), "{}", log.text());
}

#[tokio::test]
async fn messages_lost_at_the_stop_are_logged() {
    let (log, _guard) = capture("text");
    let receiver = Receiver::start(|_| 0).await;
    let mut gate = start(&alert(receiver.address, ""));
    block(&mut Peer::connect(gate.api).await, 1).await;
    receiver.wait_for(1).await;
    gate.stop().await.unwrap();
    assert!(log.text().contains("the last messages of alerts weren't delivered messages=1"), "{}", log.text());
}

#[tokio::test]
async fn secrets_appear_nowhere() {
    let (log, _guard) = capture("json");
    let receiver = Receiver::start(|_| 404).await;
    let bot = format!("telegram = {{ token = \"file:TOKEN\", chat = \"@ops\", base_url = \"http://{}\" }}", nobody());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), PLANTED).unwrap();
    let bot = bot.replace("TOKEN", file.path().to_str().unwrap());
    let text = alert(receiver.address, &bot)
        .replace(&format!("\"http://{}/in?k={PLANTED}\"", receiver.address), "\"env:HOOK\"");
    let policy = policy(nobody(), &text);
    let url = format!("http://{}/{PLANTED}", receiver.address);
    let gate = try_start(&policy, move |_| Some(url.clone())).unwrap();
    block(&mut Peer::connect(gate.api).await, 1).await;
    wait_for_count(&gate, "failed", 1).await;
    let tested = test(&gate, "ops").await;
    assert_eq!(receiver.arrived()[0].target, format!("POST /{PLANTED}"));
    let sinks = json(&tested)["sinks"].clone();
    assert_eq!(sinks[0], json!({ "sink": "webhook", "sent": false, "error": "the receiver answered 404 Not Found" }));
    assert_eq!((&sinks[1]["sink"], &sinks[1]["sent"]), (&"telegram".into(), &false.into()), "{tested}");
    assert!(log.text().contains("an alert wasn't delivered"), "{}", log.text());
    let mut pages = vec![tested, format!("{policy:?}")];
    for path in ["/metrics", "/v1/state", "/v1/events?follow=false", "/v1/providers"] {
        pages.push(once(gate.admin, get(path)).await);
    }
    assert_no_secret(&log, &pages);
    let wrong = try_start(&policy, |_| Some(format!("no url: {PLANTED}"))).err().unwrap();
    let told = format!("{wrong} {wrong:?}");
    assert!(told.contains("alert.ops: ") && !told.contains(PLANTED), "{told}");
}

#[tokio::test]
async fn a_failed_reload_shows_no_secret() {
    let (log, _guard) = capture("json");
    let receiver = Receiver::start(|_| 200).await;
    let text = format!("{LOGIN}[alert.ops]\non = \"reload_failed\"\nwebhook = \"http://{}/\"\n", receiver.address);
    let gate = start(&text);
    let url = format!("\"https://hooks.example.com/{PLANTED}\"");
    let bot = format!("\"1:{PLANTED}\"");
    let mut pages = Vec::new();
    for (number, line) in [
        format!("webhok = {url}"),
        format!("webhook_url = {url}"),
        format!("slack = {url}"),
        format!("telegram = {bot}"),
        format!("telegram = {{ bot = {bot}, chat = 1 }}"),
    ]
    .into_iter()
    .enumerate()
    {
        format!("{text}[alert.more]\n{line}\n").clone_into(&mut gate.file.lock().unwrap());
        let head = "host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2";
        let answer = once(gate.admin, format!("POST /v1/reload HTTP/1.1\r\n{head}\r\n\r\n{{}}")).await;
        assert_eq!(status(&answer), 422, "{number}: {answer}");
        pages.push(answer);
    }
    pages.push(once(gate.admin, get("/v1/events?follow=false")).await);
    let events = pages.last().unwrap();
    assert!(events.contains("test.toml:") && events.contains(": expected `"), "{events}");
    assert!(!events.contains("webhok") && !events.contains(" | "), "events have no text of the policy: {events}");
    pages.push(receiver.wait_for(1).await[0].body.to_string());
    assert!(log.text().contains("the policy wasn't reloaded"), "{}", log.text());
    assert_no_secret(&log, &pages);
}

#[tokio::test]
async fn a_test_tells_the_result_of_each_sink() {
    let (log, _guard) = capture("text");
    let receiver = Receiver::start(|_| 204).await;
    let gate = start(&alert(receiver.address, "log = true"));
    let answer = test(&gate, "ops").await;
    let expected =
        json!({ "alert": "ops", "sinks": [{ "sink": "log", "sent": true }, { "sink": "webhook", "sent": true }] });
    assert_eq!((status(&answer), json(&answer)), (200, expected), "{answer}");
    let body = receiver.arrived()[0].body.clone();
    assert_eq!((&body["test"], &body["text"]), (&true.into(), &"tidegate alert ops: this is a test".into()));
    let unknown = test(&gate, "opps").await;
    assert_eq!(
        (status(&unknown), json(&unknown)["message"].as_str()),
        (404, Some("the policy has no such alert; did you mean `ops`?"))
    );
    let other = test(&gate, "night").await;
    assert_eq!(json(&other)["message"].as_str(), Some("the policy has no such alert: it has ops"));
    assert!(test(&gate, "OPS_team").await.contains("did you mean `ops`?"), "as in a policy, a beginning is enough");
    let text = log.text();
    assert!(text.contains("change=\"test_alert\" alert=ops status=200"), "{text}");
    assert_eq!(status(&once(gate.admin, get("/v1/alerts/ops/test")).await), 405);
}

#[tokio::test]
async fn floods_and_shadow_limits_begin_and_end() {
    let receiver = Receiver::start(|_| 200).await;
    let shadow = "[inbound.action.page]\nlimit = \"1 per 1h\"\nmode = \"shadow\"\n";
    let text = format!(
        "{LOGIN}{shadow}[alert.ops]\non = [\"flood\", \"shadow\"]\nflood = 5\nwebhook = \"http://{}/\"\n",
        receiver.address
    );
    let gate = start(&text);
    let mut api = Peer::connect(gate.api).await;
    let second = async || {
        gate.clock.advance(Span::from_secs(1));
        tokio::time::sleep(Duration::from_millis(1200)).await;
    };
    second().await;
    for number in 0..100 {
        block(&mut api, number).await;
        api.ask(post("/v1/check", r#"{"action":"page","ip":"10.0.0.1"}"#)).await;
    }
    second().await;
    let begun = receiver.wait_for(1).await[0].body["new"]["events"].clone();
    let kinds: Vec<_> = begun.as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["flood", "shadow"], "{begun}");
    let message = begun[1]["message"].as_str().unwrap();
    assert_eq!(message, "the shadow limit page would refuse 99 of 100 calls in the last minute");
    gate.clock.advance(Span::from_secs(60));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    gate.clock.advance(Span::from_secs(61));
    let arrived = receiver.wait_for(2).await;
    let resolved = &arrived[1].body["resolved"]["events"];
    assert_eq!(resolved[0]["message"], "0 requests per second are refused, as a mean over ten seconds", "{resolved}");
}
