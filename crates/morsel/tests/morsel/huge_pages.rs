//! Huge pages: a Morsel has them only if its creator asks for them.

use std::fs::OpenOptions;
use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};
use vellum_morsel::{Access, BackendKind, Errno, Error};
use vellum_morsel::{Mapping, Morsel, Provider, Seals, Shape};

use crate::common::{PAGE, file_of, on_each, pattern};

const HUGE: u64 = 2 << 20;

/// Whether the kernel can collapse a memfd's pages.
fn kernel_can() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(1))
}

/// Bytes of a mapping in entries of 2 MiB.
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
fn a_large_fill_from_any_offset_equals_the_source() {
    on_each(|provider| {
        // Before, in and after huge pages; more than a window; with an end inside a page.
        let bytes = pattern(70 << 20);
        let source = file_of(&bytes);
        for (from, offset, length) in [
            (0, 0, 67 << 20),
            (1, 0, 66 << 20),
            (12_345, 3 * PAGE, (66 << 20) + 77),
            (0, HUGE - PAGE, 2 * HUGE),
            (0, HUGE, HUGE - 1),
        ] {
            let morsel = provider.create(&Shape::of_length(70 << 20).huge()).unwrap();
            assert_eq!(morsel.fill(&source, from, offset, length), Ok(length));
            // No mapping for writing is left, so the Morsel can be sealed.
            morsel.seal(Seals::CONTENT).unwrap();
            let mapping = morsel.map(Access::Read).unwrap();
            let found = mapping.view().unwrap();
            let (start, end) = (offset as usize, (offset + length) as usize);
            let (first, last) = (from as usize, (from + length) as usize);
            assert!(found[start..end] == bytes[first..last], "{from} {offset} {length}");
            assert!(found[..start].iter().chain(&found[end..]).all(|byte| *byte == 0));
            let whole = offset.next_multiple_of(HUGE)..(offset + length) / HUGE * HUGE;
            if kernel_can() && morsel.backend() == BackendKind::Memfd {
                let most = whole.end.saturating_sub(whole.start);
                assert_eq!(huge_bytes(&morsel, &mapping), most, "{from} {offset} {length}");
            }
        }
    });
}

#[test]
fn the_kernel_reads_straight_into_huge_pages() {
    // The bytes that this thread has passed to write calls.
    let written = || {
        let counts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        let line = counts.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    on_each(|provider| {
        let source = file_of(&pattern(8 * HUGE as usize));
        let morsel = provider.create(&Shape::of_length(8 * HUGE).huge()).unwrap();
        let before = written();
        assert_eq!(morsel.fill(&source, 0, 0, 8 * HUGE), Ok(8 * HUGE));
        if kernel_can() {
            assert!(written() - before < HUGE, "{} bytes", written() - before);
        }
    });
}

#[test]
fn a_fill_over_existing_pages_replaces_only_its_range() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(8 * HUGE).huge()).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        // In the third huge page, and in the range outside of the fill.
        mapping.write_at(2 * HUGE + 9, b"old").unwrap();
        mapping.write_at(6 * HUGE + 9, b"kept").unwrap();
        let bytes = pattern(6 * HUGE as usize);
        assert_eq!(morsel.fill(file_of(&bytes), 0, 0, 6 * HUGE), Ok(6 * HUGE));
        let mut found = vec![0; 6 * HUGE as usize];
        mapping.read_at(0, &mut found).unwrap();
        assert!(found == bytes);
        mapping.read_at(6 * HUGE + 9, &mut found[..4]).unwrap();
        assert_eq!(&found[..4], b"kept");
    });
}

#[test]
fn a_source_opened_for_direct_io_fills_huge_pages() {
    on_each(|provider| {
        let bytes = pattern(2 * HUGE as usize + 5_001);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECT;
        let source = match rustix::fs::open(file.path(), flags, Mode::empty()) {
            Err(Errno::INVAL) => return println!("skipped: no O_DIRECT in the temporary folder"),
            source => source.unwrap(),
        };
        let length = bytes.len() as u64;
        let morsel = provider.create(&Shape::of_length(length).huge()).unwrap();
        assert_eq!(morsel.fill(&source, 0, 0, length), Ok(length));
        morsel.seal(Seals::CONTENT).unwrap();
        assert!(morsel.map(Access::Read).unwrap().view().unwrap() == bytes);
    });
}

#[test]
fn a_failed_huge_fill_says_why() {
    on_each(|provider| {
        let source = file_of(&pattern(2 * HUGE as usize));
        let morsel = provider.create(&Shape::of_length(2 * HUGE).huge()).unwrap();
        let refused = morsel.read_only().unwrap().fill(&source, 0, 0, HUGE);
        assert!(matches!(refused, Err(Error::ReadOnly { .. })), "{refused:?}");
        let write_only = OpenOptions::new().write(true).open("/dev/null").unwrap();
        assert_eq!(morsel.fill(write_only.as_fd(), 0, 0, HUGE), Err(Error::BadSource));
        let ended = morsel.fill(&source, 2 * HUGE, 0, HUGE);
        assert_eq!(ended, Err(Error::SourceEnded { from: 2 * HUGE }));
        morsel.seal(Seals::CONTENT).unwrap();
        let refused = morsel.fill(&source, 0, 0, HUGE);
        assert!(matches!(refused, Err(Error::Sealed { .. })), "{refused:?}");
    });
}

#[test]
fn a_source_that_ends_early_populates_no_memory_for_the_rest() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(8 * HUGE).huge()).unwrap();
        let source = file_of(&pattern(10_000));
        assert_eq!(morsel.fill(&source, 0, 0, 8 * HUGE), Ok(10_000));
        assert!(morsel.stat().unwrap().pages <= HUGE / PAGE);
    });
}

#[test]
fn populating_keeps_the_contents_of_populated_pages() {
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
