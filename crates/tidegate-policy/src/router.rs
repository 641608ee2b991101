//! Finds the first action in file order that matches a request, in each reading of its path.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::matcher::{Matcher, MethodSet, Segment, glob};
use crate::path::{AmbiguousPaths, Normalised, PathQuirks};
use crate::plan::ActionId;
use crate::query::Query;
use crate::readings;
use crate::several::{Actions, PathError};

/// A map by path or by segment. Its hash isn't keyed: only the policy puts anything in, so nobody can make it collide.
type Paths<T> = HashMap<Vec<u8>, T, BuildHasherDefault<Mix>>;

/// Multiplies and folds eight bytes at a time.
#[derive(Clone, Copy, Debug, Default)]
struct Mix(u64);

impl Mix {
    #[inline]
    fn word(&mut self, word: u64) {
        // The fraction of the golden ratio, whose bits are well spread.
        let product = u128::from(self.0 ^ word) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        self.0 = (product as u64) ^ ((product >> 64) as u64) ^ self.0.rotate_left(23);
    }
}

impl Hasher for Mix {
    /// What doesn't fill words is read with what comes before it, which spares gathering it byte by byte; the length is
    /// hashed too, so that this tells apart what a word of its own would.
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

/// One action's matcher; where it stands in the list is the order in which it matches.
#[derive(Clone, Debug)]
struct Rule {
    action: ActionId,
    methods: MethodSet,
    matcher: Matcher,
}

/// Exact paths are found in a hash map; patterns in a tree of segments, in which each node is visited at most once a
/// lookup. Nothing is ever added after it is built, so a client can't make the map collide.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    quirks: PathQuirks,
    ambiguous: AmbiguousPaths,
    rules: Vec<Rule>,
    /// By path, the rules that name it exactly.
    exact: Paths<Vec<u16>>,
    /// The rules that name no path.
    any_path: Vec<u16>,
    /// The tree of the other patterns; its root comes first.
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// The lowest rule at or below the node: nothing under it is better than that.
    best: u16,
    /// Sorted by length, then by bytes: most are told apart without looking at them.
    literals: Vec<(Box<[u8]>, usize)>,
    globs: Vec<(Vec<u8>, usize)>,
    /// The rules whose pattern ends here.
    here: Vec<u16>,
    /// The rules whose pattern ends here with `/*`.
    below: Vec<u16>,
}

impl Node {
    /// The node behind a literal segment, or where it would be inserted.
    #[inline]
    fn literal(&self, segment: &[u8]) -> Result<usize, usize> {
        let order = |(text, _): &(Box<[u8]>, usize)| text.len().cmp(&segment.len()).then_with(|| (**text).cmp(segment));
        self.literals.binary_search_by(order).map(|place| self.literals[place].1)
    }
}

/// What rules ask of a request.
struct Asked<'q> {
    method: MethodSet,
    query: &'q Query<'q>,
}

impl Router {
    pub(crate) fn new(
        matchers: impl IntoIterator<Item = (ActionId, Matcher)>,
        quirks: PathQuirks,
        ambiguous: AmbiguousPaths,
    ) -> Self {
        let root = Node { best: u16::MAX, ..Node::default() };
        let mut router = Self {
            quirks,
            ambiguous,
            rules: Vec::new(),
            exact: Paths::default(),
            any_path: Vec::new(),
            nodes: vec![root],
        };
        for (rule, (action, matcher)) in (0_u16..).zip(matchers) {
            if matcher.paths.is_empty() {
                router.any_path.push(rule);
            }
            for pattern in &matcher.paths {
                match pattern.exact() {
                    Some(path) => router.exact.entry(path).or_default().push(rule),
                    None => router.plant(rule, &pattern.segments, pattern.open),
                }
            }
            router.rules.push(Rule { action, methods: MethodSet::new(&matcher.methods), matcher });
        }
        router
    }

    fn plant(&mut self, rule: u16, segments: &[Segment], open: bool) {
        let mut at = 0;
        self.nodes[0].best = self.nodes[0].best.min(rule);
        for segment in segments {
            let known = match segment {
                Segment::Literal(text) => self.nodes[at].literal(text).ok(),
                Segment::Glob(text) => {
                    self.nodes[at].globs.iter().find(|(known, _)| known == text).map(|(_, next)| *next)
                }
            };
            let next = known.unwrap_or(self.nodes.len());
            if known.is_none() {
                match segment {
                    Segment::Literal(text) => {
                        if let Err(place) = self.nodes[at].literal(text) {
                            self.nodes[at].literals.insert(place, (text.as_slice().into(), next));
                        }
                    }
                    Segment::Glob(text) => self.nodes[at].globs.push((text.clone(), next)),
                }
                self.nodes.push(Node { best: rule, ..Node::default() });
            }
            self.nodes[next].best = self.nodes[next].best.min(rule);
            at = next;
        }
        if open { self.nodes[at].below.push(rule) } else { self.nodes[at].here.push(rule) }
    }

