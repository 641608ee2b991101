//! Text from outside, made safe to print.
//!
//! A terminal obeys control characters. Some formatting characters make a line look different from what it is: those
//! that set a direction, and those without width. All of these functions show each such character in its place.

use std::borrow::Cow;
use std::fmt::Write as _;

const REPLACEMENT: char = '\u{fffd}';

/// Makes a text for one line printable, such as a name or a value. U+FFFD replaces each character that would control a
/// terminal or mislead a reader, line ends included.
pub fn printable(text: &str) -> Cow<'_, str> {
    replace_unprintable(text, is_unprintable, |out, _| out.push(REPLACEMENT))
}

/// [`printable`] for a text of several lines: line feeds and tabs stay.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    replace_unprintable(text, is_unprintable_in_lines, |out, _| out.push(REPLACEMENT))
}

/// [`printable_lines`] for JSON: each such character becomes the escape `\uXXXX`, so that the same value is read back.
pub fn printable_json(text: &str) -> Cow<'_, str> {
    replace_unprintable(text, is_unprintable_in_lines, |out, letter| {
        for unit in letter.encode_utf16(&mut [0; 2]) {
            write!(out, "\\u{unit:04x}").expect("invariant: writing to a string can't fail");
        }
    })
}

fn is_unprintable_in_lines(letter: char) -> bool {
    !matches!(letter, '\n' | '\t') && is_unprintable(letter)
}

fn replace_unprintable(
    text: &str,
    hides: impl Fn(char) -> bool,
    mut show: impl FnMut(&mut String, char),
) -> Cow<'_, str> {
    let Some(first) = text.find(&hides) else { return Cow::Borrowed(text) };
    let (plain, rest) = text.split_at(first);
    let mut out = String::with_capacity(text.len());
    out.push_str(plain);
    for letter in rest.chars() {
        if hides(letter) { show(&mut out, letter) } else { out.push(letter) }
    }
    Cow::Owned(out)
}

/// True if a character is a control character, sets a direction, ends a line or has no width (Unicode's categories Cc,
/// Zl and Zp, its property `Default_Ignorable_Code_Point`, and the marks of U+FFF9 to U+FFFB).
pub(crate) fn is_unprintable(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unprintable_characters_are_replaced_visibly() {
        for (text, shown) in [
            ("login", "login"),
            ("ünïcode 漢 ⚠ 100 %", "ünïcode 漢 ⚠ 100 %"),
            ("lo\u{fe0f}gin\u{fe00}\u{e0100}", "lo\u{fffd}gin\u{fffd}\u{fffd}"),
            ("\u{1b}[31mred", "\u{fffd}[31mred"),
            ("a\u{9b}2Jb\u{7f}\0", "a\u{fffd}2Jb\u{fffd}\u{fffd}"),
            ("a\nerror: b\r", "a\u{fffd}error: b\u{fffd}"),
            ("\u{202e}nigol\u{2066}x\u{2069}\u{200f}\u{61c}", "\u{fffd}nigol\u{fffd}x\u{fffd}\u{fffd}\u{fffd}"),
            ("lo\u{200b}gin\u{feff}\u{2060}\u{ad}\u{e0041}", "lo\u{fffd}gin\u{fffd}\u{fffd}\u{fffd}\u{fffd}"),
            ("a\u{2028}b\u{2029}c", "a\u{fffd}b\u{fffd}c"),
        ] {
            assert_eq!(printable(text), shown, "{text:?}");
        }
        assert_eq!(printable_lines("a\n\tb\u{1b}\r\n"), "a\n\tb\u{fffd}\u{fffd}\n");
        assert_eq!(
            printable_json("{\"a\":\"\u{202e}\u{9b}\u{e0041}\"}\n"),
            r#"{"a":"\u202e\u009b\udb40\udc41"}"#.to_owned() + "\n"
        );
        assert!(matches!(printable("plain"), Cow::Borrowed(_)));
    }

    proptest! {
        #[test]
        fn replacement_keeps_length_and_is_idempotent(text in "\\PC*|(?s).*") {
            let once = printable(&text).into_owned();
            prop_assert_eq!(once.chars().count(), text.chars().count());
            prop_assert!(!once.contains(is_unprintable));
            prop_assert_eq!(&*printable(&once), &once);
        }
    }
}
