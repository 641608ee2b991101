//! The body of a reply, parsed when a rule asks for it.

use std::borrow::Cow;
use std::cell::OnceCell;

use serde_json::Value;

/// The word between pointers of which any may lead to the value.
pub(crate) const POINTER_SEPARATOR: &str = " or ";
/// The part of a body that is searched as text.
const MAX_SEARCHED_TEXT: usize = 4 << 10;
/// The most places that a pointer with `*` finds.
const MAX_PLACES: usize = 1_000;
/// The maximum number of equals signs in an XML document that is read: more than an error has attributes.
const MAX_XML_ATTRIBUTES: usize = 256;

/// A document: the body of a request or a reply.
pub(crate) struct Document<'b> {
    bytes: &'b [u8],
    json: OnceCell<Option<Value>>,
    text: OnceCell<String>,
}

impl<'b> Document<'b> {
    pub(crate) fn new(bytes: &'b [u8]) -> Self {
        // RFC 8259 §8.1 lets readers ignore a byte order mark.
        let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
        Self { bytes, json: OnceCell::new(), text: OnceCell::new() }
    }

    pub(crate) fn json(&self) -> Option<&Value> {
        self.json.get_or_init(|| serde_json::from_slice(self.bytes).ok()).as_ref()
    }

    /// The beginning of the body as text. Bytes that aren't UTF-8 are replaced.
    pub(crate) fn text(&self) -> &str {
        let searched = || String::from_utf8_lossy(&self.bytes[..self.bytes.len().min(MAX_SEARCHED_TEXT)]).into_owned();
        self.text.get_or_init(searched)
    }

    /// The values at a place of an XML document.
    pub(crate) fn xml(&self, path: &XmlPath) -> Vec<String> {
        let Ok(text) = str::from_utf8(self.bytes) else { return Vec::new() };
        // The parser compares each attribute with all others of its element.
        if self.bytes.iter().filter(|byte| **byte == b'=').count() > MAX_XML_ATTRIBUTES {
            return Vec::new();
        }
        // A document type definition, which could make a small document large, is an error.
        let Ok(document) = roxmltree::Document::parse(text.trim_start_matches('\u{feff}').trim_start()) else {
            return Vec::new();
        };
        let is_named = |node: &roxmltree::Node<'_, '_>| {
            let has_parent = |parent: &str| {
                let own = node.parent().filter(roxmltree::Node::is_element);
                own.is_some_and(|own| own.tag_name().name() == parent)
            };
            node.is_element() && node.tag_name().name() == path.element && path.parent.as_deref().is_none_or(has_parent)
        };
        let value = |node: roxmltree::Node<'_, '_>| match &path.attribute {
            Some(attribute) => node.attribute(attribute.as_str()).map(str::to_owned),
            None => Some(node.text().unwrap_or_default().trim().to_owned()),
        };
        document.descendants().filter(is_named).filter_map(value).take(MAX_PLACES).collect()
    }
}

/// JSON pointers (RFC 6901) in which `*` stands for any element or member, with `or` between several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonPath {
    /// The text, as it was written.
    pub(crate) text: String,
    /// The parts of each pointer. `None` is any element or member.
    pointers: Vec<Vec<Option<String>>>,
}

impl JsonPath {
    /// Parses pointers. The error is the first that isn't one: that is neither empty nor begins with a slash, or has a
    /// tilde with neither 0 nor 1 behind it.
    pub(crate) fn new(text: &str) -> Result<Self, &str> {
        let pointers = text.split(POINTER_SEPARATOR).map(str::trim).map(|pointer| {
            let is_escape = |rest: &str| rest.starts_with(['0', '1']);
            let is_valid = (pointer.is_empty() || pointer.starts_with('/'))
                && !pointer.contains(char::is_control)
                && pointer.split('~').skip(1).all(is_escape);
            let unescape = |part: &str| part.replace("~1", "/").replace("~0", "~");
            let part = |part: &str| (part != "*").then(|| unescape(part));
            if is_valid { Ok(pointer.split('/').skip(1).map(part).collect()) } else { Err(pointer) }
        });
        Ok(Self { text: text.to_owned(), pointers: pointers.collect::<Result<_, _>>()? })
    }

