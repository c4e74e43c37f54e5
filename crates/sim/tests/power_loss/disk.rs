//! A disk whose writes are recorded, and what it had when the power failed.
//!
//! The kernel's target `dm-log-writes` records every write to a disk. Those that were complete when
//! a flush began stand before that flush, and are recorded when the flush has ended. Marks and
//! writes with forced unit access are recorded at once. So what stands between two flushes, besides
//! these, was not durable before the second one: if the power fails before that, any part of it may
//! be there. From the records this module makes the contents that the disk may have had.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use vellum_testing::random::Random;

use crate::threads::Steps;

const SECTOR: usize = 512;

/// The first bytes of the records: a number of the kernel's.
const MAGIC: u64 = 0x006a_7366_7773_6872;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// A program for disks. The lab puts one into the folder of the test.
pub fn tool(name: &str) -> Command {
    let own = std::env::current_exe().unwrap().with_file_name(name);
    let mut command = Command::new(if own.exists() { own } else { name.into() });
    // dmsetup would wait for a daemon that the lab does not have.
    command.env("DM_DISABLE_UDEV", "1");
    command
}

/// Runs a command, which has to succeed. Returns what it says.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Whether this machine records writes.
pub fn is_possible() -> bool {
    let targets = tool("dmsetup").arg("targets").output();
    targets.is_ok_and(|targets| String::from_utf8_lossy(&targets.stdout).contains("log-writes"))
}

/// A block device whose bytes are in a file.
#[derive(Debug)]
pub struct Loop {
    pub device: PathBuf,
}

