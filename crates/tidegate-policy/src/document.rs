//! TOML as written, with the location of each value, before any check; and the [`DocumentReader`] that checks it.
//!
//! Policies are read with it. Other documents can use it to report errors as policies do: with file, line, column
//! and the nearest valid name. Such a document may have the sections of a policy beside its own
//! ([`DocumentReader::policy`]).

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Error, ErrorList, Errors, quoted, value_start};
pub use crate::nearest::nearest;
pub use crate::read::DocumentReader;

/// The largest file, in bytes: 4 MiB.
const MAX_FILE: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceKind {
    File,
    Variable,
}

#[derive(Clone, Debug)]
pub(crate) struct SourceText {
    pub(crate) kind: SourceKind,
    pub(crate) name: String,
    pub(crate) body: String,
    /// True if the text itself may be a secret; it is then never shown.
    pub(crate) secret: bool,
    /// The offset of each line's first byte.
    line_starts: Vec<usize>,
}

impl SourceText {
    pub(crate) fn new(kind: SourceKind, name: &str, body: &str, secret: bool) -> Self {
        let begins = body.match_indices('\n').map(|(newline, _)| newline + 1);
        let line_starts = std::iter::once(0).chain(begins).collect();
        Self { kind, name: name.to_owned(), body: body.to_owned(), secret, line_starts }
    }

    /// The number of the line that contains this byte, from 1.
    pub(crate) fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|begin| *begin <= at)
    }

    /// The offset of the first byte of the line that contains this byte.
    pub(crate) fn line_start(&self, at: usize) -> usize {
        self.line_starts[self.line(at) - 1]
    }
}

/// A range of bytes in one of the source texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextRange {
    source: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl TextRange {
    /// True if this range begins in the same text as another one, after its end.
    pub(crate) fn is_after(self, other: Self) -> bool {
        self.source == other.source && self.start >= other.end
    }
}

/// Every text that the policy is read from.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourceTexts(Vec<SourceText>);

impl SourceTexts {
    /// Adds a text, and returns its whole range.
    pub(crate) fn add(&mut self, text: SourceText) -> TextRange {
        let range = TextRange { source: self.0.len(), start: 0, end: text.body.len() };
        self.0.push(text);
        range
    }

    /// The whole range of the text that was added last.
    pub(crate) fn last_range(&self) -> TextRange {
        let end = self.0.last().map_or(0, |text| text.body.len());
        TextRange { source: self.0.len().saturating_sub(1), start: 0, end }
    }

    pub(crate) fn get(&self, at: TextRange) -> &SourceText {
        &self.0[at.source]
    }

    pub(crate) fn text_at(&self, at: TextRange) -> &str {
        self.get(at).body.get(at.start..at.end).unwrap_or("")
    }

    /// A range in the text that contains `at`, extended to whole characters.
    pub(crate) fn subrange(&self, at: TextRange, range: Range<usize>) -> TextRange {
        let body = &self.get(at).body;
        let start = body.floor_char_boundary(range.start);
        let end = body.ceil_char_boundary(range.end.max(start));
        TextRange { source: at.source, start, end }
    }

    /// The range within the contents of a string, if the source has them without escapes; the whole string otherwise.
    pub(crate) fn range_in_string(&self, node: &TomlNode, text: &str, range: Range<usize>) -> TextRange {
        let raw = self.text_at(node.at);
        let offset = if raw == text {
            0
        } else if raw.len() == text.len() + 2 && raw.get(1..=text.len()) == Some(text) {
            1
        } else {
            return node.at;
        };
        let start = node.at.start + offset;
        // An empty range at the end is shown at the closing quote.
        self.subrange(node.at, start + range.start..start + range.end)
    }

    pub(crate) fn line(&self, at: TextRange) -> usize {
        self.get(at).line(at.start)
    }

    /// Describes a second location in a message: "on line 12" or "in the variable NAME".
    pub(crate) fn describe_location(&self, at: TextRange) -> String {
        match self.get(at).kind {
            SourceKind::File => format!("on line {}", self.line(at)),
            SourceKind::Variable => format!("in the variable {}", self.get(at).name),
        }
    }
}

/// A parsed document.
#[derive(Debug)]
pub struct TomlDocument {
    pub(crate) texts: SourceTexts,
    root: TomlTable,
    /// The provider presets, by name.
    pub(crate) presets: TomlTable,
    /// The location of errors about something that is missing.
    pub(crate) full_range: TextRange,
}

