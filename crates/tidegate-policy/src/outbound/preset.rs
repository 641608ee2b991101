//! The presets of providers.

use crate::document::{SourceTexts, TomlEntry, TomlTable, TomlValue, parse_file};

/// The presets as a policy file writes them, with the source of each fact.
const TEXT: &str = include_str!("presets.toml");

/// The names of all presets, in the order of their table.
pub fn preset_names() -> Vec<String> {
    load_presets(&mut SourceTexts::default()).entries.into_iter().map(|entry| entry.key).collect()
}

/// Parses the presets into a document whose sections are their names.
pub(crate) fn load_presets(texts: &mut SourceTexts) -> TomlTable {
    parse_file(texts, "the built-in presets", TEXT.as_bytes()).expect("invariant: the presets are tested to parse")
}

/// A condition of a preset that only the provider's own section can meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PresetRequirement {
    /// `user_agent` names the application and a contact.
    Contact,
    /// `base_url` is on this machine.
    Loopback,
}

/// Takes the keys that only presets have out of a preset's table.
pub(crate) fn take_requirement(preset: &mut TomlTable) -> Option<PresetRequirement> {
    preset.remove("aliases");
    let requirement = preset.text("requires").map(|word| match word {
        "contact" => PresetRequirement::Contact,
        "loopback" => PresetRequirement::Loopback,
        other => unreachable!("invariant: the presets are tested to parse, and none requires {other}"),
    });
    preset.remove("requires");
    requirement
}

/// True if the preset may be called so.
pub(crate) fn has_alias(preset: &TomlEntry, text: &str) -> bool {
    let aliases = preset.node.as_table().and_then(|table| table.node("aliases")).map(|node| &node.value);
    let Some(TomlValue::List(aliases)) = aliases else { return false };
    aliases.iter().any(|alias| alias.is_word(text))
}
