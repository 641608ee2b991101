//! Limits on calls in flight: a permit is held until the last byte, and returned however the request ends.

use std::time::Duration;

use tidegate_core::Span;
use tokio::net::TcpListener;

use crate::common::{HELLO, PATIENCE, Peer, get, once, start, status};

const ONE: &str = "[inbound.action.one]\nmatch = { path = \"/one\" }\nlimit = \"1 in flight\"\n";

async fn eventually_admitted(address: std::net::SocketAddr, listener: &TcpListener) {
    let admitted = async {
        loop {
            let mut client = Peer::connect(address).await;
            client.send(get("/one")).await;
            tokio::select! {
                answer = client.message() => assert_eq!(status(&answer), 429),
                accepted = listener.accept() => {
                    let mut served = Peer::over(accepted.unwrap().0);
                    served.message().await;
                    served.send(HELLO).await;
                    assert_eq!(status(&client.message().await), 200);
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, admitted).await.expect("the permit comes back");
}

#[tokio::test]
async fn permits_are_held_while_the_response_streams() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), ONE).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/one")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    let refused = once(gate.inbound, get("/one")).await;
    assert_eq!(status(&refused), 429, "while the upstream thinks");
    served.send("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(status(&once(gate.inbound, get("/one")).await), 429, "while the body is on its way");
    served.send("world").await;
    assert_eq!(status(&client.message().await), 200);
    client.send(get("/one")).await;
    served.message().await;
    served.send(HELLO).await;
    assert_eq!(status(&client.message().await), 200, "after the last byte");
}

#[tokio::test]
async fn permits_return_when_client_or_upstream_disconnects() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), ONE).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/one")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    drop(client);
    assert!(served.ends().await);
    drop(served);
    assert_eq!(status(&once(gate.inbound, get("/one")).await), 429, "something behind the upstream may still work");
    gate.clock.advance(Span::from_secs(30));
    eventually_admitted(gate.inbound, &listener).await;

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), ONE).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/one")).await;
    drop(listener.accept().await.unwrap());
    assert_eq!(status(&client.message().await), 502);
    eventually_admitted(gate.inbound, &listener).await;
}

#[tokio::test]
async fn the_decision_api_issues_and_releases_permits() {
    let upstream = crate::common::nobody();
    let gate = start(upstream, ONE).await;
    let check = crate::common::post("/v1/check", r#"{"action":"one","ip":"192.0.2.1"}"#);
    let answer = crate::common::json(&once(gate.api, &check).await);
    let permit = answer["permit"].as_str().unwrap().to_owned();
    assert_eq!(status(&once(gate.api, &check).await), 429);
    let give =
        |path: &str| crate::common::post(path, &format!(r#"{{"action":"one","ip":"192.0.2.1","permit":"{permit}"}}"#));
    assert_eq!(crate::common::body(&once(gate.api, give("/v1/renew")).await), r#"{"renewed":true}"#);
    assert_eq!(crate::common::body(&once(gate.api, give("/v1/release")).await), r#"{"released":true}"#);
    assert_eq!(crate::common::body(&once(gate.api, give("/v1/release")).await), r#"{"released":false}"#);
    assert_eq!(crate::common::body(&once(gate.api, give("/v1/renew")).await), r#"{"renewed":false}"#);
    assert_eq!(status(&once(gate.api, &check).await), 200);
}
