//! Processes and threads use one Morsel in different ways at the same time. In every order a page
//! shows the stores to it, or zeros. Afterwards all counters are right.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{Read as _, Write as _, pipe};

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{highest_order, kinds, plan};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::threads::{Barrier, Deadline, Place, Stop, rounds, stay_on, wait_until};
use vellum_kernel_tests::{Errno, Mapping, Morsel, Mounted, PAGE, morsel_turn};
use vellum_uapi::morsel::{self, extent};

const MIB: u64 = 1 << 20;

/// The contents of a page after a store.
fn tag(page: u64) -> u8 {
    (page * 7 % 251 + 1) as u8
}

/// Pages that processes use: at the ends of tables, and few, so that processes often meet.
fn page(random: &mut Random, pages: u64) -> u64 {
    let near = random.pick(&[0, 512, 1024, 262_144, pages]);
    (near + random.below(40)).saturating_sub(20).min(pages - 1)
}

#[track_caller]
fn check(found: Result<u8, Fault>, page: u64) {
    let found = found.unwrap();
    assert!([0, tag(page)].contains(&found), "page {page} holds {found:#x}, not {:#x}", tag(page));
}

/// The part of one process or thread.
struct Actor<'a> {
    morsel: &'a Morsel,
    mapping: Mapping,
    reader: Mapping,
    random: Random,
    pages: u64,
}

impl<'a> Actor<'a> {
    fn new(morsel: &'a Morsel, seed: u64) -> Self {
        let reader = morsel.map(libc::PROT_READ).unwrap();
        let pages = morsel.stat().length / PAGE as u64;
        Self { morsel, mapping: morsel.mapped(), reader, random: Random::new(seed), pages }
    }

    fn act(&mut self) {
        let page = page(&mut self.random, self.pages);
        let (offset, size) = (page * PAGE as u64, PAGE as u64);
        let count = (1 + self.random.below(30)).min(self.pages - page);
        match self.random.below(13) {
            0 | 1 => check(access::load(self.mapping.page(page) + 99), page),
            2 | 3 => check(access::load(self.reader.page(page) + 99), page),
            4 | 5 => access::store(self.mapping.page(page) + 99, tag(page)).unwrap(),
            6 => self.morsel.punch(offset, count * size).unwrap(),
            7 => self.morsel.populate(offset, count * size).unwrap(),
            8 => {
                let bytes = vec![tag(page); PAGE];
                assert_eq!(rustix::io::pwrite(self.morsel, &bytes, offset), Ok(PAGE));
            }
            9 => {
                let mut byte = [0];
                assert_eq!(rustix::io::pread(self.morsel, &mut byte, offset + 99), Ok(1));
                check(Ok(byte[0]), page);
            }
            10 => self.map_anew(page),
            11 if self.random.one_in(8) => {
                // All pages of a table, or of 2 MiB.
                let first = page / 512 * 512;
                let count = 512.min(self.pages - first);
                self.morsel.punch(first * size, count * size).unwrap();
            }
            11 => {
                sys::madvise(self.mapping.page(page), PAGE, libc::MADV_REMOVE).unwrap();
            }
            _ => self.change_rights(page),
        }
    }

    fn map_anew(&mut self, page: u64) {
        match self.random.below(3) {
            0 => self.mapping = self.morsel.mapped(),
            1 => self.reader = self.morsel.map(libc::PROT_READ).unwrap(),
            _ => check(access::load(self.morsel.mapped().page(page) + 99), page),
        }
    }

    fn change_rights(&mut self, page: u64) {
        let (start, length) = (self.reader.start(), self.reader.length());
        sys::mprotect(start, length, sys::READ_WRITE).unwrap();
        access::store(self.reader.page(page) + 99, tag(page)).unwrap();
        sys::mprotect(start, length, libc::PROT_READ).unwrap();
        check(access::load(self.reader.page(page) + 99), page);
        let address = self.reader.page(page);
        let fault = Fault { signal: libc::SIGSEGV, address };
        assert_eq!(access::store(address, 0xff), Err(fault));
    }
}

