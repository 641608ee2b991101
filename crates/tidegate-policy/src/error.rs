//! The errors of a policy, shown so that a newcomer can correct them.

use std::fmt;
use std::sync::LazyLock;

use crate::document::{SourceKind, SourceTexts, TextRange};
use crate::nearest::similar;
use crate::printable::{printable, printable_lines};
use crate::settings;

/// The most errors that are shown at once. Further ones are only counted.
pub(crate) const MAX_ERRORS: usize = 50;
/// The most characters of a line that are shown before and after the place of an error.
const MAX_CHARS_BEFORE: usize = 60;
const MAX_CHARS_AFTER: usize = 60;
/// The most lines above a place that are searched for the list or the section that it is in.
const MAX_LINES_ABOVE: usize = 1100;
/// The most bytes of a line that is searched for secrets. A longer one isn't shown.
const MAX_SEARCHED_LINE: usize = 16 << 10;
/// The replacement for a secret.
const MASK: &str = "…";

/// The location of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorLocation {
    /// In the policy file.
    File {
        /// The file's name as it was given.
        name: String,
        /// The line, from 1.
        line: usize,
        /// The column in characters, from 1.
        column: usize,
    },
    /// In an environment variable.
    Variable {
        /// Its name.
        name: String,
        /// The column in its value, in characters, from 1.
        column: usize,
    },
}

impl ErrorLocation {
    fn new(texts: &SourceTexts, at: TextRange) -> Self {
        let text = texts.get(at);
        let column = text.body[text.line_start(at.start)..at.start].chars().count() + 1;
        let name = text.name.clone();
        match text.kind {
            SourceKind::File => Self::File { name, line: text.line(at.start), column },
            SourceKind::Variable => Self::Variable { name, column },
        }
    }
}

impl fmt::Display for ErrorLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line, column } => write!(f, "{}:{line}:{column}", printable(name)),
            Self::Variable { name, .. } => write!(f, "environment variable {}", printable(name)),
        }
    }
}

/// A remark on a valid policy: a text that is read differently from what its author may expect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    location: ErrorLocation,
    message: String,
}

impl Note {
    pub(crate) fn new(texts: &SourceTexts, at: TextRange, message: &str) -> Self {
        Self { location: ErrorLocation::new(texts, at), message: printable(message).into_owned() }
    }

    /// The place in the policy.
    pub fn location(&self) -> &ErrorLocation {
        &self.location
    }

    /// The remark itself.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "note: {}: {}", self.location, self.message)
    }
}

/// One error in a policy. `Display` shows it with its location, the line and a caret under the place; secrets in
/// that line are hidden.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<ErrorDetails>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct ErrorDetails {
    location: ErrorLocation,
    message: String,
    expected: String,
    help: Vec<String>,
    excerpt: Excerpt,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    /// The line number; empty for a variable.
    number: String,
    line: String,
    indent: String,
    carets: usize,
}

impl Error {
    pub(crate) fn new(
        texts: &SourceTexts,
        at: TextRange,
        message: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::with_details(texts, at, None, message.into(), expected.into())
    }

    /// Creates an error about a place that may hold a secret: a line isn't shown from there on.
    pub(crate) fn hiding_secret(
        texts: &SourceTexts,
        at: TextRange,
        secret: TextRange,
        message: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::with_details(texts, at, Some(secret), message.into(), expected.into())
    }