    /// The first rule that fits, in each reading of the path.
    #[inline]
    pub(crate) fn find(&self, query: &Query<'_>) -> Result<Actions, PathError> {
        if self.rules.is_empty() {
            return Ok(Actions::NONE);
        }
        let asked = Asked { method: MethodSet::of(query.method), query };
        let Some(text) = query.path else { return Ok(self.best(&asked, None).into()) };
        let path = Normalised::new(text, self.quirks);
        let found = self.best(&asked, Some(path.as_bytes()));
        if path.is_borrowed() { Ok(found.into()) } else { self.find_all(text, &asked, found) }
    }

    /// Looks at every reading of a path whose normal form has found this.
    #[cold]
    fn find_all(&self, text: &str, asked: &Asked<'_>, found: Option<ActionId>) -> Result<Actions, PathError> {
        let mut actions = Actions::from(found);
        if self.exact.is_empty() && self.nodes[0].best == u16::MAX {
            return Ok(actions);
        }
        readings::each(text, self.quirks, &mut |path| {
            let other = self.best(asked, Some(path));
            if other != found && self.ambiguous == AmbiguousPaths::Refuse {
                return Err(PathError::Ambiguous);
            }
            other.map_or(Ok(()), |action| actions.add(action))
        })?;
        Ok(actions)
    }

    #[inline]
    fn best(&self, asked: &Asked<'_>, path: Option<&[u8]>) -> Option<ActionId> {
        let mut best = u16::MAX;
        self.offer(&self.any_path, asked, &mut best);
        if let Some(path) = path {
            if let Some(rules) = self.exact.get(path) {
                self.offer(rules, asked, &mut best);
            }
            if self.nodes[0].best < best && path.first() == Some(&b'/') {
                self.descend(0, path.get(1..).filter(|rest| !rest.is_empty()), asked, &mut best);
            }
        }
        self.rules.get(usize::from(best)).map(|rule| rule.action)
    }

    /// Takes the first of these rules that fits and is better than the best so far.
    #[inline]
    fn offer(&self, rules: &[u16], asked: &Asked<'_>, best: &mut u16) {
        for rule in rules {
            if rule >= best {
                return;
            }
            let Rule { methods, matcher, .. } = &self.rules[usize::from(*rule)];
            let method = methods.holds(asked.method).unwrap_or_else(|| matcher.takes_method(asked.query.method));
            if method && matcher.takes_host(asked.query.host) {
                *best = *rule;
                return;
            }
        }
    }

    /// Looks for better rules at and below a node; `rest` is what is left of the path, without a slash before it. The
    /// depth is bounded by the patterns'.
    fn descend(&self, at: usize, rest: Option<&[u8]>, asked: &Asked<'_>, best: &mut u16) {
        let node = &self.nodes[at];
        self.offer(&node.below, asked, best);
        let Some(rest) = rest else {
            self.offer(&node.here, asked, best);
            return;
        };
        let slash = rest.iter().position(|byte| *byte == b'/');
        let (segment, rest) = slash.map_or((rest, None), |slash| (&rest[..slash], Some(&rest[slash + 1..])));
        if let Ok(next) = node.literal(segment)
            && self.nodes[next].best < *best
        {
            self.descend(next, rest, asked, best);
        }
        for (pattern, next) in &node.globs {
            if self.nodes[*next].best < *best && glob(pattern, segment) {
                self.descend(*next, rest, asked, best);
            }
        }
    }
}

/// What [`Router::find`] must answer, by asking every rule in turn.
#[cfg(test)]
fn find_slowly(router: &Router, query: &Query<'_>) -> Result<Actions, PathError> {
    let Some(text) = query.path else { return Ok(find_slowly_as(router, query, None).into()) };
    let mut actions = Actions::NONE;
    let normal = Normalised::new(text, router.quirks);
    let mut see = |path: &[u8]| find_slowly_as(router, query, Some(path)).map_or(Ok(()), |action| actions.add(action));
    see(normal.as_bytes())?;
    if normal.as_bytes() != b"*" {
        readings::each(text, router.quirks, &mut see)?;
    }
    Ok(actions)
}