    /// The values at all of the places.
    pub(crate) fn find<'v>(&self, root: &'v Value) -> Vec<&'v Value> {
        self.pointers.iter().flat_map(|parts| Self::find_one(parts, root)).take(MAX_PLACES).collect()
    }

    fn find_one<'v>(parts: &[Option<String>], root: &'v Value) -> Vec<&'v Value> {
        let mut found = vec![root];
        for part in parts {
            let mut next: Vec<&Value> = Vec::new();
            for value in found {
                match (part, value) {
                    (Some(name), Value::Object(members)) => next.extend(members.get(name)),
                    (Some(index), Value::Array(items)) => {
                        next.extend(index.parse().ok().and_then(|index: usize| items.get(index)));
                    }
                    (None, Value::Object(members)) => next.extend(members.values()),
                    (None, Value::Array(items)) => next.extend(items),
                    _ => {}
                }
                next.truncate(MAX_PLACES);
            }
            found = next;
        }
        found
    }
}

/// The place of a value in XML: the text or an attribute of an element, by local names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct XmlPath {
    /// The text, as it was written.
    pub(crate) text: String,
    parent: Option<String>,
    element: String,
    attribute: Option<String>,
}

impl XmlPath {
    /// Parses `element`, `parent/element` or `element@attribute`. `None` for another form.
    pub(crate) fn new(text: &str) -> Option<Self> {
        let (path, attribute) = text.split_once('@').map_or((text, None), |(path, name)| (path, Some(name)));
        let (parent, element) = path.split_once('/').map_or((None, path), |(parent, element)| (Some(parent), element));
        let is_name = |name: &str| {
            !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || "_-.:".contains(letter))
        };
        let parts = [parent, Some(element), attribute];
        let is_valid = parts.into_iter().flatten().all(is_name);
        is_valid.then(|| Self {
            text: text.to_owned(),
            parent: parent.map(str::to_owned),
            element: element.to_owned(),
            attribute: attribute.map(str::to_owned),
        })
    }
}

/// The text of a scalar; `None` for others.
pub(crate) fn scalar_text(value: &Value) -> Option<Cow<'_, str>> {
    match value {
        Value::String(text) => Some(Cow::Borrowed(text)),
        Value::Number(number) => Some(Cow::Owned(number.to_string())),
        Value::Bool(flag) => Some(Cow::Borrowed(if *flag { "true" } else { "false" })),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_with_stars_find_all_places() {
        let root = serde_json::json!([{"errors": [{"code": 1}, {"code": "2"}], "a/b": {"x": true, "y": null}}]);
        let found = |text: &str| -> Vec<String> {
            JsonPath::new(text).unwrap().find(&root).into_iter().map(ToString::to_string).collect()
        };
        assert_eq!(found("/0/errors/*/code"), ["1", "\"2\""]);
        assert_eq!(found("/*/errors/1/code"), ["\"2\""]);
        assert_eq!(found("/0/a~1b/*"), ["true", "null"]);
        assert_eq!(found("/0/errors/2/code"), Vec::<String>::new());
        assert_eq!(found("").len(), 1);
        assert_eq!(JsonPath::new("errors"), Err("errors"));
        assert_eq!(JsonPath::new("/a or b"), Err("b"));
        assert_eq!(JsonPath::new("/a~2"), Err("/a~2"));
    }

    #[test]
    fn xml_values_are_found_by_local_names() {
        let body = Document::new(
            b"\n<?xml version=\"1.0\"?>\n<a:ErrorResponse xmlns:a=\"u\"><a:Error><a:Code> SlowDown </a:Code></a:Error><lfm><error code=\"29\">x</error></lfm></a:ErrorResponse>",
        );
        let find = |path: &str| body.xml(&XmlPath::new(path).unwrap());
        assert_eq!(find("Code"), ["SlowDown"]);
        assert_eq!(find("Error/Code"), ["SlowDown"]);
        assert_eq!(find("lfm/Code"), Vec::<String>::new());
        assert_eq!(find("lfm/error@code"), ["29"]);
        let bomb = b"<!DOCTYPE a [<!ENTITY b \"cccc\">]><a>&b;</a>";
        assert_eq!(Document::new(bomb).xml(&XmlPath::new("a").unwrap()), Vec::<String>::new());
        assert!(["", "a@", "/a", "a b"].into_iter().all(|path| XmlPath::new(path).is_none()));
    }
}