    fn with_details(
        texts: &SourceTexts,
        at: TextRange,
        secret: Option<TextRange>,
        message: String,
        expected: String,
    ) -> Self {
        #[cfg(test)]
        tests::EXCERPTS.with(|count| count.set(count.get() + 1));
        let text = texts.get(at);
        let begins = text.line_start(at.start);
        let ends = text.body[at.start..].find('\n').map_or(text.body.len(), |length| at.start + length);
        let line = text.body[begins..ends].trim_end_matches('\r');
        let (number, prefix) = match text.kind {
            SourceKind::File => (text.line(at.start).to_string(), String::new()),
            SourceKind::Variable => (String::new(), format!("{}=", text.name)),
        };
        let start = (at.start - begins).min(line.len());
        let end = at.end.saturating_sub(begins).clamp(start, line.len());
        // The value of a key may stand on another line, or come from a variable.
        let secret = secret.filter(|secret| *secret == at || secret.is_after(at) && secret.start <= ends);
        let secret = secret.map(|secret| (secret.start - begins).min(line.len()));
        let found = if text.secret { Some(0) } else { secret_start(&text.body[..begins], line) };
        let hidden = secret.into_iter().chain(found).min();
        Self(Box::new(ErrorDetails {
            location: ErrorLocation::new(texts, at),
            message: printable(&message).into_owned(),
            expected: printable(&expected).into_owned(),
            help: Vec::new(),
            excerpt: Excerpt::new(number, &prefix, line, start, end, hidden),
        }))
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.add_help(help);
        self
    }

    pub(crate) fn add_help(&mut self, help: impl Into<String>) {
        self.0.help.push(printable(&help.into()).into_owned());
    }

    /// Adds "did you mean" if there is a suggestion.
    pub(crate) fn did_you_mean(self, meant: Option<&str>) -> Self {
        match meant {
            Some(meant) => self.help(format!("did you mean `{meant}`?")),
            None => self,
        }
    }

    /// The location of the error.
    pub fn location(&self) -> &ErrorLocation {
        &self.0.location
    }

    /// The message: what was found.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The expected text or value; it may be empty.
    pub fn expected(&self) -> &str {
        &self.0.expected
    }

    /// Suggestions: the nearest valid name, or another way to write the value.
    pub fn help_texts(&self) -> &[String] {
        &self.0.help
    }
}

impl Excerpt {
    fn new(number: String, prefix: &str, line: &str, start: usize, end: usize, hidden: Option<usize>) -> Self {
        // The end of a hidden value is uncertain, so all that follows stays hidden too.
        let (line, start, end) = match hidden {
            Some(at) => (format!("{}{MASK}", &line[..at]), start.min(at), end.min(at + MASK.len())),
            None => hide_passwords(line, start, end),
        };
        let shown = format!("{prefix}{line}");
        let (start, end) = (prefix.len() + start, prefix.len() + end);
        let before = shown[..start].chars().count();
        let carets = shown.get(start..end).map_or(1, |marked| marked.chars().count()).max(1);
        let skipped = before.saturating_sub(MAX_CHARS_BEFORE.max(prefix.chars().count() + 20));
        let window: Vec<char> = printable_lines(&shown)
            .chars()
            .skip(skipped)
            .take(before - skipped + carets.min(MAX_CHARS_AFTER) + MAX_CHARS_AFTER)
            .collect();
        let is_cut = shown.chars().count() > skipped + window.len();
        let (cut_before, cut_after) = (if skipped > 0 { "…" } else { "" }, if is_cut { "…" } else { "" });
        let blank = |letter: &char| if *letter == '\t' { '\t' } else { ' ' };
        let indent = cut_before.chars().chain(window[..before - skipped].iter().copied()).map(|letter| blank(&letter));
        Self {
            number,
            indent: indent.collect(),
            line: format!("{cut_before}{}{cut_after}", String::from_iter(&window)),
            carets: carets.min(MAX_CHARS_AFTER),
        }
    }
}

/// True if a line, below the text above it, may hold a secret.
pub(crate) fn may_be_secret(above: &str, line: &str) -> bool {
    secret_start(above, line).is_some() || line.contains("://") && line.contains('@')
}

/// Settings whose value is the source of a secret; an author may write the secret itself there.
pub(crate) const SECRET_SETTINGS: [&str; 4] = ["token", "tokens", "credentials", "secrets"];
/// The setting whose text is a secret, and whose table isn't: an alert's URL, or a lane of a provider.
pub(crate) const WEBHOOK: &str = "webhook";

