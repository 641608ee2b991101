//! Packages of other languages, for tests that run them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns a folder of packages that outlives the test: they are installed once for each list of them and each version
/// of their program. `folders` has all such folders (`CARGO_TARGET_TMPDIR`); `name` names this one. `None` if `install`
/// fails, which is then tried again by the next test.
///
/// # Panics
/// If the list or the folder can't be used.
pub fn installed_packages(
    folders: &Path,
    name: &str,
    list: &Path,
    program: &Path,
    install: impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let version = Command::new(program).arg("--version").output().expect("a program that tells its version");
    let text = fs::read_to_string(list).expect("a list of packages") + &String::from_utf8_lossy(&version.stdout);
    // Several test runs may share the folder.
    let lock = File::create(folders.join(format!("{name}.lock"))).expect("a file for the lock");
    lock.lock().expect("a lock");
    let folder = folders.join(name);
    let done = folder.join("installed");
    if fs::read_to_string(&done).is_ok_and(|found| found == text) {
        return Some(folder);
    }
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for the packages");
    if !install(&folder) {
        return None;
    }
    fs::write(done, text).expect("a file for the list");
    Some(folder)
}
