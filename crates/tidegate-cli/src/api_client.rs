//! `tidegate explain`, `status` and `reset`: requests to a running gate.

use std::error::Error;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::uri::Authority;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tidegate::{DecisionReport, Explanation, LimitReport, ResetReport};
use tidegate_policy::{ApiConfig, Secret, SecretSource};
use tokio::net::TcpStream;

use crate::policy::{self, failure, invalid_input, print, print_error, print_json};
use crate::{CallArgs, CliOutcome, CommandResult};

/// The hint if a gate requires a token and the command line has none.
const TOKEN_HELP: &str =
    "--token-env NAME says which environment variable holds it, -c FILE which policy knows where it is";

/// The timeout of a gate's response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum size of a response. An explanation of eight limits has a few kilobytes.
const MAX_ANSWER: usize = 1 << 20;

/// `tidegate explain`.
pub(crate) fn explain(call: &CallArgs) -> CommandResult {
    call_api(call, Method::GET, "/v1/explain", |text| {
        let explanation: Explanation = serde_json::from_str(text).ok()?;
        let outcome = outcome_of(&explanation.decision);
        Some((describe_explanation(&explanation), outcome))
    })
}

/// `tidegate status`.
pub(crate) fn status(call: &CallArgs) -> CommandResult {
    call_api(call, Method::GET, "/v1/status", |text| {
        let report: DecisionReport = serde_json::from_str(text).ok()?;
        Some((format!("{}\n", describe_report(&report)), outcome_of(&report)))
    })
}

/// `tidegate reset`.
pub(crate) fn reset(call: &CallArgs) -> CommandResult {
    let what = call.action.as_deref().or(call.path.as_deref()).unwrap_or("all actions");
    call_api(call, Method::POST, "/v1/reset", |text| {
        let report: ResetReport = serde_json::from_str(text).ok()?;
        Some((describe_reset(what, &report), CliOutcome::Done))
    })
}

fn describe_reset(what: &str, report: &ResetReport) -> String {
    let mut text = String::new();
    for LimitReport { name, used, limit, strikes, backoff_seconds, .. } in &report.limits {
        let _ = write!(text, "{name}: reset; {used} of {limit} were used");
        let blocked = backoff_seconds.map(|backoff| format!(", blocked for {backoff} s")).unwrap_or_default();
        let _ = match strikes {
            0 => writeln!(text, "{blocked}"),
            strikes => writeln!(text, "{blocked} after {}", describe_strikes(*strikes)),
        };
    }
    if text.is_empty() {
        let _ = writeln!(text, "{what}: nothing was counted for this client");
    }
    for LimitReport { name, retry_after, .. } in &report.still_refusing {
        let wait = retry_after.map(|wait| format!(" for {wait} s")).unwrap_or_default();
        let _ = writeln!(text, "{name} still refuses this client{wait}; reset {name} with the same --ip or --key, too");
    }
    if !report.skipped.is_empty() {
        let _ = writeln!(
            text,
            "not reset, because they count by something that was not given: {}",
            report.skipped.join(", ")
        );
    }
    text
}

/// Takes the URL and the token of the API from the command line, and otherwise from the policy. Prints errors to standard
/// error.
fn url_and_token(call: &CallArgs) -> Result<(String, Option<Secret>), CliOutcome> {
    let (url, in_policy) = match (&call.url, &call.config) {
        (Some(url), None) => (url.clone(), None),
        (url, config) => {
            let environment = policy::environment(call.env_prefix.as_deref());
            let (policy, _) = policy::load(config.as_deref(), environment)?;
            (url.clone().map_or_else(|| api_url(policy.api()), Ok)?, policy.api().token.clone())
        }
    };
    let (from, source) = match &call.token_env {
        Some(name) => ("--token-env", Some(SecretSource::Env(name.clone()))),
        None => ("api.token", in_policy),
    };
    let token = source.map(|source| source.resolve(|name| std::env::var(name).ok())).transpose();
    Ok((url, token.map_err(|error| invalid_input(format!("{from}: {error}")))?))
}

/// The URL of the API of a gate on this machine.
fn api_url(api: &ApiConfig) -> Result<String, CliOutcome> {
    let Some(listen) = api.listen else {
        return Err(invalid_input("the policy turns the gate's API off, with api.listen = \"off\""));
    };
    if listen.port() == 0 {
        return Err(invalid_input(
            "the policy leaves the API's port to the system; --url http://HOST:PORT says which it is",
        ));
    }
    let ip = match listen.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok(format!("http://{}", SocketAddr::new(ip, listen.port())))
}

