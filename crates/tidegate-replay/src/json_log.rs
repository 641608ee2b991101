//! Logs of one JSON object per line: Caddy's, nginx's with `escape=json`, Envoy's, and others by their fields' names.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use tidegate_core::Span;

use super::request::{
    HeaderCollector, LineError, LogLine, LoggedRequest, is_method, parse_address, parse_request_line, split_target,
};
use super::{MAX_DURATION, MAX_LATENESS, timestamp};

/// The depth to which fields are searched: `request.headers.Host` is three deep.
const MAX_DEPTH: usize = 8;
/// The longest name of a field, with the names of its parents, that is searched.
const MAX_NAME: usize = 256;

/// A part of a request, of which a line has one value.
#[derive(Clone, Copy, Debug)]
enum RequestPart {
    Time,
    /// The address of the peer.
    Ip,
    Method,
    /// The path, with or without the query string.
    Path,
    /// The query string, if the path comes without.
    Query,
    /// Method, path and version as one: `GET / HTTP/1.1`.
    RequestLine,
    Host,
    /// The user as the server identified it: the key part `key`.
    User,
    /// The action's name, for a service that asks the decision API.
    Action,
    /// The seconds from the request's arrival to the time of the line.
    Duration,
    /// The same in microseconds, in Tidegate's own log.
    DurationMicros,
    /// The source of a line of Tidegate's own log.
    Target,
    /// The listener of a line of Tidegate's access log.
    Listener,
    /// The decision about a request, in the same lines.
    Outcome,
}

/// The meaning of a field.
#[derive(Clone, Debug)]
enum FieldRole {
    Part(RequestPart),
    /// The header of this name.
    Header(String),
    /// An object with a header in each field.
    Headers,
}

/// The parts of a request with their roles in [`FieldNames::add`] and their default names, the likeliest first. If a
/// line has two of them, the first one counts. `a.b` is `b` within `a`. If a server logs both the peer and the client
/// that it derived, the peer comes first, because the policy itself says which proxies it trusts.
const PARTS: [(RequestPart, &str, &str); 10] = [
    (RequestPart::Time, "time", "ts time time_iso8601 msec start_time @timestamp timestamp time_local datetime date"),
    (
        RequestPart::Ip,
        "ip",
        "request.remote_ip remote_addr remote_ip downstream_direct_remote_address_without_port \
         downstream_direct_remote_address downstream_remote_address_without_port downstream_remote_address \
         request.remote_addr request.client_ip client_ip clientip client ip ClientAddr ClientHost",
    ),
    (RequestPart::Method, "method", "request.method request_method method verb http_method RequestMethod"),
    (RequestPart::Path, "path", "request.uri request_uri uri path url RequestPath"),
    (RequestPart::Query, "query", "query_string args"),
    (RequestPart::RequestLine, "request", "request request_line"),
    (RequestPart::Host, "host", "request.host http_host host authority server_name vhost RequestHost"),
    (RequestPart::User, "user", "user_id remote_user user ClientUsername"),
    (RequestPart::Action, "action", "action"),
    (RequestPart::Duration, "duration", "request_time duration"),
];
/// The parts of Tidegate's own lines, with the names of their fields.
const OWN_PARTS: [(RequestPart, &str); 4] = [
    (RequestPart::DurationMicros, "duration_us"),
    (RequestPart::Target, "target"),
    (RequestPart::Listener, "listener"),
    (RequestPart::Outcome, "outcome"),
];
/// The rank of `ts` among the names of the time, and that of `duration` among those of the duration. Caddy and other
/// servers that log with zap write both, and the duration is in seconds. Beside other times it may have another unit,
/// or the time is that of the arrival, as in Envoy's lines.
const ZAP_RANKS: (usize, usize) = (1, 2);
/// The target and the listener of calls to providers in Tidegate's access log, and the outcomes of requests without a
/// decision.
const OWN_TARGET: &str = "access";
const OUTBOUND_LISTENER: &str = "outbound";
const UNDECIDED_OUTCOMES: [&str; 2] = ["answered", "rejected"];
/// The default names of objects with a header in each field.
const HEADERS_NAMES: [&str; 3] = ["request.headers", "request_headers", "headers"];
/// The default names of header fields other than `http_NAME`, by header.
const HEADER_NAMES: [(&str, &str); 4] = [
    ("user-agent", "user_agent user-agent"),
    ("referer", "referer referrer"),
    ("x-forwarded-for", "x_forwarded_for xff"),
    ("cookie", "cookie"),
];
/// The prefix of nginx's variables of headers.
const HEADER_VARIABLE_PREFIX: &str = "http_";

/// The names of fields and their meanings.
#[derive(Clone, Debug)]
pub struct FieldNames {
    by_name: HashMap<String, (FieldRole, usize)>,
    /// The names of objects that hold such fields.
    parents: HashSet<String>,
}

/// The error of a field's name in a wrong form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no field: expected ROLE=NAME, where ROLE is time, duration, ip, method, path, query, request, host, user, \
     action, headers or header:NAME"
)]
pub struct FieldNameError(String);

