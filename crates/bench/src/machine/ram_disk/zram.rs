//! The kernel's interface to zram devices. This program only uses devices that it has added.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// Where devices are added and removed.
const CONTROL: &str = "/sys/class/zram-control";

/// How often to try the removal, because programs that probe new devices, such as udev, have them
/// open for a moment.
const TRIES: u32 = 50;

/// A device that this program, or an earlier run of it, added.
#[derive(Debug)]
pub(super) struct Zram {
    number: u32,
    /// The kernel's number for this device, which a later device of the same name does not get.
    generation: u64,
}

impl Zram {
    /// Adds a device. It never uses existing devices, because they belong to other programs.
    ///
    /// # Errors
    /// Without root or without zram.
    pub(super) fn add() -> Result<Zram> {
        let control = Path::new(CONTROL);
        if !control.exists() {
            bail!("no RAM disk: this kernel has no zram (modprobe zram)");
        }
        let text = fs::read_to_string(control.join("hot_add"))
            .context("no RAM disk: cannot add a zram device (needs root)")?;
        let number = text.trim().parse().with_context(|| format!("hot_add returned '{text}'"))?;
        Ok(Zram { number, generation: generation(number).unwrap_or(0) })
    }

    /// A device that was added earlier.
    pub(super) fn recorded(number: u32, generation: u64) -> Zram {
        Zram { number, generation }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// The device file.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    /// Sets its size, which activates it.
    ///
    /// # Errors
    /// If it has one already, or the kernel refuses.
    pub(super) fn set_size(&self, bytes: u64) -> Result<()> {
        let size = folder(self.number).join("disksize");
        let before =
            fs::read_to_string(&size).with_context(|| format!("cannot read {}", size.display()))?;
        if before.trim() != "0" {
            bail!("zram{} is in use: its size is {}", self.number, before.trim());
        }
        fs::write(&size, bytes.to_string())
            .with_context(|| format!("cannot make zram{} {bytes} bytes large", self.number))
    }

    /// Frees its memory and removes it; does nothing if it is gone. The kernel refuses both while
    /// any process has it open.
    ///
    /// # Errors
    /// If it is in use.
    pub(super) fn remove(&self) -> Result<()> {
        let mut result = Ok(());
        for _ in 0..TRIES {
            if generation(self.number) != Some(self.generation) {
                return Ok(());
            }
            result = self.try_remove();
            if result.is_ok() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(100));
        }
        result
    }

    fn try_remove(&self) -> Result<()> {
        let context = || format!("cannot remove zram{}", self.number);
        fs::write(folder(self.number).join("reset"), "1").with_context(context)?;
        fs::write(Path::new(CONTROL).join("hot_remove"), self.number.to_string())
            .with_context(context)
    }
}

fn folder(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{number}"))
}

/// A number that distinguishes this device from others of the same name; 0 on kernels before 5.15,
/// `None` if there is no such device.
fn generation(number: u32) -> Option<u64> {
    let folder = folder(number);
    if !folder.exists() {
        return None;
    }
    let text = fs::read_to_string(folder.join("diskseq")).unwrap_or_default();
    Some(text.trim().parse().unwrap_or(0))
}