/// Every page shows the same through every mapping and descriptor.
#[track_caller]
fn assert_shown_alike(morsel: &Morsel, mappings: &[&Mapping]) {
    let pages = morsel.stat().length / PAGE as u64;
    for page in (0..40.min(pages)).chain((490..560).filter(|page| *page < pages)) {
        for (index, writer) in mappings.iter().enumerate() {
            let value = index as u8 + 100;
            access::store(writer.page(page), value).unwrap();
            for reader in mappings {
                assert_eq!(access::load(reader.page(page)), Ok(value), "page {page}");
            }
            let mut byte = [0];
            rustix::io::pread(morsel, &mut byte, page * PAGE as u64).unwrap();
            assert_eq!(byte, [value], "page {page} through the descriptor");
        }
    }
}

/// A Morsel of a kind, whose pages are in few tables.
fn made((order, flags): (u32, u64)) -> Morsel {
    let length = extent(order).min((1 << 30) + 2 * MIB);
    Morsel::new(order, length, flags)
}

#[test]
fn processes_do_everything_at_once() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    for (order, flags) in kinds() {
        let before = Memory::now();
        let morsel = made((order, flags | morsel::INHERIT));
        let inherited = morsel.mapped();
        let seed = random.number();
        let start = |number: u64| {
            Child::start(|| {
                let mut actor = Actor::new(&morsel, seed ^ number);
                let deadline = Deadline::after_ms(350);
                for _ in deadline.rounds() {
                    (0..20).for_each(|_| actor.act());
                    check(access::load(inherited.start() + 99), 0);
                    if number == 0 {
                        let child = Child::start(|| {
                            check(access::load(actor.mapping.start() + 99), 0);
                            (0..20).for_each(|_| actor.act());
                            0
                        });
                        assert_eq!(child.wait(), End::Status(0));
                    }
                }
                0
            })
        };
        let children: Vec<Child> = (0..4).map(start).collect();
        for child in children {
            assert_eq!(child.wait(), End::Status(0), "order {order}, flags {flags:#x}");
        }
        assert_eq!(morsel.stat().mounts, 1);
        assert_shown_alike(&morsel, &[&inherited, &morsel.mapped()]);
        assert_morsels_are_sound();
        drop((inherited, morsel));
        before.assert_back();
    }
}

#[test]
fn threads_do_everything_at_once() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    for kind in kinds() {
        let before = Memory::now();
        let morsel = made(kind);
        let deadline = Deadline::after_ms(350);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (morsel, seed) = (&morsel, random.number());
                scope.spawn(move || {
                    let mut actor = Actor::new(morsel, seed);
                    for _ in deadline.rounds() {
                        actor.act();
                    }
                });
            }
        });
        assert_eq!(morsel.stat().mounts, 0);
        assert_shown_alike(&morsel, &[&morsel.mapped(), &morsel.mapped()]);
        assert_morsels_are_sound();
        drop(morsel);
        before.assert_back();
    }
}

/// One thread punches a page while others populate it. Afterwards a process that maps it has the
/// present page, and no freed one.
#[test]
fn no_process_keeps_a_punched_page() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = Morsel::of(kind);
        for _ in 0..4 {
            let (mut ready, readies) = pipe().unwrap();
            let (wait, mut go) = pipe().unwrap();
            // Each punch interrupts processors, which may be slow in an emulator.
            let deadline = Deadline::after_ms(1_000);
            let start = |number: u8| {
                Child::start(|| {
                    let mapping = morsel.mapped();
                    (&readies).write_all(b"!").unwrap();
                    for round in (0..3000_u64).take_while(|_| !deadline.is_over()) {
                        let address = mapping.start() + 8 * usize::from(number);
                        access::store(address, 1).unwrap();
                        if round % 3 == 0 {
                            morsel.punch(0, PAGE as u64).unwrap();
                        }
                    }
                    (&readies).write_all(b"!").unwrap();
                    // All threads are done. Each in turn reports the page that it sees.
                    (&wait).read_exact(&mut [0]).unwrap();
                    let found = access::load(mapping.start() + 2000).unwrap();
                    i32::from(found)
                })
            };
            let children: Vec<Child> = (0..3).map(start).collect();
            ready.read_exact(&mut [0; 6]).unwrap();
            assert_eq!(rustix::io::pwrite(&morsel, &[77; PAGE], 0), Ok(PAGE));
            go.write_all(b"!!!").unwrap();
            for child in children {
                assert_eq!(child.wait(), End::Status(77), "{kind:x?}: it sees another page");
            }
            assert_morsels_are_sound();
        }
    }
}

