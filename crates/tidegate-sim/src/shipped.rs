//! Scenarios that come with Tidegate.

use tidegate_policy::document::nearest;

/// A scenario that comes with Tidegate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedScenario {
    /// The name of the scenario.
    pub name: &'static str,
    /// The text of the scenario, in TOML.
    pub text: &'static str,
}

/// All shipped scenarios, ordered by name.
pub const ALL: [ShippedScenario; 10] = [
    ShippedScenario { name: "absentees", text: include_str!("../scenarios/absentees.toml") },
    ShippedScenario { name: "collapse", text: include_str!("../scenarios/collapse.toml") },
    ShippedScenario { name: "contention", text: include_str!("../scenarios/contention.toml") },
    ShippedScenario { name: "herd", text: include_str!("../scenarios/herd.toml") },
    ShippedScenario { name: "noisy-neighbour", text: include_str!("../scenarios/noisy-neighbour.toml") },
    ShippedScenario { name: "partition", text: include_str!("../scenarios/partition.toml") },
    ShippedScenario { name: "quota-midnight", text: include_str!("../scenarios/quota-midnight.toml") },
    ShippedScenario { name: "responsive", text: include_str!("../scenarios/responsive.toml") },
    ShippedScenario { name: "retries", text: include_str!("../scenarios/retries.toml") },
    ShippedScenario { name: "returns", text: include_str!("../scenarios/returns.toml") },
];

/// The scenarios that compare strategies with an oracle; see [`crate::Report::control_table`].
pub const SUITES: [ShippedScenario; 1] =
    [ShippedScenario { name: "control", text: include_str!("../scenarios/control.toml") }];

/// Returns the shipped scenario of this name.
///
/// # Errors
/// No scenario has this name. The error holds the nearest name.
pub fn find(name: &str) -> Result<&'static ShippedScenario, UnknownScenarioError> {
    ALL.iter().find(|shipped| shipped.name == name).ok_or_else(|| UnknownScenarioError {
        requested: name.chars().take(128).collect(),
        nearest: nearest(name, ALL.iter().map(|shipped| shipped.name)),
    })
}

/// The error of a name that no shipped scenario has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is neither a file nor a shipped scenario {requested:?}{}", self.hint())]
pub struct UnknownScenarioError {
    /// The requested name, cut to 128 characters.
    pub requested: String,
    /// The most similar name that exists, if any is similar.
    pub nearest: Option<&'static str>,
}

impl UnknownScenarioError {
    fn hint(&self) -> String {
        match self.nearest {
            _ if SUITES.iter().any(|suite| suite.name == self.requested) => {
                format!("; the suite of this name is run by `--suite {}`", self.requested)
            }
            Some(name) => format!("; did you mean {name:?}?"),
            None => String::new(),
        }
    }
}
