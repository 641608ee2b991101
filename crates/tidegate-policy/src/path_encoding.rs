//! The encoding of paths in URLs.

use crate::path::PathText;

/// The form in which a path is forwarded, so that servers read it alike: dot segments resolved, empty segments dropped,
/// unnecessary escapes decoded, and everything else escaped in capitals. `%2F` and the query stay. `None` if the path
/// already has that form, or doesn't begin with a slash.
pub(crate) fn forwarded_path(path_and_query: &str) -> Option<String> {
    let end = path_and_query.find(['?', '#']).unwrap_or(path_and_query.len());
    let (path, rest) = path_and_query.split_at(end);
    if !path.starts_with('/') {
        return None;
    }
    let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut form = String::with_capacity(path_and_query.len());
    let mut starts = Vec::new();
    let mut is_open = false;
    for segment in path[1..].split('/') {
        let start = form.len();
        form.push('/');
        push_encoded(&mut form, &PathText::new(segment.into()).decode_layer(unreserved));
        is_open = true;
        match &form[start..] {
            "/" | "/." => form.truncate(start),
            "/.." => form.truncate(starts.pop().unwrap_or(0)),
            _ => {
                starts.push(start);
                is_open = false;
            }
        }
    }
    if is_open {
        form.push('/');
    }
    form.push_str(rest.split('#').next().unwrap_or_default());
    (form != path_and_query).then_some(form)
}

/// Writes a path as in a URL: escapes in capitals, and bytes that aren't allowed escaped.
pub(crate) fn percent_encode(path: &PathText) -> String {
    let mut text = String::with_capacity(path.bytes.len());
    push_encoded(&mut text, path);
    text
}

/// True if two digits follow that are an escape with the `%` before them, and not the data of decoded ones.
fn is_escape(path: &PathText, at: usize) -> bool {
    (at..at + 2).all(|at| path.bytes[at].is_ascii_hexdigit() && path.layers(at) == 0)
}

fn push_encoded(text: &mut String, path: &PathText) {
    let mut at = 0;
    while let Some(byte) = path.bytes.get(at) {
        at += 1;
        match path.bytes.get(at..at + 2) {
            Some([high, low]) if *byte == b'%' && is_escape(path, at) => {
                text.push('%');
                text.extend([high, low].map(|digit| char::from(digit.to_ascii_uppercase())));
                at += 2;
            }
            _ if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/".contains(byte) => text.push(char::from(*byte)),
            _ => {
                text.push('%');
                text.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789ABCDEF"[usize::from(digit)])));
            }
        }
    }
}