/// A page that a process and its children have.
fn shared_page() -> Mapping {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let protection = sys::READ_WRITE;
    let request = Request { address: 0, length: PAGE, protection, flags, fd: None, offset: 0 };
    Mapping::new(request).unwrap()
}

/// The same with one process that punches and one that accesses. A stale mapping of a freed page
/// would last long.
#[test]
fn no_process_keeps_a_page_for_long() {
    let Some(_turn) = morsel_turn() else { return };
    const OVER: u8 = u8::MAX;
    // The last punched page, by a number that recurs; or OVER.
    let rounds = shared_page();
    let round = || access::load(rounds.start()).unwrap();
    for kind in kinds() {
        let morsel = Morsel::of(kind);
        access::store(rounds.start(), 0).unwrap();
        let child = Child::start(|| {
            stay_on(1);
            let mapping = morsel.mapped();
            let deadline = Deadline::after_ms(700);
            for _ in deadline.rounds() {
                access::store(mapping.start(), 5).unwrap();
                let is_gone = |_| {
                    let mut byte = [0];
                    rustix::io::pread(&morsel, &mut byte, 0).unwrap();
                    byte == [0]
                };
                // Punching may take long, for example because a processor is stopped. Once it is
                // done, a punched page is not accessible.
                if (0..2000).all(is_gone) && access::load(mapping.start()) == Ok(5) {
                    let before = round();
                    wait_until(|| before == OVER || round() != before);
                    assert!(is_gone(0));
                    let found = access::load(mapping.start());
                    assert_eq!(found, Ok(0), "it is present, but the Morsel does not have it");
                }
            }
            0
        });
        let place = Place::on(0);
        let deadline = Deadline::after_ms(650);
        for number in (0..OVER).cycle().take_while(|_| !deadline.is_over()) {
            morsel.punch(0, PAGE as u64).unwrap();
            access::store(rounds.start(), number).unwrap();
        }
        access::store(rounds.start(), OVER).unwrap();
        drop(place);
        assert_eq!(child.wait(), End::Status(0), "{kind:x?}");
    }
}

/// 2 MiB are split into 512 pages while other threads access them. Present pages are present all
/// the time.
#[test]
fn a_split_is_invisible() {
    let Some(_turn) = morsel_turn() else { return };
    const BLOCKS: u64 = 24;
    for order in [2, 3] {
        // Exactly the quota that the pages and the split need, or more.
        let needed = (BLOCKS * 513 + 4) * PAGE as u64;
        for (seals, size) in [(0, 1 << 30), (morsel::SEAL_POPULATION, 1 << 30), (0, needed)] {
            let mounted = Mounted::new(&format!("size={size}")).unwrap();
            for _ in 0..6 {
                let morsel = mounted.nameless();
                morsel.create(&plan(order, BLOCKS * 2 * MIB, morsel::HUGE)).unwrap();
                morsel.populate(0, BLOCKS * 2 * MIB).unwrap();
                assert_eq!(morsel.stat().huge, BLOCKS);
                morsel.seal(seals).unwrap();
                let stop = Stop::default();
                let mapping = morsel.mapped();
                (0..BLOCKS * 512).for_each(|page| access::store(mapping.page(page), 7).unwrap());
                std::thread::scope(|scope| {
                    for thread in 0..3 {
                        let (mapping, stop, morsel) = (&mapping, &stop, &morsel);
                        let mut random = Random::new(thread);
                        scope.spawn(move || {
                            while !stop.is_said() {
                                // Not the first page, which is punched.
                                let page = random.below(BLOCKS) * 512 + 1 + random.below(511);
                                let found = access::load(mapping.page(page));
                                assert_eq!(found, Ok(7), "seals {seals:#x}, {size} bytes");
                                let mut byte = [0];
                                let at = page * PAGE as u64;
                                assert_eq!(rustix::io::pread(morsel, &mut byte, at), Ok(1));
                                assert_eq!(byte, [7]);
                            }
                        });
                    }
                    let _at_end = stop.at_end();
                    for block in 0..BLOCKS {
                        morsel.punch(block * 2 * MIB, PAGE as u64).unwrap();
                    }
                });
                assert_eq!((morsel.stat().huge, morsel.stat().pages), (0, BLOCKS * 511));
                assert_morsels_are_sound();
            }
        }
    }
}

