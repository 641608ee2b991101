//! The commands of the Redis protocol.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use tidegate::policy::Query;
use tidegate::store::Store;
use tidegate::{CheckError, LimiterDecision};
use tidegate_core::{CallerRate, Clock};

use super::RespState;
use super::parser::parse_number;
use super::reply::{ReplyWriter, Version};
use crate::listener::ConnectionContext;
use crate::local_response::HttpError;
use crate::rejections::RejectionReason;
use crate::wire::compat::wait_secs;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::http_api::{decide, validate};

/// The version of Redis whose clients are answered. Libraries begin a cache only with a server of this name and version.
const REDIS_VERSION: &str = "7.4.0";
/// The longest name that a client may give itself.
const MAX_NAME: usize = 128;

/// The commands: the name, the number of arguments with it (negative: at least so many), and true if it is answered
/// before a password is given.
const COMMANDS: [(&str, i32, bool); 23] = [
    ("AUTH", -2, true),
    ("CL.THROTTLE", -5, false),
    ("CLIENT", -2, false),
    ("COMMAND", -1, false),
    ("CONFIG", -2, false),
    ("DISCARD", 1, false),
    ("ECHO", 2, false),
    ("EXEC", 1, false),
    ("HELLO", -1, true),
    ("INFO", -1, false),
    ("MULTI", 1, false),
    ("PING", -1, false),
    ("QUIT", -1, true),
    ("RESET", 1, true),
    ("SELECT", 2, false),
    ("TG.CHECK", -2, false),
    ("TG.REFUND", -2, false),
    ("TG.RELEASE", -2, false),
    ("TG.RENEW", -2, false),
    ("TG.RESET", -2, false),
    ("TG.STATUS", -2, false),
    ("THROTTLE", -5, false),
    ("TIME", 1, false),
];

/// The state of a connection between its requests.
pub(super) struct Session {
    pub(super) version: Version,
    id: u64,
    name: Vec<u8>,
    /// The password that was right, or empty.
    password: Vec<u8>,
}

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Read,
    /// The client has said that it sends no more.
    Close,
    /// The client may still be sending.
    Refuse,
}

/// An error reply: its code and its message.
struct ErrorReply(&'static str, Cow<'static, str>);

impl ErrorReply {
    fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self("ERR", message.into())
    }
}

impl From<DecisionRequestError> for ErrorReply {
    fn from(error: DecisionRequestError) -> Self {
        Self::new(error.message)
    }
}

impl Session {
    pub(super) fn new() -> Self {
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        Self { version: Version::default(), id, name: Vec::new(), password: Vec::new() }
    }
}

impl<S: Store, C: Clock> RespState<S, C> {
    /// Answers a request.
    pub(super) async fn answer(
        &self,
        session: &mut Session,
        client: &ConnectionContext,
        arguments: &[&[u8]],
        is_inline: bool,
        output: &mut Vec<u8>,
    ) -> Next {
        let Some((name, rest)) = arguments.split_first() else { return Next::Read };
        let known = COMMANDS.iter().find(|(known, ..)| name.eq_ignore_ascii_case(known.as_bytes()));
        let version = session.version;
        let Some(&(name, arity, is_open)) = known else {
            ReplyWriter { output, version }.error("ERR", &unknown_command(name, rest));
            // A web page can make a browser send lines. None of them may be taken for a command.
            return if is_inline { Next::Refuse } else { Next::Read };
        };
        let count = i32::try_from(arguments.len()).unwrap_or(i32::MAX);
        let answered = if (arity > 0 && count != arity) || count < arity.abs() {
            let name = name.to_ascii_lowercase();
            Err(ErrorReply::new(format!("wrong number of arguments for '{name}' command")))
        } else if !is_open && !self.is_authenticated(session, client) {
            Err(ErrorReply("NOAUTH", "Authentication required.".into()))
        } else {
            self.execute(session, client, name, rest, output).await
        };
        match answered {
            Ok(next) => next,
            Err(ErrorReply(code, message)) => {
                ReplyWriter { output, version: session.version }.error(code, &message);
                let is_guessing = code == "WRONGPASS" && self.is_guessing(client);
                if is_guessing { Next::Refuse } else { Next::Read }
            }
        }
    }

