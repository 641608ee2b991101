//! Requests to the decision API, as JSON or as a query string, read strictly.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;
use tidegate::policy::{MatchedActions, Query, parse_duration};
use tidegate::{PermitId, Span};
use tidegate_core::MAX_COST;
use tidegate_policy::document::nearest;
use tidegate_policy::{PLATFORMS, UnknownPlatformError};

/// The fields of a decision request. In a query string `header:NAME` stands for any header; in JSON headers are an
/// object.
pub(crate) const FIELDS: &[&str] =
    &["action", "ip", "key", "platform", "cost", "permit", "reservation", "method", "path", "host", "headers"];
/// The fields of a query string, and others of texts.
const TEXT_FIELDS: &[&str] =
    &["action", "ip", "key", "platform", "cost", "permit", "reservation", "method", "path", "host", "header:NAME"];
/// The fields of a request to block a client.
const BLOCK_FIELDS: &[&str] = &["action", "ip", "key", "platform", "method", "path", "host", "headers", "for"];
/// The lengths of blocks that operators impose.
const BLOCK_LENGTHS: RangeInclusive<Span> = Span::from_secs(1)..=Span::from_secs(30 * 86_400);
/// The maximum number of headers in one decision request.
pub(crate) const MAX_HEADERS: usize = 64;

/// One decision request.
#[derive(Debug, Default)]
pub(crate) struct DecisionRequest<'a> {
    pub(crate) action: Option<Cow<'a, str>>,
    /// The actions, if they are known already.
    actions: Option<MatchedActions>,
    ip: Option<IpAddr>,
    key: Option<Cow<'a, str>>,
    platform: Option<Cow<'a, str>>,
    cost: Option<u64>,
    pub(crate) permit: Option<PermitId>,
    reservation: Option<Cow<'a, str>>,
    method: Option<Cow<'a, str>>,
    pub(crate) path: Option<Cow<'a, str>>,
    host: Option<Cow<'a, str>>,
    headers: Option<HeaderMap>,
    /// The length of a block.
    pub(crate) block_length: Option<Span>,
}

/// An error in a decision request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecisionRequestError {
    /// The field with the error. `None` if the error isn't about a field.
    pub(crate) field: Option<String>,
    pub(crate) message: String,
    /// The nearest existing name, if a name is wrong.
    pub(crate) nearest: Option<&'static str>,
}

impl DecisionRequestError {
    pub(crate) fn new<'f>(field: impl Into<Option<&'f str>>, message: impl Into<String>) -> Self {
        Self { field: field.into().map(str::to_owned), message: message.into(), nearest: None }
    }

    /// The error for a field, or a parameter, that isn't one of these.
    pub(crate) fn unknown_field(field: &str, known: &[&'static str]) -> Self {
        let field: String = field.chars().take(64).collect();
        let nearest = nearest(&field, known.iter().copied());
        let message = match (nearest, known) {
            (Some(name), _) => format!("unknown field `{field}`; did you mean `{name}`?"),
            (None, []) => format!("unknown field `{field}`; there are none here"),
            (None, known) => format!("unknown field `{field}`; the fields are {}", known.join(", ")),
        };
        Self { field: Some(field), message, nearest }
    }
}