/// One thread punches single pages, which splits leaves of 2 MiB, and another one all pages.
#[test]
fn a_punch_finds_the_pages_of_a_leaf_that_is_being_split() {
    let Some(_turn) = morsel_turn() else { return };
    let (block, blocks) = (extent(1), 16);
    for round in 0..150 {
        let morsel = Morsel::new(2, blocks * block, morsel::HUGE);
        let _mapping = morsel.mapped();
        morsel.populate(0, blocks * block).unwrap();
        let begin = Barrier::new(2);
        let single = || {
            stay_on(0);
            begin.wait();
            // In every other round the threads meet; else they go side by side.
            let parts = (0..blocks).map(|at| if round % 2 == 0 { blocks - 1 - at } else { at });
            parts.for_each(|part| morsel.punch(part * block + block / 2, 4096).unwrap());
        };
        let all = || {
            stay_on(1);
            begin.wait();
            morsel.punch(0, blocks * block).unwrap();
        };
        std::thread::scope(|threads| {
            threads.spawn(single);
            threads.spawn(all);
        });
        assert_eq!(morsel.pages_by_fstat(), 0, "round {round}");
    }
    assert_morsels_are_sound();
}

/// One thread punches a Morsel without tables again and again, until another one has populated the
/// first page. Both take turns on one processor, so the first is interrupted wherever it may be.
#[test]
fn a_punch_ends_where_a_table_ends_that_has_just_come() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 3..=highest_order() {
        for _ in 0..rounds(160) {
            let morsel = Morsel::new(order, extent(order), 0);
            let stop = Stop::default();
            let _place = Place::on(0);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    while !stop.is_said() {
                        morsel.punch(0, extent(order)).unwrap();
                    }
                });
                let _at_end = stop.at_end();
                std::thread::yield_now();
                morsel.populate(0, PAGE as u64).unwrap();
            });
            assert!(morsel.stat().pages <= 1);
        }
    }
    assert_morsels_are_sound();
}

/// Threads access it while its addresses change again and again: by rights, by fork, by other
/// mappings in the same place.
#[test]
fn addresses_change_during_accesses() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (one, two) = (made(kind), made(kind));
        one.stamp(0, 1);
        two.stamp(0, 2);
        let place = one.mapped();
        let stop = Stop::default();
        let first = [access::stamped(1)[0], access::stamped(2)[0]];
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (place, stop) = (&place, &stop);
                scope.spawn(move || {
                    while !stop.is_said() {
                        let found = match thread {
                            0 => access::load(place.start()).ok(),
                            _ => access::kernel_load(place.start(), 1).ok().map(|bytes| bytes[0]),
                        };
                        assert!(found.is_none_or(|found| first.contains(&found)), "{found:?}");
                    }
                });
            }
            let _at_end = stop.at_end();
            let deadline = Deadline::after_ms(350);
            let (address, length) = (place.start(), place.length());
            for _ in deadline.rounds() {
                for morsel in [&two, &one] {
                    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
                    sys::mmap(Request { address, flags, ..morsel.request(3) }).unwrap();
                    sys::mprotect(address, length, libc::PROT_NONE).unwrap();
                    sys::mprotect(address, length, libc::PROT_READ).unwrap();
                }
                assert_eq!(Child::start(|| 0).wait(), End::Status(0));
            }
        });
        place.assert_stamped(0, 1);
        assert_eq!((one.stat().mounts, two.stat().mounts), (1, 0));
        assert_morsels_are_sound();
    }
}

/// Several processes revoke, seal or shape one Morsel at once.
#[test]
fn one_of_several_wins() {
    let Some(_turn) = morsel_turn() else { return };
    for round in 0..30 {
        let morsel = Morsel::nameless();
        let created = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for order in 0..3 {
                let (morsel, created) = (&morsel, &created);
                scope.spawn(move || match morsel.create(&plan(order, extent(order), 0)) {
                    Ok(()) => {
                        created.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        morsel.mapped().stamp(0, round);
                    }
                    Err(error) => assert_eq!(error, Errno::BUSY),
                });
            }
        });
        assert_eq!(created.into_inner(), 1);
        morsel.assert_stamped(0, round);
        assert_morsels_are_sound();
    }
}
