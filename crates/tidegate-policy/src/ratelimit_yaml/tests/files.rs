//! Files that the original accepts or refuses.

use proptest::prelude::*;

use super::read;
use crate::ratelimit_yaml::{Amount, RatelimitConfig, Unit};

/// A descriptor with these lines.
fn with(lines: &str) -> String {
    format!("domain: d\ndescriptors:\n- key: a\n{lines}")
}

#[test]
fn valid_structures_are_accepted() {
    let limit = "rate_limit: {unit: minute, requests_per_unit: 5}";
    for yaml in [
        // Values under one key; one level below another; a key alone beside one with a value.
        format!("domain: d\ndescriptors:\n- key: a\n  value: x\n  {limit}\n- key: a\n  value: y\n  {limit}\n"),
        format!(
            "domain: d\ndescriptors:\n- key: a\n  value: x\n  descriptors:\n  - key: b\n    {limit}\n\
             - key: b\n  {limit}\n"
        ),
        format!("domain: d\ndescriptors:\n- key: a\n  {limit}\n- key: a\n  value: 50.0.0.5\n  {limit}\n"),
        "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: second, requests_per_unit: 0}\n".to_owned(),
        // Without a limit, unlimited, in shadow or quota mode.
        with("  value: x\n"),
        with("  rate_limit: {unlimited: true}\n"),
        with("  rate_limit: {unlimited: true, requests_per_unit: 5}\n"),
        with(&format!("  {limit}\n  shadow_mode: true\n  quota_mode: true\n")),
        // One limit replaces another.
        with("  rate_limit: {unit: second, requests_per_unit: 5, name: one, replaces: [{name: two}]}\n"),
        // Metrics, wildcards, metadata.
        with(&format!("  detailed_metric: true\n  value_to_metric: true\n  {limit}\n")),
        with(&format!("  value: x*\n  {limit}\n")),
        with(&format!("  value: /api/*/action/*\n  share_threshold: true\n  {limit}\n")),
        with(&format!("  {limit}\n  metadata: {{any: {{thing: [1, 1.5, text, true]}}}}\n")),
        // Empty lists and values.
        "domain: d\ndescriptors:\n".to_owned(),
        "domain: d\n".to_owned(),
        with("  rate_limit:\n"),
        // A value may be written as a number or a truth value.
        with("  value: 404\n"),
        with("  value: yes\n"),
    ] {
        assert_eq!(read(&yaml).map(|_| ()), Ok(()), "{yaml}");
    }
}

#[test]
fn every_unit_is_known() {
    for unit in Unit::ALL {
        for name in [unit.name().to_owned(), unit.name().to_uppercase()] {
            let yaml = with(&format!("  rate_limit: {{unit: {name}, requests_per_unit: 7}}\n"));
            let config = read(&yaml).expect("a known unit");
            let limit = config.domains()[0].descriptors[0].limit.clone();
            assert_eq!(limit.map(|limit| limit.amount), Some(Amount::PerUnit { requests: 7, unit }), "{yaml}");
        }
    }
}

