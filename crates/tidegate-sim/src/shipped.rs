//! Scenarios that come with Tidegate.

use tidegate_policy::document::nearest;

/// A scenario that comes with Tidegate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// What it is called.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// All of them, by name.
pub const ALL: [Shipped; 8] = [
    Shipped { name: "collapse", text: include_str!("../scenarios/collapse.toml") },
    Shipped { name: "contention", text: include_str!("../scenarios/contention.toml") },
    Shipped { name: "herd", text: include_str!("../scenarios/herd.toml") },
    Shipped { name: "noisy-neighbour", text: include_str!("../scenarios/noisy-neighbour.toml") },
    Shipped { name: "partition", text: include_str!("../scenarios/partition.toml") },
    Shipped { name: "quota-midnight", text: include_str!("../scenarios/quota-midnight.toml") },
    Shipped { name: "responsive", text: include_str!("../scenarios/responsive.toml") },
    Shipped { name: "retries", text: include_str!("../scenarios/retries.toml") },
];

/// The one of this name.
///
/// # Errors
/// There is none; the nearest name is told.
pub fn find(name: &str) -> Result<&'static Shipped, UnknownScenario> {
    ALL.iter().find(|shipped| shipped.name == name).ok_or_else(|| UnknownScenario {
        found: name.chars().take(128).collect(),
        nearest: nearest(name, ALL.iter().map(|shipped| shipped.name)),
    })
}

/// A scenario that doesn't come with Tidegate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is neither a file nor a shipped scenario {found:?}{}", nearest.map(|name| format!("; did you mean {name:?}?")).unwrap_or_default())]
pub struct UnknownScenario {
    /// What was asked for, cut to 128 characters.
    pub found: String,
    /// The most similar name that exists, if any is similar.
    pub nearest: Option<&'static str>,
}
