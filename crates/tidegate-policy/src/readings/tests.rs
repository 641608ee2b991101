use super::*;
use proptest::prelude::*;

fn readings(path: &str, quirks: PathQuirks) -> Vec<String> {
    let mut found = Vec::new();
    let seen = each_reading(path, quirks, WorkBudget(usize::MAX), &mut |path| {
        let path = String::from_utf8_lossy(path).into_owned();
        if !found.contains(&path) {
            found.push(path);
        }
        Ok(())
    });
    assert_eq!(seen, Ok(()), "{path}");
    found
}

#[test]
fn every_reading_of_a_path_is_found() {
    for (path, expected) in [
        ("/login", &["/login"][..]),
        ("/login/", &["/login"]),
        ("/a%20b", &["/a b", "/a%20b"]),
        ("/api/../x", &["/api/../x", "/x"]),
        ("/login//..", &["/login", "/", "/login/.."]),
        ("/login;v=1", &["/login", "/login;v=1"]),
        ("/static%2fx/../login", &["/login", "/static/login"]),
        ("/api%2f%2e%2e;", &["/", "/api/..", "/api/..;"]),
        ("/%256Cogin", &["/login", "/%256Cogin"]),
        ("/x/%252e%252e/login", &["/login", "/x/../login"]),
        ("//x/login", &["/x/login", "/login"]),
        ("/%2Fx/login", &["/x/login", "/login"]),
        ("/%5cx/login", &["/x/login", "/login"]),
        ("/;/x/login", &["/x/login", "/login"]),
        ("/%252fx/login", &["/x/login", "/login"]),
        ("/a/..//x/login", &["/x/login", "/login"]),
        ("/%2Fx", &["/x", "/"]),
        ("/\\x/login", &["/x/login", "/login"]),
        ("/x#/../login", &["/x", "/login"]),
        ("/login%3Fx", &["/login?x"]),
        ("/login%253Fx", &["/login", "/login?x"]),
        ("/a%5cb%2f..%2flogin", &["/login", "/a/login", "/a\\b/../login"]),
        ("/a%2fb\\..\\login", &["/login", "/a/login"]),
        ("/y/../api/%2e%2e/x", &["/x", "/api/../x", "/y/../api/../x"]),
        ("/login;z/a/..;/../..", &["/login", "/"]),
        ("/log%FFin", &["/login", "/log%FFin"]),
        ("/lo%c3g%25e2%2580in/%ff", &["/login"]),
        // One server merges plain slashes, and the next decodes the other and keeps the empty segment.
        ("/a//%2fb", &["/a/b", "/a//b", "/a///b"]),
    ] {
        let found = readings(path, PathQuirks::default());
        for reading in expected {
            assert!(found.iter().any(|one| one == reading), "{path}: no {reading} among {found:?}");
        }
    }
    assert_eq!(readings("/login", PathQuirks::default()), ["/login"]);
    assert_eq!(readings("/a/.well/x.css", PathQuirks::default()), ["/a/.well/x.css"]);
}

/// The decision API gets paths as callers have them, perhaps decoded already.
#[test]
fn unescaped_spaces_are_read_like_escaped_ones() {
    for path in ["/login%20", "/login ", "/login%09", "/login\t", "/lo\tgin", "/login \n", "/x/../login "] {
        let found = readings(path, PathQuirks::default());
        assert!(found.contains(&"/login".to_owned()), "{path:?}: {found:?}");
        assert!(!crate::path::NormalisedPath::new(path, PathQuirks::default()).is_borrowed(), "{path:?} looks plain");
    }
}

#[test]
fn without_the_quirk_encoded_slashes_are_data() {
    assert_eq!(readings("/a%2Fb", PathQuirks::NONE), ["/a%2Fb"]);
    assert!(!readings("/x%2f..%2flogin", PathQuirks::NONE).contains(&"/login".to_owned()));
}

