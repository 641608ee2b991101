use super::*;
use proptest::prelude::*;

#[test]
fn excerpts_hide_secrets() {
    for line in [
        "token = \"hunter2\"",
        "api = { token=\"hunter2\", x = 1 }",
        "tokn = 'hunter2'",
        "\"token\" = \"hunter2",
        "db_password = \"hunter2\"",
        "url = \"redis://user:hunter2@host/0\"",
        "upstream = \"http://a:b@c\" # http://hunter2@x",
    ] {
        for start in 0..=line.len() {
            for end in start..=line.len() {
                let excerpt = Excerpt::new("1".into(), "", line, start, end, secret_start(line));
                assert!(!excerpt.line.contains("hunter2"), "{}", excerpt.line);
            }
        }
    }
    assert_eq!(secret_start("token = \"env:API_TOKEN\""), None);
    assert_eq!(secret_start("header = \"10\""), None);
    assert_eq!(secret_start("x = { header = 10, \"path\" = 1 }"), None);
    assert!(secret_start("bearr = \"x\"").is_some());
    assert_eq!(secret_start("listen = \"127.0.0.1:1\""), None);
    assert_eq!(secret_start("credential_limit = \"40 per 10s\""), None);
    assert_eq!(secret_start("credentials = [\"env:A\", 'file:/b'] # two"), None);
    assert!(secret_start("credentials = [\"env:A\", \"hunter2\"]").is_some());
    assert!(secret_start("credentials = [\"env:A[1]\", \"hunter2\"]").is_some());
    assert!(secret_start("body = '{\"apikey\":\"hunter2\"}'").is_some());
    assert_eq!(secret_start_in_section("credentials = [ # two\n", "  \"env:A\","), None);
    assert_eq!(secret_start_in_section("limit = [\n", "  \"5 per 60s\","), None);
    assert_eq!(secret_start_in_section("credentials = [\n  \"env:A\",\n", "  \"hunter2\","), Some(0));
    assert_eq!(secret_start_in_section("[a.secrets]\nx = \"env:A\"\n", "pin = \"hunter2\""), Some(6));
    assert_eq!(secret_start_in_section("[a.secrets]\n", "pin = \"env:PIN\""), None);
    assert_eq!(quoted("redis://:hunter2@host"), "`redis://…@host`");
}

#[test]
fn the_caret_stays_below_its_text() {
    let line = "url = \"redis://user:hunter2@host/0\" # x";
    let at = line.find("# x").unwrap();
    let excerpt = Excerpt::new(String::new(), "", line, at, at + 3, None);
    assert_eq!(excerpt.line.chars().skip(excerpt.indent.chars().count()).collect::<String>(), "# x");
}

proptest! {
    #[test]
    fn secret_positions_are_character_boundaries(above in "[a-z.=\"\\[\\]\n é]{0,80}", line in "[a-z=\"\\[\\] é]{0,40}") {
        let begins = secret_start_in_section(&above, &line).or_else(|| secret_start(&line));
        prop_assert!(begins.is_none_or(|begins| line.is_char_boundary(begins)));
    }

    #[test]
    fn any_excerpt_is_bounded_and_never_panics(line in "\\PC*", prefix in "[A-Z_=]{0,100}", start: prop::sample::Index, end: prop::sample::Index) {
        let boundaries: Vec<usize> = line.char_indices().map(|(at, _)| at).chain([line.len()]).collect();
        let (start, end) = (*start.get(&boundaries), *end.get(&boundaries));
        let excerpt = Excerpt::new(String::new(), &prefix, &line, start.min(end), start.max(end), secret_start(&line));
        prop_assert!(excerpt.line.chars().count() < 400);
    }
}