fn outcome_of(report: &DecisionReport) -> CliOutcome {
    if report.allowed { CliOutcome::Done } else { CliOutcome::Refused }
}

/// Sends the request and prints the response, either described in words or as JSON.
fn call_api(
    call: &CallArgs,
    method: Method,
    path: &str,
    describe: impl FnOnce(&str) -> Option<(String, CliOutcome)>,
) -> CommandResult {
    if call.action.is_none() && call.path.is_some() && call.method.is_none() {
        return Err(invalid_input("--path finds an action together with --method, such as --method GET"));
    }
    let (url, token) = url_and_token(call)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failure(format!("can't start: {error}")))?;
    let sending = send(&url, token, call, method, path);
    let answer = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, sending).await });
    let no_answer = |_| failure(format!("{url} did not answer within {ANSWER_TIMEOUT:?}"));
    let (status, text) = answer.map_err(no_answer)??;
    if status.is_success() {
        return Ok(match describe(&text) {
            Some((_, outcome)) if call.json => print_json(&text).and(outcome),
            Some((words, outcome)) => print(&words).and(outcome),
            None => {
                return Err(failure(format!("{url} answers, but it is no decision API of this version of Tidegate")));
            }
        });
    }
    if call.json {
        print_json(&text);
    } else {
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let default_message = || format!("{url} answered {status}");
        print_error(&format!("error: {}\n", body["message"].as_str().map_or_else(default_message, str::to_owned)));
        if let Some(help) = body["field"].as_str().and_then(part_help) {
            print_error(&format!("{help}\n"));
        }
        if status == StatusCode::UNAUTHORIZED {
            print_error(&format!("{TOKEN_HELP}\n"));
        }
    }
    Err(match status {
        StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED => CliOutcome::InvalidInput,
        _ => CliOutcome::Failed,
    })
}

/// The command-line option that provides a request part which a limit counts by.
fn part_help(field: &str) -> Option<String> {
    let (kind, name) = field.split_once(':')?;
    let given = match kind {
        "header" => format!("--header {name}=VALUE"),
        "cookie" => format!("--header cookie={name}=VALUE"),
        "query" => format!("--path '/…?{name}=VALUE'"),
        _ => return None,
    };
    Some(format!(
        "{given} gives it; for a client that sends none, give another header that it sends: --header accept=*/*"
    ))
}

/// Sends the request and returns the response's status and body. Prints errors to standard error.
async fn send(
    address: &str,
    token: Option<Secret>,
    call: &CallArgs,
    method: Method,
    path: &str,
) -> Result<(StatusCode, String), CliOutcome> {
    let url: Uri = address.parse().map_err(|error| invalid_input(format!("--url {address}: {error}")))?;
    let authority = match (url.scheme_str(), url.authority()) {
        (Some("http"), Some(authority)) => authority.clone(),
        _ => return Err(invalid_input(format!("--url {address} isn't of the form http://HOST:PORT"))),
    };
    let (target, body) = if method == Method::GET {
        (format!("{path}?{}", as_query(call)?), Bytes::new())
    } else {
        (path.to_owned(), as_json(call)?.into())
    };
    let mut request = Request::builder().method(method).uri(target).header(HOST, authority.as_str());
    if !body.is_empty() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, format!("Bearer {}", token.expose()));
    }
    let request = request.body(Full::new(body)).map_err(invalid_input)?;

    let response = exchange(&authority, request).await.map_err(|error| {
        failure(format!("no gate answers at {address}: {error}\nIs it running? `tidegate serve` starts one."))
    })?;
    Ok((response.status(), String::from_utf8_lossy(response.body()).into_owned()))
}

