//! Morsels without the module: sealed memfds.
//!
//! The length can never change (`F_SEAL_SHRINK`, `F_SEAL_GROW`), so that no access within it is
//! SIGBUS. The shape is in the name that a memfd gets when it is made. No process can change that
//! name, and every process with the descriptor can read it. A sealed content is `F_SEAL_WRITE`,
//! which the kernel grants only when no process can write any more, through no descriptor and no
//! mapping.

use std::fmt::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, FileType, MemfdFlags, SealFlags};
use rustix::io::{self, Errno};
use vellum_uapi::morsel::Create;

use crate::PAGE_SIZE;
use crate::backend::BackendKind;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::huge::{HUGE_PAGE, Window};
use crate::seals::Seals;
use crate::shape::Shape;
use crate::stat::Stat;

/// The seals that a memfd has from the beginning.
const FIXED_LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The seals that it has once its content is sealed. The last one forbids further seals.
const FIXED_CONTENT: SealFlags = FIXED_LENGTH.union(SealFlags::WRITE).union(SealFlags::SEAL);

/// How the names of Morsels begin, and what their parts mean.
const NAME: &str = "vellum-morsel-1";

/// How the kernel prints a memfd's name.
const SHOWN: (&str, &str) = ("/memfd:", " (deleted)");

const PAGE: usize = PAGE_SIZE as usize;

/// Bytes that are copied at a time: they stay in a processor's cache between the two calls.
const COPY: usize = 256 << 10;

/// Bytes that are mapped at a time while they are filled.
const WINDOW: u64 = 64 << 20;

/// Whether the kernel has sealed memfds.
pub(crate) fn try_it() -> Result<String, String> {
    create(&Shape::of_length(1))
        .map(|_| "sealed memfd: shared memory, page tables of each process' own".into())
        .map_err(|error| error.to_string())
}

pub(crate) fn create(shape: &Shape) -> Result<OwnedFd> {
    const DOING: &str = "making a Morsel";
    let failed = |errno| Error::of(DOING, errno);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let name = write_name(shape);
    // Kernels before 6.3 do not know the flag for memory that cannot be executed.
    let made = match fs::memfd_create(&name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => fs::memfd_create(&name, flags),
        made => made,
    };
    let made = made.map_err(failed)?;
    fs::ftruncate(&made, shape.length()).map_err(failed)?;
    fs::fcntl_add_seals(&made, FIXED_LENGTH).map_err(failed)?;
    Ok(made)
}

fn write_name(shape: &Shape) -> String {
    let Create { order, flags, address, .. } = shape.create();
    let mut name = format!("{NAME}:{order}");
    // Writing to a string does not fail.
    let _ = write!(name, ":{flags:x}:{address:x}");
    name
}

/// Order, flags and address.
fn read_name(name: &[u8]) -> Option<(u32, u64, u64)> {
    let name = std::str::from_utf8(name).ok()?;
    let name = name.strip_prefix(SHOWN.0)?.strip_suffix(SHOWN.1)?;
    let mut parts = name.split(':');
    if parts.next() != Some(NAME) {
        return None;
    }
    let order = parts.next()?.parse().ok()?;
    let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
    let (flags, address) = (number()?, number()?);
    parts.next().is_none().then_some((order, flags, address))
}

/// Its shape, if it is a Morsel: the process that sent the descriptor may have lied.
pub(crate) fn shape(morsel: BorrowedFd<'_>) -> Result<Shape> {
    let refuse = |reason: &str| Error::NotMorsel { reason: reason.into() };
    let seals = fs::fcntl_get_seals(morsel).map_err(|_| refuse("it is no memfd"))?;
    if !seals.contains(FIXED_LENGTH) {
        return Err(refuse("it could be truncated under processes that map it"));
    }
    let name = descriptor::name(morsel).map_err(|_| refuse("/proc does not show its name"))?;
    let known = read_name(&name).ok_or_else(|| refuse("its name is not that of a Morsel"))?;
    let (order, flags, address) = known;
    Shape::known(order, length(morsel)?, flags, address)
}

fn length(morsel: BorrowedFd<'_>) -> Result<u64> {
    let stat = fs::fstat(morsel).map_err(|errno| Error::of("asking a Morsel", errno))?;
    Ok(stat.st_size.unsigned_abs())
}

pub(crate) fn stat(morsel: BorrowedFd<'_>, shape: Shape) -> Result<Stat> {
    const DOING: &str = "asking a Morsel";
    let seals = fs::fcntl_get_seals(morsel).map_err(|errno| Error::of(DOING, errno))?;
    let stat = fs::fstat(morsel).map_err(|errno| Error::of(DOING, errno))?;
    let is_sealed = seals.contains(FIXED_LENGTH | SealFlags::WRITE);
    Ok(Stat {
        shape,
        seals: if is_sealed { Seals::CONTENT } else { Seals::NONE },
        pages: stat.st_blocks.unsigned_abs() * 512 / PAGE_SIZE,
        huge: None,
        tables: None,
        mounts: None,
    })
}

/// Bytes that a source has after its byte `from`; `u64::MAX` if it does not say.
fn readable(source: BorrowedFd<'_>, from: u64) -> u64 {
    match fs::fstat(source) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
            stat.st_size.unsigned_abs().saturating_sub(from)
        }
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice => u64::MAX,
        _ => 0,
    }
}

