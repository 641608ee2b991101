//! All the ways in which servers read a path.
//!
//! Servers decode escapes never, once or twice. They resolve dot segments or keep them, before or after decoding. They
//! merge empty segments or keep them, and drop parameters or keep them. A limit that checks only one of these readings
//! is evaded by a spelling that means something else in another, so all of them are checked. Their number depends on
//! the path: most paths have one or two.

use arrayvec::ArrayVec;
use foldhash::{HashSet, HashSetExt};

use crate::matched_actions::PathError;
use crate::path::{
    NormalisedPath, ParameterMode, PathQuirks, PathSign, PathText, Reading, SlashMode, decode_escape, fold_case,
    is_data, separators,
};
use crate::path_encoding::percent_encode;
use crate::raw_paths::raw_paths;

/// The work that the readings of one path may take before it is refused: about 0.1 ms. One unit is one byte that is copied,
/// some 0.5 ns. If limits count by path, the readings are searched twice: two thirds of it are for matching, and five sixths
/// for keys. It is enough for a path of 500 bytes in which clients repeat any one feature, and for a signed URL of 1,500
/// bytes that is escaped into a path (1,000 with keys). Paths whose escapes stand for plain text have two readings, whose
/// work is in proportion to their length.
const MAX_WORK: usize = 204 << 10;
/// The work that keys may take if a call has several actions or paths, each of which reads the request again.
const MAX_KEY_WORK: usize = 32 << 10;
/// The work of a reading besides that on its bytes.
const READING_WORK: usize = 60;
/// The work on a byte that is looked at by itself, besides that on each byte.
const STEP_WORK: usize = 10;
/// The work of folding a byte of letters beyond ASCII.
const FOLDING_WORK: usize = 60;
/// The work on each byte of a reading that is made a key.
const KEY_WORK: usize = 4;

/// The most keys that one path has as a key part.
pub(crate) const MAX_KEYS: usize = 4;

/// The features of a path that servers treat in different ways.
#[derive(Default)]
struct PathFeatures {
    /// The numbers of layers of escapes from which the dots of possible dot segments come, as bits.
    dot_layers: u8,
    has_empty_segments: bool,
    /// True if there are empty segments also where escaped slashes and backslashes are data.
    has_plain_empty_segments: bool,
    /// The numbers of layers of escapes from which semicolons come, as bits.
    semicolon_layers: u8,
    /// True if a separator of segments follows a semicolon.
    continues_after_semicolon: bool,
    separators: u8,
    may_be_reparsed: bool,
    has_trimmable_ends: bool,
}

impl PathFeatures {
    fn from_text(text: &PathText, quirks: PathQuirks) -> Self {
        let mut found = Self::default();
        let separates = |sign: Option<(u8, u8)>| match sign {
            None | Some((b'/', 0)) => true,
            Some((b'/' | b'\\', _)) => quirks.encoded_slash,
            _ => false,
        };
        let may_vanish =
            |byte: u8| matches!(byte, b';' | b'\t' | b'\n' | b'\r') || quirks.windows && matches!(byte, b'.' | b' ');
        let (mut begins, mut end) = (true, 0);
        let mut signs = text.signs().peekable();
        while let Some(&PathSign { at, byte, layers: from }) = signs.next() {
            begins &= at == end;
            end = at + 1;
            let next = text
                .bytes
                .get(end)
                .map(|byte| (*byte, signs.peek().filter(|sign| sign.at == end).map_or(0, |sign| sign.layers)));
            match byte {
                b'.' if begins => found.dot_layers |= 1 << from,
                b'/' | b'\\' if quirks.encoded_slash => {
                    found.separators |= match (byte, from) {
                        (b'/', 0) => 0,
                        (b'/', _) => separators::ESCAPED_SLASH,
                        (_, 0) => separators::BACKSLASH,
                        _ => separators::ESCAPED_BACKSLASH,
                    };
                }
                b';' => found.semicolon_layers |= 1 << from,
                b'?' | b'#' => found.may_be_reparsed |= from > 0,
                b'\t' | b'\n' | b'\r' => found.may_be_reparsed = true,
                ..=b' ' => found.may_be_reparsed |= next.is_none_or(|next| next.0 <= b' ' || next.0 == b';'),
                _ => {}
            }
            if separates(Some((byte, from))) {
                found.has_empty_segments |= next.is_some_and(|next| may_vanish(next.0) || separates(Some(next)));
                found.has_plain_empty_segments |=
                    (byte, from) == (b'/', 0) && next.is_some_and(|next| may_vanish(next.0) || next == (b'/', 0));
                found.continues_after_semicolon |= found.semicolon_layers != 0;
            }
            let may_end =
                separates(next) || next.is_some_and(|next| matches!(next.0, b';' | b'.' | b' ' | b'?' | b'#'));
            found.has_trimmable_ends |= (quirks.caddy || quirks.windows) && matches!(byte, b'.' | b' ') && may_end;
            begins = byte == b'.' && begins || separates(Some((byte, from)));
        }
        found
    }
}

