//! Checks that docs/outbound.md is true.

use tidegate_policy::outbound::preset_names;
use tidegate_policy::{Policy, PolicySources};

const TEXT: &str = include_str!("../../../docs/outbound.md");

#[test]
fn every_documented_snippet_is_a_valid_policy() {
    let snippets: Vec<&str> = TEXT.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(snippets.len() >= 6, "{}", snippets.len());
    for snippet in snippets {
        let policy = Policy::load(PolicySources::new().file("docs/outbound.md", snippet));
        let policy = policy.unwrap_or_else(|errors| panic!("{snippet}\n{errors}"));
        assert!(!policy.outbound().unwrap().providers().is_empty(), "{snippet}");
    }
}

/// The rows of the presets' table.
fn table() -> impl Iterator<Item = &'static str> {
    let lines = TEXT.lines().skip_while(|line| !line.starts_with("| `tmdb`"));
    lines.take_while(|line| line.starts_with("| "))
}

#[test]
fn the_documented_table_lists_presets_in_order() {
    let rows: Vec<&str> = table().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert_eq!(rows, preset_names());
}

#[test]
fn the_documented_table_states_preset_addresses() {
    for row in table().filter(|line| !line.starts_with("| `local`")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let preset = cells[1].trim_matches('`');
        let more = if preset == "musicbrainz" { "user_agent = \"A/1 ( a@b.c )\"" } else { "credentials = \"env:A\"" };
        let text = format!("[outbound.provider.x]\npreset = \"{preset}\"\n{more}\n");
        let policy = Policy::load(PolicySources::new().file("x", text)).unwrap();
        let url = policy.outbound().unwrap().find("x").unwrap().base_url.as_ref().unwrap().to_string();
        assert_eq!(url.trim_end_matches("/{key}"), format!("https://{}", cells[2]));
    }
}
