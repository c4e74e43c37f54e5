//! Model tests: a node against `BTreeMap`, splits and merges, random bytes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vellum_pool::PageRef;

use super::*;
use crate::page::{self, PAGE_HEADER, PageKind};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn page_of(frames: u32) -> Vec<u8> {
    let mut bytes = vec![0; frames as usize * 4096];
    page::init(&mut bytes, PageRef::new(5, frames), PageKind::Leaf, 0, 1);
    bytes
}

fn entries(bytes: &[u8]) -> Model {
    let node = Node::new(bytes);
    let mut key = Vec::new();
    (0..node.count().unwrap())
        .map(|index| {
            node.key_into(index, &mut key).unwrap();
            let mut value = Vec::new();
            node.payload_into(node.payload_place(index).unwrap(), &mut value).unwrap();
            (key.clone(), value)
        })
        .collect()
}

/// The bytes of a node but for its page's number, and for the gap.
fn without_gap(bytes: &[u8]) -> Vec<u8> {
    let gap = Node::new(bytes).gap().unwrap();
    [&bytes[PAGE_HEADER..gap.0], &bytes[gap.1..]].concat()
}

/// Splits a node, whose page keeps the right part. Whichever part a page keeps, that part is the
/// same, byte for byte, as in a new page.
fn split_off_left(page: &mut [u8], left: &mut [u8], split: &Split) -> Result<(), Torn> {
    let (node, mut new) = (Node::new(&*page), left.to_vec());
    copy_part(left, node, Part::Left, split)?;
    copy_part(&mut new, node, Part::Right, split)?;
    let keep = |page: &mut [u8], part| {
        let kept = NodeMut::new(page).keep(part, split.left, &split.separator);
        assert!(kept, "a part that fits a new page fits the old one");
    };
    let mut old = page.to_vec();
    keep(&mut old, Part::Left);
    keep(page, Part::Right);
    assert_eq!(without_gap(&old), without_gap(left));
    assert_eq!(without_gap(page), without_gap(&new));
    Ok(())
}

fn separators(bytes: &[u8]) -> (Vec<(Vec<u8>, u64)>, u64) {
    let node = Node::new(bytes);
    let count = node.count().unwrap();
    let slots = (0..count).map(|index| {
        let mut key = Vec::new();
        node.key_into(index, &mut key).unwrap();
        (key, node.child(index).unwrap())
    });
    (slots.collect(), node.child(count).unwrap())
}

/// Keys with long common prefixes, zeros, and every length up to the limit.
fn key(max: usize) -> impl Strategy<Value = Vec<u8>> {
    let short = prop::collection::vec(prop::sample::select(&[0u8, 1, b'a', b'b', 255][..]), 0..6);
    let shared =
        (prop::collection::vec(any::<u8>(), 0..4), 0..max.min(200)).prop_map(move |(tail, len)| {
            let mut key = vec![b'p'; len];
            key.extend(tail);
            key.truncate(max);
            key
        });
    let random = prop::collection::vec(any::<u8>(), 0..=max);
    prop_oneof![4 => short, 4 => shared, 1 => random]
}

#[derive(Clone, Debug)]
enum Action {
    Put(Vec<u8>, usize),
    Remove(Vec<u8>),
    RemoveNth(prop::sample::Index),
}

fn actions() -> impl Strategy<Value = (u32, Vec<Action>)> {
    (1..=16u32).prop_flat_map(|frames| {
        let limits = NodeLimits::for_page_size(frames as usize * 4096);
        let action = prop_oneof![
            6 => (key(limits.max_key), 0..limits.max_cell).prop_map(|(k, v)| Action::Put(k, v)),
            6 => (key(limits.max_key), 0..20usize).prop_map(|(k, v)| Action::Put(k, v)),
            1 => key(limits.max_key).prop_map(Action::Remove),
            3 => any::<prop::sample::Index>().prop_map(Action::RemoveNth),
        ];
        (Just(frames), prop::collection::vec(action, 1..300))
    })
}