#[test]
fn invalid_structures_are_refused_with_their_place() {
    for (yaml, error) in [
        ("'''", "limits.yaml:1:1: not valid YAML"),
        ("", "limits.yaml:1:1: the file has no domain"),
        ("descriptors:\n", "limits.yaml:1:1: the file has no domain"),
        ("domain: ''\n", "limits.yaml:1:9: the file has no domain"),
        ("- a\n", "limits.yaml:1:3: a limit is the string `a`"),
        ("0.25: d\n", "limits.yaml:1:1: a name is the number `0.25`"),
        ("domain: d\ndescriptors:\n- a\n- b\n", "limits.yaml:3:3: an item of `descriptors` is the string `a`"),
        ("domain: d\ndescriptors:\n- value: x\n", "limits.yaml:3:3: the descriptor has no key"),
        ("domain: d\ndescriptors:\n  key: a\n", "limits.yaml:3:3: `descriptors` is a mapping"),
        (&with("- key: a\n"), "limits.yaml:4:3: the descriptor `d.a` stands twice, first in `limits.yaml` on line 3"),
        (&with("  value: b\n- key: a_b\n"), "limits.yaml:5:3: the descriptor `d.a_b` stands twice"),
        (&with("  ratelimit: {}\n"), "limits.yaml:4:3: unknown name `ratelimit`"),
        (&with("  rate_limit: {requestsperunit: 5}\n"), "limits.yaml:4:16: unknown name `requestsperunit`"),
        (&with("  rate_limit: {unit: foo}\n"), "limits.yaml:4:22: unknown unit `foo`"),
        (&with("  rate_limit: {unit: unknown}\n"), "limits.yaml:4:22: unknown unit `unknown`"),
        (&with("  rate_limit: {requests_per_unit: 5}\n"), "limits.yaml:4:15: the limit has no unit"),
        (
            &with("  rate_limit: {unlimited: true, unit: day}\n"),
            "limits.yaml:4:39: the limit is `unlimited` and has a unit",
        ),
        (
            &with("  rate_limit: {unit: day, requests_per_unit: -1}\n"),
            "limits.yaml:4:46: `requests_per_unit` is the number `-1`",
        ),
        (
            &with("  rate_limit: {unit: day, requests_per_unit: 4294967296}\n"),
            "limits.yaml:4:46: `requests_per_unit` is",
        ),
        (
            &with("  rate_limit: {unit: day, requests_per_unit: '5'}\n"),
            "limits.yaml:4:46: `requests_per_unit` is the string `5`",
        ),
        (
            &with("  rate_limit: {unit: day, requests_per_unit: 1.5}\n"),
            "limits.yaml:4:46: `requests_per_unit` is the number `1.5`",
        ),
        (
            &with("  rate_limit: {unit: day, name: n, replaces: [{name: n}]}\n"),
            "limits.yaml:4:54: the limit replaces itself",
        ),
        (
            &with("  rate_limit: {unit: day, replaces: [{name: }]}\n"),
            "limits.yaml:4:43: `replaces` has an item without a name",
        ),
        (&with("  shadow_mode: 1\n"), "limits.yaml:4:16: `shadow_mode` is the number `1`"),
        (&with("  value: 1.5\n"), "limits.yaml:4:10: `value` is the number `1.5`"),
        (&with("  value: [{key: a}]\n"), "limits.yaml:4:10: `value` is a list"),
        (&with("  value: x\n  share_threshold: true\n"), "limits.yaml:5:20: `share_threshold` has nothing to share"),
        (&with("  metadata: 5\n"), "limits.yaml:4:13: `metadata` is the number `5`"),
        (&with("  <<: 5\n"), "limits.yaml:4:3: `<<` doesn't name a mapping"),
        (&with("  value: !int 5\n"), "limits.yaml:4:15: the tag `!int` has no meaning here"),
        ("domain: \u{e9}\u{e9}\u{e9}\nx: 1\n", "limits.yaml:2:1: unknown name `x`"),
    ] {
        let found = read(yaml).map(|_| ()).unwrap_err();
        assert!(found.starts_with(error), "{yaml}\nfound    {found}\nexpected {error}");
    }
}

#[test]
fn misspelt_names_get_a_suggestion() {
    for (lines, meant) in [
        ("  ratelimit: {}\n", "rate_limit"),
        ("  rate_limit: {requestsperunit: 5}\n", "requests_per_unit"),
        ("  rate_limit: {unit: minutes}\n", "minute"),
        ("  shadow-mode: true\n", "shadow_mode"),
    ] {
        let errors = RatelimitConfig::read([("a.yaml", with(lines))], false).unwrap_err();
        assert!(errors.to_string().contains(&format!("did you mean `{meant}`?")), "{errors}");
    }
}

#[test]
fn a_domain_in_two_files_needs_merging() {
    let files = |second: &'static str| [("a.yaml", "domain: d\ndescriptors: [{key: a}]"), ("b.yaml", second)];
    let other = "domain: d\ndescriptors: [{key: b}]";
    let errors = RatelimitConfig::read(files(other), false).unwrap_err().to_string();
    assert!(errors.contains("the domain `d` stands twice, first in `a.yaml` on line 1"), "{errors}");
    let merged = RatelimitConfig::read(files(other), true).expect("one domain");
    let keys: Vec<&str> = merged.domains()[0].descriptors.iter().map(|descriptor| descriptor.key.as_str()).collect();
    assert_eq!((merged.domains().len(), keys), (1, vec!["a", "b"]));
    let errors = RatelimitConfig::read(files("domain: d\ndescriptors: [{key: a}]"), true).unwrap_err().to_string();
    assert!(errors.contains("the descriptor `d.a` stands twice, first in `a.yaml` on line 2"), "{errors}");
}

