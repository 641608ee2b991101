//! Every request that a real server routes to a limited handler is counted by the gate, however its path is spelled.
//!
//! A request goes through the gate to a server. The `RateLimit` header of the response says what was counted; the body
//! says where the server routed it. A server that isn't installed is skipped by name; the full run requires all of
//! them.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod upstreams;

use std::process::Command;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::random::{self, RandomSource};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, caddy, free_port, nginx};

use crate::upstreams::{LIMITED, caddy_routes, flask, go_mux, java, nginx_routes, node, python};

/// The number of spellings per server, in a usual run and in the full one.
const SPELLINGS: (u32, u32) = (1_500, 5_000);

/// At least one in this number of spellings must be routed to the limited handler. Otherwise the test shows nothing.
const SHARE: usize = 40;

/// Runs `tidegate serve` in front of a server with these quirks and patterns; returns the ports of the proxy and the
/// API.
fn gate(quirks: &str, paths: &str, upstream: u16) -> (ChildProcess, u16, u16) {
    let (port, api) = (free_port(), free_port());
    let policy = format!(
        "[inbound]\npath_quirks = {quirks}\n[api]\ndeny_status = 403\n\
         [inbound.action.static]\nmatch = {{ path = \"/static/*\" }}\nlimit = \"2000000000 per 1h\"\n\
         [inbound.action.limited]\nmatch = {{ path = {paths} }}\nlimit = \"1000000000 per 1h\"\n"
    );
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &policy);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{port}"))
        .env("TIDEGATE__INBOUND__UPSTREAM", format!("http://127.0.0.1:{upstream}"))
        .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{api}"))
        .env("TIDEGATE__ADMIN__LISTEN", "off");
    (ChildProcess::start(command, scratch, port), port, api)
}

/// Requests spellings of limited paths from the server on `port`. Each one that is routed to the limited handler must
/// have been counted.
fn assert_counted(what: &str, port: u16) {
    let seed = random::run_seed();
    let mut random = RandomSource::from_seed(seed ^ u64::from(what.len() as u32) << 32);
    let spellings = random::case_count(SPELLINGS.0, SPELLINGS.1);
    let mut client = HttpClient::connect(port).unwrap();
    let (mut routed, mut counted, mut uncounted) = (0, 0, Vec::new());
    for _ in 0..spellings {
        let spelling = spelled(&mut random);
        let answer = client.request(get_request(&spelling));
        if answer.closes_connection {
            client = HttpClient::connect(port).unwrap();
        }
        let is_routed = answer.status == 200 && answer.body.contains(LIMITED);
        // A front server with forward-auth lets its backend report it.
        let is_counted = format!("{}{}", answer.head, answer.body).contains("\"limited\";r=");
        if is_counted {
            counted += 1;
        }
        if is_routed {
            routed += 1;
            if !is_counted {
                uncounted.push(spelling);
            }
        }
    }
    println!("{what}: {routed} of {spellings} spellings routed, {counted} counted");
    assert!(
        uncounted.is_empty(),
        "{what}, seed {seed}: {} evade: {:#?}",
        uncounted.len(),
        &uncounted[..uncounted.len().min(40)]
    );
    assert!(routed > spellings as usize / SHARE, "{what}: only {routed} of {spellings} were routed");
}

