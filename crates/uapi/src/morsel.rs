//! `vellum/morsel.h`: the interface of Morsels. The header says what each item means.

use core::mem::offset_of;

use crate::ioctl;

/// The value of `f_type` in `statfs` of the file system.
pub const MAGIC: u32 = 0x4d6f_7273;
/// Orders go from 0 to this, or one less where page tables have four levels: [`QUERY`] says which.
pub const MAX_ORDER: u32 = 4;

/// Bytes that a Morsel of this order covers, and that a mapping of it has.
pub const fn extent(order: u32) -> u64 {
    4096 << (9 * order)
}

/// The smallest order that covers `length` bytes; `None` if there is none.
pub const fn order_for(length: u64) -> Option<u32> {
    let mut order = 0;
    while order <= MAX_ORDER {
        if length <= extent(order) {
            return Some(order);
        }
        order += 1;
    }
    None
}

/// `struct vellum_morsel_query`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Query {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Of the interface.
    pub version: u32,
    /// None so far.
    pub features: u64,
    /// The flags that [`CREATE`] knows.
    pub flags: u64,
    /// See [`MAX_ORDER`].
    pub max_order: u32,
    /// Zero.
    pub reserved: u32,
}

/// `struct vellum_morsel_create`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Create {
    /// Bytes of this structure.
    pub size: u32,
    /// From 0 to [`MAX_ORDER`].
    pub order: u32,
    /// Bytes, at most the extent.
    pub length: u64,
    /// `PINNABLE` and so on.
    pub flags: u64,
    /// Its address in every process, or 0.
    pub address: u64,
}

/// Pages may be the memory of direct I/O.
pub const PINNABLE: u64 = 1 << 0;
/// Pages may be mapped by entries of 2 MiB.
pub const HUGE: u64 = 1 << 1;
/// A child has the mapping, too.
pub const INHERIT: u64 = 1 << 2;

/// `struct vellum_morsel_fill`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Fill {
    /// Bytes of this structure.
    pub size: u32,
    /// A descriptor.
    pub source: i32,
    /// Bytes from the source's beginning.
    pub from: u64,
    /// Bytes from the Morsel's beginning.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Coming out: bytes that were read.
    pub filled: u64,
}

/// `struct vellum_morsel_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stat {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Of the Morsel.
    pub order: u32,
    /// Bytes.
    pub length: u64,
    /// `PINNABLE` and so on.
    pub flags: u64,
    /// The address to which it is bound, or 0.
    pub address: u64,
    /// Present pages.
    pub pages: u64,
    /// Entries of 2 MiB.
    pub huge: u64,
    /// Pages that page tables take.
    pub tables: u64,
    /// Mappings, of all processes.
    pub mounts: u64,
    /// `SEAL_*`.
    pub seals: u64,
}

/// Pages that are present never change.
pub const SEAL_CONTENT: u64 = 1 << 0;
/// Holes stay holes.
pub const SEAL_POPULATION: u64 = 1 << 1;

/// The features of this module; takes a [`Query`].
pub const QUERY: u32 = ioctl::read_write::<Query>(b'M', 1);
/// Gives a new file its shape; takes a [`Create`].
pub const CREATE: u32 = ioctl::write::<Create>(b'M', 2);
/// Reads a file into the Morsel; takes a [`Fill`].
pub const FILL: u32 = ioctl::read_write::<Fill>(b'M', 3);
/// Its properties and memory; takes a [`Stat`].
pub const STAT: u32 = ioctl::read_write::<Stat>(b'M', 4);
/// Takes `SEAL_*`.
pub const SEAL: u32 = ioctl::none(b'M', 5);
/// Revokes it from all processes.
pub const REVOKE: u32 = ioctl::none(b'M', 6);

const _: () = {
    assert!(size_of::<Query>() == 32 && offset_of!(Query, max_order) == 24);
    assert!(size_of::<Create>() == 32 && offset_of!(Create, address) == 24);
    assert!(size_of::<Fill>() == 40 && offset_of!(Fill, filled) == 32);
    assert!(size_of::<Stat>() == 72 && offset_of!(Stat, seals) == 64);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_for_a_length_is_the_smallest() {
        let orders = [
            (1, 0),
            (4096, 0),
            (4097, 1),
            (2 << 20, 1),
            (1 << 30, 2),
            (512 << 30, 3),
            (1 << 40, 4),
        ];
        for (length, order) in orders {
            assert_eq!(order_for(length), Some(order), "{length}");
        }
        assert_eq!(order_for((256 << 40) + 1), None);
    }
}
