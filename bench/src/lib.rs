//! Tidegate's benchmark. `README.md` beside it says what each module measures, and how the comparison stays fair.

pub mod bare;
pub mod dearest;
pub mod decision;
pub mod gate;
pub mod grpc;
pub mod keys;
pub mod lanes;
pub mod measure;
pub mod memory_use;
pub mod options;
pub mod outbound;
pub mod programs;
pub mod rows;
pub mod simulate;
pub mod stores;
pub mod subjects;
pub mod targets;
pub mod work;