    fn is_authenticated(&self, session: &Session, client: &ConnectionContext) -> bool {
        !self.access.needs_token(client.address.ip()) || self.access.token_of(&session.password).is_some()
    }

    /// True if this client has given too many wrong passwords.
    fn is_guessing(&self, client: &ConnectionContext) -> bool {
        (self.parts.sign_in_limiter)(client.address.ip()) != LimiterDecision::Admitted
    }

    async fn execute(
        &self,
        session: &mut Session,
        client: &ConnectionContext,
        name: &'static str,
        rest: &[&[u8]],
        output: &mut Vec<u8>,
    ) -> Result<Next, ErrorReply> {
        if let Some(question) = name.strip_prefix("TG.") {
            let answer = self.decide(question, client, rest).await?;
            ReplyWriter { output, version: session.version }.json(&answer);
            return Ok(Next::Read);
        }
        if let "CL.THROTTLE" | "THROTTLE" = name {
            let numbers = self.throttle(name, rest).await?;
            let mut reply = ReplyWriter { output, version: session.version };
            reply.array(numbers.len());
            numbers.iter().for_each(|number| reply.integer(number));
            return Ok(Next::Read);
        }
        let mut reply = ReplyWriter { output, version: session.version };
        match name {
            "PING" => match rest {
                [] => reply.simple("PONG"),
                [text] => reply.bulk(text),
                _ => return Err(ErrorReply::new("wrong number of arguments for 'ping' command")),
            },
            "ECHO" => rest.iter().for_each(|text| reply.bulk(text)),
            "QUIT" => {
                reply.simple("OK");
                return Ok(Next::Close);
            }
            "RESET" => {
                *session = Session { id: session.id, ..Session::new() };
                reply.simple("RESET");
            }
            "SELECT" if rest == [b"0"] => reply.simple("OK"),
            "SELECT" => return Err(ErrorReply::new("DB index is out of range: there is only 0")),
            "AUTH" => {
                self.authenticate(session, client, rest)?;
                reply.simple("OK");
            }
            "HELLO" => self.hello(session, client, rest, reply.output)?,
            "CLIENT" => client_command(session, client, rest, &mut reply)?,
            // No setting of Redis has a meaning here.
            "CONFIG" if rest[0].eq_ignore_ascii_case(b"GET") && rest.len() > 1 => reply.map(0),
            "CONFIG" => return Err(ErrorReply::new("CONFIG has only GET here, which finds nothing")),
            "TIME" => {
                let now = self.gate.clock().now().as_micros();
                reply.array(2);
                [now / 1_000_000, now % 1_000_000].iter().for_each(|part| reply.bulk(part.to_string().as_bytes()));
            }
            "COMMAND" => command_command(rest, &mut reply)?,
            "INFO" => reply.bulk(info().as_bytes()),
            // MULTI, EXEC and DISCARD.
            _ => {
                let message = format!("{name} is not supported: each command is decided by itself");
                return Err(ErrorReply::new(message));
            }
        }
        Ok(Next::Read)
    }

    /// Checks the password of `AUTH [user] password`. The user's name has no meaning.
    fn authenticate(
        &self,
        session: &mut Session,
        client: &ConnectionContext,
        credentials: &[&[u8]],
    ) -> Result<(), ErrorReply> {
        let ([password] | [_, password]) = credentials else { return Err(ErrorReply::new("syntax error")) };
        if !self.access.needs_token(client.address.ip()) {
            let message =
                "AUTH <password> called without any password configured. Are you sure your configuration is correct?";
            // Redis also takes any password for its default user without one.
            return if credentials.len() == 2 { Ok(()) } else { Err(ErrorReply::new(message)) };
        }
        if self.access.token_of(password).is_some() {
            session.password = password.to_vec();
            return Ok(());
        }
        let query = Query { ip: Some(client.address.ip().to_canonical()), ..Query::default() };
        let (now, access) = (self.gate.clock().now(), &client.watch.access);
        self.parts.refusals.log_rejection(now, RejectionReason::Token, &query, "no valid password", access);
        Err(ErrorReply("WRONGPASS", "invalid username-password pair or user is disabled.".into()))
    }