impl Default for FieldNames {
    fn default() -> Self {
        let mut names = Self { by_name: HashMap::new(), parents: HashSet::new() };
        // A name that the caller adds has rank 0, before all defaults.
        for (part, _, default_names) in PARTS {
            for (rank, name) in (1..).zip(default_names.split(' ')) {
                names.insert(name, FieldRole::Part(part), rank);
            }
        }
        for (part, name) in OWN_PARTS {
            names.insert(name, FieldRole::Part(part), 1);
        }
        for name in HEADERS_NAMES {
            names.insert(name, FieldRole::Headers, 1);
        }
        for (header, default_names) in HEADER_NAMES {
            for name in default_names.split(' ') {
                names.insert(name, FieldRole::Header(header.to_owned()), 1);
            }
        }
        names
    }
}

impl FieldNames {
    /// Adds a name as `ROLE=NAME`, which takes precedence over the defaults.
    ///
    /// # Errors
    /// The text has another form, or an unknown role.
    pub fn add(&mut self, text: &str) -> Result<(), FieldNameError> {
        let wrong = || FieldNameError(text.chars().take(128).collect());
        let (word, name) = text.split_once('=').filter(|(_, name)| !name.is_empty()).ok_or_else(wrong)?;
        let role = match word.strip_prefix("header:") {
            Some("") => None,
            Some(header) => Some(FieldRole::Header(header.to_ascii_lowercase())),
            None if word == "headers" => Some(FieldRole::Headers),
            None => PARTS.iter().find(|(_, role, _)| *role == word).map(|(part, ..)| FieldRole::Part(*part)),
        };
        self.insert(name, role.ok_or_else(wrong)?, 0);
        Ok(())
    }

    fn insert(&mut self, name: &str, role: FieldRole, rank: usize) {
        for (dot, _) in name.match_indices('.') {
            self.parents.insert(name[..dot].to_owned());
        }
        self.by_name.insert(name.to_owned(), (role, rank));
    }
}

/// The value of each part of a request, with the rank of its field's name.
type PartValues<'l> = [Option<(usize, FieldValue<'l>)>; PARTS.len() + OWN_PARTS.len()];

#[derive(Clone, Debug)]
enum FieldValue<'l> {
    Text(Cow<'l, str>),
    Float(f64),
    Integer(i128),
}

impl<'l> FieldValue<'l> {
    fn as_number(&self) -> Option<f64> {
        match self {
            Self::Text(text) => text.parse().ok(),
            Self::Float(number) => Some(*number),
            Self::Integer(number) => Some(*number as f64),
        }
    }

    fn into_text(self) -> Cow<'l, str> {
        match self {
            Self::Text(text) => text,
            Self::Float(number) => number.to_string().into(),
            Self::Integer(number) => number.to_string().into(),
        }
    }
}

/// Returns the content of a line. It is no request without a method and a path.
pub(super) fn parse_line<'l>(
    line: &'l [u8],
    names: &FieldNames,
    headers: &mut HeaderCollector,
) -> Result<LogLine<'l>, LineError> {
    let text = str::from_utf8(line).map_err(|_| LineError::InvalidUtf8)?;
    let mut json = serde_json::Deserializer::from_str(text);
    let mut collector = FieldCollector {
        names,
        path: String::new(),
        depth: 0,
        header_name_start: None,
        parts: PartValues::default(),
        headers,
    };
    collector.deserialize(&mut json).and_then(|()| json.end()).map_err(|_| LineError::InvalidJson)?;
    build_request(collector.parts)
}

