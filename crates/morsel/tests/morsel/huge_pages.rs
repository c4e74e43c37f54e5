//! Huge pages: where they are asked for, and nowhere else.

use std::os::fd::AsFd;

use vellum_morsel::{Access, BackendKind, Mapping, Morsel, Provider, Seals, Shape};

use crate::common::{PAGE, file_of, on_each, pattern};

const HUGE: u64 = 2 << 20;

/// Kernels that can put a memfd's pages together.
fn kernel_can() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(1))
}

/// Bytes of a mapping that are mapped by entries of 2 MiB.
fn huge_bytes(morsel: &Morsel, mapping: &Mapping) -> u64 {
    if morsel.backend() == BackendKind::Kernel {
        return morsel.stat().unwrap().huge.unwrap() * HUGE;
    }
    let start = format!("{:x}-", mapping.base().as_ptr().addr());
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let line = lines.skip(1).find(|line| line.starts_with("ShmemPmdMapped")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn filled(provider: &Provider, shape: &Shape, bytes: &[u8]) -> Morsel {
    let morsel = provider.create(shape).unwrap();
    let length = bytes.len() as u64;
    assert_eq!(morsel.fill(file_of(bytes).as_fd(), 0, 0, length), Ok(length));
    morsel.seal(Seals::CONTENT).unwrap();
    morsel
}

#[test]
fn a_huge_morsel_is_in_huge_pages_and_another_is_not() {
    on_each(|provider| {
        let bytes = pattern(3 * HUGE as usize + 5_000);
        let shape = Shape::of_length(bytes.len() as u64);
        for (shape, is_huge) in [(shape.huge(), true), (shape, false)] {
            let morsel = filled(provider, &shape, &bytes);
            let mapping = morsel.map(Access::Read).unwrap();
            assert!(mapping.view().unwrap() == bytes);
            if kernel_can() {
                assert_eq!(huge_bytes(&morsel, &mapping) > 0, is_huge, "{shape:?}");
            }
        }
    });
}

#[test]
fn a_source_that_ends_early_brings_no_memory_for_the_rest() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(8 * HUGE).huge()).unwrap();
        let source = file_of(&pattern(10_000));
        assert_eq!(morsel.fill(&source, 0, 0, 8 * HUGE), Ok(10_000));
        assert!(morsel.stat().unwrap().pages <= HUGE / PAGE);
    });
}

#[test]
fn what_is_populated_keeps_what_it_had() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(4 * HUGE).huge()).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(HUGE + 77, b"before").unwrap();
        morsel.populate(0..4 * HUGE).unwrap();
        assert_eq!(morsel.stat().unwrap().missing(), 0);
        let mut found = [1; 7];
        mapping.read_at(HUGE + 77, &mut found).unwrap();
        assert_eq!(&found, b"before\0");
    });
}
