//! Crashes and power failures: a file that opens again has the state of a completed sync, and
//! nothing else.

use std::io::Read;
use std::sync::Arc;

use vellum::{Error, Options, Store};
use vellum_pool::device::MemoryDevice;

use crate::power::PowerDevice;
use crate::support::{Random, each_seed, options};
use crate::world::{Model, Once, World, difference, was_in};

/// Checks a file after a crash: if it opens, it has one of the `allowed` states.
fn judge(image: Vec<u8>, options: &Options, allowed: &[&Model]) -> Result<(), Error> {
    let store = Store::open_on(Arc::new(MemoryDevice::from_snapshot(image)), options);
    let store = match store {
        Ok(store) => store,
        Err(error) => {
            let refused = matches!(
                error,
                Error::UncleanShutdown
                    | Error::Damaged { .. }
                    | Error::Truncated { .. }
                    | Error::NotAStore(_)
            );
            assert!(refused, "{error:?}");
            return Err(error);
        }
    };
    let differences: Vec<_> = allowed.iter().map(|model| difference(&store, model)).collect();
    assert!(differences.iter().any(Option::is_none), "it opens, but {differences:?}");
    Ok(())
}

/// A process opens the file of a killed process, and goes on with it. After its first sync or
/// close, the state that it has found must be durable, although it has not written that state
/// itself.
fn go_on(device: PowerDevice, options: &Options, allowed: &[&Model], random: &mut Random) -> bool {
    let device = Arc::new(device);
    let Ok(store) = Store::open_on(device.clone(), options) else { return false };
    let found = allowed.iter().find(|model| difference(&store, model).is_none());
    let mut model = (*found.expect("it opens, but as none of the allowed ones")).clone();
    let mut allowed = vec![model.clone()];
    if random.once_in(2) {
        let tree = store.tree_or_create("").unwrap();
        tree.upsert(b"k", b"another process").unwrap();
        model.entry(String::new()).or_default().insert(b"k".into(), b"another process".into());
        let mut created = allowed[0].clone();
        created.entry(String::new()).or_default();
        allowed.extend([created, model.clone()]);
    }
    if random.once_in(2) {
        store.sync().unwrap();
        judge(device.image(), options, &[&model]).unwrap();
    }
    if random.once_in(2) {
        store.clone().close().unwrap();
    } else {
        store.sync().unwrap();
    }
    judge(device.image(), options, &[&model]).unwrap();
    let allowed: Vec<_> = allowed.iter().collect();
    for image in device.take_images() {
        let _ = judge(image, options, &allowed);
    }
    true
}

/// Salvaging ends, and returns only entries that the tree had at some time, in order and each once.
pub fn salvage(image: Vec<u8>, options: &Options, once: &Once) {
    let options = options.clone().salvage(true);
    let device = Arc::new(MemoryDevice::from_snapshot(image));
    let Ok(store) = Store::open_on(device, &options) else { return };
    let Ok(names) = store.trees() else { return };
    for name in names {
        let Ok(tree) = store.tree(&name) else { continue };
        let (mut visited, mut last) = (0, None::<Vec<u8>>);
        tree.salvage(&mut |found| {
            visited += 1;
            if let Ok((key, value)) = found {
                assert!(was_in(once, &name, key, value), "{name:?} never had {key:?}");
                assert!(last.as_deref().is_none_or(|last| last < key), "{key:?} is out of order");
                last = Some(key.to_vec());
            }
            visited < 20_000
        });
        let mut visited = 0;
        tree.salvage_readers(&mut |found| {
            visited += 1;
            let mut value = Vec::new();
            if let Ok((key, mut reader)) = found
                && reader.read_to_end(&mut value).is_ok()
            {
                assert!(was_in(once, &name, key, &value), "{name:?} never had {key:?}");
            }
            visited < 20_000
        });
        for entry in tree.entries().take(20_000) {
            let Ok((key, value)) = entry else { break };
            assert!(was_in(once, &name, &key, &value), "{name:?} never had {key:?}");
        }
    }
}