/// The offset of a text that may be a secret: the value of a key that reads like one, or that the lines above announce,
/// unless it only says where the secret is.
fn secret_start(above: &str, line: &str) -> Option<usize> {
    if line.len() > MAX_SEARCHED_LINE {
        return Some(0);
    }
    let header = [line]
        .into_iter()
        .chain(above.lines().rev().take(MAX_LINES_ABOVE))
        .find(|line| line.trim_start().starts_with('['));
    let header = header.unwrap_or_default().trim();
    let is_in_alert = [header, line].into_iter().any(is_of_alert);
    let value = secret_value_start(line, is_in_alert);
    let url = || if is_in_alert { url_path_start(line) } else { None };
    let item = || secret_item_start(above, line, is_in_alert);
    let value = value.or_else(item).or_else(|| secret_table_value_start(header, line));
    value.into_iter().chain(url()).min()
}

fn secret_value_start(line: &str, is_in_alert: bool) -> Option<usize> {
    line.match_indices('=').find_map(|(equals, _)| {
        let value = line[equals + 1..].trim_start();
        let key = key_parts(line, equals).pop().unwrap_or_default();
        let is_secret = names_secret(line, equals, is_in_alert && !value.starts_with('{'))
            || key == "body" && value.trim_start_matches(['"', '\'']).starts_with('{')
            || key == WEBHOOK && value.starts_with(['"', '\'']);
        (is_secret && !value.is_empty() && !is_secret_source(value)).then(|| value_start(line, equals))
    })
}

/// The offset of an item of a list of secrets that begins on a line above.
fn secret_item_start(above: &str, line: &str, is_in_alert: bool) -> Option<usize> {
    let begin = line.trim_start();
    if !begin.starts_with(['"', '\'']) {
        return None;
    }
    let mut before = above.lines().rev().take(MAX_LINES_ABOVE).map(str::trim);
    let opens = before.find(|line| !line.is_empty() && !line.starts_with(['"', '\'', '#', ']']))?;
    let is_list = opens.ends_with(['[', ',']) && {
        let mut keys = opens.match_indices('=');
        opens.len() > MAX_SEARCHED_LINE || keys.any(|(equals, _)| names_secret(opens, equals, is_in_alert))
    };
    let is_secret = is_list || opens.starts_with('[');
    (is_secret && !is_secret_source(&format!("[{begin}"))).then_some(0)
}

/// The offset of a value in a table of secrets.
fn secret_table_value_start(header: &str, line: &str) -> Option<usize> {
    let equals = line.find('=').filter(|equals| !is_secret_source(&line[equals + 1..]))?;
    let of_secrets =
        header.trim_end_matches(']').rsplit('.').next().is_some_and(|name| matches!(name.trim(), "secrets" | "tokens"));
    of_secrets.then(|| value_start(line, equals))
}

/// True if a line is the header of an alert, or sets one of its keys by its whole name.
fn is_of_alert(line: &str) -> bool {
    let first = line.trim_start().trim_start_matches(['[', '"', '\'', ' ', '\t']);
    first.strip_prefix("alert").is_some_and(|rest| rest.starts_with(['.', ']', '=', '"', '\'', ' ', '\t']))
}

/// True if the key before an equals sign reads like that of a secret. In an alert, any key may be a misspelled
/// `webhook` or `telegram`, unless it is another one.
fn names_secret(line: &str, equals: usize, is_in_alert: bool) -> bool {
    static ALERT_KEYS: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let keys = ["alert.*", "alert.*.telegram"].into_iter().flat_map(settings::table_keys);
        keys.filter(|key| !["webhook", "telegram"].contains(key)).collect()
    });
    let is_alert_key = |key: &String| ALERT_KEYS.contains(&key.as_str());
    let parts = key_parts(line, equals);
    parts.iter().any(|part| is_secret_name(part)) || is_in_alert && !parts.last().is_some_and(is_alert_key)
}

