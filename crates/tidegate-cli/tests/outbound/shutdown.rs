//! Shutdown with calls in flight and in the queue.

use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, HttpResponse, get_request};

use crate::common::{gateway, provider};
use crate::upstream::{Upstream, reply};

#[test]
fn sigterm_completes_running_and_queued_calls() {
    let upstream = Upstream::start(|_| {
        thread::sleep(Duration::from_millis(300));
        reply("200 OK", "", "done")
    });
    let settings = "limit = [\"5/s\", \"4 in flight\"]\ntimeout = \"20s\"";
    let (mut gateway, port) = gateway(&provider(upstream.port, settings), &[]);
    let clients: Vec<_> = (0..10)
        .map(|_| {
            let mut client = HttpClient::connect(port).unwrap();
            client.send(get_request("/api/x"));
            thread::spawn(move || client.read_response())
        })
        .collect();
    // Some are in flight and most are queued.
    thread::sleep(Duration::from_millis(150));
    let sent = upstream.seen().len();
    assert!((1..6).contains(&sent), "{sent} sent");
    gateway.send_signal("TERM");
    let answers: Vec<HttpResponse> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.closes_connection), "{answers:?}");
    assert!(gateway.wait().expect("the gateway ends").success());
    let log = gateway.read_file("stderr");
    assert!(log.contains("stopped cut_off=0"), "{log}");
    assert_eq!(upstream.seen().len(), 10);
}

#[test]
fn calls_exceeding_the_shutdown_timeout_are_aborted() {
    let upstream = Upstream::start(|_| reply("200 OK", "", "done"));
    let settings = "limit = \"1 per 1m\"\ntimeout = \"2m\"\n[inbound.timeouts]\nshutdown = \"500ms\"";
    let (mut gateway, port) = gateway(&provider(upstream.port, settings), &[]);
    let mut client = HttpClient::connect(port).unwrap();
    assert_eq!(client.request(get_request("/api/x")).status, 200);
    client.send(get_request("/api/x"));
    thread::sleep(Duration::from_millis(100));
    gateway.send_signal("TERM");
    assert!(gateway.wait().expect("the gateway ends").success());
    let log = gateway.read_file("stderr");
    assert!(log.contains("stopped cut_off=1"), "{log}");
    assert_eq!(upstream.seen().len(), 1);
}
