//! What a policy says of other people's APIs.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::time::Duration;

use tidegate_core::call::{Ceiling, LaneRules, MAX_LEAD, Rules};
use tidegate_core::{Kind, Lane, Span};
use tidegate_policy::outbound::{Auth, Outbound, Provider};
use tidegate_policy::{KeySeed, Policy, Sources};

fn outbound(text: &str) -> Outbound {
    let policy = Policy::load(Sources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    policy.outbound().unwrap().clone()
}

fn rules(provider: &Provider) -> Rules {
    provider.rules(&KeySeed::new([7; 16]))
}

fn names(outbound: &Outbound, ceilings: &[Ceiling]) -> Vec<String> {
    ceilings.iter().map(|ceiling| outbound.info(ceiling.limit).name.clone()).collect()
}

#[test]
fn a_preset_and_credentials_are_enough() {
    let outbound =
        outbound("[outbound.provider.tmdb]\npreset = \"tmdb\"\ncredentials = [\"env:TMDB_A\", \"file:/run/b\"]\n");
    assert_eq!(outbound.listen.unwrap().to_string(), "127.0.0.1:8081");
    let provider = outbound.find("tmdb").unwrap();
    assert_eq!(provider.base_url.as_ref().unwrap().to_string(), "https://api.themoviedb.org/3");
    assert_eq!((provider.preset, &provider.auth), (Some("tmdb"), &Auth::Bearer));
    assert_eq!(provider.credentials.iter().map(ToString::to_string).collect::<Vec<_>>(), ["env:TMDB_A", "file:/run/b"]);
    assert_eq!(provider.cache.unwrap().ttl, Some(Duration::from_secs(86_400)));
    let rules = rules(provider);
    assert_eq!(names(&outbound, &rules.credential_ceilings), ["tmdb.credential"]);
    assert_eq!(names(&outbound, &rules.lane_ceilings[Lane::Background as usize]), ["tmdb.background"]);
    assert!(rules.ceilings.is_empty() && rules.lane_ceilings[1].is_empty() && rules.lane_ceilings[2].is_empty());
    assert_eq!(rules.credential_keys.len(), 2);
    assert_eq!(outbound.info(rules.credential_ceilings[0].limit).words, "at most 40 in any 10 s");
    let Kind::Window(window) = outbound.limits().get(rules.credential_ceilings[0].limit).unwrap().kind() else {
        panic!("no window")
    };
    assert_eq!((window.entries(), window.lead()), (40, MAX_LEAD));
    assert_eq!(
        (rules.lead, rules.jitter, rules.lanes.window),
        (Span::from_millis(500), Span::ZERO, Span::from_secs(10))
    );
    let Kind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
        panic!("no cool-down")
    };
    assert_eq!((cooldown.base, cooldown.cap), (Span::from_secs(1), Span::from_secs(32)));
    assert_eq!(cooldown.stagger, Span::from_micros(312_500), "background's limit is no matter of the credential")
}

#[test]
fn lanes_say_what_the_provider_leaves_unsaid() {
    let secs = Span::from_secs;
    let lanes = |text: &str| {
        let outbound = outbound(&format!("[outbound.provider.x]\nlimit = \"10/s\"\n{text}"));
        let rules = rules(outbound.find("x").unwrap()).lane_rules;
        rules.map(|LaneRules { timeout, retry }| (timeout, retry.max_attempts))
    };
    assert_eq!(lanes(""), [(secs(60), 6), (secs(10), 3), (secs(10), 3)]);
    assert_eq!(lanes("retry = { max_attempts = 7 }\ntimeout = \"20s\""), [(secs(20), 7); 3]);
    assert_eq!(
        lanes("retry = { max_attempts = 7 }\nbackground = { retries = 0, timeout = \"2m\" }\nuser = { retries = 1 }"),
        [(secs(120), 1), (secs(10), 2), (secs(10), 7)]
    );
    assert_eq!(lanes("sequential = true"), [(secs(10), 3); 3]);
}