/// Asks for huge pages where they fit into a range that is about to be populated. This is a hint.
pub(crate) fn populate_huge(morsel: BorrowedFd<'_>, range: &Range<u64>) {
    let _ = Window::open(morsel, range);
}

/// Reads from the source until the range is full or the source ends: straight into huge pages as
/// long as the kernel has some, and through a buffer into small ones. If small pages were mapped,
/// each would take a fault and be zeroed first.
pub(crate) fn fill(
    morsel: BorrowedFd<'_>,
    source: BorrowedFd<'_>,
    from: u64,
    offset: u64,
    length: u64,
    mut in_huge_pages: bool,
) -> Result<u64> {
    let end = offset + readable(source, from).min(length);
    let mut buffer = Buffer::default();
    let mut filled = 0;
    while filled < length {
        let at = offset + filled;
        let fits_huge_page = at.is_multiple_of(HUGE_PAGE as u64);
        let window = if in_huge_pages && fits_huge_page {
            Window::open(morsel, &(at..end.min(at + WINDOW))).ok().flatten()
        } else {
            None
        };
        in_huge_pages &= window.is_some() || !fits_huge_page;
        let read = match window.map(|window| window.fill(source, from + filled)) {
            // Pages that left memory meanwhile do not come back: the copy reports why.
            None | Some(Err(Errno::FAULT)) => {
                buffer.copy(source, from + filled, morsel, at, length - filled)?
            }
            Some(read) => read.map_err(of_source)? as u64,
        };
        match read {
            0 if filled == 0 => return Err(Error::SourceEnded { from }),
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}

/// The meaning of an error number from reading a source.
fn of_source(errno: Errno) -> Error {
    match errno {
        Errno::BADF | Errno::ISDIR | Errno::SPIPE | Errno::INVAL => Error::BadSource,
        errno => Error::System { doing: "reading the source", errno },
    }
}

/// A buffer between a source and a Morsel.
#[derive(Debug, Default)]
struct Buffer(Vec<u8>);

impl Buffer {
    /// Copies up to `length` bytes, as many as fit the buffer; returns how many, 0 at the source's
    /// end.
    fn copy(
        &mut self,
        source: BorrowedFd<'_>,
        from: u64,
        morsel: BorrowedFd<'_>,
        offset: u64,
        length: u64,
    ) -> Result<u64> {
        // Whole pages in an aligned buffer, which a source opened with O_DIRECT needs; up to a
        // multiple of the buffer's size, so that huge pages can follow.
        let most = COPY - offset as usize % COPY;
        let wanted = most.min(usize::try_from(length).unwrap_or(most));
        self.0.resize(COPY + PAGE, 0);
        let start = self.0.as_ptr().align_offset(PAGE);
        let buffer = &mut self.0[start..start + wanted.next_multiple_of(PAGE)];
        loop {
            match io::pread(source, &mut *buffer, from) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(of_source(errno)),
                Ok(read) => {
                    let read = read.min(wanted);
                    write_all(morsel, &buffer[..read], offset)?;
                    return Ok(read as u64);
                }
            }
        }
    }
}

fn write_all(morsel: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<()> {
    while !bytes.is_empty() {
        match io::pwrite(morsel, bytes, offset) {
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::of("filling a Morsel", errno)),
        }
    }
    Ok(())
}

pub(crate) fn seal(morsel: BorrowedFd<'_>, seals: Seals) -> Result<()> {
    const DOING: &str = "sealing a Morsel";
    if seals.has(Seals::POPULATION) {
        let what = "seal of the population";
        return Err(Error::Unsupported { backend: BackendKind::Memfd, what });
    }
    let on = fs::fcntl_get_seals(morsel.as_fd()).map_err(|errno| Error::of(DOING, errno))?;
    if !seals.has(Seals::CONTENT) || on.contains(FIXED_CONTENT) {
        return Ok(());
    }
    match fs::fcntl_add_seals(morsel, FIXED_CONTENT) {
        Err(Errno::BUSY) => Err(Error::MappedForWriting),
        // The descriptor is not for writing.
        Err(Errno::PERM) => Err(Error::ReadOnly { doing: DOING }),
        result => result.map_err(|errno| Error::of(DOING, errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_was_written_is_read() {
        let shape = Shape::of_order(2).inherit().huge().bound_to(7 << 30);
        let made = create(&shape).unwrap();
        assert_eq!(super::shape(made.as_fd()), Ok(shape));
    }

    #[test]
    fn other_names_are_not_read() {
        let good = "/memfd:vellum-morsel-1:2:0:0 (deleted)";
        assert_eq!(read_name(good.as_bytes()), Some((2, 0, 0)));
        let bad = [
            "/memfd:vellum-morsel-2:2:0:0 (deleted)",
            "/memfd:vellum-morsel-1:2:0 (deleted)",
            "/memfd:vellum-morsel-1:2:0:0:0 (deleted)",
            "/memfd:vellum-morsel-1:x:0:0 (deleted)",
            "/tmp/vellum-morsel-1:2:0:0 (deleted)",
            "/memfd:vellum-morsel-1:2:0:0",
            "",
        ];
        for name in bad {
            assert_eq!(read_name(name.as_bytes()), None, "{name}");
        }
    }
}
