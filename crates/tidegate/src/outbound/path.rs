//! Paths that stay where they are put.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::TargetError;

/// Whether a path that is put behind a base stays below it and within the authority, however the server reads it.
///
/// Servers differ in what they take for a slash (`%2F`, `\`, `%5C`) and for a segment that leads up (`%2E%2E`, `..;x`).
/// The worst of all readings counts: whatever anybody could take for `..` leads up, and a segment with such a part in
/// it, or with nothing else, leads nowhere down.
pub(super) fn check(path: &str) -> Result<(), TargetError> {
    if !path.is_empty() && !path.starts_with('/') {
        return Err(TargetError::NotAPath);
    }
    if path.contains('\\') {
        return Err(TargetError::Backslash);
    }
    let mut depth = 0_usize;
    for segment in path.split('/') {
        let decoded = Cow::from(percent_decode(segment.as_bytes()));
        let mut parts = decoded.split(|byte| matches!(byte, b'/' | b'\\')).map(name);
        let climbs = parts.clone().filter(|name| *name == b"..").count();
        depth = depth.checked_sub(climbs).ok_or(TargetError::Climbs)?;
        if climbs == 0 && parts.any(|name| !matches!(name, b"" | b".")) {
            depth += 1;
        }
    }
    Ok(())
}

/// A segment without the parameters that Java servers cut off.
fn name(segment: &[u8]) -> &[u8] {
    segment.split(|byte| *byte == b';').next().unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Where a path leads in the worst reading: everything decoded, every separator taken, parameters cut off.
    pub(in super::super) fn worst_reading(path: &str) -> Vec<String> {
        let decoded = percent_decode(path.as_bytes()).decode_utf8_lossy().replace('\\', "/");
        let mut stack = Vec::new();
        for segment in decoded.split('/').map(|segment| segment.split(';').next().unwrap_or_default()) {
            match segment {
                "" | "." => {}
                ".." => drop(stack.pop()),
                other => stack.push(other.to_owned()),
            }
        }
        stack
    }

    #[test]
    fn paths_that_stay() {
        for path in [
            "",
            "/",
            "/movie/603",
            "//evil.example/x",
            "/@evil.example",
            "/@scope/package",
            "/a/../b",
            "/a/b/../../c",
            "/a%2fb",
            "/a/%2e%2e/b",
            "/a..b/..c/...",
            "/%2f%2fevil",
            "/a;x=1/b",
            "/.",
            "/./a",
            "/%zz",
        ] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
    }

    #[test]
    fn paths_that_would_climb() {
        for path in [
            "/..",
            "/../x",
            "/a/../..",
            "/%2e%2e/x",
            "/%2E./x",
            "/.%2e",
            "/..%2fx",
            "/a/..%2f..%2fx",
            "/..%5cx",
            "/a%2f..%2f..",
            "/a%2fb/../..",
            "/..;/x",
            "/..;a=b/x",
            "/%2e%2e%3bx/y",
            "/./..",
            "//..",
            "/a//../..",
            "/a%2f../b/..",
            "/%2f/..",
        ] {
            assert_eq!(check(path), Err(TargetError::Climbs), "{path}");
        }
    }

    #[test]
    fn what_is_no_path() {
        for path in ["http://evil.example/", "@evil.example", "*", "evil", "..", "%2e"] {
            assert_eq!(check(path), Err(TargetError::NotAPath), "{path}");
        }
        for path in ["/\\evil.example", "/a\\..\\b", "\\\\evil"] {
            assert!(check(path).is_err(), "{path}");
        }
    }
}