impl TomlDocument {
    /// Parses the text of a file. Errors call it `name`.
    ///
    /// # Errors
    /// If the text isn't TOML, isn't UTF-8, or is larger than 4 MiB.
    pub fn parse(name: &str, body: &[u8]) -> Result<Self, Errors> {
        let mut texts = SourceTexts::default();
        let root = parse_file(&mut texts, name, body).map_err(Errors::new)?;
        let whole = texts.add(SourceText::new(SourceKind::File, name, "", false));
        let presets = crate::outbound::preset::load_presets(&mut texts);
        Ok(Self { texts, root, presets, full_range: whole })
    }

    /// The table at the root.
    pub fn root(&self) -> &TomlTable {
        &self.root
    }
}

/// A value and its location.
#[derive(Clone, Debug)]
pub struct TomlNode {
    /// The location.
    pub at: TextRange,
    /// The value.
    pub value: TomlValue,
}

/// A TOML value.
#[derive(Clone, Debug)]
pub enum TomlValue {
    /// A string.
    String(String),
    /// An integer; `None` if it doesn't fit in 64 bits.
    Integer(Option<i64>),
    /// A number with a decimal point or an exponent, `inf` or `nan`.
    Float,
    /// `true` or `false`.
    Boolean(bool),
    /// A date or time without quotes.
    DateTime,
    /// A list.
    List(Vec<TomlNode>),
    /// A table.
    Table(TomlTable),
}

/// A table, with its entries in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct TomlTable {
    /// The entries; each name occurs once.
    pub entries: Vec<TomlEntry>,
}

/// A name and its value.
#[derive(Clone, Debug)]
pub struct TomlEntry {
    /// The name.
    pub key: String,
    /// The location of the name.
    pub key_at: TextRange,
    /// The value.
    pub node: TomlNode,
}

impl TomlTable {
    /// The entry of this name.
    pub fn get(&self, key: &str) -> Option<&TomlEntry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut TomlEntry> {
        self.entries.iter_mut().find(|entry| entry.key == key)
    }

    /// The value of this name.
    pub fn node(&self, key: &str) -> Option<&TomlNode> {
        self.get(key).map(|entry| &entry.node)
    }

    pub(crate) fn table(&self, key: &str) -> Option<&TomlTable> {
        self.node(key)?.as_table()
    }

    pub(crate) fn table_mut(&mut self, key: &str) -> Option<&mut TomlTable> {
        self.get_mut(key)?.node.as_table_mut()
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.node(key)?.as_str()
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.retain(|entry| entry.key != key);
    }

    /// Sets a value, replacing the one of the same name.
    pub(crate) fn insert(&mut self, key: &str, at: TextRange, value: TomlValue) {
        let node = TomlNode { at, value };
        match self.get_mut(key) {
            Some(entry) => entry.node = node,
            None => self.entries.push(TomlEntry { key: key.to_owned(), key_at: at, node }),
        }
    }

    /// This table with `other` merged over it. For a name in both, the other's value is taken; two tables under one
    /// name are merged in the same way.
    #[must_use]
    pub fn merged_with(&self, other: &Self) -> Self {
        let mut merged = self.clone();
        merged.merge(other, usize::MAX);
        merged
    }

    /// Merges `above` over this table. Two tables under one name are merged as well, down to this depth.
    pub(crate) fn merge(&mut self, above: &Self, depth: usize) {
        for entry in &above.entries {
            let Some(below) = self.get_mut(&entry.key) else {
                self.entries.push(entry.clone());
                continue;
            };
            match (&mut below.node.value, &entry.node.value) {
                (TomlValue::Table(table), TomlValue::Table(above)) if depth > 0 => {
                    table.merge(above, depth - 1);
                    below.node.at = entry.node.at;
                }
                _ => *below = entry.clone(),
            }
        }
    }

    /// The table under this key, created if it is missing; `None` if there is a value of another type.
    pub(crate) fn table_or_insert(&mut self, key: &str, at: TextRange) -> Option<&mut TomlTable> {
        if self.get(key).is_none() {
            self.insert(key, at, TomlValue::Table(TomlTable::default()));
        }
        self.table_mut(key)
    }
}

impl TomlNode {
    /// The table, if the value is one.
    pub fn as_table(&self) -> Option<&TomlTable> {
        match &self.value {
            TomlValue::Table(table) => Some(table),
            _ => None,
        }
    }

