//! Damaged files: flipped bits, truncated, extended or mixed-up files, and files that never were a
//! store. A read returns the stored data or an error; never other data, a panic, or an endless
//! walk.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum::{Error, Store};
use vellum_pool::device::MemoryDevice;

use crate::crash::salvage;
use crate::entry;
use crate::support::{Random, each_seed, options};
use crate::world::{Model, World, assert_same};

/// A closed store of random contents.
fn closed(random: &mut Random) -> (Vec<u8>, World) {
    let page_frames = 1 + random.below(2) as u32;
    let device = Arc::new(MemoryDevice::new());
    let mut world = World::new(device.clone(), &options(64, page_frames), random);
    for _ in 0..120 {
        world.step(random);
    }
    world.reopen();
    world.store.clone().close().unwrap();
    (device.snapshot(), world)
}

/// Checks that all data of a damaged file that can be read equals the model. Returns false if the
/// file is sound.
fn judge(image: Vec<u8>, world: &World) -> bool {
    salvage(image.clone(), &world.options, &world.once);
    let device = Arc::new(MemoryDevice::from_snapshot(image));
    let store = match Store::open_on(device, &world.options) {
        Ok(store) => store,
        Err(error) => {
            let named = matches!(
                error,
                Error::Damaged { .. }
                    | Error::Truncated { .. }
                    | Error::NotAStore(_)
                    | Error::UncleanShutdown
            );
            assert!(named, "{error:?}");
            return true;
        }
    };
    let damaged = !store.check(&mut |_| {}).unwrap().is_sound();
    let failures = read(&store, &world.model);
    assert!(damaged || failures == 0, "the check has missed it");
    damaged
}

/// Reads everything in every way. Returns the number of errors.
fn read(store: &Store, model: &Model) -> u32 {
    let mut failures = 0;
    match store.trees() {
        Ok(names) => assert!(names.iter().eq(model.keys())),
        Err(_) => failures += 1,
    }
    for (name, entries) in model {
        let Ok(tree) = store.tree(name) else {
            failures += 1;
            continue;
        };
        for (key, value) in entries {
            match tree.get(key) {
                Ok(found) => assert!(found.as_deref() == Some(&value[..]), "{key:?}"),
                Err(_) => failures += 1,
            }
        }
        let mut expected = entries.iter();
        for entry in tree.entries() {
            let Ok((key, value)) = entry else {
                failures += 1;
                expected = BTreeMap::iter(const { &BTreeMap::new() });
                break;
            };
            assert_eq!(expected.next(), Some((&key, &value.into_vec())));
        }
        assert_eq!(expected.next(), None, "entries are missing, and no error");
        let (mut cursor, mut expected) = (tree.cursor(), entries.keys().rev());
        loop {
            match cursor.backward() {
                Ok(true) => assert_eq!(Some(cursor.key()), expected.next().map(|key| &key[..])),
                Ok(false) => break assert_eq!(expected.next(), None),
                Err(_) => break failures += 1,
            }
        }
    }
    failures
}

fn flip(seed: u64, flips: u64) {
    let mut random = Random(seed);
    let (image, world) = closed(&mut random);
    let used: Vec<_> = {
        let device = Arc::new(MemoryDevice::from_snapshot(image.clone()));
        let store = Store::open_on(device, &world.options).unwrap();
        let is_used =
            |page: &usize| store.pool().with_space(|space| !space.has_free(*page as u64, 1));
        (0..image.len() / 4096).filter(is_used).collect()
    };
    for _ in 0..flips {
        let page = if random.once_in(3) { used[0] } else { used[random.index(used.len())] };
        // Half of the flips hit the fields at the beginning of a page.
        let most = [4096, 160][random.index(2)];
        let mut bad = image.clone();
        bad[page * 4096 + random.index(most)] ^= 1 << random.below(8);
        assert!(judge(bad, &world), "a flipped bit in page {page} was not found");
    }
    // Put whole pages in the place of other pages.
    for _ in 0..flips / 8 {
        let (from, to) = (used[random.index(used.len())], used[random.index(used.len())]);
        let mut bad = image.clone();
        bad.copy_within(from * 4096..(from + 1) * 4096, to * 4096);
        if bad != image {
            assert!(judge(bad, &world), "page {from} in the place of page {to} was not found");
        }
    }
}

#[test]
fn every_flipped_bit_is_found() {
    each_seed(8, |seed| flip(seed, 150));
}

#[test]
#[ignore = "long"]
fn every_flipped_bit_is_found_for_long() {
    each_seed(500, |seed| flip(seed, 4000));
}

#[test]
fn a_file_that_was_cut_or_extended() {
    each_seed(4, |seed| {
        let mut random = Random(seed);
        let (image, world) = closed(&mut random);
        let boundaries = (0..image.len()).step_by(4096).flat_map(|at| [at, at + 1, at + 4095]);
        for len in boundaries {
            assert!(judge(image[..len].to_vec(), &world), "cut to {len} bytes");
        }
        for more in [1, 4095, 4096, 12288] {
            let noise = (0..more).map(|_| random.next() as u8);
            let longer = image.iter().copied().chain(noise).collect();
            assert!(!judge(longer, &world), "what is behind the store does not matter");
        }
    });
}

/// Files of random bytes, and files of which only a part is a store.
#[test]
fn a_file_that_is_not_a_store_is_refused() {
    each_seed(60, |seed| {
        let mut random = Random(seed);
        let mut image: Vec<u8> = (0..random.below(60_000)).map(|_| random.next() as u8).collect();
        if random.once_in(2) {
            let store = entry::sound_store(1);
            let len = image.len().min(4096 * (1 + random.index(2)));
            image[..len].copy_from_slice(&store[..len]);
        }
        let device = Arc::new(MemoryDevice::from_snapshot(image.clone()));
        let error = Store::open_on(device, &options(16, 1)).unwrap_err();
        let named =
            matches!(error, Error::NotAStore(_) | Error::Truncated { .. } | Error::Damaged { .. });
        assert!(named, "{error:?}");
        entry::exercise(image, 1);
    });
}

/// A store that is not damaged is sound: this tests the checks of this file.
#[test]
fn what_is_sound_is_sound() {
    each_seed(4, |seed| {
        let (image, world) = closed(&mut Random(seed));
        assert!(!judge(image.clone(), &world));
        let device = Arc::new(MemoryDevice::from_snapshot(image));
        assert_same(&Store::open_on(device, &world.options).unwrap(), &world.model);
    });
}
