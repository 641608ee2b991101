//! Broken policies, each with errors that tell a newcomer what to do. The expected errors are in a file next to the
//! policy. To accept a change after reading it, run the test with `UPDATE_EXPECT=1`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use tidegate_policy::{Policy, PolicySources};

fn broken_files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    files
}

fn told(path: &Path) -> String {
    let name = path.file_name().unwrap().to_str().unwrap();
    match Policy::load(PolicySources::new().file_bytes(name, fs::read(path).unwrap())) {
        Ok(_) => panic!("{name} isn't broken"),
        Err(errors) => format!("{errors}\n"),
    }
}

#[test]
fn broken_policies_give_the_expected_messages() {
    let mut differ = Vec::new();
    let files = broken_files();
    assert!(files.len() >= 20, "only {} files", files.len());
    for path in files {
        let found = told(&path);
        let expected_path = path.with_extension("txt");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&expected_path, &found).unwrap();
        }
        let expected = fs::read_to_string(&expected_path).unwrap_or_default();
        if found != expected {
            differ.push(format!("{}\n--- expected\n{expected}--- found\n{found}", path.display()));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn every_expected_message_has_its_policy() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        assert!(path.with_extension("toml").exists(), "{} stands alone", path.display());
    }
}

#[test]
fn error_messages_contain_no_secret() {
    for path in broken_files() {
        assert!(!told(&path).contains("hunter2"), "{}", path.display());
    }
}

/// Returns true for characters that control a terminal or mislead a reader.
fn steers(letter: char) -> bool {
    letter.is_control() && letter != '\n' && letter != '\t'
        || matches!(letter, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[test]
fn error_messages_contain_no_control_characters() {
    let mut helped = 0;
    for path in broken_files() {
        let name = format!("{}\u{1b}[2J\u{202e}", path.file_name().unwrap().to_str().unwrap());
        let Ok(whole) = fs::read_to_string(&path) else { continue };
        let planted = ["\u{202e}", "\\u001b[2J\\u202e", "\\n\\u009b"].iter().cycle();
        for ((at, _), planted) in whole.char_indices().zip(planted) {
            let (before, after) = whole.split_at(at);
            let text = [before, planted, after].concat();
            let Err(errors) = Policy::load(PolicySources::new().file(&name, &text)) else { continue };
            let told = errors.to_string();
            assert!(!told.contains(steers), "{at} of {}: {told:?}", path.display());
            for error in errors.iter() {
                let parts = [error.message(), error.expected()];
                for part in parts.into_iter().chain(error.help_texts().iter().map(String::as_str)) {
                    assert!(!part.contains(steers) && !part.contains('\n'), "{at} of {}: {part:?}", path.display());
                }
                helped += usize::from(error.help_texts().iter().any(|help| help.contains('\u{fffd}')));
            }
        }
    }
    assert!(helped > 0, "no help repeated what was planted");
}
