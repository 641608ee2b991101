//! The texts that servers read as the path of a request target, before they decode its escapes.

use crate::matched_actions::PathError;
use crate::path::PathQuirks;
use crate::readings::WorkBudget;

/// The work of rewriting an escape such as `%u00e9`, for all texts together.
const UNICODE_ESCAPE_WORK: usize = 100;

/// Returns the texts that servers read as the path of a request target. Each ends at the target's `?`. With
/// a `#` before that, one text ends at the `#` and another includes it. Text after two leading slashes would be a host
/// in a URL, so the text after that host is included, too. Each text also comes with `%2f` for `%u002f`, with its plain
/// slashes merged before escaped ones are decoded, and without the parameters that are cut before that.
///
/// # Errors
/// [`PathError::TooMany`] if they exceed the budget of work.
pub(crate) fn raw_paths(target: &[u8], quirks: PathQuirks, budget: &mut WorkBudget) -> Result<Vec<Vec<u8>>, PathError> {
    let until = |end: u8, text: &[u8]| text.iter().position(|byte| *byte == end).unwrap_or(text.len());
    let whole = &target[..until(b'?', target)];
    let mut texts = vec![whole.to_vec()];
    let end = until(b'#', whole);
    if end < whole.len() {
        texts.push(whole[..end].to_vec());
    }
    for at in 0..texts.len() {
        let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
        let slashes = texts[at].iter().take_while(|byte| is_slash(byte)).count();
        if slashes > 1 {
            let rest = &texts[at][slashes..];
            texts.push(rest[rest.iter().position(is_slash).unwrap_or(rest.len())..].to_vec());
        }
    }
    let has_letter = |at: &usize| matches!(whole[*at], b'u' | b'U') && percent_u_sign(&whole[..*at]).is_some();
    let escapes = (0..whole.len()).filter(has_letter).count();
    budget.spend(UNICODE_ESCAPE_WORK * escapes)?;
    if escapes > 0 {
        for at in 0..texts.len() {
            texts.extend(rewrite_percent_u(&texts[at]));
        }
    }
    for at in 0..texts.len() {
        budget.spend(texts[at].len())?;
        texts.extend(merge_plain_slashes(&texts[at]));
    }
    for at in 0..texts.len() {
        let Some(parameters) = texts[at].iter().position(|byte| *byte == b';') else { continue };
        budget.spend(texts[at].len())?;
        // Without an escape or a backslash in the parameters, they can be cut after decoding with the same result.
        if texts[at][parameters..].iter().any(|byte| matches!(byte, b'%' | b'\\')) {
            texts.push(budget.text(texts[at].clone())?.without_parameters(quirks).bytes);
        }
        // Python's `urlparse` cuts the parameters of the last segment only.
        let last = texts[at].iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        let cut = texts[at][last..].iter().position(|byte| *byte == b';');
        if let Some(cut) = cut.filter(|_| parameters < last) {
            texts.push(texts[at][..last + cut].to_vec());
        }
    }
    Ok(texts)
}

/// Returns the text without repeated slashes, as Envoy's `merge_slashes` writes it. `None` if there are none, or no
/// escapes: then slashes can be merged after decoding with the same result.
fn merge_plain_slashes(text: &[u8]) -> Option<Vec<u8>> {
    // Counted and not searched: that takes a tenth of the time.
    let has_repeated = text.windows(2).filter(|pair| pair[0] == b'/' && pair[1] == b'/').count() > 0;
    (has_repeated && text.contains(&b'%')).then(|| {
        let mut merged = text.to_vec();
        merged.dedup_by(|one, before| *one == b'/' && *before == b'/');
        merged
    })
}

/// Returns the text with `%6c` for each `%u006c`, and `%256c` for each `%25u006c`. Jetty 9.4 and old versions of IIS
/// read both forms alike. `None` if there are none.
fn rewrite_percent_u(text: &[u8]) -> Option<Vec<u8>> {
    let mut short = Vec::with_capacity(text.len());
    let (mut rest, mut found) = (text, false);
    while let [byte, behind @ ..] = rest {
        if matches!(byte, b'u' | b'U')
            && let Some(sign) = percent_u_sign(&short)
            && let Some((digits, behind)) = behind.split_first_chunk::<4>()
            && let Some(letter) = parse_four_digits(digits)
        {
            short.truncate(short.len() - sign.len());
            for byte in letter.encode_utf8(&mut [0; 4]).bytes() {
                short.extend_from_slice(sign);
                short.extend([byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
            }
            (rest, found) = (behind, true);
            continue;
        }
        short.push(*byte);
        rest = behind;
    }
    found.then_some(short)
}

/// Returns the sign at the end of the text before a `u`, if they begin an escape.
fn percent_u_sign(before: &[u8]) -> Option<&'static [u8]> {
    [&b"%25"[..], b"%"].into_iter().find(|sign| before.ends_with(sign))
}

fn parse_four_digits(digits: &[u8; 4]) -> Option<char> {
    let number = digits.iter().try_fold(0, |sum, digit| Some(sum << 4 | char::from(*digit).to_digit(16)?))?;
    char::from_u32(number)
}
