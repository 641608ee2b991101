//! Logs of one JSON object per line: Caddy's, nginx's with `escape=json`, Envoy's, and others by the names of their
//! fields.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::request::{
    HeaderCollector, LineError, LoggedRequest, ParsedLine, is_method, parse_address, parse_request_line, split_target,
};
use super::timestamp;

/// The depth to which fields are searched: `request.headers.Host` is three deep.
const MAX_DEPTH: usize = 8;
/// The longest name of a field, with the names of its parents, that is searched.
const MAX_NAME: usize = 256;

/// The meaning of a field.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FieldRole {
    /// The time of the request.
    Time,
    /// The address of the request's peer.
    Ip,
    /// The method.
    Method,
    /// The path, with or without the query string.
    Path,
    /// The query string, if the path comes without.
    Query,
    /// Method, path and version as one: `GET / HTTP/1.1`.
    RequestLine,
    /// The host.
    Host,
    /// The user as the server identified it: the key part `key`.
    User,
    /// The action's name, for a service that asks the decision API.
    Action,
    /// The header of this name.
    Header(String),
    /// An object with a header in each field.
    Headers,
}

/// The default names, the likeliest first. If a line has two of them, the first one counts. `a.b` is `b` within `a`. If
/// a server logs both the peer and the client that it derived, the peer comes first, because the policy itself says
/// which proxies it trusts.
const DEFAULT_NAMES: &[(FieldRole, &[&str])] = &[
    (
        FieldRole::Time,
        &[
            "ts",
            "time",
            "time_iso8601",
            "msec",
            "start_time",
            "@timestamp",
            "timestamp",
            "time_local",
            "datetime",
            "date",
        ],
    ),
    (
        FieldRole::Ip,
        &[
            "request.remote_ip",
            "remote_addr",
            "remote_ip",
            "downstream_direct_remote_address_without_port",
            "downstream_direct_remote_address",
            "downstream_remote_address_without_port",
            "downstream_remote_address",
            "request.remote_addr",
            "request.client_ip",
            "client_ip",
            "clientip",
            "client",
            "ip",
            "ClientAddr",
            "ClientHost",
        ],
    ),
    (FieldRole::Method, &["request.method", "request_method", "method", "verb", "http_method", "RequestMethod"]),
    (FieldRole::Path, &["request.uri", "request_uri", "uri", "path", "url", "RequestPath"]),
    (FieldRole::Query, &["query_string", "args"]),
    (FieldRole::RequestLine, &["request", "request_line"]),
    (FieldRole::Host, &["request.host", "http_host", "host", "authority", "server_name", "vhost", "RequestHost"]),
    (FieldRole::User, &["user_id", "remote_user", "user", "ClientUsername"]),
    (FieldRole::Action, &["action"]),
    (FieldRole::Headers, &["request.headers", "request_headers", "headers"]),
];
/// The names of header fields other than `http_NAME`.
const DEFAULT_HEADER_NAMES: &[(&str, &str)] = &[
    ("user_agent", "user-agent"),
    ("user-agent", "user-agent"),
    ("referer", "referer"),
    ("referrer", "referer"),
    ("x_forwarded_for", "x-forwarded-for"),
    ("xff", "x-forwarded-for"),
    ("cookie", "cookie"),
];
/// The prefix of nginx's variables of headers.
const HEADER_VARIABLE_PREFIX: &str = "http_";

/// The names of fields and their meanings.
#[derive(Clone, Debug)]
pub struct FieldNames {
    by_name: HashMap<String, (FieldRole, usize)>,
    /// The names of objects that hold such fields.
    parents: HashMap<String, ()>,
}

/// The error of a field's name in a wrong form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no field: expected ROLE=NAME, where ROLE is time, ip, method, path, query, request, host, user, action, \
     headers or header:NAME"
)]
pub struct FieldNameError(String);

