use super::*;
use proptest::prelude::*;

const PLAIN: PathQuirks = PathQuirks::NONE;

fn normal(path: &str, quirks: PathQuirks) -> String {
    String::from_utf8_lossy(NormalisedPath::new(path, quirks).as_bytes()).into_owned()
}

#[test]
fn equivalent_paths_have_one_normal_form() {
    for spelling in [
        "/login",
        "/login/",
        "//login",
        "/./login",
        "/x/../login",
        "/%6Cogin",
        "/%6c%6F%67%69%6e",
        "/login?next=/",
        "/login#top",
        "/../../login",
        "/login/.",
        "/login/x/..",
        "/%2e/login",
        "/x/%2E%2e/login",
        "/login//",
        "/login/%2e",
        "login",
        "///x//..//login///",
    ] {
        assert_eq!(normal(spelling, PLAIN), "/login", "{spelling}");
    }
}

#[test]
fn different_paths_stay_different() {
    for (path, expected) in [
        ("/", "/"),
        ("", "/"),
        ("//", "/"),
        ("/..", "/"),
        ("*", "*"),
        ("/a/b", "/a/b"),
        ("/a%2fb", "/a%2Fb"),
        ("/a%252Fb", "/a%252Fb"),
        ("/100%", "/100%"),
        ("/%zz", "/%zz"),
        ("/a;b=c/d", "/a;b=c/d"),
        ("/A", "/A"),
        ("/a\\b", "/a\\b"),
        ("/.well-known/x", "/.well-known/x"),
        ("/...", "/..."),
        ("/..a/b", "/..a/b"),
        ("/caf%C3%A9", "/café"),
    ] {
        assert_eq!(normal(path, PLAIN), expected, "{path}");
    }
}

#[test]
fn an_encoded_slash_separates_by_default() {
    for spelling in ["/%2flogin", "/x%2f..%2flogin", "/%2Flogin%2F", "/x/..%5clogin", "/\\login", "/%2f%2e%2flogin"] {
        assert_eq!(normal(spelling, PathQuirks::default()), "/login", "{spelling}");
        assert_ne!(normal(spelling, PLAIN), "/login", "{spelling}");
    }
}

#[test]
fn quirks_normalise_further_spellings() {
    let slashes = PathQuirks { encoded_slash: true, ..PLAIN };
    assert_eq!(normal("/x%2F..%2flogin", slashes), "/login");
    assert_eq!(normal("/x\\..%5Clogin", slashes), "/login");
    let parameters = PathQuirks { parameters: true, ..PLAIN };
    assert_eq!(normal("/x/..;v=1/login;jsessionid=3", parameters), "/login");
    assert_eq!(normal("/a%3Bb", parameters), "/a;b");
    let both = PathQuirks { encoded_slash: true, parameters: true, ..PLAIN };
    assert_eq!(normal("/x;%2F..%2Flogin", both), "/login");
    let case = PathQuirks { case: true, ..PLAIN };
    assert_eq!(normal("/LogIn", case), "/login");
    assert_eq!(normal("/%4Cogin", case), "/login");
}

proptest! {
    #[test]
    fn the_normal_form_is_stable(path in "[/.%;a-zA-Z25eEfF\\\\?]{0,300}", slash: bool, parameters: bool, case: bool) {
        let quirks = PathQuirks { encoded_slash: slash, parameters, case, ..PLAIN };
        let once = NormalisedPath::new(&path, quirks).as_bytes().to_vec();
        prop_assert!(once == b"*" || once[0] == b'/');
        // A decoded `;`, `?`, `#` or `\` is data, and would be read differently the second time.
        if let Ok(text) = String::from_utf8(once.clone())
            && !text.contains([';', '?', '#', '\\', '%'])
        {
            let twice = NormalisedPath::new(&text, quirks).as_bytes().to_vec();
            prop_assert_eq!(once, twice);
        }
    }

    #[test]
    fn normalising_any_path_never_panics(path in "\\PC*") {
        NormalisedPath::new(&path, PathQuirks { encoded_slash: true, parameters: true, case: true, caddy: true, windows: true });
    }
}