#[test]
fn caddy_and_windows_suffixes_give_two_readings() {
    let caddy = PathQuirks { caddy: true, case: true, ..PathQuirks::default() };
    let windows = PathQuirks { windows: true, case: true, ..PathQuirks::default() };
    for path in ["/LOGIN", "/login.", "/login%20", "/Login%2e", "/login.%20.", "/lOg%C4%B0n", "/x/../login. ."] {
        for quirks in [caddy, windows] {
            assert!(readings(path, quirks).contains(&"/login".to_owned()), "{path} {:?}", readings(path, quirks));
        }
    }
    assert!(readings("/api./x", windows).contains(&"/api/x".to_owned()));
    assert!(readings("/api. ;v/x", windows).contains(&"/api/x".to_owned()));
    assert!(!readings("/api./x", caddy).contains(&"/api/x".to_owned()));
    assert!(readings("/login/..", caddy).contains(&"/login".to_owned()), "{:?}", readings("/login/..", caddy));
    assert!(readings("/\u{212A}ey", caddy).contains(&"/key".to_owned()));
}

#[test]
fn spellings_of_one_path_share_a_key() {
    let quirks = PathQuirks::default();
    for spelling in [
        "/api/x/",
        "/api//x",
        "/api/./x",
        "/api/%78",
        "/api/%2578",
        "/api/y/../x",
        "/api/x;v=1",
        "/api/y%2f../x",
        "/api/a/..//../x",
        "/api/y/%2e%2e/x",
        "//api/x",
        "/api%2fx",
        "/api\\x",
        "/a%2fb/../api/x",
        "/a%ffpi%c3/x",
    ] {
        let found = path_keys(spelling, quirks).unwrap();
        assert!(found.iter().any(|key| key == b"/api/x"), "{spelling}: {found:?}");
    }
    assert_eq!(path_keys("/api/a%20b?q=1", quirks).unwrap().as_slice(), [b"/api/a b"]);
    let many = "/a%2fb/../c\\d/../e%5cf/../h";
    assert_eq!(path_keys(many, quirks), Err(PathError::TooMany));
}

#[test]
fn the_readings_of_a_path_are_bounded() {
    let path = "/a%2f..;x//%252e%5c\\".repeat(3000);
    assert_eq!(each_reading(&path, PathQuirks::default(), matching(false), &mut |_| Ok(())), Err(PathError::TooMany));
    assert_eq!(each_reading(&"/a%20b".repeat(5000), PathQuirks::default(), matching(false), &mut |_| Ok(())), Ok(()));
    let lines = format!("/b{}", "%0a/c/..".repeat(4000));
    assert_eq!(each_reading(&lines, PathQuirks::default(), matching(false), &mut |_| Ok(())), Err(PathError::TooMany));
    for escapes in ["%u00e9".repeat(1300), "%25u00e9".repeat(1000)] {
        let read = each_reading(&format!("/{escapes}"), PathQuirks::default(), matching(false), &mut |_| Ok(()));
        assert_eq!(read, Err(PathError::TooMany), "{}", escapes.len());
    }
    let mut seen = 0;
    let count = &mut |_: &[u8]| {
        seen += 1;
        Ok(())
    };
    assert_eq!(each_reading(&"/%0a%2f".repeat(80), PathQuirks::default(), matching(false), count), Ok(()));
    assert!(seen < 100, "{seen}: the ends of lines are cut together");
    // Each piece that clients may send is accepted at the length of a long path.
    for piece in [
        "/a%2fb",
        "/a%252fb",
        "/a;v=1",
        "/a//b",
        "/a/../b",
        "/a%3bb",
        "/a%20;b",
        "/%u00e9",
        "/%25u00e9",
        "/a\\b",
        "/a%0a",
    ] {
        let length = if piece.contains("0;b") { 100 } else { 500 };
        let path = piece.repeat(length / piece.len());
        assert_eq!(each_reading(&path, PathQuirks::default(), matching(false), &mut |_| Ok(())), Ok(()), "{piece}");
    }
}

