//! Requests that are retried, and those that aren't.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::Clock as _;
use tidegate::clock::SystemClock;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::common::{Answer, Api, FREE, ONCE, get, provider, request, running};
use crate::wire::{Peer, body, header, nobody, status};

#[tokio::test]
async fn a_post_is_retried_only_with_idempotency_key() {
    let api = Api::start(|_, _| Answer::new(503, "unwell")).await;
    let gateway = running(&api.policy(FREE));
    let answer = gateway.ask(request("POST", "/api/orders", "", "{\"order\":1}")).await;
    assert_eq!((status(&answer), header(&answer, "tidegate-attempts")), (503, Some("1")));
    assert_eq!(api.count(), 1);
    let answer = gateway.ask(request("POST", "/api/orders", "idempotency-key: 8e03978e\r\n", "{\"order\":2}")).await;
    assert_eq!((status(&answer), header(&answer, "tidegate-attempts")), (503, Some("3")));
    let sent = api.arrived().split_off(1);
    assert_eq!(sent.len(), 3);
    for request in sent {
        assert_eq!((request.method.as_str(), &request.body[..]), ("POST", &b"{\"order\":2}"[..]));
        assert_eq!(request.header("idempotency-key"), Some("8e03978e"));
    }
}

#[tokio::test]
async fn a_chunked_body_is_retried_whole() {
    let api = Api::start(|number, _| if number < 2 { Answer::new(503, "") } else { Answer::new(200, "done") }).await;
    let gateway = running(&api.policy(FREE));
    let mut client = Peer::connect(gateway.address).await;
    client.send("PUT /api/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let answer = client.ask("5\r\nwhole\r\n0\r\n\r\n").await;
    assert_eq!((status(&answer), body(&answer)), (200, "done"));
    assert_eq!(api.count(), 3);
    assert!(api.arrived().iter().all(|request| request.body == "halfwhole"));
}

#[tokio::test]
async fn bodies_are_forwarded_for_any_method() {
    let api = Api::start(|_, _| Answer::new(200, "done")).await;
    let gateway = running(&api.policy(FREE));
    for method in ["GET", "DELETE", "POST", "QUERY"] {
        let chunked = "host: localhost\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n";
        for request in [request(method, "/api/x", "", "body"), format!("{method} /api/x HTTP/1.1\r\n{chunked}")] {
            assert_eq!(status(&gateway.ask(request).await), 200);
            assert_eq!(api.arrived().pop().unwrap().body, "body", "{method}");
        }
    }
}

#[tokio::test]
async fn a_broken_request_body_gives_400() {
    let api = Api::start(|_, _| Answer::new(200, "done")).await;
    let gateway = running(&api.policy(FREE));
    let head = "PUT /api/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    let mut client = Peer::connect(gateway.address).await;
    let answer = client.ask(format!("{head}nonsense\r\n")).await;
    assert_eq!((status(&answer), header(&answer, "connection")), (400, Some("close")), "{answer}");
    assert!(body(&answer).contains("the request's body broke off"), "{answer}");
    assert!(client.ends().await);
    // The client's error affects neither the breaker nor the next call.
    for _ in 0..10 {
        gateway.ask(format!("{head}nonsense\r\n")).await;
    }
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
}

#[tokio::test]
async fn a_stalled_caller_receives_408_without_breaker_effect() {
    let api = Api::start(|_, _| Answer::new(200, "done")).await;
    let gateway = running(&api.policy(&format!("{FREE}attempt_timeout = \"300ms\"\nbreaker = {{ failures = 1 }}\n")));
    for sent in ["", "hal"] {
        let mut client = Peer::connect(gateway.address).await;
        let answer = client.ask(format!("{}{sent}", request("PUT", "/api/x", "content-length: 4\r\n", ""))).await;
        assert_eq!((status(&answer), header(&answer, "connection")), (408, Some("close")), "{answer}");
        assert!(body(&answer).contains("the request's body didn't come in time"), "{answer}");
        assert!(client.ends().await);
    }
    let mut slow = Peer::connect(gateway.address).await;
    slow.send(request("PUT", "/api/x", "content-length: 8\r\n", "")).await;
    for byte in "in drops".chars() {
        tokio::time::sleep(Duration::from_millis(100)).await;
        slow.send(byte.to_string()).await;
    }
    assert_eq!(status(&slow.message().await), 200, "one failure would have opened the breaker");
    assert_eq!(api.arrived().pop().unwrap().body, "in drops");
}

#[tokio::test]
async fn a_refused_connection_is_retried_for_any_method() {
    let address = nobody();
    let settings = "limit = \"1000/s burst 1000\"\nretry = { max_attempts = 5, base = \"100ms\", jitter = \"none\" }\n";
    let gateway = running(&provider(address, settings));
    let mut client = Peer::connect(gateway.address).await;
    client.send(request("POST", "/api/orders", "", "order")).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let api = Api::on(TcpListener::bind(address).await.unwrap(), |_, _| Answer::new(201, "made"));
    let answer = client.message().await;
    assert_eq!((status(&answer), body(&answer)), (201, "made"));
    let attempts: u32 = header(&answer, "tidegate-attempts").unwrap().parse().unwrap();
    assert!(attempts > 1, "{answer}");
    assert_eq!((api.count(), &api.arrived()[0].body[..]), (1, &b"order"[..]));
}

/// The instant is within the second that `Retry-After` tells, and before the back-off and the cool-down. The provider's
/// clock is wrong.
#[tokio::test]
async fn a_reservation_is_presented_once_at_its_instant() {
    let instant = AtomicU64::new(0);
    let api = Api::start(move |number, _| {
        let now = SystemClock::new().now().as_micros() / 1000;
        match number {
            0 => {
                instant.store(now + 300, Ordering::Relaxed);
                Answer::new(429, "later")
                    .with("retry-after", "1")
                    .with("tidegate-reservation", format!("rabc;at={};wait=300", now - 60_000))
            }
            1 if now < instant.load(Ordering::Relaxed) => Answer::new(400, "early"),
            1 if now > instant.load(Ordering::Relaxed) + 250 => Answer::new(400, "late"),
            1 => Answer::new(503, "unwell"),
            _ => Answer::new(200, "hello"),
        }
    })
    .await;
    let gateway =
        running(&api.policy("retry = { base = \"2s\", cap = \"2s\", jitter = \"none\" }\ntimeout = \"9s\"\n"));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
    let presented: Vec<_> =
        api.arrived().iter().map(|request| request.header("tidegate-reservation").map(str::to_owned)).collect();
    assert_eq!(presented, [None, Some("rabc".to_owned()), None]);
}

/// Calls come a fifth faster than the provider allows. Many are under way as the first is refused, and hardly any later.
#[tokio::test]
async fn a_tidegate_refuses_each_call_once_at_most() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let inbound = format!(
        "[inbound]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{}\"\n[inbound.action.all]\nmatch = {{ path = \"/*\" }}\n\
         key = \"action\"\nlimit = \"20/s burst 5\"\nreserve = {{}}\n[outbound]\nlisten = \"127.0.0.1:0\"\n",
        api.address
    );
    let server = running(&format!("{inbound}{}", api.policy(ONCE)));
    let gateway = running(&provider(server.inbound.unwrap(), ""));
    let mut calls = JoinSet::new();
    for _ in 0..96 {
        let (address, request) = (gateway.address, get("/api/x"));
        calls.spawn(async move { Peer::connect(address).await.ask(request).await });
        tokio::time::sleep(Duration::from_millis(42)).await;
    }
    let answers = calls.join_all().await;
    let requests = |answer: &String| header(answer, "tidegate-attempts").unwrap().parse::<u32>().unwrap();
    let is_good = |answer: &String| status(answer) == 200 && requests(answer) <= 2;
    assert!(answers.iter().all(is_good), "{answers:?}");
    let mut admin = Peer::connect(server.admin).await;
    let metrics = admin.ask(get("/metrics")).await;
    let count = |reason: &str| {
        let lines =
            metrics.lines().filter(|line| line.starts_with("tidegate_decisions_total") && line.contains(reason));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u32>().unwrap()).sum::<u32>()
    };
    let (refused, used) = (count("refused"), count("\"reservation\""));
    assert!((1..=40).contains(&refused) && used > 0, "{refused} refused, {used} came by their reservations");
}