type ReadingCallback<'c> = &'c mut dyn FnMut(&[u8]) -> Result<(), PathError>;

/// The work that may still be done for one call.
pub(crate) struct WorkBudget(usize);

impl WorkBudget {
    pub(crate) const KEYS: Self = Self(MAX_KEY_WORK);

    /// Takes the work on so many bytes out of the budget.
    pub(crate) fn spend(&mut self, bytes: usize) -> Result<(), PathError> {
        self.0 = self.0.checked_sub(bytes + READING_WORK).ok_or(PathError::TooMany)?;
        Ok(())
    }

    fn spend_on(&mut self, text: &PathText) -> Result<(), PathError> {
        self.spend(text.bytes.len() + STEP_WORK * text.signs().count())
    }

    /// Takes the work of finding the signs of a text out of the budget.
    pub(crate) fn text(&mut self, bytes: Vec<u8>) -> Result<PathText, PathError> {
        let text = PathText::new(bytes);
        self.spend_on(&text)?;
        Ok(text)
    }
}

/// The budget of readings that are matched.
pub(crate) fn matching(counts_by_path: bool) -> WorkBudget {
    WorkBudget(if counts_by_path { MAX_WORK / 3 * 2 } else { MAX_WORK })
}

/// Passes each reading of a path to `visit`, which matches it, and never one reading twice.
///
/// # Errors
/// The error of `visit`, or [`PathError::TooMany`] if the readings exceed the budget of work.
pub(crate) fn each_reading(
    path: &str,
    quirks: PathQuirks,
    mut budget: WorkBudget,
    visit: ReadingCallback<'_>,
) -> Result<(), PathError> {
    if let Some([decoded, text]) = readings_of_plain_escapes(path.as_bytes(), quirks, &mut budget)? {
        visit(&decoded)?;
        return visit(&text);
    }
    each_reading_by_search(path, quirks, budget, false, visit)
}

fn each_reading_by_search(
    path: &str,
    quirks: PathQuirks,
    mut budget: WorkBudget,
    makes_keys: bool,
    visit: ReadingCallback<'_>,
) -> Result<(), PathError> {
    // No text that is read has more such bytes than the path, so no step exceeds the budget by more than it has.
    budget.spend(path.len() + STEP_WORK * path.bytes().filter(|byte| !is_data(*byte)).count())?;
    let mut visitor = ReadingVisitor { quirks, budget, makes_keys, seen: HashSet::new(), visit };
    for text in raw_paths(path.as_bytes(), quirks, &mut visitor.budget)? {
        let text = visitor.budget.text(text)?;
        visitor.visit_text(&text)?;
    }
    Ok(())
}

/// The readings of a path in which nothing but escapes differs from the plain form, and these stand for bytes that no
/// server treats in a special way: with the escapes decoded, and with them as they are. `None` for all other paths.
/// Their work is in proportion to their length, so only that of folding their case needs the budget.
fn readings_of_plain_escapes(
    target: &[u8],
    quirks: PathQuirks,
    budget: &mut WorkBudget,
) -> Result<Option<[Vec<u8>; 2]>, PathError> {
    let text = &target[..target.iter().position(|byte| *byte == b'?').unwrap_or(target.len())];
    let Some(decoded) = decode_plain_escapes(text, quirks) else { return Ok(None) };
    let mut readings = [decoded, text.to_vec()];
    if quirks.case {
        for path in &mut readings {
            *path = folded(path, budget)?;
        }
    }
    Ok(Some(readings))
}

/// Returns a path in lower case.
fn folded(path: &[u8], budget: &mut WorkBudget) -> Result<Vec<u8>, PathError> {
    if !path.is_ascii() {
        budget.spend(FOLDING_WORK * path.len())?;
    }
    let mut folded = Vec::with_capacity(path.len());
    fold_case(path, &mut folded);
    Ok(folded)
}