fn build_request(mut parts: PartValues<'_>) -> Result<LogLine<'_>, LineError> {
    let duration = find_duration(&parts);
    let mut value = |part: RequestPart| Some(parts[part as usize].take()?.1);
    let time = match value(RequestPart::Time) {
        Some(FieldValue::Text(text)) => timestamp::parse_text(&text),
        Some(FieldValue::Float(number)) => timestamp::from_epoch_number(number),
        Some(FieldValue::Integer(number)) => timestamp::from_epoch_number(number as f64),
        None => None,
    };
    let time = time.ok_or(LineError::InvalidTime)?;
    let mut text = |part| value(part).map(FieldValue::into_text);
    let line = text(RequestPart::RequestLine);
    let (line_method, line_target) = line.as_ref().and_then(parse_request_line).unzip();
    let method = text(RequestPart::Method).or(line_method);
    let target = text(RequestPart::Path).or(line_target);
    let (Some(method), Some(target)) = (method, target) else { return Ok(LogLine::Other) };
    if !is_method(&method) {
        return Ok(LogLine::Other);
    }
    if text(RequestPart::Target).is_some_and(|target| target == OWN_TARGET) {
        if text(RequestPart::Listener).is_some_and(|listener| listener == OUTBOUND_LISTENER) {
            return Ok(LogLine::ProviderCall);
        }
        if text(RequestPart::Outcome).is_some_and(|outcome| UNDECIDED_OUTCOMES.contains(&&*outcome)) {
            return Ok(LogLine::Undecided);
        }
    }
    let peer = text(RequestPart::Ip).map(|text| parse_address(&text).ok_or(LineError::InvalidAddress)).transpose()?;
    let (mut path, target_host) = split_target(target);
    if let Some(query) = text(RequestPart::Query)
        && !path.contains('?')
    {
        path = Cow::Owned(format!("{path}?{}", query.strip_prefix('?').unwrap_or(&query)));
    }
    Ok(LogLine::Request(LoggedRequest {
        time: time - duration.unwrap_or_default(),
        duration,
        peer,
        method,
        path,
        host: text(RequestPart::Host).or(target_host.map(Cow::Owned)),
        user: text(RequestPart::User),
        action: text(RequestPart::Action),
    }))
}

/// Returns the time from the request's arrival to the time of the line, at most [`MAX_LATENESS`]: beyond it, the order
/// of requests can't be restored.
fn find_duration(parts: &PartValues<'_>) -> Option<Span> {
    let find = |part: RequestPart| parts[part as usize].as_ref();
    let (time_rank, _) = find(RequestPart::Time)?;
    let in_seconds = find(RequestPart::Duration)
        .filter(|(rank, _)| (*time_rank, *rank) == ZAP_RANKS || *rank < ZAP_RANKS.1)
        .and_then(|(_, value)| value.as_number());
    let seconds = in_seconds.or_else(|| Some(find(RequestPart::DurationMicros)?.1.as_number()? / 1e6))?;
    let is_plausible = (0.0..=MAX_DURATION.as_secs_f64()).contains(&seconds);
    is_plausible.then(|| Span::from_micros((seconds * 1e6).round() as u64).min(MAX_LATENESS))
}

/// Visits a line and collects the fields of interest.
struct FieldCollector<'w, 'l> {
    names: &'w FieldNames,
    /// The name of the present value, with the names of its parents.
    path: String,
    depth: usize,
    /// The start of the header's name in the path, if the value is a header.
    header_name_start: Option<usize>,
    parts: PartValues<'l>,
    headers: &'w mut HeaderCollector,
}

/// A field's name, borrowed from the line unless it has escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct FieldName<'l>(#[serde(borrow)] Cow<'l, str>);

impl<'l> FieldCollector<'_, 'l> {
    fn record<E>(&mut self, value: FieldValue<'l>) -> Result<(), E> {
        if let Some(start) = self.header_name_start {
            self.headers.add_if_wanted(self.path.get(start..).unwrap_or_default(), value.into_text().as_bytes());
            return Ok(());
        }
        match self.names.by_name.get(&self.path) {
            Some((FieldRole::Header(name), _)) => self.headers.add_if_wanted(name, value.into_text().as_bytes()),
            Some((FieldRole::Part(part), rank)) => {
                // Servers write `-` for a missing value.
                let is_missing = matches!(&value, FieldValue::Text(text) if matches!(&**text, "" | "-"));
                let slot = &mut self.parts[*part as usize];
                if !is_missing && slot.as_ref().is_none_or(|(other, _)| rank < other) {
                    *slot = Some((*rank, value));
                }
            }
            Some((FieldRole::Headers, _)) => {}
            None => {
                if let Some(name) = self.path.strip_prefix(HEADER_VARIABLE_PREFIX)
                    && !self.headers.wants_none()
                {
                    self.headers.add_if_wanted(&name.replace('_', "-"), value.into_text().as_bytes());
                }
            }
        }
        Ok(())
    }
}

impl<'l> DeserializeSeed<'l> for &mut FieldCollector<'_, 'l> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'l>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'l> Visitor<'l> for &mut FieldCollector<'_, 'l> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'l str) -> Result<(), E> {
        self.record(FieldValue::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.record(FieldValue::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<(), E> {
        self.record(FieldValue::Float(number))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<(), E> {
        self.record(FieldValue::Integer(number.into()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<(), E> {
        self.record(FieldValue::Integer(number.into()))
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'l>>(self, mut list: A) -> Result<(), A::Error> {
        if self.depth >= MAX_DEPTH {
            return IgnoredAny.visit_seq(list).map(drop);
        }
        self.depth += 1;
        while list.next_element_seed(&mut *self)?.is_some() {}
        self.depth -= 1;
        Ok(())
    }

    fn visit_map<A: MapAccess<'l>>(self, mut map: A) -> Result<(), A::Error> {
        let is_headers = matches!(self.names.by_name.get(&self.path), Some((FieldRole::Headers, _)));
        let is_searched = self.depth == 0 || is_headers || self.names.parents.contains(&self.path);
        if self.header_name_start.is_some() || !is_searched || self.depth >= MAX_DEPTH {
            return IgnoredAny.visit_map(map).map(drop);
        }
        let length = self.path.len();
        self.header_name_start = is_headers.then_some(length + 1);
        self.depth += 1;
        while let Some(FieldName(name)) = map.next_key()? {
            if length > 0 {
                self.path.push('.');
            }
            self.path.push_str(&name);
            if self.path.len() > MAX_NAME {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(&mut *self)?;
            }
            self.path.truncate(length);
        }
        self.depth -= 1;
        self.header_name_start = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
