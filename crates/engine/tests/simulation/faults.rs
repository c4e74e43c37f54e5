//! Devices on which reads, writes, syncs and resizes fail at random. A change that fails has
//! changed nothing, and every answer is right. When the faults stop, the store works on, or says
//! why it does not.

use std::sync::Arc;

use rustix::io::Errno;
use vellum::{Error, Store};
use vellum_pool::device::{Fault, FaultPlan, FaultyDevice, MemoryDevice, Operation};

use crate::crash::salvage;
use crate::support::{Random, each_seed, options};
use crate::world::{World, difference, next_entry, was_in};

fn world(seed: u64, random: &mut Random, pool_pages: u64) -> (World, FaultPlan, Arc<MemoryDevice>) {
    let memory = Arc::new(MemoryDevice::new());
    let device = Arc::new(FaultyDevice::new(memory.clone(), seed).unwrap());
    let page_frames = 1 + random.below(3) as u32;
    let mut world = World::new(device.clone(), &options(pool_pages, page_frames), random);
    for _ in 0..150 {
        world.step(random);
    }
    world.tolerant = true;
    (world, device.plan(), memory)
}

/// After the faults, the store equals the model, in memory and in the file.
fn recovered(mut world: World, random: &mut Random) {
    world.tolerant = false;
    let _ = world.store.sync();
    world.assert_same();
    for _ in 0..100 {
        world.step(random);
    }
    world.reopen();
    world.assert_same();
}

/// Reads that fail or return other bytes never lead to wrong data, and have no lasting effect.
fn failing_reads(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let pool_pages = [10, 16][random.index(2)];
    let (mut world, plan, _) = world(seed, &mut random, pool_pages);
    let faults = [
        Fault::Error(Errno::IO),
        Fault::FlippedBit,
        Fault::Torn { bytes: random.index(5000) },
        Fault::Misdirected,
        Fault::Lost,
    ];
    for fault in faults {
        plan.fail_randomly(Operation::Read, 0.03, fault);
    }
    for _ in 0..steps {
        world.step(&mut random);
    }
    plan.clear();
    recovered(world, &mut random);
}

#[test]
fn failing_reads_bring_no_wrong_data() {
    each_seed(16, |seed| failing_reads(seed, 300));
}

/// A disk that is sometimes full: a change fails as a whole, and changes go on when there is space.
fn full_disk(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let (mut world, plan, _) = world(seed, &mut random, 16);
    for _ in 0..4 {
        plan.fail_always(Operation::Resize, Fault::Error(Errno::NOSPC));
        if random.once_in(2) {
            // The file system accepts some writes and refuses others.
            plan.fail_randomly(Operation::Write, 0.05, Fault::Error(Errno::NOSPC));
        }
        for _ in 0..steps {
            if world.dead {
                return;
            }
            world.step(&mut random);
        }
        plan.clear();
        // A refused write of a header is like any other failed write.
        if matches!(world.store.sync(), Err(Error::Poisoned(_) | Error::Closed)) {
            return;
        }
        world.sync();
        assert!(world.is_clean, "there is space again");
        for _ in 0..steps / 2 {
            world.step(&mut random);
        }
        assert_eq!(difference(&world.store, &world.model), None);
    }
    recovered(world, &mut random);
}

#[test]
fn a_full_disk_changes_nothing() {
    each_seed(10, |seed| full_disk(seed, 100));
}

/// Writes, syncs and truncations that fail: after the first failure the store refuses changes, and
/// answers stay right. The file is refused, or has the state of a sync.
fn failing_writes(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let (mut world, plan, memory) = world(seed, &mut random, 16);
    let torn = Fault::Torn { bytes: random.index(9000) };
    plan.fail_randomly(Operation::Write, 0.01, [Fault::Error(Errno::IO), torn][random.index(2)]);
    plan.fail_randomly(Operation::Sync, 0.05, Fault::Error(Errno::IO));
    for _ in 0..steps {
        // The state of a failed checkpoint may be durable.
        let before = [world.synced.clone(), world.model.clone()];
        let failures = world.failures;
        if world.dead {
            break;
        }
        world.step(&mut random);
        if world.failures == failures {
            continue;
        }
        let image = memory.snapshot();
        salvage(image.clone(), &world.options, &world.once);
        let copy = Arc::new(MemoryDevice::from_snapshot(image));
        match Store::open_on(copy, &world.options) {
            Ok(store) => {
                let found = before.iter().map(|model| difference(&store, model));
                let found: Vec<_> = found.collect();
                assert!(found.iter().any(Option::is_none), "{found:?}");
            }
            Err(error) => {
                let refused = matches!(error, Error::UncleanShutdown | Error::Damaged { .. });
                assert!(refused, "{error:?}");
            }
        }
    }
    plan.clear();
    if world.dead {
        return;
    }
    // The state in memory is right, whether the store is poisoned or not.
    let model = std::mem::take(&mut world.model);
    for (name, entries) in &model {
        let tree = world.store.tree(name).unwrap();
        let mut cursor = tree.cursor();
        for expected in entries {
            let found = next_entry(&tree, &mut cursor).unwrap().unwrap();
            assert!((&found.0, &found.1) == expected);
        }
        assert!(next_entry(&tree, &mut cursor).unwrap().is_none());
    }
}

#[test]
fn failing_writes_poison_and_lose_nothing_that_was_synced() {
    each_seed(16, |seed| failing_writes(seed, 200));
}

/// A device that lies: it loses writes, writes to other places, or flips a bit. That can lead to
/// old data, but not to a panic, nor to entries that the store never had.
fn lying_writes(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let (mut world, plan, memory) = world(seed, &mut random, 12);
    let fault = [Fault::Lost, Fault::Misdirected, Fault::FlippedBit][random.index(3)];
    plan.fail_randomly(Operation::Write, 0.02, fault);
    for number in 0..steps {
        let tree = match world.store.tree_or_create("t") {
            Ok(tree) => tree,
            Err(_) => break,
        };
        let (key, value) = (world.keys.any(&mut random), world.values.next(&mut random));
        match random.below(4) {
            0 => drop(tree.remove(&key)),
            1 => {
                if let Ok(Some(found)) = tree.get(&key) {
                    assert!(
                        was_in(&world.once, "t", &key, &found),
                        "{key:?}: {:?}",
                        (found.is_blob(), found.len())
                    );
                }
            }
            _ => {
                world.ever("t", &key, &value);
                let _ = tree.upsert(&key, &value);
            }
        }
        if number % 50 == 0 {
            let _ = world.store.sync();
            let _ = world.store.check(&mut |_| {});
            salvage(memory.snapshot(), &world.options, &world.once);
        }
    }
    let _ = world.store.close();
    let image = memory.snapshot();
    salvage(image.clone(), &world.options, &world.once);
    let copy = Arc::new(MemoryDevice::from_snapshot(image));
    if let Ok(store) = Store::open_on(copy, &world.options)
        && let Ok(names) = store.trees()
    {
        for name in names {
            let Ok(tree) = store.tree(&name) else { continue };
            for (key, value) in tree.entries().map_while(Result::ok).take(20_000) {
                assert!(was_in(&world.once, &name, &key, &value));
            }
            let _ = tree.check();
        }
    }
}

#[test]
fn a_lying_device_brings_nothing_that_never_was() {
    each_seed(16, |seed| lying_writes(seed, 600));
}

#[test]
#[ignore = "long"]
fn faults_for_long() {
    each_seed(2000, |seed| {
        failing_reads(seed, 1000);
        full_disk(seed, 200);
        failing_writes(seed, 400);
        lying_writes(seed, 1500);
    });
}
