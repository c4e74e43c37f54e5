//! Random sequences of operations, on every backend, compared with a list of the contents of each
//! page.

use crate::common::Own;
use proptest::prelude::*;
use vellum_vm::{Advice, BackendKind, Entry, PageRange};

on_every_backend!(a_surface_behaves_like_its_model);

const MAX_PAGES: u64 = 96;

#[derive(Clone, Debug)]
enum Operation {
    Write(u64, u8),
    Read(u64),
    Populate(Vec<PageRange>),
    Release(Vec<PageRange>),
    Advise(PageRange),
    Grow(u64),
}

/// Ranges that mostly lie within the surface.
fn range() -> impl Strategy<Value = PageRange> {
    (0..MAX_PAGES + 4, 0..9_u64).prop_map(|(start, count)| PageRange::new(start, count))
}

fn ranges() -> impl Strategy<Value = Vec<PageRange>> {
    prop::collection::vec(range(), 0..12)
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (0..MAX_PAGES, 1..=255_u8).prop_map(|(page, value)| Operation::Write(page, value)),
        2 => (0..MAX_PAGES).prop_map(Operation::Read),
        2 => ranges().prop_map(Operation::Populate),
        2 => ranges().prop_map(Operation::Release),
        1 => range().prop_map(Operation::Advise),
        1 => (0..MAX_PAGES).prop_map(Operation::Grow),
    ]
}

/// The contents of each page: no memory, or memory filled with one value.
type Model = Vec<Option<u8>>;

fn pages_of(range: PageRange) -> std::ops::Range<usize> {
    range.start as usize..(range.start + range.count) as usize
}

/// Runs a batch and checks that exactly the entries outside of the surface fail. Returns the ranges
/// of the others.
fn batch(
    pages: u64,
    ranges: &[PageRange],
    run: impl FnOnce(&mut [Entry]) -> usize,
) -> Vec<PageRange> {
    let mut entries: Vec<Entry> = ranges.iter().map(|range| Entry::new(*range)).collect();
    let failed = run(&mut entries);
    let (good, bad): (Vec<_>, Vec<_>) =
        entries.iter().partition(|entry| entry.range.is_within(pages));
    assert_eq!(failed, bad.len());
    assert!(good.iter().all(|entry| entry.result.is_ok()));
    assert!(bad.iter().all(|entry| entry.result.is_err()));
    good.iter().map(|entry| entry.range).collect()
}

fn apply(own: &Own, model: &mut Model, operation: &Operation) {
    let pages = own.surface.pages();
    match operation {
        Operation::Write(page, value) if *page < pages => {
            own.fill(*page, *value);
            model[*page as usize] = Some(*value);
        }
        Operation::Read(page) if *page < pages => {
            assert!(own.holds(*page, model[*page as usize].unwrap_or(0)));
        }
        Operation::Write(..) | Operation::Read(_) => {}
        Operation::Populate(ranges) => {
            for range in batch(pages, ranges, |entries| own.surface.populate(entries)) {
                for page in pages_of(range).filter(|page| model[*page].is_none()) {
                    // On backends that do not zero, a caller that needs zeros must write them.
                    if !own.surface.fresh_pages_are_zeroed() {
                        own.fill(page as u64, 0);
                    }
                }
                model[pages_of(range)].iter_mut().for_each(|held| *held = held.or(Some(0)));
            }
        }
        Operation::Release(ranges) => {
            for range in batch(pages, ranges, |entries| own.release(entries)) {
                model[pages_of(range)].fill(None);
            }
        }
        Operation::Advise(range) => {
            let done = own.surface.advise(*range, Advice::Cold);
            let takes_advice = own.surface.backend() != BackendKind::Exmap;
            assert_eq!(done.is_ok(), takes_advice && range.is_within(pages));
        }
        Operation::Grow(wanted) => {
            own.surface.grow(*wanted).unwrap();
            model.resize(pages.max(*wanted) as usize, None);
        }
    }
}

fn check(own: &Own, model: &Model) {
    let pages = own.surface.pages();
    assert_eq!(pages, model.len() as u64);
    let residency = own.surface.residency(PageRange::new(0, pages)).unwrap();
    for (page, held) in (0..).zip(model) {
        assert_eq!(residency.is_resident(page), held.is_some(), "page {page}");
        assert!(own.holds(page, held.unwrap_or(0)), "page {page}");
    }
    assert_eq!(residency.resident(), model.iter().flatten().count() as u64);
}

fn a_surface_behaves_like_its_model(backend: BackendKind) {
    let config = ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() };
    let operations = prop::collection::vec(operation(), 1..60);
    proptest!(config, |(start in 0..MAX_PAGES, operations in operations)| {
        let own = Own::new(start, backend);
        let mut model: Model = vec![None; start as usize];
        for operation in &operations {
            apply(&own, &mut model, operation);
        }
        check(&own, &model);
    });
}
