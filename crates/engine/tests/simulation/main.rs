//! Simulation: random operations from a seed on whole stores, compared with models.
//!
//! `VELLUM_SEED=N cargo test -p vellum --test simulation` replays one seed, `VELLUM_SEEDS=N` runs
//! the seeds 1 to N, `-- --ignored` runs the long version of every kind.
//!
//! Every operation must behave as follows, whatever the device does: it returns the right answer,
//! or an error that names the cause. A change that fails has changed nothing. A file opens only if
//! it has exactly the state of a completed sync.
#![allow(clippy::unwrap_used)]

#[path = "../../../../fuzz/src/backups.rs"]
mod backups;
mod concurrent;
mod crash;
mod damage;
#[path = "../../../../fuzz/src/entry.rs"]
mod entry;
mod faults;
mod fuzz;
mod hostile;
mod linear;
mod power;
mod protocol;
mod single;
#[path = "../../../../fuzz/src/source.rs"]
#[allow(dead_code, reason = "the targets of logs use it, too")]
mod source;
mod support;
mod world;
