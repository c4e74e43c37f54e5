//! Damaged or crafted persistent memory: the module refuses it, or no process can reach other
//! memory through it.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::plan;
use vellum_kernel_tests::persistent::{self, DEVICE, FOLDER, mount, unmount};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, Turn, access, morsel_turn, sys};
use vellum_uapi::morsel::extent;

/// Words of a page.
const WORDS: u64 = 512;
/// The layout of a device.
const GUARD: u64 = 1;
const SLOTS: u64 = 2;
const SLOT_BYTES: u64 = 504;
/// The words of a slot that have a meaning, up to the first words of its name.
const SLOT_WORDS: u64 = 10;
/// The words of the first page that have a meaning, and the word with the device's physical
/// address.
const SUPER_WORDS: u64 = 5;
const SUPER_ADDRESS: u64 = 4 * 8;
/// More pages than these tests use on the device.
const USED_PAGES: u64 = 2048;

/// Bits of an entry that leads to a table, and of a leaf of 2 MiB that any user may write to.
const TABLE: u64 = 0x67;
const LEAF: u64 = (1 << 63) | 0xe7;
/// The present bit.
const PRESENT: u64 = 1;
const NUMBER: u64 = 0x000f_ffff_ffff_f000;

/// A turn with an empty device, which is not mounted.
fn turn() -> Option<Turn> {
    let turn = morsel_turn()?;
    persistent::is_there().then(|| {
        persistent::format();
        unmount().unwrap();
    })?;
    Some(turn)
}

fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// Creates a Morsel that all users may open.
fn create(name: &str, order: u32) -> Morsel {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(path(name)).unwrap();
    file.set_permissions(Permissions::from_mode(0o666)).unwrap();
    let morsel = Morsel::from_file(file);
    morsel.create(&plan(order, extent(order), 0)).unwrap();
    morsel
}

/// The device itself, while it is not mounted.
struct Raw {
    device: File,
    /// The physical address of its first page.
    address: u64,
}

impl Raw {
    fn open() -> Self {
        let device = OpenOptions::new().read(true).write(true).open(DEVICE).unwrap();
        let mut raw = Self { device, address: 0 };
        raw.address = raw.word(SUPER_ADDRESS);
        raw
    }

    fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.device.read_exact_at(&mut word, at).unwrap();
        u64::from_le_bytes(word)
    }

    fn page(&self, index: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        self.device.read_exact_at(&mut page, index * PAGE as u64).unwrap();
        page
    }

    fn set(&self, at: u64, value: u64) {
        self.device.write_all_at(&value.to_le_bytes(), at).unwrap();
        self.device.sync_all().unwrap();
    }

    /// Zeroes the first pages of the device, `count` at most.
    fn clear(&self, count: u64) {
        let all = (&self.device).seek(SeekFrom::End(0)).unwrap() / PAGE as u64;
        let chunk = vec![0; USED_PAGES as usize * PAGE];
        for first in (0..all.min(count)).step_by(USED_PAGES as usize) {
            let length = (all.min(count) - first).min(USED_PAGES) as usize * PAGE;
            self.device.write_all_at(&chunk[..length], first * PAGE as u64).unwrap();
        }
        self.device.sync_all().unwrap();
    }

    /// An entry for a page of the device.
    fn entry(&self, index: u64, bits: u64) -> u64 {
        (self.address + index * PAGE as u64) | bits
    }

    fn index(&self, entry: u64) -> u64 {
        (entry & NUMBER).wrapping_sub(self.address) / PAGE as u64
    }

    /// The used slots.
    fn slots(&self) -> Vec<u64> {
        let first = SLOTS * PAGE as u64;
        let slots = (0..PAGE as u64 / SLOT_BYTES).map(|slot| first + slot * SLOT_BYTES);
        slots.filter(|at| self.word(*at) != 0).collect()
    }

    /// The table of level `order` of the Morsel in the slot.
    fn root(&self, slot: u64) -> (u64, u32) {
        let order = self.word(slot + 16) as u32;
        (self.word(slot + 8), order.max(1))
    }

    /// All tables of this level, by their pages.
    fn tables(&self, level: u32) -> Vec<u64> {
        let mut tables = Vec::new();
        for slot in self.slots() {
            let (root, order) = self.root(slot);
            self.tables_below(root, order, level, &mut tables);
        }
        tables
    }

    fn tables_below(&self, table: u64, at: u32, level: u32, tables: &mut Vec<u64>) {
        if at == level {
            tables.push(table);
        }
        if at <= level {
            return;
        }
        for entry in words(&self.page(table)) {
            if entry != 0 && self.index(entry) != GUARD {
                self.tables_below(self.index(entry), at - 1, level, tables);
            }
        }
    }
}

