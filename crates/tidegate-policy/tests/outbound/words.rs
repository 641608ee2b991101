//! The description of an outbound policy in words.

use super::{EVERY_KEY, outbound};

#[test]
fn descriptions_state_true_bounds_without_secrets() {
    let words = outbound(EVERY_KEY).describe();
    for expected in [
        "own: http://localhost:9000/v1 (preset local)\n",
        "  10 per second, bursts of 20: at most 620 in any 60 s (all calls)\n",
        "  at most 50 in any 10 s (all calls)\n",
        "  at most 30000 in any 60 s, by what calls cost (all calls)\n",
        "  1000 per calendar day in America/Los_Angeles: up to 2000 around midnight (each credential)\n",
        "  1 per second, evenly spaced: at most 61 in any 60 s (background calls)\n",
        "  at most 8 at the same time (all calls)\n",
        "  as many at the same time as it can serve, 2 to 30, at first 3\n",
        "  webhook: 5 s a call, 0 retries, up to 300 waiting, at most 6 at the same time\n",
        "at most 2 at the same time, only 22:00-06:00 in Europe/Berlin\n",
        "  before a retry half to all of 2 s, 6 s … 40 s, or Retry-After up to 60 s; retries up to 12.5 % of first tries, \
         and 1 more; up to 2 more with another credential\n",
        "  breaker opens at 3 failures in a row or 50 % failures of 20 calls or more in 30 s or 25 % slower than 2 s of \
         20 calls or more in 30 s, for half to all of 1 s, 3 s … 60 s; 2 probes at a time, closes after 3 successes; \
         then 10 % for 10 s, 50 % for 20 s of calls\n",
        "  credentials env:KEY_A, env:KEYS[2], file:/run/key, the one unused for longest, as authorization Token; each \
         cools down for 2 s, 4 s … 16 s when it is throttled\n",
        "  logs in by POST /login with pin from env:PIN, for 12 h, renewed 1 h before\n",
        "  rule 1 of the policy: 503 with server \"x\", or 400 with the request's /a \"b\" is throttled, not sent again; it waits \
         retry-after, else 30 s; for the whole credential; for at most 2 d\n",
        "  rule 2 of the policy: 200 with <Error/Code> \"SlowDown\" and its text containing \"slow\" and the method POST and \
         the host *.example.com and the path /x was not carried out\n",
        "  rule 3 of the policy: 403, 429 with /error containing \"slow down\" is a spent quota\n",
        "  the scope of GET /search/{kind}/**: {kind}/x-bucket\n",
        "  replies report cost: left x-left, used x-used, of 100, until x-reset epoch, in 60 s\n",
        "  no reply closes anything for longer than 2 d\n",
        "  a call reserves a cost of 5, 1 for each 4 bytes of its body, what /max_tokens in it says; its reply settles that \
         by /usage/in or /in and /usage/out\n",
        "  a second request after 1 s without a reply\n",
        "  replies are cached for ever, for all credentials together, and stand in for 1 h more while it is unavailable\n",
        "\nspent quotas and cool-downs outlive a restart in /var/lib/tidegate/outbound.json\n",
    ] {
        assert!(words.contains(expected), "{expected}\n{words}");
    }
    let words = outbound("[outbound.provider.x]\nlimit = \"1/s\"\n").describe();
    assert!(
        words.ends_with("\nspent quotas and cool-downs don't outlive a restart: outbound.snapshot is off\n"),
        "{words}"
    );
}

#[test]
fn descriptions_state_the_scope_of_in_flight_limits() {
    let text = "[outbound.provider.x]\nbase_url = \"https://api.test\"\nauth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n\
                credential_limit = \"5 in flight\"\n";
    let words = |more: &str| outbound(&format!("{text}{more}")).describe();
    let own = words("");
    assert!(own.contains("  at most 5 at the same time (each credential)\n") && !own.contains("unlimited"), "{own}");
    let shared = words("limit = \"8 in flight\"\nshared = true\n");
    for expected in ["(all calls, in each node)\n", "  at most 5 at the same time (each credential, in each node)\n"] {
        assert!(shared.contains(expected), "{expected}\n{shared}");
    }
}

#[test]
fn descriptions_mention_a_cache_disabled_by_credentials() {
    let own = "[outbound.provider.x]\nbase_url = \"https://example.com\"\nauth = \"bearer\"\n";
    for (text, expected) in [
        (
            format!("{own}credentials = [\"env:A\", \"env:B\"]\ncache = \"on\"\n"),
            "  nothing is cached, because there are several credentials; cache.shared lets them share replies\n",
        ),
        (
            format!("{own}credentials = [\"env:A\", \"env:B\"]\ncache = {{ shared = true }}\n"),
            "  replies are cached as their headers say, for all credentials together\n",
        ),
        (format!("{own}credentials = \"env:A\"\ncache = \"on\"\n"), "  replies are cached as their headers say\n"),
        (format!("{own}credentials = [\"env:A\", \"env:B\"]\n"), "  nothing is cached\n"),
        (
            "[outbound.provider.x]\npreset = \"tmdb\"\ncredentials = [\"env:A\", \"env:B\"]\n".to_owned(),
            "  replies are cached for 1 d, for all credentials together\n",
        ),
    ] {
        let words = outbound(&text).describe();
        assert!(words.contains(expected), "{expected}\n{words}");
    }
}
