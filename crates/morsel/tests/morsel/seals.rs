//! The operations that a seal forbids, and those that it makes possible.

use vellum_morsel::{Access, BackendKind, Error, Seals, Shape};
use zerocopy::{FromBytes, Immutable, KnownLayout, little_endian::U32};

use crate::common::{PAGE, file_of, on_each, on_memfd, pattern};

#[derive(Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    count: U32,
}

#[test]
fn a_sealed_content_does_not_change() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(2 * PAGE)).unwrap();
        morsel.map(Access::ReadWrite).unwrap().write_at(0, &[9; 100]).unwrap();
        assert_eq!(morsel.stat().unwrap().seals, Seals::NONE);
        morsel.seal(Seals::CONTENT).unwrap();
        morsel.seal(Seals::CONTENT).unwrap();
        assert!(morsel.stat().unwrap().seals.has(Seals::CONTENT));
        let source = file_of(&pattern(100));
        let sealed = |result| matches!(result, Err(Error::Sealed { .. }));
        assert!(sealed(morsel.fill(&source, 0, 0, 100).map(drop)));
        assert!(sealed(morsel.punch(0..PAGE)));
        assert!(sealed(morsel.map(Access::ReadWrite).map(drop)));
        // Only the population may change: it replaces zeros by zeros.
        morsel.populate(0..2 * PAGE).unwrap();
        assert_eq!(morsel.map(Access::Read).unwrap().view().unwrap()[..101].last(), Some(&0));
    });
}

#[test]
fn content_that_may_change_has_no_view() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(PAGE)).unwrap();
        let before = morsel.map(Access::Read).unwrap();
        assert_eq!(before.view(), Err(Error::NotSealed));
        drop(before);
        morsel.seal(Seals::CONTENT).unwrap();
        assert_eq!(morsel.map(Access::Read).unwrap().view().unwrap().len(), PAGE as usize);
    });
}

#[test]
fn a_morsel_mapped_for_writing_cannot_be_sealed() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(PAGE)).unwrap();
        let writer = morsel.map(Access::ReadWrite).unwrap();
        let refused = morsel.seal(Seals::CONTENT).unwrap_err();
        assert_eq!(refused, Error::MappedForWriting);
        let text = "the Morsel can still be written: a process has it mapped for writing, or does \
                    I/O into it; drop those mappings, then seal it";
        assert_eq!(refused.to_string(), text);
        writer.write_at(0, b"still open").unwrap();
        drop(writer);
        morsel.seal(Seals::CONTENT).unwrap();
    });
}

#[test]
fn a_morsel_mapped_for_reading_can_be_sealed() {
    on_each(|provider| {
        // The longer one is aligned for huge pages.
        for length in [PAGE, 4 << 20] {
            let morsel = provider.create(&Shape::of_length(length)).unwrap();
            morsel.map(Access::ReadWrite).unwrap().write_at(0, b"before").unwrap();
            let reader = morsel.map(Access::Read).unwrap();
            morsel.seal(Seals::CONTENT).unwrap();
            let mut bytes = [0; 6];
            reader.read_at(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"before");
            assert_eq!(&morsel.map(Access::Read).unwrap().view().unwrap()[..6], b"before");
        }
    });
}

#[test]
fn a_sealed_content_can_be_viewed_as_values() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(5_000)).unwrap();
        let bytes = [&b"VLUM"[..], &7_u32.to_le_bytes(), &[3, 0, 0, 0]].concat();
        morsel.map(Access::ReadWrite).unwrap().write_at(16, &bytes).unwrap();
        morsel.seal(Seals::CONTENT).unwrap();
        let mapping = morsel.map(Access::Read).unwrap();
        let header: &Header = mapping.view_as(16..24).unwrap();
        assert_eq!((&header.magic, header.count.get()), (b"VLUM", 7));
        let words: &[u32] = mapping.view_as(20..28).unwrap();
        assert_eq!(words, [u32::from_le(7), u32::from_le(3)]);
        for range in [18..26_u64, 20..27] {
            let refused = mapping.view_as::<[u32]>(range).unwrap_err();
            assert!(matches!(refused, Error::Type { .. }), "{refused:?}");
        }
        let outside = mapping.view_as::<[u8]>(4_990..5_001).unwrap_err();
        assert!(matches!(outside, Error::OutOfRange { .. }), "{outside:?}");
    });
}

#[test]
fn unsupported_operations_of_a_memfd_are_errors() {
    on_memfd(|provider| {
        let morsel = provider.create(&Shape::of_length(PAGE)).unwrap();
        for refused in [morsel.seal(Seals::CONTENT | Seals::POPULATION), morsel.revoke()] {
            let backend = BackendKind::Memfd;
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Unsupported { backend: found, .. } if found == backend));
            assert!(error.to_string().contains("kernel module"), "{error}");
        }
        assert_eq!(morsel.stat().unwrap().seals, Seals::NONE);
    });
}

#[test]
fn a_sealed_population_does_not_change() {
    on_each(|provider| {
        if provider.backend() != BackendKind::Kernel {
            return;
        }
        let morsel = provider.create(&Shape::of_length(2 * PAGE)).unwrap();
        morsel.populate(0..PAGE).unwrap();
        morsel.seal(Seals::CONTENT | Seals::POPULATION).unwrap();
        assert!(matches!(morsel.populate(0..2 * PAGE), Err(Error::Sealed { .. })));
        let view = morsel.map(Access::Read).unwrap().view().map(<[u8]>::len);
        assert_eq!(view, Err(Error::Holes { missing: 1 }));
    });
}

#[test]
fn a_revoked_morsel_refuses_all_operations() {
    on_each(|provider| {
        if provider.backend() != BackendKind::Kernel {
            return;
        }
        let morsel = provider.create(&Shape::of_length(PAGE)).unwrap();
        let reader = morsel.read_only().unwrap();
        morsel.revoke().unwrap();
        assert!(matches!(reader.stat(), Err(Error::Revoked { .. })));
        assert!(matches!(reader.map(Access::Read), Err(Error::Revoked { .. })));
    });
}
