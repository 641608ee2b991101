//! Tables for a terminal, charts as SVG and PNG, and pages, for everything in Tidegate that reports what it found.
#![forbid(unsafe_code)]

pub mod chart;
pub mod page;
pub mod svg;
pub mod table;
pub mod theme;