impl<'a> DecisionRequest<'a> {
    pub(crate) fn query(&self) -> Query<'_> {
        Query {
            action: self.action.as_deref(),
            actions: self.actions,
            ip: self.ip,
            key: self.key.as_deref(),
            platform: self.platform.as_deref(),
            cost: self.cost,
            reservation: self.reservation.as_deref(),
            method: self.method.as_deref(),
            path: self.path.as_deref(),
            host: self.host.as_deref(),
            headers: self.headers.as_ref(),
            ..Query::default()
        }
    }

    /// Reads a JSON object.
    pub(crate) fn from_json(bytes: &'a [u8]) -> Result<Self, DecisionRequestError> {
        Self::from_json_with(bytes, FIELDS)
    }

    /// Reads the JSON object of a request to block a client.
    pub(crate) fn block_from_json(bytes: &'a [u8]) -> Result<Self, DecisionRequestError> {
        Self::from_json_with(bytes, BLOCK_FIELDS)
    }

    /// Reads a JSON object that has no fields.
    pub(crate) fn empty_from_json(bytes: &'a [u8]) -> Result<Self, DecisionRequestError> {
        Self::from_json_with(bytes, &[])
    }

    fn from_json_with(bytes: &'a [u8], known: &'static [&'static str]) -> Result<Self, DecisionRequestError> {
        // One UTF-8 check of all bytes is cheaper than one per string.
        let text = str::from_utf8(bytes).map_err(|_| DecisionRequestError::new(None, "the body isn't UTF-8"))?;
        let mut visitor = RequestVisitor { request: Self::default(), known, field: None, error: None };
        let mut json = serde_json::Deserializer::from_str(text);
        let read = (&mut visitor).deserialize(&mut json).and_then(|()| json.end());
        match read {
            Ok(()) => Ok(visitor.request),
            Err(error) => Err(visitor.error.unwrap_or_else(|| match (error.classify(), visitor.field) {
                (Category::Data, Some(field)) => DecisionRequestError::new(field, format!("`{field}`: {error}")),
                (Category::Data, None) => DecisionRequestError::new(None, "the body is no JSON object"),
                _ => DecisionRequestError::new(None, format!("the body is no JSON: {error}")),
            })),
        }
    }

    /// Reads a query string.
    pub(crate) fn from_query(query: &'a str) -> Result<Self, DecisionRequestError> {
        let mut request = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decode(name).ok_or_else(|| DecisionRequestError::unknown_field(name, FIELDS))?;
            let value = decode(value).ok_or_else(|| DecisionRequestError::new(&*name, "the value isn't UTF-8"))?;
            request.set_text(&name, value)?;
        }
        Ok(request)
    }

    /// Sets a field by its name in query strings.
    pub(crate) fn set_text(&mut self, name: &str, value: Cow<'a, str>) -> Result<(), DecisionRequestError> {
        let slot = match name {
            "action" => &mut self.action,
            "key" => &mut self.key,
            "method" => &mut self.method,
            "path" => &mut self.path,
            "host" => &mut self.host,
            "reservation" => &mut self.reservation,
            "platform" => return set_once(&mut self.platform, name, platform(value)?),
            "ip" => {
                let rule = "an `ip` is an IPv4 or IPv6 address without a port";
                let ip = value.parse().map_err(|_| DecisionRequestError::new(name, rule))?;
                return set_once(&mut self.ip, name, ip);
            }
            "permit" => {
                let permit = value.parse::<PermitId>();
                let permit = permit.map_err(|error| DecisionRequestError::new(name, error.to_string()))?;
                return set_once(&mut self.permit, name, permit);
            }
            "cost" => {
                let cost = value.parse().ok().filter(|cost| *cost <= MAX_COST);
                let cost = cost.ok_or_else(|| DecisionRequestError::new(name, format!("a cost is {COST_FORM}")))?;
                return set_once(&mut self.cost, name, cost);
            }
            _ => {
                let Some(header) = name.strip_prefix("header:") else {
                    return Err(DecisionRequestError::unknown_field(name, TEXT_FIELDS));
                };
                return self.set_header(header, &value);
            }
        };
        set_once(slot, name, value)
    }

    /// True if the request has this field of `ip` and `platform`.
    pub(crate) fn has(&self, name: &str) -> bool {
        if name == "ip" { self.ip.is_some() } else { self.platform.is_some() }
    }

    /// Sets the actions, which `action`, `method`, `path` and `host` don't choose then.
    pub(crate) fn set_actions(&mut self, actions: MatchedActions) {
        self.actions = Some(actions);
    }

    /// Tells that all headers of the request are given: those that aren't set are missing.
    pub(crate) fn set_no_headers(&mut self) {
        self.headers.get_or_insert_default();
    }

    fn set_header(&mut self, name: &str, value: &str) -> Result<(), DecisionRequestError> {
        let field = || format!("header:{}", name.chars().take(64).collect::<String>());
        let header = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| DecisionRequestError::new(&*field(), "this is no header's name"))?;
        let value = HeaderValue::from_str(value)
            .map_err(|_| DecisionRequestError::new(&*field(), "a header's value has no control characters"))?;
        let headers = self.headers.get_or_insert_default();
        if headers.len() >= MAX_HEADERS {
            return Err(DecisionRequestError::new("headers", format!("there are more than {MAX_HEADERS} headers")));
        }
        headers.append(header, value);
        Ok(())
    }
}

/// Checks the name of a platform.
fn platform(name: Cow<'_, str>) -> Result<Cow<'_, str>, DecisionRequestError> {
    if PLATFORMS.contains(&&*name) {
        return Ok(name);
    }
    let found: String = name.chars().take(64).collect();
    let nearest = nearest(&found, PLATFORMS);
    let message = UnknownPlatformError { found }.to_string();
    Err(DecisionRequestError { nearest, ..DecisionRequestError::new("platform", message) })
}

const COST_FORM: &str = "a whole number from 0 to 1099511627776 (2^40)";

pub(crate) fn set_once<T>(slot: &mut Option<T>, name: &str, value: T) -> Result<(), DecisionRequestError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(DecisionRequestError::new(name, format!("`{name}` is there twice"))),
    }
}

