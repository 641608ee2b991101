//! The search for secrets in the lines that errors show.

use std::sync::LazyLock;

use crate::nearest::similar;
use crate::settings;

/// The most lines above a place that are searched for the list or the section that it is in.
const MAX_LINES_ABOVE: usize = 1100;
/// The most bytes of a line that is searched for secrets. A longer one isn't shown.
pub(super) const MAX_SEARCHED_LINE: usize = 16 << 10;

/// True if a line, below the text above it, may hold a secret.
pub(crate) fn may_be_secret(above: &str, line: &str) -> bool {
    secret_start(above, line).is_some() || line.contains("://") && line.contains('@')
}

/// Settings whose value is the source of a secret; an author may write the secret itself there.
pub(crate) const SECRET_SETTINGS: [&str; 4] = ["token", "tokens", "credentials", "secrets"];
/// The setting whose text is a secret, and whose table isn't: an alert's URL, or a lane of a provider.
pub(crate) const WEBHOOK: &str = "webhook";

/// The offset of a text that may be a secret: the value of a key that reads like one, or that the lines above announce,
/// unless it only says where the secret is.
pub(super) fn secret_start(above: &str, line: &str) -> Option<usize> {
    if line.len() > MAX_SEARCHED_LINE {
        return Some(0);
    }
    let header = [line]
        .into_iter()
        .chain(above.lines().rev().take(MAX_LINES_ABOVE))
        .find(|line| line.trim_start().starts_with('['));
    let header = header.unwrap_or_default().trim();
    let is_in_alert = [header, line].into_iter().any(is_of_alert);
    let value = secret_value_start(line, is_in_alert);
    let url = || if is_in_alert { url_path_start(line) } else { None };
    let item = || secret_item_start(above, line, is_in_alert);
    let value = value.or_else(item).or_else(|| secret_table_value_start(header, line));
    value.into_iter().chain(url()).min()
}

fn secret_value_start(line: &str, is_in_alert: bool) -> Option<usize> {
    line.match_indices('=').find_map(|(equals, _)| {
        let value = line[equals + 1..].trim_start();
        let key = key_parts(line, equals).pop().unwrap_or_default();
        let is_secret = names_secret(line, equals, is_in_alert && !value.starts_with('{'))
            || key == "body" && value.trim_start_matches(['"', '\'']).starts_with('{')
            || key == WEBHOOK && value.starts_with(['"', '\'']);
        (is_secret && !value.is_empty() && !is_secret_source(value)).then(|| value_start(line, equals))
    })
}

/// The offset of an item of a list of secrets that begins on a line above.
fn secret_item_start(above: &str, line: &str, is_in_alert: bool) -> Option<usize> {
    let begin = line.trim_start();
    if !begin.starts_with(['"', '\'']) {
        return None;
    }
    let mut before = above.lines().rev().take(MAX_LINES_ABOVE).map(str::trim);
    let opens = before.find(|line| !line.is_empty() && !line.starts_with(['"', '\'', '#', ']']))?;
    let is_list = opens.ends_with(['[', ',']) && {
        let mut keys = opens.match_indices('=');
        opens.len() > MAX_SEARCHED_LINE || keys.any(|(equals, _)| names_secret(opens, equals, is_in_alert))
    };
    let is_secret = is_list || opens.starts_with('[');
    (is_secret && !is_secret_source(&format!("[{begin}"))).then_some(0)
}

/// The offset of a value in a table of secrets.
fn secret_table_value_start(header: &str, line: &str) -> Option<usize> {
    let equals = line.find('=').filter(|equals| !is_secret_source(&line[equals + 1..]))?;
    let of_secrets =
        header.trim_end_matches(']').rsplit('.').next().is_some_and(|name| matches!(name.trim(), "secrets" | "tokens"));
    of_secrets.then(|| value_start(line, equals))
}

/// True if a line is the header of an alert, or sets one of its keys by its whole name.
fn is_of_alert(line: &str) -> bool {
    let first = line.trim_start().trim_start_matches(['[', '"', '\'', ' ', '\t']);
    first.strip_prefix("alert").is_some_and(|rest| rest.starts_with(['.', ']', '=', '"', '\'', ' ', '\t']))
}

/// True if the key before an equals sign reads like that of a secret. In an alert, any key may be a misspelled
/// `webhook` or `telegram`, unless it is another one.
fn names_secret(line: &str, equals: usize, is_in_alert: bool) -> bool {
    static ALERT_KEYS: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let keys = ["alert.*", "alert.*.telegram"].into_iter().flat_map(settings::table_keys);
        keys.filter(|key| !["webhook", "telegram"].contains(key)).collect()
    });
    let is_alert_key = |key: &String| ALERT_KEYS.contains(&key.as_str());
    let parts = key_parts(line, equals);
    parts.iter().any(|part| is_secret_name(part)) || is_in_alert && !parts.last().is_some_and(is_alert_key)
}

/// The offset of the path of the first URL with one.
pub(super) fn url_path_start(line: &str) -> Option<usize> {
    let host = line.find("://")? + 3;
    let stop = host + line[host..].find(['/', '?', '"', '\'', ' ', '\t'])?;
    line[stop..].starts_with(['/', '?']).then_some(stop)
}

/// The offset of the value after an equals sign, without the space before it.
pub(crate) fn value_start(line: &str, equals: usize) -> usize {
    line.len() - line[equals + 1..].trim_start().len()
}

/// The parts of the key before an equals sign, in lower case.
fn key_parts(line: &str, equals: usize) -> Vec<String> {
    let is_part = |letter: char| letter.is_alphanumeric() || "_-.\"' \t".contains(letter);
    let key = line[..equals].rsplit(|letter| !is_part(letter)).next().unwrap_or_default();
    let word = |part: &str| {
        let part = part.trim_matches(['"', '\'', ' ', '\t']);
        part.rsplit(['"', '\'', ' ', '\t']).next().unwrap_or(part).to_ascii_lowercase()
    };
    key.split('.').map(word).collect()
}

fn is_secret_name(key: &str) -> bool {
    const SECRETS: [&str; 8] = ["token", "secret", "password", "passwd", "credential", "bearer", "api_key", "apikey"];
    if SECRET_SETTINGS.contains(&key) {
        return true;
    }
    // The name of a setting isn't a misspelling: `header` isn't `bearer`.
    let alike = SECRETS.iter().any(|word| key.contains(word)) || similar(key, SECRETS).is_some();
    alike && !settings::has_word(key)
}

/// True if a value only says where secrets are.
pub(crate) fn is_secret_source(value: &str) -> bool {
    let value = value.trim_start();
    let (items, is_list) = match value.strip_prefix('[') {
        Some(inside) => (inside.rsplit_once(']').map_or(inside, |(items, _)| items), true),
        None => (value, false),
    };
    let mut items = items.split(',').map(|item| item.trim_matches(['"', '\'', ' ', '\t']));
    let is_place = |item: &str| item.starts_with("env:") || item.starts_with("file:");
    if is_list { items.all(|item| item.is_empty() || is_place(item)) } else { items.next().is_some_and(is_place) }
}
