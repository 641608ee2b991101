//! The search for the valid name that a misspelt one probably means.

/// The longest name that is compared, in bytes. Longer ones aren't typing errors.
const MAX_LENGTH: usize = 64;
/// The most names that are compared. Further ones are never suggested.
const MAX_NAMES: usize = 4096;

/// Returns the similar name, otherwise the first that shares its beginning with `found`; `None` if there is neither.
pub fn nearest<'n>(found: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let names: Vec<&str> = names.into_iter().take(MAX_NAMES).collect();
    // "warning" isn't a typing error, but it begins with "warn".
    let begins_alike = |name: &&str| {
        let (found, name) = (fold_name(found), fold_name(name));
        name.len().min(found.len()) >= 3 && (name.starts_with(&found) || found.starts_with(&name))
    };
    let similar = similar(found, names.iter().copied());
    similar.or_else(|| names.iter().copied().find(begins_alike).filter(|_| found.len() <= MAX_LENGTH))
}

/// Returns the most similar of `names`, if it is similar enough: at most a third of its letters, or one, differ (by
/// optimal string alignment: a letter added, dropped, changed, or two neighbours swapped). Case and `-` for `_` make
/// no difference.
pub(crate) fn similar<'n>(found: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    if found.len() > MAX_LENGTH {
        return None;
    }
    let found = fold_name(found);
    let mut best: Option<(usize, &str)> = None;
    for name in names.into_iter().take(MAX_NAMES) {
        let allowed = (name.len().max(found.len()) / 3).max(1);
        let at_most = best.map_or(allowed, |(distance, _)| allowed.min(distance.saturating_sub(1)));
        if name.len() > MAX_LENGTH || name.len().abs_diff(found.len()) > at_most {
            continue;
        }
        let distance = strsim::osa_distance(&found, &fold_name(name));
        if distance <= at_most && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, name));
        }
    }
    best.map(|(_, name)| name)
}

/// Converts a name to lower case, with `_` for `-`.
pub(crate) fn fold_name(name: &str) -> String {
    name.chars().map(|letter| if letter == '-' { '_' } else { letter.to_ascii_lowercase() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_suggests_only_similar_names() {
        let names = ["limit", "limits", "key", "penalty", "trusted_proxies", "ban"];
        for (found, meant) in [
            ("limt", Some("limit")),
            ("limit", Some("limit")),
            ("LIMITS", Some("limits")),
            ("trusted-proxies", Some("trusted_proxies")),
            ("trustedproxies", Some("trusted_proxies")),
            ("pentaly", Some("penalty")),
            ("bna", Some("ban")),
            ("penal", Some("penalty")),
            ("banned", Some("ban")),
            ("colour", None),
            ("", None),
        ] {
            assert_eq!(nearest(found, names), meant, "{found}");
        }
        assert_eq!(nearest(&"x".repeat(1000), names), None);
    }
}
