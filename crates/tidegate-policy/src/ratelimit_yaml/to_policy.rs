//! The limits of a configuration as a policy. Each descriptor with a limit becomes an action, which callers name.

use std::fmt::Write as _;

use super::names::ActionNames;
use super::{Amount, ConditionalLimit, Descriptor, RatelimitConfig, Unit};
use crate::builder::toml_string;
use crate::key::MAX_PARTS;
use crate::printable::printable;

/// The longest name of a header.
const MAX_NAME: usize = 58;
/// Keys of entries whose value is the client's address.
const ADDRESS_KEYS: [&str; 2] = ["remote_address", "masked_remote_address"];
/// The key of a limit whose calls all share one count, and the rule for calls without the header.
const SHARED_KEY: &str =
    "key = \"header:shared\"  # no call has it, so all calls share one count\nmissing = \"share\"\n";

const HEADING: &str = "\
# The limits of a configuration of ratelimit or limitador, as actions of the decision API. The comment above each action
# shows its descriptor. A program asks by the action's name, and gives the values of its key:
#   client_ip    {\"action\": NAME, \"ip\": \"203.0.113.7\"}
#   key          {\"action\": NAME, \"key\": \"alice\"}
#   header:user  {\"action\": NAME, \"headers\": {\"user\": \"alice\"}}; of header:shared only {\"headers\": {}}
#
# What differs from ratelimit and limitador:
# - Callers choose the action: the one whose descriptor fits best. Its own order is the value, then a value with `*`,
#   then the key alone.
# - Callers of a limit with conditions, which limitador's files have, know that they hold.
# - A limit is a strict window: no period of its length, wherever it begins, admits more. Those of ratelimit begin with
#   each unit of the clock, so that a period across two units may admit twice as much.
";

impl RatelimitConfig {
    /// The same limits as the text of a policy. Comments show the descriptor of each action, and the settings that have
    /// no equal.
    pub fn to_policy(&self) -> String {
        let mut writer = PolicyWriter { text: HEADING.to_owned(), names: ActionNames::default() };
        for domain in &self.domains {
            let _ = write!(writer.text, "\n# The domain {}.\n", printable(&domain.name));
            let before = writer.names.count();
            for descriptor in &domain.descriptors {
                writer.descriptor(&domain.name, &[], descriptor);
            }
            if writer.names.count() == before {
                writer.text.push_str("# It has no limits.\n");
            }
        }
        for limit in &self.conditional {
            writer.conditional(limit);
        }
        writer.text
    }
}

struct PolicyWriter {
    text: String,
    names: ActionNames,
}

impl PolicyWriter {
    fn descriptor(&mut self, domain: &str, above: &[&Descriptor], descriptor: &Descriptor) {
        let path = [above, &[descriptor]].concat();
        // A descriptor with neither a limit nor further levels admits everything. It exempts its value.
        if descriptor.limit.is_some() || descriptor.descriptors.is_empty() {
            self.action(domain, &path, descriptor);
        }
        for next in &descriptor.descriptors {
            self.descriptor(domain, &path, next);
        }
    }

    /// A limit of limitador's, as an action whose callers know that its conditions hold.
    fn conditional(&mut self, limit: &ConditionalLimit) {
        let _ = writeln!(self.text, "\n# The namespace {}.", printable(&limit.namespace));
        for condition in limit.conditions() {
            let _ = writeln!(self.text, "# It applies if {}.", printable(condition));
        }
        let mut parts: Vec<String> = Vec::new();
        let meanings: Vec<_> = limit.variables().map(printable).collect();
        for variable in &meanings {
            let part = if meanings.len() == 1 { "key".to_owned() } else { unused_header(last_name(variable), &parts) };
            parts.push(part);
        }
        if parts.len() > MAX_PARTS {
            let count = parts.len();
            let _ = writeln!(self.text, "# Left out: its calls count by {count} values, and {MAX_PARTS} are possible.");
            return;
        }
        let _ = writeln!(self.text, "[inbound.action.{}]", toml_string(&self.names.unique(&limit.path())));
        self.key(&parts, &meanings);
        let _ = writeln!(self.text, "limit = \"{}\"", quantity(limit.amount()));
    }

    /// The key, with the meanings of its parts.
    fn key(&mut self, parts: &[String], meanings: &[impl AsRef<str>]) {
        if parts.is_empty() {
            self.text.push_str(SHARED_KEY);
        } else {
            let quoted: Vec<String> = parts.iter().map(|part| toml_string(part)).collect();
            let list = if parts.len() == 1 { quoted.concat() } else { format!("[{}]", quoted.join(", ")) };
            let meanings: Vec<&str> = meanings.iter().map(AsRef::as_ref).collect();
            let _ = writeln!(self.text, "key = {list}  # {}", meanings.join(", "));
        }
        // A request without one of the entries doesn't match the descriptor.
        if parts.iter().any(|part| part.starts_with("header:")) {
            self.text.push_str("missing = \"skip\"\n");
        }
    }

