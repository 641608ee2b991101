//! The values that servers read from the credential in `Authorization` and `Proxy-Authorization`.
//!
//! Schemes have no case (RFC 9110, section 11.1), and any number of spaces may follow one. Most servers decode `Basic`
//! leniently. Rails reads `Token` as `Bearer`, and the token from the first of several parameters.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::cookies::{unquoted, without_spaces};
use super::values::TooManyValues;

const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// True for a credential that all servers read alike: `Bearer`, and a token of RFC 6750 that names no parameter.
#[inline]
pub(super) fn is_plain(line: &[u8]) -> bool {
    let is_of_token =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/' | b'+');
    line.strip_prefix(b"Bearer ").is_some_and(|token| !token.is_empty() && token.iter().all(is_of_token))
}

/// Calls `found` with each credential that servers read from a line: with one spelling of its scheme, and `Basic` decoded.
pub(super) fn each_value<'q>(
    line: &'q [u8],
    mut found: impl FnMut(Cow<'q, [u8]>) -> Result<(), TooManyValues>,
) -> Result<(), TooManyValues> {
    let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t'));
    let Some((scheme, rest)) = end.map(|end| (line[..end].to_ascii_lowercase(), without_spaces(&line[end..]))) else {
        return found(Cow::Borrowed(line));
    };
    let mut add = |scheme: &[u8], rest: &[u8]| found(Cow::Owned([scheme, b" ", rest].concat()));
    match scheme.as_slice() {
        b"basic" => {
            // Python skips signs outside of the alphabet, Node.js takes `-` and `_` for `+` and `/`. A `=` ends the text for some.
            let until_sign = rest.split(|byte| *byte == b'=').next().unwrap_or(rest);
            [until_sign, rest]
                .into_iter()
                .flat_map(|text| [decode(text, false), decode(text, true)])
                .try_for_each(|credential| add(b"Basic", &credential))
        }
        b"bearer" | b"token" => {
            add(b"Bearer", rest)?;
            let first = rest.split(|byte| matches!(byte, b',' | b':' | b';' | b'\t')).next().unwrap_or(rest);
            let first = without_spaces(first);
            let token = first.strip_prefix(b"token=").unwrap_or(first);
            add(b"Bearer", unquoted(token))
        }
        _ => add(&scheme, rest),
    }
}

/// Decodes Base64 without signs that don't belong to it. With `url`, `-` and `_` are those of its alphabet for URLs.
fn decode(text: &[u8], url: bool) -> Vec<u8> {
    let sign = |byte: &u8| match byte {
        b'-' if url => Some(b'+'),
        b'_' if url => Some(b'/'),
        b'+' | b'/' => Some(*byte),
        _ => byte.is_ascii_alphanumeric().then_some(*byte),
    };
    let mut signs: Vec<u8> = text.iter().filter_map(sign).collect();
    // One sign has six bits, which are no byte.
    signs.truncate(signs.len() - usize::from(signs.len() % 4 == 1));
    LENIENT.decode(signs).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(line: &str) -> Vec<String> {
        let mut values = Vec::new();
        each_value(line.as_bytes(), |value| {
            let value = String::from_utf8_lossy(&value).into_owned();
            if !values.contains(&value) {
                values.push(value);
            }
            Ok(())
        })
        .unwrap();
        values
    }

    #[test]
    fn credentials_are_read_as_servers_read_them() {
        for (line, expected) in [
            ("Bearer R", &["Bearer R"][..]),
            ("bEARER   R", &["Bearer R"]),
            ("Bearer\tR", &["Bearer R"]),
            ("Bearer R==", &["Bearer R=="]),
            ("token R", &["Bearer R"]),
            ("Token token=\"R\", x=1", &["Bearer token=\"R\", x=1", "Bearer R"]),
            ("Bearer token=R;x", &["Bearer token=R;x", "Bearer R"]),
            ("Bearer R, x=1", &["Bearer R, x=1", "Bearer R"]),
            ("Basic YWxpY2U6cHc=", &["Basic alice:pw"]),
            ("BASIC  YWxpY2U6cHd", &["Basic alice:pw"]),
            ("Basic YWxp Y2U6c*Hc=", &["Basic alice:pw"]),
            ("Basic YT_A", &["Basic a0", "Basic a?\u{fffd}"]),
            ("Basic YQ=b", &["Basic a", "Basic a\u{6}"]),
            ("Basic Y", &["Basic "]),
            ("Digest username=\"a\"", &["digest username=\"a\""]),
            ("REAL", &["REAL"]),
            ("", &[""]),
        ] {
            let found = values(line);
            assert_eq!(found, expected, "{line}");
            if is_plain(line.as_bytes()) {
                assert_eq!(found, [line]);
            }
        }
        assert!(is_plain(b"Bearer eyJ.a-b_c~/+") && !is_plain(b"Bearer ") && !is_plain(b"bearer R"));
    }
}
