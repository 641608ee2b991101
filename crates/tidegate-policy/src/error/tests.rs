use std::cell::Cell;

use super::secret_text::MAX_SEARCHED_LINE;
use super::*;
use crate::{Policy, PolicySources};
use proptest::prelude::*;

thread_local! {
    /// The number of excerpts that this thread has made.
    pub(super) static EXCERPTS: Cell<usize> = const { Cell::new(0) };
}

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
                let excerpt = Excerpt::new("1".into(), "", line, start, end, secret_start("", line));
                assert!(!excerpt.line.contains("hunter2"), "{}", excerpt.line);
            }
        }
    }
    assert_eq!(secret_start("", "token = \"env:API_TOKEN\""), None);
    assert_eq!(secret_start("", "header = \"10\""), None);
    assert_eq!(secret_start("", "x = { header = 10, \"path\" = 1 }"), None);
    assert!(secret_start("", "bearr = \"x\"").is_some());
    assert_eq!(secret_start("", "listen = \"127.0.0.1:1\""), None);
    assert_eq!(secret_start("", "credential_limit = \"40 per 10s\""), None);
    assert_eq!(secret_start("", "credentials = [\"env:A\", 'file:/b'] # two"), None);
    assert!(secret_start("", "credentials = [\"env:A\", \"hunter2\"]").is_some());
    assert!(secret_start("", "credentials = [\"env:A[1]\", \"hunter2\"]").is_some());
    assert!(secret_start("", "body = '{\"apikey\":\"hunter2\"}'").is_some());
    assert_eq!(secret_start("credentials = [ # two\n", "  \"env:A\","), None);
    assert_eq!(secret_start("limit = [\n", "  \"5 per 60s\","), None);
    assert_eq!(secret_start("credentials = [\n  \"env:A\",\n", "  \"hunter2\","), Some(0));
    assert_eq!(secret_start("[a.secrets]\nx = \"env:A\"\n", "pin = \"hunter2\""), Some(6));
    assert_eq!(secret_start("[a.secrets]\n", "pin = \"env:PIN\""), None);
    assert_eq!(secret_start("[admin]\n", "tokens.alice = \"hunter2\""), Some(15));
    assert_eq!(secret_start("", "admin.tokens.\"alice\" = \"hunter2\""), Some(23));
    assert_eq!(quoted("redis://:hunter2@host"), "`redis://…@host`");
    assert_eq!(quoted("https://hooks.example.com/hunter2"), "`https://hooks.example.com/…`");
    assert_eq!(quoted("https://example.com/"), "`https://example.com/`");
}

/// An alert's URL or token under any key but the right one.
#[test]
fn misspelled_keys_of_alerts_show_no_secret() {
    const URL: &str = "\"https://hooks.slack.com/services/T0/hunter2\"";
    const TOKEN: &str = "\"1:hunter2\"";
    let lines = [
        format!("webhok = {URL}"),
        format!("web_hook = {URL}"),
        format!("webhook_url = {URL}"),
        format!("slack = {URL}"),
        format!("slack = {URL} # and an error\nwebhook = 1"),
        format!("on = {URL}"),
        format!("on = [\n  \"blocked\",\n  {URL},\n]"),
        format!("format = {URL}"),
        format!("webhok = [\n  {URL}\n  {URL}\n]"),
        format!("webhok = {}", URL.trim_end_matches('"')),
        format!("telegram = {{ bot = {TOKEN}, chat = 1 }}"),
        format!("telegram = {{ bot = {TOKEN}, chat = [] }}"),
        format!("telegram = {{ chat = {TOKEN}, token = \"env:BOT\" }}"),
        format!("telegram = {{ token = \"env:BOT\", chat = 1, base_url = {URL} }}\nwebhook = 1"),
        format!("telegram = {TOKEN}"),
        format!("telegram.bot = {TOKEN}"),
        format!("tg = {{ key = {TOKEN} }}"),
    ];
    let sections = ["[alert.ops]\n", "[\"alert\".ops]\nlog = true\n"].iter();
    let mut texts: Vec<String> =
        sections.flat_map(|header| lines.iter().map(move |line| format!("{header}{line}\n"))).collect();
    texts.extend(lines.iter().filter(|line| !line.contains('\n')).map(|line| format!("alert.ops.{line}\n")));
    texts.extend([
        format!("alert = {URL}\n"),
        format!("alert.ops = {URL}\n"),
        format!("alert = {{ ops = {{ hook = {URL} }} }}\n"),
        format!("[alert]\nwebhok = {URL}\n"),
        format!("[alert]\nops = {{ hook = {URL}, log = 5 }}\n"),
        "[admin]\ntoks = \"hunter2\"\n".to_owned(),
        "[outbound.provider.api]\nbase_url = \"https://a.example\"\nkeys = [\"hunter2\"]\n".to_owned(),
        "[store]\nurll = \"hunter2\"\n".to_owned(),
    ]);
    for text in texts {
        let errors = Policy::load(PolicySources::new().file("t", &text)).expect_err(&text);
        for told in [errors.to_string(), format!("{errors:?}"), errors.brief()] {
            assert!(!told.contains("hunter2"), "{text}\n{told}");
        }
    }
}

