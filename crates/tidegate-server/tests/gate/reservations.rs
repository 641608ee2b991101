//! Reservations of refused callers, over every interface.

use tidegate::{Clock as _, Span};
use tidegate_testkit::servers::free_port;

use crate::common::{Echo, HELLO, Peer, Running, body, get, header, json, post, start, status};
use crate::rls;

/// The clock of the tests stands at 2026-01-01 00:00:00.
const START_MILLIS: u64 = 1_767_225_600_000;

const SHARED: &str = r#"
    [inbound]
    trusted_proxies = ["127.0.0.0/8"]
    [inbound.action.all]
    match = { path = "/*" }
    key = "action"
    limit = "2/s burst 2"
    reserve = { share = 1, grace = "400ms" }
"#;

fn from(client: u8, more: &str) -> String {
    format!("GET /x HTTP/1.1\r\nhost: gate\r\nx-forwarded-for: 192.0.2.{client}\r\n{more}\r\n")
}

/// Uses up the burst. Returns the reservation that the next client gets, and its token.
async fn refused(gate: &Running, peer: &mut Peer) -> (String, String) {
    for client in 1..=2 {
        assert_eq!(status(&peer.ask(from(client, "")).await), 200);
    }
    let answer = peer.ask(from(3, "")).await;
    assert_eq!((status(&answer), header(&answer, "retry-after")), (429, Some("1")), "{answer}");
    assert_eq!(gate.clock.now().as_micros() / 1000, START_MILLIS);
    let reservation = header(&answer, "tidegate-reservation").unwrap().to_owned();
    let token = reservation.strip_suffix(&format!(";at={};wait=500", START_MILLIS + 500)).unwrap().to_owned();
    let told = format!(
        "{{\"error\":\"Too many requests\",\"retry_after\":1,\"next_allowed_at\":null,\
         \"reservation\":{{\"token\":\"{token}\",\"at\":{},\"wait\":500}}}}",
        START_MILLIS + 500
    );
    assert_eq!(body(&answer), told);
    (reservation, token)
}

#[tokio::test]
async fn a_refused_client_returns_by_its_reservation() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, SHARED).await;
    let mut peer = Peer::connect(gate.inbound).await;
    let (reservation, token) = refused(&gate, &mut peer).await;
    // Another client's refusal has another reservation, and another body.
    let other = peer.ask(from(4, "")).await;
    let other = header(&other, "tidegate-reservation").unwrap();
    assert!(other != reservation && other.ends_with(&format!(";at={};wait=1000", START_MILLIS + 1000)), "{other}");
    gate.clock.advance(Span::from_millis(500));
    let stolen = peer.ask(from(5, &format!("tidegate-reservation: {token}\r\n"))).await;
    assert_eq!(status(&stolen), 429);
    assert!(body(&stolen).ends_with(",\"unknown_reservation\":true}"), "{stolen}");
    // The whole value of the header is accepted, too.
    let kept = peer.ask(from(3, &format!("tidegate-reservation: {reservation}\r\n"))).await;
    assert_eq!((status(&kept), header(&kept, "tidegate-reservation")), (200, None), "{kept}");
    // A gate behind this one would take it for a wrong one of its own.
    let seen = upstream.seen().pop().unwrap().to_ascii_lowercase();
    assert!(seen.contains("192.0.2.3") && !seen.contains("tidegate-reservation"), "{seen}");
}

#[tokio::test]
async fn forward_auth_and_the_api_know_reservations() {
    let gate = start(Echo::start(HELLO).await.address, SHARED).await;
    let (_, token) = refused(&gate, &mut Peer::connect(gate.inbound).await).await;
    let mut api = Peer::connect(gate.api).await;
    let auth = |client: u8, more: &str| {
        let original = "x-original-method: GET\r\nx-original-uri: /x\r\n";
        format!("GET /v1/auth HTTP/1.1\r\nhost: gate\r\n{original}x-forwarded-for: 192.0.2.{client}\r\n{more}\r\n")
    };
    let answer = api.ask(auth(4, "")).await;
    let second = header(&answer, "tidegate-reservation").unwrap().split(';').next().unwrap().to_owned();
    let third = json(&api.ask(post("/v1/check", r#"{"path":"/x","ip":"192.0.2.5"}"#)).await);
    assert_eq!(third["reservation"]["at"], START_MILLIS + 1500, "{third}");
    gate.clock.advance(Span::from_millis(500));
    let check = format!(r#"{{"path":"/x","ip":"192.0.2.3","reservation":"{token}"}}"#);
    let found = json(&api.ask(post("/v1/check", &check)).await);
    assert_eq!((&found["allowed"], &found["by_reservation"]), (&true.into(), &true.into()), "{found}");
    gate.clock.advance(Span::from_millis(500));
    let answer = api.ask(auth(4, &format!("tidegate-reservation: {second}\r\n"))).await;
    assert_eq!(status(&answer), 200, "{answer}");
    gate.clock.advance(Span::from_millis(500));
    let token = third["reservation"]["token"].as_str().unwrap();
    let query = format!("/v1/status?path=%2Fx&ip=192.0.2.5&reservation={token}");
    assert_eq!(json(&api.ask(get(&query)).await)["by_reservation"], true);
}

#[tokio::test]
async fn envoy_hands_reservations_through() {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], free_port()));
    let gate = start(Echo::start(HELLO).await.address, &format!("{SHARED}[rls]\nlisten = \"{address}\"\n")).await;
    let (_, _) = refused(&gate, &mut Peer::connect(gate.inbound).await).await;
    let client = rls::connect(address).await;
    let of = |entries: &[(&str, &str)]| rls::request([rls::descriptor(entries)]);
    let answer = rls::ask(&client, &of(&[("action", "all"), ("ip", "192.0.2.9")])).await.unwrap();
    let reservation = rls::header(&answer, "tidegate-reservation").unwrap();
    let token = reservation.strip_suffix(&format!(";at={};wait=1000", START_MILLIS + 1000)).unwrap();
    gate.clock.advance(Span::from_millis(1000));
    let returned = of(&[("action", "all"), ("ip", "192.0.2.9"), ("header:tidegate-reservation", token)]);
    assert_eq!(rls::ask(&client, &returned).await.unwrap().overall_code, rls::Code::Ok as i32);
}
