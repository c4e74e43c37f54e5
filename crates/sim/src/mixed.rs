//! The first workload: any operations, compared with a model of the whole store.
//!
//! A store lives several times. In each life it changes, until it crashes, fails or is closed;
//! the next life goes on with what was recovered. Crashes at other operations are noted on the
//! way, and looked at beside.

use std::io::Write as _;
use std::sync::Arc;

use vellum::{Durability, Error, Isolation, Options, Store, TransactionOptions, Tree};
use vellum_log::LogError;
use vellum_testing::random::Random;

use crate::backups::Backups;
use crate::compactions::Compactions;
use crate::failure::{Failure, Outcome, ensure, is_from_outside};
use crate::keys::Keys;
use crate::machine::{Crash, End, Fault, Machine};
use crate::model::{Bytes, Change, Entries, History, Model, contents, difference, is_same};
use crate::recovery::{Recovered, Recovery, Sizes};
use crate::report::Report;
use crate::slow::SlowLog;
use crate::story::tell;
use crate::transactions::{NumberedTree, OpenSnapshot, OpenTransaction};
use crate::variety::Variety;

/// The most trees.
const TREES_MAX: usize = 5;
/// The most transactions and snapshots that are open at once.
const OPEN_MAX: usize = 4;
/// The most crashes of a life that are looked at beside.
const RECOVERIES_MAX: usize = 12;

/// How crashes that are noted end.
const ENDS: &[End] = &[
    End::PowerLoss,
    End::PowerLoss,
    End::PowerLoss,
    End::Kill,
    End::MisdirectedWrite,
    End::MisdirectedBlock,
];

/// A store, and what it must have.
struct Life {
    random: Random,
    sizes: Sizes,
    machine: Arc<Machine>,
    store: Store,
    trees: Vec<NumberedTree>,
    next_tree: u64,
    /// What the store has now.
    model: Model,
    history: History,
    /// So many changes are durable.
    synced: usize,
    open: Vec<OpenTransaction>,
    snapshots: Vec<OpenSnapshot>,
    /// Changes of one record alone: a crash then loses no pages.
    is_simple: bool,
    /// Most values have pages of their own, so that the free places are many.
    are_long: bool,
    may_lose_pages: bool,
    /// The store refuses changes.
    is_over: bool,
    /// The crash with which the life ends.
    ending: Option<Crash>,
    /// The disk or the log is full until so many steps from now.
    full_for: u64,
    sync_once_in: u64,
    compactions: Compactions,
    backups: Backups,
    slow: SlowLog,
    keys: Keys,
    variety: Variety,
    report: Report,
}

/// Runs a seed.
pub(crate) fn run(seed: u64) -> Outcome<Report> {
    let mut random = Random(seed);
    let mut sizes = Sizes::random(&mut random);
    let slow = SlowLog::random(seed, &mut sizes);
    let variety = Variety::random(seed, &mut sizes);
    let machine = Machine::new(sizes.new_log(random.next()), random.next());
    let options = sizes.options(&machine).page_frames(sizes.page_frames);
    let store = Store::create_on(machine.clone(), &options).map_err(Failure::of("a new store"))?;
    let keys = Keys::random(seed, store.limits().max_key);
    let mut life = Life {
        sizes,
        machine,
        store,
        trees: Vec::new(),
        next_tree: 0,
        model: Model::new(),
        history: History::default(),
        synced: 0,
        open: Vec::new(),
        snapshots: Vec::new(),
        is_simple: random.once_in(2),
        are_long: random.once_in(3),
        may_lose_pages: false,
        is_over: false,
        ending: None,
        full_for: 0,
        sync_once_in: random.pick(&[2, 8, 50]),
        compactions: Compactions::random(seed),
        backups: Backups::random(seed),
        slow,
        keys,
        variety,
        report: Report::default(),
        random,
    };
    let lives = life.random.pick(&[1, 2, 4, 6]);
    for number in 1.. {
        life.live()?;
        life = match life.end(number >= lives)? {
            Ok(next) => next,
            Err(report) => return Ok(report),
        };
    }
    unreachable!("a last life ends the loop")
}

/// A value: some have pages of their own.
fn value(random: &mut Random, are_long: bool) -> Bytes {
    let len = match random.below(16) {
        _ if are_long && !random.once_in(3) => 1500 + random.below(8_000),
        0 if random.once_in(4) => random.below(40_000),
        0 | 1 => random.below(9_000),
        2..9 => random.below(900),
        _ => random.below(40),
    };
    vellum_testing::random::bytes(len as usize, random.next()).into()
}

