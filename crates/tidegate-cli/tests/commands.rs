//! The output and the exit status of the commands.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

const POLICY: &str = r#"
[inbound.global]
limit = "1000 per 1h"

[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }

[inbound.action.otp]
key = ["key", "platform"]
limit = "1 per 120s"
"#;

fn tidegate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TIDEGATE")) {
        command.env_remove(name);
    }
    command.args(arguments).output().unwrap()
}

/// The status, standard output and standard error of a command.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = tidegate(arguments);
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn check_describes_the_inbound_limits() {
    let scratch = ScratchDir::new();
    let file = scratch.write("good.toml", POLICY);
    let (status, out, err) = run(&["check", file.to_str().unwrap()]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.starts_with(&format!("{}: good\n\nevery call, over all actions\n", file.display())), "{out}");
    assert!(out.contains("  at most 1000 in any 1 h (by client_ip)\n"), "{out}");
    assert!(out.contains("login: POST /login\n  at most 9 in any 60 s (5, and one after each block); over that, blocks of 2 s, 4 s … 1 h"), "{out}");
    assert!(out.contains("otp: by name, through the decision API\n"), "{out}");
    assert!(out.contains("(by key + platform)\n"), "{out}");
}

#[test]
fn check_notes_secrets_that_serve_lacks() {
    let scratch = ScratchDir::new();
    let text = "[admin]\ntokens = { ops = \"env:OPS_TOKEN\" }\n[api]\ntoken = \"file:/nowhere/token\"\n\
        [alert.night]\non = \"store_lost\"\nwebhook = \"env:NIGHT\"\n";
    let file = scratch.write("secrets.toml", text);
    let check = |arguments: &[&str], token: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("check").arg(&file).args(arguments).env("NIGHT", "https://hooks.example.com/x");
        let output = command.env("OPS_TOKEN", token).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let notes =
        |out: &str| out.lines().filter(|line| line.starts_with("note: ")).map(str::to_owned).collect::<Vec<_>>();
    let found = notes(&check(&[], " "));
    assert!(found.len() == 2 && found.iter().all(|note| note.contains("`tidegate serve` wouldn't start")), "{found:?}");
    assert!(found[0].starts_with("note: api.token: the secret file /nowhere/token can't be read"), "{found:?}");
    assert!(found[1].starts_with("note: admin.tokens.ops: the secret from env:OPS_TOKEN is empty"), "{found:?}");
    assert_eq!(notes(&check(&[], "s3cret")).len(), 1);
    assert!(notes(&check(&["--no-env"], " ")).is_empty());
}

