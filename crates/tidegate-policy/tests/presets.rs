//! Provider presets: the calls that each official limit admits, and the share that our own defaults leave of it.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_core::call::{CallRules, Measure};
use tidegate_core::{Batch, Lane, Op, Span, Time, Verb};
use tidegate_policy::outbound::{ErrorFormat, OutboundConfig, preset_names};
use tidegate_policy::{KeySeed, Policy, PolicySources};
use tidegate_testkit::fixtures::TestLimiter;

/// Midnight in UTC on 2026-11-21.
const MIDNIGHT: Time = Time::from_secs(1_795_219_200);
const DAY: Span = Span::from_secs(86_400);

fn load(preset: &str, more: &str) -> Result<OutboundConfig, String> {
    let credentials = match preset {
        "musicbrainz" => "user_agent = \"Tagger/1.2 ( me@example.org )\"",
        "local" => "",
        _ => "credentials = \"env:KEY\"",
    };
    let text = format!("[outbound.provider.x]\npreset = \"{preset}\"\n{credentials}\n{more}\n");
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).map_err(|errors| errors.to_string())?;
    Ok(policy.outbound().unwrap().clone())
}

/// A provider, with a store that counts its calls.
struct Counter {
    rules: CallRules,
    limiter: TestLimiter,
}

impl Counter {
    fn new(preset: &str, more: &str) -> Self {
        let outbound = load(preset, more).unwrap();
        let rules = outbound.find("x").unwrap().rules(&KeySeed::new([3; 16]));
        Self { rules, limiter: TestLimiter::with_shared_limits(outbound.limits().clone()) }
    }

    /// Takes a call. `None` if it is admitted, otherwise the time of the next try.
    fn take(&self, lane: Lane, cost: u64, now: Time) -> Option<Time> {
        let rules = &self.rules;
        let shared = rules.provider_limits.iter().chain(&rules.lane_limits[lane as usize]);
        let own = rules.credential_limits.iter().map(|ceiling| (ceiling, rules.credential_keys[0]));
        let mut batch = Batch::new(0);
        for (ceiling, key) in shared.map(|ceiling| (ceiling, rules.key)).chain(own) {
            let cost = if ceiling.measure == Measure::Cost { cost } else { 1 };
            batch.push(Op::new(ceiling.limit, Verb::Take, key, cost)).unwrap();
        }
        let (decision, outcomes) = self.limiter.decide(&batch, now);
        let retry_at =
            outcomes.list().iter().filter(|outcome| outcome.admission.refuses()).map(|outcome| outcome.retry_at);
        (!decision.allowed).then(|| retry_at.max().unwrap())
    }

    /// Returns the times of the calls if there are always calls waiting in these lanes.
    fn saturate(&self, lanes: &[Lane], cost: u64, length: Span) -> Vec<Time> {
        let (mut now, mut sent) = (MIDNIGHT, Vec::new());
        while now.since(MIDNIGHT) < length {
            let mut next = Time::NEVER;
            for lane in lanes {
                match self.take(*lane, cost, now) {
                    None => {
                        sent.push(now);
                        next = now;
                    }
                    Some(at) => next = next.min(at),
                }
            }
            now = next;
        }
        sent
    }
}

/// The most calls in any span of this length.
fn most(sent: &[Time], window: Span) -> usize {
    let within = |from: usize| sent[from..].iter().take_while(|at| at.since(sent[from]) < window).count();
    (0..sent.len()).map(within).max().unwrap_or(0)
}

#[test]
fn every_preset_is_tested() {
    let text = include_str!("presets.rs");
    for preset in preset_names() {
        let preset = preset.as_str();
        assert!(text.contains(&format!("(\"{preset}\", ")), "{preset}");
        load(preset, "").unwrap();
    }
}

#[test]
fn official_windows_are_enforced() {
    for (preset, official, window, length) in [
        ("tmdb", 40, 10, 40),
        ("tvdb", 100, 10, 40),
        ("fanart", 10, 1, 10),
        ("fanart-personal", 20, 1, 10),
        ("musicbrainz", 1, 1, 10),
        ("theaudiodb", 30, 60, 200),
        ("github", 900, 60, 200),
    ] {
        let sent = Counter::new(preset, "").saturate(&Lane::ALL, 1, Span::from_secs(length));
        assert_eq!(most(&sent, Span::from_secs(window)), official, "{preset}");
        let windows = length / window;
        let all = official * usize::try_from(windows).unwrap();
        assert!(sent.len() * 100 >= all * 90, "{preset}: {} of {all}", sent.len());
    }
}

#[test]
fn official_quotas_are_enforced_until_midnight() {
    for (preset, official) in [("omdb-free", 1_000), ("omdb-paid", 100_000)] {
        let counter = Counter::new(preset, "");
        for _ in 0..official {
            assert_eq!(counter.take(Lane::User, 1, MIDNIGHT), None, "{preset}");
        }
        assert_eq!(counter.take(Lane::Webhook, 1, MIDNIGHT), Some(MIDNIGHT + DAY), "{preset}");
        assert_eq!(counter.take(Lane::Webhook, 1, MIDNIGHT + DAY), None, "{preset}");
    }
}

