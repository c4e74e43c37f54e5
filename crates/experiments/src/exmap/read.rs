//! Reads: figures 10 and 11, right, of the first paper, 6b of the second.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use vellum_uapi::exmap::PINNABLE;
use vellum_vm::BackendKind;

use super::affinity::stay_on;
use super::contest::{Entrant, add_point, compete};
use super::device::{Exmap, PAGE, Plan};
use super::memory::{OfKernel, PageMemory};
use super::pattern::{Chooser, Claimed, Pattern};
use super::threads::Tally;
use super::transfer::{DEPTH, Reader, Target, Way};
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::report::{Axis, Chart, Outcome, Row};

/// The experiment.
pub const READ: Experiment = Experiment {
    name: "exmap-read",
    shows: "random reads a second onto a surface: waiting, in vectors, by a queue, by the proxy",
    source: "SIGMOD'23, figures 10 and 11, right; IEEE Access 2023, figure 6b",
    run,
};

/// Block devices that are taken unless one is named.
const DEVICES: [&str; 2] = ["/dev/nullb0", "/dev/ram0"];

/// Where pages are read to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Onto {
    Madvise,
    Exmap,
    Pinnable,
    Buffers,
}

/// The reference comes first.
const WAYS: [(&str, Onto, Way); 9] = [
    ("madvise, pread", Onto::Madvise, Way::Wait),
    ("madvise, queue", Onto::Madvise, Way::Queue),
    ("exmap, READ page by page", Onto::Exmap, Way::Single),
    ("exmap, prepopulated, pread", Onto::Pinnable, Way::Prepopulated),
    ("exmap, READ vectors", Onto::Exmap, Way::Vector),
    ("exmap, preadv of the proxy", Onto::Exmap, Way::Preadv),
    ("exmap, queue of the proxy", Onto::Exmap, Way::ProxyQueue),
    ("fixed buffers, pread", Onto::Buffers, Way::Wait),
    ("fixed buffers, queue", Onto::Buffers, Way::Queue),
];

struct Grounds {
    device: File,
    pages: u64,
    madvise: OfKernel,
    exmap: Exmap,
    pinnable: Exmap,
    states: Claimed,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let Some(path) = block_device(context.device.as_deref()) else {
        let note = format!("No device to read from: none was named, and there is no {DEVICES:?}.");
        return Ok(Outcome { notes: vec![note], ..Outcome::default() });
    };
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let memories = memories(&path, &size)?;
    let mut outcome = Outcome::default();
    let mut lines = Vec::new();
    for threads in size.thread_counts() {
        let entrants = WAYS.map(|(name, onto, way)| {
            let label = format!("{name}, {}", count(threads, "thread"));
            let (memories, time) = (&memories, size.time);
            Entrant::with(label, move || read(memories, onto, way, threads, time))
        });
        let found = compete(context, &entrants)?;
        for ((name, ..), one) in WAYS.iter().zip(&found) {
            let row = Row::of(&one.samples, "reads/s");
            outcome.rows.push(row.against(&one.samples, &found[0].samples));
            add_point(&mut lines, name, (threads as f64, one.samples.median()));
        }
    }
    outcome.charts.push(Chart {
        title: "Random reads of 4 KiB".to_owned(),
        x: Axis::linear("threads"),
        y: Axis::linear("reads/s"),
        lines,
    });
    outcome.notes.push(format!(
        "Device {}, {} MiB of it{}; a queue is {DEPTH} reads a thread; pages are taken off in \
         batches.",
        path.display(),
        memories.pages >> 8,
        parameters()
    ));
    Ok(outcome)
}

/// The one that was named, or one that every lab has.
fn block_device(named: Option<&Path>) -> Option<PathBuf> {
    let usual = || DEVICES.iter().map(PathBuf::from).find(|path| path.exists());
    named.map(Path::to_owned).or_else(usual)
}

/// How null_blk was loaded, if it was.
fn parameters() -> String {
    let read = |name: &str| {
        let path = format!("/sys/module/null_blk/parameters/{name}");
        let value = fs::read_to_string(path).ok()?;
        Some(format!(", {name}={}", value.trim()))
    };
    ["queue_mode", "irqmode"].into_iter().filter_map(read).collect()
}

fn memories(path: &Path, size: &Size) -> Result<Grounds> {
    let mut device = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .with_context(|| format!("cannot open {} for direct reads", path.display()))?;
    let pages = size.pages.min(device.seek(SeekFrom::End(0))? / PAGE as u64);
    let exmap = |flags, backing| {
        let (frames, interfaces) = (size.frames, size.threads);
        Exmap::new(Plan { pages, frames, interfaces, flags, backing })
    };
    Ok(Grounds {
        pages,
        madvise: Size { pages, ..*size }.kernel_ground(BackendKind::Madvise)?,
        exmap: exmap(0, Some(device.as_fd()))?,
        pinnable: exmap(PINNABLE, None)?,
        states: Claimed::new(pages),
        device,
    })
}

/// All threads read for a while.
fn read(
    memories: &Grounds,
    onto: Onto,
    way: Way,
    threads: usize,
    time: std::time::Duration,
) -> Result<Tally> {
    let begin = Barrier::new(threads + 1);
    let begin = &begin;
    thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    stay_on(thread);
                    let reader = reader(memories, onto, thread, threads);
                    begin.wait();
                    reader?.work(way, time)
                })
            })
            .collect();
        begin.wait();
        let start = Instant::now();
        let mut tally = Tally::default();
        for thread in started {
            tally.pages += thread.join().map_err(|_| anyhow!("a thread panicked"))??.pages;
        }
        tally.seconds = start.elapsed().as_secs_f64();
        Ok(tally)
    })
}

fn reader(memories: &Grounds, onto: Onto, thread: usize, threads: usize) -> Result<Reader<'_>> {
    let target = match onto {
        Onto::Madvise => Target::Kernel(&memories.madvise, memories.madvise.populator(thread)?),
        Onto::Exmap => Target::Exmap(memories.exmap.interface(thread)?.private()?),
        Onto::Pinnable => Target::Exmap(memories.pinnable.interface(thread)?.private()?),
        Onto::Buffers => Target::buffers(),
    };
    let chooser = Chooser::new(Pattern::Random, thread, threads, memories.pages);
    Ok(Reader { target, device: &memories.device, chooser, states: &memories.states })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_device_is_taken() {
        assert_eq!(block_device(Some(Path::new("/dev/some"))), Some("/dev/some".into()));
        let usual = block_device(None);
        assert!(usual.is_none_or(|path| DEVICES.iter().any(|device| path == Path::new(device))));
    }
}
