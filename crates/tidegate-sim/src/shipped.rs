//! Scenarios that come with Tidegate.

/// A scenario that comes with Tidegate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// What it is called.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// All of them, by name.
pub const ALL: [Shipped; 2] = [
    Shipped { name: "contention", text: include_str!("../scenarios/contention.toml") },
    Shipped { name: "retries", text: include_str!("../scenarios/retries.toml") },
];

/// The one of this name.
pub fn find(name: &str) -> Option<&'static Shipped> {
    ALL.iter().find(|shipped| shipped.name == name)
}
