//! Ready-made providers.

use crate::document::{SourceTexts, TomlTable, parse_file};

/// What a policy file would say of each preset, with the source of each fact.
const TEXT: &str = include_str!("presets.toml");

/// The name of every preset, in the order of their table.
pub const PRESETS: [&str; 12] = [
    "tmdb",
    "tvdb",
    "fanart",
    "fanart-personal",
    "musicbrainz",
    "omdb-free",
    "omdb-paid",
    "theaudiodb",
    "local",
    "github",
    "openai",
    "anthropic",
];

/// Refuses calls whose `User-Agent` doesn't say who calls.
pub(crate) const MUSICBRAINZ: &str = "musicbrainz";
/// Is on this machine.
pub(crate) const LOCAL: &str = "local";

/// The presets as a document whose sections are their names.
pub(crate) fn load_presets(texts: &mut SourceTexts) -> TomlTable {
    parse_file(texts, "the built-in presets", TEXT.as_bytes()).expect("invariant: the presets are tested to parse")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_document() {
        let names: Vec<String> =
            load_presets(&mut SourceTexts::default()).entries.into_iter().map(|entry| entry.key).collect();
        assert_eq!(names, PRESETS);
    }
}