/// Sends one request over a connection of its own, and reads the response.
///
/// # Errors
/// The server can't be reached, or its response is too long or isn't HTTP.
pub(crate) async fn exchange(
    authority: &Authority,
    request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, Box<dyn Error + Send + Sync>> {
    let host = authority.host().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let (parts, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
    Ok(Response::from_parts(parts, body))
}

/// The request's plain fields with their names.
fn fields(call: &CallArgs) -> impl Iterator<Item = (&'static str, &str)> {
    let texts = [
        ("action", &call.action),
        ("ip", &call.ip),
        ("key", &call.key),
        ("platform", &call.platform),
        ("method", &call.method),
        ("path", &call.path),
        ("host", &call.host),
    ];
    texts.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
}

fn headers(call: &CallArgs) -> impl Iterator<Item = Result<(&str, &str), CliOutcome>> {
    call.headers.iter().map(|header| {
        header.split_once('=').ok_or_else(|| invalid_input(format!("--header {header} isn't of the form NAME=VALUE")))
    })
}

fn as_query(call: &CallArgs) -> Result<String, CliOutcome> {
    let mut pairs: Vec<String> =
        fields(call).map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
    pairs.extend(call.cost.map(|cost| format!("cost={cost}")));
    for header in headers(call) {
        let (name, value) = header?;
        pairs.push(format!("header:{}={}", percent_encode(name), percent_encode(value)));
    }
    Ok(pairs.join("&"))
}

fn as_json(call: &CallArgs) -> Result<String, CliOutcome> {
    let mut body = serde_json::Map::new();
    for (name, value) in fields(call) {
        body.insert(name.to_owned(), value.into());
    }
    if let Some(cost) = call.cost {
        body.insert("cost".to_owned(), cost.into());
    }
    let given: serde_json::Map<String, Value> = headers(call)
        .map(|header| header.map(|(name, value)| (name.to_owned(), value.into())))
        .collect::<Result<_, _>>()?;
    if !given.is_empty() {
        body.insert("headers".to_owned(), json!(given));
    }
    Ok(Value::Object(body).to_string())
}

fn percent_encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

fn describe_report(report: &DecisionReport) -> String {
    let mut text = if report.allowed { "would be admitted".to_owned() } else { "would be refused".to_owned() };
    text += &match (&*report.reason, &report.bound_by) {
        ("allow_list", _) => ": the address is on the allow list".to_owned(),
        ("deny_list", _) => ": the address is on the deny list".to_owned(),
        (_, None) => ": no limit applies".to_owned(),
        (_, Some(name)) => {
            let (remaining, limit) = (report.remaining.unwrap_or_default(), report.limit.unwrap_or_default());
            format!(": {remaining} of {limit} left under {name}")
        }
    };
    if let Some(backoff) = report.backoff_seconds {
        text += &format!("; blocked for {backoff} s");
    }
    if !report.allowed && report.reason != "deny_list" {
        text += &match (report.retry_after, &report.next_allowed_at) {
            (None, _) => "; no waiting helps".to_owned(),
            (Some(wait), None) => format!("; retry in {wait} s"),
            (Some(wait), Some(at)) => format!("; retry in {wait} s, at {at}"),
        };
    }
    if report.shadow {
        text += " (shadow: it would only be logged)";
    }
    text
}

fn describe_strikes(strikes: u8) -> String {
    format!("{strikes} strike{}", if strikes == 1 { "" } else { "s" })
}

fn describe_explanation(explanation: &Explanation) -> String {
    let action = explanation.action.as_deref().unwrap_or("no action matches");
    let mut text = format!("{action}: {}\n", describe_report(&explanation.decision));
    for limit in &explanation.limits {
        text.push('\n');
        describe_limit(&mut text, limit);
    }
    text
}

fn describe_limit(text: &mut String, limit: &LimitReport) {
    let shadow = if limit.shadow { ", in shadow" } else { "" };
    let _ = writeln!(text, "{} ({} limit{shadow})", limit.name, limit.source);
    let _ = writeln!(text, "  allows    {}", limit.words);
    if !limit.key.is_empty() {
        let _ = writeln!(text, "  counts by {}", limit.key.join(" + "));
    }
    let _ = writeln!(text, "  used      {} of {}, {} left", limit.used, limit.limit, limit.remaining);
    if limit.blocked {
        let backoff = limit.backoff_seconds.unwrap_or_default();
        let _ = writeln!(text, "  blocked   for {backoff} s after {}", describe_strikes(limit.strikes));
    }
    if let Some(wait) = limit.next_block {
        let _ = writeln!(text, "  penalty   a call now would start a block of {wait} s");
    }
    let free = match (limit.allowed, limit.retry_after) {
        (true, _) => "now".to_owned(),
        (false, Some(wait)) => format!("in {wait} s"),
        (false, None) => "never for this cost".to_owned(),
    };
    let _ = writeln!(text, "  free      {free}; full capacity again in {} s", limit.reset_after);
}
