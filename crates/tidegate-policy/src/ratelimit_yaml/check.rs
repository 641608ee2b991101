//! The names in a file, before their values are read. The original checks them in the same way: each name must be one
//! that it knows, at any place. A known name at a place where it has no effect gives a note.

use std::collections::HashSet;

use super::read::{NO_HELP, Reader};
use super::scalar::Scalar;
use super::yaml::{YamlMap, YamlNode, YamlValue};
use crate::error::quoted;
use crate::nearest::nearest;

/// A mapping of the format: its description, and the names that have an effect in it.
type Place = (&'static str, &'static [&'static str]);

pub(super) const ROOT: Place = ("the file itself", &["domain", "descriptors"]);
const DESCRIPTOR: Place = (
    "a descriptor",
    &[
        "key",
        "value",
        "rate_limit",
        "descriptors",
        "shadow_mode",
        "quota_mode",
        "detailed_metric",
        "value_to_metric",
        "share_threshold",
        "metadata",
    ],
);
const RATE_LIMIT: Place = ("`rate_limit`", &["unit", "requests_per_unit", "unlimited", "name", "replaces"]);
const REPLACED: Place = ("`replaces`", &["name"]);
const PLACES: [Place; 4] = [ROOT, DESCRIPTOR, RATE_LIMIT, REPLACED];

/// The place of the mappings under a name; `None` if mappings have no effect there.
fn place_under(name: &str) -> Option<Place> {
    match name {
        "descriptors" => Some(DESCRIPTOR),
        "rate_limit" => Some(RATE_LIMIT),
        "replaces" => Some(REPLACED),
        _ => None,
    }
}

impl Reader {
    /// Reports all names in this mapping, and in those within it, that the original refuses.
    pub(super) fn check_names(&mut self, entries: &YamlMap, place: Option<Place>) {
        let mut seen = HashSet::new();
        for (key, value) in entries {
            let YamlValue::Scalar(name, Scalar::String) = &key.value else {
                let help = "write it in quotes if it is a name";
                self.error(key, format!("a name is {}", key.describe()), "a string", &[help]);
                continue;
            };
            if !PLACES.iter().any(|(_, names)| names.contains(&name.as_str())) {
                let known = || PLACES.iter().flat_map(|(_, names)| names.iter().copied());
                let here = place.and_then(|(_, names)| nearest(name, names.iter().copied()));
                let meant = here.or_else(|| nearest(name, known())).map(|meant| format!("did you mean `{meant}`?"));
                let names = place.map_or(Vec::new(), |(_, names)| names.to_vec()).join(", ");
                self.error(key, format!("unknown name {}", quoted(name)), names, meant.as_slice());
                continue;
            }
            if !seen.insert(name) {
                self.note(key, &format!("`{name}` stands twice here; only the last one counts"));
            }
            if let Some((place, _)) = place.filter(|(_, names)| !names.contains(&name.as_str())) {
                let home = PLACES.iter().find(|(_, names)| names.contains(&name.as_str())).map_or("", |(home, _)| home);
                self.note(key, &format!("`{name}` has no effect in {place}; it belongs in {home}"));
            }
            // Metadata is free.
            if name != "metadata" {
                self.check_value(name, value);
            }
        }
    }

    fn check_value(&mut self, name: &str, value: &YamlNode) {
        match &value.value {
            YamlValue::Map(entries) => self.check_names(entries, place_under(name)),
            YamlValue::List(items) => {
                for item in items {
                    match &item.value {
                        YamlValue::Map(entries) => self.check_names(entries, place_under(name)),
                        _ => {
                            let message = format!("an item of `{name}` is {}", item.describe());
                            let expected = "a mapping, such as `- key: remote_address`";
                            self.error(
                                item,
                                message,
                                if name == "descriptors" { expected } else { "a mapping" },
                                NO_HELP,
                            );
                        }
                    }
                }
            }
            YamlValue::Scalar(text, Scalar::Float(_) | Scalar::Integer(None)) => {
                let help = format!("write {name}: \"{text}\" if it is a text");
                let message = format!("`{name}` is {}", value.describe());
                self.error(value, message, "a string, a whole number, true or false", &[help]);
            }
            YamlValue::Scalar(..) => {}
        }
    }
}