impl Default for FieldNames {
    fn default() -> Self {
        let mut names = Self { by_name: HashMap::new(), parents: HashMap::new() };
        for (role, usual) in DEFAULT_NAMES {
            for (rank, name) in usual.iter().enumerate() {
                // A name that the caller adds has rank 0, before all defaults.
                names.insert(name, role.clone(), rank + 1);
            }
        }
        for (name, header) in DEFAULT_HEADER_NAMES {
            names.insert(name, FieldRole::Header((*header).to_owned()), 1);
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
        let (role, name) = text.split_once('=').filter(|(_, name)| !name.is_empty()).ok_or_else(wrong)?;
        let role = match role {
            "time" => FieldRole::Time,
            "ip" => FieldRole::Ip,
            "method" => FieldRole::Method,
            "path" => FieldRole::Path,
            "query" => FieldRole::Query,
            "request" => FieldRole::RequestLine,
            "host" => FieldRole::Host,
            "user" => FieldRole::User,
            "action" => FieldRole::Action,
            "headers" => FieldRole::Headers,
            other => match other.strip_prefix("header:") {
                Some(header) if !header.is_empty() => FieldRole::Header(header.to_ascii_lowercase()),
                _ => return Err(wrong()),
            },
        };
        self.insert(name, role, 0);
        Ok(())
    }

    fn insert(&mut self, name: &str, role: FieldRole, rank: usize) {
        for (dot, _) in name.match_indices('.') {
            self.parents.insert(name[..dot].to_owned(), ());
        }
        self.by_name.insert(name.to_owned(), (role, rank));
    }
}

/// The values of a line's fields, each with the rank of its name.
#[derive(Default)]
struct FieldValues<'l> {
    slots: [Option<(usize, FieldValue<'l>)>; 9],
}

enum FieldValue<'l> {
    Text(Cow<'l, str>),
    Float(f64),
    Integer(i128),
}

impl<'l> FieldValues<'l> {
    fn set(&mut self, slot: usize, rank: usize, value: FieldValue<'l>) {
        // Servers write `-` for a missing value.
        let is_nothing = matches!(&value, FieldValue::Text(text) if matches!(&**text, "" | "-"));
        let slot = &mut self.slots[slot];
        if !is_nothing && slot.as_ref().is_none_or(|(other, _)| rank < *other) {
            *slot = Some((rank, value));
        }
    }

    fn text(&mut self, role: &FieldRole) -> Option<Cow<'l, str>> {
        match self.slots[slot_index(role)?].take()?.1 {
            FieldValue::Text(text) => Some(text),
            FieldValue::Float(number) => Some(Cow::Owned(number.to_string())),
            FieldValue::Integer(number) => Some(Cow::Owned(number.to_string())),
        }
    }
}

/// Returns the slot of a role's value.
fn slot_index(role: &FieldRole) -> Option<usize> {
    match role {
        FieldRole::Time => Some(0),
        FieldRole::Ip => Some(1),
        FieldRole::Method => Some(2),
        FieldRole::Path => Some(3),
        FieldRole::Query => Some(4),
        FieldRole::RequestLine => Some(5),
        FieldRole::Host => Some(6),
        FieldRole::User => Some(7),
        FieldRole::Action => Some(8),
        FieldRole::Header(_) | FieldRole::Headers => None,
    }
}

pub(super) fn parse_line<'l>(
    line: &'l [u8],
    names: &FieldNames,
    headers: &mut HeaderCollector,
) -> Result<ParsedLine<'l>, LineError> {
    let text = str::from_utf8(line).map_err(|_| LineError::InvalidUtf8)?;
    let mut found = FieldValues::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let mut path = String::new();
    let walk = FieldVisitor { names, path: &mut path, depth: 0, values: &mut found, headers, header_name_start: None };
    walk.deserialize(&mut json).and_then(|()| json.end()).map_err(|_| LineError::InvalidJson)?;
    build_request(found)
}

fn build_request<'l>(mut found: FieldValues<'l>) -> Result<ParsedLine<'l>, LineError> {
    let at = match found.slots[0].take() {
        Some((_, FieldValue::Text(text))) => timestamp::parse_text(&text),
        Some((_, FieldValue::Float(number))) => timestamp::from_epoch_number(number),
        Some((_, FieldValue::Integer(number))) => timestamp::from_epoch_number(number as f64),
        None => None,
    };
    let at = at.ok_or(LineError::InvalidTime)?;
    let line = found.text(&FieldRole::RequestLine);
    let line = line.as_ref().and_then(parse_request_line);
    let (mut method, mut target) = (found.text(&FieldRole::Method), found.text(&FieldRole::Path));
    if let Some((first, second)) = line {
        method = method.or(Some(first));
        target = target.or(Some(second));
    }
    let (Some(method), Some(target)) = (method, target) else { return Ok(ParsedLine::NotARequest) };
    if !is_method(&method) {
        return Ok(ParsedLine::NotARequest);
    }
    let peer =
        found.text(&FieldRole::Ip).map(|text| parse_address(&text).ok_or(LineError::InvalidAddress)).transpose()?;
    let (mut path, named) = split_target(target);
    if let Some(query) = found.text(&FieldRole::Query)
        && !path.contains('?')
    {
        path = Cow::Owned(format!("{path}?{}", query.strip_prefix('?').unwrap_or(&query)));
    }
    Ok(ParsedLine::Request(LoggedRequest {
        time: at,
        peer,
        method,
        path,
        host: found.text(&FieldRole::Host).or(named.map(Cow::Owned)),
        user: found.text(&FieldRole::User),
        action: found.text(&FieldRole::Action),
    }))
}

