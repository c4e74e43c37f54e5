//! The machine of the measurements: its description, its memory limits, its storage.

pub mod device_rate;
pub mod memory_cgroup;
mod owner;
pub mod page_cache;
mod processor_distance;
pub mod ram_disk;
pub mod storage;
mod system;

pub use memory_cgroup::MemoryCgroup;
pub use processor_distance::processor_distance;
pub use ram_disk::RamDisk;
pub use storage::Storage;
pub use system::{describe, kib, memory_available, processors};

/// Removes the RAM disks and memory cgroups of killed runs. Returns how many.
pub fn remove_leftovers() -> usize {
    ram_disk::remove_leftovers() + memory_cgroup::remove_leftovers()
}
