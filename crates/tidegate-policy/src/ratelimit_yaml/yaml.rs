//! YAML as a tree with the place of each value. Aliases and `<<` are resolved; both count towards the bounds.

use std::collections::HashMap;

use yaml_rust2::Event;
use yaml_rust2::parser::{Parser, Tag};
use yaml_rust2::scanner::{Marker, ScanError, TScalarStyle};

use super::scalar::Scalar;
use crate::document::{SourceTexts, TextRange};
use crate::error::{Error, quoted};

/// The most lists and mappings that may be nested.
const MAX_DEPTH: usize = 64;
/// The most values in a file; those that an alias repeats count again, and a text counts once more for each 256 bytes.
const MAX_VALUES: usize = 200_000;

/// A value and its place.
#[derive(Clone, Debug)]
pub(super) struct YamlNode {
    pub(super) at: TextRange,
    pub(super) value: YamlValue,
}

#[derive(Clone, Debug)]
pub(super) enum YamlValue {
    /// The text, without quotes, and its meaning.
    Scalar(String, Scalar),
    List(Vec<YamlNode>),
    Map(YamlMap),
}

/// The entries of a mapping, in the order of the file. A name may occur several times.
pub(super) type YamlMap = Vec<(YamlNode, YamlNode)>;

impl YamlNode {
    pub(super) fn is_null(&self) -> bool {
        matches!(self.value, YamlValue::Scalar(_, Scalar::Null))
    }

    /// The text of a scalar, as a key.
    pub(super) fn name(&self) -> Option<&str> {
        match &self.value {
            YamlValue::Scalar(text, _) => Some(text),
            _ => None,
        }
    }

    /// The number of values within this one and itself, and the depth of their nesting.
    fn size(&self) -> (usize, usize) {
        let sum = |(values, depth): (usize, usize), node: &Self| {
            let (more, deeper) = node.size();
            (values + more, depth.max(deeper))
        };
        let (values, depth) = match &self.value {
            YamlValue::Scalar(text, _) => return (1 + text.len() / 256, 0),
            YamlValue::List(items) => items.iter().fold((0, 0), sum),
            YamlValue::Map(entries) => entries.iter().flat_map(|(key, value)| [key, value]).fold((0, 0), sum),
        };
        (values + 1, depth + 1)
    }

    /// Describes the value in a message.
    pub(super) fn describe(&self) -> String {
        match &self.value {
            YamlValue::Scalar(text, kind) => kind.describe(text),
            YamlValue::List(_) => "a list".to_owned(),
            YamlValue::Map(_) => "a mapping".to_owned(),
        }
    }
}

/// The first document of a file.
#[derive(Debug)]
pub(super) struct YamlDocument {
    /// Its value; `None` if the file is empty.
    pub(super) root: Option<YamlNode>,
    /// The start of a second document, which isn't read.
    pub(super) second: Option<TextRange>,
}

/// Parses the text at `whole`.
pub(super) fn parse(texts: &SourceTexts, whole: TextRange) -> Result<YamlDocument, Error> {
    let mut builder = Builder::new(texts, whole);
    let mut parser = Parser::new_from_str(texts.text_at(whole));
    loop {
        let (event, mark) = parser.next_token().map_err(|error| builder.syntax_error(&error))?;
        if matches!(event, Event::DocumentEnd | Event::StreamEnd) {
            break;
        }
        builder.add(event, mark)?;
    }
    let second = match parser.next_token() {
        Ok((Event::DocumentStart, mark)) => Some(builder.place(mark, 1)),
        _ => None,
    };
    Ok(YamlDocument { root: builder.root, second })
}

/// A list or a mapping that isn't complete yet.
struct OpenNode {
    at: TextRange,
    anchor: usize,
    items: OpenItems,
}

enum OpenItems {
    List(Vec<YamlNode>),
    Map(YamlMap, Option<YamlNode>),
}

struct Builder<'t> {
    texts: &'t SourceTexts,
    whole: TextRange,
    /// The offset of each character; empty if each has one byte.
    offsets: Vec<usize>,
    open: Vec<OpenNode>,
    anchors: HashMap<usize, YamlNode>,
    values: usize,
    root: Option<YamlNode>,
}

impl<'t> Builder<'t> {
    fn new(texts: &'t SourceTexts, whole: TextRange) -> Self {
        let text = texts.text_at(whole);
        let offsets = if text.is_ascii() { Vec::new() } else { text.char_indices().map(|(at, _)| at).collect() };
        Self { texts, whole, offsets, open: Vec::new(), anchors: HashMap::new(), values: 0, root: None }
    }

    fn place(&self, mark: Marker, length: usize) -> TextRange {
        let at = if self.offsets.is_empty() { Some(mark.index()) } else { self.offsets.get(mark.index()).copied() };
        let at = at.unwrap_or(self.whole.end).min(self.whole.end);
        self.texts.subrange(self.whole, at..(at + length).min(self.whole.end))
    }

    fn syntax_error(&self, error: &ScanError) -> Error {
        Error::new(self.texts, self.place(*error.marker(), 1), format!("not valid YAML: {}", error.info()), "")
    }

