//! The start of a key-value server whose hash table and values are in one large file on persistent
//! memory: how long until it answers, and until it answers as fast as it ever will.

use std::cell::RefCell;
use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use vellum_dax::{Access, Backend, Durability, forget_table, store_table, tables};

use super::kernel::forget_inodes;
use super::large::{HUGE, Interface, Large, Layout, View, in_each_layout};
use super::read_method::table_and_heap;
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::workload::values::{Random, fill, is_of, mix};

/// The experiment.
pub const DAX_START: Experiment = Experiment {
    name: "dax-start",
    shows: "a key-value server's first answers after a start: mmap, populated, file tables",
    source: "MICRO'22, section V.C, figure 9b",
    run,
};

/// Bytes of a value.
const VALUE: u64 = 16 << 10;

/// Bytes of a slot of the hash table: a key plus one, and where its value is.
const SLOT: u64 = 16;

/// Gets of a sample, for each value.
const GETS: u64 = 6;

/// Gets of a window, whose rate is looked at.
const WINDOW: u64 = 32;

/// Windows whose median is the rate of a moment: one may be slow by accident.
const MOMENT: usize = 9;

/// The part of its last rate that a server has at full speed.
const FULL: f64 = 0.9;

/// Rounds that count.
const ROUNDS: usize = 3;

/// A file of a hash table with linear probing, half full, and the values after it.
#[derive(Clone, Copy)]
struct Store {
    values: u64,
}

impl Store {
    fn slots(self) -> u64 {
        (2 * self.values).next_power_of_two()
    }

    /// Where the values begin: they share no huge page with the hash table.
    fn index(self) -> u64 {
        (self.slots() * SLOT).next_multiple_of(HUGE)
    }

    fn make(self, path: &Path, layout: Layout) -> Result<()> {
        let mut index = vec![0; self.index() as usize];
        for key in 0..self.values {
            let mut slot = mix(key) % self.slots();
            while index[(slot * SLOT) as usize..][..8] != [0; 8] {
                slot = (slot + 1) % self.slots();
            }
            let at = (slot * SLOT) as usize;
            index[at..at + 8].copy_from_slice(&(key + 1).to_le_bytes());
            let value = self.index() + key * VALUE;
            index[at + 8..at + 16].copy_from_slice(&value.to_le_bytes());
        }
        let length = (self.index() + self.values * VALUE).next_multiple_of(HUGE);
        layout.make_of(path, length, |start, piece| match start.checked_sub(self.index()) {
            None => piece.copy_from_slice(&index[start as usize..][..piece.len()]),
            Some(from) => {
                for (number, value) in piece.chunks_mut(VALUE as usize).enumerate() {
                    fill(from / VALUE + number as u64, value);
                }
            }
        })
    }

    /// Copies the value of a key.
    fn get(self, view: &View<'_>, key: u64, value: &mut [u8]) -> Result<()> {
        let mut slot = mix(key) % self.slots();
        loop {
            let mut bytes = [0; SLOT as usize];
            view.copy_out(slot * SLOT, &mut bytes)?;
            let [found, at] = [0, 8].map(|from| {
                u64::from_le_bytes(bytes[from..from + 8].try_into().expect("eight bytes"))
            });
            ensure!(found != 0, "no key {key}");
            if found == key + 1 {
                return view.copy_out(at, value);
            }
            slot = (slot + 1) % self.slots();
        }
    }
}

/// What there is of the file when the server starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// What an earlier server has left: the inode, and the table that the module keeps.
    Kept,
    /// Nothing but the file: after a restart of the machine.
    Restarted,
    /// The same, but where its blocks are was stored.
    Stored,
}

struct Contest<'a> {
    name: &'static str,
    interface: Interface<'a>,
    before: Before,
    seen: RefCell<Vec<Course>>,
}

/// The course of a start.
#[derive(Clone, Debug)]
struct Course {
    /// Seconds until the server could take a request, and until its first answer.
    ready: f64,
    first: f64,
    /// Seconds until the end of each window of gets.
    ends: Vec<f64>,
}

impl Course {
    /// The seconds that each window took: for each the median of those from there on.
    fn moments(&self) -> Vec<f64> {
        let begins = [self.ready].into_iter().chain(self.ends.iter().copied());
        let took: Vec<f64> = begins.zip(&self.ends).map(|(begin, end)| end - begin).collect();
        took.windows(MOMENT.min(took.len())).map(median).collect()
    }

    /// The seconds that a window takes in the last quarter.
    fn at_last(&self) -> f64 {
        let moments = self.moments();
        median(&moments[moments.len() * 3 / 4..])
    }

