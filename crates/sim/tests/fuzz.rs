//! Runs the entry functions of the fuzz targets of logs and of recovery with inputs from seeds, so
//! that every test run exercises them.
#![allow(clippy::unwrap_used)]

#[path = "../../../fuzz/src/entry.rs"]
#[allow(dead_code, reason = "the other targets are run by the tests of the engine")]
mod entry;
#[path = "../../../fuzz/src/log.rs"]
mod log;
#[path = "../../../fuzz/src/source.rs"]
mod source;

use vellum_testing::random::Random;
use vellum_testing::rounds::{rounds, seed};

fn bytes(random: &mut Random, most: u64) -> Vec<u8> {
    (0..random.below(most)).map(|_| random.next() as u8).collect()
}

#[test]
fn any_bytes() {
    let first = seed(1);
    for seed in first..first + 300 * u64::from(rounds(70)) {
        println!("VELLUM_SEED={seed}");
        let random = &mut Random(seed);
        for _ in 0..4 {
            log::record_decoder(&bytes(random, 600));
        }
        log::log_reader(&bytes(random, 300));
        log::recovery(&bytes(random, 40));
    }
}
