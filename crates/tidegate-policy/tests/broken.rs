//! Broken policies, each of which must be told in words that a newcomer can act on. What is told is kept next to the
//! file; to accept a change after reading it, run the test with `UPDATE_EXPECT=1`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use tidegate_policy::{Policy, Sources};

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
    match Policy::load(Sources::new().file_bytes(name, fs::read(path).unwrap())) {
        Ok(_) => panic!("{name} isn't broken"),
        Err(errors) => format!("{errors}\n"),
    }
}

#[test]
fn broken_policies_are_told_so_that_a_newcomer_can_act() {
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
fn every_expectation_has_its_file() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        assert!(path.with_extension("toml").exists(), "{} stands alone", path.display());
    }
}

#[test]
fn no_secret_is_ever_told() {
    for path in broken_files() {
        assert!(!told(&path).contains("hunter2"), "{}", path.display());
    }
}