fn words(page: &[u8]) -> Vec<u64> {
    page.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Processors walk the guard wherever a Morsel of order 3 has no table. So mounting the device
/// clears the guard.
#[test]
fn the_contents_of_the_guard_are_ignored() {
    let Some(_turn) = turn() else { return };
    let raw = Raw::open();
    for index in 0..WORDS {
        // Entries for the machine's first GiB, which has the kernel.
        raw.set(GUARD * PAGE as u64 + index * 8, (index << 21) | LEAF);
    }
    drop(raw);
    mount("mode=1777").unwrap();
    in_child(|| {
        become_user(1 << 30);
        let morsel = Morsel::nameless_in(Path::new(FOLDER)).unwrap();
        morsel.create(&plan(3, extent(3), 0)).unwrap();
        let mapping = morsel.mapped();
        for block in 0..WORDS {
            let page = access::kernel_load(mapping.page(block * WORDS), PAGE).unwrap();
            assert!(
                page.iter().all(|byte| *byte == 0),
                "2 MiB number {block} does not belong to the user"
            );
        }
    });
    assert_morsels_are_sound();
    unmount().unwrap();
}

/// Above level 2, absent tables have the guard's entry, so a crash never leaves an empty entry
/// there.
#[test]
fn an_empty_entry_above_level_2_is_refused() {
    let Some(_turn) = turn() else { return };
    mount("").unwrap();
    create("damaged", 3).stamp(0, 1);
    unmount().unwrap();
    let raw = Raw::open();
    let (root, order) = raw.root(raw.slots()[0]);
    assert_eq!((order, raw.index(raw.word(root * PAGE as u64 + 5 * 8))), (3, GUARD));
    raw.set(root * PAGE as u64 + 5 * 8, 0);
    drop(raw);
    assert_eq!(mount(""), Err(Errno::UCLEAN));
    mount("format").unwrap();
    unmount().unwrap();
}

/// An entry without its present bit, as a crash leaves it: the page belongs to the Morsel.
#[test]
fn an_entry_without_its_present_bit_is_found() {
    let Some(_turn) = turn() else { return };
    mount("").unwrap();
    for order in 0..=3_u32 {
        create(&format!("{order}"), order).stamp(0, u64::from(order));
    }
    unmount().unwrap();
    let raw = Raw::open();
    for table in raw.tables(1) {
        let at = table * PAGE as u64;
        raw.set(at, raw.word(at) & !PRESENT);
    }
    drop(raw);
    mount("").unwrap();
    for order in 0..=3_u32 {
        let morsel = Morsel::from_file(File::open(path(&format!("{order}"))).unwrap());
        assert_eq!(morsel.stat().pages, 1);
        morsel.map(libc::PROT_READ).unwrap().assert_stamped(0, u64::from(order));
    }
    unmount().unwrap();
}

/// The pages of each Morsel on the devices to damage.
const PLACES: [u64; 6] = [0, 1, 511, 512, 1000, WORDS * WORDS + 3];

fn places(order: u32) -> impl Iterator<Item = u64> {
    PLACES.into_iter().filter(move |page| *page < extent(order) / PAGE as u64)
}

/// After changes of words, the module refuses the device, or mounts it. Then a user who maps all
/// Morsels finds pages of the device and nothing else.
#[test]
fn a_damaged_device_does_no_harm() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let (mut mounted, mut refused) = (0, 0);
    // A damaged entry may lead to any page of the device, so no page may have contents that this
    // test does not know. Other tests have left file systems there.
    Raw::open().clear(u64::MAX);
    for _ in 0..60 {
        Raw::open().clear(USED_PAGES);
        mount("format").unwrap();
        for order in 0..=3_u32 {
            let morsel = create(&format!("{order}"), order);
            places(order).for_each(|page| morsel.stamp(page, page + 1));
        }
        unmount().unwrap();
        let raw = Raw::open();
        let targets = Targets::of(&raw);
        let what: Vec<String> =
            (0..=random.below(3)).map(|_| damage(&raw, &targets, &mut random)).collect();
        let pages: HashSet<Vec<u8>> =
            (SLOTS + 1..USED_PAGES).map(|index| raw.page(index)).collect();
        drop(raw);
        println!("{what:?}");
        if mount("mode=1777").is_ok() {
            mounted += 1;
            let more = Random::new(random.number());
            in_child(|| {
                become_user(1 << 30);
                look_around(&pages, more);
            });
            assert_morsels_are_sound();
            unmount().unwrap();
            // Stores do not change the format of the device.
            mount("").unwrap();
            unmount().unwrap();
        } else {
            refused += 1;
        }
    }
    mount("format").unwrap();
    unmount().unwrap();
    println!("{mounted} mounted, {refused} refused");
    assert!(mounted > 0 && refused > 0, "{mounted} and {refused}: all alike");
}

