//! MongoDB, or a stand-in for it.
//!
//! Without `mongod`, mongo-java-server runs instead, with its data in a file. Maven fetches one fixed version of it
//! once into the build's own directory. It speaks the protocol but has no transactions, no replica sets and no journal.
//! So tests use it as a single server, and it may lose its last second of writes when it is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use parking_lot::Mutex;

use super::database::DatabaseServer;
use super::{ScratchDir, find_program, print_line, skip_test};

const STAND_IN_VERSION: &str = "1.47.0";
const STAND_IN_SOURCE: &str = include_str!("mongo/StandIn.java");

/// Starts a server, and reports which one. `None` if there is none and none can be fetched.
///
/// # Panics
/// If it doesn't start.
pub fn mongo() -> Option<DatabaseServer> {
    if let Some(server) = find_program("mongod", &[]) {
        print_line("MongoDB: mongod, standing alone; transactions aren't shown");
        return Some(DatabaseServer::start(ScratchDir::new(), url, "Waiting for connections", move |data, port| {
            let mut command = Command::new(&server);
            command.args(["--bind_ip", "127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB", "0.25"]);
            command.arg("--dbpath").arg(data).args(["--port", &port.to_string()]);
            command
        }));
    }
    // The stand-in's few lines are compiled when it starts.
    let (Some(java), Some(_)) = (find_program("java", &[]), find_program("javac", &[])) else {
        skip_test("MongoDB (mongod, or java, javac and mvn for a stand-in) not found");
        return None;
    };
    let library = match fetch_stand_in() {
        Ok(library) => library,
        Err(why) => {
            skip_test(&format!("MongoDB's stand-in can't be had: {why}"));
            return None;
        }
    };
    print_line(&format!(
        "MongoDB: mongo-java-server {STAND_IN_VERSION} stands in; transactions and replica sets aren't shown"
    ));
    let data = ScratchDir::new();
    data.write("StandIn.java", STAND_IN_SOURCE);
    Some(DatabaseServer::start(data, url, "ready for connections", move |data, port| {
        let mut command = Command::new(&java);
        command.args(["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]).arg(library.join("*"));
        command.arg(data.join("StandIn.java")).arg(data.join("data.h2")).arg(port.to_string());
        command
    }))
}

fn url(port: u16) -> String {
    format!("mongodb://127.0.0.1:{port}/?directConnection=true")
}

/// Returns the directory with the stand-in's libraries.
fn fetch_stand_in() -> Result<PathBuf, String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock();
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp");
    let library = target.join(format!("mongo-java-server-{STAND_IN_VERSION}"));
    if library.is_dir() {
        return Ok(library);
    }
    let maven = find_program("mvn", &[]).ok_or("mvn not found")?;
    let scratch = ScratchDir::new();
    let dependency = |group: &str, artifact: &str, version: &str| {
        format!(
            "<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>\
             </dependency>"
        )
    };
    let pom = format!(
        "<project xmlns=\"http://maven.apache.org/POM/4.0.0\"><modelVersion>4.0.0</modelVersion>\
         <groupId>tidegate</groupId><artifactId>stand-in</artifactId><version>1</version><dependencies>{}{}\
         </dependencies></project>",
        dependency("de.bwaldvogel", "mongo-java-server-h2-backend", STAND_IN_VERSION),
        dependency("org.slf4j", "slf4j-nop", "2.0.17"),
    );
    scratch.write("pom.xml", &pom);
    // Renamed once it is complete, so that every process that finds it finds all of it.
    let part = target.join(format!("part-{}", std::process::id()));
    let output = Command::new(maven)
        .args(["-q", "-B", "dependency:copy-dependencies"])
        .arg(format!("-DoutputDirectory={}", part.display()))
        .current_dir(scratch.path())
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let _ = fs::remove_dir_all(&part);
        return Err(String::from_utf8_lossy(&output.stdout).lines().take(3).collect());
    }
    match fs::rename(&part, &library) {
        Err(error) if !library.is_dir() => Err(error.to_string()),
        _ => Ok(library),
    }
}
