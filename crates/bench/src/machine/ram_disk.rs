//! A block device in memory (zram) with a file system, in place of a fast SSD.
//!
//! Setting it up needs root; drop removes it. Before this module uses a device, it records the
//! device under `/run/vellum-bench`. So the next run, or a [cleaner](crate::worker::Cleaner), can
//! tell the devices of a killed run from those of other programs, and remove them. The device only
//! stores incompressible data unchanged, so data under test must not compress.

mod zram;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::memory_available;
use super::owner::Owner;
use zram::Zram;

/// Where devices are recorded and mounted. After a start of the machine both the folder and the
/// devices are gone.
const RECORDS: &str = "/run/vellum-bench";

/// Memory that is left to all other programs.
const RESERVE: u64 = 1 << 30;

/// The options of the file system: no journal, no reserved blocks, and no lazy initialisation,
/// which would run during measurements.
const MAKE_FILE_SYSTEM: &[&str] = &[
    "-q",
    "-F",
    "-b",
    "4096",
    "-m",
    "0",
    "-O",
    "^has_journal",
    "-E",
    "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
];

/// How often to try unmounting while a process still uses the file system, and the pause in
/// between.
const UNMOUNT_TRIES: u32 = 50;
const UNMOUNT_PAUSE: Duration = Duration::from_millis(100);

/// A mounted block device in memory.
#[derive(Debug)]
pub struct RamDisk {
    record: Record,
    bytes: u64,
}

impl RamDisk {
    /// A device of `bytes` with an empty file system. It takes memory as it is filled, and frees it
    /// when files are removed.
    ///
    /// # Errors
    /// Without root or zram, or if memory has no room for a full device. The error names what is
    /// missing.
    pub fn set_up(bytes: u64) -> Result<RamDisk> {
        remove_leftovers();
        let available = memory_available();
        if bytes + RESERVE > available {
            bail!(
                "a RAM disk of {} MiB does not fit the {} MiB of memory that are available",
                bytes >> 20,
                available >> 20
            );
        }
        let record = Record::make(Path::new(RECORDS), Zram::add()?)?;
        // If anything fails from here on, the record is removed.
        let disk = RamDisk { record, bytes };
        disk.record.zram.set_size(bytes)?;
        run(Command::new("mkfs.ext4").args(MAKE_FILE_SYSTEM).arg(disk.device()))?;
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", "noatime,discard"])
            .arg(disk.device())
            .arg(disk.path()))?;
        Ok(disk)
    }

    /// The directory of the file system.
    pub fn path(&self) -> PathBuf {
        self.record.mount_point()
    }

    /// The device itself. Writing to it destroys the file system.
    pub fn device(&self) -> PathBuf {
        self.record.zram.path()
    }

    /// Bytes that the device holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        if let Err(error) = self.record.tear_down() {
            eprintln!("vellum bench: {error:#}");
        }
    }
}

/// Removes the devices of killed processes; returns how many.
pub(super) fn remove_leftovers() -> usize {
    let Ok(records) = fs::read_dir(RECORDS) else { return 0 };
    let records = records.flatten().filter_map(|entry| Record::read(&entry.path()));
    records.filter(|(owner, record)| !owner.is_alive() && record.tear_down().is_ok()).count()
}

/// The record of a device: a directory with the device's number and generation in its name, a file
/// with the owner, and the mount point.
#[derive(Debug)]
struct Record {
    path: PathBuf,
    zram: Zram,
}

impl Record {
    fn make(records: &Path, zram: Zram) -> Result<Record> {
        let path = records.join(format!("{}-{}", zram.number(), zram.generation()));
        let record = Record { path, zram };
        let make = || -> io::Result<()> {
            fs::create_dir_all(record.mount_point())?;
            fs::write(record.owner_file(), Owner::this_process().to_string())
        };
        if let Err(error) = make() {
            let message = format!("cannot record a RAM disk in {}", record.path.display());
            // Returns the cause, not an error of the removal.
            let _ = record.tear_down();
            return Err(error).context(message);
        }
        Ok(record)
    }

    /// The record of another run; `None` if it is incomplete, as a new one is for a moment.
    fn read(path: &Path) -> Option<(Owner, Record)> {
        let (number, generation) = path.file_name()?.to_str()?.split_once('-')?;
        let zram = Zram::recorded(number.parse().ok()?, generation.parse().ok()?);
        let record = Record { path: path.to_owned(), zram };
        let owner = fs::read_to_string(record.owner_file()).ok()?;
        Some((Owner::parse(&owner)?, record))
    }

    fn mount_point(&self) -> PathBuf {
        self.path.join("mounted")
    }

    fn owner_file(&self) -> PathBuf {
        self.path.join("owner")
    }

    /// Unmounts and removes the device, then the record. A device that is in use elsewhere stays.
    fn tear_down(&self) -> Result<()> {
        let place = self.mount_point();
        for attempt in 1.. {
            if !is_mounted(&place) {
                break;
            }
            match run(Command::new("umount").arg(&place)) {
                Ok(()) => {}
                Err(error) if attempt >= UNMOUNT_TRIES => {
                    return Err(error.context("the RAM disk stays until the next run"));
                }
                Err(_) => thread::sleep(UNMOUNT_PAUSE),
            }
        }
        self.zram.remove()?;
        let remove = || -> io::Result<()> {
            // Not recursively, because that would remove the files of anything still mounted there.
            fs::remove_dir(&place)?;
            fs::remove_file(self.owner_file())?;
            fs::remove_dir(&self.path)
        };
        match remove() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

fn is_mounted(place: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1).map(Path::new) == Some(place))
}

/// Runs a command to its end.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {}", output.status, words.trim().replace('\n', "; "));
    }
    Ok(())
}
