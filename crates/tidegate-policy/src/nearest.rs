//! The valid name that somebody probably meant.

/// Names longer than this aren't compared: they are no slips of a finger.
const MAX_LENGTH: usize = 64;
/// How many names are compared at most.
const MAX_NAMES: usize = 4096;

/// The name that is similar, or failing that the first that begins like what was found; `None` if none does.
pub fn nearest<'n>(found: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let names: Vec<&str> = names.into_iter().take(MAX_NAMES).collect();
    // "warning" is no slip of a finger, but it begins with "warn".
    let begins_alike = |name: &&str| {
        let (found, name) = (fold_name(found), fold_name(name));
        name.len().min(found.len()) >= 3 && (name.starts_with(&found) || found.starts_with(&name))
    };
    let similar = similar(found, names.iter().copied());
    similar.or_else(|| names.iter().copied().find(begins_alike).filter(|_| found.len() <= MAX_LENGTH))
}

/// The most similar of `names`, if one is similar enough to be meant: at most a third of its letters differ (by
/// optimal string alignment: a letter added, dropped, changed, or two neighbours swapped). Case and `-` for `_` are
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

/// Lower case with one kind of dash.
pub(crate) fn fold_name(name: &str) -> String {
    name.chars().map(|letter| if letter == '-' { '_' } else { letter.to_ascii_lowercase() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant_and_nothing_else() {
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