impl Loop {
    pub fn new(file: &Path, bytes: u64) -> Loop {
        // Another thread would find the same free device.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap();
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(file)
            .and_then(|file| file.set_len(bytes))
            .unwrap();
        let device = PathBuf::from(run(Command::new("losetup").arg("-f")).trim());
        run(Command::new("losetup").arg(&device).arg(file));
        Loop { device }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

/// A disk in memory that makes single writes durable (forced unit access), so that the kernel need
/// not flush it after them: `null_blk`.
#[derive(Debug)]
pub struct Forced {
    settings: PathBuf,
}

impl Forced {
    const MIB: u64 = 1 << 20;

    pub fn new(name: &str, bytes: u64) -> Forced {
        let all = Path::new("/sys/kernel/config");
        if !all.join("nullb").exists() {
            run(Command::new("mount").args(["-t", "configfs", "none"]).arg(all));
        }
        let settings = all.join("nullb").join(name);
        fs::create_dir(&settings).unwrap();
        let mib = bytes / Forced::MIB;
        // With a cache it has flushes, and forced unit access.
        for (name, value) in [("size", mib), ("memory_backed", 1), ("cache_size", 4), ("power", 1)]
        {
            fs::write(settings.join(name), value.to_string()).unwrap();
        }
        let forced = fs::read_to_string(Path::new("/sys/block").join(name).join("queue/fua"));
        assert_eq!(forced.unwrap().trim(), "1", "forced unit access");
        Forced { settings }
    }

    pub fn device(&self) -> PathBuf {
        Path::new("/dev").join(self.settings.file_name().unwrap())
    }
}

impl Drop for Forced {
    fn drop(&mut self) {
        let _ = fs::write(self.settings.join("power"), "0");
        let _ = fs::remove_dir(&self.settings);
    }
}

/// A device of the kernel's device mapper.
#[derive(Debug)]
pub struct Mapped {
    name: String,
}

impl Mapped {
    pub fn new(name: &str, table: &str) -> Mapped {
        let mut create = tool("dmsetup");
        create.args(["create", name, "--table", table]);
        run(&mut create);
        Mapped { name: name.to_owned() }
    }

    /// A part of a disk: so many bytes from a place on.
    pub fn part(name: &str, disk: &Path, start: u64, bytes: u64) -> Mapped {
        let (start, sectors) = (start / SECTOR as u64, bytes / SECTOR as u64);
        Mapped::new(name, &format!("0 {sectors} linear {} {start}", disk.display()))
    }

    pub fn device(&self) -> PathBuf {
        Path::new("/dev/mapper").join(&self.name)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = tool("dmsetup").args(["remove", &self.name]).status();
    }
}

/// A mounted file system.
#[derive(Debug)]
pub struct Mounted {
    pub folder: PathBuf,
}

impl Mounted {
    pub fn new(device: &Path, folder: &Path) -> Mounted {
        fs::create_dir_all(folder).unwrap();
        run(Command::new("mount").args(["-t", "ext4"]).arg(device).arg(folder));
        Mounted { folder: folder.to_owned() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        umount.arg(&self.folder).stderr(Stdio::null());
        // A process that another thread starts has this one's files for a moment.
        for _ in 0..500 {
            if umount.status().is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{}: cannot be unmounted", self.folder.display());
    }
}

/// Makes an ext4 file system.
pub fn make_file_system(device: &Path) {
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E", "nodiscard"]).arg(device);
    run(&mut mke2fs);
}

/// The marks before and behind what the threads do.
pub const BEGIN: &str = "begin";
pub const END: &str = "end";

/// The mark that says that so many steps of a thread are durable.
pub fn mark_of(thread: usize, steps: u64) -> String {
    format!("{thread}-{steps}")
}

/// A record.
#[derive(Debug)]
struct Record {
    flags: u64,
    /// The first byte of the disk that was written.
    at: u64,
    /// The bytes that were written, as a range of the records; or the text of a mark.
    bytes: std::ops::Range<u64>,
}

/// The records of a disk, oldest first.
#[derive(Debug)]
pub struct Records {
    file: File,
    records: Vec<Record>,
    /// What the disk has after the first records, if all of these are durable; and how many.
    image: Vec<u8>,
    made: usize,
}

/// A moment at which the power fails.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// It follows this many records.
    after: usize,
    /// How many of them stand before the last flush, and are durable.
    durable: usize,
    /// The steps of each thread that were acknowledged before.
    pub acknowledged: Steps,
}

impl Moment {
    /// How many of the writes before it may be lost.
    pub fn open(&self) -> usize {
        self.after - self.durable
    }
}

impl Records {
    /// Reads the records in a file, of a disk with so many bytes.
    pub fn read(path: &Path, disk_bytes: u64) -> Records {
        let file = File::open(path).unwrap();
        let head = read_at(&file, 0, 32);
        let word = |bytes: &[u8], at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((word(&head, 0), word(&head, 8)), (MAGIC, 1), "the records' head");
        let (count, sector) = (word(&head, 16), word(&head, 24) & 0xffff_ffff);
        assert_eq!(sector, SECTOR as u64, "bytes of a sector");
        let (mut records, mut at) = (Vec::new(), sector);
        for _ in 0..count {
            let entry = read_at(&file, at, 32);
            let (first, sectors, flags, data) =
                (word(&entry, 0), word(&entry, 8), word(&entry, 16), word(&entry, 24));
            at += sector;
            let bytes = match flags {
                // The text of a mark follows its record in the same sector.
                _ if flags & MARK != 0 => at - sector + 32..at - sector + 32 + data,
                _ if flags & DISCARD != 0 => at..at,
                _ => at..at + sectors * sector,
            };
            at = if flags & MARK != 0 { at } else { bytes.end };
            records.push(Record { flags, at: first * sector, bytes });
        }
        Records { file, records, image: vec![0; disk_bytes as usize], made: 0 }
    }

    /// The bytes of a record.
    fn bytes(&self, record: usize) -> Vec<u8> {
        let bytes = &self.records[record].bytes;
        read_at(&self.file, bytes.start, (bytes.end - bytes.start) as usize)
    }

    /// How many writes were made durable by themselves.
    pub fn forced(&self) -> usize {
        self.records.iter().filter(|record| record.flags & (FUA | FLUSH) == FUA).count()
    }

    /// The moments between the two marks: after each flush; before it, when its writes were under
    /// way; and at each mark.
    pub fn moments(&self) -> Vec<Moment> {
        let (mut moments, mut acknowledged, mut durable) = (Vec::new(), None, 0);
        for (after, record) in self.records.iter().enumerate() {
            if record.flags & MARK != 0 {
                let text = String::from_utf8(self.bytes(after)).unwrap();
                match text.split_once('-') {
                    _ if text == BEGIN => acknowledged = Some(Steps::default()),
                    _ if text == END => break,
                    Some((thread, steps)) => {
                        let thread: usize = thread.parse().unwrap();
                        acknowledged.as_mut().unwrap()[thread] = steps.parse().unwrap();
                    }
                    None => panic!("a mark: {text}"),
                }
            }
            let is_flush = record.flags & FLUSH != 0;
            if let Some(acknowledged) = acknowledged {
                let mut fails = |after, durable| {
                    moments.push(Moment { after, durable, acknowledged });
                };
                if is_flush {
                    fails(after, durable);
                    fails(after + 1, after);
                } else if record.flags & MARK != 0 {
                    fails(after + 1, durable);
                }
            }
            if is_flush {
                durable = after;
            }
        }
        moments
    }

    /// The same moment of a disk that had not made its last flushes durable, though it has said so.
    pub fn with_lost_flushes(&self, moment: Moment, lost: usize) -> Moment {
        let is_flush = |record: &usize| self.records[*record].flags & FLUSH != 0;
        let flushes: Vec<usize> = (0..=moment.durable).filter(is_flush).collect();
        let kept = flushes.len().checked_sub(1 + lost).map_or(0, |last| flushes[last]);
        Moment { after: kept, durable: kept, ..moment }
    }

    /// Has the image begin with so many records, all of them.
    fn make(&mut self, records: usize) {
        if self.made > records {
            self.image.fill(0);
            self.made = 0;
        }
        for record in self.made..records {
            if self.records[record].flags & (MARK | DISCARD) == 0 {
                let (at, written) = (self.records[record].at as usize, self.bytes(record));
                self.image[at..at + written.len()].copy_from_slice(&written);
            }
        }
        self.made = records;
    }

    /// Writes what the disk may have had at a moment to a device: of the writes that were not
    /// durable some whole ones, or some sectors, or nearly all. Best in the moments' order.
    pub fn restore(&mut self, moment: Moment, device: &Path, random: &mut Random) {
        self.make(moment.durable);
        let mut image = self.image.clone();
        let (is_torn, one_in) = random.pick(&[(false, 2), (true, 2), (false, 8), (true, 8)]);
        for number in moment.durable..moment.after {
            let record = &self.records[number];
            if record.flags & (MARK | DISCARD) != 0 {
                continue;
            }
            let (at, written) = (record.at as usize, self.bytes(number));
            let unit = if is_torn { SECTOR } else { written.len().max(1) };
            for (part, bytes) in written.chunks(unit).enumerate() {
                if record.flags & FUA != 0 || !random.once_in(one_in) {
                    image[at + part * unit..][..bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        put(&image, device);
    }
}

/// Gives a device these contents. Most of them it has already. No other program may have it
/// open, so that the page cache has nothing of it.
fn put(image: &[u8], device: &Path) {
    const PART: usize = 256 << 10;
    let device = OpenOptions::new().read(true).write(true).open(device).unwrap();
    let mut old = vec![0; PART];
    for (at, new) in (0..).step_by(PART).zip(image.chunks(PART)) {
        device.read_exact_at(&mut old[..new.len()], at).unwrap();
        if old[..new.len()] != *new {
            device.write_all_at(new, at).unwrap();
        }
    }
    device.sync_all().unwrap();
}

fn read_at(file: &File, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}