/// Image proxies get signed URLs as one segment of their paths.
#[test]
fn signed_urls_in_paths_are_read() {
    let escaped = |url: &str| {
        let escape = |byte: u8| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        };
        url.bytes().map(escape).collect::<String>()
    };
    let google = "https://storage.googleapis.com/photos/2024/IMG%200001.jpg?X-Goog-Algorithm=GOOG4-RSA-SHA256&\
        X-Goog-Credential=svc%40project.iam.gserviceaccount.com%2F20240101%2Fauto%2Fstorage%2Fgoog4_request&\
        X-Goog-Date=20240101T000000Z&X-Goog-Expires=3600&X-Goog-SignedHeaders=host&X-Goog-Signature="
        .to_owned()
        + &"0f".repeat(256);
    let amazon = "https://photos.s3.eu-west-1.amazonaws.com/a.jpg?X-Amz-Algorithm=AWS4-HMAC-SHA256&\
        X-Amz-Credential=ASIA%2F20240101%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Date=20240101T000000Z&\
        X-Amz-Expires=3600&X-Amz-Security-Token=IQoJb3JpZ2luX2VjEJv%2F%2F%2F%2F%2F%2F%2F%2F%2F%2FwEa"
        .to_owned()
        + &"JMEYCIQC9x7Rn2tQbVz0kLw3hYp5%2BDqUe8sGfAoZ1i6mNcXvTjh%2F".repeat(15)
        + "%3D%3D&X-Amz-Signature="
        + &"0f".repeat(32)
        + "&X-Amz-SignedHeaders=host&x-id=GetObject";
    let token = "IQoJb3JpZ2luX2VjEHMaCmV1LXdlc3QtMSJGMEQCIBx".repeat(9);
    let attachment = "https://my-bucket.s3.eu-west-1.amazonaws.com/reports/2026/11/Bericht%20M%C3%A4rz%202026%20%28final%29.pdf?\
        response-content-disposition=attachment%3B+filename%3D%22Bericht+M%C3%A4rz.pdf%22%3B+filename%2A%3DUTF-8%27%27Bericht%2520M%25C3%25A4rz.pdf&\
        X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=ASIA%2F20261130%2Feu-west-1%2Fs3%2Faws4_request&\
        X-Amz-Date=20261130T221400Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Security-Token="
        .to_owned()
        + &token
        + "%3D%3D&X-Amz-Signature="
        + &"0f".repeat(32);
    let cyrillic = "Отчёт (2024)+план & смета=1, версия;2 @дом: да! 'x'/".repeat(4);
    let windows = PathQuirks { case: true, windows: true, ..PathQuirks::default() };
    for (text, quirks) in
        [(google, windows), (amazon, windows), (attachment, PathQuirks::default()), (cyrillic, windows)]
    {
        for path in [format!("/unsafe/300x200/{}", escaped(&text)), format!("/fetch/{}", escaped(&escaped(&text)))] {
            for quirks in [PathQuirks::default(), quirks] {
                let read = each_reading(&path, quirks, matching(true), &mut |_| Ok(()));
                assert_eq!((read, path_keys(&path, quirks).err()), (Ok(()), None), "{} bytes: {path}", path.len());
            }
        }
    }
}

#[test]
fn plain_escapes_have_two_readings_at_any_length() {
    let path = format!("/wiki/{}.html", "%D0%9C%20x".repeat(800));
    assert_eq!(readings(&path, PathQuirks::default()).len(), 2);
    assert_eq!(path_keys(&path, PathQuirks::default()).unwrap().len(), 1);
    let case = PathQuirks { case: true, ..PathQuirks::default() };
    assert_eq!(path_keys(&path[..9 * 200 + 6], case).unwrap()[0][..8], *"/wiki/м".as_bytes());
    assert_eq!(path_keys(&format!("/{}", "%C3%89".repeat(9000)), case), Err(PathError::TooMany));
}

