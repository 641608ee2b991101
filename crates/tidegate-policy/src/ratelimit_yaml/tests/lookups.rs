//! The limit of each descriptor, by the documented behaviour of the original.

use proptest::prelude::*;

use super::read;
use crate::ratelimit_yaml::LimitTable;

const CONFIG: &str = r"
domain: edge
descriptors:
- key: user
  rate_limit: {unit: minute, requests_per_unit: 60}
- key: user
  value: bob
  rate_limit: {unit: minute, requests_per_unit: 6}
- key: user
  value: guest
- key: user
  value: admin
  rate_limit: {unlimited: true}
- key: plan
  value: free
  shadow_mode: true
  rate_limit: {unit: hour, requests_per_unit: 10}
  descriptors:
  - key: user
    quota_mode: true
    rate_limit: {unit: hour, requests_per_unit: 5}
- key: plan
  value: paid
  descriptors:
  - key: user
    descriptors:
    - key: path
      rate_limit: {unit: day, requests_per_unit: 9}
- key: path
  value: /api/*
  rate_limit: {unit: second, requests_per_unit: 3}
- key: path
  value: /api/v1/*
  rate_limit: {unit: second, requests_per_unit: 4}
- key: path
  value: /api/v1/login
  rate_limit: {unit: second, requests_per_unit: 1}
- key: path
  value: '*/items/*/edit'
  share_threshold: true
  rate_limit: {unit: second, requests_per_unit: 2}
- key: path
  rate_limit: {unit: second, requests_per_unit: 100}
- key: file
  value: 'a*a'
  rate_limit: {unit: second, requests_per_unit: 1}
- key: group
  value: 'team-*'
  share_threshold: true
  descriptors:
  - key: user
    rate_limit: {unit: second, requests_per_unit: 7}
- key: group
  value: 'unit-*'
  descriptors:
  - key: user
    rate_limit: {unit: second, requests_per_unit: 8}
- key: 'tag*'
  rate_limit: {unit: second, requests_per_unit: 1}
- key: a_b
  rate_limit: {unit: second, requests_per_unit: 1}
- key: open
";

/// Each line: the entries, the name of the limit below `edge`, and the key. `-` stands for no limit.
const CASES: &str = r"
user=alice                        => user                     alice
user=carol                        => user                     carol
user=                             => user
user=bob                          => user_bob
user=Bob                          => user                     Bob
user=bobby                        => user                     bobby
user=guest                        => -
user=admin                        => user_admin
user=a|b                          => user                     a\|b
user=a\b                          => user                     a\\b
user=ünï                          => user                     ünï
User=alice                        => -
users=alice                       => -
use=r                             => -
user=alice;user=alice             => -
user=bob;path=/                   => -
user=guest;path=/                 => -
plan=free                         => plan_free
plan=paid                         => -
plan=gold                         => -
plan=                             => -
plan=free;user=alice              => plan_free.user           alice
plan=free;user=bob                => plan_free.user           bob
plan=free;user=                   => plan_free.user
plan=free;path=/                  => -
plan=free;plan=free               => -
plan=free;user=alice;path=/       => -
plan=paid;user=alice              => -
plan=paid;user=alice;path=/       => plan_paid.user.path      alice|/
plan=paid;user=a|;path=b          => plan_paid.user.path      a\||b
plan=paid;user=a;path=|b          => plan_paid.user.path      a|\|b
plan=paid;user=;path=x            => plan_paid.user.path      |x
plan=paid;user=x;path=            => plan_paid.user.path      x|
plan=paid;user=a;path=/;path=/    => -
plan=paid;path=/;user=a           => -
user=a;plan=free                  => -
path=/                            => path                     /
path=/api                         => path                     /api
path=/api/                        => path_/api/*              /api/
path=/api/users                   => path_/api/*              /api/users
path=/api/v1/login                => path_/api/v1/login
path=/api/v1/users                => path_/api/*              /api/v1/users
path=/api/*                       => path_/api/*
path=/API/users                   => path                     /API/users
path=/shop/items/7/edit           => path_*/items/*/edit
path=/items//edit                 => path_*/items/*/edit
path=/items/edit                  => path                     /items/edit
path=/items/7/edit/               => path                     /items/7/edit/
path=/api/items/7/edit            => path_/api/*              /api/items/7/edit
path=*/items/*/edit               => path_*/items/*/edit
file=aa                           => file_a*a                 aa
file=aba                          => file_a*a                 aba
file=a                            => -
file=ab                           => -
file=                             => -
group=team-x;user=alice           => group_team-*.user        alice
group=team-y;user=alice           => group_team-*.user        alice
group=team-;user=alice            => group_team-*.user        alice
group=team;user=alice             => -
group=unit-x;user=alice           => group_unit-*.user        unit-x|alice
group=unit-y;user=alice           => group_unit-*.user        unit-y|alice
group=team-x                      => -
tag=1                             => tag*                     tag_1
tags=1                            => tag*                     tags_1
ta=g                              => -
a=b                               => a_b
a_b=c                             => a_b                      c
a=                                => -
open=x                            => -
";

fn table() -> LimitTable {
    LimitTable::new(&read(CONFIG).expect("a configuration"))
}

fn find(table: &LimitTable, domain: &str, entries: &str) -> Option<(String, String)> {
    let entries = entries.split(';').filter_map(|entry| entry.split_once('='));
    let found = table.find(domain, entries)?;
    assert_eq!(&table.limits()[found.index], found.limit);
    Some((found.limit.name.clone(), found.key))
}

#[test]
fn each_descriptor_meets_its_limit() {
    let table = table();
    let mut cases = 0;
    for line in CASES.lines().filter(|line| !line.is_empty()) {
        let (entries, expected) = line.split_once(" => ").expect("an arrow");
        let (name, key) = expected.split_once(' ').unwrap_or((expected, ""));
        let expected = (name != "-").then(|| (format!("edge.{name}"), key.trim().to_owned()));
        assert_eq!(find(&table, "edge", entries.trim()), expected, "{line}");
        cases += 1;
    }
    assert!(cases >= 60, "{cases}");
}

#[test]
fn unknown_domains_and_empty_descriptors_have_none() {
    assert_eq!(find(&table(), "other", "user=bob"), None);
    assert_eq!(find(&table(), "edge", ""), None);
}

#[test]
fn limits_keep_their_order_and_modes() {
    let table = table();
    let modes = |mode: fn(&super::super::DescriptorLimit) -> bool| {
        let limits = table.limits().iter().filter(|limit| mode(limit));
        limits.map(|limit| limit.name.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(modes(|limit| limit.shadow_mode), ["edge.plan_free"]);
    assert_eq!(modes(|limit| limit.quota_mode), ["edge.plan_free.user"]);
    assert_eq!(table.limits().first().map(|limit| limit.name.as_str()), Some("edge.user"));
    assert_eq!(table.limits().len(), 16);
}

proptest! {
    /// Two descriptors of one limit have one key only if they have the same values.
    #[test]
    fn different_values_have_different_keys(
        [first, second] in prop::array::uniform2(("[ab|\\\\]{0,3}", "[ab|\\\\]{0,3}")),
    ) {
        let table = table();
        let key = |(user, path): &(String, String)| {
            let entries = [("plan", "paid"), ("user", user), ("path", path)];
            table.find("edge", entries).map(|found| found.key)
        };
        prop_assert_eq!(key(&first) == key(&second), first == second);
    }
}