#[test]
fn a_quota_ends_at_its_zones_midnight() {
    // The days on which the clocks in Berlin go forward and back in 2026.
    for (midnight, hours) in [(1_774_738_800, 23), (1_792_879_200, 25)] {
        let counter = Counter::new("omdb-free", "credential_limit = \"1000 per day in Europe/Berlin\"");
        let midnight = Time::from_secs(midnight);
        for _ in 0..1000 {
            assert_eq!(counter.take(Lane::User, 1, midnight), None);
        }
        assert_eq!(counter.take(Lane::User, 1, midnight), Some(midnight + Span::from_secs(hours * 3600)));
    }
}

#[test]
fn the_local_rate_and_burst_are_enforced() {
    let (preset, more) = ("local", "base_url = \"http://127.0.0.1:9000\"");
    let sent = Counter::new(preset, more).saturate(&[Lane::User], 1, Span::from_secs(2));
    assert_eq!(sent.iter().filter(|at| **at == MIDNIGHT).count(), 10_000);
    assert_eq!(most(&sent[10_000..], Span::from_secs(1)), 1000);
    assert!(most(&sent, Span::from_secs(1)) <= 11_000);
}

#[test]
fn language_model_presets_learn_limits_from_replies() {
    for preset in ["openai", "anthropic"] {
        let counter = Counter::new(preset, "");
        assert!(counter.rules.tracks_remaining && counter.rules.provider_limits.is_empty(), "{preset}");
    }
}

#[test]
fn presets_choose_the_error_format_of_their_sdks() {
    for preset in preset_names() {
        let format = match preset.as_str() {
            "openai" => ErrorFormat::OpenAi,
            "anthropic" => ErrorFormat::Anthropic,
            _ => ErrorFormat::Tidegate,
        };
        assert_eq!(load(&preset, "").unwrap().find("x").unwrap().error_format, format, "{preset}");
    }
}

#[test]
fn default_background_limits_reserve_higher_lanes_room() {
    for (preset, background, window, burst) in
        [("tmdb", 32, 10, 40), ("tvdb", 10, 1, 50), ("fanart", 1, 1, 5), ("fanart-personal", 2, 1, 10)]
    {
        let sent = Counter::new(preset, "").saturate(&[Lane::Background], 1, Span::from_secs(40));
        assert_eq!(most(&sent, Span::from_secs(window)), background, "{preset}");
        for lane in [Lane::User, Lane::Webhook] {
            let sent = Counter::new(preset, "").saturate(&[lane], 1, Span::from_micros(1));
            assert_eq!(sent.len(), burst, "{preset}");
        }
    }
}

#[test]
fn presets_set_their_calls_in_flight() {
    for (preset, most) in [("musicbrainz", 1), ("github", 100), ("tmdb", u32::MAX)] {
        assert_eq!(Counter::new(preset, "").rules.lanes.max_in_flight, most, "{preset}");
    }
    assert!(load("musicbrainz", "").unwrap().find("x").unwrap().sequential);
    let told = load("musicbrainz", "background = { limit = \"1/s\" }").unwrap_err();
    assert!(told.contains("is sequential, so it has no lanes"), "{told}");
}

#[test]
fn presets_set_hosts_and_cache_times() {
    for (preset, host, cached) in [
        ("tmdb", "api.themoviedb.org", Some(86_400)),
        ("tvdb", "api4.thetvdb.com", Some(86_400)),
        ("fanart", "webservice.fanart.tv", Some(u64::MAX)),
        ("fanart-personal", "webservice.fanart.tv", Some(u64::MAX)),
        ("musicbrainz", "musicbrainz.org", Some(u64::MAX)),
        ("omdb-free", "www.omdbapi.com", Some(604_800)),
        ("omdb-paid", "www.omdbapi.com", Some(604_800)),
        ("theaudiodb", "www.theaudiodb.com", None),
        ("github", "api.github.com", None),
        ("openai", "api.openai.com", None),
        ("anthropic", "api.anthropic.com", None),
    ] {
        let outbound = load(preset, "").unwrap();
        let provider = outbound.find("x").unwrap();
        let url = provider.base_url.as_ref().unwrap();
        assert!(url.is_https() && url.authority().as_str() == host, "{preset}: {url}");
        assert_eq!(provider.cache.map(|cache| cache.ttl.unwrap().as_secs()), cached, "{preset}");
        let shares = provider.credentials.is_empty() || provider.cache.is_none_or(|cache| cache.shared);
        assert!(shares, "{preset}: several credentials would keep nothing");
        let rules = provider.rules(&KeySeed::new([3; 16]));
        let backoff = rules.lane_rules[0].retry.backoff;
        assert_eq!((backoff.base, backoff.cap), (Span::from_secs(1), Span::from_secs(30)), "{preset}");
    }
}

#[test]
fn musicbrainz_requires_a_user_agent_with_contact() {
    for (agent, fine) in [
        ("Tagger/1.2 ( me@example.org )", true),
        ("Tagger/1.2 (https://example.org/tagger)", true),
        ("Tagger/1.2", false),
        ("Tagger ( me@example.org )", false),
        ("Tagger/ ( me@example.org )", false),
        ("Tagger/1.2 ( )", false),
        ("Tagger/1.2 ( me )", false),
        ("curl/8.0 me@example.org", false),
    ] {
        let text = format!("[outbound.provider.mb]\npreset = \"musicbrainz\"\nuser_agent = \"{agent}\"\n");
        assert_eq!(Policy::load(PolicySources::new().file("test.toml", text)).is_ok(), fine, "{agent}");
    }
}
