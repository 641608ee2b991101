//! Finds the first action in file order that matches a request, in each reading of its path.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::matched_actions::{MatchedActions, PathError};
use crate::matcher::{Matcher, MethodSet, PatternSegment, glob_matches};
use crate::path::{AmbiguousPaths, NormalisedPath, PathQuirks};
use crate::plan::ActionId;
use crate::query::Query;
use crate::readings;

/// A map by path or by segment. Its hash isn't keyed: only the policy adds entries, so no client can cause collisions.
type PathMap<T> = HashMap<Vec<u8>, T, BuildHasherDefault<PathHasher>>;

/// A hasher that multiplies and folds eight bytes at a time.
#[derive(Clone, Copy, Debug, Default)]
struct PathHasher(u64);

impl PathHasher {
    #[inline]
    fn word(&mut self, word: u64) {
        // The fraction of the golden ratio spreads bits well.
        let product = u128::from(self.0 ^ word) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        self.0 = (product as u64) ^ ((product >> 64) as u64) ^ self.0.rotate_left(23);
    }
}

impl Hasher for PathHasher {
    /// The last word may overlap the word before it, which avoids gathering the remainder byte by byte. The length is
    /// hashed too, so this distinguishes the same inputs as a separate word.
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last_chunk::<8>() {
            for word in bytes[..bytes.len() - 1].as_chunks::<8>().0 {
                self.word(u64::from_le_bytes(*word));
            }
            self.word(u64::from_le_bytes(*last));
        } else if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
            self.word(u64::from(u32::from_le_bytes(*first)) << 32 | u64::from(u32::from_le_bytes(*last)));
        } else if let (Some(first), Some(last)) = (bytes.first(), bytes.last()) {
            let middle = bytes[bytes.len() / 2];
            self.word(u64::from(*first) << 16 | u64::from(middle) << 8 | u64::from(*last));
        }
    }

    #[inline]
    fn write_usize(&mut self, length: usize) {
        self.word(length as u64 | 1 << 63);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

/// One action's matcher. The rules are in the order of the policy, in which the first match wins.
#[derive(Clone, Debug)]
struct RouteRule {
    action: ActionId,
    methods: MethodSet,
    matcher: Matcher,
}

/// A hash map finds exact paths, and a tree of segments finds patterns. A lookup visits each node of the tree at most
/// once. No entry is added after construction, so a client can't cause collisions.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    quirks: PathQuirks,
    ambiguous: AmbiguousPaths,
    /// True if a limit counts by path, so that the readings of a path are searched again for its keys.
    counts_by_path: bool,
    rules: Vec<RouteRule>,
    /// By path, the rules that name it exactly.
    exact: PathMap<Vec<u16>>,
    /// The rules that name no path.
    any_path: Vec<u16>,
    /// The tree of the other patterns, with its root first.
    nodes: Vec<RouteNode>,
}

#[derive(Clone, Debug, Default)]
struct RouteNode {
    /// The lowest rule at or below the node, which bounds the best match in its subtree.
    lowest_rule: u16,
    /// Sorted by length, then by bytes, so that the length alone decides most comparisons.
    literals: Vec<(Box<[u8]>, usize)>,
    globs: Vec<(Vec<u8>, usize)>,
    /// The rules whose pattern ends here.
    exact_rules: Vec<u16>,
    /// The rules whose pattern ends here with `/*`.
    prefix_rules: Vec<u16>,
}

impl RouteNode {
    /// Returns the node after a literal segment, or the index at which to insert it.
    #[inline]
    fn literal(&self, segment: &[u8]) -> Result<usize, usize> {
        let order = |(text, _): &(Box<[u8]>, usize)| text.len().cmp(&segment.len()).then_with(|| (**text).cmp(segment));
        self.literals.binary_search_by(order).map(|place| self.literals[place].1)
    }
}

/// The properties of a request that rules check.
struct MatchInput<'q> {
    method: MethodSet,
    query: &'q Query<'q>,
}

impl Router {
    pub(crate) fn new(
        matchers: impl IntoIterator<Item = (ActionId, Matcher)>,
        quirks: PathQuirks,
        ambiguous: AmbiguousPaths,
        counts_by_path: bool,
    ) -> Self {
        let root = RouteNode { lowest_rule: u16::MAX, ..RouteNode::default() };
        let mut router = Self {
            quirks,
            ambiguous,
            counts_by_path,
            rules: Vec::new(),
            exact: PathMap::default(),
            any_path: Vec::new(),
            nodes: vec![root],
        };
        for (rule, (action, matcher)) in (0_u16..).zip(matchers) {
            if matcher.paths.is_empty() {
                router.any_path.push(rule);
            }
            for pattern in &matcher.paths {
                match pattern.exact_path() {
                    Some(path) => router.exact.entry(path).or_default().push(rule),
                    None => router.insert_pattern(rule, &pattern.segments, pattern.matches_below),
                }
            }
            router.rules.push(RouteRule { action, methods: MethodSet::new(&matcher.methods), matcher });
        }
        router
    }