fn decode_plain_escapes(text: &[u8], quirks: PathQuirks) -> Option<Vec<u8>> {
    let trims = quirks.caddy || quirks.windows;
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        let is_escape = *byte == b'%';
        let byte = if is_escape { decode_escape(text, at)? } else { *byte };
        let begins_segment = decoded.last().is_none_or(|before| *before == b'/');
        let has_one_meaning = match byte {
            ..b' ' | b'\\' | b';' | b'%' | b'?' | b'#' => false,
            b'/' => !is_escape && (at == 0 || !begins_segment),
            b'.' => !is_escape && !begins_segment && !trims,
            b' ' => is_escape && !trims,
            _ => true,
        };
        if !has_one_meaning {
            return None;
        }
        decoded.push(byte);
        at += if is_escape { 3 } else { 1 };
    }
    let is_whole = decoded.first() == Some(&b'/')
        && !matches!(decoded.last(), Some(b'/' | b' '))
        && without_line_end(&decoded).len() == decoded.len()
        && std::str::from_utf8(&decoded).is_ok();
    is_whole.then_some(decoded)
}

/// Visits a path in every reading, and each reading as the next server may read it again.
struct ReadingVisitor<'s> {
    quirks: PathQuirks,
    budget: WorkBudget,
    /// True if each reading is reduced to the coarsest form. What the next server reads has the same form.
    makes_keys: bool,
    /// The readings that were visited.
    seen: HashSet<Vec<u8>>,
    visit: ReadingCallback<'s>,
}

