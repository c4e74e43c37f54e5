//! How fast Vellum is, and beside what: workloads, the papers' experiments, comparisons, a report.
//!
//! An [`experiment`] is a name and a function that returns rows and charts. What it measures runs
//! alternately, A B A B, in one run ([`measure`]); every figure is a median with its spread.
//! Engines are compared behind one trait ([`engine`]), each in a process of its own under the same
//! memory limit ([`worker`], [`machine`]). Peers are adapters in a crate that is not built by
//! default; this crate knows only the trait.

pub mod command;
pub mod engine;
pub mod experiment;
pub mod machine;
pub mod measure;
pub mod report;
pub mod trace;
pub mod worker;
pub mod workload;
