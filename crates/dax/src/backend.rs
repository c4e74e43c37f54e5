//! The two ways of mapping a file, and which of them this machine offers.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::io::Errno;

use crate::error::Error;
use crate::sys;

/// The module's device.
const DEVICE: &str = "/dev/vellum-dax";

/// The interface that this crate speaks.
const VERSION: u32 = 1;

/// How a file is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// A file table of Vellum's kernel module: one entry for each GiB, no faults, shared tables.
    Table,
    /// `mmap`: a fault for each page, or for each huge page, in each process.
    Mmap,
}

impl Backend {
    /// Its name, which commands print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Table => "table",
            Self::Mmap => "mmap",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Which backend to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best that the file can have.
    #[default]
    Auto,
    /// This one, or an error.
    Only(Backend),
}

/// The result of looking for the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The best backend that files of this machine can have.
    pub backend: Backend,
    /// One line: what it offers; or why there are no file tables, and what to do.
    pub about: String,
}

/// Looks for the module.
pub fn probe() -> Probe {
    match device() {
        Ok(_) => Probe {
            backend: Backend::Table,
            about: format!("{DEVICE}: file tables for ext4 that is mounted with -o dax"),
        },
        Err(about) => Probe { backend: Backend::Mmap, about },
    }
}

/// The module's device, with the interface that this crate speaks; or a line that says why there is
/// none.
fn device() -> Result<File, String> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE).map_err(|error| {
        format!("{DEVICE} cannot be opened ({error}): load the kernel module (vellum.ko), as root")
    })?;
    let query = sys::query(device.as_fd())
        .map_err(|errno| format!("{DEVICE} is not the module's: {errno}"))?;
    if query.version != VERSION {
        let found = query.version;
        return Err(format!(
            "{DEVICE} speaks version {found} of its interface, not {VERSION}: load the module that \
             belongs to this program"
        ));
    }
    Ok(device)
}

/// All file tables in the kernel: those in use, and those that are kept for the next use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// All of them.
    pub tables: u64,
    /// Those that nothing uses.
    pub kept: u64,
    /// Bytes that these take.
    pub kept_bytes: u64,
    /// Bytes that they may take.
    pub kept_most: u64,
    /// How often a kept table was used again, since the module was loaded.
    pub resumed: u64,
    /// Kept tables that went because the kernel had their inodes cached no longer.
    pub evicted: u64,
    /// Kept tables that went because their memory was wanted back.
    pub reclaimed: u64,
    /// Tables that were made from stored ones.
    pub stored_used: u64,
    /// Stored tables that were not right, or not root's.
    pub stored_refused: u64,
}

/// Counts the file tables in the kernel; `None` without the module, or with one that keeps none.
///
/// # Errors
/// What the system said.
pub fn tables() -> crate::Result<Option<Tables>> {
    let Ok(device) = device() else { return Ok(None) };
    let tables = match sys::tables(device.as_fd()) {
        Err(Errno::NOTTY) => return Ok(None),
        found => found.map_err(|errno| Error::of("counting file tables", errno))?,
    };
    Ok(Some(Tables {
        tables: tables.tables,
        kept: tables.kept,
        kept_bytes: tables.kept_bytes,
        kept_most: tables.kept_most,
        resumed: tables.resumed,
        evicted: tables.evicted,
        reclaimed: tables.reclaimed,
        stored_used: tables.stored_used,
        stored_refused: tables.stored_refused,
    }))
}

/// Opens a heap of ephemeral mappings. `Err`: a line that says why there is none.
pub(crate) fn open_heap(writes: bool, batch: u32) -> Result<OwnedFd, String> {
    sys::open_heap(device()?.as_fd(), writes, batch).map_err(|errno| match errno {
        Errno::NOTTY => "the module has no heaps: load the one that belongs to this program".into(),
        errno => format!("the module refuses a heap: {errno}"),
    })
}

/// Opens the table of a file, which is open for reading. `Err`: a line that says why there is none.
pub(crate) fn open_table(file: &File, flags: u64) -> Result<OwnedFd, String> {
    sys::open_table(device()?.as_fd(), file.as_fd(), flags).map_err(|errno| match errno {
        Errno::OPNOTSUPP => "it is not on a file system that was mounted for DAX, with blocks of \
                             4 KiB: mount ext4 with -o dax on persistent memory"
            .to_owned(),
        Errno::FBIG => "it is longer than 512 GiB".to_owned(),
        errno => format!("the module refuses it: {errno}"),
    })
}
