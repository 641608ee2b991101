//! The errors of a policy, shown so that a newcomer can correct them.

mod secret_text;

use std::fmt;

use crate::document::{SourceKind, SourceTexts, TextRange};
use crate::printable::{printable, printable_lines};
pub(crate) use secret_text::{SECRET_SETTINGS, WEBHOOK, is_secret_source, may_be_secret, value_start};
use secret_text::{secret_start, url_path_start};

/// The most errors that are shown at once. Further ones are only counted.
pub(crate) const MAX_ERRORS: usize = 50;
/// The most characters of a line that are shown before and after the place of an error.
const MAX_CHARS_BEFORE: usize = 60;
const MAX_CHARS_AFTER: usize = 60;
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

    /// Counts these errors, too.
    pub(crate) fn append(&mut self, other: &Errors) {
        for error in &other.errors {
            self.add(|| error.clone());
        }
        self.omitted += other.omitted;
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
    /// Sorts the errors by their places in the files, then by the variables' names.
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
    fn sort_key(&self) -> (bool, &str, usize, usize) {
        match self {
            Self::File { name, line, column } => (false, name, *line, *column),
            Self::Variable { name, column } => (true, name, 0, *column),
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