/// The offset of the path of the first URL with one.
fn url_path_start(line: &str) -> Option<usize> {
    let host = line.find("://")? + 3;
    let stop = host + line[host..].find(['/', '?', '"', '\'', ' ', '\t'])?;
    line[stop..].starts_with(['/', '?']).then_some(stop)
}

/// The offset of the value after an equals sign, without the space before it.
pub(crate) fn value_start(line: &str, equals: usize) -> usize {
    line.len() - line[equals + 1..].trim_start().len()
}

/// The parts of the key before an equals sign, in lower case.
fn key_parts(line: &str, equals: usize) -> Vec<String> {
    let is_part = |letter: char| letter.is_alphanumeric() || "_-.\"' \t".contains(letter);
    let key = line[..equals].rsplit(|letter| !is_part(letter)).next().unwrap_or_default();
    let word = |part: &str| {
        let part = part.trim_matches(['"', '\'', ' ', '\t']);
        part.rsplit(['"', '\'', ' ', '\t']).next().unwrap_or(part).to_ascii_lowercase()
    };
    key.split('.').map(word).collect()
}

fn is_secret_name(key: &str) -> bool {
    const SECRETS: [&str; 8] = ["token", "secret", "password", "passwd", "credential", "bearer", "api_key", "apikey"];
    if SECRET_SETTINGS.contains(&key) {
        return true;
    }
    // The name of a setting isn't a misspelling: `header` isn't `bearer`.
    let alike = SECRETS.iter().any(|word| key.contains(word)) || similar(key, SECRETS).is_some();
    alike && !settings::has_word(key)
}

/// True if a value only says where secrets are.
pub(crate) fn is_secret_source(value: &str) -> bool {
    let value = value.trim_start();
    let (items, is_list) = match value.strip_prefix('[') {
        Some(inside) => (inside.rsplit_once(']').map_or(inside, |(items, _)| items), true),
        None => (value, false),
    };
    let mut items = items.split(',').map(|item| item.trim_matches(['"', '\'', ' ', '\t']));
    let is_place = |item: &str| item.starts_with("env:") || item.starts_with("file:");
    if is_list { items.all(|item| item.is_empty() || is_place(item)) } else { items.next().is_some_and(is_place) }
}

/// Hides the text between `://` and `@`, and moves the marked range accordingly.
fn hide_passwords(line: &str, start: usize, end: usize) -> (String, usize, usize) {
    let mut shown = String::with_capacity(line.len());
    let mut rest = 0;
    let (mut new_start, mut new_end) = (start, end);
    while let Some(found) = line[rest..].find("://") {
        let user = rest + found + 3;
        let stops = line[user..].find(['/', '"', '\'', ' ', '\t', '?', '#', ',']).map_or(line.len(), |at| user + at);
        shown.push_str(&line[rest..user]);
        rest = user;
        if let Some(at) = line[user..stops].rfind('@') {
            let moved = |place: usize| {
                if place >= user + at { place + MASK.len() - at } else { place.min(user) }
            };
            if start > user {
                new_start = moved(start).max(shown.len());
            }
            if end > user {
                new_end = moved(end).max(new_start);
            }
            shown.push_str(MASK);
            rest = user + at;
        }
    }
    shown.push_str(&line[rest..]);
    let [new_start, new_end] = [new_start, new_end].map(|at| shown.floor_char_boundary(at));
    (shown, new_start, new_end.max(new_start))
}