    /// `HELLO [version [AUTH user password] [SETNAME name]]`.
    fn hello(
        &self,
        session: &mut Session,
        client: &ConnectionContext,
        rest: &[&[u8]],
        output: &mut Vec<u8>,
    ) -> Result<(), ErrorReply> {
        let mut version = session.version;
        if let Some((number, mut options)) = rest.split_first() {
            version = match *number {
                b"2" => Version::Resp2,
                b"3" => Version::Resp3,
                _ if parse_number(number).is_none() => {
                    return Err(ErrorReply::new("Protocol version is not an integer or out of range"));
                }
                _ => return Err(ErrorReply("NOPROTO", "unsupported protocol version".into())),
            };
            loop {
                options = match options {
                    [] => break,
                    [option, user, password, more @ ..] if option.eq_ignore_ascii_case(b"AUTH") => {
                        self.authenticate(session, client, &[user, password])?;
                        more
                    }
                    [option, name, more @ ..] if option.eq_ignore_ascii_case(b"SETNAME") => {
                        set_name(session, name)?;
                        more
                    }
                    [option, ..] => {
                        let option = option.escape_ascii();
                        return Err(ErrorReply::new(format!("Syntax error in HELLO option '{option}'")));
                    }
                }
            }
        }
        if !self.is_authenticated(session, client) {
            let message = "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
                           <user> <pass> option can be used to authenticate the client and select the RESP protocol \
                           version at the same time";
            return Err(ErrorReply("NOAUTH", message.into()));
        }
        session.version = version;
        let mut reply = ReplyWriter { output, version };
        reply.json(&json!({
            "server": "redis",
            "version": REDIS_VERSION,
            "proto": version as u8,
            "id": session.id,
            "mode": "standalone",
            "role": "master",
            "modules": [{ "name": "tidegate", "ver": 1 }],
        }));
        Ok(())
    }

    /// `CL.THROTTLE key max_burst count period [quantity]`, as redis-cell answers it, or throttlecrab's `THROTTLE`, whose
    /// `max_burst` is one more and whose first number is 1 if the call is admitted.
    async fn throttle(&self, name: &str, rest: &[&[u8]]) -> Result<[i64; 5], ErrorReply> {
        let usage = "<key> <max_burst> <count per period> <period> [<quantity>]";
        let (key, numbers) = match rest {
            [key, numbers @ ..] if (3..=4).contains(&numbers.len()) => (key, numbers),
            _ => return Err(ErrorReply::new(format!("Usage: {name} {usage}"))),
        };
        let mut parsed: [i64; 4] = [0, 0, 0, 1];
        for (number, text) in parsed.iter_mut().zip(numbers) {
            let wrong = || ErrorReply::new(format!("Couldn't parse as integer: {}", text.escape_ascii()));
            *number = str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
        }
        let [max_burst, count, period, quantity] = parsed;
        let is_redis_cell = name == "CL.THROTTLE";
        let limit = if is_redis_cell { max_burst.saturating_add(1) } else { max_burst };
        let unsigned = |name: &str, number: i64| {
            u64::try_from(number).map_err(|_| ErrorReply::new(format!("the {name} is negative")))
        };
        let (count, period) = (unsigned("count per period", count)?, unsigned("period", period)?);
        let rate = CallerRate::new(unsigned("max_burst", limit)?, count, period)
            .map_err(|error| ErrorReply::new(error.to_string()))?;
        let decided = self.gate.throttle(rate, key, quantity).await.map_err(|error| self.unavailable(&error))?;
        let (limited, admitted) = if decided.is_limited { (1, 0) } else { (0, 1) };
        let retry_after = decided.retry_after_secs();
        Ok(match is_redis_cell {
            true => [limited, limit, decided.redis_cell_remaining, retry_after, decided.reset_after_secs()],
            false => {
                let remaining = decided.remaining.cast_signed();
                [admitted, limit, remaining, decided.reset_after_secs(), wait_secs(&decided)]
            }
        })
    }

