//! Providers of Morsels: a backend makes them, or finds them by name.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use crate::backend::{BackendChoice, BackendKind, kernel, memfd};
use crate::error::{Error, Result};
use crate::mapping::Access;
use crate::morsel::Morsel;
use crate::shape::Shape;

/// Makes Morsels by one of the backends, and finds them by name (paper, section 2.2).
#[derive(Debug)]
pub struct Provider(Backend);

#[derive(Debug)]
enum Backend {
    Kernel(kernel::MorselFs),
    Memfd,
}

impl Provider {
    /// A provider with the chosen backend. It looks for the module's file system at
    /// `$VELLUM_MORSELS`, or else at `/run/vellum/morsels`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason and what to do.
    pub fn new(choice: BackendChoice) -> Result<Self> {
        let kernel = || kernel::MorselFs::find().map(|morselfs| Self(Backend::Kernel(morselfs)));
        let memfd = || memfd::try_it().map(|_| Self(Backend::Memfd));
        let unavailable = |backend| move |reason| Error::Unavailable { backend, reason };
        match choice {
            BackendChoice::Only(BackendKind::Kernel) => {
                kernel().map_err(unavailable(BackendKind::Kernel))
            }
            BackendChoice::Auto => {
                kernel().or_else(|_| memfd()).map_err(unavailable(BackendKind::Memfd))
            }
            BackendChoice::Only(BackendKind::Memfd) => {
                memfd().map_err(unavailable(BackendKind::Memfd))
            }
        }
    }

    /// The backend that was taken.
    pub fn backend(&self) -> BackendKind {
        match self.0 {
            Backend::Kernel(_) => BackendKind::Kernel,
            Backend::Memfd => BackendKind::Memfd,
        }
    }

    /// A new Morsel without a name. It has no memory yet, and reads as zeros.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Address`], [`Error::NoSpace`], [`Error::NoMemory`],
    /// [`Error::Permission`].
    pub fn create(&self, shape: &Shape) -> Result<Morsel> {
        shape.check()?;
        let descriptor = match &self.0 {
            Backend::Kernel(morselfs) => morselfs.create(shape)?,
            Backend::Memfd => memfd::create(shape)?,
        };
        Ok(Morsel::made(descriptor, self.backend(), *shape))
    }

    /// A new Morsel with a name, which its owner alone may open.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Error::NameTaken`], [`Error::BadName`];
    /// [`Error::Unsupported`] without the module.
    pub fn create_named(&self, name: &str, shape: &Shape) -> Result<Morsel> {
        shape.check()?;
        check_name(name)?;
        let descriptor = self.names()?.create_named(name, shape)?;
        Ok(Morsel::made(descriptor, self.backend(), *shape))
    }

    /// The Morsel of a name, for reading, or for reading and writing.
    ///
    /// # Errors
    /// [`Error::NoSuchName`], [`Error::BadName`], [`Error::Permission`]; [`Error::Unsupported`]
    /// without the module.
    pub fn open(&self, name: &str, access: Access) -> Result<Morsel> {
        check_name(name)?;
        Morsel::from_descriptor(self.names()?.open(name, access == Access::ReadWrite)?)
    }

    /// All names, sorted.
    ///
    /// # Errors
    /// [`Error::Permission`]; [`Error::Unsupported`] without the module.
    pub fn list(&self) -> Result<Vec<String>> {
        self.names()?.names()
    }

    /// Removes a name. The kernel frees the Morsel with its last descriptor and mapping.
    ///
    /// # Errors
    /// [`Error::NoSuchName`], [`Error::BadName`], [`Error::Permission`]; [`Error::Unsupported`]
    /// without the module.
    pub fn unlink(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.names()?.unlink(name)
    }

    /// A folder among the names, which this user alone may enter unless another user made it.
    pub(crate) fn folder(&self, name: &OsStr) -> Result<OwnedFd> {
        self.names()?.folder(name)
    }

    /// Removes such a folder, which must be empty.
    pub(crate) fn remove_folder(&self, name: &OsStr) -> Result<()> {
        self.names()?.remove_folder(name)
    }

    /// The directory of names; a memfd has no name by which another process could find it.
    fn names(&self) -> Result<&kernel::MorselFs> {
        match &self.0 {
            Backend::Kernel(morselfs) => Ok(morselfs),
            Backend::Memfd => Err(Error::Unsupported {
                backend: BackendKind::Memfd,
                what: "names (pass descriptors, or ask the cache daemon for files)",
            }),
        }
    }
}

/// Whether a name is one of a file in a directory.
fn check_name(name: &str) -> Result<()> {
    let is_name = !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']);
    if is_name && name.len() <= 255 {
        return Ok(());
    }
    Err(Error::BadName { name: name.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files() {
        let long = "x".repeat(256);
        for name in ["", ".", "..", "a/b", "a\0b", &long] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name("model.gguf").is_ok() && check_name(&long[1..]).is_ok());
    }
}
