//! Reservations: growth in place, limits, neighbours.

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::common::smaps;
use vellum_testing::own_process::entered;
use vellum_vm::{BackendChoice, PAGE_SIZE, Reservation, ReserveError, Surface, SurfaceError};

/// Bytes by which a small reservation grows at a time.
const STEP: usize = 64 << 20;

#[test]
fn lengths_are_whole_pages_and_only_grow() {
    let reservation = Reservation::new(1, "test").unwrap();
    assert_eq!(reservation.len(), PAGE_SIZE);
    reservation.grow(PAGE_SIZE + 1).unwrap();
    assert_eq!(reservation.len(), 2 * PAGE_SIZE);
    reservation.grow(0).unwrap();
    assert_eq!(reservation.len(), 2 * PAGE_SIZE);
    let empty = Reservation::new(0, "test").unwrap();
    assert!(empty.is_empty());
    empty.grow(STEP * 3).unwrap();
    assert_eq!(empty.len(), STEP * 3);
}

#[test]
fn absurd_lengths_are_errors() {
    for bytes in [usize::MAX, usize::MAX - PAGE_SIZE, isize::MAX as usize + 1] {
        let error = Reservation::new(bytes, "test").unwrap_err();
        assert_eq!(error, ReserveError::TooLarge { purpose: "test", bytes });
    }
    // More than the lower half of the address space has.
    assert!(Reservation::new(1 << 60, "test").is_err());
    let reservation = Reservation::new(1, "test").unwrap();
    assert!(reservation.grow(usize::MAX).is_err());
    assert!(reservation.grow(1 << 60).is_err());
    assert_eq!(reservation.len(), PAGE_SIZE);
}

#[test]
fn many_at_once_can_all_grow() {
    let all: Vec<Reservation> =
        (0..64).map(|_| Reservation::new(PAGE_SIZE, "test").unwrap()).collect();
    for reservation in &all {
        reservation.grow(10 << 30).unwrap();
        // SAFETY: within the reservation, which no other thread uses.
        unsafe { reservation.base().add((10 << 30) - 1).write(1) };
    }
    let mut starts: Vec<usize> = all.iter().map(|it| it.base().addr().get()).collect();
    starts.sort_unstable();
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 10 << 30));
}

#[test]
fn dropped_ones_make_room_for_the_next() {
    for _ in 0..2_000 {
        let reservation = Reservation::new(100 << 30, "test").unwrap();
        reservation.grow(200 << 30).unwrap();
    }
}

#[test]
fn growing_leaves_one_mapping_without_memory() {
    let reservation = Reservation::new(PAGE_SIZE, "test").unwrap();
    for step in 1..=64 {
        reservation.grow(step * 100 * (1 << 20)).unwrap();
    }
    let base = reservation.base().addr().get();
    let span = reservation.len() + STEP;
    assert_eq!(smaps(base, span, "Rss"), 0);
    assert!(smaps(base, span, "Size") >= 6_400 * 1024);
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let within = |line: &&str| {
        let start = line.split('-').next().and_then(|hex| usize::from_str_radix(hex, 16).ok());
        start.is_some_and(|start| (base..base + span).contains(&start))
    };
    assert_eq!(text.lines().filter(within).count(), 1, "the pieces did not merge");
}

#[test]
fn every_piece_is_kept_from_children_dumps_and_huge_pages() {
    let reservation = Reservation::new(PAGE_SIZE, "test").unwrap();
    reservation.grow(5 * STEP).unwrap();
    let base = format!("{:x}-", reservation.base().addr().get());
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = text.lines().skip_while(|line| !line.starts_with(&base));
    let flags: Vec<&str> = lines
        .map_while(|line| (!line.starts_with("VmFlags")).then_some("").or(Some(line)))
        .find_map(|line| line.strip_prefix("VmFlags:"))
        .unwrap()
        .split_ascii_whitespace()
        .collect();
    for flag in ["dc", "dd", "nr", "rd", "wr"] {
        assert!(flags.contains(&flag), "{flag} is not among {flags:?}");
    }
    if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        assert!(flags.contains(&"nh"), "nh is not among {flags:?}");
    }
}