/// A reservation belongs to the credential whose request was refused, and another one of the call doesn't replace it.
#[tokio::test]
async fn each_credential_presents_its_own_reservation() {
    let api = Api::start(|number, _| match number {
        0 | 1 => {
            let at = SystemClock::new().now().as_micros() / 1000 + 300 + 300 * number as u64;
            let answer = Answer::new(429, "later").with("retry-after", "1");
            answer.with("tidegate-reservation", format!("r{number};at={at}"))
        }
        _ => Answer::new(200, "hello"),
    })
    .await;
    let pair = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n";
    let gateway = running(&api.policy(&format!("{FREE}{pair}")));
    assert_eq!(body(&gateway.ask(get("/api/x")).await), "hello");
    let arrived = api.arrived();
    let seen = |name| arrived.iter().map(|request| request.header(name)).collect::<Vec<_>>();
    assert_eq!(seen("tidegate-reservation"), [None, None, Some("r0")]);
    let sent = seen("authorization");
    assert!(sent[0] != sent[1] && sent[0] == sent[2], "{sent:?}");
}

#[tokio::test]
async fn a_throttled_reply_is_retried_not_forwarded() {
    let api = Api::start(|number, _| match number {
        0 => Answer::new(429, "slow down").with("retry-after", "1"),
        _ => Answer::new(200, "hello"),
    })
    .await;
    let gateway = running(&api.policy(FREE));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
    assert_eq!(header(&answer, "tidegate-attempts"), Some("2"));
    let waited = header(&answer, "tidegate-waited").unwrap().strip_suffix('s').unwrap().parse::<f64>().unwrap();
    assert!((1.0..3.0).contains(&waited), "{waited}");
}

#[tokio::test]
async fn a_disconnected_caller_cancels_its_queued_call() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = running(&api.policy("limit = \"2/s\"\n"));
    assert_eq!(status(&gateway.ask(get("/api/first")).await), 200);
    let mut gone = Peer::connect(gateway.address).await;
    gone.send(get("/api/gone")).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(gone);
    assert_eq!(status(&gateway.ask(get("/api/second")).await), 200);
    let targets: Vec<String> = api.arrived().into_iter().map(|arrived| arrived.target).collect();
    assert_eq!(targets, ["/v1/first", "/v1/second"]);
}
