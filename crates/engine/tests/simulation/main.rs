//! Simulation: whole stores driven from a seed, and judged by models.
//!
//! `VELLUM_SEED=N cargo test -p vellum --test simulation` replays one seed, `VELLUM_SEEDS=N` runs
//! the seeds 1 to N, `-- --ignored` runs the long version of every kind.
//!
//! What holds of every operation of a store, whatever its device does: it gives the right answer or
//! an error that names the cause; a change that failed has changed nothing; a file is taken for a
//! sound one only if it holds exactly what a completed sync left there.
#![allow(clippy::unwrap_used)]

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
mod support;
mod world;
