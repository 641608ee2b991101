//! `tidegate classify`: the meaning of a provider's reply, by the rules of a policy.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use tidegate_core::call::CallScope;
use tidegate_core::retry::is_repeatable;
use tidegate_core::time::UtcText;
use tidegate_core::{Class, Clock as _, Key, RemainingAmount, Scope, Span, Time};
use tidegate_policy::outbound::ProviderConfig;
use tidegate_policy::verdict::{Classified, RequestFacts, VerdictRules, comparable_path};

use crate::policy::{environment, file_failure, invalid_input, load, print, read_input};
use crate::{CommandResult, PolicyFile};

/// The key of scopes, which are only shown by their names.
const SCOPE_KEY: Key = Key::new(0, 1);

/// The arguments of `tidegate classify`.
#[derive(Debug, Args)]
pub(crate) struct ClassifyArgs {
    #[command(flatten)]
    file: PolicyFile,
    /// The provider of the policy. Without it, only the built-in rules apply.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// The status of the reply.
    #[arg(long, value_name = "STATUS", value_parser = parse_status)]
    status: StatusCode,
    /// A header of the reply, as `NAME: VALUE`. May be repeated.
    #[arg(long, value_name = "HEADER", value_parser = parse_header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// A file with the body of the reply; - is standard input.
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// The method of the request.
    #[arg(long, value_name = "METHOD", default_value = "GET")]
    method: Method,
    /// The path of the request, below the provider's base URL.
    #[arg(long, value_name = "PATH", default_value = "/", value_parser = parse_path)]
    path: String,
    /// A header of the request, as `NAME: VALUE`. May be repeated.
    #[arg(long, value_name = "HEADER", value_parser = parse_header)]
    request_header: Vec<(HeaderName, HeaderValue)>,
    /// A file with the JSON body of the request.
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
}

fn parse_status(text: &str) -> Result<StatusCode, String> {
    let status = text.parse().ok().filter(|status| (100..=599).contains(status));
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    status.ok_or_else(|| "expected a status from 100 to 599".to_owned())
}

fn parse_header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let parts = text.split_once(':').and_then(|(name, value)| {
        Some((name.trim().parse::<HeaderName>().ok()?, value.trim().parse::<HeaderValue>().ok()?))
    });
    parts.ok_or_else(|| "expected NAME: VALUE".to_owned())
}

fn parse_path(text: &str) -> Result<String, String> {
    let path = text.parse::<Uri>().ok().filter(|_| text.starts_with('/'));
    path.map(|path| path.path().to_owned()).ok_or_else(|| "expected a path such as /search/code".to_owned())
}

/// `tidegate classify`.
pub(crate) fn run(arguments: ClassifyArgs) -> CommandResult {
    let built_in = VerdictRules::default();
    let outbound = match &arguments.provider {
        None => None,
        Some(_) => {
            let file = arguments.file.path()?;
            let (policy, source) = load(file.as_deref(), environment(None))?;
            let outbound = policy.outbound().cloned();
            Some(outbound.ok_or_else(|| invalid_input(format!("{source} has no [outbound]")))?)
        }
    };
    let provider = match (&outbound, &arguments.provider) {
        (Some(outbound), Some(name)) => Some(outbound.find(name).map_err(invalid_input)?),
        _ => None,
    };
    let rules = provider.map_or(&built_in, |provider| &provider.verdicts);
    let read = |file: &Option<PathBuf>| {
        let read = |file: &PathBuf| read_input(file).map_err(|error| file_failure("read", file, error));
        file.as_ref().map(read).transpose()
    };
    let (body, request_body) = (read(&arguments.body)?, read(&arguments.request)?);
    let headers = |lines: &[(HeaderName, HeaderValue)]| {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(name, value.clone());
        }
        headers
    };
    let (headers, request_headers) = (headers(&arguments.header), headers(&arguments.request_header));
    let host = provider.and_then(|provider| provider.base_url.as_ref()).map_or("", |url| url.authority().host());
    let path = comparable_path(&arguments.path);
    let request = RequestFacts::new(&arguments.method, host, &path, &request_headers);
    let request = request.with_body(request_body.as_deref());
    let limit = rules.body_limit(&request, arguments.status, &headers);
    let is_read = |body: &&[u8]| limit.is_some_and(|limit| body.len() <= limit);
    let read_body = body.as_deref().filter(is_read);
    let now = tidegate::clock::SystemClock::new().now();
    let found = rules.classify(&request, arguments.status, &headers, read_body, SCOPE_KEY, now);
    let own_scope = rules.call_scope(&request, SCOPE_KEY);
    let has_key = request_headers.contains_key("idempotency-key");
    let is_idempotent = is_repeatable(arguments.method.as_str(), has_key, true);
    let mut text = describe(&found, rules, (&arguments.method, is_idempotent), provider, own_scope, now);
    if body.is_some() && read_body.is_none() {
        text.push_str(match limit {
            None => "body    not read: no rule asks for it, by this status and these headers\n",
            Some(_) => "body    not read: it is longer than rules read\n",
        });
    }
    Ok(print(&text))
}

