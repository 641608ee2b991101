//! Twenty workers against services that count as well-known providers do, with settings that their documentation
//! suggests: few requests are refused, nearly all that is allowed is used, and no call fails.
//!
//! The limits are those of the providers, except where a run would have fewer than 2,000 calls.

mod stub;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::json;

use crate::common::{get, layer_of};
use tidegate_testkit::random;
use tower::Layer as _;

use stub::{BY_TRIALS, Bucket, Counted, FixedWindow, Provider, Secs, Seen, SlidingWindow, TOLD, ask, post_json, run};

/// The seeds of the transit times.
fn seeds() -> impl Iterator<Item = u64> {
    1..=u64::from(random::case_count(1, 5))
}

const GITHUB: &str = "[outbound.provider.api]\npreset = \"github\"\ncredentials = \"env:TOKEN\"\n\
    timeout = \"3h\"\n";

/// GitHub's resources, each with a window that ends within the second that it tells, and its secondary limit of points a minute.
fn github(seed: u64, limits: &[(&'static str, u64, Secs)], points: usize) -> Provider {
    let mut windows: BTreeMap<&str, FixedWindow> =
        limits.iter().map(|(name, limit, length)| (*name, FixedWindow::new(*limit, *length))).collect();
    let mut secondary = SlidingWindow::new(points, 60.0);
    Provider::new(seed, move |seen: &Seen| {
        let resource = if seen.path.starts_with("/search/") { "search" } else { "core" };
        let window = windows.get_mut(resource).unwrap();
        let is_new = seen.at >= window.ends;
        window.refresh(seen.at);
        if is_new {
            // It is told in whole seconds.
            window.ends = window.ends.floor() + 0.6;
        }
        let is_secondary = window.remaining() > 0 && secondary.take(seen.at).is_err();
        let is_admitted = !is_secondary && window.take(seen.at);
        let mut headers = vec![
            ("content-type", "application/json; charset=utf-8".to_owned()),
            ("x-ratelimit-limit", window.limit.to_string()),
            ("x-ratelimit-remaining", window.remaining().to_string()),
            ("x-ratelimit-used", window.used.to_string()),
            ("x-ratelimit-reset", format!("{:.0}", (seen.epoch() - seen.at + window.ends).floor())),
            ("x-ratelimit-resource", resource.to_owned()),
        ];
        let (status, message) = match (is_admitted, is_secondary) {
            (true, _) => (200, "[]".to_owned()),
            (false, true) => {
                headers.push(("retry-after", "60".to_owned()));
                (403, json!({"message": "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."}).to_string())
            }
            (false, false) => (403, json!({"message": "API rate limit exceeded for user ID 1."}).to_string()),
        };
        let limit = if is_secondary { "secondary" } else { resource };
        Counted { limit: limit.to_owned(), used: is_admitted.then_some(1.0), status, headers, body: message }
    })
}

fn github_request(worker: usize, number: u64) -> Request<Full<Bytes>> {
    match worker % 2 {
        0 => get(&format!("/search/issues?q={number}")),
        _ => of_repository(number),
    }
}

/// As a crawler asks: each repository once.
fn of_repository(number: u64) -> Request<Full<Bytes>> {
    get(&format!("/repos/owner/repo{number}/issues"))
}

#[tokio::test(start_paused = true)]
async fn githubs_resources_are_used_up_beside_each_other() {
    for seed in seeds() {
        let provider = github(seed, &[("core", 5_000, 3_600.0), ("search", 30, 60.0)], 900);
        let run = run("GitHub", seed, layer_of(GITHUB), provider, 7_200.0, github_request).await;
        run.check(TOLD, &[("core", 10_000.0), ("search", 3_600.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_spent_resource_of_github_delays_no_call_of_another() {
    for seed in seeds() {
        let provider = github(seed, &[("core", 100_000, 3_600.0), ("search", 30, 60.0)], 100_000);
        let layer = layer_of(&format!("{GITHUB}credential_limit = \"100000 per 1h\"\n"));
        let run = run("GitHub, much core", seed, layer, provider, 120.0, github_request).await;
        run.check(TOLD, &[("search", 60.0)]);
        let (search, core) = (run.longest_wait(|worker| worker % 2 == 0), run.longest_wait(|worker| worker % 2 == 1));
        assert!(search > Duration::from_secs(50), "search is spent: {search:?} {run:?}");
        assert!(core < Duration::from_secs(1), "{core:?} {run:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn githubs_secondary_limit_is_used_up() {
    for seed in seeds() {
        let provider = github(seed, &[("core", 5_000, 3_600.0)], 900);
        let request = |_: usize, number: u64| of_repository(number);
        let run = run("GitHub, secondary", seed, layer_of(GITHUB), provider, 300.0, request).await;
        run.check(TOLD, &[("core", 4_500.0)]);
    }
}

const DISCORD: &str = r#"
[outbound.provider.api]
base_url = "https://discord.com/api/v10"
auth = "header:Authorization Bot"
credentials = "env:TOKEN"
limit = "50/s"
learn_limits = true
timeout = "1h"

[[outbound.provider.api.rule]]
when = { status = 429, json = { "/global" = true } }
is = "throttled"
wait = ["json /retry_after s", "header retry-after"]
scope = "credential"

[[outbound.provider.api.rule]]
when = { status = 429, json = { "/retry_after" = { present = true } } }
is = "throttled"
wait = ["json /retry_after s", "header x-ratelimit-reset-after s", "header retry-after"]

[[outbound.provider.api.allowance]]
limit = "header x-ratelimit-limit"
remaining = "header x-ratelimit-remaining"
reset = "header x-ratelimit-reset-after s"

[[outbound.provider.api.scope]]
path = "/channels/{channel}/**"
name = ["header x-ratelimit-bucket", "path {channel}"]

[[outbound.provider.api.scope]]
name = ["header x-ratelimit-bucket"]
"#;

/// Discord's windows by channel, and the window of a second for all.
fn discord(seed: u64, limit: u64, length: Secs) -> Provider {
    let mut channels: BTreeMap<String, FixedWindow> = BTreeMap::new();
    let mut global = FixedWindow::new(50, 1.0);
    Provider::new(seed, move |seen: &Seen| {
        let json_type = ("content-type", "application/json".to_owned());
        if !global.take(seen.at) {
            let wait = global.ends - seen.at;
            return Counted {
                limit: "global".to_owned(),
                used: None,
                status: 429,
                headers: vec![
                    json_type,
                    ("retry-after", format!("{}", wait.ceil())),
                    ("x-ratelimit-global", "true".to_owned()),
                    ("x-ratelimit-scope", "global".to_owned()),
                ],
                body:
                    json!({"message": "You are being rate limited.", "retry_after": ceil_millis(wait), "global": true})
                        .to_string(),
            };
        }
        let window = channels.entry(seen.path.clone()).or_insert_with(|| FixedWindow::new(limit, length));
        let is_admitted = window.take(seen.at);
        let wait = window.ends - seen.at;
        let mut headers = vec![
            json_type,
            ("x-ratelimit-bucket", "80c17d2f203122d936070c88c8d10f33".to_owned()),
            ("x-ratelimit-limit", window.limit.to_string()),
            ("x-ratelimit-remaining", window.remaining().to_string()),
            ("x-ratelimit-reset", format!("{:.3}", seen.epoch() + wait)),
            ("x-ratelimit-reset-after", format!("{:.3}", ceil_millis(wait))),
        ];
        let mut body = json!({"id": "1"});
        if !is_admitted {
            headers.push(("retry-after", format!("{}", wait.ceil())));
            headers.push(("x-ratelimit-scope", "user".to_owned()));
            body = json!({"message": "You are being rate limited.", "retry_after": ceil_millis(wait), "global": false});
        }
        Counted {
            limit: "channels".to_owned(),
            used: is_admitted.then_some(1.0),
            status: if is_admitted { 200 } else { 429 },
            headers,
            body: body.to_string(),
        }
    })
}

fn ceil_millis(secs: Secs) -> Secs {
    (secs * 1_000.0).ceil() / 1_000.0
}

fn discord_request(worker: usize, number: u64) -> Request<Full<Bytes>> {
    let body = json!({"content": number.to_string()}).to_string();
    post_json(&format!("/channels/{}/messages", 1_000 + worker % 10), "application/json", body)
}

#[tokio::test(start_paused = true)]
async fn discords_channels_are_used_up_each() {
    for seed in seeds() {
        let run = run("Discord", seed, layer_of(DISCORD), discord(seed, 5, 5.0), 250.0, discord_request).await;
        run.check(TOLD, &[("channels", 10.0 * 250.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn discords_global_limit_is_used_up() {
    for seed in seeds() {
        let run = run("Discord, global", seed, layer_of(DISCORD), discord(seed, 50, 5.0), 60.0, discord_request).await;
        run.check(TOLD, &[("channels", 50.0 * 60.0)]);
    }
}

const OPENAI: &str = "[outbound.provider.api]\npreset = \"openai\"\ncredentials = \"env:KEY\"\ntimeout = \"1h\"\n";

/// OpenAI's buckets of requests and tokens, by model.
fn openai(seed: u64, mut models: BTreeMap<&'static str, [Bucket; 2]>) -> Provider {
    Provider::new(seed, move |seen: &Seen| {
        let request = seen.json();
        let model = request["model"].as_str().unwrap().to_owned();
        let cost = request["max_completion_tokens"].as_f64().unwrap() + (seen.body.len() as f64 / 4.0).floor();
        let [requests, tokens] = models.get_mut(model.as_str()).unwrap();
        tokens.refresh(seen.at);
        // A refused request counts, too, if there is room for it.
        let has_request = requests.take(1.0, seen.at);
        let is_admitted = has_request && tokens.take(cost, seen.at);
        let mut headers = vec![
            ("content-type", "application/json".to_owned()),
            ("x-ratelimit-limit-requests", format!("{:.0}", requests.capacity)),
            ("x-ratelimit-remaining-requests", format!("{:.0}", requests.level.floor())),
            ("x-ratelimit-reset-requests", go_duration(requests.until(requests.capacity))),
            ("x-ratelimit-limit-tokens", format!("{:.0}", tokens.capacity)),
            ("x-ratelimit-remaining-tokens", format!("{:.0}", tokens.level.floor())),
            ("x-ratelimit-reset-tokens", go_duration(tokens.until(tokens.capacity))),
        ];
        let body = if is_admitted {
            json!({"object": "chat.completion", "usage": {"total_tokens": cost as u64 / 2}})
        } else {
            let wait = if has_request { tokens.until(cost) } else { requests.until(1.0) };
            headers.push(("retry-after-ms", format!("{:.0}", (wait * 1_000.0).ceil())));
            headers.push(("retry-after", format!("{:.0}", wait.ceil())));
            let kind = if has_request { "tokens" } else { "requests" };
            let message = format!("Rate limit reached for {model}. Please try again in {}.", go_duration(wait));
            json!({"error": {"message": message, "type": kind, "param": null, "code": "rate_limit_exceeded"}})
        };
        let used = if model == "by-requests" { 1.0 } else { cost };
        Counted {
            limit: model,
            used: is_admitted.then_some(used),
            status: if is_admitted { 200 } else { 429 },
            headers,
            body: body.to_string(),
        }
    })
}

/// A time as OpenAI writes it: `12ms`, `6.5s`, `1m12.5s`.
fn go_duration(secs: Secs) -> String {
    let millis = (secs * 1_000.0).ceil() as u64;
    match millis {
        0..1_000 => format!("{millis}ms"),
        1_000..60_000 => format!("{}s", millis as f64 / 1_000.0),
        _ => format!("{}m{}s", millis / 60_000, (millis % 60_000) as f64 / 1_000.0),
    }
}

#[tokio::test(start_paused = true)]
async fn openais_models_are_used_up_each() {
    for seed in seeds() {
        let models = BTreeMap::from([
            ("by-requests", [Bucket::new(500.0, 500.0 / 60.0), Bucket::new(1e6, 1e6 / 60.0)]),
            ("by-tokens", [Bucket::new(5_000.0, 5_000.0 / 60.0), Bucket::new(90_000.0, 90_000.0 / 60.0)]),
        ]);
        let allowed = [
            ("by-requests", models["by-requests"][0].allowed(1_200.0)),
            ("by-tokens", models["by-tokens"][1].allowed(1_200.0)),
        ];
        let request = |worker: usize, number: u64| {
            let model = ["by-requests", "by-tokens"][worker % 2];
            let body = json!({
                "model": model,
                "max_completion_tokens": 100 + number % 3 * 50,
                "messages": [{"role": "user", "content": format!("Say the number {number}.")}],
            });
            post_json("/chat/completions", "application/json", body.to_string())
        };
        let run = run("OpenAI", seed, layer_of(OPENAI), openai(seed, models), 1_200.0, request).await;
        run.check(TOLD, &allowed);
    }
}

/// The limit of 300 calls a minute is the published one of the model and tier.
const GEMINI: &str = r#"
[outbound.provider.api]
base_url = "https://generativelanguage.googleapis.com"
auth = "header:x-goog-api-key"
credentials = "env:KEY"
timeout = "1h"

[[outbound.provider.api.rule]]
when = { status = 429, json = { "/error/details/*/violations/*/quotaId" = { contains = "PerDay" } } }
is = "quota"
wait = "next day in America/Los_Angeles"

[[outbound.provider.api.rule]]
when = { status = 429 }
is = "throttled"
wait = ["json /error/details/*/retryDelay duration", { json = "/error/message", matches = "retry in ([0-9.]+(?:ms|s))", unit = "duration" }]

[[outbound.provider.api.scope]]
path = "/v1beta/models/{model}"
name = ["path {model}"]
"#;

fn gemini(seed: u64, limit: usize, length: Secs) -> Provider {
    let mut window = SlidingWindow::new(limit, length);
    Provider::new(seed, move |seen: &Seen| {
        let taken = window.take(seen.at);
        let body = match taken {
            Ok(()) => json!({"candidates": []}),
            Err(wait) => json!({"error": {
                "code": 429,
                "message": format!("You exceeded your current quota. Please retry in {wait:.9}s."),
                "status": "RESOURCE_EXHAUSTED",
                "details": [
                    {
                        "@type": "type.googleapis.com/google.rpc.QuotaFailure",
                        "violations": [{"quotaId": "GenerateRequestsPerMinutePerProjectPerModel"}],
                    },
                    {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": format!("{}s", wait.ceil())},
                ],
            }}),
        };
        Counted {
            limit: "model".to_owned(),
            used: taken.is_ok().then_some(1.0),
            status: if taken.is_ok() { 200 } else { 429 },
            headers: vec![("content-type", "application/json; charset=UTF-8".to_owned())],
            body: body.to_string(),
        }
    })
}

fn gemini_request(_: usize, number: u64) -> Request<Full<Bytes>> {
    let body = json!({"contents": [{"parts": [{"text": number.to_string()}]}]}).to_string();
    post_json("/v1beta/models/gemini-2.5-flash:generateContent", "application/json", body)
}

#[tokio::test(start_paused = true)]
async fn geminis_published_limit_is_used_up() {
    for seed in seeds() {
        let layer = layer_of(&GEMINI.replace("timeout", "limit = \"300 per 60s\"\ntimeout"));
        let run = run("Gemini", seed, layer, gemini(seed, 300, 60.0), 480.0, gemini_request).await;
        run.check(TOLD, &[("model", 300.0 * 8.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn geminis_limit_is_found_by_trials() {
    for seed in seeds() {
        let layer = layer_of(&GEMINI.replace("timeout", "pace = \"adaptive\"\ntimeout"));
        let run = run("Gemini, by trials", seed, layer, gemini(seed, 300, 60.0), 900.0, gemini_request).await;
        run.check(BY_TRIALS, &[("model", 300.0 * 15.0)]);
    }
}

const MUSICBRAINZ: &str = "[outbound.provider.api]\npreset = \"musicbrainz\"\n\
    user_agent = \"Catalogue/1.0 ( mail@example.com )\"\ntimeout = \"1h\"\n";

/// A call a second, without any tolerance.
fn musicbrainz(seed: u64) -> Provider {
    let mut bucket = Bucket::new(1.0, 1.0);
    Provider::new(seed, move |seen: &Seen| {
        let is_admitted = bucket.take(1.0, seen.at);
        let (status, body) = match is_admitted {
            true => (200, "<?xml version=\"1.0\"?><metadata><artist/></metadata>"),
            false => (
                503,
                "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<error><text>Your requests are exceeding the allowable rate \
                 limit. Please see http://wiki.musicbrainz.org/XMLWebService for more information.</text></error>",
            ),
        };
        Counted {
            limit: "address".to_owned(),
            used: is_admitted.then_some(1.0),
            status,
            headers: vec![("content-type", "application/xml; charset=UTF-8".to_owned())],
            body: body.to_owned(),
        }
    })
}

#[tokio::test(start_paused = true)]
async fn musicbrainz_gets_a_call_a_second() {
    for seed in seeds() {
        let request = |_, number| get(&format!("/artist/{number}"));
        let run = run("MusicBrainz", seed, layer_of(MUSICBRAINZ), musicbrainz(seed), 2_100.0, request).await;
        run.check(TOLD, &[("address", 2_101.0)]);
    }
}

const SHOPIFY: &str = r#"
[outbound.provider.api]
base_url = "https://example.myshopify.com/admin/api/2026-07"
auth = "header:x-shopify-access-token"
credentials = "env:TOKEN"
timeout = "1h"
LIMIT

[[outbound.provider.api.rule]]
when = { status = 200, json = { "/errors/*/extensions/code" = "THROTTLED" } }
is = "throttled"
wait = [{ missing = "json /extensions/cost/requestedQueryCost", left = "json /extensions/cost/throttleStatus/currentlyAvailable", per_second = "json /extensions/cost/throttleStatus/restoreRate" }]
"#;

/// The figures of a plan are published, and the cost of a query is known from its last reply.
const SHOPIFY_LIMIT: &str = r#"
limit = "unlimited"
cost_limit = "100/s burst 2000"
cost = { reserve = 42, reply = ["/extensions/cost/actualQueryCost"] }
"#;

/// The replies tell the bucket. Its rest is the time until it is full.
const SHOPIFY_TOLD: &str = r#"
learn_limits = true
cost = { reserve = 42, reply = ["/extensions/cost/actualQueryCost"] }

[[outbound.provider.api.allowance]]
limit = "json /extensions/cost/throttleStatus/maximumAvailable"
remaining = "json /extensions/cost/throttleStatus/currentlyAvailable"
reset = { missing = "json /extensions/cost/throttleStatus/maximumAvailable", left = "json /extensions/cost/throttleStatus/currentlyAvailable", per_second = "json /extensions/cost/throttleStatus/restoreRate" }
of = "cost"
"#;

/// Shopify's bucket of points. A query takes what it may cost, and gives back what it doesn't.
fn shopify(seed: u64, mut bucket: Bucket) -> Provider {
    let mut number = 0;
    Provider::new(seed, move |seen: &Seen| {
        assert_eq!(seen.method, "POST");
        let requested = 42.0;
        let is_admitted = bucket.take(requested, seen.at);
        number += 1;
        let actual = f64::from(requested as u32 - number % 5 * 4);
        if is_admitted {
            bucket.level += requested - actual;
        }
        let cost = json!({
            "requestedQueryCost": requested as u64,
            "actualQueryCost": if is_admitted { json!(actual as u64) } else { json!(null) },
            "throttleStatus": {
                "maximumAvailable": 2_000.0,
                "currentlyAvailable": bucket.level.floor() as u64,
                "restoreRate": 100.0,
            },
        });
        let body = match is_admitted {
            true => json!({"data": {"shop": {"name": "x"}}, "extensions": {"cost": cost}}),
            false => json!({
                "errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}],
                "extensions": {"cost": cost},
            }),
        };
        Counted {
            limit: "points".to_owned(),
            used: is_admitted.then_some(actual),
            status: 200,
            headers: vec![("content-type", "application/json; charset=utf-8".to_owned())],
            body: body.to_string(),
        }
    })
}

fn shopify_request(_: usize, number: u64) -> Request<Full<Bytes>> {
    let body = json!({"query": "{ shop { name } }", "variables": {"n": number}}).to_string();
    post_json("/graphql.json", "application/json", body)
}

#[tokio::test(start_paused = true)]
async fn shopifys_published_points_are_used_up() {
    for seed in seeds() {
        let layer = layer_of(&SHOPIFY.replace("LIMIT", SHOPIFY_LIMIT));
        let run =
            run("Shopify, published", seed, layer, shopify(seed, Bucket::new(2_000.0, 100.0)), 900.0, shopify_request)
                .await;
        run.check(TOLD, &[("points", 2_000.0 + 900.0 * 100.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn shopifys_told_points_are_used_up() {
    for seed in seeds() {
        let layer = layer_of(&SHOPIFY.replace("LIMIT", SHOPIFY_TOLD));
        let run =
            run("Shopify, told", seed, layer, shopify(seed, Bucket::new(2_000.0, 100.0)), 900.0, shopify_request).await;
        run.check(TOLD, &[("points", 2_000.0 + 900.0 * 100.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttled_query_of_graphql_is_sent_again_when_its_points_are_back() {
    let empty = Bucket { level: 0.0, ..Bucket::new(2_000.0, 100.0) };
    let service = layer_of(&SHOPIFY.replace("LIMIT", SHOPIFY_LIMIT)).layer(shopify(1, empty));
    let ended = ask(&service, shopify_request(0, 0), 0).await;
    assert!(ended.failed.is_none() && ended.attempts == 2, "{ended:?}");
    let wait = Duration::from_millis(420);
    assert!(ended.waited <= wait && wait < ended.waited + Duration::from_millis(120), "{ended:?}");
}

/// As many attempts as those of AWS's own clients for this service.
const DYNAMODB: &str = r##"
[outbound.provider.api]
base_url = "https://dynamodb.us-east-1.amazonaws.com"
limit = "unlimited"
pace = "adaptive"
retry = { max_attempts = 10 }
timeout = "1h"

[[outbound.provider.api.rule]]
when = { status = 400, json = { "/__type" = { matches = "#(ProvisionedThroughputExceeded|Throttling|RequestLimitExceeded|LimitExceeded|TransactionInProgress)(Exception)?$" } } }
is = "throttled"

[[outbound.provider.api.scope]]
name = ["request.json /TableName"]
"##;

/// The write units of tables. A second's units are kept for bursts.
fn dynamodb(seed: u64, mut tables: BTreeMap<&'static str, Bucket>) -> Provider {
    Provider::new(seed, move |seen: &Seen| {
        assert_eq!(seen.method, "POST");
        let table = seen.json()["TableName"].as_str().unwrap().to_owned();
        let is_admitted = tables.get_mut(table.as_str()).unwrap().take(1.0, seen.at);
        let body = match is_admitted {
            true => json!({}),
            false => json!({
                "__type": "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException",
                "message": "The level of configured provisioned throughput for the table was exceeded.",
            }),
        };
        Counted {
            limit: table,
            used: is_admitted.then_some(1.0),
            status: if is_admitted { 200 } else { 400 },
            headers: vec![("content-type", "application/x-amz-json-1.0".to_owned())],
            body: body.to_string(),
        }
    })
}

fn put_item(table: &str, number: u64) -> Request<Full<Bytes>> {
    let body = json!({"TableName": table, "Item": {"id": {"N": number.to_string()}}}).to_string();
    post_json("/", "application/x-amz-json-1.0", body)
}

#[tokio::test(start_paused = true)]
async fn a_write_that_dynamodb_refuses_with_400_is_sent_again() {
    let mut empty = Bucket::new(40.0, 40.0);
    empty.level = -10.0;
    let service = layer_of(DYNAMODB).layer(dynamodb(1, BTreeMap::from([("orders", empty)])));
    let ended = ask(&service, put_item("orders", 1), 0).await;
    assert!(ended.failed.is_none() && ended.attempts > 1, "{ended:?}");
}

fn tables<const N: usize>(rates: [(&'static str, f64); N]) -> BTreeMap<&'static str, Bucket> {
    rates.into_iter().map(|(name, rate)| (name, Bucket::new(rate, rate))).collect()
}

#[tokio::test(start_paused = true)]
async fn dynamodbs_tables_with_equal_rates_are_used_up() {
    for seed in seeds() {
        let provider = dynamodb(seed, tables([("orders", 40.0), ("users", 40.0)]));
        let request = |worker: usize, number| put_item(["orders", "users"][worker % 2], number);
        let run = run("DynamoDB", seed, layer_of(DYNAMODB), provider, 200.0, request).await;
        run.check(BY_TRIALS, &[("orders", 40.0 * 201.0), ("users", 40.0 * 201.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn dynamodbs_tables_with_unequal_rates_are_used_up() {
    for seed in seeds() {
        let provider = dynamodb(seed, tables([("orders", 60.0), ("users", 20.0)]));
        let request = |worker: usize, number| put_item(["orders", "users"][worker % 2], number);
        let run = run("DynamoDB, unequal", seed, layer_of(DYNAMODB), provider, 200.0, request).await;
        run.check(BY_TRIALS, &[("orders", 60.0 * 201.0), ("users", 20.0 * 201.0)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_table_of_dynamodb_is_used_up() {
    for seed in seeds() {
        let provider = dynamodb(seed, tables([("orders", 40.0)]));
        let request = |_, number| put_item("orders", number);
        let run = run("DynamoDB, one table", seed, layer_of(DYNAMODB), provider, 200.0, request).await;
        run.check(BY_TRIALS, &[("orders", 40.0 * 201.0)]);
    }
}
