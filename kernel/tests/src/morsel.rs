//! Morsels: descriptors and the operations on them.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use vellum_uapi::morsel::{self, Create, Fill, Query, Stat};

use crate::sys::{self, Request};
use crate::{Mapping, PAGE, access};

/// The mount point of the file system in the guest.
pub const FOLDER: &str = "/run/vellum/morsels";

/// Whether the file system is mounted.
pub fn is_mounted() -> bool {
    let magic = rustix::fs::statfs(FOLDER).map(|stat| stat.f_type as u32);
    magic == Ok(morsel::MAGIC)
}

/// The argument of CREATE.
pub fn plan(order: u32, length: u64, flags: u64) -> Create {
    Create { size: size_of::<Create>() as u32, order, length, flags, address: 0 }
}

/// The highest order that this guest's levels of page tables allow.
pub fn highest_order() -> u32 {
    Morsel::nameless().query().max_order
}

/// Every order with every combination of the flags for its pages.
pub fn kinds() -> Vec<(u32, u64)> {
    let mut kinds = Vec::new();
    for order in 0..=highest_order() {
        kinds.extend([(order, 0), (order, morsel::PINNABLE)]);
        if order >= 2 {
            kinds.push((order, morsel::HUGE));
        }
    }
    kinds
}

/// The first page that an order covers, and the last one.
pub fn ends(order: u32) -> [u64; 2] {
    [0, morsel::extent(order) / PAGE as u64 - 1]
}

/// A Morsel of a kind, with a stamp in its first and last page: the page's number plus 7.
pub fn stamped(kind: (u32, u64)) -> Morsel {
    let morsel = Morsel::of(kind);
    ends(kind.0).iter().for_each(|page| morsel.stamp(*page, page + 7));
    morsel
}

/// A descriptor of a Morsel.
#[derive(Debug)]
pub struct Morsel {
    file: File,
}

impl Morsel {
    /// A new one without a name and without a shape.
    pub fn nameless() -> Self {
        Self::nameless_in(Path::new(FOLDER)).expect("O_TMPFILE")
    }

