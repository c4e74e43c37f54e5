//! Pages that the kernel holds: they were spliced into a pipe.

use std::io::{PipeReader, PipeWriter, Read as _, pipe};
use std::os::fd::AsFd as _;

use rustix::io::Errno;

use super::marks::{Content, Owner, words_of};
use crate::{PAGE, sys};

/// A page in a pipe.
#[derive(Debug)]
pub(super) struct Hold {
    /// Which one.
    pub(super) page: u64,
    /// The contents of the held page, if another page has taken its place.
    pub(super) content: Option<Content>,
    reader: PipeReader,
    _writer: PipeWriter,
}

impl Hold {
    /// Splices the page at an address into a pipe.
    pub(super) fn take(page: u64, at: usize) -> Result<Self, Errno> {
        let (reader, writer) = pipe().expect("a pipe");
        assert_eq!(sys::vmsplice(writer.as_fd(), at, PAGE)?, PAGE as u64);
        Ok(Self { page, content: None, reader, _writer: writer })
    }

    /// Whether it is in the range.
    pub(super) fn is_within(&self, page: u64, count: u64) -> bool {
        self.page >= page && self.page - page < count
    }

    /// Releases the page; fails unless the page has the expected contents.
    #[track_caller]
    pub(super) fn end(mut self, owner: &Owner, now: Content) {
        let mut bytes = vec![0; PAGE];
        self.reader.read_exact(&mut bytes).expect("a page in the pipe");
        owner.check(&words_of(&bytes), self.content.unwrap_or(now), self.page);
    }
}
