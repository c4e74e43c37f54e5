//! The machine of the measurements: its description, its memory limits, its storage.

pub mod device_rate;
mod distance;
pub mod memory_cgroup;
mod owner;
pub mod page_cache;
pub mod ram_disk;
pub mod storage;
mod system;

pub use distance::distance;
pub use memory_cgroup::MemoryCgroup;
pub use ram_disk::RamDisk;
pub use storage::Storage;
pub use system::{describe, kib, memory_available, processors};

/// Removes the RAM disks and memory cgroups of killed runs. Returns how many.
pub fn remove_leftovers() -> usize {
    ram_disk::remove_leftovers() + memory_cgroup::remove_leftovers()
}