    /// The same in another folder.
    pub fn nameless_in(folder: &Path) -> Result<Self, std::io::Error> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(folder)?;
        Ok(Self { file })
    }

    /// A new one without a name.
    pub fn new(order: u32, length: u64, flags: u64) -> Self {
        let morsel = Self::nameless();
        morsel.create(&plan(order, length, flags)).expect("CREATE");
        morsel
    }

    /// A Morsel as long as its order covers, without flags.
    pub fn whole(order: u32) -> Self {
        Self::new(order, morsel::extent(order), 0)
    }

    /// A Morsel as long as its order covers.
    pub fn of((order, flags): (u32, u64)) -> Self {
        Self::new(order, morsel::extent(order), flags)
    }

    /// A new one with a name, without a shape.
    pub fn named(name: &str) -> Self {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path(name)).expect(name);
        Self { file }
    }

    /// Opens a Morsel by its name.
    pub fn open(name: &str, write: bool) -> Result<Self, std::io::Error> {
        Ok(Self { file: OpenOptions::new().read(true).write(write).open(path(name))? })
    }

    /// Another descriptor for it, which cannot write.
    pub fn for_reading(&self) -> Self {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Self { file: File::open(path).expect("a descriptor for reading") }
    }

    /// The Morsel of a file.
    pub fn from_file(file: File) -> Self {
        Self { file }
    }

    /// Another descriptor for it, as from opening its name.
    pub fn reopened(&self, write: bool) -> Result<Self, Errno> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = OpenOptions::new().read(true).write(write).open(path);
        let error = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        Ok(Self { file: file.map_err(error)? })
    }

    /// Its file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it its shape.
    pub fn create(&self, create: &Create) -> Result<(), Errno> {
        self.pass(morsel::CREATE, std::ptr::from_ref(create).expose_provenance()).map(drop)
    }

    /// The module's features.
    pub fn query(&self) -> Query {
        let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
        self.pass(morsel::QUERY, (&raw mut query).expose_provenance()).expect("QUERY");
        query
    }

    /// Its properties and memory.
    pub fn stat(&self) -> Stat {
        self.try_stat().expect("STAT")
    }

    /// The same, or the error.
    pub fn try_stat(&self) -> Result<Stat, Errno> {
        let mut stat = Stat { size: size_of::<Stat>() as u32, ..Stat::default() };
        self.pass(morsel::STAT, (&raw mut stat).expose_provenance())?;
        Ok(stat)
    }

    /// The number of its pages by `fstat`, which works after a revocation, too.
    pub fn pages_by_fstat(&self) -> u64 {
        self.file.metadata().expect("fstat").blocks() / 8
    }

    /// Fills it from a file. Returns the number of bytes, and the error, if any.
    pub fn fill(
        &self,
        source: &File,
        from: u64,
        offset: u64,
        length: u64,
    ) -> (u64, Result<(), Errno>) {
        let size = size_of::<Fill>() as u32;
        let mut fill = Fill { size, source: source.as_raw_fd(), from, offset, length, filled: 0 };
        let outcome = self.pass(morsel::FILL, (&raw mut fill).expose_provenance());
        (fill.filled, outcome.map(drop))
    }

    /// Populates bytes.
    pub fn populate(&self, offset: u64, length: u64) -> Result<(), Errno> {
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, length)
    }

    /// Punches bytes.
    pub fn punch(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, length)
    }

    /// Seals it.
    pub fn seal(&self, seals: u64) -> Result<(), Errno> {
        self.command(morsel::SEAL, seals).map(drop)
    }

    /// Revokes it from all processes.
    pub fn revoke(&self) -> Result<(), Errno> {
        self.command(morsel::REVOKE, 0).map(drop)
    }

    /// A command with an address.
    pub fn pass(&self, command: u32, address: usize) -> Result<u64, Errno> {
        self.command(command, address as u64)
    }

    /// Any command with any argument.
    pub fn command(&self, command: u32, argument: u64) -> Result<u64, Errno> {
        sys::ioctl(self.as_fd(), command, argument)
    }

    /// A request to map all of it.
    pub fn request(&self, protection: i32) -> Request<'_> {
        // A revoked Morsel refuses STAT.
        let order = self.try_stat().map_or(0, |stat| stat.order);
        let length = morsel::extent(order) as usize;
        let fd = Some(self.as_fd());
        Request { address: 0, length, protection, flags: libc::MAP_SHARED, fd, offset: 0 }
    }

    /// Maps it, wherever there is room.
    pub fn map(&self, protection: i32) -> Result<Mapping, Errno> {
        Mapping::new(self.request(protection))
    }

    /// The same, to read and to write.
    pub fn mapped(&self) -> Mapping {
        self.map(sys::READ_WRITE).expect("mmap")
    }

    /// Writes a page through the descriptor, full of the bytes of the stamp.
    #[track_caller]
    pub fn stamp(&self, page: u64, stamp: u64) {
        let bytes = access::stamped(stamp);
        let written = rustix::io::pwrite(&self.file, &bytes, page * bytes.len() as u64);
        assert_eq!(written, Ok(bytes.len()));
    }

    /// Fails unless the page, read through the descriptor, is that of the stamp.
    #[track_caller]
    pub fn assert_stamped(&self, page: u64, stamp: u64) {
        let expected = access::stamped(stamp);
        let mut bytes = vec![0; expected.len()];
        let read = rustix::io::pread(&self.file, &mut bytes[..], page * expected.len() as u64);
        assert_eq!(read, Ok(bytes.len()));
        assert!(bytes == expected, "page {page} is not that of stamp {stamp}");
    }
}

impl AsFd for Morsel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<File> for Morsel {
    fn from(file: File) -> Self {
        Self { file }
    }
}

impl From<OwnedFd> for Morsel {
    fn from(file: OwnedFd) -> Self {
        Self { file: file.into() }
    }
}

/// The path of a name.
pub fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// A name in the file system, removed when this is dropped.
#[derive(Debug)]
pub struct Name(pub &'static str);

impl Drop for Name {
    fn drop(&mut self) {
        // The name may not exist any more.
        let _ = fs::remove_file(path(self.0));
    }
}
