//! `vellum bench`: hands over to the benchmarks, with the peers that were built in.

use vellum_bench::engine::Factory;
use vellum_experiments::command::Arguments;

use crate::error::{Failure, Outcome};

#[cfg(feature = "peers")]
const PEERS: &[Factory] = vellum_bench_peers::ALL;
#[cfg(not(feature = "peers"))]
const PEERS: &[Factory] = &[];

/// What this program does when the benchmarks start it as a worker.
pub fn work() -> Outcome {
    vellum_bench::worker::main(PEERS).map_err(|error| Failure::message(format!("{error:#}")))
}

pub fn run(arguments: &Arguments) -> Outcome {
    vellum_experiments::command::run(arguments, PEERS)
        .map_err(|error| Failure::message(format!("{error:#}")))
}
