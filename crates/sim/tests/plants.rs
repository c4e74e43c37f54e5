//! Every planted bug is found within its bound, so the simulator is able to find such bugs.

use vellum_sim::{PLANTS, Plant, Settings, run};

/// Bugs that take more seeds than this are left to `cargo xtask soak`.
const FEW_SEEDS: u64 = 200;

fn find(plants: impl Iterator<Item = Plant>) {
    // Some bugs make the store panic.
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for plant in plants {
        let settings = Settings { workload: None, plant: Some(plant) };
        let found = (1..=plant.bound).find(|seed| run(*seed, &settings).is_err());
        match found {
            Some(seed) => println!("{}: seed {seed}", plant.name),
            None => missed.push(plant.name),
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn every_planted_bug_is_found() {
    find(PLANTS.iter().copied().filter(|plant| plant.bound <= FEW_SEEDS));
}

/// Those that need a rare crash.
#[test]
#[ignore = "minutes: it runs in `cargo xtask soak`"]
fn every_subtle_planted_bug_is_found() {
    find(PLANTS.iter().copied().filter(|plant| plant.bound > FEW_SEEDS));
}
