//! Providers on the dashboard.

use crate::common::{Answer, Api, Gateway, ONCE, get, standing};
use crate::wire::{body, once, status};

async fn page<C>(gateway: &Gateway<C>, path: &str) -> String {
    let answer = once(gateway.admin, format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")).await;
    assert_eq!(status(&answer), 200, "{answer}");
    body(&answer).to_owned()
}

async fn change<C>(gateway: &Gateway<C>, path: &str) -> u16 {
    let lines = "content-type: application/json\r\ncontent-length: 2";
    status(&once(gateway.admin, format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n\r\n{{}}")).await)
}

#[tokio::test]
async fn problems_of_providers_come_first() {
    let api = Api::start(|number, _| Answer::new(if number < 4 { 200 } else { 503 }, "")).await;
    let settings = "limit = \"5 per calendar day\"\nretry = { max_attempts = 1 }\nbreaker = { failures = 1 }\n";
    let gateway = standing(&api.policy(settings));
    for number in 0..3 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
        assert!(page(&gateway, "/").await.contains("Nothing needs attention"), "{number}");
    }
    gateway.ask(get("/api/x")).await;
    let now = page(&gateway, "/").await;
    assert!(now.contains("api: 80 % of api are used; it starts again in 1d"), "{now}");
    gateway.ask(get("/api/x")).await;
    assert_eq!(change(&gateway, "/v1/providers/api/pause").await, 200);
    let now = page(&gateway, "/").await;
    let problems = ["the circuit breaker is open for 5m", "100 % of api are used", "paused by an operator"];
    let places = problems.map(|problem| now.find(problem).unwrap_or_else(|| panic!("{problem}: {now}")));
    assert!(places.is_sorted(), "{now}");
    let providers = page(&gateway, "/providers").await;
    for part in ["Breaker open", "Paused", "5 per calendar day", "0 of 5", "/v1/providers/api/resume"] {
        assert!(providers.contains(part), "{part}: {providers}");
    }
    let policy = page(&gateway, "/policy").await;
    assert!(policy.contains("5 per calendar day") && policy.contains("100 %"), "{policy}");
}

#[tokio::test]
async fn throttled_credentials_are_a_problem() {
    let api = Api::start(|_, _| Answer::new(429, "").with("retry-after", "600")).await;
    let gateway = standing(&api.policy(&format!("{ONCE}auth = \"bearer\"\ncredentials = \"env:A\"\n")));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 429);
    let now = page(&gateway, "/").await;
    assert!(now.contains("api: no credential is usable"), "{now}");
    let providers = page(&gateway, "/providers").await;
    assert!(providers.contains("env:A") && providers.contains("Cooling") && providers.contains("10m"), "{providers}");
    assert!(!providers.contains("pl4nted"), "{providers}");
}