    fn action(&mut self, domain: &str, path: &[&Descriptor], leaf: &Descriptor) {
        let entries: Vec<String> = path.iter().map(|descriptor| describe_entry(descriptor)).collect();
        let _ = write!(self.text, "\n# {}\n", entries.join(", "));
        for remark in remarks(path, leaf) {
            let _ = writeln!(self.text, "# {remark}");
        }
        let (parts, meanings) = key_parts(path);
        if parts.len() > MAX_PARTS {
            let _ = writeln!(
                self.text,
                "# Left out: its calls count by {} values, and {MAX_PARTS} are possible.",
                parts.len()
            );
            return;
        }
        let keys: Vec<String> = path.iter().map(|descriptor| descriptor.composite_key()).collect();
        let name = self.names.unique(&format!("{domain}.{}", keys.join(".")));
        let _ = writeln!(self.text, "[inbound.action.{}]", toml_string(&name));
        let Some(amount) = leaf.limit.as_ref().map(|limit| limit.amount).filter(|amount| *amount != Amount::Unlimited)
        else {
            self.text.push_str("limit = \"unlimited\"\n");
            return;
        };
        self.key(&parts, &meanings);
        let _ = writeln!(self.text, "limit = \"{}\"", quantity(amount));
        if leaf.shadow_mode {
            self.text.push_str("mode = \"shadow\"\n");
        }
    }
}

fn describe_entry(descriptor: &Descriptor) -> String {
    match &descriptor.value {
        Some(value) => format!("({}, {})", printable(&descriptor.key), printable(value)),
        None => format!("({})", printable(&descriptor.key)),
    }
}

/// The quantity of a policy for an amount. "per day" would be understood, with a note that it is no calendar day.
fn quantity(amount: Amount) -> String {
    match amount {
        Amount::Unlimited => "unlimited".to_owned(),
        Amount::PerUnit { requests, unit: unit @ (Unit::Second | Unit::Minute) } => format!("{requests} per {unit}"),
        Amount::PerUnit { requests, unit: Unit::Hour } => format!("{requests} per 1h"),
        Amount::PerUnit { requests, unit } => format!("{requests} per {}d", unit.seconds() / 86_400),
        Amount::PerSeconds { hits, seconds } => format!("{hits} per {seconds}s"),
    }
}

/// True if each value of the entry has a count of its own.
fn is_counted_by(descriptor: &Descriptor) -> bool {
    let is_any = descriptor.value.is_none() || descriptor.is_wildcard();
    is_any && !(descriptor.is_wildcard() && descriptor.share_threshold)
}

/// The parts of the key, and the entries of the descriptor that they stand for. An address is `client_ip`, one other
/// value is `key`, and several are headers of the decision API's request.
fn key_parts(path: &[&Descriptor]) -> (Vec<String>, Vec<String>) {
    let counted: Vec<&&Descriptor> = path.iter().filter(|descriptor| is_counted_by(descriptor)).collect();
    let is_address = |descriptor: &Descriptor| ADDRESS_KEYS.contains(&descriptor.key.as_str());
    let others = counted.iter().filter(|descriptor| !is_address(descriptor)).count();
    let (mut parts, mut meanings): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for descriptor in counted {
        let part = if is_address(descriptor) {
            "client_ip".to_owned()
        } else if others == 1 {
            "key".to_owned()
        } else {
            unused_header(&descriptor.key, &parts)
        };
        if !parts.contains(&part) {
            parts.push(part);
            meanings.push(printable(&descriptor.key).into_owned());
        }
    }
    (parts, meanings)
}

/// The last name of an expression, such as `user_id` of `descriptors[0]['user_id']`.
fn last_name(expression: &str) -> &str {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
    let trimmed = expression.trim_end_matches(|letter| !is_part(letter));
    let begin = trimmed.rfind(|letter| !is_part(letter)).map_or(0, |at| at + 1);
    trimmed.get(begin..).unwrap_or(trimmed)
}

/// A header named after a key, other than those that are taken.
fn unused_header(key: &str, taken: &[String]) -> String {
    let letters =
        key.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' });
    let name: String = letters.take(MAX_NAME).collect();
    let name = match name.trim_matches('-') {
        "" => "header:entry".to_owned(),
        name => format!("header:{name}"),
    };
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.clone()).chain(numbered).find(|name| !taken.contains(name)).unwrap_or(name)
}

/// The settings of a descriptor that the action alone doesn't show.
fn remarks(path: &[&Descriptor], leaf: &Descriptor) -> Vec<String> {
    let mut remarks = Vec::new();
    for descriptor in path.iter().filter(|descriptor| descriptor.is_wildcard()) {
        let pattern = printable(descriptor.value.as_ref().unwrap_or(&descriptor.key)).into_owned();
        let counts = if descriptor.share_threshold { "share one count" } else { "have counts of their own" };
        remarks.push(format!("The values that match {pattern} {counts}."));
    }
    if let Some(limit) = &leaf.limit {
        if let Some(name) = &limit.name {
            remarks.push(format!("Its name is {}.", printable(name)));
        }
        if !limit.replaces.is_empty() {
            let names = printable(&limit.replaces.join(", ")).into_owned();
            remarks.push(format!("It replaces {names}: a call that asks for this one doesn't ask for those."));
        }
        if leaf.quota_mode {
            remarks.push(
                "No equal for quota_mode: of several such limits, one with room admits a call there; here each refuses."
                    .to_owned(),
            );
        }
    } else {
        remarks.push("It has no limit, and so exempts its value.".to_owned());
    }
    let metrics =
        [("detailed_metric", leaf.detailed_metric), ("value_to_metric", path.iter().any(|it| it.value_to_metric))];
    for (name, _) in metrics.iter().filter(|(_, is_set)| *is_set) {
        remarks.push(format!("No equal for {name}: metrics are by action."));
    }
    if !leaf.metadata.is_empty() {
        remarks.push("No equal for metadata.".to_owned());
    }
    remarks
}
