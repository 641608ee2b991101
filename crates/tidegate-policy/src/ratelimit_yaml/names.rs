//! The names of actions for descriptors.

use std::collections::{HashMap, HashSet};

/// The longest name of an action, without a number that makes it unique.
const MAX_NAME: usize = 58;

/// Names that differ also as environment variables spell them.
#[derive(Default)]
pub(super) struct ActionNames {
    taken: HashSet<String>,
    /// The last number of each name that several paths have.
    numbers: HashMap<String, usize>,
}

impl ActionNames {
    pub(super) fn count(&self) -> usize {
        self.taken.len()
    }

    /// Makes the name of an action from a path: letters, digits, and single `_` `-` `.` between them.
    pub(super) fn unique(&mut self, path: &str) -> String {
        let mut name = String::new();
        for letter in path.chars() {
            let letter = if letter.is_ascii_alphanumeric() || "_.".contains(letter) { letter } else { '-' };
            if letter.is_ascii_alphanumeric() || name.ends_with(|last: char| last.is_ascii_alphanumeric()) {
                name.push(letter);
            }
        }
        name.truncate(MAX_NAME);
        let base = name.trim_end_matches(|last: char| !last.is_ascii_alphanumeric());
        let base = if ["", "global", "default"].contains(&base) { "descriptor" } else { base };
        let fold = |name: &str| name.replace(['-', '.'], "_").to_ascii_uppercase();
        let mut name = base.to_owned();
        let number = self.numbers.entry(fold(base)).or_insert(1);
        while !self.taken.insert(fold(&name)) {
            *number += 1;
            name = format!("{base}-{number}");
        }
        name
    }
}
