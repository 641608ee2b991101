//! The dashboard over exact bytes: signing in, sessions, and the bounds of its pages.

use std::time::Duration;

use tidegate::Span;

use crate::common::{
    Echo, HELLO, PATIENCE, Peer, Running, body, get, header, json, nobody, once, policy, post, start, status, try_start,
};

const FILE: &str = r#"
    [inbound.global]
    limit = "1000 per 60s"
    [inbound.action.login]
    match = { path = "/login" }
    limit = "1 per 60s"
    penalty = { base = "10s", cap = "1h" }
    [outbound.provider.api]
    base_url = "http://127.0.0.1:9"
    limit = "1000 per calendar day"
    [admin]
    token = "env:ADMIN"
    tokens = { ops = "env:OPS", dash = { secret = "env:DASH", read_only = true } }
"#;
const PAGES: [&str; 7] = ["/", "/who", "/providers", "/fleet", "/policy", "/try", "/events"];
/// Longer than the time between a stream's looks at its token.
const SEVERAL_LOOKS: Duration = Duration::from_secs(1);
const RESET: &str = r#"{"action":"login","ip":"192.0.2.1"}"#;

/// A gate whose tokens are `admin-s3cret`, `ops-s3cret` and `dash-s3cret`.
fn with_tokens() -> Running {
    try_start(&policy(nobody(), FILE), |name| Some(format!("{}-s3cret", name.to_lowercase()))).unwrap()
}

/// A request with further header lines.
fn request(method: &str, path: &str, lines: &str, body: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}content-length: {}\r\n\r\n{body}", body.len())
}

async fn sign_in(gate: &Running, token: &str, lines: &str) -> String {
    once(gate.admin, request("POST", "/sign-in", lines, &format!("token={token}"))).await
}

/// A browser that has signed in.
struct Browser {
    cookie: String,
    csrf: String,
}

impl Browser {
    async fn sign_in(gate: &Running, token: &str) -> Self {
        let answer = sign_in(gate, token, "").await;
        assert_eq!((status(&answer), header(&answer, "location")), (303, Some("/")), "{answer}");
        let cookie = header(&answer, "set-cookie").unwrap().split(';').next().unwrap().to_owned();
        let mut browser = Self { cookie, csrf: String::new() };
        let page = browser.ask(gate, "GET", "/", "", "").await;
        let (_, rest) = page.split_once("<meta name=\"csrf\" content=\"").unwrap();
        rest.split('"').next().unwrap().clone_into(&mut browser.csrf);
        browser
    }

    async fn ask(&self, gate: &Running, method: &str, path: &str, lines: &str, body: &str) -> String {
        let lines = format!("cookie: other=1; {}\r\n{lines}", self.cookie);
        once(gate.admin, request(method, path, &lines, body)).await
    }

    async fn change(&self, gate: &Running, path: &str, body: &str) -> String {
        let lines = format!("content-type: application/json\r\nx-tidegate-csrf: {}\r\n", self.csrf);
        self.ask(gate, "POST", path, &lines, body).await
    }
}

