//! The forms of values: parsers that describe themselves.

use std::time::Duration;

use ipnet::IpNet;
use tidegate_core::Span;

use super::values::format_bytes;
use super::{DocumentReader, join_names};
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::quantity::Quantity;
use crate::secret::SecretSource;
use crate::settings::SettingType;
use crate::settings::key::{Form, SettingKey};

impl DocumentReader<'_> {
    /// Reads the value of a key, or parses its default.
    pub(super) fn value<'n, T: Clone>(
        &mut self,
        table: impl Into<Option<&'n TomlTable>>,
        key: &SettingKey<T>,
    ) -> Option<T> {
        match table.into().and_then(|table| table.node(key.name())) {
            Some(node) => self.parse(node, key),
            None => Some(key.default_value()),
        }
    }

    /// Reads the value of a key whose default depends on other settings.
    pub(super) fn value_or<'n, T: Clone>(
        &mut self,
        table: impl Into<Option<&'n TomlTable>>,
        key: &SettingKey<T>,
        default: T,
    ) -> Option<T> {
        match table.into().and_then(|table| table.node(key.name())) {
            Some(node) => self.parse(node, key),
            None => Some(default),
        }
    }

    /// Reads the value of a key with its place; `None` inside if the key is absent.
    pub(super) fn placed<T: Clone>(
        &mut self,
        table: &TomlTable,
        key: &SettingKey<T>,
    ) -> Option<Option<(T, TextRange)>> {
        match table.node(key.name()) {
            Some(node) => self.parse(node, key).map(|value| Some((value, node.at))),
            None => Some(None),
        }
    }

    pub(super) fn parse<T: Clone>(&mut self, node: &TomlNode, key: &SettingKey<T>) -> Option<T> {
        key.form.parse(self, node, key.name())
    }
}

/// Quantities with their places.
pub(super) type Quantities = Vec<(Quantity, TextRange)>;

/// A form with a parser of its own: its type, its description and the parser.
pub(super) struct Custom<T>(
    pub(super) SettingType,
    pub(super) &'static str,
    pub(super) fn(&mut DocumentReader<'_>, &TomlNode, &str) -> Option<T>,
);

impl<T> Form<T> for Custom<T> {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T> {
        self.2(reader, node, key)
    }

    fn describe(&self) -> (SettingType, String) {
        (self.0, self.1.to_owned())
    }
}

use SettingType::{Flag, Integer, Strings, TableOrTables, Text};

pub(super) const FLAG: Custom<bool> = Custom(Flag, "true or false", |reader, node, key| reader.boolean(node, key));
pub(super) const SPAN: Custom<Span> = Custom(Text, "a duration", |reader, node, key| reader.duration(node, key));
pub(super) const DURATION: Custom<Duration> =
    Custom(Text, "a duration of at most ten years", |reader, node, key| reader.timeout(node, key));
/// A share in thousandths.
pub(super) const SHARE: Custom<u16> =
    Custom(Text, "a share from 0.001 to 1, such as 0.2 or 20%", |reader, node, key| reader.share(node, key, 1));
pub(super) const SHARE_OR_ZERO: Custom<u16> =
    Custom(Text, "a share from 0 to 1, such as 0.2 or 20%", |reader, node, key| reader.share(node, key, 0));
pub(super) const SECRET: Custom<SecretSource> =
    Custom(Text, "the place of a secret: env:NAME or file:PATH", |reader, node, key| reader.secret_source(node, key));
pub(super) const NETWORKS: Custom<Vec<(IpNet, TextRange)>> =
    Custom(Strings, "a network or an address, or a list of them", |reader, node, key| reader.networks(node, key));
pub(super) const LIMITS: Custom<Quantities> =
    Custom(Strings, "a limit, or a list of limits", |reader, node, key| reader.quantities(node, key));
pub(super) const HOSTS: Custom<Vec<String>> =
    Custom(Strings, "a host's name, or a list of them", |reader, node, _| reader.hosts(node));
/// A table with a reader of its own.
pub(super) const TABLE: Custom<()> = Custom(TableOrTables, "a table", |_, _, _| Some(()));

pub(super) struct Whole(pub(super) u64, pub(super) u64);

impl<T: TryFrom<u64>> Form<T> for Whole {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T> {
        reader.integer(node, key, self.0..=self.1).and_then(|number| T::try_from(number).ok())
    }

    fn describe(&self) -> (SettingType, String) {
        (Integer, format!("a whole number from {} to {}", self.0, self.1))
    }
}

pub(super) struct Bytes(pub(super) u64, pub(super) u64);

impl<T: TryFrom<u64>> Form<T> for Bytes {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T> {
        reader.bytes(node, key, self.0..=self.1).and_then(|bytes| T::try_from(bytes).ok())
    }

    fn describe(&self) -> (SettingType, String) {
        let [least, most] = [self.0, self.1].map(format_bytes);
        let least = least.split_once(" byte").map_or(least.as_str(), |(number, _)| number);
        (Text, format!("a number of bytes from {least} to {most}"))
    }
}

pub(super) struct Words<T: 'static>(pub(super) &'static [(&'static str, T)]);

impl<T: Copy + Sync> Form<T> for Words<T> {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T> {
        reader.choice(node, key, self.0)
    }

    fn describe(&self) -> (SettingType, String) {
        (Text, join_names(&names(self.0)))
    }
}

/// One of a few words, or a table. This form parses what is no table.
pub(super) struct TableOr<T: 'static>(pub(super) &'static [(&'static str, T)]);

impl<T: Copy + Sync> Form<T> for TableOr<T> {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<T> {
        match &node.value {
            TomlValue::String(_) => reader.choice(node, key, self.0),
            _ => {
                let expected = format!("{}, or a table, {{ … }}", join_names(&names(self.0)));
                reader.wrong_type(node, key, expected).none()
            }
        }
    }

    fn describe(&self) -> (SettingType, String) {
        (TableOrTables, format!("{}, or a table", join_names(&names(self.0))))
    }
}

pub(super) fn names<T>(words: &[(&'static str, T)]) -> Vec<&'static str> {
    words.iter().map(|(word, _)| *word).collect()
}

/// A value that may be absent.
pub(super) struct Maybe<F>(pub(super) F);

impl<T, F: Form<T>> Form<Option<T>> for Maybe<F> {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Option<T>> {
        self.0.parse(reader, node, key).map(Some)
    }

    fn describe(&self) -> (SettingType, String) {
        self.0.describe()
    }

    fn absent(&self) -> Option<Option<T>> {
        Some(None)
    }
}

/// A word for no value, or a value. Errors mention the word, too.
pub(super) struct OrWord<F>(pub(super) &'static str, pub(super) F);

impl<T, F: Form<T>> Form<Option<T>> for OrWord<F> {
    fn parse(&self, reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Option<T>> {
        if node.is_word(self.0) {
            return Some(None);
        }
        reader.with_help(format!("or the word \"{}\"", self.0), |reader| self.1.parse(reader, node, key)).map(Some)
    }

    fn describe(&self) -> (SettingType, String) {
        let (value_type, form) = self.1.describe();
        (value_type, format!("{form}, or `{}`", self.0))
    }
}
