//! The places of values in a request and its reply.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};
use serde_json::Value;

use super::body::{Document, JsonPath, scalar_text};
use super::condition::{Pattern, number};
use super::route::route_name;
use super::{Reply, RequestFacts};

/// The most lines of a header that are read.
const MAX_LINES: usize = 16;
/// The longest name of a scope, in bytes. A longer one names none.
const MAX_SCOPE_NAME: usize = 128;

/// The part of a header's value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum HeaderPart {
    Whole,
    /// The n-th part from 1, between `,` and `/`.
    Part(usize),
    /// The value behind a key: `total=100; remaining=99`.
    Key(String),
    /// The value at a pointer into the JSON that the header holds.
    Json(JsonPath),
}

/// The place of a value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    Header(HeaderName, HeaderPart),
    Json(JsonPath),
    RequestHeader(HeaderName),
    RequestJson(JsonPath),
    /// A segment that a path pattern has captured.
    Path(String),
    Method,
    Host,
    /// The method and the path without ids.
    Route,
    /// The text itself.
    Text(String),
}

/// A request and its reply.
#[derive(Clone, Copy)]
pub(crate) struct Exchange<'e> {
    pub(crate) request: &'e RequestFacts<'e>,
    /// `None` before it has come.
    pub(crate) reply: Option<&'e Reply<'e>>,
    pub(crate) captures: &'e [(&'e str, &'e str)],
}

impl Source {
    /// True if it is in the reply.
    pub(crate) fn is_in_reply(&self) -> bool {
        matches!(self, Self::Header(..) | Self::Json(_))
    }

    pub(crate) fn needs_body(&self) -> bool {
        matches!(self, Self::Json(_))
    }

    pub(crate) fn needs_request_body(&self) -> bool {
        matches!(self, Self::RequestJson(_))
    }

    /// The values there.
    pub(crate) fn texts<'e>(&'e self, exchange: &Exchange<'e>) -> Vec<Cow<'e, str>> {
        let in_json = |document: Option<&'e Document<'e>>, path: &'e JsonPath| {
            let root = document.and_then(Document::json);
            root.map(|root| path.find(root).into_iter().filter_map(scalar_text).collect()).unwrap_or_default()
        };
        match self {
            Self::Header(name, part) => {
                exchange.reply.map(|reply| header_texts(reply.headers, name, part)).unwrap_or_default()
            }
            Self::Json(path) => in_json(exchange.reply.and_then(|reply| reply.body.as_ref()), path),
            Self::RequestHeader(name) => header_texts(exchange.request.headers, name, &HeaderPart::Whole),
            Self::RequestJson(path) => in_json(exchange.request.body.as_ref(), path),
            Self::Path(name) => {
                let captured = exchange.captures.iter().filter(|(own, _)| own == name);
                captured.map(|(_, value)| Cow::Borrowed(*value)).collect()
            }
            Self::Method => vec![Cow::Borrowed(exchange.request.method.as_str())],
            Self::Host => vec![Cow::Borrowed(exchange.request.host)],
            Self::Route => vec![Cow::Owned(route_name(exchange.request))],
            Self::Text(text) => vec![Cow::Borrowed(text)],
        }
    }

    /// The first number there. A text may follow it: `100;w=60`.
    pub(crate) fn number(&self, exchange: &Exchange<'_>) -> Option<f64> {
        let leading = |text: Cow<'_, str>| {
            let text = text.trim().trim_start_matches('"');
            let end = text.find(|letter: char| !letter.is_ascii_digit() && !"+-.".contains(letter));
            number(&text[..end.unwrap_or(text.len())])
        };
        self.texts(exchange).into_iter().find_map(leading)
    }

    /// The first value there as a part of a scope's name.
    pub(crate) fn name(&self, exchange: &Exchange<'_>) -> Option<String> {
        let first = self.texts(exchange).into_iter().next()?;
        let name = first.trim();
        (!name.is_empty() && name.len() <= MAX_SCOPE_NAME).then(|| name.to_owned())
    }
}

fn header_texts<'h>(headers: &'h HeaderMap, name: &HeaderName, part: &HeaderPart) -> Vec<Cow<'h, str>> {
    let lines = headers.get_all(name).iter().take(MAX_LINES).filter_map(|value| value.to_str().ok());
    let mut found = Vec::new();
    for line in lines {
        match part {
            HeaderPart::Whole => found.push(Cow::Borrowed(line.trim())),
            HeaderPart::Part(number) => {
                found.extend(line.split([',', '/']).nth(number - 1).map(|text| Cow::Borrowed(text.trim())));
            }
            HeaderPart::Key(key) => {
                let pairs = line.split([';', ',']).filter_map(|pair| pair.split_once(['=', ':']));
                let own = pairs.filter(|(name, _)| name.trim().eq_ignore_ascii_case(key));
                found.extend(own.map(|(_, value)| Cow::Borrowed(value.trim())));
            }
            HeaderPart::Json(path) => {
                let root: Option<Value> = serde_json::from_str(line).ok();
                let values = root.iter().flat_map(|root| path.find(root));
                found.extend(values.filter_map(scalar_text).map(|text| Cow::Owned(text.into_owned())));
            }
        }
    }
    found
}

/// The text of the first group of a pattern.
pub(crate) fn first_group<'t>(pattern: &Pattern, text: &'t str) -> Option<&'t str> {
    Some(pattern.0.captures(text)?.get(1)?.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn texts(value: &'static str, part: HeaderPart) -> Vec<String> {
        let name = HeaderName::from_static("x");
        let headers = HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))]);
        header_texts(&headers, &name, &part).into_iter().map(Cow::into_owned).collect()
    }

    #[test]
    fn parts_of_headers_are_found() {
        let key = |key: &str| HeaderPart::Key(key.to_owned());
        assert_eq!(texts("32/40", HeaderPart::Part(2)), ["40"]);
        assert_eq!(texts("200, 2000", HeaderPart::Part(2)), ["2000"]);
        assert_eq!(texts("200", HeaderPart::Part(2)), Vec::<String>::new());
        assert_eq!(texts("total=100; remaining=99; resets=41", key("remaining")), ["99"]);
        assert_eq!(texts("user-hour-lim:3500;user-hour-rem:500;", key("user-hour-rem")), ["500"]);
        let json = HeaderPart::Json(JsonPath::new("/*/*/wait").unwrap());
        assert_eq!(texts(r#"{"1":[{"wait":3},{"wait":4}]}"#, json.clone()), ["3", "4"]);
        assert_eq!(texts("{", json), Vec::<String>::new());
    }
}