    /// The items of a list; any other value is one item.
    pub(crate) fn items(&self) -> &[TomlNode] {
        match &self.value {
            TomlValue::List(items) => items,
            _ => std::slice::from_ref(self),
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match &self.value {
            TomlValue::String(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn is_word(&self, word: &str) -> bool {
        self.as_str() == Some(word)
    }

    pub(crate) fn as_table_mut(&mut self) -> Option<&mut TomlTable> {
        match &mut self.value {
            TomlValue::Table(table) => Some(table),
            _ => None,
        }
    }

    /// Describes the value in a message: "the number 5", "a list".
    pub(crate) fn describe(&self, texts: &SourceTexts) -> String {
        match &self.value {
            TomlValue::String(text) => format!("the string {}", quoted(text)),
            TomlValue::Integer(_) | TomlValue::Float => format!("the number {}", quoted(texts.text_at(self.at))),
            TomlValue::Boolean(flag) => format!("`{flag}`"),
            TomlValue::DateTime => "a date or time".to_owned(),
            TomlValue::List(list) if list.is_empty() => "an empty list".to_owned(),
            TomlValue::List(_) => "a list".to_owned(),
            TomlValue::Table(_) => "a table".to_owned(),
        }
    }
}

/// Parses a file. Invalid TOML gives errors; its readable parts are then not checked, since they may not be what
/// was meant.
pub(crate) fn parse_file(texts: &mut SourceTexts, name: &str, body: &[u8]) -> Result<TomlTable, ErrorList> {
    let whole = add_file(texts, name, body, "a policy file", "TOML")?;
    let text = texts.text_at(whole).to_owned();
    let (table, errors) = DeTable::parse_recoverable(&text);
    if errors.is_empty() {
        Ok(convert_table(texts, whole, table.into_inner()))
    } else {
        Err(convert_errors(texts, whole, &errors))
    }
}

/// Adds the text of a file in UTF-8, and returns its whole range. Errors call it `expected`, in this language.
pub(crate) fn add_file(
    texts: &mut SourceTexts,
    name: &str,
    body: &[u8],
    expected: &str,
    language: &str,
) -> Result<TextRange, Error> {
    // A byte order mark isn't a mistake of the author.
    let body = body.strip_prefix("\u{feff}".as_bytes()).unwrap_or(body);
    let too_large = body.len() > MAX_FILE;
    let body = if too_large { &[] } else { body };
    let whole = texts.add(SourceText::new(SourceKind::File, name, &String::from_utf8_lossy(body), false));
    if too_large {
        return Err(Error::new(texts, whole, "the file is larger than 4 MiB", expected));
    }
    if let Err(error) = str::from_utf8(body) {
        let at = error.valid_up_to();
        let first = texts.subrange(whole, at..at + 1);
        let error = Error::new(texts, first, format!("the byte 0x{:02X} here isn't UTF-8", body[at]), "text in UTF-8");
        return Err(error.help(format!("save the file as UTF-8, which is all that {language} knows")));
    }
    Ok(whole)
}

/// Parses one TOML value from the range `at` of a text.
pub(crate) fn parse_value(texts: &SourceTexts, at: TextRange) -> Result<TomlNode, Error> {
    match DeValue::parse(texts.text_at(at)) {
        Ok(value) => Ok(convert(texts, at, value)),
        Err(error) => {
            let place = parsed_range(texts, at, error.span().unwrap_or_default());
            Err(convert_error(texts, place, error.message()))
        }
    }
}

/// The range of a span that the parser found in the text at `text`.
fn parsed_range(texts: &SourceTexts, text: TextRange, span: Range<usize>) -> TextRange {
    texts.subrange(text, span.start + text.start..span.end + text.start)
}

fn convert(texts: &SourceTexts, text: TextRange, value: Spanned<DeValue<'_>>) -> TomlNode {
    let at = parsed_range(texts, text, value.span());
    let value = match value.into_inner() {
        DeValue::String(string) => TomlValue::String(string.into_owned()),
        DeValue::Integer(integer) => TomlValue::Integer(i64::from_str_radix(integer.as_str(), integer.radix()).ok()),
        DeValue::Float(_) => TomlValue::Float,
        DeValue::Boolean(flag) => TomlValue::Boolean(flag),
        DeValue::Datetime(_) => TomlValue::DateTime,
        DeValue::Array(array) => TomlValue::List(array.into_iter().map(|value| convert(texts, text, value)).collect()),
        DeValue::Table(table) => TomlValue::Table(convert_table(texts, text, table)),
    };
    TomlNode { at, value }
}

fn convert_table(texts: &SourceTexts, text: TextRange, table: DeTable<'_>) -> TomlTable {
    let entries = table.into_iter().map(|(key, value)| TomlEntry {
        key_at: parsed_range(texts, text, key.span()),
        key: key.into_inner().into_owned(),
        node: convert(texts, text, value),
    });
    let mut entries: Vec<TomlEntry> = entries.collect();
    // The parser sorts by name, but the first match in the file has to win.
    entries.sort_by_key(|entry| entry.key_at.start);
    TomlTable { entries }
}

/// Converts the parser's errors to messages for users who don't know TOML well.
fn convert_errors(texts: &SourceTexts, text: TextRange, parse_errors: &[toml::de::Error]) -> ErrorList {
    let body = &texts.get(text).body;
    let is_header = |at: TextRange| body[texts.get(text).line_start(at.start)..].trim_start().starts_with('[');
    let mut errors = ErrorList::default();
    let mut duplicate_header: Option<TextRange> = None;
    let mut last_line = None;
    for parse_error in parse_errors {
        let at = parsed_range(texts, text, parse_error.span().unwrap_or_default());
        let line = texts.line(at);
        let is_twice = parse_error.message().contains("duplicate key");
        // Each key of a duplicate section is a duplicate too, which need not be reported.
        if let Some(header) = duplicate_header.filter(|_| is_twice && !is_header(at)) {
            let between = &body[header.end..at.start];
            if !between.lines().skip(1).any(|line| line.trim_start().starts_with('[')) {
                duplicate_header = Some(at);
                continue;
            }
        }
        duplicate_header = if is_twice && is_header(at) { Some(at) } else { duplicate_header };
        let rest_of_line = body[at.start..].lines().next().unwrap_or("");
        let looks_like_yaml = rest_of_line.starts_with(':') && parse_error.message().contains("unquoted key");
        if looks_like_yaml {
            let error = Error::new(texts, at, "not valid TOML: a colon behind a key", "`key = value`");
            let help = "this looks like YAML; a policy is TOML: [inbound], and below it listen = \"127.0.0.1:8080\"";
            return error.help(help).into();
        }
        // A further error on the same line usually follows from the first.
        if last_line != Some(line) {
            errors.add(|| convert_error(texts, at, parse_error.message()));
        }
        last_line = Some(line);
    }
    errors
}

fn convert_error(texts: &SourceTexts, at: TextRange, message: &str) -> Error {
    let body = &texts.get(at).body;
    let begins = texts.get(at).line_start(at.start);
    let line = body[begins..].lines().next().unwrap_or("");
    let (what, expected) = message.split_once(", expected ").unwrap_or((message, ""));
    let expected = if expected == "nothing" { "" } else { expected };
    if message.contains("duplicate key") {
        let is_header = line.trim_start().starts_with('[');
        let (key, home) = (quoted(texts.text_at(at)), if is_header { "the file" } else { "its section" });
        let error = Error::new(texts, at, format!("{key} stands twice in {home}"), "each name once");
        return error.help("remove one of the two, or give it the name that was meant");
    }
    if what == "invalid basic string" || what == "invalid literal string" {
        let closes = if what.contains("basic") { '"' } else { '\'' };
        if expected.contains(closes) {
            return Error::new(texts, at, "not valid TOML: the string isn't closed", format!("`{closes}` at its end"));
        }
    }
    let made = Error::new(texts, at, format!("not valid TOML: {what}"), expected);
    let Some((key, value)) = line.split_once('=') else {
        if texts.get(at).kind == SourceKind::File && !line.trim_start().starts_with('[') {
            return made.help("a line is `key = value`, `[section]`, or a comment that begins with #");
        }
        return made;
    };
    let value = value.split('#').next().unwrap_or(value).trim();
    let in_value = at.start > begins + key.len();
    if in_value
        && value.starts_with(|first: char| first.is_alphanumeric() || "./:*-".contains(first))
        && !value.contains('"')
    {
        let start = begins + value_start(line, key.len());
        let whole = texts.subrange(at, start..start + value.len());
        let name = key.trim().to_owned();
        let error =
            Error::new(texts, whole, format!("the value of {} isn't in quotes", quoted(&name)), "a string in quotes");
        // A value that may be a secret isn't repeated.
        return match crate::error::may_be_secret(&body[..begins], line) {
            true => error.help("a secret doesn't belong in a policy; write where it is, such as \"env:NAME\""),
            false => error.help(format!("write {name} = \"{value}\"")),
        };
    }
    made
}