#[test]
fn settings_without_effect_get_a_note() {
    for (yaml, note) in [
        (with("  unit: day\n"), "limits.yaml:4:3: `unit` has no effect in a descriptor; it belongs in `rate_limit`"),
        (
            with("  rate_limit: {unit: day, requests_per_unit: 5, shadow_mode: true}\n"),
            "limits.yaml:4:49: `shadow_mode` has no effect in `rate_limit`; it belongs in a descriptor",
        ),
        (with("  shadow_mode: true\n"), "limits.yaml:4:16: `shadow_mode` has no effect on a descriptor without"),
        (with("  value: x\n  value: y\n"), "limits.yaml:5:3: `value` stands twice here; only the last one counts"),
        (with("  rate_limit: {unit: day}\n"), "limits.yaml:4:15: without `requests_per_unit` the limit is 0"),
        ("domain: d\n---\ndomain: e\n".to_owned(), "limits.yaml:2:1: a second document begins here"),
    ] {
        let config = read(&yaml).expect("a valid file");
        let notes: Vec<String> = config.notes().iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), 1, "{yaml} {notes:?}");
        assert!(notes[0].starts_with(&format!("note: {note}")), "{notes:?}");
    }
}

#[test]
fn aliases_and_merges_repeat_values() {
    let yaml = "
domain: d
descriptors:
- key: a
  rate_limit: &limit {unit: day, requests_per_unit: 5}
- key: b
  rate_limit: *limit
- key: c
  rate_limit: {<<: *limit, requests_per_unit: 9}
- key: d
  rate_limit: {<<: [{requests_per_unit: 7}, *limit]}
";
    let config = read(yaml).expect("valid aliases");
    let amounts = |config: &RatelimitConfig| {
        let limits = config.domains()[0].descriptors.iter().map(|it| it.limit.as_ref().map(|limit| limit.amount));
        limits.collect::<Vec<_>>()
    };
    let limited = |requests| Some(Amount::PerUnit { requests, unit: Unit::Day });
    assert_eq!(amounts(&config), [5, 5, 9, 7].map(limited));
    assert!(config.notes().is_empty());
    // As in the original, `<<` replaces what stands above it.
    let config = read(&with("  rate_limit: {requests_per_unit: 1, <<: {unit: day, requests_per_unit: 3}}\n"));
    let config = config.expect("a valid merge");
    assert_eq!((amounts(&config), config.notes().len()), (vec![limited(3)], 1));
}

#[test]
fn oversized_input_is_refused() {
    let doubled = (1..30).map(|it| format!("a{it}: &a{it} [*a{0}, *a{0}]\n", it - 1));
    let bomb = format!("a0: &a0 [1]\n{}", doubled.collect::<String>());
    let growing = (1..30).map(|it| format!("a{it}: &a{it} [[[*a{}]]]\n", it - 1));
    let tower = format!("a0: &a0 [1]\n{}", growing.collect::<String>());
    let many =
        format!("domain: d\ndescriptors:\n{}", (0..20_001).map(|it| format!("- key: a{it}\n")).collect::<String>());
    for (yaml, error) in [
        (bomb, "the file has too many values"),
        (format!("a: &a {}\nb: [{}]", "a".repeat(1 << 20), "*a,".repeat(100_000)), "the file has too many values"),
        (tower, "the values are nested too deeply"),
        ("a: &a [*a]".to_owned(), "the alias stands within the value that it names"),
        (format!("a: {}", "[".repeat(100)), "the values are nested too deeply"),
        (format!("a: {}", "[".repeat(100_000)), "recursion limit exceeded"),
        (format!("a: [{}]", "a,".repeat(200_000)), "the file has too many values"),
        (many, "there are too many descriptors"),
        ("a".repeat((4 << 20) + 1), "the file is larger than 4 MiB"),
    ] {
        let found = read(&yaml).map(|_| ()).unwrap_err();
        assert!(found.contains(error), "{found}");
    }
}

proptest! {
    #[test]
    fn no_input_panics(pieces in proptest::collection::vec(0..PIECES.len(), 0..40)) {
        let yaml: String = pieces.into_iter().map(|piece| PIECES[piece]).collect();
        let _ = read(&yaml);
    }
}

const PIECES: [&str; 30] = [
    "domain: d\n",
    "descriptors:\n",
    "- key: a\n",
    "  value: x*\n",
    "  rate_limit:\n",
    "    unit: day\n",
    "- ",
    "  ",
    "\n",
    "\r\n",
    "[",
    "]",
    "{",
    "}",
    ",",
    ": ",
    "&a ",
    "*a",
    "<<: ",
    "'",
    "\"",
    "!!str ",
    "|\n",
    ">\n",
    "---\n",
    "...\n",
    "\u{e9}",
    "#",
    "%",
    "?",
];
