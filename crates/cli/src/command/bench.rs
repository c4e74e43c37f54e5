//! `vellum bench`: runs the benchmarks, with the peers that this program was built with.

use vellum_bench::engine::Factory;
use vellum_experiments::command::Arguments;

use crate::error::{Failure, Outcome};

#[cfg(feature = "peers")]
const PEERS: &[Factory] = vellum_bench_peers::ALL;
#[cfg(not(feature = "peers"))]
const PEERS: &[Factory] = &[];

/// Runs this program as a worker of the benchmarks.
pub fn work() -> Outcome {
    vellum_bench::worker::main(PEERS).map_err(|error| Failure::message(format!("{error:#}")))
}

pub fn run(arguments: &Arguments) -> Outcome {
    vellum_experiments::command::run(arguments, PEERS)
        .map_err(|error| Failure::message(format!("{error:#}")))
}
