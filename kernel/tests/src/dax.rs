//! File tables: files on persistent memory, and descriptors of their tables.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use vellum_uapi::dax::{self, Attach, HEAP_WRITES, HeapStat, Open, Query, READ_UNIT, Stat, Tables};

use crate::persistent::{self, FOLDER};
use crate::sys::{self, READ_WRITE, Request};
use crate::threads::wait_until;
use crate::{Mapping, PAGE, Turn, access, turn};

/// The device in the guest.
pub const DEVICE: &str = "/dev/vellum-dax";

/// A turn for a test of file tables, with an ext4 for DAX on the guest's persistent memory. `None`,
/// and a printed line, if the guest has no such thing.
#[must_use]
pub fn dax_turn() -> Option<Turn> {
    if !Path::new(DEVICE).exists() || !Path::new(persistent::DEVICE).exists() {
        eprintln!("skipped: no {DEVICE}, or no {}", persistent::DEVICE);
        return None;
    }
    let turn = turn()?;
    if !is_mounted_for_dax() {
        // Another test has put Morsels there.
        begin_anew();
    }
    Some(turn)
}

/// Makes an ext4 on the persistent memory, which is not mounted.
pub fn format() {
    run("/sbin/mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", persistent::DEVICE]);
}

/// Mounts it for DAX.
pub fn mount() {
    mount_with("dax");
}

/// Mounts it with another option.
pub fn mount_with(option: &str) {
    run("mount", &["-t", "ext4", "-o", option, persistent::DEVICE, FOLDER]);
}

/// Makes the file system on the persistent memory anew. Other tests have left free places of all
/// lengths there, and something in the boot loader's inode. In an empty file system files are in
/// few pieces.
pub fn begin_anew() {
    persistent::unmount_all();
    format();
    mount();
}

fn is_mounted_for_dax() -> bool {
    let mounts = fs::read_to_string("/proc/mounts").expect("/proc/mounts");
    mounts.lines().any(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let is_dax = |option| option == "dax" || option == "dax=always";
        words[1] == FOLDER && words[2] == "ext4" && words[3].split(',').any(is_dax)
    })
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().expect(program);
    assert!(status.success(), "{program}: {status}");
}

/// A file on the persistent memory, removed when it is dropped.
#[derive(Debug)]
pub struct DaxFile {
    path: PathBuf,
    file: File,
    is_kept: bool,
}

impl DaxFile {
    /// An empty one.
    pub fn new(name: &str) -> Self {
        let mut file = Self::kept(name);
        file.is_kept = false;
        file.file.set_len(0).expect("an empty file");
        file
    }

    /// One that stays when it is dropped, as another guest may have left it.
    pub fn kept(name: &str) -> Self {
        let path = Path::new(FOLDER).join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).expect(name);
        Self { path, file, is_kept: true }
    }

    /// One of so many pages, each with its stamp: `base` and the page's number.
    pub fn stamped(name: &str, pages: u64, base: u64) -> Self {
        let file = Self::new(name);
        (0..pages).for_each(|page| file.stamp(page, base + page));
        file
    }

    /// Writes a page's stamp.
    pub fn stamp(&self, page: u64, stamp: u64) {
        let bytes = access::stamped(stamp);
        self.file.write_all_at(&bytes, page * PAGE as u64).expect("a page is written");
    }

    /// Fails unless `read` finds the stamp.
    #[track_caller]
    pub fn assert_stamped(&self, page: u64, stamp: u64) {
        let mut found = vec![0; PAGE];
        self.file.read_exact_at(&mut found, page * PAGE as u64).expect("a page is read");
        assert!(found == access::stamped(stamp), "page {page} is not that of stamp {stamp:#x}");
    }

    /// Its descriptor, for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A descriptor for reading only.
    pub fn for_reading(&self) -> File {
        File::open(&self.path).expect("a descriptor for reading")
    }

    /// Its table, for reading and writing.
    pub fn table(&self) -> Table {
        Table::open(&self.file, 0).expect("OPEN")
    }
}

