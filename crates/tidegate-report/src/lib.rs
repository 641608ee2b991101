//! Tables for a terminal, charts as SVG and PNG, and pages, for everything in Tidegate that reports what it found.
#![forbid(unsafe_code)]

#[cfg(feature = "pictures")]
pub mod chart;
pub mod page;
#[cfg(feature = "pictures")]
pub mod svg;
pub mod table;
#[cfg(feature = "pictures")]
pub mod theme;