#[test]
fn a_mapping_in_the_way_is_named_and_stays() {
    let reservation = Reservation::new(PAGE_SIZE, "page states").unwrap();
    let mapped_end = reservation.base().addr().get() + STEP;
    let neighbour = map_at(mapped_end + 2 * STEP);
    reservation.grow(STEP + PAGE_SIZE).unwrap();
    let bytes = 4 * STEP;
    let error = reservation.grow(bytes).unwrap_err();
    let ReserveError::AddressTaken { purpose: "page states", bytes: asked, address } = error else {
        panic!("{error:?}");
    };
    assert_eq!((asked, address), (bytes, mapped_end + STEP));
    assert!(error.to_string().contains("page states: cannot grow"), "{error}");
    assert_eq!(reservation.len(), STEP + PAGE_SIZE);
    // Growth by less than a step still fits below the other mapping.
    reservation.grow(3 * STEP - PAGE_SIZE).unwrap();
    reservation.grow(3 * STEP).unwrap();
    assert!(reservation.grow(3 * STEP + 1).is_err());
    // SAFETY: the page was mapped by this test.
    assert_eq!(unsafe { libc::munmap(neighbour, PAGE_SIZE) }, 0);
    reservation.grow(4 * STEP).unwrap();
}

/// Maps a page exactly at this address.
fn map_at(address: usize) -> *mut libc::c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(address);
    // SAFETY: takes addresses that no mapping uses, or fails.
    let found = unsafe { libc::mmap(wanted, PAGE_SIZE, libc::PROT_READ, flags, -1, 0) };
    assert_eq!(found, wanted);
    found
}

#[test]
fn dropping_unmaps_everything() {
    if !entered("reservation::dropping_unmaps_everything") {
        return;
    }
    let reservation = Reservation::new(PAGE_SIZE, "test").unwrap();
    reservation.grow(3 * STEP).unwrap();
    let base = reservation.base().addr().get();
    assert_eq!(smaps(base, 3 * STEP, "Size"), 3 * STEP as u64 / 1024);
    drop(reservation);
    assert_eq!(smaps(base, 3 * STEP, "Size"), 0);
    assert_eq!(Reservation::new(1, "test").unwrap().base().addr().get(), base);
}

/// Limits this process, as `ulimit` does, and returns the limit in bytes.
fn limited(resource: Resource, kib: u64) -> u64 {
    let limit = Some(kib * 1024);
    setrlimit(resource, Rlimit { current: limit, maximum: limit }).unwrap();
    kib * 1024
}

#[test]
fn the_address_space_limit_is_named() {
    if !entered("reservation::the_address_space_limit_is_named") {
        return;
    }
    let limit = limited(Resource::As, 2_000_000);
    let error = Reservation::new(64 << 30, "test").unwrap_err();
    assert_eq!(error, ReserveError::AddressSpaceLimit { purpose: "test", bytes: 64 << 30, limit });
    assert!(error.to_string().contains("ulimit -v unlimited"), "{error}");
    let surface = Surface::reserve(1_000, BackendChoice::Auto).unwrap();
    let error = surface.grow(1 << 20).unwrap_err();
    let expected = ReserveError::AddressSpaceLimit { purpose: "surface", bytes: 4 << 30, limit };
    assert_eq!(error, SurfaceError::Reserve(expected));
    assert_eq!(surface.pages(), 1_000);
    // If no further step fits, the reservation still grows by what the caller asks for.
    let mut filled = Vec::new();
    loop {
        let mapped = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = mapped.split(' ').next().unwrap().parse().unwrap();
        let left = limit - pages * PAGE_SIZE as u64;
        if left < STEP as u64 {
            break;
        }
        filled.push(Reservation::new(STEP, "filling").unwrap());
    }
    let last = Reservation::new(PAGE_SIZE, "last").unwrap();
    last.grow(2 * PAGE_SIZE).unwrap();
    assert!(last.grow(STEP).is_err());
    assert_eq!(last.len(), 2 * PAGE_SIZE);
}

#[test]
fn the_data_limit_is_named() {
    if !entered("reservation::the_data_limit_is_named") {
        return;
    }
    let limit = limited(Resource::Data, 1_000_000);
    let error = Reservation::new(64 << 30, "test").unwrap_err();
    assert_eq!(error, ReserveError::DataLimit { purpose: "test", bytes: 64 << 30, limit });
    Reservation::new(PAGE_SIZE, "test").unwrap();
}
