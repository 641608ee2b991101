//! Configurations as policies.

use http::{HeaderMap, HeaderName, HeaderValue};
use tidegate_core::Verb;

use super::read;
use crate::{KeySeed, Policy, PolicySources, Query};

/// The actions of the policy that a configuration becomes, without comments.
fn actions(yaml: &str) -> String {
    let text = policy_text(yaml);
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| format!("{}\n", line.split("  #").next().unwrap_or(line))).collect()
}

/// The policy that a configuration becomes, which must be valid and give no notes.
fn policy_text(yaml: &str) -> String {
    let text = read(yaml).expect("a valid configuration").to_policy();
    match Policy::load(PolicySources::new().file("made.toml", &text)) {
        Ok(policy) => assert_eq!(policy.notes(), [], "{text}"),
        Err(errors) => panic!("{errors}\n{text}"),
    }
    text
}

#[test]
fn each_descriptor_with_a_limit_becomes_an_action() {
    let yaml = "
domain: messaging
descriptors:
- key: message_type
  value: marketing
  descriptors:
  - key: to_number
    rate_limit: {unit: day, requests_per_unit: 5}
- key: to_number
  rate_limit: {unit: month, requests_per_unit: 100}
- key: remote_address
  rate_limit: {unit: second, requests_per_unit: 10}
- key: remote_address
  value: 50.0.0.5
  rate_limit: {unit: second, requests_per_unit: 0}
- key: remote_address
  value: 10.0.0.1
- key: route
  descriptors:
  - key: http_method
    descriptors:
    - key: subject_id
      rate_limit: {unit: week, requests_per_unit: 60}
      shadow_mode: true
- key: ldap
  rate_limit: {unlimited: true}
";
    assert_eq!(
        actions(yaml),
        r#"[inbound.action."messaging.message_type_marketing.to_number"]
key = "key"
limit = "5 per 1d"
[inbound.action."messaging.to_number"]
key = "key"
limit = "100 per 30d"
[inbound.action."messaging.remote_address"]
key = "client_ip"
limit = "10 per second"
[inbound.action."messaging.remote_address_50.0.0.5"]
key = "header:shared"
missing = "share"
limit = "0 per second"
[inbound.action."messaging.remote_address_10.0.0.1"]
limit = "unlimited"
[inbound.action."messaging.route.http_method.subject_id"]
key = ["header:route", "header:http-method", "header:subject-id"]
missing = "skip"
limit = "60 per 7d"
mode = "shadow"
[inbound.action."messaging.ldap"]
limit = "unlimited"
"#
    );
}

#[test]
fn wildcards_count_by_value_unless_they_share() {
    let yaml = "
domain: d
descriptors:
- key: files
  value: files/*
  share_threshold: true
  rate_limit: {unit: hour, requests_per_unit: 10}
- key: others
  value: others/*
  rate_limit: {unit: year, requests_per_unit: 10}
";
    let expected = r#"[inbound.action."d.files_files"]
key = "header:shared"
missing = "share"
limit = "10 per 1h"
[inbound.action."d.others_others"]
key = "key"
limit = "10 per 365d"
"#;
    assert_eq!(actions(yaml), expected);
}

#[test]
fn the_example_of_the_guide_is_true() {
    let guide = include_str!("../../../../../docs/import.md");
    let block = |language: &str| {
        let start = guide.split_once(&format!("```{language}\n")).expect("an example").1;
        start.split_once("```").expect("its end").0
    };
    assert_eq!(actions(block("yaml")), block("toml"));
}

#[test]
fn names_of_actions_are_valid_and_unique() {
    let long = "x".repeat(100);
    let yaml = format!(
        "domain: 'a  b'\ndescriptors:\n- key: u-v\n- key: u_v\n- key: U.v\n- key: __u__v__\n\
         - key: {long}\n- key: {long}y\n- key: 'é'\n- key: \"new\\nline\"\n"
    );
    let names = actions(&yaml).lines().filter(|line| line.starts_with('[')).count();
    assert_eq!(names, 8);
}

#[test]
fn comments_tell_settings_without_an_equal() {
    let text = policy_text(
        "
domain: d
descriptors:
- key: user
  value: a*
  value_to_metric: true
  detailed_metric: true
  quota_mode: true
  metadata: {a: b}
  rate_limit: {unit: second, requests_per_unit: 5, name: own, replaces: [{name: one}, {name: two}]}
- key: exempt
",
    );
    for remark in [
        "# (user, a*)\n",
        "# The values that match a* have counts of their own.\n",
        "# Its name is own.\n",
        "# It replaces one, two: ",
        "# No equal for quota_mode: ",
        "# No equal for detailed_metric: ",
        "# No equal for value_to_metric: ",
        "# No equal for metadata.\n",
        "# It has no limit, and so exempts its value.\n",
    ] {
        assert!(text.contains(remark), "{remark}{text}");
    }
}

#[test]
fn descriptors_with_nine_values_are_left_out() {
    let levels = (0..9).map(|level| format!("{}- key: k{level}\n{0}  descriptors:\n", "    ".repeat(level)));
    let limit = "rate_limit: {unit: day, requests_per_unit: 1}";
    let yaml = format!("domain: d\ndescriptors:\n{}", levels.collect::<String>());
    let yaml =
        yaml.trim_end().strip_suffix("descriptors:").map(|rest| format!("{rest}{limit}\n")).expect("nine levels");
    assert!(policy_text(&yaml).contains("# Left out: its calls count by 9 values"), "{yaml}");
}

#[test]
fn callers_can_ask_for_every_action() {
    let yaml = "
domain: d
descriptors:
- key: remote_address
  descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 5}
- key: all
  value: calls
  rate_limit: {unit: day, requests_per_unit: 5}
- key: one
  descriptors:
  - key: two
    rate_limit: {unit: day, requests_per_unit: 5}
";
    let policy = Policy::load(PolicySources::new().file("made.toml", policy_text(yaml))).expect("a valid policy");
    let plan = policy.plan();
    let keys = |action: &str, ip: Option<&str>, key: Option<&str>, headers: &[(&'static str, &'static str)]| {
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let ip = ip.map(|ip| ip.parse().expect("an address"));
        let query = Query { ip, key, headers: Some(&headers), ..Query::default() };
        let action = plan.find_action(action).expect("a known action");
        let batch = plan.ops(Some(action), &query, &KeySeed::new([7; 16]), Verb::Take, 0).expect("a whole key");
        batch.ops().iter().map(|op| op.key).collect::<Vec<_>>()
    };
    let by_both = |ip, key| keys("d.remote_address.user", Some(ip), Some(key), &[]);
    assert_ne!(by_both("203.0.113.7", "a"), by_both("203.0.113.7", "b"));
    assert_ne!(by_both("203.0.113.7", "a"), by_both("203.0.113.8", "a"));
    let shared = |ip| keys("d.all_calls", Some(ip), None, &[]);
    assert_eq!(shared("203.0.113.7"), shared("203.0.113.8"));
    let by_headers = |one, two| keys("d.one.two", None, None, &[("one", one), ("two", two)]);
    assert_ne!(by_headers("1", "1"), by_headers("1", "2"));
    assert_eq!(keys("d.one.two", None, None, &[("one", "1")]), [], "a request without `two` doesn't match");
}
