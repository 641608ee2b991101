//! Every way in which a server may read a path.
//!
//! Servers undo escapes never, once or twice; resolve dot segments or take them as they are, before or after that; merge
//! empty segments or keep them; drop parameters or keep them. A limit that looks at one of these readings is evaded by a
//! spelling that means something else in another, so all of them are looked at. Which of them there are depends on what is
//! in the path: most have one or two.

use arrayvec::ArrayVec;

use crate::path::{Parameters, PathQuirks, Reading, Slashes, Token, decoded, folded, raw, rewrite, separators};
use crate::several::PathError;
use crate::spelling::escaped;

/// The most bytes that are rewritten for one path. Paths of 2 KiB may have all features at once; no more than a few
/// milliseconds are spent on any.
const MAX_REWRITTEN: usize = 1 << 20;

/// The most keys that one path has as a key part.
pub(crate) const MAX_KEYS: usize = 4;

/// Features of a path that servers differ about.
#[derive(Default)]
struct Features {
    /// Out of how many layers dots come that may be dot segments, as bits.
    dots: u8,
    empty: bool,
    parameters: bool,
    separators: u8,
    ends: bool,
    trims: bool,
}

impl Features {
    fn of(tokens: &[Token], layers: u8, quirks: PathQuirks) -> Self {
        let mut found = Self::default();
        let separates = |token: Option<&Token>| match token {
            None | Some((b'/', 0)) => true,
            Some((b'/' | b'\\', _)) => quirks.encoded_slash,
            _ => false,
        };
        let mut begins = true;
        for (at, &(byte, from)) in tokens.iter().enumerate() {
            let next = tokens.get(at + 1);
            match byte {
                b'.' if begins => found.dots |= 1 << from,
                b'/' | b'\\' if quirks.encoded_slash => {
                    found.separators |= match (byte, from) {
                        (b'/', 0) => 0,
                        (b'/', _) => separators::ESCAPED_SLASH,
                        (_, 0) => separators::BACKSLASH,
                        _ => separators::ESCAPED_BACKSLASH,
                    };
                }
                b';' => found.parameters |= from < layers.max(1),
                b'?' | b'#' => found.ends |= from > 0,
                _ => {}
            }
            if separates(Some(&(byte, from))) {
                found.empty |= next.is_some_and(|next| next.0 == b';' || separates(Some(next)));
            }
            let may_end =
                separates(next) || next.is_some_and(|next| matches!(next.0, b';' | b'.' | b' ' | b'?' | b'#'));
            found.trims |= (quirks.caddy || quirks.windows) && matches!(byte, b'.' | b' ') && may_end;
            begins = byte == b'.' && begins || separates(Some(&(byte, from)));
        }
        found
    }
}

/// Shows `see` each reading of a path, some of them more than once.
///
/// # Errors
/// The error of `see`, or that there are too many.
pub(crate) fn each(
    path: &str,
    quirks: PathQuirks,
    see: &mut dyn FnMut(&[u8]) -> Result<(), PathError>,
) -> Result<(), PathError> {
    let mut left = MAX_REWRITTEN;
    let mut out = Vec::new();
    for text in texts(path.as_bytes()) {
        let plain: Vec<Token> = decoded(raw(text), |byte| byte == b'.').collect();
        let once: Vec<Token> = decoded(raw(text), |_| true).collect();
        let twice: Vec<Token> = decoded(|at| once.get(at).copied(), |_| true).collect();
        let is_escaped = once.len() < text.len();
        let is_twice = twice.len() < once.len();
        for (tokens, layers) in [(&once, 1), (&plain, 0), (&twice, 2)] {
            if layers == 0 && !is_escaped || layers == 2 && !is_twice {
                continue;
            }
            let found = Features::of(tokens, layers, quirks);
            found.readings(layers, quirks, &mut |reading| {
                left = left.checked_sub(tokens.len()).ok_or(PathError::TooMany)?;
                out.clear();
                rewrite(tokens.iter().copied(), reading, &mut out);
                if reading.slashes == Slashes::MergedLast {
                    out.dedup_by(|one, before| *one == b'/' && *before == b'/');
                    if out.len() > 1 {
                        out.pop_if(|last| *last == b'/');
                    }
                }
                match folded(&out, quirks) {
                    Some(folded) => see(&folded),
                    None => see(&out),
                }
            })?;
        }
    }
    Ok(())
}