/// Decodes `%41` and `+`. Borrows the text if there is nothing to decode.
pub(crate) fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.bytes().any(|byte| matches!(byte, b'%' | b'+')) {
        return Some(Cow::Borrowed(text));
    }
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let escape = bytes.get(at + 1..at + 3).filter(|_| *byte == b'%');
        let value = escape.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (byte, value) {
            (_, Some(value)) => {
                decoded.push(value);
                at += 2;
            }
            (b'+', _) => decoded.push(b' '),
            _ => decoded.push(*byte),
        }
        at += 1;
    }
    String::from_utf8(decoded).ok().map(Cow::Owned)
}

/// The progress of reading a JSON request, so that an error can name its field.
struct RequestVisitor<'a> {
    request: DecisionRequest<'a>,
    known: &'static [&'static str],
    field: Option<&'static str>,
    error: Option<DecisionRequestError>,
}

impl<'de> DeserializeSeed<'de> for &mut RequestVisitor<'de> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut RequestVisitor<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(TextField(name)) = map.next_key::<TextField<'de>>()? {
            let Some(&field) = self.known.iter().find(|known| **known == name) else {
                self.error = Some(DecisionRequestError::unknown_field(&name, self.known));
                return Err(de::Error::custom("unknown field"));
            };
            let request = &mut self.request;
            let slot = match field {
                "action" => Some(&mut request.action),
                "key" => Some(&mut request.key),
                "method" => Some(&mut request.method),
                "path" => Some(&mut request.path),
                "host" => Some(&mut request.host),
                "reservation" => Some(&mut request.reservation),
                _ => None,
            };
            self.field = Some(field);
            let set = match (slot, field) {
                (Some(slot), _) => {
                    map.next_value::<Option<TextField<'de>>>()?.map(|text| set_once(slot, field, text.0))
                }
                (None, "cost") => {
                    map.next_value::<Option<CostField>>()?.map(|cost| set_once(&mut request.cost, field, cost.0))
                }
                (None, "for") => map
                    .next_value::<Option<LengthField>>()?
                    .map(|length| set_once(&mut request.block_length, field, length.0)),
                (None, "headers") => map.next_value::<Option<HeadersField>>()?.map(|headers| headers.add_to(request)),
                (None, _) => map.next_value::<Option<TextField<'de>>>()?.map(|text| request.set_text(field, text.0)),
            };
            if let Some(Err(wrong)) = set {
                self.error = Some(wrong);
                return Err(de::Error::custom("wrong value"));
            }
            self.field = None;
        }
        Ok(())
    }
}

/// A string, borrowed if it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct TextField<'a>(#[serde(borrow)] Cow<'a, str>);

struct CostField(u64);

impl<'de> Deserialize<'de> for CostField {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CostVisitor;
        impl Visitor<'_> for CostVisitor {
            type Value = CostField;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(COST_FORM)
            }
            fn visit_u64<E: de::Error>(self, cost: u64) -> Result<CostField, E> {
                if cost <= MAX_COST {
                    Ok(CostField(cost))
                } else {
                    Err(E::invalid_value(de::Unexpected::Unsigned(cost), &self))
                }
            }
        }
        deserializer.deserialize_u64(CostVisitor)
    }
}

/// The length of a block: text such as `"10m"`, or a number of seconds.
struct LengthField(Span);

impl<'de> Deserialize<'de> for LengthField {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LengthVisitor;
        impl Visitor<'_> for LengthVisitor {
            type Value = LengthField;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"10m\", or a number of seconds, from 1 s to 30 days")
            }
            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<LengthField, E> {
                let length = Some(Span::from_secs(seconds)).filter(|length| BLOCK_LENGTHS.contains(length));
                length.map(LengthField).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(seconds), &self))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<LengthField, E> {
                let length = parse_duration(text).ok().filter(|length| BLOCK_LENGTHS.contains(length));
                length.map(LengthField).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(LengthVisitor)
    }
}

/// `{"name": "value", …}`, with `null` for a missing header.
#[derive(Default)]
struct HeadersField(Vec<(String, String)>);

impl HeadersField {
    fn add_to(self, request: &mut DecisionRequest<'_>) -> Result<(), DecisionRequestError> {
        request.headers.get_or_insert_default();
        self.0.iter().try_for_each(|(name, value)| request.set_header(name, value))
    }
}

