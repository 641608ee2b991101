//! The reference page of all settings, generated from their list. `UPDATE_EXPECT=1` rewrites it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write as _;
use std::{env, fs};

use tidegate_policy::settings::{self, Setting};
use tidegate_policy::{Policy, PolicySources};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/policy.md");

const INTRODUCTION: &str = "\
# Policy reference

Every setting of a policy. The page is generated from the program's own list, and a test compares them.

A policy is a TOML file, `./tidegate.toml` unless the command names another. `tidegate check` reads it, reports mistakes
with their line and column, says in words what each limit admits, and notes secrets that can't be read here. Each setting has an environment variable that
overrides the file: `TIDEGATE__` and the path in capitals, joined by two underscores. `NAME` stands for the name of an action,
a provider or an alert. [.env.example](../.env.example) lists them all.

| value | written as |
| --- | --- |
| limit | `5 per 60s`, `100 per minute`: a strict trailing window; `10/s burst 20`: a smooth rate; `1000 per calendar day`, `1000 per day in Europe/Paris`: a calendar quota; `8 in flight`: calls at a time; `unlimited` |
| duration | `500ms`, `30s`, `1m30s`, `2h` |
| bytes | `64KiB`, `10MiB`, or a number |
| share | `0.2` or `\"20%\"` |
| secret | `env:NAME` or `file:PATH`, never the secret itself |

What limits are counted by is on the page [keys](keys.md), paths are on [paths](paths.md), stores on [stores](stores.md),
providers on [calls to other people's APIs](outbound.md).
";

/// An example for each main section. All of them together are one valid policy.
const EXAMPLES: [(&str, &str); 10] = [
    ("store", "[store]\nurl = \"file:/var/lib/tidegate/state\"\nmax_bytes = \"128MiB\""),
    (
        "inbound",
        "[inbound]\nlisten = \"127.0.0.1:8080\"\nupstream = \"http://127.0.0.1:3000\"\ntrusted_proxies = [\"10.0.0.0/8\"]",
    ),
    ("inbound.timeouts", "[inbound.timeouts]\nresponse = \"30s\""),
    ("inbound.caps", "[inbound.caps]\nconnections = 20000\nbody = \"10MiB\""),
    ("inbound.global", "[inbound.global]\nlimit = \"1000 per 1h\"\npenalty = { base = \"2s\", cap = \"1h\" }"),
    (
        "inbound.action.NAME",
        "[inbound.action.login]\nmatch = { method = \"POST\", path = \"/login\" }\nlimit = \"5 per 60s\"\npenalty = { base = \"2s\", cap = \"1h\" }",
    ),
    ("api", "[api]\nlisten = \"127.0.0.1:8082\"\ntoken = \"env:GATE_TOKEN\""),
    ("outbound", "[outbound]\nlisten = \"127.0.0.1:8081\""),
    (
        "outbound.provider.NAME",
        "[outbound.provider.weather]\nbase_url = \"https://api.weather.example/v1\"\nauth = \"bearer\"\ncredentials = [\"env:WEATHER_TOKEN\"]\nlimit = [\"10/s\", \"1000 per calendar day\"]",
    ),
    (
        "alert.NAME",
        "[alert.ops]\non = [\"blocked\", \"breaker_open\", \"store_lost\"]\nlog = true\nwebhook = \"env:OPS_WEBHOOK\"",
    ),
];

/// The section that a setting is listed under: its path without the last name, and without inline tables.
fn section(setting: &Setting) -> String {
    let path = setting.path().replace('*', "NAME").replace(".#", "");
    let names: Vec<&str> = path.split('.').collect();
    let length = match names.as_slice() {
        ["inbound" | "outbound", "action" | "provider" | "lanes", ..] => 3,
        ["inbound", "timeouts" | "caps" | "global", ..] | ["alert", ..] => 2,
        _ => 1,
    };
    names[..length.min(names.len() - 1)].join(".")
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let mut last = String::new();
    for setting in settings::all() {
        let section = section(setting);
        if section != last {
            writeln!(page, "\n## `[{section}]`\n").unwrap();
            if let Some((_, example)) = EXAMPLES.iter().find(|(name, _)| *name == section) {
                writeln!(page, "```toml\n{example}\n```\n").unwrap();
            }
            page.push_str("| setting | form | default | meaning |\n| --- | --- | --- | --- |\n");
            last.clone_from(&section);
        }
        let path = setting.path().replace('*', "NAME").replace(".#", "[]");
        let name = path.strip_prefix(&format!("{section}.")).unwrap_or(&path);
        let default = if setting.default().is_empty() { "–".to_owned() } else { format!("`{}`", setting.default()) };
        writeln!(page, "| `{name}` | {} | {default} | {} |", setting.form(), setting.description()).unwrap();
    }
    page
}

#[test]
fn the_reference_page_is_up_to_date() {
    let page = page();
    if env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(PAGE, &page).unwrap();
    }
    assert!(
        fs::read_to_string(PAGE).unwrap() == page,
        "run UPDATE_EXPECT=1 cargo test -p tidegate-policy --test reference"
    );
}

#[test]
fn the_references_examples_are_one_valid_policy() {
    let text: String = EXAMPLES.iter().map(|(_, example)| format!("{example}\n\n")).collect();
    Policy::load(PolicySources::new().file("reference.toml", text)).unwrap();
    let sections: Vec<String> = settings::all().map(section).collect();
    for (name, _) in EXAMPLES {
        assert!(sections.iter().any(|section| section == name), "{name}");
    }
}