impl Features {
    fn readings(
        &self,
        layers: u8,
        quirks: PathQuirks,
        read: &mut dyn FnMut(&Reading) -> Result<(), PathError>,
    ) -> Result<(), PathError> {
        use {Parameters as P, Slashes as S};
        let dots = (0..=2).filter(|bit| self.dots & 1 << bit != 0).map(Some);
        let separators = (0..=separators::ALL).filter(|set| set & !self.separators == 0);
        for dots in dots.chain([None]) {
            let slashes: &[S] = match (self.empty, dots) {
                (false, _) => &[S::Merged],
                (true, None) => &[S::Merged, S::Kept],
                (true, Some(_)) => &[S::Merged, S::Kept, S::MergedLast],
            };
            let parameters: &[P] = match (self.parameters, self.dots) {
                (false, _) => &[P::Kept],
                (true, 0) => &[P::Kept, P::Stripped],
                (true, _) => &[P::Kept, P::Stripped, P::StrippedLast],
            };
            for separators in separators.clone() {
                for (slashes, parameters) in
                    slashes.iter().flat_map(|one| parameters.iter().map(move |other| (*one, *other)))
                {
                    for (ends, trims) in [(false, false), (false, true), (true, false), (true, true)] {
                        if ends && !self.ends || trims && !self.trims {
                            continue;
                        }
                        read(&Reading {
                            dots,
                            slashes,
                            parameters,
                            layers,
                            separators,
                            ends,
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

/// The texts that servers take for the path of a request target: up to its `?`, up to a `#` before that or with it, and
/// behind what begins with two slashes and would be a host in a URL.
fn texts(target: &[u8]) -> ArrayVec<&[u8], 4> {
    let until = |end: u8, text: &'_ [u8]| text.iter().position(|byte| *byte == end).unwrap_or(text.len());
    let whole = &target[..until(b'?', target)];
    let mut texts = ArrayVec::from_iter([whole]);
    let end = until(b'#', whole);
    if end < whole.len() {
        texts.push(&whole[..end]);
    }
    for at in 0..texts.len() {
        let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
        let text: &[u8] = texts[at];
        let slashes = text.iter().take_while(|byte| is_slash(byte)).count();
        if slashes > 1 {
            let rest = &text[slashes..];
            texts.push(&rest[rest.iter().position(is_slash).unwrap_or(rest.len())..]);
        }
    }
    texts
}

/// The paths that a call is counted under where a limit counts by path: one for all spellings that any server reads
/// alike, or several for a path that is more than one. Each is followed by the query string.
///
/// Two spellings with a reading in common have a key in common: each reading is brought to the coarsest form, which what
/// is made of it by any other reading has, too.
///
/// # Errors
/// There are more than [`MAX_KEYS`].
pub(crate) fn keys(target: &str, quirks: PathQuirks) -> Result<ArrayVec<String, MAX_KEYS>, PathError> {
    let coarsest = Reading {
        dots: Some(2),
        parameters: Parameters::Stripped,
        layers: 2,
        trims_end: quirks.caddy,
        ..Reading::normal(quirks)
    };
    let query = target.find('?').map_or("", |at| &target[at..]);
    let mut forms: ArrayVec<Vec<u8>, MAX_KEYS> = ArrayVec::new();
    each(target, quirks, &mut |path| {
        let end = path.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(path.len());
        let once: Vec<Token> = decoded(raw(&path[..end]), |_| true).collect();
        let mut form = Vec::with_capacity(end);
        rewrite(decoded(|at| once.get(at).copied(), |_| true), &coarsest, &mut form);
        let form = folded(&form, quirks).unwrap_or(form);
        if !forms.contains(&form) {
            forms.try_push(form).map_err(|_| PathError::TooMany)?;
        }
        Ok(())
    })?;
    let spelled = |form: Vec<u8>| {
        let tokens: Vec<Token> = form.into_iter().map(|byte| (byte, 0)).collect();
        // A `;` that is left is data.
        format!("{}{query}", escaped(&tokens).replace(';', "%3B"))
    };
    Ok(forms.into_iter().map(spelled).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn readings(path: &str, quirks: PathQuirks) -> Vec<String> {
        let mut found = Vec::new();
        let seen = each(path, quirks, &mut |path| {
            let path = String::from_utf8_lossy(path).into_owned();
            if !found.contains(&path) {
                found.push(path);
            }
            Ok(())
        });
        assert_eq!(seen, Ok(()), "{path}");
        found
    }

    #[test]
    fn every_reading_of_a_path_is_found() {
        for (path, expected) in [
            ("/login", &["/login"][..]),
            ("/login/", &["/login"]),
            ("/a%20b", &["/a b", "/a%20b"]),
            ("/api/../x", &["/api/../x", "/x"]),
            ("/login//..", &["/login", "/", "/login/.."]),
            ("/login;v=1", &["/login", "/login;v=1"]),
            ("/static%2fx/../login", &["/login", "/static/login"]),
            ("/api%2f%2e%2e;", &["/", "/api/..", "/api/..;"]),
            ("/%256Cogin", &["/login", "/%256Cogin"]),
            ("/x/%252e%252e/login", &["/login", "/x/../login"]),
            ("//x/login", &["/x/login", "/login"]),
            ("/\\x/login", &["/x/login", "/login"]),
            ("/x#/../login", &["/x", "/login"]),
            ("/login%3Fx", &["/login?x"]),
            ("/login%253Fx", &["/login", "/login?x"]),
            ("/a%5cb%2f..%2flogin", &["/login", "/a/login", "/a\\b/../login"]),
            ("/a%2fb\\..\\login", &["/login", "/a/login"]),
            ("/y/../api/%2e%2e/x", &["/x", "/api/../x", "/y/../api/../x"]),
            ("/login;z/a/..;/../..", &["/login", "/"]),
        ] {
            let found = readings(path, PathQuirks::default());
            for reading in expected {
                assert!(found.iter().any(|one| one == reading), "{path}: no {reading} among {found:?}");
            }
        }
        assert_eq!(readings("/login", PathQuirks::default()), ["/login"]);
        assert_eq!(readings("/a/.well/x.css", PathQuirks::default()), ["/a/.well/x.css"]);
    }

    #[test]
    fn an_escaped_slash_is_data_where_the_quirk_is_off() {
        assert_eq!(readings("/a%2Fb", PathQuirks::NONE), ["/a%2Fb"]);
        assert!(!readings("/x%2f..%2flogin", PathQuirks::NONE).contains(&"/login".to_owned()));
    }

    #[test]
    fn what_caddy_and_windows_drop_at_the_end_is_read_with_it_and_without() {
        let caddy = PathQuirks { caddy: true, case: true, ..PathQuirks::default() };
        let windows = PathQuirks { windows: true, case: true, ..PathQuirks::default() };
        for path in ["/LOGIN", "/login.", "/login%20", "/Login%2e", "/login.%20.", "/lOg%C4%B0n", "/x/../login. ."] {
            for quirks in [caddy, windows] {
                assert!(readings(path, quirks).contains(&"/login".to_owned()), "{path} {:?}", readings(path, quirks));
            }
        }
        assert!(readings("/api./x", windows).contains(&"/api/x".to_owned()));
        assert!(readings("/api. ;v/x", windows).contains(&"/api/x".to_owned()));
        assert!(!readings("/api./x", caddy).contains(&"/api/x".to_owned()));
        assert!(readings("/login/..", caddy).contains(&"/login".to_owned()), "{:?}", readings("/login/..", caddy));
        assert!(readings("/\u{212A}ey", caddy).contains(&"/key".to_owned()));
    }

    #[test]
    fn spellings_of_one_path_share_a_key() {
        let quirks = PathQuirks::default();
        for spelling in [
            "/api/x/",
            "/api//x",
            "/api/./x",
            "/api/%78",
            "/api/%2578",
            "/api/y/../x",
            "/api/x;v=1",
            "/api/y%2f../x",
            "/api/a/..//../x",
            "/api/y/%2e%2e/x",
            "//api/x",
            "/api%2fx",
            "/api\\x",
            "/a%2fb/../api/x",
        ] {
            let found = keys(spelling, quirks).unwrap();
            assert!(found.iter().any(|key| key == "/api/x"), "{spelling}: {found:?}");
        }
        assert_eq!(keys("/api/a%20b?q=1", quirks).unwrap().as_slice(), ["/api/a%20b?q=1"]);
        let many = "/a%2fb/../c\\d/../e%5cf/../h";
        assert_eq!(keys(many, quirks), Err(PathError::TooMany));
    }

    #[test]
    fn a_path_of_endless_readings_is_bounded() {
        let path = "/a%2f..;x//%252e%5c\\".repeat(3000);
        assert_eq!(each(&path, PathQuirks::default(), &mut |_| Ok(())), Err(PathError::TooMany));
        assert_eq!(each(&"/a%20b".repeat(5000), PathQuirks::default(), &mut |_| Ok(())), Ok(()));
    }

    /// Pieces of which spellings are made.
    const PIECES: [&str; 22] = [
        "/", "//", "/.", "/..", "%2f", "%2e", "%252e", "%252f", "\\", "%5c", ";", ";x", "%3b", "#", "%3f", ".", " ",
        "a", "b", "%61", "A", "/b",
    ];

    proptest! {
        #[test]
        fn the_normal_form_is_one_of_the_readings(
            pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..8),
            slash: bool, parameters: bool, case: bool, caddy: bool, windows: bool,
        ) {
            let path = format!("/{}", pieces.concat());
            let quirks = PathQuirks { encoded_slash: slash, parameters, case, caddy, windows };
            let normal = crate::path::Normalised::new(&path, quirks).as_bytes().to_vec();
            prop_assert!(readings(&path, quirks).contains(&String::from_utf8_lossy(&normal).into_owned()), "{}", path);
        }

        /// Of every two spellings one of which is a reading of the other, the keys meet.
        #[test]
        fn a_reading_of_a_path_shares_a_key_with_it(
            pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..7), slash: bool,
        ) {
            let path = format!("/{}", pieces.concat());
            let quirks = PathQuirks { encoded_slash: slash, ..PathQuirks::NONE };
            let Ok(own) = keys(&path, quirks) else { return Ok(()) };
            for reading in readings(&path, quirks) {
                // Spelled so that it is read back as it is.
                let tokens: Vec<Token> = reading.bytes().map(|byte| (byte, 0)).collect();
                let spelled = escaped(&tokens).replace(';', "%3B");
                if reading.contains(['?', '#', '\\', '%']) {
                    continue;
                }
                if let Ok(others) = keys(&spelled, quirks) {
                    prop_assert!(own.iter().any(|key| others.contains(key)), "{path} {own:?}, {spelled} {others:?}");
                }
            }
        }

        #[test]
        fn a_forwarded_path_is_in_its_form(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..9)) {
            let path = format!("/{}?a=%2e%2f//..", pieces.concat());
            let form = crate::spelling::forwarded(&path).unwrap_or(path);
            prop_assert!(form.ends_with("?a=%2e%2f//..") || form.ends_with('/') || !form.contains('?'), "{}", form);
            prop_assert_eq!(crate::spelling::forwarded(&form), None, "{}", form);
            let path = form.split('?').next().unwrap_or_default();
            let has = |segment: &str| path.split('/').any(|one| one == segment);
            prop_assert!(!has(".") && !has("..") && !path.contains("//") && !path.contains('\\'), "{}", path);
        }
    }
}