/// A value of the same length, with some other bytes.
fn altered(random: &mut Random, old: &[u8]) -> Bytes {
    let mut value = old.to_vec();
    for _ in 0..random.below(5) {
        let at = random.index(value.len());
        let end = value.len().min(at + 1 + random.below(20) as usize);
        value[at..end].fill(random.next() as u8);
    }
    value.into()
}

impl Life {
    /// Works on the store until the life ends.
    fn live(&mut self) -> Outcome {
        let crash_once_in = self.random.pick(&[20, 80, 400]);
        self.machine.crash_once_in(crash_once_in, ENDS);
        self.slow.begin(&self.store, &self.machine);
        self.backups.begin();
        self.note();
        let mut recoveries = RECOVERIES_MAX;
        for _ in 0..self.random.pick(&[10, 60, 300, 800]) {
            self.weather();
            self.synced = self.synced.max(self.slow.pass(&self.machine)?);
            self.note();
            self.step()?;
            let crashes = self.machine.take_crashes();
            if recoveries > 0 {
                for crash in crashes {
                    if crash.can_go_on() && self.random.once_in(10) {
                        self.ending = Some(crash);
                        return Ok(());
                    }
                    let sizes = self.variety.grown(self.sizes);
                    self.recover(sizes, |recovery| recovery.look_at(crash))?;
                    recoveries = recoveries.saturating_sub(1);
                }
                if recoveries == 0 {
                    self.machine.crash_once_in(u64::MAX, ENDS);
                }
            }
            if self.is_over {
                break;
            }
            self.history.advance(self.synced);
        }
        Ok(())
    }

    /// Failures to come.
    fn weather(&mut self) {
        let random = &mut self.random;
        if self.full_for > 0 {
            self.full_for -= 1;
            if self.full_for == 0 {
                self.machine.set_disk_full(false);
                self.machine.set_log_full(false);
            }
        } else if random.once_in(150) {
            match random.once_in(2) {
                true => self.machine.set_disk_full(true),
                false => self.machine.set_log_full(true),
            }
            self.full_for = random.pick(&[3, 30]);
        }
        // The log or a backup has most pages that cannot be read.
        if random.once_in(60) || self.backups.fails_a_read() {
            self.machine.fail(Fault::Read, 1 + random.below(10));
        }
        if random.once_in(400) {
            let faults = [
                Fault::Read,
                Fault::Read,
                Fault::Write,
                Fault::Sync,
                Fault::LogAppend,
                Fault::LogSync,
            ];
            self.machine.fail(random.pick(&faults), 1 + random.below(10));
        }
    }

    fn note(&mut self) {
        self.machine.note((self.synced, self.history.len()));
    }

