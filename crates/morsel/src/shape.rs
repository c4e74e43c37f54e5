//! The shape of a Morsel: the properties that are fixed when it is made.

use vellum_uapi::morsel::{Create, HUGE, INHERIT, MAX_ORDER, PINNABLE, extent, order_for};

use crate::error::{Error, Result};

/// Addresses of user space end here on every supported machine. Order 4 takes page tables of five
/// levels, so its addresses end where those of five levels end.
const ADDRESSES: u64 = 1 << 47;
const ADDRESSES_OF_FIVE_LEVELS: u64 = 1 << 56;

/// The shape of a Morsel: its length, its order, its kind and its address (paper, sections 2.1, 2.6
/// and 2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape(Create);

impl Shape {
    /// A shape of `bytes`, with the smallest order that covers them. Order *n* covers 512^*n* pages
    /// of 4 KiB.
    pub const fn of_length(bytes: u64) -> Self {
        let order = match order_for(bytes) {
            Some(order) => order,
            None => MAX_ORDER,
        };
        Self::new(order, bytes)
    }

    /// A shape of this order, from 0 to 4, with its full length: 4 KiB, 2 MiB, 1 GiB, 512 GiB, 256
    /// TiB. The module refuses order 4 where page tables have four levels.
    pub const fn of_order(order: u32) -> Self {
        Self::new(order, if order <= MAX_ORDER { extent(order) } else { 0 })
    }

    const fn new(order: u32, length: u64) -> Self {
        let size = size_of::<Create>() as u32;
        Self(Create { size, order, length, flags: 0, address: 0 })
    }

    /// With this order instead of the smallest.
    #[must_use]
    pub const fn with_order(mut self, order: u32) -> Self {
        self.0.order = order;
        self
    }

    /// Devices may read and write its pages: direct I/O, registered buffers. Without it such calls
    /// fail with `EFAULT`. (A memfd is always open to devices, until its content is sealed.)
    #[must_use]
    pub const fn pinnable(self) -> Self {
        self.flag(PINNABLE)
    }

    /// Asks for pages of 2 MiB where the kernel has them. Order 2 and above, not together with
    /// [`pinnable`](Self::pinnable). (A memfd gets them when it is filled or populated, from Linux
    /// 6.1 on.)
    #[must_use]
    pub const fn huge(self) -> Self {
        self.flag(HUGE)
    }

    /// A forked child has the mappings of its parent. Without this property a child has no mapping.
    #[must_use]
    pub const fn inherit(self) -> Self {
        self.flag(INHERIT)
    }

    /// Every process has it at this address, a multiple of the extent, so that pointers in it hold
    /// everywhere (section 2.6).
    #[must_use]
    pub const fn bound_to(mut self, address: u64) -> Self {
        self.0.address = address;
        self
    }

    const fn flag(mut self, flag: u64) -> Self {
        self.0.flags |= flag;
        self
    }

    /// Its length in bytes.
    pub const fn length(&self) -> u64 {
        self.0.length
    }

    /// Bytes of address space that it covers.
    pub const fn extent(&self) -> u64 {
        extent(self.0.order)
    }

    /// The order that it has.
    pub const fn order(&self) -> u32 {
        self.0.order
    }

    /// Whether devices may have its pages.
    pub const fn is_pinnable(&self) -> bool {
        self.0.flags & PINNABLE != 0
    }

    /// Whether it asks for huge pages.
    pub const fn is_huge(&self) -> bool {
        self.0.flags & HUGE != 0
    }

    /// Whether a forked child has the mappings, too.
    pub const fn is_inherited(&self) -> bool {
        self.0.flags & INHERIT != 0
    }

    /// The address that it is bound to.
    pub const fn address(&self) -> Option<u64> {
        match self.0.address {
            0 => None,
            address => Some(address),
        }
    }

    /// As the kernel takes it.
    pub(crate) const fn create(&self) -> Create {
        self.0
    }

    /// The shape that another process claims for a Morsel.
    pub(crate) fn known(order: u32, length: u64, flags: u64, address: u64) -> Result<Self> {
        let mut shape = Self::new(order, length);
        shape.0.flags = flags;
        shape.0.address = address;
        shape.check().map(|()| shape)
    }

    /// Whether a Morsel can have this shape.
    pub(crate) fn check(&self) -> Result<()> {
        let Create { order, length, flags, address, .. } = self.0;
        let refuse = |reason: String| Err(Error::Shape { reason });
        if order > MAX_ORDER {
            return refuse(format!("order {order}; orders go from 0 to {MAX_ORDER}"));
        }
        if length == 0 {
            return refuse("a length of 0 bytes; the smallest is 1".into());
        }
        if length > extent(order) {
            let covered = extent(order);
            return refuse(format!("{length} bytes; order {order} covers {covered}"));
        }
        if flags & HUGE != 0 && (flags & PINNABLE != 0 || order < 2) {
            return refuse("huge pages need order 2 or above and are not for devices".into());
        }
        if flags & !(HUGE | PINNABLE | INHERIT) != 0 {
            return refuse(format!("flags {flags:#x}; some of them are unknown here"));
        }
        match address {
            0 => Ok(()),
            address => self.check_address(address),
        }
    }

    /// Whether it can lie at an address.
    pub(crate) fn check_address(&self, address: u64) -> Result<()> {
        let extent = self.extent();
        let end = if self.0.order < 4 { ADDRESSES } else { ADDRESSES_OF_FIVE_LEVELS };
        let fits = address.checked_add(extent).is_some_and(|last| last <= end);
        if address == 0 || !fits || !address.is_multiple_of(extent) {
            return Err(Error::Address { address, extent });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_follows_the_length() {
        assert_eq!(Shape::of_length(4096).order(), 0);
        assert_eq!(Shape::of_length(4097).order(), 1);
        assert_eq!(Shape::of_order(2).length(), 1 << 30);
        assert_eq!(Shape::of_length(1).with_order(3).extent(), 512 << 30);
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let bad = [
            Shape::of_length(0),
            Shape::of_length((256 << 40) + 1),
            Shape::of_length(4097).with_order(0),
            Shape::of_order(5),
            Shape::of_order(1).huge(),
            Shape::of_order(2).huge().pinnable(),
        ];
        for shape in bad {
            assert!(matches!(shape.check(), Err(Error::Shape { .. })), "{shape:?}");
        }
        for address in [4096, 3 << 20, 1 << 47, u64::MAX - (2 << 20) + 1] {
            let bound = Shape::of_order(1).bound_to(address).check();
            assert!(matches!(bound, Err(Error::Address { .. })), "{address:#x}");
        }
        assert_eq!(Shape::of_order(4).bound_to(1 << 48).check(), Ok(()));
        assert_eq!(Shape::of_order(1).bound_to(1 << 40).inherit().pinnable().check(), Ok(()));
    }
}