/// A spelling of a limited path, or of a similar path.
fn spelled(random: &mut RandomSource) -> String {
    const PIECES: [&str; 38] = [
        "/",
        "/",
        "//",
        "/.",
        "/..",
        "/../",
        "/x/../",
        "%2f",
        "%2F",
        "%5c",
        "\\",
        "%252f",
        "%2e",
        "%2e%2e",
        "%252e%252e",
        ";",
        ";v=1",
        "%3b",
        "..;",
        "login",
        "login",
        "api",
        "api/",
        "LOGIN",
        "l%6fgin",
        "static",
        "x",
        ".",
        "%20",
        "#",
        "?",
        "%23",
        "%3f",
        "%25",
        "%0a",
        "%253b",
        "%u002f",
        ";%2f",
    ];
    const INSIDE: [&str; 32] = [
        "/",
        "/.",
        "/..",
        "/x/..",
        "//..",
        "/y//..",
        "/%2e",
        "/%2e%2e",
        "/x/%2e%2e",
        "/x/%252e%252e",
        "/.%2e",
        "%2f..",
        "%2f",
        "%5c..",
        "\\..",
        "\\x\\..",
        ";v=1",
        ";",
        "/;x",
        "/..;",
        "/x/..;/",
        "/static/..",
        "/static%2fx/..",
        "/a%2fb/..",
        ";%2fx",
        ";%2f..",
        ";%5cx",
        "%3bx",
        "%3b%2fx",
        "/..%3b",
        "/%u002e",
        "/x/%u002e%u002e",
    ];
    const BEHIND: [&str; 36] = [
        ".", "..", "%20", "%2e", "%20.", "/", "/.", "/..", "//..", "/x/..", "/x%2f..", ";x", ";x/..", "/;/..", "%3b",
        "%3fx", "%253fx", "?q=/x", "#f", "#/../x", "%23f", "/x", "x", "%2f", "%00", "%5c", "%0a", "%0d%0a", "%0a;x",
        ";x%0a", "%3bx", "%253bx", ";/x", ";%2fx", "%3b/x", "%u003bx",
    ];
    const BEFORE: [&str; 20] = [
        "//host",
        "/\\host",
        "\\/host",
        "///host",
        "/static/..",
        "/static%2f..",
        "/static/%2e%2e",
        "/x/..",
        "/x#/..",
        "/.",
        "/",
        "/%2e%2e",
        "/..",
        "/%2f",
        "/;x",
        "/static/..%2f",
        "/x;%2fa/..",
        "/static%2f..;%2fx",
        "/x/..%3b",
        "/%u002e",
    ];
    if random.chance(25) {
        let count = random.between(1, 7);
        let pieces: String = (0..count).map(|_| random.pick(&PIECES)).collect();
        return format!("/{pieces}");
    }
    let mut path = random.pick(&["/login", "/login", "/api/x", "/api/users/1", "/api/"]).to_owned();
    for _ in 0..random.between(1, 4) {
        // The places where a character begins.
        let places: Vec<usize> = path.char_indices().map(|(at, _)| at).collect();
        let at = random.pick(&places);
        let letter = path[at..].chars().next().unwrap();
        let end = at + letter.len_utf8();
        let slashes: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
        match random.below(11) {
            0 => path.insert_str(0, random.pick(&BEFORE)),
            1 | 2 => path.push_str(random.pick(&BEHIND)),
            3 | 4 if !slashes.is_empty() => path.insert_str(random.pick(&slashes), random.pick(&INSIDE)),
            5 if !slashes.is_empty() => {
                let at = random.pick(&slashes);
                path.replace_range(at..=at, random.pick(&["%2f", "%2F", "%252f", "\\", "%5c", "//", "/./"]));
            }
            6 if letter.is_ascii_alphabetic() => {
                let other =
                    if letter.is_ascii_lowercase() { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() };
                let dotted = if letter == 'i' { random.pick(&["İ", "%C4%B0", "I"]) } else { "" };
                path.replace_range(
                    at..end,
                    if dotted.is_empty() { other.to_string() } else { dotted.to_owned() }.as_str(),
                );
            }
            7 => path.replace_range(at..end, &escaped(letter, "%25")),
            8 => path.replace_range(at..end, &format!("%u{:04x}", u32::from(letter))),
            _ => path.replace_range(at..end, &escaped(letter, "%")),
        }
    }
    path
}

fn escaped(letter: char, sign: &str) -> String {
    let mut bytes = [0; 4];
    letter.encode_utf8(&mut bytes).bytes().map(|byte| format!("{sign}{byte:02x}")).collect()
}

/// The settings for most servers: the default quirk, and patterns that mean the same as their routes.
const QUIRKS: &str = "[\"encoded_slash\"]";
const JAVA: &str = "[\"encoded_slash\", \"parameters\"]";
const PATHS: &str = "[\"/login\", \"/api/*\"]";

/// Starts a server with `start` on a port, and checks it behind a gate.
fn assert_counted_before<S>(what: &str, (quirks, paths): (&str, &str), start: impl FnOnce(u16) -> Option<S>) {
    let upstream = free_port();
    let Some(_server) = start(upstream) else { return };
    let (_gate, port, _) = gate(quirks, paths, upstream);
    assert_counted(what, port);
}

#[test]
fn paths_routed_by_nginx_are_counted() {
    assert_counted_before("nginx", (QUIRKS, PATHS), |port| nginx(&nginx_routes(port, ""), port));
}

#[test]
fn paths_of_nginx_without_slash_merging_are_counted() {
    let routes = |port| nginx_routes(port, "merge_slashes off;");
    assert_counted_before("nginx, merge_slashes off", (QUIRKS, PATHS), |port| nginx(&routes(port), port));
}

/// PCRE's `$` matches before a line feed at the end.
#[test]
fn paths_routed_by_nginx_regexes_are_counted() {
    let routes = |port| {
        nginx_routes(port, "").replace("= /login {", "~ ^/login$ {").replace("location /api/", "location ~ ^/api/")
    };
    assert_counted_before("nginx, regular expressions", (QUIRKS, PATHS), |port| nginx(&routes(port), port));
}