/// A found text for a message: [`printable`], in quotes, and cut to 60 characters.
pub(crate) fn quoted(text: &str) -> String {
    let mut shown = hide_passwords(text, 0, 0).0;
    // A URL's path may hold a secret, as that of a webhook does.
    if let Some(path) = url_path_start(&shown).filter(|path| shown.starts_with("http") && path + 1 < shown.len()) {
        shown.replace_range(path + 1.., MASK);
    }
    let mut cut: String = printable(&shown).chars().take(60).collect();
    if shown.chars().count() > 60 {
        cut.push('…');
    }
    format!("`{cut}`")
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Excerpt { number, line, indent, carets } = &self.0.excerpt;
        let margin = " ".repeat(number.len());
        writeln!(f, "error: {}", self.0.message)?;
        writeln!(f, "{margin}--> {}", self.0.location)?;
        writeln!(f, "{margin} |")?;
        writeln!(f, "{number} | {line}")?;
        write!(f, "{margin} | {indent}{}", "^".repeat(*carets))?;
        if !self.0.expected.is_empty() {
            write!(f, " expected {}", self.0.expected)?;
        }
        for help in &self.0.help {
            write!(f, "\n{margin} = help: {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Errors as a reader finds them. Those after the first 50 are only counted, so that thousands of them cost little.
#[derive(Debug, Default)]
pub(crate) struct ErrorList {
    kept: Vec<Error>,
    omitted: usize,
}

impl ErrorList {
    /// Counts an error. It is only made, and then returned, if it is kept.
    pub(crate) fn add(&mut self, make: impl FnOnce() -> Error) -> Option<&mut Error> {
        if self.kept.len() == MAX_ERRORS {
            self.omitted += 1;
            return None;
        }
        Some(self.kept.push_mut(make()))
    }

    /// The error that was counted after `before` others, if it was kept.
    pub(crate) fn after(&mut self, before: usize) -> Option<&mut Error> {
        self.kept.get_mut(before)
    }

    pub(crate) fn count(&self) -> usize {
        self.kept.len() + self.omitted
    }
}

impl From<Error> for ErrorList {
    fn from(error: Error) -> Self {
        Self { kept: vec![error], omitted: 0 }
    }
}

/// The errors of a policy, in the order of the file: the first 50 that were found, and their number.
#[derive(Clone, PartialEq, Eq)]
pub struct Errors {
    errors: Vec<Error>,
    omitted: usize,
}

impl Errors {
    /// Sorts the errors by their place in the file, then by the variables' names.
    pub(crate) fn new(ErrorList { kept: mut errors, omitted }: ErrorList) -> Self {
        errors.sort_by(|left, right| left.0.location.sort_key().cmp(&right.0.location.sort_key()));
        errors.dedup();
        Self { errors, omitted }
    }

    /// The errors, at most 50.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Error> {
        self.errors.iter()
    }

    /// The errors in one line: the place of each, and what is expected there. No value of the policy is repeated, since
    /// it may be a secret.
    pub fn brief(&self) -> String {
        let brief = |error: &Error| match error.expected() {
            "" => error.location().to_string(),
            expected => format!("{}: expected {expected}", error.location()),
        };
        let errors: Vec<String> = self.errors.iter().map(brief).collect();
        match self.omitted {
            0 => errors.join("; "),
            omitted => format!("{}; {omitted} more", errors.join("; ")),
        }
    }

    /// The number of errors, including those that [`Errors::iter`] leaves out.
    pub fn count(&self) -> usize {
        self.errors.len() + self.omitted
    }
}

impl ErrorLocation {
    fn sort_key(&self) -> (usize, &str, usize) {
        match self {
            Self::File { line, column, .. } => (*line, "", *column),
            Self::Variable { name, column } => (usize::MAX, name, *column),
        }
    }
}

impl fmt::Debug for Errors {
    /// The text of `Display`: it is what a `main` prints that returns the error.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for error in &self.errors {
            write!(f, "{error}\n\n")?;
        }
        match self.count() {
            1 => f.write_str("1 error"),
            count if self.omitted > 0 => write!(f, "{count} errors, {} not shown", self.omitted),
            count => write!(f, "{count} errors"),
        }
    }
}

impl std::error::Error for Errors {}

#[cfg(test)]
mod tests;