    fn error<T>(&self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(self.texts, at, message, expected))
    }

    fn add(&mut self, event: Event, mark: Marker) -> Result<(), Error> {
        let at = self.place(mark, 1);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let node = self.scalar(text, style, tag, mark)?;
                self.complete(node, anchor)
            }
            Event::SequenceStart(anchor, tag) => self.open(at, anchor, tag, OpenItems::List(Vec::new())),
            Event::MappingStart(anchor, tag) => self.open(at, anchor, tag, OpenItems::Map(Vec::new(), None)),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else { return Ok(()) };
                let (at, value) = match open.items {
                    OpenItems::List(items) => (open.at, YamlValue::List(items)),
                    OpenItems::Map(entries, _) => {
                        // Without braces, the parser reports the first colon.
                        let first = entries.first().map(|(key, _)| key.at).filter(|key| key.start < open.at.start);
                        (first.unwrap_or(open.at), YamlValue::Map(self.merged(entries)?))
                    }
                };
                self.complete(YamlNode { at, value }, open.anchor)
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return self.error(at, "the alias stands within the value that it names", "a value without itself");
                };
                let (values, depth) = node.size();
                self.count(at, values, depth)?;
                let node = YamlNode { at, value: node.value };
                self.complete(node, 0)
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart | Event::DocumentEnd => {
                Ok(())
            }
        }
    }

    fn scalar(&mut self, text: String, style: TScalarStyle, tag: Option<Tag>, mark: Marker) -> Result<YamlNode, Error> {
        let at = match style {
            TScalarStyle::Plain => self.place(mark, text.len().max(1)),
            TScalarStyle::SingleQuoted | TScalarStyle::DoubleQuoted => self.place(mark, text.len() + 2),
            TScalarStyle::Literal | TScalarStyle::Folded => self.place(mark, 1),
        };
        self.count(at, 1 + text.len() / 256, 0)?;
        let is_string = match tag {
            None => style != TScalarStyle::Plain,
            Some(tag) if tag.suffix == "str" => true,
            Some(tag) => return self.unknown_tag(at, &tag),
        };
        let kind = if is_string { Scalar::String } else { Scalar::of_plain(&text) };
        Ok(YamlNode { at, value: YamlValue::Scalar(text, kind) })
    }

    fn unknown_tag<T>(&self, at: TextRange, tag: &Tag) -> Result<T, Error> {
        let name = quoted(&format!("{}{}", tag.handle, tag.suffix));
        self.error(at, format!("the tag {name} has no meaning here"), "a value without a tag, or with `!!str`")
    }

    fn open(&mut self, at: TextRange, anchor: usize, tag: Option<Tag>, items: OpenItems) -> Result<(), Error> {
        if let Some(tag) = tag {
            return self.unknown_tag(at, &tag);
        }
        self.count(at, 1, 1)?;
        self.open.push(OpenNode { at, anchor, items });
        Ok(())
    }

    /// Counts values that are added at this place, nested as deeply as `depth`.
    fn count(&mut self, at: TextRange, values: usize, depth: usize) -> Result<(), Error> {
        self.values += values;
        if self.values > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES}, those of aliases included");
            return self.error(at, "the file has too many values", expected);
        }
        if self.open.len() + depth > MAX_DEPTH {
            return self.error(at, "the values are nested too deeply", format!("at most {MAX_DEPTH} levels"));
        }
        Ok(())
    }

    /// Adds a complete value to the list or mapping around it.
    fn complete(&mut self, node: YamlNode, anchor: usize) -> Result<(), Error> {
        if anchor != 0 {
            // The copy is one more value in memory.
            self.count(node.at, node.size().0, 0)?;
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|open| &mut open.items) {
            None => self.root = Some(node),
            Some(OpenItems::List(items)) => items.push(node),
            Some(OpenItems::Map(entries, key)) => match key.take() {
                None => *key = Some(node),
                Some(key) => entries.push((key, node)),
            },
        }
        Ok(())
    }

    /// Replaces each `<<` by the entries of its mappings. An entry below replaces one of `<<`. One above stays, and
    /// stands twice then: the original replaces it.
    fn merged(&self, entries: YamlMap) -> Result<YamlMap, Error> {
        let is_merge = |key: &YamlNode| matches!(key.value, YamlValue::Scalar(_, Scalar::Merge));
        if !entries.iter().any(|(key, _)| is_merge(key)) {
            return Ok(entries);
        }
        let mut all: Vec<Option<(YamlNode, YamlNode)>> = Vec::new();
        let mut merged: HashMap<String, usize> = HashMap::new();
        for (key, value) in entries {
            let added = if is_merge(&key) { self.merge_sources(&key, value)? } else { vec![(key.clone(), value)] };
            for entry in added {
                let name = entry.0.name().unwrap_or_default();
                if let Some(replaced) = merged.remove(name).and_then(|at| all.get_mut(at)) {
                    *replaced = None;
                }
                if is_merge(&key) {
                    merged.insert(name.to_owned(), all.len());
                }
                all.push(Some(entry));
            }
        }
        Ok(all.into_iter().flatten().collect())
    }

    /// The entries of the mappings that a `<<` names. Those of the first mapping stand last, so that they count.
    fn merge_sources(&self, key: &YamlNode, value: YamlNode) -> Result<YamlMap, Error> {
        let sources = match value.value {
            YamlValue::List(items) => items,
            _ => vec![value],
        };
        let mut entries = YamlMap::new();
        for source in sources.into_iter().rev() {
            match source.value {
                YamlValue::Map(map) => entries.extend(map),
                _ => {
                    return self.error(
                        key.at,
                        "`<<` doesn't name a mapping",
                        "an alias of a mapping, or a list of them",
                    );
                }
            }
        }
        Ok(entries)
    }
}