/// A `proxy_pass` with a URI forwards the path that nginx has decoded, with `%3b` as `;`.
#[test]
fn parameter_stripped_paths_behind_nginx_are_counted() {
    assert_counted_before("nginx with a URI before a server that cuts parameters", (JAVA, PATHS), |port| {
        let behind = free_port();
        let upstream = node(upstreams::CUT_AND_DECODED, behind)?;
        let routes = format!(
            "server {{\n  listen 127.0.0.1:{port};\n  keepalive_requests 100000000;\n  \
             location / {{ proxy_pass http://127.0.0.1:{behind}/; }}\n}}\n"
        );
        Some((nginx(&routes, port)?, upstream))
    });
}

#[test]
fn paths_routed_by_caddy_are_counted() {
    let site = |port| format!("http://:{port} {{\n\tbind 127.0.0.1\n{}\n}}\n", caddy_routes(LIMITED));
    assert_counted_before("Caddy", ("[\"caddy\"]", PATHS), |port| caddy(&site(port), port));
}

#[test]
fn paths_routed_by_raw_prefix_are_counted() {
    assert_counted_before("Node, req.url", (QUIRKS, PATHS), |port| node(upstreams::RAW_PREFIX, port));
}

#[test]
fn paths_routed_by_node_url_are_counted() {
    assert_counted_before("Node, new URL()", (QUIRKS, PATHS), |port| node(upstreams::NEW_URL, port));
}

/// Jetty and Tomcat do the same.
#[test]
fn paths_stripped_of_parameters_before_decoding_are_counted() {
    assert_counted_before("Node, parameters cut", (JAVA, PATHS), |port| node(upstreams::CUT_AND_DECODED, port));
}

#[test]
fn paths_cut_at_a_semicolon_are_counted() {
    assert_counted_before("Node, as Fastify 4 ends paths", (QUIRKS, PATHS), |port| {
        node(upstreams::UP_TO_SEMICOLON, port)
    });
}

#[test]
fn paths_routed_by_python_urlparse_are_counted() {
    assert_counted_before("Python, unquote(urlparse())", (JAVA, PATHS), python);
}

#[test]
fn paths_routed_by_flask_are_counted() {
    assert_counted_before("Flask", (QUIRKS, PATHS), flask);
}

/// A prefix router: `/login` also matches `/loginx` and `/login/x`.
#[test]
fn paths_routed_by_javas_httpserver_are_counted() {
    assert_counted_before("com.sun.net.httpserver", (QUIRKS, "[\"/login*\", \"/api/*\"]"), java);
}

#[test]
fn paths_routed_by_go_mux_are_counted() {
    assert_counted_before("Go, net/http", (QUIRKS, PATHS), go_mux);
}

/// Caddy with the guide's snippet and policy. Caddy itself routes the requests.
#[test]
fn paths_routed_by_caddy_forward_auth_are_counted() {
    let front = free_port();
    let (_gate, _, api) = gate("[\"caddy\"]", PATHS, free_port());
    // The name of the counted limit goes to the backend, which puts it into its body.
    let told = format!("{LIMITED} {{http.request.header.RateLimit}}");
    let snippet = include_str!("../../../../docs/snippets/Caddyfile")
        .replace("127.0.0.1:8082", &format!("127.0.0.1:{api}"))
        .replace("http://:8000", &format!("http://:{front}"))
        .replace("uri /v1/auth?", "uri /v1/auth?\n\t\tcopy_headers RateLimit")
        .replace(
            "reverse_proxy 127.0.0.1:3000 {\n\t\t# A reservation is for the gate.\n\t\theader_up -Tidegate-Reservation\n\t}",
            &caddy_routes(&told),
        );
    let Some(_caddy) = caddy(&snippet, front) else { return };
    assert_counted("Caddy with the snippet", front);
}

/// nginx with the guide's snippet and policy. nginx itself routes the requests.
#[test]
fn paths_routed_by_nginx_forward_auth_are_counted() {
    let (front, backend) = (free_port(), free_port());
    let (_gate, _, api) = gate(QUIRKS, PATHS, free_port());
    let snippet = include_str!("../../../../docs/snippets/nginx.conf")
        .replace("127.0.0.1:8082", &format!("127.0.0.1:{api}"))
        .replace("127.0.0.1:8000", &format!("127.0.0.1:{front}"));
    let (before, rest) = snippet.split_once("    location / {").unwrap();
    let (location, after) = rest.split_once("\n    }\n").unwrap();
    let routed = [("= /login", "/login"), ("/api/", "/login"), ("/", "/elsewhere")].map(|(place, page)| {
        let location = location.replace("http://127.0.0.1:3000;", &format!("http://127.0.0.1:{backend}{page};"));
        format!("    location {place} {{{location}\n    }}\n")
    });
    let config = format!("{before}{}{after}\n{}", routed.concat(), nginx_routes(backend, ""));
    let Some(_nginx) = nginx(&config, front) else { return };
    assert_counted("nginx with the snippet", front);
}