fn run(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let page_frames = 1 + random.below(3) as u32;
    let options = options([8, 12, 40][random.index(3)], page_frames);
    let device = Arc::new(PowerDevice::new(seed, [5, 50, 400][random.index(3)]));
    let mut world = World::new(device.clone(), &options, &mut random);
    let mut opened = 0;
    for image in device.take_images() {
        opened += u32::from(judge(image, &options, &[&Model::new()]).is_ok());
    }
    for killed in device.take_killed() {
        opened += u32::from(go_on(killed, &options, &[&Model::new()], &mut random));
    }
    for _ in 0..steps {
        let (before, was_clean) = (world.synced.clone(), world.is_clean);
        world.syncs.clear();
        world.step(&mut random);
        for image in device.take_images() {
            // During a step: either the state before it, or the state of a sync in it.
            let mut allowed: Vec<_> = world.syncs.iter().collect();
            allowed.extend([&before, &world.synced]);
            opened += u32::from(judge(image, &options, &allowed).is_ok());
        }
        for killed in device.take_killed() {
            let mut allowed: Vec<_> = world.syncs.iter().collect();
            allowed.extend([&before, &world.synced]);
            opened += u32::from(go_on(killed, &options, &allowed, &mut random));
        }
        if world.is_clean && (!was_clean || random.once_in(20)) {
            // Nothing has changed since, so the file must open.
            judge(device.image(), &options, &[&world.synced]).unwrap();
            judge(device.snapshot(), &options, &[&world.synced]).unwrap();
            opened += 2;
        } else if random.once_in(20) {
            let (image, crashed) = (device.image(), device.snapshot());
            salvage(image.clone(), &options, &world.once);
            salvage(crashed.clone(), &options, &world.once);
            let _ = judge(image, &options, &[&world.synced]);
            let _ = judge(crashed, &options, &[&world.synced]);
        }
    }
    assert!(opened > 0);
}

/// Changes go on during a checkpoint. The file opens with the state between two changes, or with
/// the state before them.
fn during_a_sync(seed: u64, rounds: u64) {
    let mut random = Random(seed);
    let page_frames = 1 + random.below(3) as u32;
    let options = options([10, 16, 60, 400][random.index(4)], page_frames);
    let device = Arc::new(PowerDevice::new(seed, [2, 4, 8][random.index(3)]));
    let mut world = World::new(device.clone(), &options, &mut random);
    let mut opened = 0;
    for _ in 0..rounds {
        for _ in 0..random.below(40) {
            world.step(&mut random);
        }
        device.take_images();
        let mut allowed = vec![world.synced.clone(), world.model.clone()];
        let store = world.store.clone();
        device.be_slow(true);
        std::thread::scope(|scope| {
            let syncs: Vec<_> =
                (0..1 + random.below(2)).map(|_| scope.spawn(|| store.sync().unwrap())).collect();
            let most = random.below(30);
            while allowed.len() as u64 <= most || syncs.iter().any(|sync| !sync.is_finished()) {
                if allowed.len() > 60 {
                    break;
                }
                world.change(&mut random);
                allowed.push(world.model.clone());
            }
        });
        device.be_slow(false);
        let allowed: Vec<_> = allowed.iter().collect();
        for image in device.take_images().into_iter().chain([device.image(), device.snapshot()]) {
            opened += u32::from(judge(image, &options, &allowed).is_ok());
        }
        world.sync();
        judge(device.image(), &options, &[&world.synced]).unwrap();
        assert_eq!(difference(&world.store, &world.model), None);
    }
    assert!(opened > 0);
}

#[test]
fn a_file_that_opens_after_a_crash_during_a_sync_is_whole() {
    each_seed(12, |seed| during_a_sync(seed, 20));
}

#[test]
#[ignore = "long"]
fn a_file_that_opens_after_a_crash_during_a_sync_is_whole_for_long() {
    each_seed(1000, |seed| during_a_sync(seed, 40));
}

#[test]
fn what_opens_after_a_crash_is_what_was_synced() {
    each_seed(20, |seed| run(seed, 300));
}

/// A merge finds no free frame, so the tree keeps several pages after all of its entries were
/// removed. It is empty nevertheless, and can be bulk loaded.
#[test]
fn an_emptied_tree_of_several_pages_is_empty() {
    run(836, 1000);
}

#[test]
#[ignore = "long"]
fn what_opens_after_a_crash_is_what_was_synced_for_long() {
    each_seed(3000, |seed| run(seed, 1000));
}

/// The power fails while a store is created over another one. Then the old store is there,
/// unchanged, or there is no store.
#[test]
fn creating_over_an_old_store() {
    each_seed(60, |seed| {
        let (mut random, options) = (Random(seed), options(16, 1));
        let device = Arc::new(PowerDevice::new(seed, 0));
        let mut world = World::new(device.clone(), &options, &mut random);
        for _ in 0..30 + random.below(100) {
            world.step(&mut random);
        }
        for _ in 0..random.below(3) {
            world.is_clean = false;
            let tree = world.store.tree_or_create("").unwrap();
            tree.upsert(b"k", b"v").unwrap();
            world.model.entry(String::new()).or_default().insert(b"k".into(), b"v".into());
            world.sync();
        }
        world.reopen();
        let World { store, synced, .. } = world;
        drop(store);
        let old = Arc::new(PowerDevice::new(seed, 2));
        old.write_all(device.snapshot());
        let store = Store::create_on(old.clone(), &options).unwrap();
        for image in old.take_images() {
            let _ = judge(image, &options, &[&synced, &Model::new()]);
        }
        drop(store);
    });
}
