//! The files of this repository, for tests that read them.

use std::fs;
use std::path::{Path, PathBuf};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every Rust file of the product, its tests, examples, fuzz targets and benchmarks.
pub(crate) fn rust_files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in ["bench/src", "examples", "fuzz/src", "fuzz/fuzz_targets"] {
        collect(&root().join(folder), "rs", &mut files);
    }
    for package in entries(&root().join("crates")) {
        for folder in ["src", "tests", "examples"].map(|folder| package.join(folder)) {
            if folder.is_dir() {
                collect(&folder, "rs", &mut files);
            }
        }
    }
    assert!(files.len() > 200, "only {} files found", files.len());
    files
}

/// Every page of documentation.
#[allow(dead_code, reason = "each test program takes what it needs")]
pub(crate) fn pages() -> Vec<PathBuf> {
    let mut pages = entries(&root());
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    collect(&root().join("docs"), "md", &mut pages);
    let folders = ["bench", "examples", "fuzz"].map(|folder| root().join(folder));
    let readmes = folders.into_iter().chain(entries(&root().join("crates"))).map(|folder| folder.join("README.md"));
    pages.extend(readmes.filter(|page| page.is_file()));
    assert!(pages.len() > 10, "only {} pages found", pages.len());
    pages
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the sources");
    entries.map(|entry| entry.expect("an entry of it").path()).collect()
}

fn collect(folder: &Path, extension: &str, files: &mut Vec<PathBuf>) {
    for path in entries(folder) {
        if path.is_dir() {
            collect(&path, extension, files);
        } else if path.extension().is_some_and(|its| its == extension) {
            files.push(path);
        }
    }
}