impl Drop for DaxFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // A test may have removed it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The device.
fn device() -> File {
    OpenOptions::new().read(true).write(true).open(DEVICE).expect(DEVICE)
}

/// A command on the device, with any argument.
pub fn device_ioctl(command: u32, argument: u64) -> Result<u64, Errno> {
    sys::ioctl(device().as_fd(), command, argument)
}

/// What the module can do.
pub fn query() -> Query {
    let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
    let argument = (&raw mut query).expose_provenance() as u64;
    device_ioctl(dax::QUERY, argument).expect("QUERY");
    query
}

/// All tables in this kernel.
pub fn tables() -> Tables {
    let mut tables = Tables { size: size_of::<Tables>() as u32, ..Tables::default() };
    let argument = (&raw mut tables).expose_provenance() as u64;
    device_ioctl(dax::TABLES, argument).expect("TABLES");
    tables
}

/// The memory that tables without a user may take; back at its former size when this is dropped.
#[derive(Debug)]
pub struct KeptBound(String);

impl KeptBound {
    const PARAMETER: &str = "/sys/module/vellum/parameters/dax_kept_kib";

    /// So many KiB. From now on no more than that is kept.
    pub fn kib(kib: u64) -> Self {
        let before = fs::read_to_string(Self::PARAMETER).expect(Self::PARAMETER);
        fs::write(Self::PARAMETER, kib.to_string()).expect(Self::PARAMETER);
        Self(before)
    }

    /// No table outlives its last user.
    pub fn none() -> Self {
        Self::kib(0)
    }
}

impl Drop for KeptBound {
    fn drop(&mut self) {
        fs::write(Self::PARAMETER, &self.0).expect(Self::PARAMETER);
    }
}

/// Forgets all tables. None has a user but the worker, which may be refreshing one: that one would
/// be kept if the bound were back when the worker ends.
#[track_caller]
pub fn forget_kept() {
    let _none = KeptBound::none();
    wait_until(|| tables().tables == 0);
    assert_eq!((tables().kept, tables().kept_bytes), (0, 0));
}

/// A descriptor of a table.
#[derive(Debug)]
pub struct Table {
    descriptor: OwnedFd,
}

#[allow(unsafe_code)]
impl Table {
    /// Opens the table of a file.
    pub fn open(file: &File, flags: u64) -> Result<Self, Errno> {
        Self::open_descriptor(file.as_raw_fd(), flags)
    }

    /// Opens the table of whatever a number is the descriptor of.
    pub fn open_descriptor(file: i32, flags: u64) -> Result<Self, Errno> {
        let open = Open { size: size_of::<Open>() as u32, file, flags };
        let argument = (&raw const open).expose_provenance() as u64;
        let opened = device_ioctl(dax::OPEN, argument)?;
        // SAFETY: the kernel has just made the descriptor, and no other code knows it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(opened as i32) };
        Ok(Self { descriptor })
    }

    /// A command with any argument.
    pub fn ioctl(&self, command: u32, argument: u64) -> Result<u64, Errno> {
        sys::ioctl(self.descriptor.as_fd(), command, argument)
    }

    /// Its properties.
    pub fn stat(&self) -> Stat {
        let mut stat = Stat { size: size_of::<Stat>() as u32, ..Stat::default() };
        self.ioctl(dax::STAT, (&raw mut stat).expose_provenance() as u64).expect("STAT");
        stat
    }

    /// Brings it up to date, and gives its mappings their entries back.
    pub fn refresh(&self) -> Result<(), Errno> {
        self.ioctl(dax::REFRESH, 0).map(drop)
    }

