//! Limits with conditions, in limitador's YAML.

use super::read;
use crate::ratelimit_yaml::{LimitTable, RatelimitConfig};

/// The limits of limitador's own example, and one with each kind of expression.
const LIMITS: &str = "---
- namespace: test_namespace
  max_value: 10
  seconds: 60
  conditions:
    - \"descriptors[0]['req.method'] == 'GET'\"
    - \"descriptors[0]['req.path'] != '/json'\"
  variables: []
- namespace: test_namespace
  max_value: 5
  seconds: 60
  conditions:
    - \"descriptors[0]['req.method'] == 'POST'\"
  variables:
    - descriptors[0]['user_id']
    - descriptors[0].tenant
- namespace: other
  name: with a name
  id: an-id
  max_value: 1000000
  seconds: 3600
  conditions:
  variables:
- namespace: other
  name: numbers
  max_value: 7
  seconds: 1
  conditions: [\"int(descriptors[0].size) > 10\", \"limit.name == 'numbers'\"]
  variables: [\"size(descriptors)\"]
";

fn table() -> LimitTable {
    LimitTable::new(&read(LIMITS).unwrap())
}

/// The limits that apply, each with its key.
fn applying(table: &LimitTable, namespace: &str, descriptors: &[&[(&str, &str)]]) -> Vec<(String, String)> {
    let found = table.applying(namespace, descriptors.iter().map(|entries| entries.to_vec())).expect("the namespace");
    found.into_iter().map(|found| (found.limit.action.clone(), found.key)).collect()
}

#[test]
fn conditions_and_variables_choose_the_limits() {
    let table = table();
    let found = |descriptors: &[&[(&str, &str)]]| applying(&table, "test_namespace", descriptors);
    let [reads, writes] = ["test_namespace.per-60s", "test_namespace.per-60s-2"];
    let one = |action: &str, key: &str| vec![(action.to_owned(), key.to_owned())];
    let get = ("req.method", "GET");
    assert_eq!(found(&[&[get, ("req.path", "/")]]), one(reads, ""));
    assert_eq!(found(&[&[get, ("req.path", "/json")]]), []);
    assert_eq!(found(&[&[get]]), [], "a condition asks for an entry that isn't there");
    let post = ("req.method", "POST");
    assert_eq!(found(&[&[post, ("user_id", "a|b"), ("tenant", "t")]]), one(writes, "t|a\\|b"));
    assert_eq!(found(&[&[post, ("user_id", "a")]]), [], "a variable isn't there");
    assert_eq!(found(&[&[], &[post, ("user_id", "a"), ("tenant", "t")]]), [], "the expressions ask the first");
    assert_eq!(found(&[]), []);
    assert!(table.applying("unknown", []).is_none());
}

#[test]
fn values_without_meaning_escape_no_limit() {
    let table = table();
    let of_size = |size: &str| applying(&table, "other", &[&[("size", size)], &[]]);
    let always = ("other.with-a-name".to_owned(), String::new());
    assert_eq!(of_size("9"), std::slice::from_ref(&always));
    assert_eq!(of_size("11"), [always.clone(), ("other.numbers".to_owned(), "2".to_owned())]);
    assert_eq!(of_size("no number"), [always, ("other.numbers".to_owned(), "2".to_owned())]);
}

/// True if a limit with this condition applies to a request with these entries.
fn applies(condition: &str, entries: &[(&str, &str)]) -> bool {
    let yaml = format!("- {{namespace: a, max_value: 1, seconds: 60, conditions: [{condition:?}], variables: []}}");
    !applying(&LimitTable::new(&read(&yaml).unwrap()), "a", &[entries]).is_empty()
}

#[test]
fn keys_that_clients_choose_are_not_missing_entries() {
    let chosen = "{'free': 1, 'gold': 2}[descriptors[0].tier] < 2";
    for (tier, expected) in [("free", true), ("gold", false), ("other", true), ("tier", true), ("free'", true)] {
        assert_eq!(applies(chosen, &[("tier", tier)]), expected, "{tier}");
    }
    assert!(!applies(chosen, &[]), "there is no tier");
    let other = "{'free': true}[descriptors[0].plan] || descriptors[0].role == 'x'";
    for plan in ["x", "zzz", "free", "free'"] {
        assert!(applies(other, &[("plan", plan), ("role", "y")]), "{plan}");
    }
    let index = "['a', 'b'][int(descriptors[0].n)] != 'a'";
    for (n, expected) in [("0", false), ("1", true), ("2", true), ("99", true), ("-1", true), ("x", true)] {
        assert_eq!(applies(index, &[("n", n)]), expected, "{n}");
    }
    let declared = "descriptors.exists(d, int(d.user) > 3)";
    for (user, expected) in [("2", false), ("4", true), ("x", true)] {
        assert_eq!(applies(declared, &[("user", user)]), expected, "{user}");
    }
    let notes =
        read(&format!("- {{namespace: a, max_value: 1, seconds: 60, conditions: [{declared:?}], variables: []}}"));
    assert_eq!(notes.unwrap().notes(), []);
    // The library panics on these values.
    let contained = "!bytes(descriptors[0].a).contains(bytes(descriptors[0].b))";
    assert!(applies(contained, &[("a", "x"), ("b", "")]));
}

#[test]
fn expressions_are_bounded() {
    let parse = |condition: &str| {
        let yaml = format!("- {{namespace: a, max_value: 1, seconds: 60, conditions: [{condition:?}], variables: []}}");
        read(&yaml).map(|config| applying(&LimitTable::new(&config), "a", &[&[("a", "b")]]).len())
    };
    let nested = |depth: usize| format!("{}true{}", "(".repeat(depth), ")".repeat(depth));
    assert_eq!(parse(&nested(16)), Ok(1));
    assert!(parse(&nested(17)).unwrap_err().contains("nested more than 16 deep"));
    for (first, repeated, last) in [("0", "-1", " < 1"), ("descriptors[0]", ".a", ""), ("", "!", "true")] {
        let long = |count: usize| format!("{first}{}{last}", repeated.repeat(count));
        assert!(parse(&long(60)).is_ok(), "{}", long(60));
        assert!(parse(&long(70)).unwrap_err().contains("more than 64 operators"), "{}", long(70));
    }
    assert!(parse(&format!("'{}' == 'a'", "a".repeat(1000))).unwrap_err().contains("more than 1000 bytes"));
    let macros = "[1].all(a, [1].all(b, [1].all(c, true)))";
    assert!(parse(macros).unwrap_err().contains("more than 2 of `all`"), "{:?}", parse(macros));
    assert!(parse(&format!("{}'' == ''", "'' + ".repeat(9))).unwrap_err().contains("more than 8 signs `+`"));
    for unknown in ["nosuchfunction(descriptors[0].a)", "descriptors[0].a.startsWit('a')", "true || nosuchfunction()"] {
        let message = parse(unknown).unwrap_err();
        assert!(message.contains("there is no function `"), "{message}");
    }
    assert_eq!(parse("descriptors[0].a.startsWith('b') && size(descriptors) == 1 && !has(descriptors[0].c)"), Ok(1));
    // Values that are too long aren't evaluated, and escape no limit.
    let long = "a".repeat(33 << 10);
    assert!(applies("descriptors[0].a == 'b'", &[("a", &long)]));
    let message = parse("Foo{a: 1} == descriptors[0].a").unwrap_err();
    assert!(message.contains("isn't supported"), "{message}");
}

#[test]
fn faults_have_their_place() {
    let limit = |more: &str| format!("- {{namespace: a, max_value: 1, seconds: 60, {more}}}");
    let expressions = "conditions: [], variables: []";
    for (yaml, expected) in [
        ("- 1", "limits.yaml:1:3: a limit is the number `1`"),
        ("- {max_value: 1, seconds: 1, conditions: [], variables: []}", "limits.yaml:1:3: the limit has no namespace"),
        (&*limit("conditions: []"), "limits.yaml:1:3: the limit has no `variables`"),
        (
            "- {namespace: a, seconds: 0, conditions: [], variables: []}",
            "limits.yaml:1:27: `seconds` is the number `0`",
        ),
        (
            "- {namespace: a, max_value: -1, seconds: 1, conditions: [], variables: []}",
            "limits.yaml:1:29: `max_value` is the number `-1`",
        ),
    ] {
        let found = read(yaml).expect_err(yaml);
        assert_eq!(found, expected, "{yaml}");
    }
    let wrong = read(&limit("conditions: [\"descriptors[0] ==\"], variables: []")).expect_err("an error");
    assert!(wrong.starts_with("limits.yaml:1:"), "{wrong}");
    assert!(wrong.contains("is no expression"), "{wrong}");
    let twice = RatelimitConfig::read([("one.yaml", "domain: a".to_owned()), ("two.yaml", limit(expressions))], false);
    let twice = twice.expect_err("an error").to_string();
    assert!(twice.contains("the namespace `a` is also a domain, in `one.yaml` on line 1"), "{twice}");
}

#[test]
fn settings_without_effect_are_noted() {
    let yaml = "- {namespace: a, max_value: 1, seconds: 60, conditions: [\"x == 'y'\"], variables: [], nmae: b}\n\
        - {namespace: a, max_value: 2, seconds: 60, conditions: [\"x == 'y'\"], variables: []}";
    let config = read(yaml).unwrap();
    let notes: Vec<_> = config.notes().iter().map(ToString::to_string).collect();
    assert_eq!((config.conditional_limits().len(), notes.len()), (1, 4), "{notes:?}");
    assert!(notes[0].contains("`nmae` has no effect; did you mean `name`?"), "{notes:?}");
    assert!(notes[1].contains("asks for `x`"), "{notes:?}");
    assert!(notes[3].contains("one like it stands in `limits.yaml` on line 1"), "{notes:?}");
    assert_eq!(applying(&LimitTable::new(&config), "a", &[&[("x", "y")]]), []);
}

#[test]
fn limits_become_a_policy() {
    let policy = read(LIMITS).unwrap().to_policy();
    let (_, actions) = policy.split_once("may admit twice as much.\n").unwrap();
    assert_eq!(
        actions,
        r#"
# The namespace test_namespace.
# It applies if descriptors[0]['req.method'] == 'GET'.
# It applies if descriptors[0]['req.path'] != '/json'.
[inbound.action."test_namespace.per-60s"]
key = "header:shared"  # no call has it, so all calls share one count
missing = "share"
limit = "10 per 60s"

# The namespace test_namespace.
# It applies if descriptors[0]['req.method'] == 'POST'.
[inbound.action."test_namespace.per-60s-2"]
key = ["header:tenant", "header:user-id"]  # descriptors[0].tenant, descriptors[0]['user_id']
missing = "skip"
limit = "5 per 60s"

# The namespace other.
[inbound.action."other.with-a-name"]
key = "header:shared"  # no call has it, so all calls share one count
missing = "share"
limit = "1000000 per 3600s"

# The namespace other.
# It applies if int(descriptors[0].size) > 10.
# It applies if limit.name == 'numbers'.
[inbound.action."other.numbers"]
key = "key"  # size(descriptors)
limit = "7 per 1s"
"#
    );
    assert!(crate::Policy::load(crate::PolicySources::new().file("test.toml", policy)).is_ok());
}
