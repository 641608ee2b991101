//! Packages of other languages, for tests that run them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{require_program, skip_test};

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

/// Returns the folder of a Python environment that has the packages of this list. `None`, with a report, if there is no
/// Python, or they can't be installed here.
///
/// # Panics
/// If the list or the folder can't be used.
pub fn python_environment(folders: &Path, name: &str, list: &Path) -> Option<PathBuf> {
    let python = require_program("python3")?;
    let succeeds = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let folder = installed_packages(folders, name, list, &python, |folder| {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
        succeeds(Command::new(&python).args(["-m", "venv"]).arg(folder))
            && succeeds(Command::new(folder.join("bin/python")).args(pip).arg(list))
    });
    if folder.is_none() {
        skip_test(&format!("pip can't install the packages of {}", list.display()));
    }
    folder
}