    /// Makes durable what was stored.
    pub fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fsync(&self.descriptor)
    }

    /// A request to map so many bytes of the file.
    pub fn request(&self, length: u64, protection: i32) -> Request<'_> {
        Request {
            address: 0,
            length: length as usize,
            protection,
            flags: libc::MAP_SHARED,
            fd: Some(self.descriptor.as_fd()),
            offset: 0,
        }
    }

    /// Maps the file for reading and writing, in units of 2 MiB.
    pub fn mapped(&self, pages: u64) -> Mapping {
        let length = (pages * PAGE as u64).next_multiple_of(dax::UNIT);
        Mapping::new(self.request(length, READ_WRITE)).expect("a mapping")
    }

    /// Maps the file for reading.
    pub fn mapped_for_reading(&self, pages: u64) -> Mapping {
        let length = dax::extent(pages * PAGE as u64);
        Mapping::new(self.request(length, libc::PROT_READ)).expect("a mapping for reading")
    }
}

/// A heap of ephemeral mappings, in this process.
#[derive(Debug)]
pub struct Heap {
    mapping: Mapping,
    descriptor: OwnedFd,
}

#[allow(unsafe_code)]
impl Heap {
    /// A descriptor of a heap that is not mapped.
    pub fn open(flags: u64, batch: u32) -> Result<OwnedFd, Errno> {
        let open = dax::Heap { size: size_of::<dax::Heap>() as u32, batch, flags };
        let argument = (&raw const open).expose_provenance() as u64;
        let opened = device_ioctl(dax::HEAP, argument)?;
        // SAFETY: the kernel has just made the descriptor, and no other code knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) })
    }

    /// A request to map a heap of so many GiB.
    pub fn request(descriptor: &OwnedFd, gibs: u64, protection: i32) -> Request<'_> {
        Request {
            address: 0,
            length: (gibs * READ_UNIT) as usize,
            protection,
            flags: libc::MAP_SHARED,
            fd: Some(descriptor.as_fd()),
            offset: 0,
        }
    }

    fn new(flags: u64, batch: u32, protection: i32) -> Self {
        let descriptor = Self::open(flags, batch).expect("HEAP");
        let mapping = Mapping::new(Self::request(&descriptor, 2, protection)).expect("a heap");
        Self { mapping, descriptor }
    }

    /// One of 2 GiB, for reading.
    pub fn for_reading(batch: u32) -> Self {
        Self::new(0, batch, libc::PROT_READ)
    }

    /// One of 2 GiB, for reading and writing.
    pub fn for_writing(batch: u32) -> Self {
        Self::new(HEAP_WRITES, batch, READ_WRITE)
    }

    /// Its memory.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// A command with any argument.
    pub fn ioctl(&self, command: u32, argument: u64) -> Result<u64, Errno> {
        sys::ioctl(self.descriptor.as_fd(), command, argument)
    }

    /// Attaches a part of what a number is the descriptor of. Returns the address.
    pub fn attach_descriptor(&self, file: i32, offset: u64, length: u64) -> Result<usize, Errno> {
        let size = size_of::<Attach>() as u32;
        let mut attach = Attach { size, file, offset, length, address: 0 };
        self.ioctl(dax::ATTACH, (&raw mut attach).expose_provenance() as u64)?;
        Ok(attach.address as usize)
    }

    /// Attaches pages of a file, or of a table.
    pub fn attach(&self, file: impl AsFd, page: u64, pages: u64) -> Result<usize, Errno> {
        let page_size = PAGE as u64;
        self.attach_descriptor(file.as_fd().as_raw_fd(), page * page_size, pages * page_size)
    }

    /// Ends the attachment at an address.
    pub fn detach(&self, address: usize) -> Result<(), Errno> {
        self.ioctl(dax::DETACH, address as u64).map(drop)
    }

    /// Flushes for what was detached.
    pub fn reap(&self) {
        self.ioctl(dax::REAP, 0).expect("REAP");
    }

    /// Makes durable what was stored.
    pub fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fsync(&self.descriptor)
    }

    /// What is in it.
    pub fn stat(&self) -> HeapStat {
        let mut stat = HeapStat { size: size_of::<HeapStat>() as u32, ..HeapStat::default() };
        self.ioctl(dax::HEAP_STAT, (&raw mut stat).expose_provenance() as u64).expect("HEAP_STAT");
        stat
    }
}

impl AsFd for Table {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