    fn unavailable(&self, error: &CheckError) -> ErrorReply {
        self.parts.refusals.log_failure(self.gate.clock().now(), error);
        ErrorReply("UNAVAILABLE", HttpError::StoreUnavailable.status_and_message().1.into())
    }

    /// Answers a question to the policy: `TG.NAME action [FIELD value]…`.
    async fn decide(
        &self,
        name: &str,
        client: &ConnectionContext,
        rest: &[&[u8]],
    ) -> Result<serde_json::Value, ErrorReply> {
        let request = read_question(rest)?;
        let (query, access) = (&request.query(), &client.watch.access);
        let path = match name {
            "CHECK" => "/v1/check",
            "STATUS" => "/v1/status",
            "RESET" => "/v1/reset",
            "REFUND" => "/v1/refund",
            "RELEASE" => "/v1/release",
            _ => "/v1/renew",
        };
        validate(&self.gate, &self.parts.refusals, path, &request, access)?;
        let value = match (name, request.permit) {
            ("CHECK", _) => self.check(query, client).await,
            ("STATUS", _) => self.gate.status(query).await.map(|decision| json!(self.gate.report(&decision))),
            ("RESET", _) => self.gate.reset(query).await.map(|report| {
                self.parts.refusals.clients.forget(&report.keys);
                json!(report)
            }),
            ("RELEASE", Some(permit)) => self.gate.release(query, permit).await.map(|held| json!({ "released": held })),
            ("RENEW", Some(permit)) => self.gate.renew(query, permit).await.map(|held| json!({ "renewed": held })),
            _ => self.gate.refund(query).await.map(|()| json!({ "refunded": true })),
        };
        value.map_err(|error| {
            if let CheckError::Store(_) = error {
                return self.unavailable(&error);
            }
            if let Some(uncountable) = error.uncountable() {
                let (now, why) = (self.gate.clock().now(), uncountable.to_string());
                self.parts.refusals.log_rejection(now, uncountable.into(), query, &why, access);
            }
            ErrorReply::new(error.to_string())
        })
    }

    async fn check(&self, query: &Query<'_>, client: &ConnectionContext) -> Result<serde_json::Value, CheckError> {
        let actions = self.gate.actions(query)?;
        let query = Query { actions: Some(actions), ..*query };
        let decision = decide(&self.gate, &self.parts.metrics, &query).await?;
        self.parts.refusals.log_decision(self.gate.plan(), actions, &query, &decision, &client.watch.access);
        Ok(json!(self.gate.report(&decision)))
    }
}

/// Reads the words of a question: the action, which may be empty, then names of fields with their values. `HEADER` has two.
fn read_question<'a>(words: &[&'a [u8]]) -> Result<DecisionRequest<'a>, ErrorReply> {
    let mut request = DecisionRequest::default();
    let text = |word: &'a [u8]| str::from_utf8(word).map_err(|_| ErrorReply::new("an argument isn't UTF-8"));
    let Some((action, mut fields)) = words.split_first() else { return Ok(request) };
    if !action.is_empty() {
        request.set_text("action", text(action)?.into())?;
    }
    while let [name, rest @ ..] = fields {
        let name = text(name)?.to_ascii_lowercase();
        let (field, value, more) = match rest {
            [header, value, more @ ..] if name == "header" => (format!("header:{}", text(header)?), value, more),
            [value, more @ ..] if name != "header" => (name, value, more),
            _ => return Err(ErrorReply::new(format!("`{}` has no value", name.to_ascii_uppercase()))),
        };
        request.set_text(&field, text(value)?.into())?;
        fields = more;
    }
    Ok(request)
}

