//! Schedules of the model checks.
#![allow(dead_code)]

use std::sync::Arc;

/// Runs a scenario under random schedules, and under ones with few, well-placed preemptions (PCT).
pub(crate) fn check(scenario: impl Fn() + Send + Sync + 'static) {
    check_with(3, scenario);
}

/// The same, with up to `depth - 1` preemptions in each schedule of the second kind.
pub(crate) fn check_with(depth: usize, scenario: impl Fn() + Send + Sync + 'static) {
    let schedules = std::env::var("VELLUM_MODEL_SCHEDULES").ok().and_then(|n| n.parse().ok());
    let schedules = schedules.unwrap_or(1_000);
    let scenario = Arc::new(scenario);
    let (random, pct) = (scenario.clone(), scenario);
    shuttle::check_random(move || random(), schedules);
    shuttle::check_pct(move || pct(), schedules, depth);
}