impl ReadingVisitor<'_> {
    /// Visits each reading of a text, whose escapes are decoded never, once or twice.
    fn visit_text(&mut self, text: &PathText) -> Result<(), PathError> {
        if !text.bytes.contains(&b'%') {
            return self.visit_readings(text);
        }
        let once = self.decode_one_layer(text, |_| true)?;
        self.visit_decoded(&once)?;
        if once.bytes.len() == text.bytes.len() {
            return Ok(());
        }
        let plain = self.decode_one_layer(text, |byte| byte == b'.')?;
        self.visit_readings(&plain)?;
        if !once.bytes.contains(&b'%') {
            return Ok(());
        }
        let twice = self.decode_one_layer(&once, |_| true)?;
        if twice.bytes.len() < once.bytes.len() {
            self.visit_decoded(&twice)?;
            if once.bytes.contains(&b';') {
                let twice = self.decode_one_layer(&once.without_parameters(self.quirks), |_| true)?;
                self.visit_readings(&twice)?;
            }
        }
        Ok(())
    }

    /// Visits each reading of a decoded path, and of that without the bytes that aren't UTF-8, which Bottle ignores.
    fn visit_decoded(&mut self, text: &PathText) -> Result<(), PathError> {
        self.visit_readings(text)?;
        if std::str::from_utf8(&text.bytes).is_err() {
            self.budget.spend(FOLDING_WORK * text.bytes.len())?;
            let valid: String = text.bytes.utf8_chunks().map(|chunk| chunk.valid()).collect();
            let valid = self.budget.text(valid.into_bytes())?;
            self.visit_readings(&valid)?;
        }
        Ok(())
    }

    /// Visits each reading of a path whose escapes are decoded.
    fn visit_readings(&mut self, text: &PathText) -> Result<(), PathError> {
        let mut folded = None;
        if self.quirks.case {
            self.budget.spend(if text.bytes.is_ascii() {
                text.bytes.len()
            } else {
                FOLDING_WORK * text.bytes.len()
            })?;
            folded = Some(text.folded());
        }
        let text = folded.as_ref().unwrap_or(text);
        self.budget.spend_on(text)?;
        PathFeatures::from_text(text, self.quirks).readings(self.quirks, &mut |reading| {
            let path = self.rewrite_path(text, reading)?;
            self.visit(path)
        })
    }

    /// Returns the path with one more layer of escapes decoded, for the bytes that `which` accepts.
    fn decode_one_layer(&mut self, text: &PathText, which: impl Fn(u8) -> bool) -> Result<PathText, PathError> {
        self.budget.spend_on(text)?;
        Ok(text.decode_layer(which))
    }

    fn rewrite_path(&mut self, text: &PathText, reading: &Reading) -> Result<Vec<u8>, PathError> {
        self.budget.spend_on(text)?;
        let mut out = Vec::with_capacity(text.bytes.len() + 1);
        text.write_reading(reading, &mut out);
        // Line ends that a server leaves out may have parted a letter.
        if reading.is_reparsed && reading.folds_case && !out.is_ascii() {
            out = folded(&out, &mut self.budget)?;
        }
        if reading.slashes == SlashMode::MergedLast {
            out.dedup_by(|one, before| *one == b'/' && *before == b'/');
            if out.len() > 1 {
                out.pop_if(|last| *last == b'/');
            }
        }
        Ok(out)
    }

    /// Visits one reading, then the reading without the line ends at its end, which regular expressions may ignore, and
    /// that without the host, if the path looks like a URL without its scheme. Then it visits the path as the next
    /// server may read it, with all remaining dot segments and separators resolved.
    fn visit(&mut self, path: Vec<u8>) -> Result<(), PathError> {
        let quirks = self.quirks;
        let mut pending = vec![path];
        while let Some(path) = pending.pop() {
            self.budget.spend(path.len())?;
            if self.seen.contains(&path) {
                continue;
            }
            let visit_work = if self.makes_keys { KEY_WORK } else { 1 };
            self.budget.spend(visit_work * (path.len() + READING_WORK))?;
            if self.makes_keys {
                let signs = path.iter().filter(|byte| !is_data(**byte)).count();
                self.budget.spend(KEY_WORK * STEP_WORK * signs)?;
            }
            (self.visit)(&path)?;
            let line = without_line_end(&path);
            if line.len() < path.len() {
                pending.push(line.to_vec());
            }
            if path.starts_with(b"//") {
                pending.push(without_host(&path).to_vec());
            }
            if self.makes_keys {
                self.seen.insert(path);
                continue;
            }
            // Counted and not searched: that takes a tenth of the time.
            let is_irregular = path.windows(2).filter(|pair| pair[0] == b'/' && matches!(pair[1], b'/' | b'.')).count()
                > 0
                || quirks.encoded_slash && (path.contains(&b'\\') || has_escaped_slash(&path));
            let parameters = path.iter().position(|byte| *byte == b';');
            if is_irregular {
                let text = self.budget.text(path.clone())?;
                let text = self.decode_one_layer(&text, |byte| byte == b'/' && quirks.encoded_slash)?;
                let ways = [ParameterMode::Kept, ParameterMode::Stripped, ParameterMode::EndPath];
                for parameters in ways.into_iter().take(if parameters.is_some() { 3 } else { 1 }) {
                    let next = self.rewrite_path(&text, &Reading { parameters, ..Reading::coarsest(quirks) })?;
                    if next != path {
                        pending.push(next);
                    }
                }
            } else if let Some(at) = parameters {
                self.budget.spend(2 * path.len())?;
                let segments: Vec<&[u8]> = path.split(|byte| *byte == b'/').map(without_parameter).collect();
                for next in [&*segments.join(&b'/'), &path[..at]] {
                    pending.push(without_last_slashes(next).to_vec());
                }
            }
            self.seen.insert(path);
        }
        Ok(())
    }
}

/// Returns the path without the slashes at its end, except in `/` itself.
fn without_last_slashes(mut path: &[u8]) -> &[u8] {
    while let [rest @ .., b'/'] = path
        && !rest.is_empty()
    {
        path = rest;
    }
    path
}

fn without_parameter(segment: &[u8]) -> &[u8] {
    &segment[..segment.iter().position(|byte| *byte == b';').unwrap_or(segment.len())]
}

fn has_escaped_slash(path: &[u8]) -> bool {
    path.contains(&b'%')
        && path.windows(3).filter(|escape| (escape[0] == b'%') & (escape[1] == b'2') & (escape[2] | 32 == b'f')).count()
            > 0
}

/// Returns the path behind the host that a URL parser finds after two leading slashes.
fn without_host(path: &[u8]) -> &[u8] {
    let slashes = path.iter().take_while(|byte| **byte == b'/').count();
    let host = path[slashes..].iter().take_while(|byte| **byte != b'/').count();
    match &path[slashes + host..] {
        [] => b"/",
        rest => rest,
    }
}

/// Returns the path without the line ends at its end. `$` matches before a final line feed in most regular expressions,
/// and before other line ends in Java's.
fn without_line_end(path: &[u8]) -> &[u8] {
    const ENDS: [&[u8]; 5] = [b"\n", b"\r", "\u{85}".as_bytes(), "\u{2028}".as_bytes(), "\u{2029}".as_bytes()];
    let shorter = |line: &[u8]| ENDS.iter().find(|end| line.ends_with(end)).map(|end| line.len() - end.len());
    let mut end = path.len();
    while let Some(shorter) = shorter(&path[..end]) {
        end = shorter;
        // As in every reading, no slash stays at the end.
        end = without_last_slashes(&path[..end]).len();
    }
    &path[..end]
}

