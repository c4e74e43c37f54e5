//! The fill of the pages of a tree after splits.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, assert_sound, memory_store};
use vellum::{Store, Tree};

#[test]
fn ascending_inserts_fill_their_leaves() {
    for descending in [false, true] {
        let (_, store) = memory_store(64, 1);
        let tree = store.create_tree("t").unwrap();
        for n in 0..20_000u32 {
            let n = if descending { u32::MAX - n } else { n };
            tree.insert(&n.to_be_bytes(), b"12345678").unwrap();
        }
        let stat = tree.stat().unwrap();
        let fill = stat.used_bytes as f64 / stat.page_bytes as f64;
        assert!(fill > 0.9, "{fill}");
        assert_sound(&store);
    }
}

/// The fill of the leaves and inner pages of a tree after these inserts, from 0 to 1.
fn fill_after(keys: impl Iterator<Item = Vec<u8>>, value: &[u8]) -> f64 {
    let (_, store) = memory_store(1500, 1);
    let tree = store.create_tree("t").unwrap();
    for key in keys {
        tree.insert(&key, value).unwrap();
    }
    fill_of(&store, &tree)
}

fn fill_of(store: &Store, tree: &Tree) -> f64 {
    let stat = tree.stat().unwrap();
    assert_sound(store);
    stat.used_bytes as f64 / stat.page_bytes as f64
}

/// The next key of a tenant, whose times go on or back.
fn next_key(times: &mut [u32], tenant: u32, descending: bool) -> Vec<u8> {
    let time = &mut times[tenant as usize];
    *time += 1;
    let time = if descending { u32::MAX - *time } else { *time };
    [tenant.to_be_bytes(), time.to_be_bytes()].concat()
}

/// Keys of a tenant and a time: one run for each tenant, in random turns. With balanced splits
/// alone, the leaves would be 0.45 to 0.6 full.
#[test]
fn runs_that_take_turns_fill_their_leaves() {
    let (small, large) = (&[7; 20][..], &[7; 400][..]);
    let cases = [
        // Two or three leaves for each tenant.
        (1000u32, 200, small, 0.7),
        (1000, 20, large, 0.65),
        (30, 4000, small, 0.84),
        (30, 400, large, 0.9),
        (3, 20_000, small, 0.85),
        (3, 2000, large, 0.9),
    ];
    for (tenants, each, value, least) in cases {
        for descending in [false, true] {
            let (mut random, mut times) = (Random(7), vec![0u32; tenants as usize]);
            let keys = (0..tenants * each).map(|_| {
                let tenant = random.below(tenants.into()) as u32;
                next_key(&mut times, tenant, descending)
            });
            let fill = fill_after(keys, value);
            assert!(fill > least, "{tenants} tenants, {each} each, {descending}: {fill}");
        }
    }
}

/// The fill after transactions that insert ten entries each.
fn fill_after_groups(groups: impl Iterator<Item = [Vec<u8>; 10]>, value: &[u8]) -> f64 {
    let (_, store) = memory_store(1500, 1);
    let tree = store.create_tree("t").unwrap();
    for keys in groups {
        let mut transaction = store.begin().unwrap();
        keys.iter().for_each(|key| transaction.insert(&tree, key, value).unwrap());
        transaction.commit().unwrap();
    }
    fill_of(&store, &tree)
}

/// The same runs, of which a transaction inserts the next ten entries. With splits in the middle
/// they would be 0.49, 0.50 and 0.76 full.
#[test]
fn runs_of_transactions_fill_their_leaves() {
    let (small, large) = (&[7; 20][..], &[7; 400][..]);
    let cases = [
        (30u32, 400, small, false, 0.9),
        (30, 400, small, true, 0.9),
        (3, 200, large, false, 0.85),
    ];
    for (tenants, each, value, descending, least) in cases {
        let (mut random, mut times) = (Random(7), vec![0u32; tenants as usize]);
        let groups = (0..tenants * each).map(|_| {
            let tenant = random.below(tenants.into()) as u32;
            std::array::from_fn(|_| next_key(&mut times, tenant, descending))
        });
        let fill = fill_after_groups(groups, value);
        assert!(fill > least, "{tenants} tenants, {descending}: {fill}");
    }
}

#[test]
fn random_inserts_of_transactions_do_not_look_like_runs() {
    for (len, least) in [(20, 0.67), (200, 0.66), (400, 0.64)] {
        let mut random = Random(3);
        let mut key = |_| random.below(u64::MAX).to_be_bytes().to_vec();
        let mut keys = (0..20_000 / 10).map(|_| std::array::from_fn(&mut key));
        let fill = fill_after_groups(&mut keys, &vec![7; len]);
        assert!(fill > least, "{len}: {fill}");
    }
}

/// Random keys leave leaves as full as balanced splits do.
#[test]
fn random_inserts_do_not_look_like_runs() {
    for (len, balanced) in [(20, 0.6945), (200, 0.6941), (400, 0.6809), (1000, 0.5386)] {
        let mut random = Random(3);
        let keys = (0..6_000_000 / (40 + len)).map(|_| random.next().to_be_bytes().to_vec());
        let fill = fill_after(keys, &vec![1; len]);
        assert!(fill > 0.996 * balanced, "values of {len} bytes: {fill}");
    }
}