#[test]
fn check_notes_listeners_that_serve_no_client_of_a_load_balancer() {
    let scratch = ScratchDir::new();
    let check = |text: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.arg("check").arg("--no-env").arg(scratch.write("proxied.toml", text)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let out = check("[admin]\nproxy_protocol = \"127.0.0.1\"\n");
    assert!(
        out.contains("note: ") && out.contains("without `admin.token`, only clients on this machine are served"),
        "{out}"
    );
    for fine in [
        "[admin]\nproxy_protocol = \"127.0.0.1\"\ntoken = \"env:A\"\n",
        "[admin]\nproxy_protocol = \"127.0.0.1\"\ntokens = { ops = \"env:A\" }\n",
        "[admin]\nproxy_protocol = \"127.0.0.1\"\nlisten = \"off\"\n",
        "[inbound]\nproxy_protocol = \"127.0.0.1\"\n",
    ] {
        assert!(!check(fine).contains("only clients on this machine"), "{fine}");
    }
}

#[test]
fn check_ignores_secrets_that_serve_does_not_read() {
    let scratch = ScratchDir::new();
    let providers = "limit = \"9 per 1h\"\nauth = \"bearer\"\ncredentials = \"env:UNSET_A\"\n\
        [outbound.provider.b]\nbase_url = \"http://b\"\nauth = \"bearer\"\ncredentials = \"env:UNSET_B\"\n";
    let check = |listen: &str, hash_key: &str| {
        let text = format!(
            "[store]\nhash_key = \"env:HASH_KEY\"\n[outbound]\nlisten = \"{listen}\"\n[outbound.provider.a]\n{providers}"
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("check").arg(scratch.write("secrets.toml", &text)).env("HASH_KEY", hash_key);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let out = check("127.0.0.1:8090", "0123456789abcdef");
    assert!(out.contains("note: outbound.provider.b.credentials: "), "{out}");
    assert_eq!(out.matches("wouldn't start").count(), 1, "{out}");
    let out = check("off", "0123456789abcde");
    assert!(out.contains("note: store.hash_key: the secret is shorter than 16 bytes, so"), "{out}");
    assert_eq!(out.matches("wouldn't start").count(), 1, "{out}");
}

#[test]
fn health_needs_no_policy_and_no_token() {
    let scratch = ScratchDir::new();
    let broken = scratch.write("broken.toml", "[inbound\n");
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let (status, _, err) = run(&["health", "--url", &url, "-c", broken.to_str().unwrap()]);
    assert!(status == 1 && err.starts_with(&format!("error: no gate answers at {url}")), "{err}");
    let text = format!("[admin]\nlisten = \"127.0.0.1:{port}\"\ntoken = \"file:/nowhere/token\"\n");
    let without_token = scratch.write("token.toml", &text);
    let (status, _, err) = run(&["health", "-c", without_token.to_str().unwrap()]);
    assert!(status == 1 && err.starts_with(&format!("error: no gate answers at {url}")), "{err}");
    assert_eq!(run(&["health", "-c", broken.to_str().unwrap()]).0, 2);
    let proxied = format!("[admin]\nlisten = \"127.0.0.1:{port}\"\nproxy_protocol = \"127.0.0.0/8\"\n");
    let (status, _, err) = run(&["health", "-c", scratch.write("proxied.toml", &proxied).to_str().unwrap()]);
    assert!(status == 2 && err.contains("admin.proxy_protocol") && err.contains("leave 127.0.0.1 out of it"), "{err}");
}

#[test]
fn a_broken_policy_is_no_obstacle_with_a_url() {
    let scratch = ScratchDir::new();
    let file = scratch.write("broken.toml", "[inbound\n");
    for command in
        [&["status", "login"][..], &["reset", "login"], &["block", "login", "--for", "1m"], &["reload"], &["events"]]
    {
        let (status, _, err) = run(&[command, &["-c", file.to_str().unwrap()]].concat());
        assert!(status == 2 && err.contains("broken.toml:1:") && err.contains("--url http://HOST:PORT"), "{err}");
    }
}

#[test]
fn check_names_the_forward_auth_path_of_actions() {
    let scratch = ScratchDir::new();
    let file = scratch.write("named.toml", "[inbound.action.export]\nlimit = \"5 per 60s\"\n");
    let (_, out, _) = run(&["check", file.to_str().unwrap()]);
    assert!(out.contains("export: by name, through the decision API or /v1/auth?action=export\n"), "{out}");
}

#[test]
fn check_notes_a_wildcard_of_regular_expressions() {
    let scratch = ScratchDir::new();
    let file = scratch.write("dots.toml", "[inbound.action.a]\nmatch = { path = \"/api/.*\" }\nlimit = \"9/s\"\n");
    let (status, out, _) = run(&["check", file.to_str().unwrap()]);
    assert!(status == 0 && out.contains("dots.toml:2:18: \"/api/.*\" matches names that begin with a dot"), "{out}");
}

#[test]
fn check_describes_requests_without_a_key_part() {
    let scratch = ScratchDir::new();
    for (missing, words) in [
        ("", "are counted by their address"),
        ("missing = \"share\"\n", "share one count"),
        ("missing = \"refuse\"\n", "are refused with 400"),
        ("missing = \"skip\"\n", "don't meet it"),
    ] {
        let policy = format!(
            "[inbound.action.a]\nkey = [\"header:x-api-key\", \"query:token\"]\nlimit = \"5 per 60s\"\n{missing}"
        );
        let file = scratch.write("tidegate.toml", &policy);
        let (status, out, _) = run(&["check", file.to_str().unwrap()]);
        let expected = format!("    requests without header:x-api-key or query:token {words}\n");
        assert!(status == 0 && out.contains(&expected), "{out}");
    }
}

#[test]
fn only_own_non_utf8_variables_are_check_errors() {
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", POLICY);
    let check = |name: &str| {
        let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let checked = check.arg("check").arg(&file).env(name, OsStr::from_bytes(b"15\xff")).output().unwrap();
        (checked.status.code().unwrap(), String::from_utf8(checked.stderr).unwrap())
    };
    let (status, told) = check("TIDEGATE__INBOUND__TIMEOUTS__HEADER");
    assert_eq!(status, 2, "{told}");
    assert!(told.contains("TIDEGATE__INBOUND__TIMEOUTS__HEADER") && told.contains("15\u{fffd}"), "{told}");
    assert_eq!(check("SOMEBODY_ELSES"), (0, String::new()));
}

#[test]
fn check_tells_what_becomes_of_abandoned_calls() {
    let scratch = ScratchDir::new();
    for (inbound, told) in
        [("", "while the upstream likely works on it"), ("on_disconnect = \"finish\"\n", "is finished")]
    {
        let text = format!(
            "[inbound]\nupstream = \"http://127.0.0.1:3000\"\n{inbound}[inbound.action.export]\n\
             match = {{ path = \"/export\" }}\nlimit = \"2 in flight\"\n"
        );
        let (_, out, _) = run(&["check", scratch.write("tidegate.toml", &text).to_str().unwrap()]);
        assert!(out.contains("a call in flight whose client goes away") && out.contains(told), "{out}");
    }
}

#[test]
fn check_and_serve_report_disabled_forward_auth() {
    let scratch = ScratchDir::new();
    let in_flight = "[inbound.action.export]\nmatch = { path = \"/export\" }\nlimit = \"2 in flight\"\n";
    let file = scratch.write("tidegate.toml", &format!("{POLICY}{in_flight}"));
    let (status, out, err) = run(&["check", file.to_str().unwrap()]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.contains("otp: by name, through the decision API\n"), "{out}");
    assert!(out.ends_with("\nforward-auth is off: it can't keep a limit on calls in flight\n"), "{out}");
    let (api, admin) = (free_port(), free_port());
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve
        .arg("serve")
        .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{api}"))
        .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{admin}"));
    let gate = ChildProcess::start(serve, scratch, admin);
    // A listener that answers was opened after the greeting.
    assert_eq!(run(&["status", "login", "--ip", "::1", "--url", &format!("http://127.0.0.1:{api}")]).0, 0);
    let greeting = gate.read_file("stdout");
    assert!(greeting.contains(&format!("  API      http://127.0.0.1:{api} (/v1/check)\n")), "{greeting}");
}

#[test]
fn check_describes_the_outbound_providers() {
    let scratch = ScratchDir::new();
    let file = scratch.write(
        "calls.toml",
        "[outbound.provider.tmdb]\npreset = \"tmdb\"\n[outbound.provider.plain]\nbase_url = \"http://api.example.com\"\n",
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("check").arg(&file).args(["--env-prefix", "APP"]);
    let output = command.env("APP_TOKEN", "hunter2,hunter3").env("APP_API_MAX_RETRIES", "1").output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!((output.status.code(), err.as_str()), (Some(0), ""));
    for expected in [
        "good\n\ncalls to other people's APIs\ntmdb: https://api.themoviedb.org/3 (preset tmdb)\n",
        "  at most 40 in any 10 s (each credential)\n",
        "  user: 10 s a call, 1 retry, up to 1024 waiting\n",
        "  credentials env:APP_TOKEN[1], env:APP_TOKEN[2] in turn, as Authorization: Bearer; each cools down for 1 s, 2 s … 32 s",
        "plain: http://api.example.com; warning: http sends everything in the clear, credentials included\n  unlimited\n",
    ] {
        assert!(out.contains(expected), "{expected}\n{out}");
    }
    assert!(!out.contains("hunter"), "{out}");
    let (status, _, err) = run(&["check", file.to_str().unwrap()]);
    assert_eq!(status, 2);
    assert!(err.contains("the provider `tmdb` wants a credential"), "{err}");
    assert_eq!(run(&["check", file.to_str().unwrap(), "--no-env", "--env-prefix", "APP"]).0, 2);
}

#[test]
fn check_shows_the_position_of_mistakes() {
    let scratch = ScratchDir::new();
    let file = scratch.write("bad.toml", "[inbound.action.login]\nlimt = \"5 per 60s\"\n");
    let (status, out, err) = run(&["check", file.to_str().unwrap()]);
    assert_eq!((status, out.as_str()), (2, ""));
    assert!(err.contains("limt") && err.contains("limit") && err.contains(":2:1"), "{err}");
    let (status, _, err) = run(&["check", "/nowhere/at/all.toml"]);
    assert_eq!(status, 1);
    assert!(err.contains("can't read /nowhere/at/all.toml"), "{err}");
    let (status, _, err) = run(&["serve", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 2, "nothing starts half-configured");
    assert!(err.contains("limt"), "{err}");
}

#[test]
fn serve_takes_its_file_as_check_does() {
    let scratch = ScratchDir::new();
    let bad = scratch.write("bad.toml", "[inbound.action.login]\nlimt = \"5 per 60s\"\n");
    let (bad, other) = (bad.to_str().unwrap(), scratch.write("other.toml", POLICY));
    for command in ["serve", "check"] {
        for file in [&[bad][..], &["-c", bad], &[bad, "-c", bad]] {
            let (status, _, err) = run(&[&[command], file].concat());
            assert!(status == 2 && err.contains("bad.toml:2:1"), "{file:?} {err}");
        }
        let (status, out, err) = run(&[command, bad, "--config", other.to_str().unwrap()]);
        assert_eq!((status, out.as_str()), (2, ""));
        let expected = format!("error: there are two policy files, {bad} and --config {}; name one\n", other.display());
        assert_eq!(err, expected);
    }
}

#[test]
fn check_reads_what_serve_would_read() {
    let scratch = ScratchDir::new();
    let check = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("check").args(arguments).current_dir(scratch.path());
        let Output { status, stdout, .. } =
            command.env("TIDEGATE__INBOUND__GLOBAL__LIMIT", "77 per 1h").output().unwrap();
        (status.code(), String::from_utf8(stdout).unwrap())
    };
    let (status, out) = check(&[]);
    assert_eq!((status, out.lines().next()), (Some(0), Some("the built-in default policy: good")));
    assert!(out.contains("(77, and"), "{out}");
    scratch.write("tidegate.toml", POLICY);
    let (status, out) = check(&[]);
    assert_eq!((status, out.lines().next()), (Some(0), Some("tidegate.toml: good")));
    assert!(out.contains("at most 77 ") && !check(&["--no-env"]).1.contains("at most 77 "), "{out}");
    scratch.write("tidegate.toml", "[inbound.action.login]\nlimt = \"5 per 60s\"\n");
    assert_eq!(check(&[]).0, Some(2));
}

#[test]
fn env_prints_an_env_file() {
    let (status, out, _) = run(&["env"]);
    assert_eq!(status, 0);
    assert!(out.contains("TIDEGATE__INBOUND__LISTEN=127.0.0.1:8080\n"), "{out}");
}

#[test]
fn classify_names_the_rule_that_decides() {
    let scratch = ScratchDir::new();
    let policy = scratch.write(
        "shop.toml",
        "[outbound.provider.shop]\nbase_url = \"https://shop.test\"\nlimit = \"9 per 1s\"\n\
         [[outbound.provider.shop.rule]]\nwhen = { status = 403, json = { \"/code\" = \"slow\" } }\nis = \"throttled\"\n\
         wait = \"90s\"\nscope = [\"orders\"]\n",
    );
    let body = scratch.write("reply.json", "{\"code\":\"slow\"}");
    let (policy, body) = (policy.to_str().unwrap(), body.to_str().unwrap());
    let asked = ["classify", policy, "--provider", "shop", "--status", "403", "--method", "POST"];
    let (status, out, err) = run(&[&asked[..], &["--body", body]].concat());
    assert_eq!((status, err.as_str()), (0, ""));
    let lines: Vec<&str> = out.lines().collect();
    let rule =
        "rule    rule 1 of the policy: 403 with /code \"slow\" is throttled; it waits 90 s; for the scope orders";
    assert_eq!(lines[..2], ["class   throttled", rule], "{out}");
    assert!(lines[2].starts_with("wait    90 s, until "), "{out}");
    assert_eq!(lines[3..], ["scope   orders, for calls of this route", "repeat  yes, also with POST"], "{out}");

    let plain = |arguments: &[&str]| run(&[&["classify", "--status"], arguments].concat()).1;
    let rule = "rule    none: the status and the usual headers\n";
    let nothing = "wait    none\nscope   none\nrepeat  no\n";
    assert_eq!(plain(&["404"]), format!("class   permanent\n{rule}{nothing}"));
    assert!(plain(&["503", "--method", "POST"]).ends_with("repeat  no: POST may have been carried out\n"));
    let with_key = plain(&["503", "--method", "POST", "--request-header", "Idempotency-Key: 1"]);
    assert!(with_key.ends_with("repeat  yes\n"), "{with_key}");
    assert!(
        plain(&["404", "--body", body])
            .ends_with("body    not read: no rule asks for it, by this status and these headers\n")
    );

    for (arguments, part) in [
        (&["--status", "4299"][..], "from 100 to 599"),
        (&["--status", "429", "--header", "x"], "NAME: VALUE"),
        (&["--status", "429", "--path", "x"], "a path"),
        (&["--status", "429", policy, "--provider", "shpo"], "did you mean \"shop\"?"),
        (&["--status", "429", "--body", "/nowhere/reply"], "/nowhere/reply"),
    ] {
        let (status, out, err) = run(&[&["classify"], arguments].concat());
        assert!(status != 0 && out.is_empty() && err.contains(part), "{arguments:?}: {status} {err}");
    }
}

#[test]
fn wrong_arguments_exit_with_status_two() {
    for arguments in [&["surf"][..], &["status"], &["serve", "--port", "1"]] {
        assert_eq!(run(arguments).0, 2, "{arguments:?}");
    }
    let (status, _, err) = run(&["status", "login", "--url", "ftp://x"]);
    assert_eq!(status, 2);
    assert!(err.contains("http://HOST:PORT"), "{err}");
    let (status, _, err) = run(&["status", "login", "--token-env", "NOBODY_SET_THIS"]);
    assert_eq!(status, 2);
    assert!(err.contains("NOBODY_SET_THIS"), "{err}");
}

#[test]
fn an_unreachable_gate_is_reported() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let (status, _, err) = run(&["status", "login", "--url", &url]);
    assert_eq!(status, 1);
    assert!(err.contains(&format!("no gate answers at {url}")) && err.contains("tidegate serve"), "{err}");
}

#[test]
fn commands_query_a_running_gate() {
    let scratch = ScratchDir::new();
    let by_header = "[inbound.action.byip]\nkey = [\"header:x-api-key\"]\nlimit = \"5 per 60s\"\n";
    let file = scratch.write("tidegate.toml", &format!("{POLICY}\n{by_header}"));
    let (api, admin) = (free_port(), free_port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{api}"))
        .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{admin}"))
        .env("TIDEGATE__API__TOKEN", "env:API_TOKEN")
        .env("API_TOKEN", "s3cret");
    let gate = ChildProcess::start(command, scratch, admin);
    let url = format!("http://127.0.0.1:{api}");
    let ask = |arguments: &[&str]| {
        let more = ["--url", &url, "--token-env", "API_TOKEN"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.args(arguments).args(more).env("API_TOKEN", "s3cret").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    };
    let login = ["login", "--ip", "203.0.113.7"];
    assert_eq!(
        ask(&[&["status"][..], &login].concat()),
        (0, "would be admitted: 5 of 5 left under login\n".to_owned())
    );
    let (status, text) = ask(&["status", "login", "--ip", "203.0.113.7", "--cost", "6"]);
    assert_eq!((status, text.as_str()), (3, "would be refused: 5 of 5 left under login; no waiting helps\n"));
    let (status, text) = ask(&["status", "login", "--ip", "203.0.113.7", "--json"]);
    assert_eq!(status, 0);
    assert!(text.starts_with("{\"allowed\":true,") && text.ends_with("}\n"), "{text}");

    let (status, text) = ask(&[&["explain"][..], &login].concat());
    assert_eq!(status, 0);
    assert!(text.starts_with("login: would be admitted: 5 of 5 left under login\n\nlogin (action limit)\n"), "{text}");
    assert!(text.contains("  counts by client_ip\n  used      0 of 5, 5 left\n  free      now;"), "{text}");
    assert!(text.contains("\nglobal (global limit)\n"), "{text}");
    let (_, by_path) = ask(&["explain", "--method", "POST", "--path", "/login?a=b&c", "--ip", "203.0.113.7"]);
    assert_eq!(by_path, text);

    let unknown = "login: nothing was counted for this client\n";
    assert_eq!(ask(&[&["reset"][..], &login].concat()), (0, unknown.to_owned()));
    let (status, text) = ask(&["reset", "--ip", "203.0.113.7"]);
    assert_eq!(status, 0);
    assert!(text.starts_with("all actions: nothing was counted for this client\nnot reset, because"), "{text}");
    assert!(!gate.read_file("stderr").contains("admin: changed"), "a URL can name the decision API");
    let admin = format!("http://127.0.0.1:{admin}");
    let (status, _, err) = run(&["status", "login", "--url", &admin]);
    assert!(status == 2 && err.contains("/v1/status is a path of the decision API (api.listen)"), "{err}");
    let (status, text) = ask(&["blocks"]);
    assert!(status == 2 && text.contains("/v1/blocks is a path of the admin listener (admin.listen)"), "{text}");
    let (status, text) = ask(&["status", "otp", "--key", "a b&c=ü", "--ip", "::1"]);
    assert_eq!(status, 2);
    assert!(text.contains("`platform` is missing"), "{text}");
    let (status, text) = ask(&["status", "byip", "--ip", "::1"]);
    assert_eq!(status, 2);
    assert!(
        text.contains("`header:x-api-key` is missing") && text.contains("--header x-api-key=VALUE gives it"),
        "{text}"
    );
    let (status, text) = ask(&["status", "byip", "--ip", "::1", "--header", "accept=*/*"]);
    assert_eq!((status, text.as_str()), (0, "would be admitted: 5 of 5 left under byip\n"));
    let (status, text) = ask(&["status", "logn", "--ip", "::1"]);
    assert_eq!(status, 2);
    assert!(text.contains("did you mean \"login\"?"), "{text}");
    let (status, _, err) = run(&["status", "login", "--url", &url]);
    assert_eq!(status, 2);
    assert!(err.contains("a bearer token is needed") && err.contains("--token-env NAME"), "{err}");
}

#[test]
fn commands_find_gate_and_token_in_the_policy() {
    let scratch = ScratchDir::new();
    let (api, admin) = (free_port(), free_port());
    let listeners = format!(
        "[api]\nlisten = \"0.0.0.0:{api}\"\ntoken = \"env:API_TOKEN\"\n[admin]\nlisten = \"127.0.0.1:{admin}\"\n"
    );
    let file = scratch.write("tidegate.toml", &format!("{POLICY}{listeners}"));
    let folder = scratch.path().to_owned();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve.args(["serve", "-c"]).arg(&file).env("API_TOKEN", "s3cret");
    let _gate = ChildProcess::start(serve, scratch, admin);
    let ask = |arguments: &[&str], token: &str, config: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).args(config).env("API_TOKEN", token).env("OTHER", "s3cret").current_dir(&folder);
        let Output { status, stdout, stderr } = command.output().unwrap();
        (status.code().unwrap(), String::from_utf8([stdout, stderr].concat()).unwrap())
    };
    let login = ["login", "--ip", "203.0.113.7"];
    let named = file.to_str().unwrap();
    // The policy is named, or found in the current directory.
    for config in [&["-c", named][..], &["--config", named], &[]] {
        assert_eq!(ask(&[&["status"][..], &login].concat(), "s3cret", config).0, 0, "{config:?}");
        assert_eq!(ask(&[&["explain"][..], &login].concat(), "s3cret", config).0, 0, "{config:?}");
        assert_eq!(ask(&[&["reset"][..], &login].concat(), "s3cret", config).0, 0, "{config:?}");
    }
    // The command line overrides the policy. With a URL alone, no policy is read.
    let status = [&["status"][..], &login].concat();
    assert_eq!(ask(&status, "wrong", &["--token-env", "OTHER"]).0, 0);
    let url = format!("http://127.0.0.1:{api}");
    assert_eq!(ask(&status, "s3cret", &["--url", &url, "-c", named]).0, 0);
    assert_eq!(ask(&status, "s3cret", &["--url", &url]).0, 2);
    let (code, text) = ask(&status, "", &[]);
    assert!(code == 2 && text.starts_with("error: api.token: ") && text.contains("API_TOKEN"), "{text}");
    let other = folder.join("other.toml");
    for (policy, says) in [("[api]\nlisten = \"off\"\n", "API off"), ("[api]\nlistn = 1\n", "other.toml:2:1")] {
        std::fs::write(&other, policy).unwrap();
        let (code, text) = ask(&status, "s3cret", &["-c", other.to_str().unwrap()]);
        assert!(code == 2 && text.contains(says), "{text}");
    }
}

#[test]
fn a_non_utf8_policy_is_reported_with_position() {
    let scratch = ScratchDir::new();
    let file = scratch.path().join("latin1.toml");
    std::fs::write(&file, b"# Gr\xfc\xdfe\n").unwrap();
    let (status, _, err) = run(&["check", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 2);
    assert!(err.contains("latin1.toml:1:5\n"), "{err}");
}

#[test]
fn foreign_non_utf8_variables_are_ignored() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let scratch = ScratchDir::new();
    let file = scratch.write("good.toml", POLICY);
    let garbled = OsStr::from_bytes(b"12\xff");
    let check = |name: &[u8]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.arg("check").arg(&file).env(OsStr::from_bytes(name), garbled).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check(b"LESSCHARSET"), (0, String::new()));
    assert_eq!(check(b"L\xff"), (0, String::new()));
    for name in [&b"TIDEGATE__INBOUND__CAPS__HEADERS"[..], b"GLOBAL_RATE_LIMIT", b"TIDEGATE__\xff"] {
        let (status, err) = check(name);
        assert_eq!(status, 2, "{err}");
        assert!(err.contains(&*String::from_utf8_lossy(name)), "{err}");
    }
}

/// Returns true for characters that control a terminal, or that make a line look different from its content.
fn is_unsafe(letter: char) -> bool {
    letter.is_control() && letter != '\n' && letter != '\t'
        || matches!(letter, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// Runs a command and checks that its output has no characters that control a terminal.
fn run_safely(arguments: &[&str]) -> (i32, String, String) {
    let (status, out, err) = run(arguments);
    assert!(!out.contains(is_unsafe) && !err.contains(is_unsafe), "{arguments:?}: {out:?} {err:?}");
    (status, out, err)
}

#[test]
fn control_characters_in_input_are_escaped() {
    const HOSTILE: &str = "\u{1b}[2J\u{202e}\u{9b}31m\u{200b}";
    const ESCAPED: &str = "\\u001b[2J\\u202e\\u009b31m\\u200b";
    let scratch = ScratchDir::new();
    let path = |name: &str, text: &str| scratch.write(&format!("{HOSTILE}\n{name}"), text).to_str().unwrap().to_owned();

    // A file's name and content.
    let policy = "[inbound.action.all]\nmatch = { path = \"/*\" }\nkey = [\"path\", \"key\"]\nlimit = \"1 per 60s\"\n";
    let good = path("good.toml", policy);
    let (status, out, _) = run_safely(&["check", &good]);
    assert_eq!(status, 0);
    assert!(out.contains("\u{fffd}good.toml: good\n"), "{out}");
    let wrong = format!("[inbound.action.all]\nmatch = \"/x{ESCAPED}\"\nlimit = \"5 {ESCAPED}\"\n[\"{ESCAPED}\"]\n");
    let (status, _, err) = run_safely(&["check", &path("wrong.toml", &wrong)]);
    assert_eq!(status, 2);
    assert!(err.contains("= help: did you mean { path = \"/x\u{fffd}"), "{err}");
    assert_eq!(run_safely(&["check", &format!("/nowhere/{HOSTILE}")]).0, 1);
    assert_eq!(run_safely(&["simulate", &good]).0, 2);
    assert_eq!(run_safely(&["simulate", "steady", "--out", &path("report", "")]).0, 2);
    let scenario = format!(
        "title = \"{ESCAPED}\"\nabout = \"a\\n{ESCAPED}\"\nduration = \"1s\"\n[service]\nlatency = \"1ms\"\n\
         [load.a]\nrate = \"5/s\"\n[case.one]\ntitle = \"{ESCAPED}\"\n[strategy.two]\ntitle = \"{ESCAPED}\"\n"
    );
    let (status, out, err) = run_safely(&["simulate", &path("scenario.toml", &scenario)]);
    assert_eq!((status, out.matches("\u{fffd}[2J").count()), (0, 4), "{out}{err}");
    run_safely(&["simulate", "--check", &path("scenario.toml", &scenario)]);

    // A log.
    let json = serde_json::json!({ "time": 1_800_000_000, "ip": "203.0.113.7", "method": "GET", "path": format!("/a{HOSTILE}"), "user": HOSTILE });
    let log = path("access.log", &format!("{json}\n{json}\n{json}\n{HOSTILE}\n"));
    for more in [&[][..], &["--diff", &good]] {
        let (status, out, err) = run_safely(&[&["replay", "-c", &good, "--field", "user=user", &log], more].concat());
        assert_eq!(status, 0, "{err}");
        assert!(out.contains("/a\u{fffd}") && out.contains("access.log:4"), "{out}");
    }
    assert_eq!(run_safely(&["replay", "-c", &good, &format!("/nowhere/{HOSTILE}")]).0, 1);

    // A command line: its words may be names of files.
    assert_eq!(run_safely(&["check", &format!("--{HOSTILE}")]).0, 2);
    assert_eq!(run_safely(&["retry", &format!("--{HOSTILE}")]).0, 125);
    assert_eq!(run_safely(&["retry", "--attempts", "1", &format!("/nowhere/{HOSTILE}")]).0, 127);
    assert_eq!(run_safely(&["explain", "login", "--url", &format!("http://{HOSTILE}")]).0, 2);
}

#[test]
fn control_characters_in_gate_replies_are_escaped() {
    let explained = "{\"action\":\"\u{202e}\u{9b}\",\"decision\":{\"allowed\":true,\"limit\":5,\"remaining\":4,\"reset_after\":60,\
         \"retry_after\":null,\"blocked\":false,\"backoff_seconds\":null,\"next_allowed_at\":null,\"bound_by\":\"login\",\
         \"reason\":\"ok\",\"source\":\"action\"},\"limits\":[]}";
    for (code, body) in [
        (200, explained),
        (200, "{\"x\":\"\u{1b}[2J\u{202e}\u{9b}\"}"),
        (200, "\u{1b}[2J\u{202e}"),
        (400, "{\"message\":\"\\u001b[2J\\u202e\"}"),
        (503, "\u{1b}[2J\u{202e}"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let gate = thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]).unwrap();
                write!(stream, "HTTP/1.1 {code} OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
            }
        });
        for json in [&[][..], &["--json"]] {
            let (status, out, err) = run_safely(&[&["explain", "login", "--url", &url], json].concat());
            assert!(!out.is_empty() || !err.is_empty());
            // The reply of any other server isn't taken for a decision.
            assert_eq!(status == 0, body == explained, "{err}");
            assert_eq!(err.contains("no decision API"), code == 200 && body != explained, "{err}");
            if body == explained && !json.is_empty() {
                assert!(out.starts_with("{\"action\":\"\\u202e\\u009b\","), "{out}");
            }
        }
        gate.join().unwrap();
    }
}

#[test]
fn commands_show_the_state_of_a_running_gate() {
    let scratch = ScratchDir::new();
    let provider = "[outbound]\nlisten = \"off\"\n[outbound.provider.weather]\nbase_url = \"http://127.0.0.1:9\"\nlimit = \"10 per 1h\"\n";
    let (api, admin) = (free_port(), free_port());
    let listeners = format!("[api]\nlisten = \"127.0.0.1:{api}\"\n[admin]\nlisten = \"127.0.0.1:{admin}\"\n");
    let strict = POLICY.replace("5 per 60s", "1 per 60s");
    let file = scratch.write("tidegate.toml", &format!("{strict}{listeners}{provider}"));
    let named = file.to_str().unwrap().to_owned();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve.args(["serve", "-c"]).arg(&file);
    let _gate = ChildProcess::start(serve, scratch, admin);
    let ask = |arguments: &[&str]| run(&[arguments, &["-c", &named]].concat());

    assert_eq!(ask(&["blocks"]), (0, "no client was refused\n".to_owned(), String::new()));
    let (status, text, _) = ask(&["fleet"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((status, lines[0]), (0, "This node keeps its state in memory: no other node shares it."), "{text}");
    assert!(lines[2].starts_with("NODE ") && lines[3].contains(" (this node)  live "), "{text}");
    assert!(ask(&["fleet", "--json"]).1.contains("\"shared\":false"));
    assert_eq!(ask(&["events"]), (0, "nothing has changed\n".to_owned(), String::new()));
    let (status, text, _) = ask(&["providers"]);
    assert_eq!(status, 0);
    assert!(text.starts_with("weather\n  breaker      closed\n  credentials  1 usable\n"), "{text}");
    assert!(text.contains("  limit        weather: 10 of 10 left ("), "{text}");
    assert_eq!(ask(&["providers", "weather"]).1, text);
    let (status, _, err) = ask(&["providers", "wether"]);
    assert!(status == 2 && err.contains("did you mean \"weather\"?"), "{err}");

    let check = r#"{"action":"login","ip":"203.0.113.7"}"#;
    for _ in 0..2 {
        let mut gate = std::net::TcpStream::connect(("127.0.0.1", api)).unwrap();
        let request = format!(
            "POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{check}",
            check.len()
        );
        gate.write_all(request.as_bytes()).unwrap();
        gate.read_to_end(&mut Vec::new()).unwrap();
    }
    let (status, text, _) = ask(&["blocks", "--action", "login"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((status, lines[0], lines[1]), (0, "1 blocked now, 1 refused lately", ""), "{text}");
    assert!(lines[2].starts_with("CLIENT       LIMIT  STATE"), "{text}");
    assert!(lines[3].starts_with("203.0.113.7  login  blocked, ") && lines[3].ends_with('Z'), "{text}");
    let (status, text, _) = ask(&["try", "login", "5 per 60s"]);
    assert!(status == 0 && text.starts_with("login would have refused 0 % of requests, 0 of 1 client\n"), "{text}");
    assert!(text.contains("\npresent  1        50.0 %") && text.contains("\ntried    0        0 %"), "{text}");
    assert!(text.ends_with("\n[inbound.action.login]\nlimit = \"5 per 60s\"\n"), "{text}");
    let (status, text, _) = ask(&["try", "login", "login", "ban = \"1m\"", "--json"]);
    assert!(status == 0 && text.starts_with("{\"action\":\"login\","), "{text}");
    let (status, _, err) = ask(&["try", "login", "5 par 60s"]);
    assert!(status == 2 && err.contains("terms:1:"), "{err}");
    let (_, text, _) = ask(&["events"]);
    assert!(text.ends_with("203.0.113.7 is blocked under login for 2 s after strike 1\n"), "{text}");
    let (_, text, _) = ask(&["events", "--json"]);
    assert!(text.starts_with("{\"events\":[{") && text.contains("\"kind\":\"blocked\""), "{text}");
}

/// A gate that gives each request the next of these answers, a status and a stream, and returns the requests.
fn streams(answers: Vec<(&'static str, String)>) -> (String, thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = move |(status, body): (&str, String)| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let length = stream.read(&mut request).unwrap();
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n");
        // The reader may be gone.
        let _ = stream.write_all(format!("{head}{body}").as_bytes());
        String::from_utf8_lossy(&request[..length]).into_owned()
    };
    (url, thread::spawn(move || answers.into_iter().map(serve).collect()))
}

fn event(id: u64) -> String {
    format!("id: {id}\ndata: {{\"id\":{id},\"time\":\"now\",\"message\":\"event {id}\"}}\n\n")
}

#[test]
fn followed_events_continue_after_a_lost_stream() {
    let (url, gate) =
        streams(vec![("200 OK", event(7) + &event(8)), ("200 OK", event(9)), ("401 No", "{}".to_owned())]);
    let (status, out, err) = run(&["events", "--follow", "--url", &url]);
    assert_eq!((status, out.as_str()), (2, "now  event 7\nnow  event 8\nnow  event 9\n"), "{err}");
    assert!(err.contains("has ended the stream; connecting again in 1 s\n"), "{err}");
    let requests = gate.join().unwrap();
    assert!(!requests[0].contains("last-event-id") && requests[1].contains("last-event-id: 8\r\n"), "{requests:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn followed_events_end_if_nothing_can_be_written() {
    let (url, gate) = streams(vec![("200 OK", event(7))]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let status = command.args(["events", "--follow", "--url", &url]).stdout(full).status().unwrap();
    assert_eq!(status.code(), Some(1));
    gate.join().unwrap();
}

#[test]
fn commands_change_the_state_of_a_running_gate() {
    let scratch = ScratchDir::new();
    let provider = "[outbound]\nlisten = \"off\"\n[outbound.provider.weather]\nbase_url = \"http://127.0.0.1:9\"\nlimit = \"10 per 1h\"\n";
    let (api, admin) = (free_port(), free_port());
    let listeners = format!(
        "[api]\nlisten = \"127.0.0.1:{api}\"\n[admin]\nlisten = \"127.0.0.1:{admin}\"\n\
         tokens = {{ dash = {{ secret = \"env:DASH\", read_only = true }}, ops = \"env:OPS\" }}\n"
    );
    let alert = "[alert.night]\non = \"store_lost\"\nlog = true\n";
    let file = scratch.write("tidegate.toml", &format!("{POLICY}{listeners}{provider}{alert}"));
    let named = file.to_str().unwrap().to_owned();
    let tokens = [("DASH", "look"), ("OPS", "s3cret")];
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve.args(["serve", "-c"]).arg(&file).envs(tokens);
    let gate = ChildProcess::start(serve, scratch, admin);
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.args(arguments).args(["-c", &named]).envs(tokens).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), text)
    };
    let login = ["login", "--ip", "203.0.113.7"];
    let done = |text: &str| (0, text.to_owned());
    assert_eq!(ask(&[&["block"][..], &login, &["--for", "10m"]].concat()), done("login: blocked for 10 min\n"));
    let (status, text) = ask(&[&["status"][..], &login].concat());
    assert!(status == 3 && (text.contains("10 min") || text.contains("9 min 5")), "{text}");
    let (status, text) = ask(&[&["block"][..], &login, &["--for", "2d"]].concat());
    assert!(status == 2 && text.contains("the longest block is 1h"), "{text}");
    let (status, text) = ask(&[&["block"][..], &login, &["--for", "1m", "--json"]].concat());
    assert!(status == 0 && text.starts_with("{\"blocked\":true,"), "{text}");
    let refused = ask(&[&["block"][..], &login, &["--for", "1m", "--token-env", "DASH"]].concat());
    assert_eq!(refused, (1, "error: the token `dash` is only for reading\n".to_owned()));
    let (status, text) = ask(&[&["block"][..], &login, &["--for", "10"]].concat());
    assert_eq!((status, text.as_str()), (2, "error: --for 10 has no unit: write 10s, 10m or 10h\n"));
    let (status, text) = ask(&[&["block", "--for", "1h"][..], &login].concat());
    assert!(status == 0 && text.starts_with("login: blocked for "), "{text}");
    let (status, text) = ask(&[&["reset"][..], &login].concat());
    assert!(status == 0 && text.starts_with("login: reset; "), "{text}");
    gate.wait_for_line("change=\"reset\" action=login ip=203.0.113.7", Duration::from_secs(5));

    let paused = "weather: paused; calls are refused until `tidegate resume weather`\n";
    assert_eq!(ask(&["pause", "weather"]), done(paused));
    assert_eq!(ask(&["pause", "weather"]), done("weather: was paused already\n"));
    let (_, text) = ask(&["providers", "weather"]);
    assert!(text.starts_with("weather, paused by an operator\n"), "{text}");
    assert_eq!(ask(&["resume", "weather"]), done("weather: resumed\n"));
    let reset = "weather: the breaker is closed and no credential cools down\n";
    assert_eq!(ask(&["reset-provider", "weather"]), done(reset));
    assert_eq!(ask(&["alert", "test", "night"]), done("log: sent\n"));
    let (status, text) = ask(&["alert", "test", "nigth"]);
    assert!(status == 2 && text.contains("did you mean `night`?"), "{text}");
    let (_, text) = ask(&["check"]);
    assert!(text.contains("\nalerts\nnight: store_lost\n  to the log\n"), "{text}");
    let (status, text) = ask(&["pause", "wether"]);
    assert!(status == 2 && text.contains("did you mean \"weather\"?"), "{text}");
}

#[test]
fn shells_get_completions_and_pages() {
    for (shell, expected) in
        [("bash", "complete -F _tidegate"), ("zsh", "#compdef tidegate"), ("fish", "complete -c tidegate")]
    {
        let (status, out, _) = run(&["completions", shell]);
        assert!(status == 0 && out.contains(expected) && out.contains("replay"), "{shell}: {out}");
    }
    let (status, out, _) = run(&["man"]);
    assert!(status == 0 && out.contains(".TH tidegate 1") && out.contains("serve"), "{out}");
    let (status, out, _) = run(&["man", "replay"]);
    assert!(status == 0 && out.contains(".TH tidegate-replay 1"), "{out}");
    let (status, _, err) = run(&["man", "rplay"]);
    assert!(status == 2 && err.contains("no command rplay"), "{err}");
    let (status, out, _) = run(&["man", "alert", "test"]);
    let title = format!(".TH tidegate-alert-test 1 \" \" \"tidegate {}\" Tidegate\n", env!("CARGO_PKG_VERSION"));
    assert!(status == 0 && out.contains(&title), "{out}");
    let (_, out, _) = run(&["man", "block"]);
    assert!(out.contains("\\-\\-for <DURATION>") && !out.contains("[\\fB\\-\\-ip\\fR]"), "{out}");
    let (_, out, _) = run(&["completions", "fish"]);
    assert!(out.contains("-l platform -d 'The kind of client' -r -f -a \"web"), "{out}");
    let scratch = ScratchDir::new();
    let folder = scratch.path().join("share/man1");
    assert_eq!(run(&["man", "--out", folder.to_str().unwrap()]).0, 0);
    for page in ["tidegate.1", "tidegate-serve.1", "tidegate-alert-test.1"] {
        assert!(folder.join(page).exists(), "{page}");
    }
    let mut pages = std::fs::read_dir(&folder).unwrap();
    assert!(pages.all(|page| !page.unwrap().file_name().to_str().unwrap().contains("help")));
}
