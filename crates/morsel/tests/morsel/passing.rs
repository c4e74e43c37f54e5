//! Passing descriptors from one process to another.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use vellum_morsel::{Access, Error, Morsel, Seals, Shape};

use crate::common::on_each;

#[test]
fn a_received_morsel_equals_the_sent_one() {
    on_each(|provider| {
        let shape = Shape::of_length(10_000).inherit();
        let morsel = provider.create(&shape).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        morsel.send(&here).unwrap();
        let received = Morsel::receive(&there).unwrap();
        assert_eq!((received.shape(), received.backend()), (shape, provider.backend()));
        received.map(Access::ReadWrite).unwrap().write_at(9_999, &[5]).unwrap();
        let mut byte = [0];
        morsel.map(Access::Read).unwrap().read_at(9_999, &mut byte).unwrap();
        assert_eq!(byte, [5]);
    });
}

#[test]
fn a_read_only_morsel_stays_read_only() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(4096)).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        morsel.read_only().unwrap().send(&here).unwrap();
        let received = Morsel::receive(&there).unwrap();
        for refused in [received.map(Access::ReadWrite).map(drop), received.seal(Seals::CONTENT)] {
            assert!(matches!(refused, Err(Error::ReadOnly { .. })), "{refused:?}");
        }
        // The content is not sealed, so another process may write.
        assert_eq!(received.map(Access::Read).unwrap().view(), Err(Error::NotSealed));
    });
}

#[test]
fn other_descriptors_are_not_received() {
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(b"M").unwrap();
    assert!(matches!(Morsel::receive(&there), Err(Error::NotMorsel { .. })));
    drop(here);
    let gone = Morsel::receive(&there).unwrap_err();
    assert!(gone.to_string().contains("hung up"), "{gone}");
}

#[test]
fn a_descriptor_converts_back_to_a_morsel() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(77)).unwrap();
        let descriptor: OwnedFd = morsel.into();
        assert_eq!(Morsel::try_from(descriptor).unwrap().length(), 77);
    });
}
