//! PostgreSQL, with durable commits as by default.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::database::DatabaseServer;
use super::{ScratchDir, find_program, is_root, skip_test};

const READY_TEXT: &str = "database system is ready to accept connections";

/// Starts a server without a password. `None` if PostgreSQL isn't installed.
///
/// # Panics
/// If it doesn't start.
pub fn postgres() -> Option<DatabaseServer> {
    let (Some(initdb), Some(server)) = (find_newest_program("initdb"), find_newest_program("postgres")) else {
        skip_test("PostgreSQL (initdb, postgres) not found");
        return None;
    };
    let data = ScratchDir::new();
    give_to_unprivileged_user(data.path());
    let output = unprivileged_command(&initdb, data.path())
        .args(["--auth=trust", "--username=tidegate", "--encoding=UTF8", "--locale=C", "--no-sync", "-D"])
        .arg(data.path().join("data"))
        .output()
        .expect("initdb starts");
    assert!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
    let url = |port| format!("postgres://tidegate@127.0.0.1:{port}/postgres");
    Some(DatabaseServer::start(data, url, READY_TEXT, move |path, port| {
        let mut command = unprivileged_command(&server, path);
        command.arg("-D").arg(path.join("data")).arg("-k").arg(path).args(["-p", &port.to_string()]);
        for setting in ["listen_addresses=127.0.0.1", "max_connections=200", "shared_buffers=32MB", "jit=off"] {
            command.args(["-c", setting]);
        }
        command
    }))
}

/// Returns a program of the newest installed version. Debian keeps these programs in a directory of their own.
fn find_newest_program(name: &str) -> Option<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|version| Some((version.file_name().to_str()?.parse().ok()?, version.path().join("bin"))))
        .collect();
    versions.sort();
    let directories: Vec<_> = versions.into_iter().rev().map(|(_, directory)| directory).collect();
    find_program(name, &directories)
}

/// Returns a command that runs as an unprivileged user, because the server refuses to run as root.
fn unprivileged_command(program: &Path, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory);
    if let Some((user, group)) = unprivileged_user() {
        command.uid(user).gid(group);
    }
    command
}

fn give_to_unprivileged_user(path: &Path) {
    if let Some((user, group)) = unprivileged_user() {
        std::os::unix::fs::chown(path, Some(user), Some(group)).expect("root gives its directories away");
    }
}

/// Returns the user and group to use instead of root; `None` if this process isn't root's.
fn unprivileged_user() -> Option<(u32, u32)> {
    if !is_root() {
        return None;
    }
    let number = |flag: &str| {
        ["postgres", "nobody"].iter().find_map(|user| {
            let output = Command::new("id").args([flag, user]).output().ok()?;
            String::from_utf8(output.stdout).ok()?.trim().parse().ok()
        })
    };
    Some((number("-u")?, number("-g")?))
}
