//! The whole machine dies while threads change a store on its disk.
//!
//! `lab crash --disk` kills the machine, takes some of what was not flushed from the disk, and
//! starts the next machine. One program works until it is killed, and notes what is acknowledged;
//! the other one checks what is left in the end. The disk has a store in a file system in its first
//! half, and one on the raw disk in its second. The machines work on them in turn.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use tempfile::tempdir;
use vellum::Store;
use vellum_testing::patience::eventually;

use crate::disk::Mapped;
use crate::mounted_store::{DISK_BYTES, Layout, MountedStore, options};
use crate::threads::{self, Steps, THREADS};

/// Guests of the lab have this file if they have the disk.
const DRIVER: &str = "/modules/virtio_blk.ko";
const DISK: &str = "/dev/vda";

/// The steps of each thread between the opening and the closing of a store that is closed often.
const STEPS_OF_OPEN: u64 = 4;

/// The name of the note that says how many machines have worked.
const MACHINES: &str = "machines";

/// What earlier machines have noted.
#[derive(Debug)]
struct Notes(BTreeMap<String, u64>);

impl Notes {
    /// `None` outside of a guest of the lab that has a disk.
    fn read() -> Option<Notes> {
        if !Path::new(DRIVER).exists() {
            eprintln!("left out: not in a guest of the lab with a virtio disk");
            return None;
        }
        // The driver looks for disks in its own time.
        eventually("a virtio disk is there", || Path::new(DISK).exists());
        let text = std::fs::read_to_string("/notes").unwrap();
        let words = text.lines().map(|line| line.split_once(' ').unwrap());
        Some(Notes(words.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()))
    }

    fn number(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    fn acknowledged(&self, layout: Layout) -> Steps {
        std::array::from_fn(|thread| self.number(&name_of(layout, thread)))
    }

    fn is_made(&self, layout: Layout) -> bool {
        self.number(&format!("{layout:?}")) > 0
    }
}

fn name_of(layout: Layout, thread: usize) -> String {
    format!("{layout:?}-{thread}")
}

fn say(line: &str) {
    std::io::stdout().lock().write_all(format!("{line}\n").as_bytes()).unwrap();
}

fn note(name: &str, value: u64) {
    say(&format!("lab: note {name} {value}"));
}

/// Mounts what is in a half of the disk. The half is the last field, so that it is dropped last.
fn mount(layout: Layout, folder: &Path, is_new: bool) -> (MountedStore, Mapped) {
    let start = if layout == Layout::Raw { DISK_BYTES } else { 0 };
    let name = format!("vellum-killed-{layout:?}");
    let half = Mapped::part(&name, Path::new(DISK), start, DISK_BYTES);
    (layout.mount(&half.device(), &folder.join(name), is_new), half)
}

/// Recovers a store, and compares it with what was acknowledged.
fn recover(mounted: &MountedStore, layout: Layout, notes: &Notes) -> (Store, Steps) {
    let store = Store::open(mounted.store(), &options(mounted.log())).unwrap();
    let recovery = format!("{:?}", store.recovery());
    let acknowledged = notes.acknowledged(layout);
    match threads::found(&store, acknowledged) {
        Ok(steps) => {
            say(&format!("{layout:?}: {steps:?} steps, {acknowledged:?} acknowledged; {recovery}"));
            (store, steps)
        }
        Err(fault) => panic!("{layout:?}, {acknowledged:?} acknowledged: {fault}; {recovery}"),
    }
}

#[test]
#[ignore = "works until its machine is killed"]
fn work() {
    let Some(notes) = Notes::read() else { return };
    // The test's own line has not ended.
    say("");
    // The other threads would go on, and the lab would see nothing.
    std::panic::set_hook(Box::new(|panic| {
        say(&panic.to_string());
        std::process::abort();
    }));
    let layout = [Layout::FileSystem, Layout::Raw][notes.number(MACHINES) as usize % 2];
    let (folder, is_new) = (tempdir().unwrap(), !notes.is_made(layout));
    let mounted = mount(layout, folder.path(), is_new);
    let mounted = &mounted.0;
    note(MACHINES, notes.number(MACHINES) + 1);
    let (mut store, mut steps) = if is_new {
        let store = Store::create(mounted.store(), &options(mounted.log())).unwrap();
        threads::make_trees(&store);
        note(&format!("{layout:?}"), 1);
        say("lab: ready");
        (store, Steps::default())
    } else {
        // The machine may die in the recovery.
        say("lab: ready");
        recover(mounted, layout, &notes)
    };
    let acknowledge = |thread, steps| note(&name_of(layout, thread), steps);
    if notes.number(MACHINES) % 3 < 2 {
        threads::run(&store, (steps, u64::MAX), &acknowledge);
    }
    // Every third machine may die while a store is closed or opened.
    loop {
        threads::run(&store, (steps, STEPS_OF_OPEN), &acknowledge);
        store.close().unwrap();
        // All steps are durable, also those that no thread has waited for.
        let closed = steps.map(|steps| steps + STEPS_OF_OPEN);
        (0..THREADS).for_each(|thread| acknowledge(thread, closed[thread]));
        (store, steps) = recover(mounted, layout, &notes);
        assert_eq!(steps, closed, "the steps of a store that was closed");
    }
}

#[test]
#[ignore = "checks what the machines have left"]
fn look() {
    let Some(notes) = Notes::read() else { return };
    // The test's own line has not ended.
    say("");
    let layouts = [Layout::FileSystem, Layout::Raw].into_iter().filter(|it| notes.is_made(*it));
    let mut all = 0;
    for layout in layouts {
        let folder = tempdir().unwrap();
        let mounted = mount(layout, folder.path(), false);
        let (store, steps) = recover(&mounted.0, layout, &notes);
        all += (0..THREADS).map(|thread| steps[thread]).sum::<u64>();
        // The store takes changes again.
        threads::run(&store, (steps, 1), &|_, _| ());
        store.close().unwrap();
    }
    assert!(all > 0, "no machine has made a step");
}