#[test]
fn known_values_of_alerts_are_shown() {
    let text = "[alert.ops]\non = \"blockd\"\nlog = true\n";
    let errors = Policy::load(PolicySources::new().file("t", text)).unwrap_err();
    assert!(errors.to_string().contains("2 | on = \"blockd\""), "{errors}");
}

#[test]
fn brief_errors_repeat_no_value() {
    let text = "[alert.ops]\non = \"hunter2\"\nlog = true\n[inbound.action.a]\nlimit = \"hunter2\"\nkey = [\"hunter2\"]\n\
        [inbound]\nupstream = \"hunter2\"\nlisten = \"hunter2\"\n[log]\nlevel = \"hunter2\"\n[outbound.provider.b]\n\
        preset = \"hunter2\"\n[inbound.caps]\nbody = \"hunter2\"\n";
    let errors = Policy::load(PolicySources::new().file("t", text)).unwrap_err();
    assert!(errors.count() >= 7 && errors.to_string().contains("hunter2"), "{errors}");
    assert!(!errors.brief().contains("hunter2"), "{}", errors.brief());
    assert!(errors.brief().starts_with("t:2:6: expected `blocked`, `flood`"), "{}", errors.brief());
}

#[test]
fn only_shown_errors_cost_an_excerpt() {
    const COUNT: usize = 20_000;
    let lines = |line: &dyn Fn(usize) -> String| (0..COUNT).map(line).collect::<String>();
    for text in [
        format!("[inbound]\n{}", lines(&|number| format!("unknown{number} = 1\n"))),
        format!("[inbound.action.a]\nlimit = {{ {} }}\n", lines(&|number| format!("x{number}=1,"))),
        format!("[inbound.action.a]\nlimit = \"1/s\"\npenalty = {{ {} }}\n", lines(&|number| format!("x{number}=1,"))),
        lines(&|number| format!("[inbound.action.a{number}]\nlimit = \"five\"\n")),
        lines(&|_| "not toml\n".to_owned()),
        format!("[inbound]\n[log]\n[inbound]\n{}", lines(&|_| "listen = 1\n".to_owned())),
    ] {
        let before = EXCERPTS.get();
        let errors = Policy::load(PolicySources::new().file("t", &text)).unwrap_err();
        let made = EXCERPTS.get() - before;
        assert!(made <= MAX_ERRORS, "{made} of {}: {}", errors.count(), &text[..60]);
        assert!(errors.iter().len() <= MAX_ERRORS && errors.to_string().len() < 100_000);
    }
}

#[test]
fn long_lines_are_not_searched_for_secrets() {
    let line = "a=".repeat(MAX_SEARCHED_LINE / 2);
    assert_eq!(secret_start("", &line), None);
    assert_eq!(secret_start("", &format!("{line}x")), Some(0));
    assert_eq!(secret_start(&format!("{line}x = ["), "\"hunter2\""), Some(0));
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
        let begins = secret_start(&above, &line);
        prop_assert!(begins.is_none_or(|begins| line.is_char_boundary(begins)));
    }

    #[test]
    fn any_excerpt_is_bounded_and_never_panics(line in "\\PC*", prefix in "[A-Z_=]{0,100}", start: prop::sample::Index, end: prop::sample::Index) {
        let boundaries: Vec<usize> = line.char_indices().map(|(at, _)| at).chain([line.len()]).collect();
        let (start, end) = (*start.get(&boundaries), *end.get(&boundaries));
        let excerpt = Excerpt::new(String::new(), &prefix, &line, start.min(end), start.max(end), secret_start("", &line));
        prop_assert!(excerpt.line.chars().count() < 400);
    }
}
