//! Tests of the code that runs only when optimistic attempts starve, and of groups that do not end.
//! The code with locks must give the same results as the optimistic code.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_pool::device::MemoryDevice;

use super::lookup::Target;
use crate::node::{Edit, Node};
use crate::{Error, Options, Store, Tree};

fn tree() -> (Store, Tree) {
    let options = Options::new().pool_bytes(1 << 18);
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
    let tree = store.create_tree("t").unwrap();
    for n in 0..3000u32 {
        let len = if n % 100 == 0 { 3000 } else { 300 };
        tree.insert(&(2 * n).to_be_bytes(), &vec![n as u8; len]).unwrap();
    }
    assert!(tree.stat().unwrap().height >= 3);
    (store, tree)
}

#[test]
fn reading_with_locks_finds_the_same() {
    let (_store, tree) = tree();
    let tree_ref = tree.tree_ref();
    for n in 0..6001u32 {
        let key = n.to_be_bytes();
        let (one, two) = (tree_ref.get(&key).unwrap(), tree_ref.get_locked(&key).unwrap());
        assert_eq!(one.as_deref(), two.as_deref());
        assert_eq!(one.is_some(), n % 2 == 0 && n < 6000);
        let optimistic = tree_ref.leaf(Target::Key(&key)).unwrap().node.page();
        assert_eq!(tree_ref.shared_leaf(Target::Key(&key)).unwrap().page(), optimistic);
        assert_eq!(tree_ref.exclusive_leaf_locked(Target::Key(&key)).unwrap().page(), optimistic);
    }
    let last = tree_ref.leaf(Target::Last).unwrap().node.page();
    assert_eq!(tree_ref.shared_leaf(Target::Last).unwrap().page(), last);
}

#[test]
fn pairs_are_parent_and_child_on_every_level() {
    let (_store, tree) = tree();
    let tree_ref = tree.tree_ref();
    let height = tree.stat().unwrap().height as u8;
    for n in (0..6000u32).step_by(7) {
        let key = n.to_be_bytes();
        for level in 0..height {
            let pair = tree_ref
                .exclusive_pair(Target::Key(&key), level)
                .unwrap()
                .expect("the tree is so high");
            assert_eq!(Node::new(&pair.node[..]).level(), Ok(level));
            let Some((parent, index)) = pair.parent else {
                assert_eq!((pair.node.page(), level + 1), (tree_ref.root_page(), height));
                continue;
            };
            let parent = Node::new(&parent[..]);
            assert_eq!(parent.level(), Ok(level + 1));
            assert_eq!(parent.child(index), Ok(pair.node.page().id.0));
        }
        assert!(tree_ref.exclusive_pair(Target::Key(&key), height).unwrap().is_none());
    }
}

/// Failed merges leave empty leaves at the ends. The first and last entries are found after them,
/// with locks and without.
#[test]
fn the_ends_of_a_tree_are_found_after_empty_leaves() {
    let (store, tree) = tree();
    let tree_ref = tree.tree_ref();
    let empty = |target: Target<'_>| {
        let change = tree_ref.pages.change().unwrap();
        let mut leaf = tree_ref.leaf(target).unwrap().node.upgrade().unwrap();
        let node = Node::new(&leaf[..]);
        let indexes: Vec<_> = (0..node.count().unwrap()).collect();
        let [mut lower, mut upper] = [Vec::new(), Vec::new()];
        node.lower_into(&mut lower).unwrap();
        node.upper_into(&mut upper).unwrap();
        tree_ref.remove_all(&change, &mut leaf, &indexes).unwrap();
        (indexes.len() as u64, lower, upper)
    };
    let (one, _, upper) = empty(Target::Key(&[]));
    let (two, _, upper) = empty(Target::Key(&[&upper[..], &[0]].concat()));
    let (three, lower, _) = empty(Target::Last);
    let (four, lower, _) = empty(Target::Key(&lower));
    let removed = one + two + three + four;
    let first = tree.first().unwrap().unwrap().0;
    let last = tree.last().unwrap().unwrap().0;
    assert!(first > upper && last <= lower && first < last);
    assert_eq!(tree.pop_first().unwrap().unwrap().0, first);
    assert_eq!(tree.pop_last().unwrap().unwrap().0, last);
    let mut left = 0;
    while let Some((key, _)) = tree.pop_last().unwrap() {
        assert!(key < last);
        left += 1;
    }
    assert_eq!(removed + 2 + left, 3000);
    assert!(tree.first().unwrap().is_none() && tree.pop_first().unwrap().is_none());
    drop(tree);
    store.close().unwrap();
}

/// A thread that gives up between two pages of a split leaves a tree that must not be saved.
#[test]
fn a_group_that_does_not_end_has_changes_refused() {
    let (store, tree) = tree();
    let tree_ref = tree.tree_ref();
    {
        let change = tree_ref.pages.change().unwrap();
        let mut leaf = tree_ref.exclusive_leaf(b"0001").unwrap();
        let mut group = tree_ref.group(&change);
        assert!(group.edit(&mut leaf, Edit::Remove { index: 0 }));
    }
    let error = tree.upsert(b"key", b"value").unwrap_err();
    assert!(matches!(error, Error::Poisoned(_)), "{error}");
    assert!(error.to_string().contains("ended in its midst"), "{error}");
    drop(tree);
    store.close().unwrap_err();
}

/// A thread gives up before it has changed a page: no page is freed, and the store goes on.
#[test]
fn a_group_that_changed_nothing_frees_nothing() {
    let (store, tree) = tree();
    let tree_ref = tree.tree_ref();
    let page = {
        let change = tree_ref.pages.change().unwrap();
        let leaf = tree_ref.exclusive_leaf(b"0001").unwrap();
        let page = leaf.page();
        let mut group = tree_ref.group(&change);
        group.free(leaf);
        page
    };
    assert!(tree_ref.pages.pool.fix_shared(page).is_ok());
    tree.upsert(b"key", b"value").unwrap();
    assert_eq!(tree.stat().unwrap().entries, 3001);
    drop(tree);
    store.close().unwrap();
}

/// A reader that has starved holds an inner page while it waits for a leaf. A commit that holds
/// that leaf, and starves at another one, must not wait for the inner page.
#[test]
fn a_commit_does_not_wait_for_a_reader_that_waits_for_it() {
    let (_store, tree) = tree();
    let tree_ref = tree.tree_ref();
    let (first, second) = (0_u32.to_be_bytes(), 60_u32.to_be_bytes());
    let pause = std::time::Duration::from_millis(50);
    std::thread::scope(|scope| {
        let held = tree_ref.exclusive_leaf(&first).unwrap();
        let other = tree_ref.exclusive_leaf(&second).unwrap();
        scope.spawn(|| drop(tree_ref.get_locked(&first).unwrap()));
        std::thread::sleep(pause);
        // The commit's second leaf changes all the time.
        scope.spawn(move || {
            std::thread::sleep(pause);
            drop(other);
        });
        let found = tree_ref.try_exclusive_leaf(&second).unwrap();
        drop((found, held));
    });
}

/// A leaf that the clear cannot read is not freed there, and may get another use.
#[test]
fn a_cleared_tree_knows_no_leaf_of_a_pop() {
    let (_store, tree) = tree();
    let popped = &tree.tree_ref().state.popped_leaves;
    popped.iter().for_each(|leaf| leaf.store(99, Ordering::Relaxed));
    tree.clear().unwrap();
    assert!(popped.iter().all(|leaf| leaf.load(Ordering::Relaxed) == 0));
}