    /// Recovers the store with these sizes, with what `run` does of a recovery.
    fn recover<T>(
        &mut self,
        sizes: Sizes,
        run: impl FnOnce(&mut Recovery<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let history = &self.history;
        let judge = |store: &Store, noted: (usize, usize)| {
            let found = contents(store).map_err(Failure::of("reading"))?;
            history.find(&found, noted).map(drop)
        };
        let backups = &mut self.backups;
        run(&mut Recovery {
            sizes,
            look: &mut |store| backups.look_at(store),
            may_lose_pages: self.may_lose_pages,
            judge: &judge,
            report: &mut self.report,
            random: &mut self.random,
        })
    }

    /// Ends the life. Returns the next one, unless this one was the last.
    fn end(mut self, is_last: bool) -> Outcome<Result<Life, Report>> {
        self.open.clear();
        self.snapshots.clear();
        self.trees.clear();
        let ending = self.ending.take();
        if !self.is_over && ending.is_none() && (is_last || self.random.once_in(4)) {
            return self.close(is_last);
        }
        let end = self.random.pick(&[End::PowerLoss, End::Kill]);
        let crash = ending.unwrap_or_else(|| self.machine.crash_now(end));
        let noted = crash.noted;
        self.machine.kill();
        self.sizes = self.variety.grown(self.sizes);
        match self.recover(self.sizes, |recovery| recovery.run(crash, 2))? {
            Some(_) if is_last => Ok(Err(self.ended())),
            Some(recovered) => self.next(recovered, noted).map(Ok),
            None => Err(Failure::new("a store that has to open does not")),
        }
    }

    /// What happened.
    fn ended(self) -> Report {
        let trace = Random(self.report.trace ^ self.machine.trace()).next();
        Report { trace, ..self.report }
    }

    /// Goes on with a store that was opened again.
    fn next(
        mut self,
        Recovered { store, machine }: Recovered,
        noted: (usize, usize),
    ) -> Outcome<Life> {
        let found = contents(&store).map_err(Failure::of("reading"))?;
        let at = self.history.find(&found, noted)?;
        self.model = self.history.state(at);
        self.trees.clear();
        for (name, tree) in &self.model {
            self.trees.push((tree.id, store.tree(name).map_err(Failure::of("a tree"))?));
        }
        self.report.trace = Random(self.report.trace ^ self.machine.trace()).next();
        self.history = History { base: self.model.clone(), ..History::default() };
        self.store = store;
        SlowLog::end(&self.machine)?;
        self.machine = machine;
        (self.synced, self.full_for, self.is_over) = (0, 0, false);
        Ok(self)
    }

    /// Closes the store and opens it again.
    fn close(self, is_last: bool) -> Outcome<Result<Life, Report>> {
        self.machine.set_disk_full(false);
        self.machine.set_log_full(false);
        self.machine.clear_faults();
        self.machine.clear_log_fault();
        self.machine.crash_once_in(u64::MAX, ENDS);
        let closed = self.store.clone().close();
        match closed {
            Ok(()) => {}
            // A fault of the log that was planned before.
            Err(Error::Log(LogError::Poisoned { .. })) => return Ok(Err(self.ended())),
            Err(error) => return Err(Failure::of("closing")(error)),
        }
        // A closed store needs no log.
        let plain = Options::new().pool_bytes(4 << 20).single_threaded();
        let options = if is_last { plain } else { self.sizes.options(&self.machine) };
        let opened = Store::open_on(self.machine.clone(), &options);
        let store = opened.map_err(Failure::of("opening a closed store"))?;
        let found = contents(&store).map_err(Failure::of("reading"))?;
        let is_right = is_same(&self.model, &found);
        ensure!(is_right, "a closed store has changed: {}", difference(&self.model, &found));
        let check = store.check(&mut |_| ()).map_err(Failure::of("a check"))?;
        ensure!(check.damage.is_empty(), "damage after a close: {:?}", check.damage);
        if is_last {
            return Ok(Err(self.ended()));
        }
        let machine = self.machine.clone();
        let all = self.history.len();
        self.next(Recovered { store, machine }, (all, all)).map(Ok)
    }

    /// Does one thing.
    fn step(&mut self) -> Outcome {
        if self.trees.is_empty() {
            return self.create();
        }
        if self.compactions.is_due() {
            return self.compact();
        }
        if self.backups.is_due() {
            return self.back_up();
        }
        if self.backups.looks_at_unreadable() {
            return self.look_at_unreadable();
        }
        if self.random.once_in(self.sync_once_in) {
            return self.sync();
        }
        if self.variety.is_due() {
            return self.do_something_rare();
        }
        match self.random.below(100) {
            0..24 => self.put(),
            24..34 => self.remove(),
            34..38 => self.read(),
            38..41 => self.extend(),
            41..43 => self.remove_range(),
            43..86 if !self.variety.has_views => self.put(),
            43..80 => self.transact(),
            80..86 => self.look_back(),
            86..92 => {
                self.store.work_for_log();
                Ok(())
            }
            92 if self.trees.len() < TREES_MAX => self.create(),
            93 => self.rename(),
            _ if self.is_simple => self.put(),
            94..97 => self.stream(),
            97 => self.load(),
            98 => self.clear(),
            _ if self.random.once_in(3) => self.drop_tree(),
            _ => self.remove(),
        }
    }

    /// Some tree, with its number and its name.
    fn tree(&mut self) -> (Tree, String) {
        let (_, tree) = self.trees[self.random.index(self.trees.len())].clone();
        let name = tree.name().to_string();
        (tree, name)
    }

    /// Makes changes by one operation of the store. If it fails, the store must have the first of
    /// them: none, if it is one change.
    fn change(
        &mut self,
        changes: Vec<Change>,
        run: impl FnOnce(&Store) -> vellum::Result<()>,
    ) -> Outcome {
        let first = self.history.len();
        self.may_lose_pages |= changes.iter().any(Change::may_lose_pages);
        changes.iter().for_each(|change| tell(|| format!("{first}: {change}")));
        self.history.changes.extend(changes);
        self.note();
        match run(&self.store) {
            Ok(()) => self.made(first),
            Err(error) => return self.failed(first, &error),
        }
        Ok(())
    }

    /// The changes from this number on are made.
    fn made(&mut self, first: usize) {
        let from = first - self.history.base_at;
        for change in &self.history.changes[from..] {
            change.apply(&mut self.model);
            self.report.changes += 1;
        }
        self.note();
    }

    /// The store has refused some of the changes from this number on.
    fn failed(&mut self, first: usize, error: &Error) -> Outcome {
        self.report.refused += 1;
        tell(|| format!("refused: {error}"));
        self.machine.clear_faults();
        let is_full = matches!(error, Error::DiskFull(_) | Error::Log(LogError::Full { .. }));
        ensure!(!is_full || self.full_for > 0, "what has room is full: {error}");
        // Clears of large trees whose keys are long keep that much.
        let has_views = !self.snapshots.is_empty() || !self.open.is_empty();
        let is_right = match error {
            Error::VersionsFull { .. } => has_views,
            _ => is_from_outside(error),
        };
        ensure!(is_right, "a change fails: {error}");
        if self.store.sync().is_err() {
            // It is unknown what a crash takes of them.
            self.is_over = true;
            return Ok(());
        }
        let found = contents(&self.store).map_err(Failure::of("reading after a refusal"))?;
        let pushed = self.history.len() - first;
        let done = (0..=pushed).find(|done| is_same(&self.history.state(first + done), &found));
        let done = match done {
            Some(done) if done == 0 || pushed > 1 => done,
            _ => {
                let differs = difference(&self.model, &found);
                return Err(Failure::new(format!(
                    "a change that failed ({error}) has changed the store: {differs}"
                )));
            }
        };
        self.history.truncate(first + done);
        self.made(first);
        self.synced = self.history.len();
        self.note();
        Ok(())
    }

    /// What a look at the store finds, unless a fault is planned that explains the error.
    fn seen<T>(&mut self, what: &str, seen: vellum::Result<T>) -> Outcome<Option<T>> {
        match seen {
            Ok(seen) => Ok(Some(seen)),
            Err(error) if is_from_outside(&error) => {
                self.report.refused += 1;
                self.is_over = self.store.sync().is_err();
                Ok(None)
            }
            Err(error) => Err(Failure::of(what)(error)),
        }
    }

    fn sync(&mut self) -> Outcome {
        tell(|| "sync".into());
        match self.store.sync() {
            Ok(()) => {
                self.synced = self.history.len();
                self.note();
            }
            Err(error) => {
                ensure!(is_from_outside(&error), "a sync fails: {error}");
                self.is_over = true;
            }
        }
        Ok(())
    }

    /// Has a new tree begin in the end of the file, with free places before it.
    fn create_late(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        self.change(vec![Change::Clear(name.clone())], |_| tree.clear())?;
        if self.is_over || !self.model[&name].entries.is_empty() {
            return Ok(());
        }
        let entries = Arc::new(self.keys.loaded(self.random.below(3000) as u16));
        let change = Change::Load(name.clone(), entries.clone());
        self.change(vec![change], |_| tree.bulk_load(&*entries).map(drop))?;
        if self.trees.len() < TREES_MAX && !self.is_over {
            self.create()?;
        }
        match self.is_over {
            false => self.change(vec![Change::Clear(name)], |_| tree.clear()),
            true => Ok(()),
        }
    }

    /// Moves pages to the front of the file. That is no change of the store.
    fn compact(&mut self) -> Outcome {
        if self.random.once_in(4) {
            self.create_late()?;
        }
        if self.is_over {
            return Ok(());
        }
        let compacted = self.compactions.run(&self.store);
        tell(|| format!("compact: {compacted:?}"));
        if let Err(error) = compacted {
            return self.failed(self.history.len(), &error);
        }
        self.synced = self.history.len();
        self.note();
        let checked = self.store.check(&mut |_| ());
        let Some(checked) = self.seen("a check after a compaction", checked)? else {
            return Ok(());
        };
        let damage = checked.damage;
        let is_sound = damage.iter().all(is_from_outside);
        ensure!(is_sound, "damage after a compaction: {damage:?}");
        Ok(())
    }

    /// Backs the store up. What the backup and the ones before lead to is the store.
    fn back_up(&mut self) -> Outcome {
        let backed_up = self.backups.run(&self.store);
        tell(|| format!("backup: {backed_up:?}"));
        if let Err(error) = backed_up {
            return self.failed(self.history.len(), &error);
        }
        self.report.backups += 1;
        self.synced = self.history.len();
        self.note();
        let found = self.backups.restore(contents).map_err(Failure::of("a restored backup"))?;
        let is_right = is_same(&self.model, &found);
        ensure!(is_right, "a backup is another store: {}", difference(&self.model, &found));
        match self.backups.repair(&self.store) {
            // The checkpoint after the backup may have failed, and the backup has not.
            Err(error) => self.failed(self.history.len(), &error),
            Ok(()) => Ok(()),
        }
    }

    /// Looks entries up while no page of the file can be read. The store repairs the pages, or says
    /// that it cannot read them.
    fn look_at_unreadable(&mut self) -> Outcome {
        self.machine.set_unreadable(true);
        for _ in 0..30 {
            self.read()?;
        }
        self.machine.set_unreadable(false);
        Ok(())
    }

    fn put(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let old = self.model[&name].entries.get(&key).filter(|old| !old.is_empty());
        let value = match old {
            Some(old) if self.random.once_in(2) => altered(&mut self.random, old),
            _ => value(&mut self.random, self.are_long),
        };
        let change = Change::Put(name, key.clone(), value.clone());
        match self.random.below(3) {
            0 => self.change(vec![change], |_| {
                tree.fetch_and_update(&key, |_| Some(value.to_vec())).map(drop)
            }),
            _ => self.change(vec![change], |_| tree.upsert(&key, &value).map(drop)),
        }
    }

    fn remove(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let was_there = self.model[&name].entries.contains_key(&key);
        let mut removed = None;
        self.change(vec![Change::Remove(name, key.clone())], |_| {
            removed = Some(tree.remove(&key)?);
            Ok(())
        })?;
        let is_right = removed.is_none_or(|removed| removed == was_there);
        ensure!(is_right, "a removal says {removed:?}, and the entry was there: {was_there}");
        Ok(())
    }

    fn read(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let found = tree.get(&key).map(|value| value.map(|value| Bytes::from(value.to_vec())));
        let Some(found) = self.seen("a read", found)? else { return Ok(()) };
        let must = self.model[&name].entries.get(&key);
        ensure!(found.as_ref() == must, "a read of {key:02x?} finds another value");
        Ok(())
    }

    /// Several entries, each a change of its own.
    fn extend(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let count = self.random.below(12);
        let mut entries = Entries::new();
        for _ in 0..count {
            entries.insert(self.keys.key(&mut self.random), value(&mut self.random, self.are_long));
        }
        let change = |(key, value): (&Vec<u8>, &Bytes)| {
            Change::Put(name.clone(), key.clone(), value.clone())
        };
        let changes = entries.iter().map(change).collect();
        self.change(changes, |_| tree.extend(&entries).map(drop))
    }

    /// The entries of a range, each a change of its own.
    fn remove_range(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let (one, other) = (self.keys.key(&mut self.random), self.keys.key(&mut self.random));
        let range = one.clone().min(other.clone())..one.max(other);
        let keys = self.model[&name].entries.range(range.clone());
        let keys: Vec<_> = keys.take(30).map(|(key, _)| key.clone()).collect();
        let Some(last) = keys.last().cloned() else { return Ok(()) };
        let changes = keys.into_iter().map(|key| Change::Remove(name.clone(), key)).collect();
        self.change(changes, |_| tree.remove_range(range.start..=last).map(drop))
    }

    /// A step that other stores do not take.
    fn do_something_rare(&mut self) -> Outcome {
        match self.variety.random.below(12) {
            0..2 => self.pop(),
            2 => self.retain(),
            3..5 => self.update(),
            5 => self.take(),
            6 => self.compare_and_swap(),
            7 => self.multi_get(),
            8..10 => self.remove_long_range(),
            10 if !self.open.is_empty() => {
                let at = self.random.index(self.open.len());
                let random = &mut self.random;
                let (one, other) = (self.keys.key(random), self.keys.key(random));
                let range = (one.clone().min(other.clone()), one.max(other));
                let stepped = self.open[at].remove_range(random, range)?;
                self.after_step(at, stepped)
            }
            _ if !self.snapshots.is_empty() => {
                let keys: Vec<_> = (0..8).map(|_| self.keys.key(&mut self.random)).collect();
                let at = self.random.index(self.snapshots.len());
                let looked = self.snapshots[at].check_keys(&keys)?;
                self.seen("a snapshot", looked).map(drop)
            }
            _ => self.remove_long_range(),
        }
    }

    /// Removes the first or the last entries.
    fn pop(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let is_first = self.random.once_in(2);
        for _ in 0..self.random.pick(&[1, 5, 40]) {
            let entries = &self.model[&name].entries;
            let end = if is_first { entries.first_key_value() } else { entries.last_key_value() };
            let end = end.map(|(key, value)| (key.clone(), value.clone()));
            let change = end.iter().map(|(key, _)| Change::Remove(name.clone(), key.clone()));
            let mut popped = None;
            self.change(change.collect(), |_| {
                let found = if is_first { tree.pop_first()? } else { tree.pop_last()? };
                popped = Some(found.map(|(key, value)| (key, Bytes::from(value.to_vec()))));
                Ok(())
            })?;
            ensure!(popped.is_none_or(|popped| popped == end), "another entry is popped");
            if self.is_over || end.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Removes what a function of the keys says, each entry a change of its own.
    fn retain(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let (from, kept) = (self.random.next(), self.random.below(4));
        let keeps = |key: &[u8]| {
            let sum = key.iter().fold(from, |sum, byte| Random(sum ^ u64::from(*byte)).next());
            sum % 4 < kept
        };
        let entries = &self.model[&name].entries;
        let keys: Vec<_> = entries.keys().filter(|key| !keeps(key)).cloned().collect();
        self.remove_keys(&name, keys, || tree.retain(|key, _| keeps(key)))
    }

    /// Removes a range that may have many leaves.
    fn remove_long_range(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let (one, other) = (self.keys.key(&mut self.random), self.keys.key(&mut self.random));
        let range = one.clone().min(other.clone())..one.max(other);
        let keys = self.model[&name].entries.range(range.clone());
        let keys = keys.map(|(key, _)| key.clone()).collect();
        self.remove_keys(&name, keys, || tree.remove_range(range))
    }

    /// Removes these keys of a tree in their order, each a change of its own.
    fn remove_keys(
        &mut self,
        name: &str,
        keys: Vec<Vec<u8>>,
        run: impl FnOnce() -> vellum::Result<u64>,
    ) -> Outcome {
        let must = keys.len() as u64;
        let changes = keys.into_iter().map(|key| Change::Remove(name.into(), key)).collect();
        let mut removed = None;
        self.change(changes, |_| {
            removed = Some(run()?);
            Ok(())
        })?;
        let is_right = removed.is_none_or(|removed| removed == must);
        ensure!(is_right, "{removed:?} entries are removed and not {must}");
        Ok(())
    }

    /// Alters a value in its place.
    fn update(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let Some(old) = self.model[&name].entries.get(&key).cloned() else { return Ok(()) };
        let new = if old.is_empty() { old } else { altered(&mut self.random, &old) };
        let change = Change::Put(name, key.clone(), new.clone());
        self.change(vec![change], |_| {
            tree.update(&key, |value| value.copy_from_slice(&new)).map(drop)
        })
    }

    fn take(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let must = self.model[&name].entries.get(&key).cloned();
        let mut taken = None;
        self.change(vec![Change::Remove(name, key.clone())], |_| {
            taken = Some(tree.take(&key)?.map(|value| Bytes::from(value.to_vec())));
            Ok(())
        })?;
        ensure!(taken.is_none_or(|taken| taken == must), "another value is taken");
        Ok(())
    }

    fn compare_and_swap(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        let old = self.model[&name].entries.get(&key).cloned();
        let new = (!self.random.once_in(4)).then(|| value(&mut self.random, self.are_long));
        let change = match &new {
            Some(new) => Change::Put(name, key.clone(), new.clone()),
            None => Change::Remove(name, key.clone()),
        };
        let mut is_swapped = None;
        self.change(vec![change], |_| {
            is_swapped = Some(tree.compare_and_swap(&key, old.as_deref(), new.as_deref())?);
            Ok(())
        })?;
        ensure!(is_swapped != Some(false), "a value is another one than it must be");
        Ok(())
    }

    fn multi_get(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let keys: Vec<_> = (0..8).map(|_| self.keys.key(&mut self.random)).collect();
        let names: Vec<_> = keys.iter().map(|key| &key[..]).collect();
        let found = tree.multi_get(&names).map(|values| {
            let bytes = values.into_iter().map(|value| Some(Bytes::from(value?.to_vec())));
            bytes.collect::<Vec<_>>()
        });
        let Some(found) = self.seen("a lookup of keys", found)? else { return Ok(()) };
        let entries = &self.model[&name].entries;
        let is_right = found.iter().map(Option::as_ref).eq(keys.iter().map(|key| entries.get(key)));
        ensure!(is_right, "a lookup of {keys:02x?} finds other values");
        Ok(())
    }

    /// A value in pieces, sometimes given up in its midst.
    fn stream(&mut self) -> Outcome {
        let ((tree, name), key) = (self.tree(), self.keys.key(&mut self.random));
        // A pool gives a quarter of itself at once.
        let most = self.sizes.pool_bytes / 5;
        let len = self.random.pick(&[100, 20_000, most.min(150_000)]);
        let len = self.random.below(len) as usize;
        let value = vellum_testing::random::bytes(len, self.random.next());
        let is_finished = !self.random.once_in(4);
        let change = Change::Put(name, key.clone(), value.clone().into());
        let changes = if is_finished { vec![change] } else { Vec::new() };
        // A recovery that makes a clean file leaves the pages of a removed value to the store.
        self.may_lose_pages |= self.sizes.recovers_to_file;
        self.change(changes, |_| {
            let mut writer = tree.writer(&key)?;
            for part in value.chunks(7000) {
                writer.write_all(part).map_err(|error| match error.downcast::<Error>() {
                    Ok(error) => error,
                    Err(error) => Error::Input(error),
                })?;
            }
            match is_finished {
                true => writer.finish().map(drop),
                false => Ok(()),
            }
        })
    }

    fn load(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        let entries = Arc::new(self.keys.loaded(self.random.below(1000) as u16));
        if !self.model[&name].entries.is_empty() {
            let refused = tree.bulk_load(&*entries);
            let Err(error) = refused else {
                return Err(Failure::new("a bulk load fills a tree that is not empty"));
            };
            let is_right = matches!(error, Error::NotEmpty) || is_from_outside(&error);
            ensure!(is_right, "a bulk load of a tree with entries fails: {error}");
            return Ok(());
        }
        let change = Change::Load(name, entries.clone());
        self.change(vec![change], |_| tree.bulk_load(&*entries).map(drop))
    }

    fn clear(&mut self) -> Outcome {
        let (tree, name) = self.tree();
        self.change(vec![Change::Clear(name)], |_| tree.clear())
    }

    fn create(&mut self) -> Outcome {
        self.next_tree += 1;
        let id = self.next_tree;
        let name = format!("tree {}", self.random.below(30));
        let exists = self.model.contains_key(&name);
        if exists {
            let refused = self.store.create_tree(&name);
            let is_right = refused.as_ref().is_err_and(|error| {
                matches!(error, Error::TreeExists(_)) || is_from_outside(error)
            });
            ensure!(is_right, "a tree is created twice");
            return Ok(());
        }
        let mut tree = None;
        self.change(vec![Change::Create(name.clone(), id)], |store| {
            tree = Some(store.create_tree(&name)?);
            Ok(())
        })?;
        self.trees.extend(tree.map(|tree| (id, tree)));
        Ok(())
    }

    fn rename(&mut self) -> Outcome {
        let (_, old) = self.tree();
        let new = format!("tree {}", 100 + self.random.below(1000));
        if self.model.contains_key(&new) {
            return Ok(());
        }
        let change = Change::Rename(old.clone(), new.clone());
        self.change(vec![change], |store| store.rename_tree(&old, &new))
    }

    fn drop_tree(&mut self) -> Outcome {
        let at = self.random.index(self.trees.len());
        let name = self.trees[at].1.name().to_string();
        self.change(vec![Change::Drop(name.clone())], |store| store.drop_tree(&name))?;
        if !self.model.contains_key(&name) {
            self.trees.remove(at);
        }
        Ok(())
    }

    /// Begins a snapshot, or looks at one, or ends it.
    fn look_back(&mut self) -> Outcome {
        if self.snapshots.len() < OPEN_MAX && self.random.once_in(3) {
            let snapshot = self.store.snapshot().map_err(Failure::of("a new snapshot"))?;
            let (began, trees) = (self.model.clone(), self.trees.clone());
            self.snapshots.push(OpenSnapshot { snapshot, began, trees });
            return Ok(());
        }
        if self.snapshots.is_empty() {
            return Ok(());
        }
        let at = self.random.index(self.snapshots.len());
        let looked = self.snapshots[at].check()?;
        self.seen("a snapshot", looked)?;
        if self.random.once_in(2) {
            drop(self.snapshots.remove(at));
        }
        Ok(())
    }

    /// Begins a transaction, or goes on with one, or ends it.
    fn transact(&mut self) -> Outcome {
        if self.open.is_empty() || self.open.len() < OPEN_MAX && self.random.once_in(6) {
            return self.begin();
        }
        let at = self.random.index(self.open.len());
        match self.random.below(12) {
            0..2 => self.commit(at),
            2 if self.random.once_in(4) => {
                self.open.remove(at).transaction.abort();
                Ok(())
            }
            _ => {
                let key = self.keys.key(&mut self.random);
                let value = value(&mut self.random, self.are_long);
                let stepped = self.open[at].step(&mut self.random, key, value)?;
                self.after_step(at, stepped)
            }
        }
    }

    /// A transaction has taken a step. It ends if that has failed.
    fn after_step(&mut self, at: usize, stepped: vellum::Result<()>) -> Outcome {
        if let Err(error) = stepped {
            let is_right = is_from_outside(&error)
                || matches!(error, Error::NoSuchTree(_) | Error::TransactionTooLarge(_));
            ensure!(is_right, "a step of a transaction fails: {error}");
            drop(self.open.remove(at));
        }
        Ok(())
    }

    fn begin(&mut self) -> Outcome {
        let isolation = self.random.pick(&[
            Isolation::Serializable,
            Isolation::Serializable,
            Isolation::Snapshot,
        ]);
        let durability =
            self.random.pick(&[Durability::Synced, Durability::Buffered, Durability::None]);
        let options = TransactionOptions::new().isolation(isolation).durability(durability);
        let transaction = self.store.begin_with(options).map_err(Failure::of("a transaction"))?;
        let how = (isolation, durability);
        let began = (self.model.clone(), self.history.len());
        self.open.push(OpenTransaction::new(transaction, how, began, self.trees.clone()));
        Ok(())
    }

    fn commit(&mut self, at: usize) -> Outcome {
        let open = self.open.remove(at);
        let now = &self.model;
        let allowed = open.check_commit(now);
        let name = |id: u64| now.iter().find(|(_, tree)| tree.id == id).map(|(name, _)| name);
        let mut writes = Vec::new();
        let mut is_of_dropped = false;
        for ((id, key), value) in &open.writes {
            match name(*id) {
                Some(name) => writes.push((name.clone(), key.clone(), value.clone())),
                None => is_of_dropped = true,
            }
        }
        let (is_empty, durability) = (open.writes.is_empty(), open.durability);
        let has_changed = self.history.len() > open.began_at;
        let first = self.history.len();
        self.history.changes.push(Change::Commit(writes));
        self.note();
        let changes = (!is_empty).then_some(first + 1);
        let is_synced = durability == Durability::Synced;
        let (outcome, goes_on) = self.slow.commit(open.transaction, changes, &self.machine);
        tell(|| {
            format!("{first}: {}: {outcome:?}", self.history.changes[first - self.history.base_at])
        });
        match outcome {
            Ok(()) => {
                ensure!(!is_of_dropped, "a commit changes a tree that was dropped");
                if !is_empty {
                    allowed?;
                }
                self.made(first);
                self.report.commits += 1;
                if !is_empty && (goes_on || durability != Durability::None) {
                    self.slow.commits_soon(self.history.len());
                }
                if is_synced && !is_empty && !goes_on {
                    self.synced = self.history.len();
                    self.note();
                }
                Ok(())
            }
            Err(Error::Conflict) if !is_empty && has_changed => {
                self.history.truncate(first);
                self.report.conflicts += 1;
                Ok(())
            }
            Err(Error::NoSuchTree(_)) if is_of_dropped => {
                self.history.truncate(first);
                Ok(())
            }
            Err(Error::NotDurable(_)) => {
                self.made(first);
                self.is_over = true;
                Ok(())
            }
            Err(Error::TransactionTooLarge(_)) => {
                self.history.truncate(first);
                self.report.refused += 1;
                Ok(())
            }
            Err(error) => self.failed(first, &error),
        }
    }
}
