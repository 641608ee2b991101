//! Typed keys: the name, form, default and description of each setting, in one place beside its reader.

use std::sync::OnceLock;

use super::{Setting, SettingType};
use crate::document::{SourceKind, SourceText, SourceTexts, TomlNode};
use crate::environment::parse_as;
use crate::read::DocumentReader;

/// The form of a value: its parser and its description.
pub(crate) trait Form<T>: Sync {
    /// Parses a value; `None` after an error.
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T>;

    /// The form in which a variable has the value, and the form in plain English.
    fn describe(&self) -> (SettingType, String);

    /// The value of an absent key without a default. `None` if the default text is parsed even if it is empty.
    fn absent(&self) -> Option<T> {
        None
    }
}

/// A group of keys below a key, by their place.
#[derive(Clone, Copy)]
pub(crate) enum Below {
    /// In the same table: the key stands only for the group.
    Beside(&'static dyn KeyGroup),
    /// In the table under the key.
    Table(&'static dyn KeyGroup),
    /// In each table under a name.
    Names(&'static dyn KeyGroup),
    /// In each item of a list.
    Items(&'static dyn KeyGroup),
}

/// One key of a table.
pub(crate) struct SettingKey<T: 'static> {
    pub(crate) ident: &'static str,
    /// The default in the form of a variable's value; empty if there is none, or if the reader chooses it.
    pub(crate) default: &'static str,
    pub(crate) form: &'static dyn Form<T>,
    /// The value of the default, once it was parsed.
    pub(crate) parsed: OnceLock<T>,
    /// The purpose. Empty for a table that is no setting by itself.
    pub(crate) description: &'static str,
    /// The keys below it: no group, or one.
    pub(crate) below: &'static [Below],
}

impl<T: Clone> SettingKey<T> {
    pub(crate) fn name(&self) -> &'static str {
        self.ident.strip_prefix("r#").unwrap_or(self.ident)
    }

    pub(crate) fn default_value(&self) -> T {
        self.parsed.get_or_init(|| self.parse_default()).clone()
    }

    /// Parses the default as a variable's value is parsed.
    fn parse_default(&self) -> T {
        if let Some(absent) = self.form.absent().filter(|_| self.default.is_empty()) {
            return absent;
        }
        let mut texts = SourceTexts::default();
        let at = texts.add(SourceText::new(SourceKind::Variable, self.name(), self.default, false));
        let node = parse_as(&texts, at, self.form.describe().0).ok();
        let mut reader = DocumentReader::with_texts(&texts, at);
        let value = node.and_then(|node| self.form.parse(&mut reader, &node, self.name()));
        value.expect("invariant: every default is tested to parse")
    }

    /// Adds the key's setting, and those of the keys below it.
    pub(crate) fn add_settings(&self, parent: &str, settings: &mut Vec<Setting>) {
        let path = match parent {
            "" => self.name().to_owned(),
            _ => format!("{parent}.{}", self.name()),
        };
        if !self.description.is_empty() {
            let (value_type, form) = self.form.describe();
            let (default, description) = (self.default, self.description);
            settings.push(Setting { path: path.clone(), value_type, form, default, description });
        }
        for below in self.below {
            match below {
                Below::Beside(keys) => keys.add_settings(parent, settings),
                Below::Table(keys) => keys.add_settings(&path, settings),
                Below::Names(keys) => keys.add_settings(&format!("{path}.*"), settings),
                Below::Items(keys) => keys.add_settings(&format!("{path}.#"), settings),
            }
        }
    }
}

/// The keys of a table. A group can be mounted at several paths.
pub(crate) trait KeyGroup: Sync {
    /// Adds the settings of all keys below the path, in order.
    fn add_settings(&self, path: &str, settings: &mut Vec<Setting>);
}

/// Declares the keys of tables, each as `name: Type = default, form, description;`, and perhaps the keys below it.
macro_rules! setting_keys {
    ($($(#[$doc:meta])* $group:ident: $keys:ident {
        $($key:ident: $type:ty = $default:literal, $form:expr, $description:expr $(, $below:expr)?;)+
    })+) => {$(
        $(#[$doc])*
        pub(super) struct $keys {
            $(pub(super) $key: crate::settings::key::SettingKey<$type>,)+
        }

        impl crate::settings::key::KeyGroup for $keys {
            fn add_settings(&self, path: &str, settings: &mut Vec<crate::settings::Setting>) {
                $(self.$key.add_settings(path, settings);)+
            }
        }

        pub(super) static $group: $keys = $keys {
            $($key: crate::settings::key::SettingKey {
                ident: stringify!($key),
                default: $default,
                form: &$form,
                parsed: std::sync::OnceLock::new(),
                description: $description,
                below: &[$($below)?],
            },)+
        };
    )+};
}

/// Reads keys of a group. Each name becomes a variable with the value; `None` after an error.
macro_rules! read_keys {
    ($reader:ident, $table:expr, $group:ident: $($key:ident),+) => {
        $(let $key = $reader.value($table, &$group.$key);)+
    };
}

/// Reads keys of a group into the fields of the same names. All keys are read before an error ends the reading, so that
/// every error is reported.
macro_rules! read_struct {
    ($reader:ident, $table:expr, $group:ident => $type:ident { $($key:ident),+ $(; $($field:ident: $value:expr),+)? }) => {{
        $(let $key = $reader.value($table, &$group.$key);)+
        Some($type { $($key: $key?,)+ $($($field: $value,)+)? })
    }};
}

pub(crate) use {read_keys, read_struct, setting_keys};
