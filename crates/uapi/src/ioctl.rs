//! How Linux puts the number of an ioctl together, on architectures with the generic layout (x86
//! and Arm among them): direction, size of the argument, letter, number.

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

const fn code(direction: u32, letter: u8, number: u8, size: usize) -> u32 {
    assert!(size < 1 << 14, "the size has 14 bits");
    (direction << 30) | ((size as u32) << 16) | ((letter as u32) << 8) | number as u32
}

/// A command whose argument is no pointer, or none.
pub(crate) const fn none(letter: u8, number: u8) -> u32 {
    code(NONE, letter, number, 0)
}

/// A command that the caller gives a `T`.
pub(crate) const fn write<T>(letter: u8, number: u8) -> u32 {
    code(WRITE, letter, number, size_of::<T>())
}

/// A command that the caller gives a `T` and gets one back.
pub(crate) const fn read_write<T>(letter: u8, number: u8) -> u32 {
    code(READ | WRITE, letter, number, size_of::<T>())
}
