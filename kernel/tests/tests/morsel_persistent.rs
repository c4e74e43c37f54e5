//! Morsels on persistent memory: they survive unmounting, and the module checks what it finds.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{Read as _, pipe};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::plan;
use vellum_kernel_tests::persistent::{self, DEVICE, FOLDER, again, format, mount, unmount};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::wait_until;
use vellum_kernel_tests::{Morsel, PAGE, Turn, access, morsel_turn, mounted, sys};
use vellum_uapi::morsel::{self, extent};

/// A turn with empty persistent memory for this test alone.
fn turn() -> Option<Turn> {
    let turn = morsel_turn()?;
    persistent::is_there().then(format)?;
    Some(turn)
}

/// Unmounts the device when this is dropped.
struct Mounted;

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = unmount();
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

fn create(name: &str) -> Morsel {
    let mut options = OpenOptions::new();
    Morsel::from_file(options.read(true).write(true).create_new(true).open(path(name)).unwrap())
}

fn open(name: &str) -> Morsel {
    Morsel::from_file(OpenOptions::new().read(true).write(true).open(path(name)).unwrap())
}

fn used_pages() -> u64 {
    let stat = rustix::fs::statfs(FOLDER).unwrap();
    stat.f_blocks - stat.f_bfree
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(FOLDER).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn names_shapes_and_pages_are_found_again() {
    let Some(_turn) = turn() else { return };
    let _mounted = Mounted;
    let mut random = Random::of_this_run();
    let mut pages: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut stats = BTreeMap::new();
    // A device supports no other kinds.
    for order in 0..=3 {
        let name = format!("of order {order}");
        let morsel = create(&name);
        morsel.create(&plan(order, extent(order) - 7 * u64::from(order), 0)).unwrap();
        let mapping = morsel.mapped();
        let chosen: Vec<u64> = (0..40).map(|_| random.below(extent(order) / PAGE as u64)).collect();
        for page in &chosen {
            access::kernel_store(mapping.page(*page), &access::stamped(*page)).unwrap();
        }
        morsel.file().set_permissions(Permissions::from_mode(0o640 + order)).unwrap();
        if order == 2 {
            drop(mapping);
            morsel.seal(morsel::SEAL_CONTENT).unwrap();
        }
        stats.insert(name.clone(), morsel::Stat { mounts: 0, ..morsel.stat() });
        pages.insert(name, chosen);
    }
    drop(create("without a shape"));
    drop(create("gone"));
    fs::remove_file(path("gone")).unwrap();
    let used = used_pages();
    for _ in 0..3 {
        again();
        assert_eq!(used_pages(), used);
        assert_eq!(names().len(), 5, "{:?}", names());
        for (name, chosen) in &pages {
            let morsel = open(name);
            assert_eq!(morsel.stat(), stats[name]);
            let order = morsel.stat().order;
            assert_eq!(
                morsel.file().metadata().unwrap().permissions().mode() & 0o777,
                0o640 + order
            );
            let mapping = morsel.map(libc::PROT_READ).unwrap();
            for page in chosen {
                let found = access::kernel_load(mapping.page(*page), PAGE).unwrap();
                assert!(found == access::stamped(*page), "{name}, page {page}");
            }
            assert_eq!(morsel.stat().pages, stats[name].pages, "reading populated no page");
        }
        assert_morsels_are_sound();
    }
    open("without a shape").create(&plan(1, 4096, 0)).unwrap();
    for name in names() {
        fs::remove_file(path(&name)).unwrap();
    }
    assert_eq!(used_pages(), 0);
    again();
    assert_eq!((used_pages(), names().len()), (0, 0));
}

#[test]
fn punched_pages_and_lost_names_are_free() {
    let Some(_turn) = turn() else { return };
    let _mounted = Mounted;
    let morsel = create("kept");
    morsel.create(&plan(2, 64 << 20, 0)).unwrap();
    morsel.populate(0, 64 << 20).unwrap();
    morsel.stamp(0, 1);
    morsel.punch(PAGE as u64, (64 << 20) - PAGE as u64).unwrap();
    assert_eq!(morsel.stat().pages, 1);
    let nameless = Morsel::nameless_in(Path::new(FOLDER)).unwrap();
    nameless.create(&plan(2, 64 << 20, 0)).unwrap();
    nameless.populate(0, 32 << 20).unwrap();
    let lost = create("lost");
    lost.create(&plan(2, 64 << 20, 0)).unwrap();
    lost.populate(0, 32 << 20).unwrap();
    fs::remove_file(path("lost")).unwrap();
    lost.stamp(8191, 5);
    lost.assert_stamped(8191, 5);
    drop((morsel, nameless, lost));
    let tables = open("kept").stat().tables;
    assert_eq!(used_pages(), 1 + tables);
    again();
    assert_eq!(used_pages(), 1 + tables);
    open("kept").assert_stamped(0, 1);
}

/// A pipe gets a copy of the contents, not the pages.
#[test]
fn a_pipe_holds_no_page() {
    let Some(_turn) = turn() else { return };
    let _mounted = Mounted;
    let morsel = create("piped");
    morsel.create(&plan(2, 4 << 20, 0)).unwrap();
    morsel.stamp(0, 1);
    let (mut from, into) = pipe().unwrap();
    let moved = sys::splice((morsel.as_fd(), Some(0)), (into.as_fd(), None), PAGE);
    assert_eq!(moved, Ok(PAGE));
    morsel.punch(0, PAGE as u64).unwrap();
    morsel.stamp(0, 2);
    let mut found = vec![0; PAGE];
    from.read_exact(&mut found).unwrap();
    assert!(found == access::stamped(1));
    // The Morsel ends before the pipe does.
    let moved = sys::splice((morsel.as_fd(), Some(0)), (into.as_fd(), None), PAGE);
    assert_eq!(moved, Ok(PAGE));
    drop(morsel);
    fs::remove_file(path("piped")).unwrap();
    assert_eq!(used_pages(), 0);
}

#[test]
fn a_full_device_loses_nothing() {
    let Some(_turn) = turn() else { return };
    let _mounted = Mounted;
    let morsel = create("full");
    morsel.create(&plan(2, 1 << 30, 0)).unwrap();
    assert_eq!(morsel.populate(0, 1 << 30), Err(Errno::NOSPC));
    let pages = morsel.stat().pages;
    assert!(pages > 10_000, "{pages}");
    morsel.stamp(pages / 2, 3);
    let mapping = morsel.mapped();
    let beyond = mapping.page((1 << 18) - 1);
    assert_eq!(
        access::store(beyond, 1),
        Err(access::Fault { signal: libc::SIGBUS, address: beyond })
    );
    drop((mapping, morsel));
    again();
    let morsel = open("full");
    assert_eq!(morsel.stat().pages, pages);
    morsel.assert_stamped(pages / 2, 3);
    morsel.punch(0, 1 << 30).unwrap();
    morsel.populate(0, 4 << 20).unwrap();
    drop(morsel);
    fs::remove_file(path("full")).unwrap();
    assert_eq!(used_pages(), 0);
}

#[test]
fn unsuitable_devices_are_refused() {
    let Some(_turn) = turn() else { return };
    let mounted = Mounted;
    let folder = std::env::temp_dir().join("another");
    fs::create_dir_all(&folder).unwrap();
    let elsewhere = |source, options| mounted::mount(source, &folder, options, 0);
    assert_eq!(elsewhere(DEVICE, ""), Err(Errno::BUSY), "it is mounted already");
    assert_eq!(elsewhere("/dev/ram0", "format"), Err(Errno::OPNOTSUPP));
    assert_eq!(elsewhere("/dev/nothing", ""), Err(Errno::NOENT));
    let morsel = create("kinds");
    for flags in [morsel::PINNABLE, morsel::HUGE] {
        assert_eq!(morsel.create(&plan(2, 4096, flags)), Err(Errno::INVAL));
    }
    drop(morsel);
    assert!(fs::create_dir(path("folder")).is_err());
    assert!(fs::hard_link(path("kinds"), path("again")).is_err());
    assert!(fs::rename(path("kinds"), path("otherwise")).is_err());
    drop(mounted);
    OpenOptions::new().write(true).open(DEVICE).unwrap().write_all_at(&[0; 8], 0).unwrap();
    assert_eq!(mount(""), Err(Errno::INVAL), "there is no such device");
    mount("format").unwrap();
    unmount().unwrap();
}

/// Unbinding the driver waits until the device is unmounted. Until then everything works as before.
#[test]
fn a_driver_waits_until_its_device_is_unmounted() {
    const DRIVER: &str = "/sys/bus/nd/drivers/nd_pmem";
    let Some(_turn) = turn() else { return };
    let mounted = Mounted;
    let device = fs::read_link("/sys/block/pmem0/device").unwrap();
    let device = device.file_name().unwrap().to_str().unwrap().to_owned();
    let morsel = create("kept");
    morsel.create(&plan(3, 1 << 30, 0)).unwrap();
    let mapping = morsel.mapped();
    mapping.stamp(0, 1);
    std::thread::scope(|scope| {
        let unbinding = scope.spawn(|| fs::write(format!("{DRIVER}/unbind"), &device).unwrap());
        wait_until(|| !Path::new("/sys/block/pmem0").exists());
        std::thread::sleep(Duration::from_millis(200));
        assert!(!unbinding.is_finished(), "the driver is gone while its memory has users");
        mapping.assert_stamped(0, 1);
        mapping.stamp(1000, 2);
        morsel.file().sync_all().unwrap();
        drop((mapping, morsel));
        drop(mounted);
        unbinding.join().unwrap();
    });
    fs::write(format!("{DRIVER}/bind"), &device).unwrap();
    wait_until(|| Path::new(DEVICE).exists());
    mount("").unwrap();
    let _mounted = Mounted;
    open("kept").assert_stamped(1000, 2);
}

/// Bits for the pages of 128 GiB take 4 MiB, which is all that the slab allocator gives in a row.
#[test]
#[ignore = "needs a device of its own: make lab has one"]
fn a_device_may_have_more_than_128_gib() {
    let Some(_turn) = turn() else { return };
    let mounted = Mounted;
    let pages = rustix::fs::statfs(FOLDER).unwrap().f_blocks;
    assert!(pages * PAGE as u64 > 128 << 30, "{pages} pages");
    let morsel = create("far");
    morsel.create(&plan(3, extent(3), 0)).unwrap();
    let places = [0, 511, 512, 262_144, extent(3) / PAGE as u64 - 1];
    places.iter().for_each(|page| morsel.stamp(*page, *page));
    let used = used_pages();
    drop(morsel);
    again();
    let morsel = open("far");
    places.iter().for_each(|page| morsel.assert_stamped(*page, *page));
    assert_eq!(used_pages(), used);
    drop(morsel);
    fs::remove_file(path("far")).unwrap();
    assert_eq!(used_pages(), 0);
    drop(mounted);
}
