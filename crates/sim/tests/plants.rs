//! Every planted bug is found by some seed, so the simulator is able to find such bugs.

use vellum_sim::{PLANTS, SEEDS, Settings, run};

/// The seed that a bug names is tried first. If it does not find the bug, the test takes minutes,
/// and says which one does.
#[test]
fn every_planted_bug_is_found() {
    // Some bugs make the store panic.
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for plant in PLANTS {
        let settings = Settings { workload: None, plant: Some(*plant) };
        let mut seeds = [plant.seed].into_iter().chain(1..=SEEDS);
        match seeds.find(|seed| run(*seed, &settings).is_err()) {
            Some(seed) if seed == plant.seed => {}
            Some(seed) => println!("{}: seed {seed} finds it, {} does not", plant.name, plant.seed),
            None => missed.push(plant.name),
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not found: {missed:?}");
}