impl PathFeatures {
    fn readings(
        &self,
        quirks: PathQuirks,
        read: &mut dyn FnMut(&Reading) -> Result<(), PathError>,
    ) -> Result<(), PathError> {
        use {ParameterMode as P, SlashMode as S};
        let bits = |set: u8| (0..=2).filter(move |bit| set & 1 << bit != 0);
        let separators = (0..=separators::ALL).filter(|set| set & !self.separators == 0);
        let cut = [
            (P::Stripped, true),
            (P::StrippedLast, self.dot_layers != 0),
            (P::EndPath, self.continues_after_semicolon),
        ];
        let cut = cut.into_iter().filter(|(_, differs)| *differs);
        let cut =
            bits(self.semicolon_layers).flat_map(|most| cut.clone().map(move |(parameters, _)| (parameters, most)));
        let parameters = std::iter::once((P::Kept, 0)).chain(cut);
        for dots in bits(self.dot_layers).map(Some).chain([None]) {
            for separators in separators.clone() {
                let has_empty = if separators == 0 { self.has_plain_empty_segments } else { self.has_empty_segments };
                let slashes: &[S] = match (has_empty, dots) {
                    (false, _) => &[S::Merged],
                    (true, None) => &[S::Merged, S::Kept],
                    (true, Some(_)) => &[S::Merged, S::Kept, S::MergedLast],
                };
                for (slashes, (parameters, semicolons)) in
                    slashes.iter().flat_map(|one| parameters.clone().map(move |other| (*one, other)))
                {
                    for (again, trims) in [(false, false), (false, true), (true, false), (true, true)] {
                        if again && !self.may_be_reparsed || trims && !self.has_trimmable_ends {
                            continue;
                        }
                        read(&Reading {
                            max_dot_layers: dots,
                            slashes,
                            parameters,
                            max_semicolon_layers: semicolons,
                            separators,
                            is_reparsed: again,
                            trims_end: trims && quirks.caddy,
                            trims_segments: trims && quirks.windows,
                            folds_case: quirks.case,
                        })?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the paths under which a limit by path counts a call, in the form of keys. All spellings that any server
/// reads alike have one path; a path that can be read as several has several.
///
/// Two spellings with a reading in common have a key in common. Each reading is reduced to the coarsest form, and all
/// further readings of it have the same form.
///
/// # Errors
/// There are more than [`MAX_KEYS`], or the readings exceed the budget.
pub(crate) fn path_keys(target: &str, quirks: PathQuirks) -> Result<ArrayVec<Vec<u8>, MAX_KEYS>, PathError> {
    let mut budget = WorkBudget(MAX_WORK / 6 * 5);
    if let Some([decoded, _]) = readings_of_plain_escapes(target.as_bytes(), quirks, &mut budget)? {
        return Ok(ArrayVec::from_iter([decoded]));
    }
    let coarsest = Reading::coarsest(quirks);
    let mut forms: ArrayVec<Vec<u8>, MAX_KEYS> = ArrayVec::new();
    let mut form = Vec::new();
    each_reading_by_search(target, quirks, budget, true, &mut |path| {
        let end = path.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(path.len());
        let mut twice = PathText::new(path[..end].to_vec());
        if twice.bytes.contains(&b'%') {
            twice = twice.decode_layer(|_| true).decode_layer(|_| true);
        }
        // Readings are folded, so only what was decoded now may have capitals.
        if quirks.case && twice.bytes.len() < end {
            twice = twice.folded();
        }
        form.clear();
        twice.write_reading(&coarsest, &mut form);
        if !forms.contains(&form) {
            forms.try_push(form.clone()).map_err(|_| PathError::TooMany)?;
        }
        Ok(())
    })?;
    let as_plain_path = |form: Vec<u8>| {
        // The remaining `;` are data.
        let spelled = percent_encode(&PathText::new(form)).replace(';', "%3B");
        NormalisedPath::new(&spelled, quirks).as_bytes().to_vec()
    };
    Ok(forms.into_iter().map(as_plain_path).collect())
}

#[cfg(test)]
mod tests;