/// Visits a value and collects the fields of interest.
struct FieldVisitor<'w, 'l> {
    names: &'w FieldNames,
    /// The name of the value, with the names of its parents.
    path: &'w mut String,
    depth: usize,
    values: &'w mut FieldValues<'l>,
    headers: &'w mut HeaderCollector,
    /// The start of the header's name in the path, if it is a header.
    header_name_start: Option<usize>,
}

impl<'l> FieldVisitor<'_, 'l> {
    fn visit_value(&mut self, value: FieldValue<'l>) {
        if let Some(at) = self.header_name_start {
            return offer_header(self.headers, self.path.get(at..).unwrap_or_default(), &value);
        }
        match self.names.by_name.get(self.path.as_str()) {
            Some((FieldRole::Header(name), _)) => offer_header(self.headers, name, &value),
            Some((role, rank)) => {
                if let Some(slot) = slot_index(role) {
                    self.values.set(slot, *rank, value);
                }
            }
            None => {
                if let Some(name) = self.path.strip_prefix(HEADER_VARIABLE_PREFIX)
                    && !self.headers.wants_none()
                {
                    offer_header(self.headers, &name.replace('_', "-"), &value);
                }
            }
        }
    }
}

fn offer_header(headers: &mut HeaderCollector, name: &str, value: &FieldValue<'_>) {
    match value {
        FieldValue::Text(text) => headers.add_if_wanted(name, text.as_bytes()),
        FieldValue::Float(number) => headers.add_if_wanted(name, number.to_string().as_bytes()),
        FieldValue::Integer(number) => headers.add_if_wanted(name, number.to_string().as_bytes()),
    }
}

impl<'l> DeserializeSeed<'l> for FieldVisitor<'_, 'l> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'l>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'l> Visitor<'l> for FieldVisitor<'_, 'l> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_borrowed_str<E: de::Error>(mut self, text: &'l str) -> Result<(), E> {
        self.visit_value(FieldValue::Text(Cow::Borrowed(text)));
        Ok(())
    }

    fn visit_str<E: de::Error>(mut self, text: &str) -> Result<(), E> {
        self.visit_value(FieldValue::Text(Cow::Owned(text.to_owned())));
        Ok(())
    }

    fn visit_f64<E: de::Error>(mut self, number: f64) -> Result<(), E> {
        self.visit_value(FieldValue::Float(number));
        Ok(())
    }

    fn visit_u64<E: de::Error>(mut self, number: u64) -> Result<(), E> {
        self.visit_value(FieldValue::Integer(number.into()));
        Ok(())
    }

    fn visit_i64<E: de::Error>(mut self, number: i64) -> Result<(), E> {
        self.visit_value(FieldValue::Integer(number.into()));
        Ok(())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'l>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { names, path, depth, values: found, headers, header_name_start: header_at } = self;
        if depth >= MAX_DEPTH {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        loop {
            let (path, found, headers) = (&mut *path, &mut *found, &mut *headers);
            if list
                .next_element_seed(FieldVisitor {
                    names,
                    path,
                    depth: depth + 1,
                    values: found,
                    headers,
                    header_name_start: header_at,
                })?
                .is_none()
            {
                return Ok(());
            }
        }
    }

    fn visit_map<A: MapAccess<'l>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { names, path, depth, values: found, headers, header_name_start: outer_header_name_start } = self;
        let is_headers = matches!(names.by_name.get(path.as_str()), Some((FieldRole::Headers, _)));
        let outer_length = path.len();
        let header_at = is_headers.then_some(outer_length + 1);
        let known = depth == 0 || is_headers || names.parents.contains_key(path.as_str());
        if outer_header_name_start.is_some() || !known || depth >= MAX_DEPTH {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        loop {
            path.truncate(outer_length);
            if map.next_key_seed(FieldPathSeed(&mut *path))?.is_none() {
                path.truncate(outer_length);
                return Ok(());
            }
            if path.len() > MAX_NAME {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let (path, found, headers) = (&mut *path, &mut *found, &mut *headers);
            map.next_value_seed(FieldVisitor {
                names,
                path,
                depth: depth + 1,
                values: found,
                headers,
                header_name_start: header_at,
            })?;
        }
    }
}

/// Appends a field's name to the path.
struct FieldPathSeed<'n>(&'n mut String);

impl<'l> DeserializeSeed<'l> for FieldPathSeed<'_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'l>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldPathSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<(), E> {
        if !self.0.is_empty() {
            self.0.push('.');
        }
        self.0.push_str(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
