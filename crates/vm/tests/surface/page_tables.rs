//! Claims of pages, and page tables that show which frames pages have.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_vm::{BackendChoice, BackendKind, Entry, Errno, Surface, SurfaceError, probe};

use crate::common::Own;

const EXMAP: BackendKind = BackendKind::Exmap;

/// An exmap with so many pages and frames. If exmap does not work here, returns `None` and prints
/// why.
fn exmap(pages: u64, frames: u64) -> Option<Own> {
    let works = probe::works(EXMAP);
    if let Err(reason) = &works {
        eprintln!("skipped: exmap does not work here: {reason}");
    }
    works.is_ok().then(|| Own::with_frames(pages, frames, EXMAP))
}

#[test]
fn a_page_is_claimed_once() {
    let Some(own) = exmap(1000, 16) else { return };
    let mut batch = [3, 999, 3].map(Entry::page);
    assert_eq!(own.surface.claim(&mut batch), 1);
    assert_eq!(batch.map(|entry| entry.result), [Ok(()), Ok(()), Err(Errno::EXIST)]);
    let mut again = [4, 999, 1000].map(Entry::page);
    assert_eq!(own.surface.claim(&mut again), 2);
    let expected = [Ok(()), Err(Errno::EXIST), Err(Errno::INVAL)];
    assert_eq!(again.map(|entry| entry.result), expected);
    assert_eq!(own.release(&mut [Entry::page(999)]), 0);
    assert_eq!(own.surface.claim(&mut [Entry::page(999)]), 0);
    assert_eq!(own.resident(), 3);
}

#[test]
fn one_of_several_threads_claims_a_page() {
    let Some(own) = exmap(64, 256) else { return };
    let won = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut all: Vec<Entry> = (0..64).map(Entry::page).collect();
                own.surface.claim(&mut all);
                let ours = all.iter().filter(|entry| entry.result.is_ok()).count() as u64;
                won.fetch_add(ours, Ordering::Relaxed);
                let lost = all.iter().filter(|entry| entry.result == Err(Errno::EXIST));
                assert_eq!(lost.count() as u64, 64 - ours);
            });
        }
    });
    assert_eq!(won.into_inner(), 64);
}

#[test]
fn tables_show_which_frame_a_page_is_in() {
    let Some(own) = exmap(2000, 64) else { return };
    let tables = own.surface.page_tables().unwrap();
    assert!(tables.pages() >= 2000);
    assert_eq!((tables.frame(0), tables.frame(1999)), (None, None));
    assert_eq!(own.surface.populate(&mut [Entry::page(0), Entry::page(1999)]), 0);
    let (first, last) = (tables.frame(0).unwrap(), tables.frame(1999).unwrap());
    assert!(first != last && first.max(last) < tables.frames());
    assert_eq!(own.release(&mut [Entry::page(0)]), 0);
    assert_eq!((tables.frame(0), tables.frame(1999)), (None, Some(last)));
    // A released page that is read shows zeros, and has no frame.
    assert!(own.holds(0, 0));
    assert_eq!(tables.frame(0), None);
    // The tables still show present pages after the surface has grown.
    own.surface.grow(100_000).unwrap();
    assert_eq!(own.surface.populate(&mut [Entry::page(99_999)]), 0);
    assert!(tables.frame(99_999).is_some());
}

#[test]
fn other_surfaces_show_no_tables_and_do_not_claim() {
    let other = BackendChoice::Only(probe::choice_without_exmap().backend);
    let surface = Surface::reserve(16, other).unwrap();
    let error = surface.page_tables().unwrap_err();
    assert!(matches!(&error, SurfaceError::NoPageTables { .. }), "{error}");
    let mut batch = [Entry::page(1)];
    assert_eq!((surface.claim(&mut batch), batch[0].result), (1, Err(Errno::OPNOTSUPP)));
}
