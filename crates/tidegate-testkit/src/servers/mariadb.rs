//! MariaDB, with durable commits as by default.

use std::process::Command;

use super::database::DatabaseServer;
use super::{ScratchDir, find_program, is_root, skip_test};

const READY_TEXT: &str = "ready for connections";

/// Starts a server with a database and a user with all rights to it. `None` if MariaDB isn't installed.
///
/// # Panics
/// If it doesn't start.
pub fn mariadb() -> Option<DatabaseServer> {
    let (Some(install), Some(server)) = (find_program("mariadb-install-db", &[]), find_program("mariadbd", &[])) else {
        skip_test("MariaDB (mariadb-install-db, mariadbd) not found");
        return None;
    };
    let user = is_root().then_some("--user=root");
    let data = ScratchDir::new();
    // A starting server deletes the temporary files of other servers in a shared directory, even if they are running.
    let temporary = format!("--tmpdir={}", data.path().display());
    let output = Command::new(install)
        .args(["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal", &temporary])
        .arg(format!("--datadir={}", data.path().join("data").display()))
        .args(user)
        .output()
        .expect("mariadb-install-db starts");
    assert!(output.status.success(), "mariadb-install-db: {}", String::from_utf8_lossy(&output.stderr));
    data.write(
        "init.sql",
        "CREATE DATABASE IF NOT EXISTS tidegate;\n\
         CREATE USER IF NOT EXISTS tidegate@'127.0.0.1' IDENTIFIED BY 'tide';\n\
         GRANT ALL ON tidegate.* TO tidegate@'127.0.0.1';\n",
    );
    let url = |port| format!("mysql://tidegate:tide@127.0.0.1:{port}/tidegate");
    Some(DatabaseServer::start(data, url, READY_TEXT, move |path, port| {
        let mut command = Command::new(&server);
        command.args(["--no-defaults", "--skip-name-resolve", "--skip-networking=0", "--bind-address=127.0.0.1"]);
        command.args(["--innodb-buffer-pool-size=64M", "--max-connections=200", "--skip-log-bin"]).args(user);
        let files = [("datadir", "data"), ("socket", "socket"), ("pid-file", "pid"), ("init-file", "init.sql")];
        command.args(files.map(|(option, file)| format!("--{option}={}", path.join(file).display())));
        command.arg(format!("--port={port}")).arg(&temporary);
        command
    }))
}