    /// Seconds until the rate was that of the last quarter, or nearly.
    fn until_full(&self) -> f64 {
        let enough = self.at_last() / FULL;
        let moments = self.moments();
        match moments.iter().position(|took| *took <= enough) {
            Some(0) => self.ready,
            Some(at) => self.ends[at - 1],
            None => self.ends[self.ends.len() - 1],
        }
    }

    /// Gets until so many seconds after the start.
    fn gets_until(&self, seconds: f64) -> f64 {
        (self.ends.partition_point(|end| *end <= seconds) as u64 * WINDOW) as f64
    }
}

fn median(values: &[f64]) -> f64 {
    Samples { name: String::new(), values: values.to_vec() }.median()
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let folder = context.make_directory("dax-start")?;
    let mut outcome = Outcome::default();
    let store = Store { values: context.pick(2_048, 16_384) };
    let heap = table_and_heap(&folder, &mut outcome)?;
    // Without root, and so without tables, the kernel forgets no inode.
    let restarted = if heap.is_some() { Before::Restarted } else { Before::Kept };
    let path = folder.join("store");
    let make = |layout| store.make(&path, layout);
    in_each_layout(&path, &mut outcome, make, |layout, outcome| {
        let contest = |name, interface, before| {
            let seen = RefCell::default();
            Contest { name, interface, before, seen }
        };
        let mut contests = vec![
            contest("mmap", Interface::Mapped(Backend::Mmap), restarted),
            contest("mmap, populated", Interface::Populated, restarted),
            contest("pread", Interface::Calls, restarted),
        ];
        if let Some(heap) = &heap {
            let table = Interface::Mapped(Backend::Table);
            contests.extend([
                contest("file table, made anew", table, Before::Restarted),
                contest("file table, stored", table, Before::Stored),
                contest("file table, kept", table, Before::Kept),
                contest("ephemeral, made anew", Interface::Heap(heap), Before::Restarted),
            ]);
        }
        measure(context, outcome, store, &path, layout, &contests)
    })?;
    outcome.notes.push(format!(
        "{} values of {} KiB and their hash table in one file. A sample makes the file, and then \
         opens it, maps it and gets {GETS} times as many values as there are, at random, each \
         copied as a whole. But for kept tables the kernel has forgotten the file's inode before. \
         Full speed is {:.0} % of the rate of the last quarter; a rate is the median of {MOMENT} \
         windows of {WINDOW} gets. Ratios are to mmap.",
        store.values,
        VALUE >> 10,
        FULL * 100.0,
    ));
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    store: Store,
    path: &Path,
    layout: Layout,
    contests: &[Contest<'_>],
) -> Result<()> {
    let contestants = contests
        .iter()
        .map(|contest| {
            Contestant::new(format!("{}, {}", contest.name, layout.name()), move || {
                let course = start(store, path, layout, contest.interface, contest.before)?;
                let last = course.ends[course.ends.len() - 1];
                contest.seen.borrow_mut().push(course);
                Ok(last)
            })
        })
        .collect();
    let names = alternate(ROUNDS, &context.progress, contestants)?;
    let mut add = |what: &str, unit, figure: &dyn Fn(&Course) -> f64| {
        let samples: Vec<Samples> = contests
            .iter()
            .zip(&names)
            .map(|(contest, name)| Samples {
                name: format!("{what}, {}", name.name),
                // The first round does not count.
                values: contest.seen.borrow()[1..].iter().map(figure).collect(),
            })
            .collect();
        for of_way in &samples {
            outcome.rows.push(Row::of(of_way, unit).against(of_way, &samples[0]));
        }
        samples[0].median()
    };
    let first = add("first answer", "ms", &|course| course.first * 1e3);
    // A time at which mmap is still on its way.
    let early = add("full speed", "ms", &|course| course.until_full() * 1e3) / 2.0;
    if early > first {
        let what = format!("answers in the first {early:.1} ms");
        add(&what, "gets", &|course| course.gets_until(early / 1e3));
    }
    add("rate at last", "gets/s", &|course| WINDOW as f64 / course.at_last());
    outcome.charts.push(chart(layout, contests));
    Ok(())
}

/// The rates of the last round.
fn chart(layout: Layout, contests: &[Contest<'_>]) -> Chart {
    /// Windows of a point.
    const EACH: usize = 8;
    let points = |course: &Course| {
        let moments = course.moments();
        let some = moments.iter().zip(&course.ends).step_by(EACH);
        some.map(|(took, end)| (end * 1e3, WINDOW as f64 / took)).collect()
    };
    let line = |contest: &Contest<'_>| {
        let seen = contest.seen.borrow();
        Line { name: contest.name.to_owned(), points: seen.last().map(points).unwrap_or_default() }
    };
    Chart {
        title: format!("After a start, a file {}", layout.name()),
        x: Axis::linear("ms since the start"),
        y: Axis::linear("gets/s"),
        lines: contests.iter().map(line).collect(),
    }
}

/// Makes a new file, starts a server, and has it answer.
fn start(
    store: Store,
    path: &Path,
    layout: Layout,
    interface: Interface<'_>,
    before: Before,
) -> Result<Course> {
    store.make(path, layout)?;
    prepare(path, interface, before).context("preparing a start")?;
    let [resumed, stored_used] = uses()?;
    let mut random = Random::new(9);
    let mut value = vec![0; VALUE as usize];
    let mut ends = Vec::with_capacity((store.values * GETS / WINDOW) as usize);
    let mut first = None;
    let start = Instant::now();
    let large = Large::open(path, interface, Durability::Synced)?;
    let view = large.view(Access::Read)?;
    let ready = start.elapsed().as_secs_f64();
    for number in 1..=store.values * GETS {
        let key = random.below(store.values);
        store.get(&view, key, &mut value)?;
        ensure!(is_of(key, &value), "the value of {key} is another one");
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
        if number % WINDOW == 0 {
            ends.push(start.elapsed().as_secs_f64());
        }
    }
    if large.file().backend() == Backend::Table {
        let found = uses()?.map(|uses| uses as i64);
        let [kept, stored] = [found[0] - resumed as i64, found[1] - stored_used as i64];
        let expected = match before {
            Before::Kept => [1, 0],
            Before::Restarted => [0, 0],
            Before::Stored => [0, 1],
        };
        ensure!([kept, stored] == expected, "{kept} kept and {stored} stored tables were used");
    }
    if before == Before::Stored {
        forget_table(large.file().file())?;
    }
    Ok(Course { ready, first: first.unwrap_or(ready), ends })
}

/// Leaves what the server is to find.
fn prepare(path: &Path, interface: Interface<'_>, before: Before) -> Result<()> {
    match before {
        Before::Kept => Large::open(path, interface, Durability::Synced).map(drop),
        Before::Restarted => forget_inodes(1),
        Before::Stored => {
            store_table(&File::open(path)?)?;
            forget_inodes(1)
        }
    }
}

/// How often kept tables and stored ones were used so far.
fn uses() -> Result<[u64; 2]> {
    Ok(tables()?.map_or([0; 2], |tables| [tables.resumed, tables.stored_used]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that is ready after a second, takes `slow` seconds for each of so many windows, and
    /// a second for each of the others.
    fn course(slow: f64, windows: usize, of: usize) -> Course {
        let took = |number| if number < windows { slow } else { 1.0 };
        let ends = (0..of).scan(1.0, |now, number| {
            *now += took(number);
            Some(*now)
        });
        Course { ready: 1.0, first: 1.1, ends: ends.collect() }
    }

    #[test]
    fn full_speed_begins_where_windows_are_short() {
        assert_eq!(course(3.0, 40, 200).at_last(), 1.0);
        // Of the nine windows from the 36th on five are short.
        assert_eq!(course(3.0, 40, 200).until_full(), 1.0 + 36.0 * 3.0);
        assert_eq!(course(3.0, 0, 200).until_full(), 1.0);
        // Nearly as fast is fast enough.
        assert_eq!(course(1.1, 40, 200).until_full(), 1.0);
        assert!(course(1.2, 40, 200).until_full() > 40.0);
    }

    #[test]
    fn a_window_that_is_slow_or_fast_by_accident_changes_nothing() {
        let mut some = course(3.0, 40, 200);
        let usual = some.until_full();
        // A short window among slow ones, and a slow one at full speed.
        some.ends[10] = some.ends[9] + 0.1;
        for end in &mut some.ends[190..] {
            *end += 50.0;
        }
        assert_eq!(some.until_full(), usual);
    }

    #[test]
    fn gets_are_counted_by_whole_windows() {
        let some = course(3.0, 40, 200);
        assert_eq!(some.gets_until(0.5), 0.0);
        assert_eq!(some.gets_until(4.0), WINDOW as f64);
        assert_eq!(some.gets_until(9.9), 2.0 * WINDOW as f64);
    }

    #[test]
    fn a_server_finds_every_value() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store { values: 100 };
        let mmap = Interface::Mapped(Backend::Mmap);
        for interface in [Interface::Calls, mmap, Interface::Populated] {
            let course = start(store, &path, Layout::Row, interface, Before::Kept).unwrap();
            assert_eq!(course.ends.len(), 600 / 32, "{interface:?}");
            assert!(course.ready <= course.first && course.first <= course.ends[0]);
            let large = Large::open(&path, interface, Durability::Synced).unwrap();
            let view = large.view(Access::Read).unwrap();
            let mut value = vec![0; VALUE as usize];
            for key in 0..100 {
                store.get(&view, key, &mut value).unwrap();
                assert!(is_of(key, &value));
            }
            assert!(store.get(&view, 100, &mut value).is_err());
        }
    }
}