fn unknown_command(name: &[u8], rest: &[&[u8]]) -> String {
    let short = |word: &[u8]| word[..word.len().min(MAX_NAME)].escape_ascii().to_string();
    let arguments: String = rest.iter().take(8).map(|word| format!("'{}' ", short(word))).collect();
    format!("unknown command '{}', with args beginning with: {arguments}", short(name))
}

fn set_name(session: &mut Session, name: &[u8]) -> Result<(), ErrorReply> {
    if name.len() > MAX_NAME || !name.iter().all(u8::is_ascii_graphic) {
        let message = "Client names cannot contain spaces, newlines or special characters.";
        return Err(ErrorReply::new(message));
    }
    session.name = name.to_vec();
    Ok(())
}

/// `CLIENT`: the parts that libraries use to introduce themselves, and to begin a cache of keys, of which there are none.
fn client_command(
    session: &mut Session,
    client: &ConnectionContext,
    rest: &[&[u8]],
    reply: &mut ReplyWriter<'_>,
) -> Result<(), ErrorReply> {
    let subcommand = rest.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
    match (&*subcommand, &rest[1..]) {
        (b"SETNAME", [name]) => {
            set_name(session, name)?;
            reply.simple("OK");
        }
        (b"GETNAME", []) if session.name.is_empty() => reply.null(),
        (b"GETNAME", []) => reply.bulk(&session.name),
        (b"ID", []) => reply.integer(session.id),
        // The library's name and version, and hints that concern caches of Redis.
        (b"SETINFO", [_, _]) | (b"NO-EVICT" | b"NO-TOUCH" | b"CACHING", [_]) | (b"TRACKING", [_, ..]) => {
            reply.simple("OK")
        }
        // A client learns only about its own connection.
        (b"INFO", []) | (b"LIST", _) => {
            let (name, version) = (session.name.escape_ascii(), session.version as u8);
            reply.bulk(format!("id={} addr={} name={name} resp={version}\n", session.id, client.address).as_bytes());
        }
        _ => {
            let known =
                "CLIENT has SETNAME, GETNAME, ID, INFO, LIST, SETINFO, TRACKING, CACHING, NO-EVICT and NO-TOUCH here";
            return Err(ErrorReply::new(known));
        }
    }
    Ok(())
}

/// `COMMAND`: the list of commands, as some libraries ask for it when they connect.
fn command_command(rest: &[&[u8]], reply: &mut ReplyWriter<'_>) -> Result<(), ErrorReply> {
    let entry = |reply: &mut ReplyWriter<'_>, (name, arity, _): &(&str, i32, bool)| {
        reply.array(6);
        reply.bulk(name.to_ascii_lowercase().as_bytes());
        reply.integer(arity);
        reply.array(1);
        reply.simple("fast");
        // The places of keys: the first, the last and the step.
        let place = if name.ends_with("THROTTLE") { 1 } else { 0 };
        (0..3).for_each(|_| reply.integer(place));
    };
    let subcommand = rest.first().map(|name| name.to_ascii_uppercase());
    match subcommand.as_deref() {
        None => {
            reply.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| entry(reply, command));
        }
        Some(b"COUNT") => reply.integer(COMMANDS.len()),
        Some(b"DOCS") => reply.map(0),
        Some(b"INFO") => {
            reply.array(rest.len() - 1);
            for name in &rest[1..] {
                match COMMANDS.iter().find(|(known, ..)| name.eq_ignore_ascii_case(known.as_bytes())) {
                    Some(command) => entry(reply, command),
                    None => reply.null(),
                }
            }
        }
        Some(_) => return Err(ErrorReply::new("COMMAND has COUNT, DOCS and INFO here")),
    }
    Ok(())
}

/// The facts that libraries look for: the version of Redis whose protocol is spoken, and that nothing is being loaded.
fn info() -> String {
    format!(
        "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\ntidegate_version:{}\r\n\
         # Persistence\r\nloading:0\r\n# Replication\r\nrole:master\r\n",
        env!("CARGO_PKG_VERSION")
    )
}