impl<'de> Deserialize<'de> for HeadersField {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeadersVisitor;
        impl<'de> Visitor<'de> for HeadersVisitor {
            type Value = HeadersField;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of header names and their values")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeadersField, A::Error> {
                let mut headers = HeadersField::default();
                while let Some((name, value)) = map.next_entry::<String, Option<String>>()? {
                    headers.0.extend(value.map(|value| (name, value)));
                    if headers.0.len() > MAX_HEADERS {
                        break;
                    }
                }
                // Reads the rest of an object over the limit. Otherwise the parser reports a syntax error instead.
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(headers)
            }
        }
        deserializer.deserialize_map(HeadersVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(json: &str) -> (Option<String>, String) {
        let wrong = DecisionRequest::from_json(json.as_bytes()).unwrap_err();
        (wrong.field, wrong.message)
    }

    #[test]
    fn a_complete_decision_request_is_parsed() {
        let json = br#"{"action":"login","ip":"203.0.113.7","key":"a\nb","platform":null,"cost":3,
            "headers":{"X-Tenant":"t1","x-none":null},"method":"POST","path":"/login?x=1","host":"h"}"#;
        let request = DecisionRequest::from_json(json).unwrap();
        let query = request.query();
        assert_eq!(query.action, Some("login"));
        assert_eq!(query.ip, Some("203.0.113.7".parse().unwrap()));
        assert_eq!(query.key, Some("a\nb"));
        assert_eq!((query.platform, query.cost), (None, Some(3)));
        assert_eq!(query.headers.unwrap()["x-tenant"], "t1");
        let request =
            DecisionRequest::from_query("action=log%69n&ip=::1&key=a+b%26&cost=3&header:x-tenant=t%201").unwrap();
        let query = request.query();
        assert_eq!((query.action, query.key, query.cost), (Some("login"), Some("a b&"), Some(3)));
        assert_eq!(query.headers.unwrap()["x-tenant"], "t 1");
    }

    #[test]
    fn too_many_headers_are_reported_as_such() {
        let expected = "there are more than 64 headers";
        for count in [MAX_HEADERS, MAX_HEADERS + 1, MAX_HEADERS + 2, 300] {
            let members: Vec<String> = (0..count).map(|number| format!(r#""x-{number}":"v""#)).collect();
            let json = format!(r#"{{"action":"login","headers":{{"none":null,{}}},"ip":"::1"}}"#, members.join(","));
            let pairs: String = (0..count).map(|number| format!("&header:x-{number}=v")).collect();
            let query = format!("action=login{pairs}");
            for read in [DecisionRequest::from_json(json.as_bytes()), DecisionRequest::from_query(&query)] {
                match read {
                    Ok(request) => assert!(count <= MAX_HEADERS && request.headers.unwrap().len() == count),
                    Err(wrong) => {
                        assert!(count > MAX_HEADERS, "{wrong:?}");
                        assert_eq!((wrong.field.as_deref(), &*wrong.message), (Some("headers"), expected));
                    }
                }
            }
        }
        let broken = format!(r#"{{"headers":{{{}"a":"b",}}}}"#, r#""x":"v","#.repeat(MAX_HEADERS + 1));
        assert!(wrong(&broken).1.contains("no JSON"), "what is broken stays so");
    }

    #[test]
    fn errors_name_the_wrong_field() {
        for (json, field, says) in [
            (r#"{"acton":"login"}"#, Some("acton"), "did you mean `action`?"),
            (r#"{"zzzzzz":1}"#, Some("zzzzzz"), "the fields are action, ip"),
            (r#"{"action":5}"#, Some("action"), "expected a string"),
            (r#"{"ip":"1.2.3.4:80"}"#, Some("ip"), "without a port"),
            (r#"{"ip":["1.2.3.4"]}"#, Some("ip"), "expected a string"),
            (r#"{"cost":-1}"#, Some("cost"), "whole number"),
            (r#"{"cost":1.5}"#, Some("cost"), "whole number"),
            (r#"{"cost":"1"}"#, Some("cost"), "whole number"),
            (r#"{"cost":1099511627777}"#, Some("cost"), "whole number"),
            (r#"{"key":"a","key":"b"}"#, Some("key"), "twice"),
            (r#"{"permit":"xyz"}"#, Some("permit"), "hexadecimal"),
            (r#"{"headers":{"a b":"c"}}"#, Some("header:a b"), "no header's name"),
            (r#"{"headers":{"a":"b\nc"}}"#, Some("header:a"), "control characters"),
            (r#"{"headers":[]}"#, Some("headers"), "an object of header names"),
            ("[]", None, "no JSON object"),
            ("", None, "no JSON"),
            (r#"{"action":"login""#, None, "no JSON"),
            (r#"{"action":"login"}x"#, None, "no JSON"),
        ] {
            let (found, message) = wrong(json);
            assert_eq!(found.as_deref(), field, "{json}: {message}");
            assert!(message.contains(says), "{json}: {message}");
        }
        assert!(DecisionRequest::from_json(b"{\"key\":\"\xff\"}").unwrap_err().message.contains("UTF-8"));
        for (query, field) in [("acton=login", "acton"), ("cost=x", "cost"), ("key=%ff", "key"), ("ip=1&ip=2", "ip")] {
            assert_eq!(DecisionRequest::from_query(query).unwrap_err().field.as_deref(), Some(field));
        }
    }
}
