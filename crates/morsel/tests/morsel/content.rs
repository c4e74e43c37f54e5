//! Filling, populating, punching, copying in and out.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};
use vellum_morsel::{Access, Errno, Error, Shape};

use crate::common::{PAGE, file_of, on_each, pattern};

#[test]
fn a_new_morsel_reads_as_zeros_and_has_no_memory() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(10_000)).unwrap();
        assert_eq!((morsel.length(), morsel.shape().order()), (10_000, 1));
        assert_eq!(morsel.stat().unwrap().pages, 0);
        assert_eq!(morsel.stat().unwrap().missing(), 3);
        let mut bytes = [1; 10_000];
        morsel.map(Access::Read).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 10_000]);
    });
}

#[test]
fn a_mapping_reads_what_another_has_written() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(3 * PAGE)).unwrap();
        let (writer, reader) =
            (morsel.map(Access::ReadWrite).unwrap(), morsel.map(Access::Read).unwrap());
        assert_ne!(writer.base(), reader.base());
        let bytes = pattern(5_000);
        writer.write_at(4_091, &bytes).unwrap();
        let mut found = vec![0; 5_000];
        reader.read_at(4_091, &mut found).unwrap();
        assert_eq!(found, bytes);
    });
}

#[test]
fn a_file_fills_it() {
    on_each(|provider| {
        let bytes = pattern(700_001);
        let source = file_of(&bytes);
        let morsel = provider.create(&Shape::of_length(800_000)).unwrap();
        assert_eq!(morsel.fill(&source, 0, 0, 700_001), Ok(700_001));
        // The source ends within the range that the test asks for.
        assert_eq!(morsel.fill(&source, 700_000, 704_512, 5_000), Ok(1));
        let mapping = morsel.map(Access::Read).unwrap();
        let mut found = vec![0; 700_001];
        mapping.read_at(0, &mut found).unwrap();
        assert!(found == bytes);
        mapping.read_at(704_512, &mut found[..2]).unwrap();
        assert_eq!(found[..2], [bytes[700_000], 0]);
    });
}

#[test]
fn a_file_opened_for_direct_io_fills_it() {
    on_each(|provider| {
        let bytes = pattern(300_001);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECT;
        let source = match rustix::fs::open(file.path(), flags, Mode::empty()) {
            Err(Errno::INVAL) => return println!("skipped: no O_DIRECT in the temporary folder"),
            source => source.unwrap(),
        };
        let morsel = provider.create(&Shape::of_length(300_001)).unwrap();
        assert_eq!(morsel.fill(&source, 0, 0, 300_001), Ok(300_001));
        let mut found = vec![0; 300_001];
        morsel.map(Access::Read).unwrap().read_at(0, &mut found).unwrap();
        assert!(found == bytes);
    });
}

#[test]
fn a_failed_fill_says_why() {
    on_each(|provider| {
        let source = file_of(&pattern(5_000));
        let morsel = provider.create(&Shape::of_length(2 * PAGE)).unwrap();
        let ended = |from| Err(Error::SourceEnded { from });
        assert_eq!(morsel.fill(&source, 5_000, 0, 1), ended(5_000));
        assert_eq!(morsel.fill(&source, u64::MAX, 0, 1), ended(u64::MAX));
        let outside = morsel.fill(&source, 0, PAGE, PAGE + 1);
        assert!(matches!(outside, Err(Error::OutOfRange { .. })), "{outside:?}");
        let unaligned = morsel.fill(&source, 0, 1, 1);
        assert!(matches!(unaligned, Err(Error::Unaligned { .. })), "{unaligned:?}");
        let (pipe, _other) = io::pipe().unwrap();
        let write_only = OpenOptions::new().write(true).open("/dev/null").unwrap();
        for source in [pipe.as_fd(), write_only.as_fd()] {
            assert_eq!(morsel.fill(source, 0, 0, 1), Err(Error::BadSource));
        }
        let read_only = morsel.read_only().unwrap();
        let refused = read_only.fill(&source, 0, 0, 1);
        assert!(matches!(refused, Err(Error::ReadOnly { .. })), "{refused:?}");
    });
}

#[test]
fn populated_pages_have_memory_and_punched_pages_have_none() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(10 * PAGE - 1)).unwrap();
        morsel.populate(PAGE..10 * PAGE - 1).unwrap();
        assert_eq!(morsel.stat().unwrap().pages, 9);
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        mapping.write_at(8 * PAGE, &[7; 2 * PAGE as usize - 1]).unwrap();
        morsel.punch(9 * PAGE..10 * PAGE - 1).unwrap();
        morsel.punch(PAGE..3 * PAGE).unwrap();
        assert_eq!(morsel.stat().unwrap().pages, 6);
        let mut found = [1; 2];
        mapping.read_at(9 * PAGE - 1, &mut found).unwrap();
        assert_eq!(found, [7, 0]);
        morsel.punch(0..0).unwrap();
        for range in [1..PAGE, 0..PAGE + 1] {
            assert!(matches!(morsel.populate(range.clone()), Err(Error::Unaligned { .. })));
            assert!(matches!(morsel.punch(range), Err(Error::Unaligned { .. })));
        }
        assert!(matches!(morsel.populate(0..10 * PAGE), Err(Error::OutOfRange { .. })));
    });
}

#[test]
fn a_copy_stays_within_the_morsel() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(10)).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        let outside = |end| Err(Error::OutOfRange { start: 9, end, length: 10 });
        assert_eq!(mapping.write_at(9, &[1, 2]), outside(11));
        assert_eq!(mapping.read_at(9, &mut [0, 0, 0]), outside(12));
        assert_eq!(mapping.read_at(10, &mut []), Ok(()));
        let overflow = mapping.read_at(u64::MAX, &mut [0]);
        assert!(matches!(overflow, Err(Error::OutOfRange { .. })), "{overflow:?}");
        let read = morsel.map(Access::Read).unwrap();
        assert!(matches!(read.write_at(0, &[1]), Err(Error::ReadOnly { .. })));
    });
}

#[test]
fn threads_write_neighbouring_bytes_without_losing_any() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(PAGE)).unwrap();
        let mapping = morsel.map(Access::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            for first in 0..3 {
                let mapping = &mapping;
                scope.spawn(move || {
                    for at in (first..PAGE).step_by(3) {
                        mapping.write_at(at, &[first as u8 + 1]).unwrap();
                    }
                });
            }
        });
        let mut found = [0; PAGE as usize];
        mapping.read_at(0, &mut found).unwrap();
        assert!(found.iter().enumerate().all(|(at, byte)| *byte == (at % 3) as u8 + 1));
    });
}