fn describe(
    found: &Classified,
    rules: &VerdictRules,
    (method, is_idempotent): (&Method, bool),
    provider: Option<&ProviderConfig>,
    own_scope: CallScope,
    now: Time,
) -> String {
    let verdict = &found.verdict;
    let rule = match found.rule {
        None => "none: the status and the usual headers".to_owned(),
        Some(name) => format!("{name}: {}", rules.describe_rule(name).unwrap_or_default()),
    };
    let until = |wait: Span| format!("{}, until {}", seconds(wait), UtcText::from(now + wait));
    let wait = match verdict.announced_wait() {
        Some(wait) => {
            let header = found.wait_header.as_ref().map(|name| format!(", by {name}")).unwrap_or_default();
            let cut = found.cut_wait.map(|asked| format!("; it asks for {}", seconds(asked))).unwrap_or_default();
            format!("{}{header}{cut}", until(wait))
        }
        None if verdict.class == Class::Quota && provider.is_some() => {
            "until the provider's calendar quota starts again, or 5 minutes if it has none".to_owned()
        }
        None if verdict.class.is_refusal() => "none: the cool-down's own length".to_owned(),
        None => "none".to_owned(),
    };
    let is_final = matches!(verdict.class, Class::Permanent | Class::Auth);
    let closes = verdict.class.is_refusal() || verdict.announced_wait().is_some() && !is_final;
    let is_outage = !verdict.class.is_refusal();
    let named = found.scope_name.as_deref();
    let for_all = if is_outage { ", with all credentials" } else { "" };
    let scope = match verdict.scope {
        Scope::Credential => "the whole credential".to_owned(),
        Scope::Provider => "all credentials".to_owned(),
        Scope::Call if named.is_none() && !closes => "none".to_owned(),
        Scope::Call | Scope::Named(_) if !closes => named.unwrap_or("none").to_owned(),
        Scope::Named(key) if key != own_scope.key && !own_scope.is_learnt => {
            format!("the request's own, which isn't {}{for_all}", named.unwrap_or_default())
        }
        Scope::Named(key) if key != own_scope.key && own_scope.closes_only => {
            format!("{}, for calls of this route{for_all}", named.unwrap_or_default())
        }
        Scope::Call if own_scope.is_learnt && !own_scope.closes_only && named.is_none() => {
            format!("the last that a reply has named for this route{for_all}")
        }
        Scope::Call | Scope::Named(_) => match named {
            Some(name) => format!("{name}{for_all}"),
            None if is_outage => "all credentials; only the route of the request while others work".to_owned(),
            None => "the whole credential".to_owned(),
        },
    };
    let may_repeat =
        verdict.class.is_retryable() && (verdict.was_refused || is_idempotent) && !verdict.asks_not_to_retry;
    let repeat = match (may_repeat, verdict.asks_not_to_retry, verdict.class) {
        (true, ..) if is_idempotent => "yes".to_owned(),
        (true, ..) => format!("yes, also with {method}"),
        (false, true, Class::Quota) => "no, except with another credential".to_owned(),
        (false, false, class) if class.is_retryable() => format!("no: {method} may have been carried out"),
        (false, ..) => "no".to_owned(),
    };
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = write!(
        text,
        "class   {}\nrule    {rule}\nwait    {wait}\nscope   {scope}\nrepeat  {repeat}\n",
        verdict.class.name()
    );
    for (what, amount) in [("calls", verdict.remaining.calls), ("cost", verdict.remaining.cost)] {
        if let Some(RemainingAmount { amount, limit, resets_at }) = amount {
            let limit = limit.map(|limit| format!(" of {limit}")).unwrap_or_default();
            let _ = writeln!(text, "left    {what}: {amount}{limit}, {}", until(resets_at.since(now)));
        }
    }
    text
}

fn seconds(wait: Span) -> String {
    let text = format!("{:.3}", wait.as_secs_f64());
    format!("{} s", text.trim_end_matches('0').trim_end_matches('.'))
}
