//! Bounds on the language of comments and pages, plain for readers with English as a second language, and the links
//! between pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

mod sources;

/// Pronouns for people where a caller, a client or a value is meant.
const PRONOUNS: [&str; 5] = ["who", "whom", "whoever", "nobody", "somebody"];
const PRONOUNS_PER_MILLE: usize = 2;

/// Words that open a question rather than a description.
const QUESTIONS: [&str; 6] = ["What", "How", "Whether", "Who", "Whom", "When"];
const QUESTIONS_PER_CENT: usize = 5;

#[test]
fn comments_speak_of_callers_and_clients() {
    let mut lines = 0;
    let mut found = Vec::new();
    for file in sources::rust_files() {
        for (number, text) in comments(&read(&file)) {
            lines += 1;
            if has_pronoun(text) {
                found.push(format!("{}:{number}: {text}", file.display()));
            }
        }
    }
    for page in sources::pages() {
        for (number, text) in prose(&read(&page)) {
            lines += 1;
            if has_pronoun(text) {
                found.push(format!("{}:{number}: {text}", page.display()));
            }
        }
    }
    let most = lines * PRONOUNS_PER_MILLE / 1000;
    println!("{} of {lines} lines, at most {most}", found.len());
    assert!(found.len() <= most, "{} lines of {lines}, at most {most}:\n{}", found.len(), found.join("\n"));
}

#[test]
fn doc_comments_open_with_nouns_or_verbs() {
    let mut openings = 0;
    let mut found = Vec::new();
    for file in sources::rust_files() {
        for (number, text) in openings_of(&read(&file)) {
            openings += 1;
            if text.split(|c: char| !c.is_alphabetic()).next().is_some_and(|word| QUESTIONS.contains(&word)) {
                found.push(format!("{}:{number}: {text}", file.display()));
            }
        }
    }
    let most = openings * QUESTIONS_PER_CENT / 100;
    println!("{} of {openings} doc comments, at most {most}", found.len());
    assert!(found.len() <= most, "{} of {openings}, at most {most}:\n{}", found.len(), found.join("\n"));
}

#[test]
fn public_types_have_names_of_their_own() {
    let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in sources::rust_files() {
        if !file.components().any(|part| part.as_os_str() == "src") || file.starts_with(sources::root().join("bench")) {
            continue;
        }
        for (number, line) in (1..).zip(read(&file).lines()) {
            let kinds = ["pub struct ", "pub enum ", "pub trait ", "pub type ", "pub union "];
            if let Some(rest) = kinds.iter().find_map(|kind| line.strip_prefix(kind)) {
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                types.entry(name).or_default().push(format!("{}:{number}", file.display()));
            }
        }
    }
    let twice: Vec<String> = types
        .into_iter()
        .filter(|(_, places)| places.len() > 1)
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    assert!(twice.is_empty(), "one name for several types:\n{}", twice.join("\n"));
}

#[test]
fn relative_links_lead_to_headings_and_files() {
    let mut broken = Vec::new();
    for page in sources::pages() {
        let text = read(&page);
        for link in links(&text).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, heading) = link.split_once('#').map_or((link.as_str(), None), |(path, at)| (path, Some(at)));
            let target = if path.is_empty() { page.clone() } else { page.with_file_name("").join(path) };
            let leads = match heading {
                Some(heading) => target.is_file() && anchors(&read(&target)).iter().any(|anchor| anchor == heading),
                None => target.exists(),
            };
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn links_and_anchors_are_found() {
    assert_eq!(links("a [b](c.md) [d\ne](f.md#g)\n```\n[h](i)\n```\n"), ["c.md", "f.md#g"]);
    assert_eq!(anchors("# A `b`: c\ntext\n## D-e\n```\n# f\n```\n"), ["a-b-c", "d-e"]);
}

#[test]
fn pronouns_and_openings_are_found() {
    for text in ["the caller who waits", "Nobody else", "for whom it is"] {
        assert!(has_pronoun(text), "{text}");
    }
    for text in ["the whole", "a page about `who`", "it says \"who is there\" twice"] {
        assert!(!has_pronoun(text), "{text}");
    }
    let text = "/// What it is.\n/// Who else.\nfn a() {}\n\n    //! How.\nlet x = 1; // no comment of its own\n";
    assert_eq!(openings_of(text), [(1, "What it is."), (5, "How.")]);
    assert_eq!(comments(text).len(), 3);
    assert_eq!(prose("a\n\n```sh\nwho\n```\nb"), [(1, "a"), (6, "b")]);
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a file of the sources")
}

/// The lines that hold a comment and nothing else, with their numbers.
fn comments(text: &str) -> Vec<(usize, &str)> {
    let lines = (1..).zip(text.lines());
    lines
        .filter_map(|(number, line)| {
            Some((number, line.trim().strip_prefix("//")?.trim_start_matches(['/', '!']).trim()))
        })
        .collect()
}

/// The first line of each doc comment.
fn openings_of(text: &str) -> Vec<(usize, &str)> {
    let doc = |line: &str| line.trim().starts_with("///") || line.trim().starts_with("//!");
    let mut before = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if doc(line) && !before {
            found.push((number, line.trim()[3..].trim()));
        }
        before = doc(line);
    }
    found
}

/// The lines of a page outside its code.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut code = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code && !line.trim().is_empty() {
            found.push((number, line));
        }
    }
    found
}

/// The targets of a page's links.
fn links(text: &str) -> Vec<String> {
    let text: Vec<&str> = prose(text).into_iter().map(|(_, line)| line.trim()).collect();
    let text = text.join(" ");
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).collect()
}

/// The anchors of a page's headings, as GitHub forms them.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).into_iter().map(|(_, line)| line).filter(|line| line.starts_with('#'));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings
        .map(|heading| {
            heading
                .trim_start_matches('#')
                .trim()
                .to_lowercase()
                .chars()
                .filter(kept)
                .collect::<String>()
                .replace(' ', "-")
        })
        .collect()
}

fn has_pronoun(text: &str) -> bool {
    let mut quote = None;
    let unquoted: String = text
        .chars()
        .map(|c| match quote {
            Some(mark) => {
                if c == mark {
                    quote = None;
                }
                ' '
            }
            None if c == '"' || c == '`' => {
                quote = Some(c);
                ' '
            }
            None => c,
        })
        .collect();
    unquoted.split(|c: char| !c.is_alphabetic()).any(|word| PRONOUNS.contains(&word.to_lowercase().as_str()))
}