/// Inserts or replaces an entry as a tree does. Returns false if the node has no room.
fn put(bytes: &mut [u8], key: &[u8], value: &[u8]) -> bool {
    let position = Node::new(&*bytes).find(key).unwrap();
    let mut node = NodeMut::new(bytes);
    match position.exact {
        true => node.replace(position.index, Payload::Inline(value)),
        false => node.insert(position.index, key, Payload::Inline(value)),
    }
}

/// Puts a value of this length, or removes the entry. Returns false if the node has no room.
fn change(bytes: &mut [u8], key: &[u8], len: Option<usize>) -> bool {
    let Some(len) = len else {
        let position = Node::new(&*bytes).find(key).unwrap();
        if position.exact {
            NodeMut::new(bytes).remove(position.index);
        }
        return true;
    };
    put(bytes, key, &vec![9; len])
}

/// Makes all changes, as the commit of a transaction does: splits leaves until all of their changes
/// fit. Returns the leaves.
fn split_and_change(leaf: Vec<u8>, changes: &BTreeMap<Vec<u8>, Option<usize>>) -> Vec<Vec<u8>> {
    let (mut done, mut leaves) = (Vec::new(), vec![leaf]);
    while let Some(mut leaf) = leaves.pop() {
        let here: Vec<(&[u8], Option<usize>)> = changes
            .iter()
            .filter(|(key, _)| Node::new(&leaf[..]).covers(key).unwrap())
            .map(|(key, len)| (&key[..], *len))
            .collect();
        let mut changed = leaf.clone();
        if here.iter().all(|(key, len)| change(&mut changed, key, *len)) {
            check(&changed).unwrap();
            done.push(changed);
            continue;
        }
        let split = plan_split_for(Node::new(&leaf[..]), &here).unwrap();
        let mut left = page_of((leaf.len() / 4096) as u32);
        split_off_left(&mut leaf, &mut left, &split).unwrap();
        check(&left).unwrap();
        check(&leaf).unwrap();
        leaves.extend([leaf, left]);
    }
    done
}