/// The places of words with a meaning, in the undamaged device.
struct Targets {
    slots: Vec<u64>,
    /// Tables by their level.
    tables: [Vec<u64>; 4],
}

impl Targets {
    fn of(raw: &Raw) -> Self {
        Self { slots: raw.slots(), tables: [0, 1, 2, 3].map(|level| raw.tables(level)) }
    }
}

/// Changes a word with a meaning, and returns a description.
fn damage(raw: &Raw, targets: &Targets, random: &mut Random) -> String {
    let (what, at) = match random.below(8) {
        0 => (0, random.below(SUPER_WORDS) * 8),
        1 => (1, GUARD * PAGE as u64 + random.below(WORDS) * 8),
        2 => (2, random.pick(&targets.slots) + random.below(SLOT_WORDS) * 8),
        _ => {
            let level = 1 + random.below(3);
            let table = random.pick(&targets.tables[level as usize]);
            let entries = words(&raw.page(table));
            let used: Vec<u64> = (0..WORDS).filter(|i| entries[*i as usize] != 0).collect();
            let is_any = used.is_empty() || random.one_in(3);
            let index = if is_any { random.below(WORDS) } else { random.pick(&used) };
            (10 + level, table * PAGE as u64 + index * 8)
        }
    };
    let old = raw.word(at);
    let value = match random.below(7) {
        0 => 0,
        1 => random.number(),
        2 => old ^ (1 << random.below(64)),
        3 => old.wrapping_add(PAGE as u64 * random.below(64)),
        4 => raw.entry(random.below(USED_PAGES), TABLE),
        5 => (random.below(1 << 18) * PAGE as u64) | TABLE,
        _ => (random.below(1 << 10) << 21) | LEAF,
    };
    raw.set(at, value);
    format!("{what}: {at:#x} was {old:#x}, is {value:#x}")
}

/// Maps all Morsels and a new one. Fails if it finds a page that is not on the device.
fn look_around(pages: &HashSet<Vec<u8>>, mut random: Random) {
    let own = Morsel::nameless_in(Path::new(FOLDER)).unwrap();
    own.create(&plan(3, extent(3), 0)).unwrap();
    let named = fs::read_dir(FOLDER).unwrap().map(|name| name.unwrap().path());
    // The damage may have changed the permissions.
    let opened = named.filter_map(|path| OpenOptions::new().read(true).write(true).open(path).ok());
    for morsel in opened.map(Morsel::from_file).chain([own]) {
        let order = morsel.stat().order;
        if morsel.stat().length == 0 {
            continue;
        }
        for protection in [libc::PROT_READ, sys::READ_WRITE] {
            // A Morsel that the damage has sealed is read-only.
            let Ok(mapping) = morsel.map(protection) else { continue };
            let all = extent(order) / PAGE as u64;
            let others: Vec<u64> = (0..40).map(|_| random.below(all)).collect();
            let blocks = (0..all.min(1 << 16)).step_by(WORDS as usize);
            for page in places(order).chain(others).chain(blocks) {
                look_at(&mapping, page, pages);
            }
        }
    }
}

fn look_at(mapping: &Mapping, page: u64, pages: &HashSet<Vec<u8>>) {
    let Ok(found) = access::kernel_load(mapping.page(page), PAGE) else { return };
    let is_known = |found: &Vec<u8>| {
        found.iter().all(|byte| *byte == 0) || pages.contains(found) || is_stored(found)
    };
    assert!(is_known(&found), "page {page}: {:x?}", &words(&found)[..8]);
    let _ = access::kernel_store(mapping.page(page), &stored());
}

/// The value that a user stores.
fn stored() -> Vec<u8> {
    access::stamped(u64::MAX)
}

fn is_stored(found: &[u8]) -> bool {
    found == stored()
}
