//! Morsels of the kernel module: files of its file system.
//!
//! `kernel/include/uapi/vellum/morsel.h` says what the commands mean.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use vellum_uapi::morsel::{Fill, MAX_ORDER, SEAL_CONTENT, SEAL_POPULATION};

use crate::PAGE_SIZE;
use crate::descriptor::{self, Use};
use crate::error::{Error, Result};
use crate::seals::Seals;
use crate::shape::Shape;
use crate::stat::Stat;
use crate::sys::OfModule;

/// The variable that names another folder than [`USUAL_FOLDER`].
const FOLDER_VARIABLE: &str = "VELLUM_MORSELS";

/// Where the file system is mounted by convention.
const USUAL_FOLDER: &str = "/run/vellum/morsels";

/// The interface that this backend speaks.
const VERSION: u32 = 1;

/// The module's file system: a directory of names.
#[derive(Debug)]
pub(crate) struct MorselFs {
    path: PathBuf,
    directory: OwnedFd,
}

impl MorselFs {
    /// The mounted file system.
    ///
    /// # Errors
    /// One line that says why there is none that can be used, and what to do.
    pub(crate) fn find() -> Result<Self, String> {
        let named = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
        Self::at(named.unwrap_or_else(|| OsString::from(USUAL_FOLDER)).into())
    }

    fn at(path: PathBuf) -> Result<Self, String> {
        let shown = path.display();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mount = format!(
            "load the kernel module (vellum.ko), then: mount -t morselfs -o mode=1777 none {shown}"
        );
        let directory = fs::open(&path, flags, Mode::empty())
            .map_err(|errno| format!("{shown} cannot be opened ({errno}); {mount}"))?;
        let unknown = |errno| format!("{shown} does not say what it is: {errno}");
        if OfModule::new(directory.as_fd()).map_err(unknown)?.is_none() {
            return Err(format!("no morselfs is mounted at {shown}; {mount}"));
        }
        let morselfs = Self { path, directory };
        morselfs.check()?;
        Ok(morselfs)
    }

    /// Whether the module can do what this backend needs.
    fn check(&self) -> Result<(), String> {
        let shown = self.path.display();
        let query = self
            .unnamed()
            .and_then(|file| {
                self::file(file.as_fd())?.query().map_err(|errno| failed(QUERY, errno))
            })
            .map_err(|error| format!("{shown} is not Vellum's: {error}"))?;
        if query.version != VERSION {
            let found = query.version;
            return Err(format!(
                "{shown} speaks version {found} of its interface, not {VERSION}: load the module \
                 that belongs to this program"
            ));
        }
        Ok(())
    }

    pub(crate) fn about(&self) -> String {
        format!("morselfs at {}: mappings of one entry, shared page tables", self.path.display())
    }

