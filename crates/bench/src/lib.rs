//! A harness that compares storage engines: workloads, engines, memory limits, figures, a report.
//!
//! Engines are compared through one trait ([`engine`]), each in a process of its own under the same
//! memory limit ([`worker`], [`machine`]). Contestants run alternately, A B A B, in one run
//! ([`measure`]); every figure is a median with its spread, and goes into a [`report`]. The
//! experiments that use the harness are in `vellum-experiments`, other engines in
//! `vellum-bench-peers`, which is not built by default.

pub mod engine;
pub mod machine;
pub mod measure;
pub mod progress;
pub mod report;
pub mod worker;
pub mod workload;
