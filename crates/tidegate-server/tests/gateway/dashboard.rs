//! Providers on the dashboard.

use std::future::{Pending, pending};
use std::sync::Arc;

use tidegate::clock::ManualClock;
use tidegate::outbound::Outbound;
use tidegate::store::{Batch, Limits, Memory, Outcomes, Store, StoreError, StoreResponse};
use tidegate::{Gate, Time};
use tidegate_policy::KeySeed;

use crate::common::{Answer, Api, FREE, Gateway, ONCE, get, provider, serve, standing};
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

/// The value of a fact about a provider.
fn fact<'a>(page: &'a str, name: &str) -> &'a str {
    let (_, rest) =
        page.split_once(&format!("<dt>{name}</dt><dd class=\"number\">")).unwrap_or_else(|| panic!("{page}"));
    rest.split_once('<').unwrap().0
}

#[tokio::test]
async fn refused_calls_are_not_calls_sent() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = standing(&api.policy(FREE));
    assert_eq!(change(&gateway, "/v1/providers/api/pause").await, 200);
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
    let providers = page(&gateway, "/providers").await;
    let facts = ["Calls sent", "Requests per call", "Reply, median", "Failed"].map(|name| fact(&providers, name));
    assert_eq!(facts, ["0", "–", "–", "1"]);
    assert!(providers.contains("Failed: paused by an operator 1"), "{providers}");
    assert_eq!(change(&gateway, "/v1/providers/api/resume").await, 200);
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    assert_eq!(fact(&page(&gateway, "/providers").await, "Calls sent"), "1");
}

/// A store that never answers.
struct Silent(Memory);

impl Store for Silent {
    type Future = Pending<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, _: &Batch, _: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Pending(pending())
    }

    fn submit(&self, _: &Batch, _: Time) {}
}

#[tokio::test]
async fn pages_without_limits_ask_no_store() {
    let gateway = serve(&provider("127.0.0.1:9".parse().unwrap(), FREE), |policy| {
        let (clock, seed) = (ManualClock::default(), KeySeed::new([7; 16]));
        let store = |limits: &Arc<Limits>| Silent(Memory::new(Arc::clone(limits), 1 << 20));
        let (plan, config) = (policy.plan(), policy.outbound().unwrap());
        let gate = Gate::from_parts(Arc::clone(plan), store(plan.limits()), clock.clone(), seed.clone());
        (gate, Outbound::with_store(config.clone(), store(config.limits()), clock, &seed))
    });
    for path in ["/who", "/events"] {
        page(&gateway, path).await;
    }
}