#[tokio::test]
async fn a_limit_is_tried_without_a_script() {
    let gate = with_tokens();
    for _ in 0..4 {
        once(gate.api, post("/v1/check", r#"{"action":"login","ip":"192.0.2.1"}"#)).await;
        gate.clock.advance(Span::from_secs(20));
    }
    let browser = Browser::sign_in(&gate, "ops-s3cret").await;
    let policy = browser.ask(&gate, "GET", "/policy", "", "").await;
    assert!(policy.contains("href=\"/try?limit=login\""), "{policy}");
    let page = browser.ask(&gate, "GET", "/try?limit=login", "", "").await;
    assert!(page.contains("<option value=\"login\" selected>") && page.contains(">1 per 60s</textarea>"), "{page}");
    let send = |terms: &str, csrf: &str| format!("csrf={csrf}&limit=login&terms={terms}");
    let origin = "origin: http://127.0.0.1\r\ncontent-type: application/x-www-form-urlencoded\r\n";
    let lines = "limit+%3D+%222+per+60s%22%0D%0Apenalty+%3D+%22none%22";
    let answer = browser.ask(&gate, "POST", "/try", origin, &send(lines, &browser.csrf)).await;
    assert!(answer.contains("login would have refused 25.0 % of requests, 1 of 1 client"), "{answer}");
    assert!(answer.contains("limit = &quot;2 per 60s&quot;\npenalty = &quot;none&quot;"), "{answer}");
    let answer = browser.ask(&gate, "POST", "/try", origin, &send("limt+%3D+%221+per+60s%22", &browser.csrf)).await;
    assert!(status(&answer) == 400 && answer.contains("did you mean `limit`?"), "{answer}");
    assert!(answer.contains("limt = &quot;1 per 60s&quot;</textarea>"), "the text stays: {answer}");
    assert_eq!(status(&browser.ask(&gate, "POST", "/try", origin, &send("1+per+60s", "")).await), 403);
    let reader = Browser::sign_in(&gate, "dash-s3cret").await;
    let page = reader.ask(&gate, "GET", "/try", "", "").await;
    assert!(status(&page) == 200 && !page.contains("<textarea"), "{page}");
    assert_eq!(status(&reader.ask(&gate, "POST", "/try", origin, &send("1+per+60s", &reader.csrf)).await), 403);
}

#[tokio::test]
async fn signing_in_sets_a_strict_cookie() {
    let gate = with_tokens();
    for path in PAGES {
        let answer = once(gate.admin, get(path)).await;
        assert_eq!((status(&answer), header(&answer, "location")), (303, Some("/sign-in")), "{path}");
    }
    let page = once(gate.admin, get("/sign-in")).await;
    assert!(status(&page) == 200 && page.contains("type=\"password\""), "{page}");
    let answer = sign_in(&gate, "ops-s3cret", "origin: http://127.0.0.1\r\n").await;
    let cookie = header(&answer, "set-cookie").unwrap();
    let (id, attributes) = cookie.strip_prefix("tidegate_session=").unwrap().split_once("; ").unwrap();
    assert!(id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{cookie}");
    assert_eq!(attributes, "Path=/; Max-Age=43200; HttpOnly; SameSite=Strict");
    let lines = "origin: https://127.0.0.1\r\n";
    assert!(header(&sign_in(&gate, "ops-s3cret", lines).await, "set-cookie").unwrap().ends_with("; Secure"));

    let browser = Browser::sign_in(&gate, "ops-s3cret").await;
    for path in PAGES {
        let page = browser.ask(&gate, "GET", path, "sec-fetch-site: same-origin\r\n", "").await;
        assert_eq!((status(&page), header(&page, "cache-control")), (200, Some("no-store")), "{path}");
        assert!(page.contains("ops") && !page.contains("s3cret"), "{page}");
        let page = browser.ask(&gate, "GET", path, "origin: http://evil.example\r\n", "").await;
        assert_eq!(status(&page), 403, "{path}");
    }
    for path in ["/v1/state", "/v1/blocks", "/v1/providers", "/v1/events?follow=false", "/metrics"] {
        assert_eq!(status(&browser.ask(&gate, "GET", path, "", "").await), 200, "{path}");
        let other = browser.ask(&gate, "GET", path, "sec-fetch-site: cross-site\r\n", "").await;
        assert_eq!(status(&other), 403, "{path}");
    }
}

#[tokio::test]
async fn links_open_pages_and_nothing_else() {
    let gate = with_tokens();
    let browser = Browser::sign_in(&gate, "ops-s3cret").await;
    let link = "sec-fetch-site: same-site\r\nsec-fetch-mode: navigate\r\nsec-fetch-dest: document\r\n";
    let framed = link.replace("document", "iframe");
    let fetched = link.replace("navigate", "cors");
    for (path, lines, expected) in [
        ("/who", link, 200),
        ("/who", &framed, 403),
        ("/who", &fetched, 403),
        ("/who", &format!("{link}origin: http://127.0.0.1:3000\r\n"), 403),
        ("/sign-in", link, 303),
        ("/v1/state", link, 403),
    ] {
        assert_eq!(status(&browser.ask(&gate, "GET", path, lines, "").await), expected, "{path} {lines}");
        let open = start(nobody(), "").await;
        assert_eq!(status(&once(open.admin, request("GET", path, lines, "")).await), expected, "open: {path} {lines}");
        let rebound = request("GET", path, lines, "").replace("127.0.0.1\r", "evil.example\r");
        assert_eq!(status(&once(open.admin, rebound).await), 421, "{path} {lines}");
    }
}

#[tokio::test]
async fn no_other_server_sees_the_sessions_cookie() {
    let upstream = Echo::start(HELLO).await;
    let key = "[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n[inbound.action.a]\nmatch = { path = \"/a\" }\n\
        key = [\"cookie:tidegate_session_8083\"]\nlimit = \"1 per 60s\"\n";
    let gate = start(upstream.address, key).await;
    for (sent, seen) in [
        ("cookie: tidegate_session_8083=secret\r\n", &[][..]),
        ("cookie: a=1; tidegate_session=secret; b=2; tidegate_session_9=secret\r\n", &["cookie: a=1; b=2"]),
        ("cookie: tidegate_session_1=secret;a=\u{e9}\r\ncookie: tidegate_session=secret\r\n", &["cookie: a=\u{e9}"]),
        ("cookie: a=tidegate_session\r\ncookie: b=1\r\n", &["cookie: a=tidegate_session", "cookie: b=1"]),
    ] {
        assert_eq!(status(&once(gate.inbound, request("GET", "/", sent, "")).await), 200, "{sent}");
        let arrived = upstream.seen().pop().unwrap();
        let cookies: Vec<&str> = arrived.lines().filter(|line| line.starts_with("cookie:")).collect();
        assert_eq!(cookies, seen, "{sent}: {arrived}");
    }
    let about = "x-forwarded-method: GET\r\nx-forwarded-uri: /a\r\nx-forwarded-for: 203.0.113.1\r\n";
    for (address, path, lines) in [(gate.inbound, "/a", ""), (gate.api, "/v1/auth", about)] {
        let ask = async |id: &str| {
            let lines = format!("{lines}cookie: tidegate_session_8083={id}\r\n");
            status(&once(address, request("GET", path, &lines, "")).await)
        };
        assert_eq!((ask("1").await, ask("2").await), (200, 429), "{path}: the cookie isn't there to count by");
    }
}

#[tokio::test]
async fn sessions_of_two_ports_are_kept_apart() {
    let (gate, other) = (with_tokens(), with_tokens());
    let sign_in = async |gate: &Running| {
        let asked = request("POST", "/sign-in", "", "token=ops-s3cret");
        let host = format!("host: 127.0.0.1:{}\r", gate.admin.port());
        let answer = once(gate.admin, asked.replace("host: 127.0.0.1\r", &host)).await;
        header(&answer, "set-cookie").unwrap().split(';').next().unwrap().to_owned()
    };
    let (cookie, of_other) = (sign_in(&gate).await, sign_in(&other).await);
    assert!(cookie.starts_with(&format!("tidegate_session_{}=", gate.admin.port())), "{cookie}");
    let both = format!("cookie: {of_other}; {cookie}\r\n");
    for gate in [&gate, &other] {
        assert_eq!(status(&once(gate.admin, request("GET", "/v1/state", &both, "")).await), 200);
    }
}

#[tokio::test]
async fn wrong_bearer_tokens_are_denied_everywhere() {
    let gate = with_tokens();
    let browser = Browser::sign_in(&gate, "ops-s3cret").await;
    let paths = PAGES.into_iter().chain(["/sign-in", "/dashboard.css", "/v1/state"]);
    let mut sent = 0;
    for (number, path) in paths.enumerate() {
        for line in ["authorization: Bearer wrong\r\n", "x-tidegate-token: wrong\r\n"] {
            let answer = once(gate.admin, request("GET", path, line, "")).await;
            // After five within a minute, further ones are told to wait.
            let denial = if sent < 5 { 401 } else { 429 };
            sent += 2;
            assert_eq!((status(&answer), header(&answer, "location")), (denial, None), "{path} {line}");
            let signed_in = status(&browser.ask(&gate, "GET", path, line, "").await);
            assert_eq!(signed_in, if sent <= 5 { 401 } else { 429 }, "{path} {line}");
        }
        let state = json(&browser.ask(&gate, "GET", "/v1/state", "", "").await);
        assert_eq!(state["rejections"]["token"], 4 * (number + 1), "{path}");
    }
    // A proxy's own login isn't a token of this listener.
    let basic = "authorization: Basic dTpw\r\n";
    assert_eq!(header(&once(gate.admin, request("GET", "/", basic, "")).await, "location"), Some("/sign-in"));
    assert_eq!(status(&browser.ask(&gate, "GET", "/", basic, "").await), 200);
}

#[tokio::test]
async fn wrong_tokens_are_counted_and_limited() {
    let gate = with_tokens();
    for token in ["", "wrong", "ops", "ops-s3cret2"] {
        let answer = sign_in(&gate, token, "").await;
        assert_eq!((status(&answer), header(&answer, "set-cookie")), (401, None), "{answer}");
    }
    for _ in 0..3 {
        assert_eq!(status(&sign_in(&gate, "ops-s3cret", "").await), 303, "the right one isn't counted");
    }
    assert_eq!(status(&sign_in(&gate, "wrong", "").await), 401);
    let refused = sign_in(&gate, "wrong", "").await;
    assert_eq!((status(&refused), header(&refused, "retry-after")), (429, Some("60")), "{refused}");
    gate.clock.advance(Span::from_secs(59));
    let refused = sign_in(&gate, "wrong", "").await;
    assert_eq!((status(&refused), header(&refused, "retry-after")), (429, Some("1")), "{refused}");
    // Others at the same address can't lock the operator out.
    let browser = Browser::sign_in(&gate, "ops-s3cret").await;
    gate.clock.advance(Span::from_secs(1));
    assert_eq!(status(&sign_in(&gate, "wrong", "").await), 401);
    let state = json(&browser.ask(&gate, "GET", "/v1/state", "", "").await);
    assert_eq!(state["rejections"]["token"], 8, "{state}");
    for lines in ["origin: http://evil.example\r\n", "origin: null\r\n", "sec-fetch-site: cross-site\r\n"] {
        assert_eq!(status(&sign_in(&gate, "ops-s3cret", lines).await), 403, "{lines}");
    }
}

#[tokio::test]
async fn changes_need_the_token_of_the_session() {
    let gate = with_tokens();
    let (browser, other) = (Browser::sign_in(&gate, "ops-s3cret").await, Browser::sign_in(&gate, "admin-s3cret").await);
    let json_type = "content-type: application/json\r\n";
    for csrf in ["", "x-tidegate-csrf: \r\n", "x-tidegate-csrf: 0\r\n", &format!("x-tidegate-csrf: {}\r\n", other.csrf)]
    {
        for path in ["/v1/reset", "/v1/block", "/v1/reload", "/v1/providers/api/pause", "/sign-out"] {
            let answer = browser.ask(&gate, "POST", path, &format!("{json_type}{csrf}"), RESET).await;
            assert_eq!(status(&answer), 403, "{path} {csrf}");
        }
    }
    let proof = format!("x-tidegate-csrf: {}\r\n", browser.csrf);
    assert_eq!(status(&browser.ask(&gate, "POST", "/v1/reset", &proof, RESET).await), 415);
    let foreign = format!("{proof}{json_type}origin: http://evil.example\r\n");
    assert_eq!(status(&browser.ask(&gate, "POST", "/v1/reset", &foreign, RESET).await), 403);
    assert_eq!(status(&browser.change(&gate, "/v1/reset", RESET).await), 200);

    let bearer = format!("{json_type}authorization: Bearer ops-s3cret\r\n");
    assert_eq!(status(&once(gate.admin, request("POST", "/v1/reset", &bearer, RESET)).await), 200);
}

#[tokio::test]
async fn a_read_only_token_sees_no_buttons() {
    let gate = with_tokens();
    for _ in 0..2 {
        once(gate.api, post("/v1/check", RESET)).await;
    }
    let (reader, writer) = (Browser::sign_in(&gate, "dash-s3cret").await, Browser::sign_in(&gate, "ops-s3cret").await);
    for path in PAGES {
        let (read, written) =
            (reader.ask(&gate, "GET", path, "", "").await, writer.ask(&gate, "GET", path, "", "").await);
        assert_eq!(read.matches("data-post=\"/v1/").count(), 0, "{path}: {read}");
        assert!(read.contains("data-post=\"/sign-out\""), "{path}");
        assert_eq!(written.contains("data-post=\"/v1/"), matches!(path, "/who" | "/policy"), "{path}: {written}");
    }
    assert!(writer.ask(&gate, "GET", "/who", "", "").await.contains(">Unblock</button>"));
    assert_eq!(status(&reader.change(&gate, "/v1/reset", RESET).await), 403);
}

#[tokio::test]
async fn sessions_end() {
    let gate = with_tokens();
    let state = async |browser: &Browser| status(&browser.ask(&gate, "GET", "/v1/state", "", "").await);
    let (first, ops) = (Browser::sign_in(&gate, "admin-s3cret").await, Browser::sign_in(&gate, "ops-s3cret").await);
    let answer = first.change(&gate, "/sign-out", "{}").await;
    assert!(header(&answer, "set-cookie").unwrap().starts_with("tidegate_session=; Path=/; Max-Age=0"), "{answer}");
    assert_eq!((state(&first).await, state(&ops).await), (401, 200));

    let second = Browser::sign_in(&gate, "admin-s3cret").await;
    FILE.clone_into(&mut gate.file.lock().unwrap());
    gate.reload.reload().await.unwrap();
    assert_eq!((state(&second).await, state(&ops).await), (200, 200));
    FILE.replace("ops = \"env:OPS\"", "ops = \"env:OTHER\"").clone_into(&mut gate.file.lock().unwrap());
    gate.reload.reload().await.unwrap();
    assert_eq!((state(&second).await, state(&ops).await), (200, 401));
    gate.clock.advance(Span::from_secs(12 * 3600));
    assert_eq!(state(&second).await, 401);
    let forged = Browser { cookie: "tidegate_session=".to_owned(), csrf: String::new() };
    assert_eq!(state(&forged).await, 401);
}

/// A stream of events that has begun, on a connection that ends with it.
async fn stream(gate: &Running, lines: &str) -> Peer {
    let mut reader = Peer::connect(gate.admin).await;
    reader.send(request("GET", "/v1/events", &format!("connection: close\r\n{lines}"), "")).await;
    assert_eq!(reader.exactly(15).await, "HTTP/1.1 200 OK", "{lines}");
    reader
}

/// True if a stream ends within this time.
async fn ends(reader: &mut Peer, within: Duration) -> bool {
    let ended = tokio::time::timeout(within, reader.all()).await;
    ended.is_ok_and(|rest| rest.ends_with("0\r\n\r\n"))
}

#[tokio::test]
async fn streams_end_with_their_token_or_session() {
    let gate = with_tokens();
    let (first, ops) = (Browser::sign_in(&gate, "admin-s3cret").await, Browser::sign_in(&gate, "ops-s3cret").await);
    let cookie = |browser: &Browser| format!("cookie: {}\r\n", browser.cookie);
    let mut of_first = stream(&gate, &cookie(&first)).await;
    let mut of_ops = [
        stream(&gate, &cookie(&ops)).await,
        stream(&gate, "authorization: Bearer ops-s3cret\r\n").await,
        stream(&gate, "x-tidegate-token: ops-s3cret\r\n").await,
    ];
    let second = Browser::sign_in(&gate, "admin-s3cret").await;
    let mut of_second = stream(&gate, &cookie(&second)).await;
    let mut bearer = stream(&gate, "authorization: Bearer admin-s3cret\r\n").await;

    assert_eq!(status(&first.change(&gate, "/sign-out", "{}").await), 303);
    assert!(ends(&mut of_first, PATIENCE).await);
    FILE.replace("ops = \"env:OPS\"", "ops = \"env:OTHER\"").clone_into(&mut gate.file.lock().unwrap());
    gate.reload.reload().await.unwrap();
    for reader in &mut of_ops {
        assert!(ends(reader, PATIENCE).await);
    }
    gate.clock.advance(Span::from_secs(12 * 3600));
    assert!(ends(&mut of_second, PATIENCE).await);
    assert!(!ends(&mut bearer, SEVERAL_LOOKS).await, "a token that stays in force keeps its stream");
}

#[tokio::test]
async fn streams_without_a_token_end_with_tokens() {
    let open = try_start(&policy(nobody(), ""), |_| Some("s3cret".to_owned())).unwrap();
    let mut reader = stream(&open, "").await;
    "[admin]\ntoken = \"file:/nowhere\"\n".clone_into(&mut open.file.lock().unwrap());
    assert!(open.reload.reload().await.is_err());
    assert!(!ends(&mut reader, SEVERAL_LOOKS).await, "a reload that fails ends nothing");
    "[admin]\ntoken = \"env:ADMIN\"\n".clone_into(&mut open.file.lock().unwrap());
    open.reload.reload().await.unwrap();
    assert!(ends(&mut reader, PATIENCE).await);
}

#[tokio::test]
async fn pages_are_small_and_ask_no_other_host() {
    let gate = start(nobody(), &FILE[..FILE.find("[admin]").unwrap()]).await;
    assert_eq!(header(&once(gate.admin, get("/sign-in")).await, "location"), Some("/"));
    let mut sizes = 0;
    let mut assets = Vec::new();
    for path in PAGES {
        let page = once(gate.admin, get(path)).await;
        let policy = header(&page, "content-security-policy").unwrap();
        for part in
            ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'"]
        {
            assert!(policy.contains(part), "{policy}");
        }
        for part in ["img-src 'self' data:", "form-action 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(part), "{policy}");
        }
        assert_eq!(header(&page, "x-content-type-options"), Some("nosniff"), "{path}");
        for inline in [" style=", "<style", " onclick=", "<script>"] {
            assert!(!page.contains(inline), "{path}: {inline}");
        }
        let links = page.split(['"', '\'']).filter(|text| text.starts_with("/dashboard."));
        assets.extend(links.map(str::to_owned));
        sizes += body(&page).len();
        assert!(!body(&page).contains("://"), "{path}");
    }
    assets.sort_unstable();
    assets.dedup();
    assert_eq!(assets.len(), 3, "{assets:?}");
    for path in &assets {
        let asset = once(gate.admin, get(path)).await;
        let (tag, text) = (header(&asset, "etag").unwrap(), body(&asset));
        assert!(status(&asset) == 200 && path.contains(tag.trim_matches('"')), "{path} {tag}");
        assert!(header(&asset, "cache-control").unwrap().contains("immutable"));
        // The name of the format, which no browser asks for.
        assert!(!text.replace("http://www.w3.org/2000/svg", "").contains("://"), "{path}");
        let known = format!("GET {path} HTTP/1.1\r\nhost: gate.test\r\nif-none-match: {tag}\r\n\r\n");
        assert_eq!(status(&once(gate.admin, known).await), 304);
        sizes += text.len();
    }
    assert!(sizes <= 150_000, "{sizes} bytes");
}

#[tokio::test]
async fn failed_reloads_are_told_at_the_top() {
    let gate = start(nobody(), "[inbound.action.login]\nlimit = \"1 per 60s\"\n").await;
    "[inbound.action.login]\nlimt = \"1 per 60s\"\n".clone_into(&mut gate.file.lock().unwrap());
    gate.reload.reload().await.unwrap_err();
    let page = once(gate.admin, get("/policy")).await;
    let places =
        ["The last reload has failed", "test.toml:2:1: expected", "id=\"actions\""].map(|part| page.find(part));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{page}");
}

#[tokio::test]
async fn pages_show_text_of_clients_as_text() {
    let gate = start(nobody(), "[inbound.action.a]\nkey = [\"key\"]\nlimit = \"1 per 60s\"\n").await;
    let mut client = Peer::connect(gate.api).await;
    for _ in 0..2 {
        client.ask(post("/v1/check", r#"{"action":"a","key":"<script>alert('1')</script>\"'&"}"#)).await;
    }
    let page = once(gate.admin, get("/who")).await;
    assert!(!page.contains("<script>") && page.contains("&lt;script&gt;alert"), "{page}");
    let row = &json(&once(gate.admin, get("/v1/blocks")).await)["clients"][0];
    let reset = format!("content-type: application/json\r\norigin: http://127.0.0.1:{}\r\n", gate.admin.port());
    let asked = request("POST", "/v1/reset", &reset, &row["reset"].to_string());
    let asked = asked.replace("host: 127.0.0.1", &format!("host: 127.0.0.1:{}", gate.admin.port()));
    assert_eq!(status(&once(gate.admin, asked).await), 200, "{row}");
    assert_eq!(json(&once(gate.api, post("/v1/check", &row["reset"].to_string())).await)["allowed"], true);
}