    fn insert_pattern(&mut self, rule: u16, segments: &[PatternSegment], open: bool) {
        let mut at = 0;
        self.nodes[0].lowest_rule = self.nodes[0].lowest_rule.min(rule);
        for segment in segments {
            let new = self.nodes.len();
            let node = &mut self.nodes[at];
            at = match segment {
                PatternSegment::Literal(text) => node.literal(text).unwrap_or_else(|place| {
                    node.literals.insert(place, (text.as_slice().into(), new));
                    new
                }),
                PatternSegment::Glob(text) => match node.globs.iter().find(|(known, _)| known == text) {
                    Some((_, next)) => *next,
                    None => {
                        node.globs.push((text.clone(), new));
                        new
                    }
                },
            };
            if at == new {
                self.nodes.push(RouteNode { lowest_rule: rule, ..RouteNode::default() });
            }
            self.nodes[at].lowest_rule = self.nodes[at].lowest_rule.min(rule);
        }
        if open { self.nodes[at].prefix_rules.push(rule) } else { self.nodes[at].exact_rules.push(rule) }
    }

    /// Returns the first matching action of each reading of the path.
    #[inline]
    pub(crate) fn find(&self, query: &Query<'_>) -> Result<MatchedActions, PathError> {
        match self.find_normal(query) {
            (found, true) => Ok(found.into()),
            (found, false) => self.find_all_readings(query, found),
        }
    }

    /// Returns the first matching action of the path's normal form, and true if that is its only reading.
    #[inline]
    pub(crate) fn find_normal(&self, query: &Query<'_>) -> (Option<ActionId>, bool) {
        if self.rules.is_empty() {
            return (None, true);
        }
        let asked = MatchInput { method: MethodSet::from_method(query.method), query };
        let Some(text) = query.path else { return (self.find_best(&asked, None), true) };
        let path = NormalisedPath::new(text, self.quirks);
        (self.find_best(&asked, Some(path.as_bytes())), path.is_borrowed())
    }

    /// Matches every reading of a path. `found` is the action of its normal form.
    #[cold]
    pub(crate) fn find_all_readings(
        &self,
        query: &Query<'_>,
        found: Option<ActionId>,
    ) -> Result<MatchedActions, PathError> {
        let mut actions = MatchedActions::from(found);
        if self.exact.is_empty() && self.nodes[0].lowest_rule == u16::MAX {
            return Ok(actions);
        }
        let asked = MatchInput { method: MethodSet::from_method(query.method), query };
        readings::each_reading(
            query.path.unwrap_or_default(),
            self.quirks,
            readings::matching(self.counts_by_path),
            &mut |path| {
                let other = self.find_best(&asked, Some(path));
                if other != found && self.ambiguous == AmbiguousPaths::Refuse {
                    return Err(PathError::Ambiguous);
                }
                other.map_or(Ok(()), |action| actions.insert(action))
            },
        )?;
        Ok(actions)
    }

    #[inline]
    fn find_best(&self, asked: &MatchInput<'_>, path: Option<&[u8]>) -> Option<ActionId> {
        let mut best = u16::MAX;
        self.try_rules(&self.any_path, asked, &mut best);
        if let Some(path) = path {
            if let Some(rules) = self.exact.get(path) {
                self.try_rules(rules, asked, &mut best);
            }
            if self.nodes[0].lowest_rule < best && path.first() == Some(&b'/') {
                self.search_node(0, path.get(1..).filter(|rest| !rest.is_empty()), asked, &mut best);
            }
        }
        self.rules.get(usize::from(best)).map(|rule| rule.action)
    }

    /// Takes the first of these rules that matches and comes before the best so far.
    #[inline]
    fn try_rules(&self, rules: &[u16], asked: &MatchInput<'_>, best: &mut u16) {
        for rule in rules {
            if rule >= best {
                return;
            }
            let RouteRule { methods, matcher, .. } = &self.rules[usize::from(*rule)];
            let method = methods.contains(asked.method).unwrap_or_else(|| matcher.matches_method(asked.query.method));
            if method && matcher.matches_host(asked.query.host) {
                *best = *rule;
                return;
            }
        }
    }

