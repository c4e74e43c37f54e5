//! One thread and a device without faults: every answer equals the model's.

use std::sync::Arc;

use vellum_pool::device::MemoryDevice;

use crate::support::{Random, each_seed, options};
use crate::world::{World, assert_same};

fn run(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let page_frames = 1 + random.below(4) as u32;
    let pool_pages = [8, 9, 16, 64][random.index(4)];
    let device = Arc::new(MemoryDevice::new());
    let mut world = World::new(device, &options(pool_pages, page_frames), &mut random);
    for _ in 0..steps {
        world.step(&mut random);
    }
    // Pages that a reader held when they were freed become free only at a later call.
    world.sync();
    assert_same(&world.store, &world.model);
    world.reopen();
    assert_same(&world.store, &world.model);
}

#[test]
fn every_answer_is_the_models() {
    each_seed(24, |seed| run(seed, 500));
}

#[test]
#[ignore = "long"]
fn every_answer_is_the_models_for_long() {
    each_seed(3000, |seed| run(seed, 3000));
}