fn run(bytes: &mut [u8], model: &mut Model, actions: &[Action], limits: NodeLimits) {
    for action in actions {
        match action {
            Action::Put(key, len) => {
                let len = (*len).min(limits.max_inline_value(key.len()));
                let value = vec![len as u8; len];
                if put(bytes, key, &value) {
                    model.insert(key.clone(), value);
                }
            }
            Action::Remove(key) => {
                let position = Node::new(&*bytes).find(key).unwrap();
                assert_eq!(position.exact, model.remove(key).is_some());
                if position.exact {
                    NodeMut::new(bytes).remove(position.index);
                }
            }
            Action::RemoveNth(index) if !model.is_empty() => {
                let index = index.index(model.len());
                let key = model.keys().nth(index).unwrap().clone();
                NodeMut::new(bytes).remove(index);
                model.remove(&key);
            }
            Action::RemoveNth(_) => {}
        }
        check(bytes).unwrap();
    }
    assert_eq!(entries(bytes), *model);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_leaf_behaves_like_a_map((frames, actions) in actions(), incoming in key(500)) {
        let limits = NodeLimits::for_page_size(frames as usize * 4096);
        let mut bytes = page_of(frames);
        NodeMut::format(&mut bytes, 0, Fences::default(), 0);
        let mut model = Model::new();
        run(&mut bytes, &mut model, &actions, limits);
        if model.is_empty() || model.contains_key(&incoming) {
            return Ok(());
        }

        let split = plan_split(Node::new(&bytes[..]), &incoming).unwrap();
        let mut left = page_of(frames);
        split_off_left(&mut bytes, &mut left, &split).unwrap();
        check(&left).unwrap();
        check(&bytes).unwrap();
        let mut both = entries(&left);
        prop_assert!(both.keys().all(|key| *key <= split.separator));
        prop_assert!(entries(&bytes).keys().all(|key| *key > split.separator));
        both.extend(entries(&bytes));
        prop_assert_eq!(&both, &model);

        // Insert into the half where the key belongs, then merge if both halves still fit into one
        // page.
        let half = if incoming <= split.separator { &mut left } else { &mut bytes };
        if put(half, &incoming, b"new") {
            model.insert(incoming, b"new".to_vec());
        }
        check(half).unwrap();
        if fits_merge(Node::new(&left), Node::new(&bytes), &split.separator).unwrap() {
            merge_into_right(Node::new(&left), &mut bytes, &split.separator).unwrap();
            check(&bytes).unwrap();
            prop_assert_eq!(entries(&bytes), model);
        }
    }

    #[test]
    fn splits_for_several_changes_make_room(
        (frames, actions) in actions(),
        others in prop::collection::btree_map(key(500), prop::option::of(0..2000usize), 0..40),
        run_after in key(500),
        run_len in 0..30u32,
    ) {
        let limits = NodeLimits::for_page_size(frames as usize * 4096);
        let mut bytes = page_of(frames);
        NodeMut::format(&mut bytes, 0, Fences::default(), 0);
        let mut model = Model::new();
        run(&mut bytes, &mut model, &actions, limits);
        let mut changes = others;
        for number in 0..run_len {
            changes.insert([&run_after[..], &number.to_be_bytes()].concat(), Some(100));
        }
        for (key, len) in &mut changes {
            *len = len.map(|len| len.min(limits.max_inline_value(key.len())));
            match len {
                Some(len) => model.insert(key.clone(), vec![9; *len]),
                None => model.remove(key),
            };
        }

        let leaves = split_and_change(bytes, &changes);
        prop_assert!(leaves.len() <= changes.len() + 1, "{} leaves", leaves.len());
        let done: Model = leaves.iter().flat_map(|leaf| entries(leaf)).collect();
        prop_assert_eq!(done, model);
    }

    #[test]
    fn inner_nodes_split_and_merge(
        frames in 1..=4u32,
        keys in prop::collection::btree_set(key(600), 3..200),
        incoming in key(600),
    ) {
        let mut bytes = page_of(frames);
        let mut node = NodeMut::format(&mut bytes, 3, Fences::default(), 999);
        let mut expected = Vec::new();
        for (child, key) in (1..).zip(&keys) {
            let index = node.node().find_child(key).unwrap().index;
            if node.insert(index, key, Payload::Child(child)) {
                expected.push((key.clone(), child));
            }
        }
        check(&bytes).unwrap();
        prop_assert_eq!(separators(&bytes), (expected.clone(), 999));
        for probe in keys.iter().chain([&incoming]) {
            let node = Node::new(&bytes[..]);
            let child = node.child(node.find_child(probe).unwrap().index).unwrap();
            let model = expected.iter().find(|(key, _)| probe <= key).map_or(999, |found| found.1);
            prop_assert_eq!(child, model);
        }

        let split = plan_split(Node::new(&bytes[..]), &incoming).unwrap();
        let mut left = page_of(frames);
        split_off_left(&mut bytes, &mut left, &split).unwrap();
        check(&left).unwrap();
        check(&bytes).unwrap();
        let ((mut both, middle), (right, upper)) = (separators(&left), separators(&bytes));
        both.push((split.separator.clone(), middle));
        both.extend(right);
        prop_assert_eq!((both, upper), (expected.clone(), 999));

        prop_assert!(fits_merge(Node::new(&left), Node::new(&bytes), &split.separator).unwrap());
        merge_into_right(Node::new(&left), &mut bytes, &split.separator).unwrap();
        check(&bytes).unwrap();
        prop_assert_eq!(separators(&bytes), (expected, 999));
    }

    #[test]
    fn random_bytes_never_panic(
        (frames, actions) in actions(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
        header in prop::collection::vec((36..136usize, any::<u8>()), 0..8),
        probe in key(600),
    ) {
        let limits = NodeLimits::for_page_size(frames as usize * 4096);
        let mut bytes = page_of(frames);
        NodeMut::format(&mut bytes, 0, Fences::default(), 0);
        run(&mut bytes, &mut Model::new(), &actions, limits);
        for (index, byte) in flips {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        for (at, byte) in header {
            bytes[at] = byte;
        }
        let node = Node::new(&bytes[..]);
        let (mut key, mut value) = (Vec::new(), Vec::new());
        let _ = (node.find(&probe), node.find_child(&probe), node.free_space());
        let _ = (node.lower_into(&mut key), node.upper_into(&mut key));
        for index in 0..node.count().unwrap().min(300) {
            let _ = (node.key_into(index, &mut key), node.child(index));
            if let Ok(place) = node.payload_place(index) {
                let _ = node.payload_into(place, &mut value);
            }
        }
        let _ = check(&bytes);
        // A change of a node that passes the check of bounds must not panic, even if the node is
        // unsound.
        if check_bounds(&bytes).is_ok() {
            let after = [&probe[..], b"+"].concat();
            let changes = [(&probe[..], Some(10)), (&after[..], Some(10))];
            for split in [plan_split(node, &probe), plan_split_for(node, &changes)] {
                let Ok(split) = split else { continue };
                let mut left = page_of(frames);
                let mut right = bytes.clone();
                let _ = split_off_left(&mut right, &mut left, &split);
            }
            let _ = fits_merge(node, node, &probe);
            if bytes[38] == 0 && node.find(&probe).is_ok_and(|position| !position.exact) {
                put(&mut bytes, &probe, b"value");
                check_bounds(&bytes).unwrap();
            }
        }
    }
}

#[test]
fn ascending_and_descending_inserts_leave_full_leaves() {
    // With every length of value, some leaves are full to the last byte. Such a leaf has no room
    // for the new fence, and the split moves away from the end.
    for (descending, len) in (0..200).map(|n| (n % 2 == 1, n / 2)) {
        let value = vec![1; len];
        let mut bytes = page_of(1);
        NodeMut::format(&mut bytes, 0, Fences::default(), 0);
        for number in 0..1000u32 {
            let number = if descending { u32::MAX - number } else { number };
            let key = number.to_be_bytes();
            if put(&mut bytes, &key, &value) {
                continue;
            }
            let split = plan_split(Node::new(&bytes[..]), &key).unwrap();
            let mut left = page_of(1);
            split_off_left(&mut bytes, &mut left, &split).unwrap();
            check(&left).unwrap();
            check(&bytes).unwrap();
            let (done, next) = if descending { (bytes, left) } else { (left, bytes) };
            let free = Node::new(&done[..]).free_space().unwrap();
            // The leaf gets a prefix only with its second fence, and then saves three bytes of
            // every key.
            let gained = 3 * Node::new(&done[..]).count().unwrap();
            assert!(free < 2 * (len + 16) + gained, "{free} bytes are free in a leaf");
            bytes = next;
            assert!(Node::new(&bytes[..]).count().unwrap() <= 1);
            assert!(put(&mut bytes, &key, &value));
        }
    }
}

#[test]
fn skewed_leaves_split_into_halves_that_fit() {
    // Long keys and values on one side, short ones on the other, all lengths around the limits.
    let limits = NodeLimits::for_page_size(4096);
    for (tiny, long_first) in (0..200).map(|n| (n / 2, n % 2 == 0)) {
        let mut bytes = page_of(1);
        NodeMut::format(&mut bytes, 0, Fences::default(), 0);
        let long = if long_first { b'a' } else { b'z' };
        for n in 0..tiny {
            assert!(put(&mut bytes, &[b'm', n], b""));
        }
        for n in 0..8u8 {
            let mut key = vec![long; limits.max_key];
            key[1] = n;
            if !put(&mut bytes, &key, &vec![n; limits.max_inline_value(key.len())]) {
                let split = plan_split(Node::new(&bytes[..]), &key).unwrap();
                let mut left = page_of(1);
                split_off_left(&mut bytes, &mut left, &split).unwrap();
                check(&left).unwrap();
                check(&bytes).unwrap();
                break;
            }
        }
    }
}

#[test]
fn the_first_entry_may_grow_until_its_leaf_splits() {
    // An entry that grows is not a descending insert: it must not be inserted a second time.
    let mut bytes = page_of(1);
    NodeMut::format(&mut bytes, 0, Fences::default(), 0);
    for n in 0..9u8 {
        assert!(put(&mut bytes, &[n][..usize::from(n.min(1))], &[n; 400]));
    }
    assert!(!put(&mut bytes, b"", &[9; 950]));
    let split = plan_split(Node::new(&bytes[..]), b"").unwrap();
    let mut left = page_of(1);
    split_off_left(&mut bytes, &mut left, &split).unwrap();
    check(&left).unwrap();
    check(&bytes).unwrap();
    assert!(put(&mut left, b"", &[9; 950]));
}

#[test]
fn an_entry_without_bytes_stays_when_its_neighbour_goes() {
    // Both cells begin at the heap's top. Removing the longer one moves the top up.
    let mut bytes = page_of(1);
    NodeMut::format(&mut bytes, 0, Fences::default(), 0);
    assert!(put(&mut bytes, b"key", b"value"));
    assert!(put(&mut bytes, b"", b""));
    NodeMut::new(&mut bytes).remove(1);
    check(&bytes).unwrap();
    assert_eq!(entries(&bytes), Model::from([(vec![], vec![])]));
}

#[test]
fn an_empty_key_and_an_empty_value_are_entries_like_others() {
    let mut bytes = page_of(16);
    NodeMut::format(&mut bytes, 0, Fences::default(), 0);
    assert!(put(&mut bytes, b"", b""));
    check(&bytes).unwrap();
    assert!(Node::new(&bytes[..]).find(b"").unwrap().exact);
    assert!(put(&mut bytes, b"\0", b"x"));
    let split = plan_split(Node::new(&bytes[..]), b"\0\0").unwrap();
    let mut left = page_of(16);
    split_off_left(&mut bytes, &mut left, &split).unwrap();
    check(&left).unwrap();
    check(&bytes).unwrap();
}

/// A transaction makes an entry longer, and goes on with the run in the same leaf.
#[test]
fn a_run_beside_an_entry_that_grows_leaves_full_leaves() {
    let mut bytes = page_of(1);
    NodeMut::format(&mut bytes, 0, Fences::default(), 0);
    let mut number = 0_u32;
    while Node::new(&bytes[..]).free_space().unwrap() > 700 {
        assert!(put(&mut bytes, &number.to_be_bytes(), &[1; 20]));
        number += 1;
    }
    let new = (number..number + 15).map(|number| (number.to_be_bytes().to_vec(), Some(20)));
    let grown = (3_u32.to_be_bytes().to_vec(), Some(700));
    let leaves = split_and_change(bytes, &new.chain([grown]).collect());
    assert!(leaves.len() <= 2, "{} leaves", leaves.len());
}

/// A plan does not look at all of very many entries: a commit makes one for each leaf.
#[test]
fn very_many_new_entries_fill_their_leaves() {
    let mut bytes = page_of(1);
    NodeMut::format(&mut bytes, 0, Fences::default(), 0);
    let changes = (0..20_000_u32).map(|number| (number.to_be_bytes().to_vec(), Some(20)));
    let leaves = split_and_change(bytes, &changes.collect());
    let used: usize =
        leaves.iter().map(|leaf| 4096 - Node::new(&leaf[..]).free_space().unwrap()).sum();
    assert!(used > leaves.len() * 3900, "{} leaves of {} bytes", leaves.len(), used / leaves.len());
}
