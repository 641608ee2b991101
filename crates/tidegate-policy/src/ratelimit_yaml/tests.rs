mod files;
#[cfg(feature = "limitador")]
mod limitador;
mod lookups;
mod policies;

use super::RatelimitConfig;

/// Reads one file. An error is its message in one line.
pub(super) fn read(yaml: &str) -> Result<RatelimitConfig, String> {
    RatelimitConfig::read([("limits.yaml", yaml)], false).map_err(|errors| {
        let lines = errors.iter().map(|error| format!("{}: {}", error.location(), error.message()));
        lines.collect::<Vec<_>>().join("\n")
    })
}