/// The fast way for plain escapes finds what the full search finds.
#[test]
fn plain_escapes_are_read_as_by_the_full_search() {
    const PIECES: [&str; 17] = [
        "/",
        "a",
        "%61",
        "%20",
        "%41",
        "%D0%B0",
        "%2e",
        ".",
        "%0a",
        "%e2%80%a8",
        "%25",
        "-",
        "%2d",
        "B",
        " ",
        "%C4%B0",
        "%FF",
    ];
    let mut found = 0;
    for number in 0..PIECES.len().pow(4) {
        let piece = |place: u32| PIECES[number / PIECES.len().pow(place) % PIECES.len()];
        let path = format!("/{}{}{}{}", piece(3), piece(2), piece(1), piece(0));
        let case = PathQuirks { case: true, ..PathQuirks::default() };
        for quirks in [PathQuirks::default(), case, PathQuirks { windows: true, ..case }, PathQuirks::NONE] {
            let budget = &mut WorkBudget(usize::MAX);
            let Ok(Some(fast)) = readings_of_plain_escapes(path.as_bytes(), quirks, budget) else { continue };
            found += 1;
            let mut slow = HashSet::new();
            let visit: ReadingCallback<'_> = &mut |path| {
                slow.insert(path.to_vec());
                Ok(())
            };
            let mut visitor = ReadingVisitor {
                quirks,
                budget: WorkBudget(usize::MAX),
                makes_keys: false,
                seen: HashSet::new(),
                visit,
            };
            assert_eq!(visitor.visit_text(&PathText::new(path.as_bytes().to_vec())), Ok(()));
            assert_eq!(HashSet::from_iter(fast), slow, "{path} {quirks:?}");
        }
    }
    assert!(found > 1000, "{found}");
}

/// The pieces of the generated spellings.
const PIECES: [&str; 26] = [
    "/", "//", "/.", "/..", "%2f", "%2e", "%252e", "%252f", "\\", "%5c", ";", ";x", "%3b", "#", "%3f", ".", " ",
    "%253b", "%0a", "%u002f", "%ff", "a", "b", "%61", "A", "/b",
];

proptest! {
    #[test]
    fn the_normal_form_is_one_of_the_readings(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..8),
        slash: bool, parameters: bool, case: bool, caddy: bool, windows: bool,
    ) {
        let path = format!("/{}", pieces.concat());
        let quirks = PathQuirks { encoded_slash: slash, parameters, case, caddy, windows };
        let normal = crate::path::NormalisedPath::new(&path, quirks).as_bytes().to_vec();
        prop_assert!(readings(&path, quirks).contains(&String::from_utf8_lossy(&normal).into_owned()), "{}", path);
    }

    /// If one spelling is a reading of another, the two share a key.
    #[test]
    fn a_path_shares_keys_with_its_readings(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..7), slash: bool,
    ) {
        let path = format!("/{}", pieces.concat());
        let quirks = PathQuirks { encoded_slash: slash, ..PathQuirks::NONE };
        let Ok(own) = path_keys(&path, quirks) else { return Ok(()) };
        for reading in readings(&path, quirks) {
            // Encoded so that it reads back unchanged.
            let spelled = percent_encode(&PathText::new(reading.clone().into_bytes())).replace(';', "%3B");
            if reading.contains(['?', '#', '\\', '%', '\u{fffd}']) {
                continue;
            }
            if let Ok(others) = path_keys(&spelled, quirks) {
                prop_assert!(own.iter().any(|key| others.contains(key)), "{path} {own:?}, {spelled} {others:?}");
            }
        }
    }

    #[test]
    fn forwarded_paths_are_in_canonical_form(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..9)) {
        let path = format!("/{}?a=%2e%2f//..", pieces.concat());
        let form = crate::path_encoding::forwarded_path(&path).unwrap_or(path);
        prop_assert!(form.ends_with("?a=%2e%2f//..") || form.ends_with('/') || !form.contains('?'), "{}", form);
        prop_assert_eq!(crate::path_encoding::forwarded_path(&form), None, "{}", form);
        let path = form.split('?').next().unwrap_or_default();
        let has = |segment: &str| path.split('/').any(|one| one == segment);
        prop_assert!(!has(".") && !has("..") && !path.contains("//") && !path.contains('\\'), "{}", path);
    }
}
