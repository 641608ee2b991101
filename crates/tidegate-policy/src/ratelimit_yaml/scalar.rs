//! The meaning of a scalar, by the rules of YAML 1.1 as the YAML library of the original applies them.

use crate::error::quoted;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Null,
    Boolean(bool),
    /// A whole number; `None` if it doesn't fit in 64 bits.
    Integer(Option<i64>),
    Float(f64),
    String,
    /// The key `<<`.
    Merge,
}

impl Scalar {
    /// The meaning of a text without quotes and tag.
    pub(super) fn of_plain(text: &str) -> Self {
        match text {
            "" | "~" | "null" | "Null" | "NULL" => Self::Null,
            "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => Self::Boolean(true),
            "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
                Self::Boolean(false)
            }
            "<<" => Self::Merge,
            ".nan" | ".NaN" | ".NAN" => Self::Float(f64::NAN),
            ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Self::Float(f64::INFINITY),
            "-.inf" | "-.Inf" | "-.INF" => Self::Float(f64::NEG_INFINITY),
            _ if !text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) => Self::String,
            _ => number(&text.replace('_', "")).unwrap_or(Self::String),
        }
    }

    /// Describes a scalar in a message.
    pub(super) fn describe(self, text: &str) -> String {
        match self {
            Self::Null => "empty".to_owned(),
            Self::Integer(_) | Self::Float(_) => format!("the number {}", quoted(text)),
            Self::Boolean(_) => quoted(text),
            Self::String | Self::Merge => format!("the string {}", quoted(text)),
        }
    }
}

/// Reads a number in the forms of Go: 10, 0x0A, 0o12, 012, 0b1010, 1.5, 1e3.
fn number(text: &str) -> Option<Scalar> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let lower = unsigned.to_ascii_lowercase();
    let prefixes = [("0x", 16), ("0o", 8), ("0b", 2), ("0", 8)];
    let prefixed = prefixes.iter().find_map(|(prefix, radix)| {
        lower.strip_prefix(prefix).filter(|digits| !digits.is_empty()).map(|digits| (digits, *radix))
    });
    let (digits, radix) = prefixed.unwrap_or((&lower, 10));
    if !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix)) {
        let sign = if text.starts_with('-') { "-" } else { "" };
        return Some(Scalar::Integer(i64::from_str_radix(&format!("{sign}{digits}"), radix).ok()));
    }
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    text.parse().ok().filter(|_| is_decimal).map(Scalar::Float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_mean_what_yaml_says() {
        for (text, meaning) in [
            ("", Scalar::Null),
            ("~", Scalar::Null),
            ("yes", Scalar::Boolean(true)),
            ("off", Scalar::Boolean(false)),
            ("12", Scalar::Integer(Some(12))),
            ("-1", Scalar::Integer(Some(-1))),
            ("1_000", Scalar::Integer(Some(1000))),
            ("0x10", Scalar::Integer(Some(16))),
            ("010", Scalar::Integer(Some(8))),
            ("0", Scalar::Integer(Some(0))),
            ("08", Scalar::Float(8.0)),
            ("1.5", Scalar::Float(1.5)),
            ("1e3", Scalar::Float(1000.0)),
            ("99999999999999999999", Scalar::Integer(None)),
            ("50.0.0.5", Scalar::String),
            ("2026-11-26", Scalar::String),
            ("-", Scalar::String),
            ("second", Scalar::String),
        ] {
            assert_eq!(Scalar::of_plain(text), meaning, "{text}");
        }
    }
}
