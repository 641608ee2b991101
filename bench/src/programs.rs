//! Programs that the benchmark starts: their places, and the way to build them.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The error of a program that could not be run.
#[derive(Clone, Debug)]
pub struct ProgramError {
    program: String,
    reason: String,
}

impl ProgramError {
    /// Creates the error of `program` for this reason.
    pub fn new(program: impl Into<String>, reason: impl Display) -> Self {
        Self { program: program.into(), reason: reason.to_string() }
    }
}

impl Display for ProgramError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.program, self.reason)
    }
}

impl std::error::Error for ProgramError {}

/// Returns the folder of this benchmark's manifest.
fn manifest_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the path of a program of this package, and builds it first, because `cargo run` builds only the program that
/// it runs.
///
/// # Errors
///
/// If cargo can't build it.
pub fn bench_program(name: &'static str) -> Result<PathBuf, ProgramError> {
    static BUILT: OnceLock<Result<Vec<PathBuf>, ProgramError>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&manifest_folder().join("Cargo.toml"), &["--bins"]));
    find_program(name, built.as_ref().map_err(Clone::clone)?)
}

/// Returns the path of the program `tidegate`, and builds it as a release first.
///
/// # Errors
///
/// If cargo can't build it.
pub fn tidegate_program() -> Result<PathBuf, ProgramError> {
    static BUILT: OnceLock<Result<Vec<PathBuf>, ProgramError>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let manifest = manifest_folder().join("../Cargo.toml");
        build(&manifest, &["--package", "tidegate-cli", "--features", "full", "--bins"])
    });
    find_program("tidegate", built.as_ref().map_err(Clone::clone)?)
}

/// Returns the path of a program of the system by its name, in `PATH` or in Debian's directory for servers.
///
/// # Errors
///
/// If it isn't installed.
pub fn system_program(name: &'static str) -> Result<PathBuf, ProgramError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| ProgramError::new(name, "is not installed"))
}

fn build(manifest: &Path, what: &[&str]) -> Result<Vec<PathBuf>, ProgramError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--release", "--message-format=json", "--manifest-path"])
        .arg(manifest)
        .args(what)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| ProgramError::new("cargo", error))?;
    if !output.status.success() {
        return Err(ProgramError::new("cargo", format!("cannot build {}", manifest.display())));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let executable = |line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        Some(PathBuf::from(message.get("executable")?.as_str()?))
    };
    Ok(messages.lines().filter_map(executable).collect())
}

fn find_program(name: &str, programs: &[PathBuf]) -> Result<PathBuf, ProgramError> {
    programs
        .iter()
        .find(|program| program.file_stem().is_some_and(|stem| stem == name))
        .cloned()
        .ok_or_else(|| ProgramError::new(name, "cargo built no such program"))
}