    /// Searches for better rules at and below a node. `rest` is the remaining path without its leading slash. The depth
    /// is bounded by that of the patterns.
    fn search_node(&self, at: usize, rest: Option<&[u8]>, asked: &MatchInput<'_>, best: &mut u16) {
        let node = &self.nodes[at];
        self.try_rules(&node.prefix_rules, asked, best);
        let Some(rest) = rest else {
            self.try_rules(&node.exact_rules, asked, best);
            return;
        };
        let slash = rest.iter().position(|byte| *byte == b'/');
        let (segment, rest) = slash.map_or((rest, None), |slash| (&rest[..slash], Some(&rest[slash + 1..])));
        if let Ok(next) = node.literal(segment)
            && self.nodes[next].lowest_rule < *best
        {
            self.search_node(next, rest, asked, best);
        }
        for (pattern, next) in &node.globs {
            if self.nodes[*next].lowest_rule < *best && glob_matches(pattern, segment) {
                self.search_node(*next, rest, asked, best);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matched_actions::MAX_ACTIONS;
    use crate::matcher::PathPattern;
    use http::Method;
    use proptest::prelude::*;

    /// Returns the expected result of [`Router::find`] by trying every rule in turn.
    fn find_slowly(router: &Router, query: &Query<'_>) -> Result<MatchedActions, PathError> {
        let Some(text) = query.path else { return Ok(find_slowly_as(router, query, None).into()) };
        let mut actions = MatchedActions::NONE;
        let normal = NormalisedPath::new(text, router.quirks);
        let mut visit =
            |path: &[u8]| find_slowly_as(router, query, Some(path)).map_or(Ok(()), |action| actions.insert(action));
        visit(normal.as_bytes())?;
        if normal.as_bytes() != b"*" {
            readings::each_reading(text, router.quirks, readings::matching(router.counts_by_path), &mut visit)?;
        }
        Ok(actions)
    }

    fn find_slowly_as(router: &Router, query: &Query<'_>, path: Option<&[u8]>) -> Option<ActionId> {
        let fits = |segments: &[PatternSegment], open: bool, path: &[u8]| {
            // An empty segment that isn't merged counts as a segment, but `/` has none.
            let found: Vec<&[u8]> = path[1..].split(|byte| *byte == b'/').filter(|_| path.len() > 1).collect();
            path.first() == Some(&b'/')
                && (found.len() == segments.len() || open && found.len() > segments.len())
                && segments.iter().zip(found).all(|(segment, found)| match segment {
                    PatternSegment::Literal(text) => text == found,
                    PatternSegment::Glob(pattern) => glob_matches(pattern, found),
                })
        };
        let rule = router.rules.iter().find(|rule| {
            let patterns = &rule.matcher.paths;
            rule.matcher.matches_method(query.method)
                && rule.matcher.matches_host(query.host)
                && (patterns.is_empty()
                    || path.is_some_and(|path| {
                        patterns.iter().any(|pattern| fits(&pattern.segments, pattern.matches_below, path))
                    }))
        });
        rule.map(|rule| rule.action)
    }

    fn router(rules: &[(&str, &str, &str)]) -> Router {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let matchers = rules.iter().enumerate().map(|(index, (methods, paths, hosts))| {
            let methods = words(methods).iter().map(|method| method.parse::<Method>().unwrap()).collect();
            let paths =
                words(paths).iter().map(|path| PathPattern::new(path, PathQuirks::default()).unwrap()).collect();
            (ActionId::from_index(index), Matcher { methods, paths, hosts: words(hosts) })
        });
        Router::new(matchers, PathQuirks::default(), AmbiguousPaths::default(), false)
    }

    #[test]
    fn the_first_matching_action_wins() {
        let router = router(&[
            ("POST", "/login", ""),
            ("", "/api/v1/*", ""),
            ("GET HEAD", "/api/*", ""),
            ("", "/users/*/avatar /users/*.png", ""),
            ("", "/", ""),
            ("", "", "admin.example"),
            ("", "/login", ""),
            ("OPTIONS", "", ""),
            ("", "/prefix*", ""),
        ]);
        for (method, host, path, indexes) in [
            ("POST", "x", "/login", &[0][..]),
            ("POST", "x", "//x/../%6cogin/?a", &[0, 4]),
            ("post", "x", "/login", &[0]),
            ("GET", "x", "/login", &[6]),
            ("GET", "ADMIN.example:80", "/login", &[5]),
            ("POST", "x", "/api/v1", &[1]),
            ("GET", "x", "/api/v2/x/y", &[2]),
            ("POST", "x", "/api/v2", &[]),
            ("GET", "x", "/apis", &[]),
            ("GET", "x", "/users/7/avatar", &[3]),
            ("GET", "x", "/users/7/avatar/x", &[]),
            ("GET", "x", "/users/7.png", &[3]),
            ("GET", "x", "/", &[4]),
            ("GET", "x", "/nothing", &[]),
            ("OPTIONS", "x", "*", &[7]),
            ("GET", "x", "/users/a%2Fb/avatar", &[3]),
            ("POST", "x", "/x/..%2Flogin", &[0]),
            ("PURGE", "x", "/api/v1/x", &[1]),
            ("PURGE", "x", "/login", &[6]),
            ("GET", "x", "/api/../login", &[6, 2]),
            ("GET", "x", "/api/v1/../users/7.png", &[2, 1]),
            ("GET", "x", "/api/..", &[4, 2]),
            ("GET", "x", "/prefixed", &[8]),
            ("GET", "x", "/prefix/x/y", &[8]),
            ("GET", "x", "/prefi", &[]),
        ] {
            let query = Query { method: Some(method), host: Some(host), path: Some(path), ..Query::default() };
            let indices = |found: Result<MatchedActions, PathError>| {
                found.unwrap().iter().map(ActionId::index).collect::<Vec<_>>()
            };
            assert_eq!(indices(router.find(&query)), indexes, "{method} {host} {path}");
            assert_eq!(indices(find_slowly(&router, &query)), indexes, "{method} {host} {path}");
        }
        assert_eq!(router.find(&Query::default()), Ok(MatchedActions::NONE));
    }

    #[test]
    fn ambiguous_paths_are_refused_if_configured() {
        let mut router =
            router(&[("", "/static/*", ""), ("", "/login", ""), ("", "/a", ""), ("", "/b", ""), ("", "/c", "")]);
        let find = |router: &Router, path| router.find(&Query { path: Some(path), ..Query::default() });
        let five = "/static/../a%2f../b%2f../c%2f../login";
        assert_eq!(find(&router, five).map(|actions| actions.has_multiple()), Ok(true));
        router.ambiguous = AmbiguousPaths::Refuse;
        for path in ["/static/../login", "/login;x", "/login//..", five] {
            assert_eq!(find(&router, path), Err(PathError::Ambiguous), "{path}");
        }
        for path in ["/static/a%20b", "/static/a;x/../b", "/login/", "/%6cogi", "/static/x%2fy"] {
            assert!(find(&router, path).is_ok(), "{path}");
        }
    }

    #[test]
    fn matched_actions_are_bounded_by_the_decision() {
        let router =
            router(&[("", "/a/*", ""), ("", "/b/*", ""), ("", "/c/*", ""), ("", "/d/*", ""), ("", "/e/*", "")]);
        let query = Query { path: Some("/a/../b/x%2f../../c/x\\../../d/x%5c../../e"), ..Query::default() };
        let mut actions = router.find(&query).unwrap();
        assert_eq!(actions.iter().count(), 5);
        for id in 5..MAX_ACTIONS as u16 {
            actions.insert(ActionId(id)).unwrap();
        }
        assert_eq!(actions.insert(ActionId(0)), Ok(()), "it is there already");
        assert_eq!(actions.insert(ActionId(MAX_ACTIONS as u16)), Err(PathError::TooMany));
    }

    proptest! {
        #[test]
        fn the_router_agrees_with_checking_every_rule(
            rules in prop::collection::vec(
                ("(GET|POST|PURGE|GET PURGE|)", prop::collection::vec("(/(a|b|\\*|a\\*)){0,3}", 0..3), "(h|)"), 0..12),
            requests in prop::collection::vec(("(GET|HEAD|POST|PURGE)", "((/|%2F)(a|b|ab|\\.\\.|)){0,4}", "(h|i)"), 1..20),
        ) {
            let rules: Vec<(String, String, String)> = rules
                .into_iter()
                .map(|(method, paths, host)| {
                    let paths = paths.into_iter().map(|path| if path.is_empty() { "/".to_owned() } else { path });
                    (method, paths.collect::<Vec<_>>().join(" "), host)
                })
                .collect();
            let rules: Vec<(&str, &str, &str)> =
                rules.iter().map(|(method, paths, host)| (&**method, &**paths, &**host)).collect();
            let router = router(&rules);
            for (method, path, host) in &requests {
                let query = Query { method: Some(method), path: Some(path), host: Some(host), ..Query::default() };
                prop_assert_eq!(router.find(&query), find_slowly(&router, &query));
            }
        }
    }
}
