//! Mapped files whose faults are the program's own (Aquila), against `mmap`.

pub mod prefault;
pub mod random;

pub use prefault::AQUILA_PREFAULT;
pub use random::AQUILA_RANDOM;
