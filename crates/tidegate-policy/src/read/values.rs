//! Single values: strings, numbers, durations, addresses, tokens, quantities.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use ipnet::IpNet;
use tidegate_core::Span;

use super::forms::{Quantities, names};
use super::{DocumentReader, Reported, all_or_none, join_names};
use crate::address::canonical_network;
use crate::description::describe_bound;
use crate::document::{TextRange, TomlNode, TomlValue};
use crate::error::{Note, quoted};
use crate::nearest::nearest;
use crate::outbound::PointerAlternatives;
use crate::quantity::{QuantityError, ambiguous_unit};
use crate::secret::SecretSource;
use crate::units::{parse_bytes, parse_duration};
use crate::verdict::POINTER_SEPARATOR;

/// The longest list of strings.
const MAX_LIST: usize = 10_000;
/// The most JSON pointers in a list.
const MAX_POINTERS: usize = 16;
/// The longest timeout: ten years.
const MAX_TIMEOUT: Span = Span::from_secs(315_360_000);

/// The expected form of a network.
pub(super) const NETWORK: &str = "a network such as \"10.1.0.0/16\" or an address such as \"192.0.2.7\"";

impl DocumentReader<'_> {
    /// Reads a string.
    pub fn string<'n>(&mut self, node: &'n TomlNode, key: &str, expected: &str) -> Option<&'n str> {
        match &node.value {
            TomlValue::String(text) => Some(text),
            _ => self.wrong_type(node, key, expected).none(),
        }
    }

    /// Reads one of a few words.
    pub fn choice<T: Copy>(&mut self, node: &TomlNode, key: &str, words: &[(&'static str, T)]) -> Option<T> {
        let names = names(words);
        let text = self.string(node, key, &join_names(&names))?;
        let found = words.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        found.or_else(|| {
            let error = self.wrong_text(node, key, text, join_names(&names));
            error.did_you_mean(nearest(text, names)).none()
        })
    }

    /// Adds a help text to the first error of `read`.
    pub(super) fn with_help<T>(&mut self, help: String, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let before = self.errors.count();
        let found = read(self);
        if let Some(error) = self.errors.after(before) {
            error.add_help(help);
        }
        found
    }

    /// Reads `true` or `false`.
    pub fn boolean(&mut self, node: &TomlNode, key: &str) -> Option<bool> {
        match node.value {
            TomlValue::Boolean(flag) => Some(flag),
            _ => self.wrong_type(node, key, "true or false, without quotes").none(),
        }
    }

    /// Reads a whole number in a range.
    pub fn integer(&mut self, node: &TomlNode, key: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let TomlValue::Integer(number) = node.value else {
            return self.wrong_type(node, key, format!("{expected}, without quotes")).none();
        };
        let fits = number.and_then(|number| u64::try_from(number).ok()).filter(|number| range.contains(number));
        fits.or_else(|| self.out_of_range(node, key, expected))
    }

    fn out_of_range<T>(&mut self, node: &TomlNode, key: &str, expected: String) -> Option<T> {
        let found = quoted(self.texts.text_at(node.at));
        self.error(node.at, format!("`{key}` is {found}, which is out of range"), expected).none()
    }

    /// Reads a number in a range, with or without a fraction.
    pub fn number(&mut self, node: &TomlNode, key: &str, range: RangeInclusive<f64>) -> Option<f64> {
        let expected = format!("a number from {} to {}, without quotes", range.start(), range.end());
        let (TomlValue::Integer(_) | TomlValue::Float) = node.value else {
            return self.wrong_type(node, key, expected).none();
        };
        let found = self.texts.text_at(node.at).replace('_', "").parse().ok().filter(|number| range.contains(number));
        found.or_else(|| self.out_of_range(node, key, expected))
    }

    /// Reads a share in thousandths, from `least` to 1000. It is written as a number such as 0.2 or a text such as
    /// "20%".
    pub fn share(&mut self, node: &TomlNode, key: &str, least: u16) -> Option<u16> {
        let expected = if least == 0 { "a share from 0 to 1" } else { "a share from 0.001 to 1" };
        let expected = format!("{expected} in thousandths, such as 0.2 or \"20%\"");
        let share = self.thousandths(node, key, u32::from(least)..=1_000, &expected)?;
        u16::try_from(share).ok()
    }

    /// Reads a factor in thousandths, above 1 and up to `most`. It is written as a number such as 1.5 or a text such as
    /// "150%".
    pub(super) fn factor(&mut self, node: &TomlNode, key: &str, most: u32) -> Option<u32> {
        let expected = format!("a factor from 1.001 to {most} in thousandths, such as 1.5 or \"150%\"");
        self.thousandths(node, key, 1_001..=most.saturating_mul(1_000), &expected)
    }

    pub(super) fn thousandths(
        &mut self,
        node: &TomlNode,
        key: &str,
        range: RangeInclusive<u32>,
        expected: &str,
    ) -> Option<u32> {
        let text = match &node.value {
            TomlValue::String(text) => text.trim(),
            TomlValue::Integer(_) | TomlValue::Float => self.texts.text_at(node.at),
            _ => self.string(node, key, expected)?,
        };
        let (number, whole) = text.strip_suffix('%').map_or((text, 1000.0), |number| (number.trim_end(), 10.0));
        let digits = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let thousandths = number.parse::<f64>().ok().filter(|_| digits).map(|number| number * whole);
        let whole =
            thousandths.filter(|found| (found - found.round()).abs() < 1e-6 && *found <= f64::from(*range.end()));
        let found = whole.map(|found| found.round() as u32).filter(|found| range.contains(found));
        found.or_else(|| self.wrong_text(node, key, text, expected).none())
    }

    /// Reads the places of numbers as JSON pointers (RFC 6901), with `or` between the alternatives for one number.
    pub(super) fn pointers(&mut self, node: &TomlNode, key: &str) -> Option<Vec<PointerAlternatives>> {
        const EXPECTED: &str = "a JSON pointer such as \"/usage/total_tokens\"";
        let words = self.strings(node, key, EXPECTED)?;
        let places: Vec<Vec<&str>> =
            words.iter().map(|(text, _)| text.split(POINTER_SEPARATOR).map(str::trim).collect()).collect();
        let count: usize = places.iter().map(Vec::len).sum();
        if count > MAX_POINTERS {
            return self.too_many(node, key, count, MAX_POINTERS);
        }
        let items = places.into_iter().zip(words);
        all_or_none(
            items.map(|(places, (_, item))| {
                all_or_none(places.into_iter().map(|text| self.pointer(text, item.at, key)))
            }),
        )
    }

    pub(super) fn pointer(&mut self, text: &str, at: TextRange, key: &str) -> Option<String> {
        if text.starts_with('/') && !text.contains(char::is_control) {
            return Some(text.to_owned());
        }
        self.no_pointer(text, at, key).none()
    }

    /// Reports that a text is no pointer.
    pub(super) fn no_pointer(&mut self, text: &str, at: TextRange, key: &str) -> Reported<'_> {
        let path = format!("/{}", text.trim_start_matches("$.").trim_start_matches('.').replace('.', "/"));
        let is_dotted = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.$".contains(&byte));
        let message = format!("`{key}`: {} is no JSON pointer", quoted(text));
        let expected = match text.contains('~') {
            true => "a JSON pointer, in which `~0` stands for `~` and `~1` for `/`",
            false => "a JSON pointer such as \"/usage/total_tokens\"",
        };
        self.error(at, message, expected).did_you_mean(Some(path.as_str()).filter(|_| is_dotted && !text.is_empty()))
    }

    /// Returns the value that was parsed from a string, or reports the error inside the string.
    pub(super) fn parsed<T>(
        &mut self,
        parsed: Result<T, QuantityError>,
        node: &TomlNode,
        text: &str,
        key: &str,
    ) -> Option<T> {
        parsed
            .map_err(|error| {
                let at = self.texts.range_in_string(node, text, error.range());
                self.error(at, format!("`{key}`: {}", error.message()), error.expected()).help_if(error.help_text());
            })
            .ok()
    }

    /// Reads a duration above zero.
    pub fn duration(&mut self, node: &TomlNode, key: &str) -> Option<Span> {
        let expected = "a duration in quotes, such as \"500ms\", \"30s\", \"1m30s\" or \"2h\"";
        if let TomlValue::Integer(Some(number)) = node.value {
            let message = format!("`{key}` is the number {number}, which has no unit");
            let help = format!("did you mean \"{number}s\" or \"{number}ms\"?");
            return self.error(node.at, message, expected).help(help).none();
        }
        let text = self.string(node, key, expected)?;
        let span = self.parsed(parse_duration(text), node, text, key)?;
        if span.is_zero() {
            return self.wrong_text(node, key, text, "a duration of more than nothing").none();
        }
        Some(span)
    }

    pub(super) fn timeout(&mut self, node: &TomlNode, key: &str) -> Option<Duration> {
        let span = self.duration(node, key)?;
        if span > MAX_TIMEOUT {
            return self.error(node.at, format!("`{key}` is longer than ten years"), "a shorter duration").none();
        }
        Some(span.as_duration())
    }

    pub(super) fn bytes(&mut self, node: &TomlNode, key: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let expected = "a number of bytes in quotes, such as \"64KiB\" or \"10MiB\"";
        let bytes = match &node.value {
            TomlValue::Integer(Some(number)) if *number >= 0 => number.unsigned_abs(),
            _ => {
                let text = self.string(node, key, expected)?;
                self.parsed(parse_bytes(text), node, text, key)?
            }
        };
        if !range.contains(&bytes) {
            let message = format!("`{key}` is {}, which is out of range", format_bytes(bytes));
            let expected = format!("{} to {}", format_bytes(*range.start()), format_bytes(*range.end()));
            return self.error(node.at, message, expected).none();
        }
        Some(bytes)
    }

    /// Reads a string or a list of strings, with the node of each.
    pub fn strings<'n>(
        &mut self,
        node: &'n TomlNode,
        key: &str,
        expected: &str,
    ) -> Option<Vec<(&'n str, &'n TomlNode)>> {
        if node.items().len() > MAX_LIST {
            return self.too_many(node, key, node.items().len(), MAX_LIST);
        }
        all_or_none(node.items().iter().map(|item| self.string(item, key, expected).map(|text| (text, item))))
    }

    /// Reports a list of no items, or of more than `max`. `what` follows the numbers in the expected form.
    pub(super) fn check_length(
        &mut self,
        at: TextRange,
        key: &str,
        count: usize,
        max: usize,
        what: &str,
    ) -> Option<()> {
        if (1..=max).contains(&count) {
            return Some(());
        }
        self.error(at, format!("`{key}` has {count} items"), format!("1 to {max}{what}")).none()
    }

    pub(super) fn too_many<T>(&mut self, node: &TomlNode, key: &str, count: usize, most: usize) -> Option<T> {
        self.error(node.at, format!("`{key}` has {count} items"), format!("at most {most}")).none()
    }

    /// Collects values that all differ, each with its place and its text. `None` if a value is missing.
    pub(super) fn distinct<T: PartialEq>(
        &mut self,
        items: Vec<(Option<T>, TextRange, &str)>,
        twice: impl Fn(&str) -> String,
        expected: &str,
    ) -> Option<Vec<T>> {
        let count = items.len();
        let mut values: Vec<T> = Vec::new();
        for (value, at, text) in items {
            match value {
                Some(value) if values.contains(&value) => self.report(at, twice(text), expected),
                value => values.extend(value),
            }
        }
        (values.len() == count).then_some(values)
    }

    /// Reads one quantity or a list, with the place of each.
    pub fn quantities(&mut self, node: &TomlNode, key: &str) -> Option<Quantities> {
        const FORMS: &str =
            "a limit in quotes, such as \"5 per 60s\", \"10/s burst 20\", \"1000 per calendar day\" or \"8 in flight\"";
        if let TomlValue::Integer(Some(number)) = node.value {
            let error = self.error(node.at, format!("`{key}` is only the number {number}"), FORMS);
            return error.help(format!("did you mean \"{number} per 60s\"?")).none();
        }
        let words = self.strings(node, key, FORMS)?;
        if words.is_empty() {
            let error = self.error(node.at, format!("`{key}` is an empty list"), FORMS);
            return error.help("to allow everything, write \"unlimited\"").none();
        }
        all_or_none(words.into_iter().map(|(text, item)| {
            let quantity = self.parsed(text.parse(), item, text, key)?;
            if let Some(unit) = ambiguous_unit(&quantity, text) {
                let (limit, unit) = (quantity.capacity().unwrap_or_default(), unit.as_str());
                let window = describe_bound(&quantity, None, 1);
                let message = format!(
                    "\"{text}\" is a window: {window}; for a quota that resets with the calendar, write \"{limit} per \
                     calendar {unit}\""
                );
                self.notes.push(Note::new(self.texts, item.at, &message));
            }
            Some((quantity, item.at))
        }))
    }

    /// Reads one network or address, or a list of them.
    pub(super) fn networks(&mut self, node: &TomlNode, key: &str) -> Option<Vec<(IpNet, TextRange)>> {
        let words = self.strings(node, key, NETWORK)?;
        all_or_none(words.into_iter().map(|(text, item)| self.network(text, item, key)))
    }

    pub(super) fn network(&mut self, text: &str, node: &TomlNode, key: &str) -> Option<(IpNet, TextRange)> {
        let (message, help) = match (text.parse::<IpAddr>(), text.parse::<IpNet>()) {
            (Ok(ip), _) => return Some((canonical_network(IpNet::from(ip)), node.at)),
            (_, Ok(network)) if network.trunc() == network => return Some((canonical_network(network), node.at)),
            (_, Ok(network)) => (
                format!("`{key}`: the network {} has bits set outside its prefix", quoted(text)),
                Some(format!(
                    "did you mean the network `{}`, or the one address `{}`?",
                    network.trunc(),
                    network.addr()
                )),
            ),
            _ => {
                let help = match text.split_once('/') {
                    Some((ip, _)) if ip.parse::<IpAddr>().is_ok() => {
                        Some("after the slash stands how many bits are fixed: 0 to 32 for IPv4, 0 to 128 for IPv6")
                    }
                    None if text == "localhost" => Some("write 127.0.0.0/8 and ::1"),
                    None if text.contains('*') => Some("networks have no wildcards: 10.1.* is written 10.1.0.0/16"),
                    None if text.contains('-') => Some("ranges are written as networks, such as 10.1.0.0/16"),
                    _ => None,
                };
                (format!("`{key}`: {} is no network", quoted(text)), help.map(str::to_owned))
            }
        };
        self.error(node.at, message, NETWORK).help_if(help).none()
    }

    /// Reads the source of a secret. Errors show neither the secret nor the text in its place.
    pub(super) fn secret_source(&mut self, node: &TomlNode, key: &str) -> Option<SecretSource> {
        const EXPECTED: &str = "where the token is: \"env:NAME\" or \"file:PATH\"";
        let TomlValue::String(text) = &node.value else {
            return self.hidden_error(node.at, format!("`{key}` is no string"), EXPECTED).none();
        };
        if let Some(name) = text.strip_prefix("env:") {
            let message = format!("`{key}` names no environment variable");
            return SecretSource::from_variable(name)
                .or_else(|| self.hidden_error(node.at, message, "a name such as \"env:API_TOKEN\"").none());
        }
        if let Some(path) = text.strip_prefix("file:") {
            if !path.is_empty() && !path.contains('\0') {
                return Some(SecretSource::File(path.into()));
            }
            let expected = "a path such as \"file:/run/secrets/api_token\"";
            return self.error(node.at, format!("`{key}` names no file"), expected).none();
        }
        let message = format!("`{key}` holds something else than a place; a secret itself doesn't belong in a policy");
        self.hidden_error(node.at, message, EXPECTED)
            .help("put the secret into an environment variable and write its name: \"env:API_TOKEN\"")
            .none()
    }
}

/// Formats a number of bytes in the largest unit that divides it.
pub(super) fn format_bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    let plural = if bytes == 1 { "" } else { "s" };
    unit.map_or_else(|| format!("{bytes} byte{plural}"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}
