//! Runs the entry functions of the fuzz targets with inputs from a seed, so that every test run
//! exercises them.

use crate::backups;
use crate::entry;
use crate::support::{Random, each_seed};

fn bytes(random: &mut Random, most: usize) -> Vec<u8> {
    let len = random.index(most);
    let sparse = random.once_in(2);
    let byte = |random: &mut Random| match sparse && !random.once_in(5) {
        true => 0,
        false => random.next() as u8,
    };
    (0..len).map(|_| byte(random)).collect()
}

/// A page of a sound store with some bytes changed, as `page_decoder` takes it.
fn page(random: &mut Random) -> Vec<u8> {
    let store = entry::sound_store(1);
    let start = random.index(store.len() / 4096) * 4096;
    let mut page = store[start..start + 4096].to_vec();
    for _ in 0..random.below(6) {
        let at = if random.once_in(2) { random.index(160) } else { random.index(4096) };
        page[at] = random.next() as u8;
    }
    let mut input = vec![random.below(2) as u8, 3 * random.below(80) as u8];
    input.extend((0..24).map(|_| random.next() as u8));
    input.extend(page);
    input
}

fn space(random: &mut Random) -> Vec<u8> {
    let (mut words, mut at) = (vec![1, 2, 0, 0], 2 + random.below(3));
    for _ in 0..random.below(12) {
        let len = 1 + random.below(9);
        words.extend([at, len]);
        at += len + random.below(3) + u64::from(!random.once_in(20));
    }
    words[2] = at;
    words[3] = (words.len() / 2 - 2) as u64;
    if random.once_in(2) {
        let word = random.index(words.len());
        words[word] = [random.next(), random.below(100), u64::MAX][random.index(3)];
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn run(seed: u64) {
    let mut random = Random(seed);
    for _ in 0..40 {
        entry::page_decoder(&bytes(&mut random, 9000));
        entry::page_decoder(&page(&mut random));
        entry::space_decoder(&space(&mut random));
    }
    for _ in 0..3 {
        let mut mutations = bytes(&mut random, 100);
        mutations.insert(0, 1 + random.below(127) as u8 + 128 * u8::from(random.once_in(8)));
        entry::store_opener(&mutations);
    }
    entry::increment_reader(&bytes(&mut random, 64));
    backups::backup_reader(&bytes(&mut random, 24));
    let mut noise = bytes(&mut random, 50_000);
    noise.insert(0, 0);
    entry::store_opener(&noise);
}

#[test]
fn any_bytes() {
    each_seed(120, run);
}

#[test]
#[ignore = "long"]
fn any_bytes_for_long() {
    each_seed(20_000, run);
}
