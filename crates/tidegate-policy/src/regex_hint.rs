//! Regular expressions in place of path patterns, and the patterns that they mean.

/// True if a text can only be a regular expression. Letters such as `+`, `(` and `$` alone may be part of a path.
pub(crate) fn is_regex(text: &str) -> bool {
    const SIGNS: [&str; 15] =
        ["\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\.", "\\/", "[^", "[0-9", "[a-z", "[A-Z", "(?", "/.+", "|"];
    let before_end = text.strip_suffix('$').unwrap_or_default();
    text.starts_with('^') || before_end.ends_with(['*', '+', ')', ']']) || SIGNS.iter().any(|sign| text.contains(sign))
}

/// Returns the nearest path pattern. `None` for alternatives and groups with options, which no single pattern means.
pub(crate) fn nearest_pattern(regex: &str) -> Option<String> {
    if regex.contains('|') || regex.contains("(?") {
        return None;
    }
    let body = regex.trim_start_matches('^').trim_end_matches('$');
    let mut pattern = String::new();
    let mut letters = body.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => pattern.push(letters.next().map_or('*', |next| if next.is_alphanumeric() { '*' } else { next })),
            '.' if matches!(letters.peek(), Some('*' | '+' | '{')) => pattern.push('*'),
            '[' | '(' | '{' => {
                let end = match letter {
                    '[' => ']',
                    '(' => ')',
                    _ => '}',
                };
                letters.by_ref().find(|next| *next == end)?;
                if letter != '{' {
                    pattern.push('*');
                }
            }
            '+' | '?' => {}
            other => pattern.push(other),
        }
    }
    while pattern.contains("**") {
        pattern = pattern.replace("**", "*");
    }
    let is_open = regex.starts_with('^') && !regex.ends_with('$') && !pattern.ends_with('*');
    let pattern = if is_open { pattern + "*" } else { pattern };
    Some(format!("/{}", pattern.trim_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_expressions_are_recognised() {
        for text in
            ["^/api/.*$", "/users/\\d+", "/a/[^/]+/b", "/(a|b)", "/api/.+", "/x/(.*)$", "(?i)/login", "/a\\.html"]
        {
            assert!(is_regex(text), "{text}");
        }
        for text in ["/login", "/api/*", "/.*", "/a+b", "/a(b)", "/users/[id]", "/$metadata", "/price$", "/a.b", "/c++"]
        {
            assert!(!is_regex(text), "{text}");
        }
    }

    #[test]
    fn regular_expressions_have_a_nearest_pattern() {
        for (regex, pattern) in [
            ("^/api/.*$", Some("/api/*")),
            ("^/api/", Some("/api/*")),
            ("^/api", Some("/api*")),
            ("^/login$", Some("/login")),
            ("^/login/?$", Some("/login")),
            ("/users/\\d+", Some("/users/*")),
            ("^/users/[0-9]{1,9}/avatar\\.png$", Some("/users/*/avatar.png")),
            ("^/users/([^/]+)/avatar$", Some("/users/*/avatar")),
            ("^\\/v1\\/.+", Some("/v1/*")),
            ("^.*$", Some("/*")),
            ("^/(login|signup)$", None),
            ("(?i)/login", None),
            ("/[a-z", None),
        ] {
            assert_eq!(nearest_pattern(regex).as_deref(), pattern, "{regex}");
        }
    }
}