    /// A file without a name or a shape.
    fn unnamed(&self) -> Result<OwnedFd> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        fs::openat(&self.directory, ".", flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| failed(CREATE, errno))
    }

    /// A Morsel without a name.
    pub(crate) fn create(&self, shape: &Shape) -> Result<OwnedFd> {
        let made = self.unnamed()?;
        give_shape(made.as_fd(), shape)?;
        Ok(made)
    }

    /// A Morsel with a name, for its owner alone.
    pub(crate) fn create_named(&self, name: &str, shape: &Shape) -> Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let made = fs::openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| of_name(CREATE, name, errno))?;
        if let Err(error) = give_shape(made.as_fd(), shape) {
            // The caller gets the first error.
            let _ = self.unlink(name);
            return Err(error);
        }
        Ok(made)
    }

    pub(crate) fn open(&self, name: &str, write: bool) -> Result<OwnedFd> {
        let rights = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = rights | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        fs::openat(&self.directory, name, flags, Mode::empty())
            .map_err(|errno| of_name("opening a Morsel", name, errno))
    }

    pub(crate) fn unlink(&self, name: &str) -> Result<()> {
        fs::unlinkat(&self.directory, name, AtFlags::empty())
            .map_err(|errno| of_name("unlinking a Morsel", name, errno))
    }

    /// A folder among the names, made for this user alone if it does not exist.
    pub(crate) fn folder(&self, name: &OsStr) -> Result<OwnedFd> {
        let failed = |errno| failed("opening a folder of Morsels", errno);
        match fs::mkdirat(&self.directory, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::openat(&self.directory, name, flags, Mode::empty()).map_err(failed)
    }

    pub(crate) fn remove_folder(&self, name: &OsStr) -> Result<()> {
        fs::unlinkat(&self.directory, name, AtFlags::REMOVEDIR)
            .map_err(|errno| failed("removing a folder of Morsels", errno))
    }

    /// The Morsels' names, sorted, without those that are not UTF-8.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let listing = |errno| failed("listing Morsels", errno);
        let mut names = Vec::new();
        for entry in fs::Dir::read_from(&self.directory).map_err(listing)? {
            let entry = entry.map_err(listing)?;
            if let Ok(name) = entry.file_name().to_str()
                && entry.file_type() != FileType::Directory
            {
                names.push(name.to_string());
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

const CREATE: &str = "making a Morsel";
const QUERY: &str = "asking the module";

/// The file as one of the module's.
fn file(descriptor: BorrowedFd<'_>) -> Result<OfModule<'_>> {
    let known = OfModule::new(descriptor).map_err(|errno| failed(QUERY, errno))?;
    known.ok_or_else(|| Error::NotMorsel { reason: "its file system is not morselfs".into() })
}

fn give_shape(made: BorrowedFd<'_>, shape: &Shape) -> Result<()> {
    let made = file(made)?;
    made.create(shape.create()).map_err(|errno| {
        let highest = made.query().map_or(MAX_ORDER, |query| query.max_order);
        match errno {
            Errno::INVAL if shape.order() > highest => Error::Shape {
                reason: format!("order {}; this processor has up to {highest}", shape.order()),
            },
            errno => failed(CREATE, errno),
        }
    })
}

/// The meaning of an error number that does not come from a Morsel.
fn failed(doing: &'static str, errno: Errno) -> Error {
    match errno {
        Errno::ACCESS | Errno::PERM => Error::Permission { doing },
        Errno::NOSPC => Error::NoSpace { doing },
        Errno::NOMEM => Error::NoMemory { doing },
        errno => Error::System { doing, errno },
    }
}

fn of_name(doing: &'static str, name: &str, errno: Errno) -> Error {
    let name = name.to_string();
    match errno {
        Errno::NOENT => Error::NoSuchName { name },
        Errno::EXIST => Error::NameTaken { name },
        Errno::NAMETOOLONG | Errno::ISDIR | Errno::LOOP => Error::BadName { name },
        errno => failed(doing, errno),
    }
}

/// The shape with which it was made.
pub(crate) fn shape(morsel: BorrowedFd<'_>) -> Result<Shape> {
    stat(morsel).map(|stat| stat.shape)
}

pub(crate) fn stat(morsel: BorrowedFd<'_>) -> Result<Stat> {
    const DOING: &str = "asking a Morsel";
    let stat = file(morsel)?.stat().map_err(|errno| Error::of(DOING, errno))?;
    if stat.length == 0 {
        return Err(Error::NotMorsel { reason: "it has not been given a shape yet".into() });
    }
    Ok(Stat {
        shape: Shape::known(stat.order, stat.length, stat.flags, stat.address)?,
        seals: Seals(stat.seals & (SEAL_CONTENT | SEAL_POPULATION)),
        pages: stat.pages,
        huge: Some(stat.huge),
        tables: Some(stat.tables),
        mounts: Some(stat.mounts),
    })
}

/// Reads from the source until the range is full or the source ends; a step that reads less than a
/// page is the source's end.
pub(crate) fn fill(
    morsel: BorrowedFd<'_>,
    source: BorrowedFd<'_>,
    from: u64,
    offset: u64,
    length: u64,
) -> Result<u64> {
    const DOING: &str = "filling a Morsel";
    let mut filled = 0;
    while filled < length {
        let mut step = Fill {
            size: size_of::<Fill>() as u32,
            source: source.as_raw_fd(),
            from: from + filled,
            offset: offset + filled,
            length: length - filled,
            filled: 0,
        };
        let result = file(morsel)?.fill(&mut step);
        filled += step.filled;
        match result {
            Ok(()) if step.filled < PAGE_SIZE => break,
            // If a step ends within a page, the next one begins with that page.
            Ok(()) | Err(Errno::INTR) if filled < length => filled -= filled % PAGE_SIZE,
            Ok(()) | Err(Errno::INTR) => {}
            Err(Errno::NODATA) if filled > 0 => break,
            Err(Errno::NODATA) => return Err(Error::SourceEnded { from }),
            Err(Errno::BADF) if descriptor::usage(morsel) == Ok(Use::Read) => {
                return Err(Error::ReadOnly { doing: DOING });
            }
            Err(Errno::BADF | Errno::INVAL) => return Err(Error::BadSource),
            // The error is the source's, unless the Morsel reports it as well.
            Err(Errno::IO) => {
                stat(morsel)?;
                return Err(Error::System { doing: "reading the source", errno: Errno::IO });
            }
            Err(errno) => return Err(Error::of(DOING, errno)),
        }
    }
    Ok(filled)
}

pub(crate) fn seal(morsel: BorrowedFd<'_>, seals: Seals) -> Result<()> {
    match file(morsel)?.seal(seals.0) {
        Err(Errno::BUSY) => Err(Error::MappedForWriting),
        result => result.map_err(|errno| Error::of("sealing a Morsel", errno)),
    }
}

pub(crate) fn revoke(morsel: BorrowedFd<'_>) -> Result<()> {
    match file(morsel)?.revoke() {
        Err(Errno::PERM | Errno::ACCESS) => Err(Error::NotOwner),
        result => result.map_err(|errno| Error::of("revoking a Morsel", errno)),
    }
}