#[cfg(test)]
fn find_slowly_as(router: &Router, query: &Query<'_>, path: Option<&[u8]>) -> Option<ActionId> {
    let fits = |segments: &[Segment], open: bool, path: &[u8]| {
        // An empty segment is one, where it isn't merged; but `/` has none.
        let found: Vec<&[u8]> = path[1..].split(|byte| *byte == b'/').filter(|_| path.len() > 1).collect();
        path.first() == Some(&b'/')
            && (found.len() == segments.len() || open && found.len() > segments.len())
            && segments.iter().zip(found).all(|(segment, found)| match segment {
                Segment::Literal(text) => text == found,
                Segment::Glob(pattern) => glob(pattern, found),
            })
    };
    let rule = router.rules.iter().find(|rule| {
        let patterns = &rule.matcher.paths;
        rule.matcher.takes_method(query.method)
            && rule.matcher.takes_host(query.host)
            && (patterns.is_empty()
                || path.is_some_and(|path| patterns.iter().any(|pattern| fits(&pattern.segments, pattern.open, path))))
    });
    rule.map(|rule| rule.action)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matcher::Pattern;
    use crate::several::MAX_ACTIONS;
    use http::Method;
    use proptest::prelude::*;

    fn router(rules: &[(&str, &str, &str)]) -> Router {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let matchers = rules.iter().enumerate().map(|(index, (methods, paths, hosts))| {
            let methods = words(methods).iter().map(|method| method.parse::<Method>().unwrap()).collect();
            let paths = words(paths).iter().map(|path| Pattern::new(path, PathQuirks::default()).unwrap()).collect();
            (ActionId::from_index(index), Matcher { methods, paths, hosts: words(hosts) })
        });
        Router::new(matchers, PathQuirks::default(), AmbiguousPaths::default())
    }

    #[test]
    fn the_first_in_file_order_wins() {
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
            ("POST", "x", "//x/../%6cogin/?a", &[0]),
            ("post", "x", "/login", &[6]),
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
            let indices =
                |found: Result<Actions, PathError>| found.unwrap().iter().map(ActionId::index).collect::<Vec<_>>();
            assert_eq!(indices(router.find(&query)), indexes, "{method} {host} {path}");
            assert_eq!(indices(find_slowly(&router, &query)), indexes, "{method} {host} {path}");
        }
        assert_eq!(router.find(&Query::default()), Ok(Actions::NONE));
    }

    #[test]
    fn ambiguous_paths_are_refused_where_the_policy_says_so() {
        let mut router =
            router(&[("", "/static/*", ""), ("", "/login", ""), ("", "/a", ""), ("", "/b", ""), ("", "/c", "")]);
        let find = |router: &Router, path| router.find(&Query { path: Some(path), ..Query::default() });
        let five = "/static/../a%2f../b%2f../c%2f../login";
        assert_eq!(find(&router, five).map(|actions| actions.is_several()), Ok(true));
        router.ambiguous = AmbiguousPaths::Refuse;
        for path in ["/static/../login", "/login;x", "/login//..", five] {
            assert_eq!(find(&router, path), Err(PathError::Ambiguous), "{path}");
        }
        for path in ["/static/a%20b", "/static/a;x/../b", "/login/", "/%6cogi", "/static/x%2fy"] {
            assert!(find(&router, path).is_ok(), "{path}");
        }
    }

    #[test]
    fn a_call_meets_as_many_actions_as_a_decision_can_be_about() {
        let router =
            router(&[("", "/a/*", ""), ("", "/b/*", ""), ("", "/c/*", ""), ("", "/d/*", ""), ("", "/e/*", "")]);
        let query = Query { path: Some("/a/../b/x%2f../../c/x\\../../d/x%5c../../e"), ..Query::default() };
        let mut actions = router.find(&query).unwrap();
        assert_eq!(actions.iter().count(), 5);
        for id in 5..MAX_ACTIONS as u16 {
            actions.add(ActionId(id)).unwrap();
        }
        assert_eq!(actions.add(ActionId(0)), Ok(()), "it is there already");
        assert_eq!(actions.add(ActionId(MAX_ACTIONS as u16)), Err(PathError::TooMany));
    }

    proptest! {
        #[test]
        fn agrees_with_asking_every_rule(
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
