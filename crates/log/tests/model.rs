//! Model checks of the log: the real one, on shuttle's scheduler and a simulated device.
//!
//! `cargo test -p vellum-log --features model --release --test model`
//!
//! Every lock and every word of the ring is a scheduling point here, and so are the moments
//! between reserving and copying, copying and counting, and writing and syncing. Shuttle runs each
//! scenario under random schedules and under ones with few, well-placed preemptions (PCT), and
//! fails on a wrong result as well as on a deadlock. `VELLUM_MODEL_SCHEDULES` sets how many are
//! tried (2,000 of each).

#![cfg(feature = "model")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use shuttle::rand::Rng as _;
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use vellum_log::{
    Log, LogError, LogOptions, Lsn, SimulatedDevice, SimulatedFault, SimulatedOptions,
};

fn check(scenario: impl Fn() + Send + Sync + 'static) {
    let schedules = std::env::var("VELLUM_MODEL_SCHEDULES").ok().and_then(|n| n.parse().ok());
    let schedules = schedules.unwrap_or(2_000);
    let scenario = Arc::new(scenario);
    let (random, pct) = (scenario.clone(), scenario);
    shuttle::check_random(move || random(), schedules);
    shuttle::check_pct(move || pct(), schedules, 3);
}

fn random(below: u64) -> u64 {
    shuttle::rand::thread_rng().gen_range(0..below)
}

fn device() -> Arc<SimulatedDevice> {
    let mut options = SimulatedOptions::default();
    (options.seed, options.segment_blocks, options.segments) = (random(1 << 40), 4, 8);
    (options.durable_appends, options.in_flight) = (random(2) == 0, 1 + random(3) as usize);
    Arc::new(SimulatedDevice::new(options))
}

/// A log with the smallest ring: four blocks.
fn open(device: &Arc<SimulatedDevice>) -> (Arc<Log>, Vec<(Lsn, Vec<u8>)>) {
    let mut options = LogOptions::default();
    options.ring_bytes = 4 * 4096;
    let mut found = Vec::new();
    let opened = Log::open(device.clone(), &options, None, |record| {
        found.push((record.lsn, record.bytes.to_vec()));
        Ok::<_, LogError>(())
    });
    (Arc::new(opened.unwrap().0), found)
}

/// What threads have appended, and what was acknowledged to them.
#[derive(Default)]
struct Notes {
    appended: Mutex<Vec<(Lsn, Vec<u8>)>>,
    acknowledged: Mutex<Vec<Lsn>>,
}

impl Notes {
    /// Appends a record and waits until it is durable.
    fn commit(&self, log: &Log, record: Vec<u8>) -> Result<(), LogError> {
        let lsn = log.append(&record)?;
        self.appended.lock().unwrap().push((lsn, record));
        log.wait_durable(lsn)?;
        assert!(log.durable() > lsn);
        self.acknowledged.lock().unwrap().push(lsn);
        Ok(())
    }

    /// What is found was appended, is in order, and has all of these.
    fn check(&self, acknowledged: &[Lsn], found: &[(Lsn, Vec<u8>)]) {
        assert!(found.is_sorted_by(|one, other| one.0 < other.0));
        // A thread notes its record after it has appended it.
        let appended = self.appended.lock().unwrap().clone();
        for (lsn, record) in found {
            let is_whole = record.iter().all(|byte| *byte == record[0]);
            assert!(is_whole, "the record at {lsn} is mixed with another");
            let note = appended.iter().find(|(other, _)| other == lsn);
            assert!(note.is_none_or(|(_, bytes)| bytes == record), "{lsn} is another");
        }
        for lsn in acknowledged {
            assert!(found.iter().any(|(other, _)| other == lsn), "{lsn} is lost");
        }
    }
}

/// Records of each thread: small ones, and some that go over several blocks.
fn record(thread: u64, number: u64) -> Vec<u8> {
    let len = [10, 4040, 100, 3900][((thread + number) % 4) as usize];
    vec![(thread * 16 + number + 1) as u8; len]
}

fn writers(
    count: u64,
    notes: &Arc<Notes>,
    log: &Arc<Log>,
    records: u64,
) -> Vec<thread::JoinHandle<()>> {
    let start = |thread| {
        let (notes, log) = (notes.clone(), log.clone());
        thread::spawn(move || {
            for number in 0..records {
                match notes.commit(&log, record(thread, number)) {
                    Ok(()) => {}
                    Err(LogError::Poisoned { .. }) => return,
                    Err(error) => panic!("{error}"),
                }
            }
        })
    };
    (0..count).map(start).collect()
}

#[test]
fn a_crash_at_any_time_loses_nothing_acknowledged() {
    check(|| {
        let device = device();
        let notes = Arc::new(Notes::default());
        let (log, _) = open(&device);
        let writers = writers(3, &notes, &log, 2);
        let (crashing, seen) = (device.clone(), notes.clone());
        let crash = thread::spawn(move || {
            (0..random(12)).for_each(|_| thread::yield_now());
            let acknowledged = seen.acknowledged.lock().unwrap().clone();
            (acknowledged, Arc::new(crashing.crash()))
        });
        let (acknowledged, crashed) = crash.join().unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let (again, found) = open(&crashed);
        drop(again);
        notes.check(&acknowledged, &found);
        // Without a crash all are there.
        assert_eq!(notes.acknowledged.lock().unwrap().len(), 6);
        drop(log);
        let (_, found) = open(&device);
        assert_eq!(found.len(), 6);
        notes.check(&notes.acknowledged.lock().unwrap(), &found);
    });
}

#[test]
fn a_failure_ends_every_wait_and_takes_back_nothing() {
    check(|| {
        let device = device();
        let notes = Arc::new(Notes::default());
        let (log, _) = open(&device);
        let fault = [SimulatedFault::Append, SimulatedFault::Sync][random(2) as usize];
        device.fail(fault, 1 + random(3));
        let writers = writers(3, &notes, &log, 2);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        drop(log);
        let (_, found) = open(&Arc::new(device.crash()));
        notes.check(&notes.acknowledged.lock().unwrap(), &found);
    });
}

#[test]
fn callbacks_are_called_once_with_no_thread_waiting() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let [durable, closed] = [0, 1].map(|_| Arc::new(AtomicU64::new(0)));
        let append = |thread: u64| {
            let (log, durable, closed) = (log.clone(), durable.clone(), closed.clone());
            thread::spawn(move || {
                for number in 0..3 {
                    let lsn = log.append(&record(thread, number)).unwrap();
                    let (durable, closed) = (durable.clone(), closed.clone());
                    let callback = move |result: Result<(), LogError>| match result {
                        Ok(()) => drop(durable.fetch_add(1, Ordering::SeqCst)),
                        Err(LogError::Closed) => drop(closed.fetch_add(1, Ordering::SeqCst)),
                        Err(error) => panic!("{error}"),
                    };
                    log.on_durable(lsn, Box::new(callback));
                }
            })
        };
        let threads: Vec<_> = (0..2).map(append).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let early = random(2) == 0;
        while !early && durable.load(Ordering::SeqCst) < 6 {
            thread::yield_now();
        }
        drop(log);
        let [durable, closed] = [durable, closed].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(durable + closed, 6);
        let (_, found) = open(&Arc::new(device.crash()));
        assert!(found.len() as u64 >= durable);
    });
}

#[test]
fn a_full_log_wakes_all_when_it_is_trimmed() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let append = |thread: u64| {
            let log = log.clone();
            thread::spawn(move || {
                let mut last = Lsn(0);
                for number in 0..8 {
                    let lsn = loop {
                        match log.append(&record(thread, number)) {
                            Ok(lsn) => break lsn,
                            Err(LogError::Full { .. }) => log.trim(last).unwrap(),
                            Err(error) => panic!("{error}"),
                        }
                        thread::yield_now();
                    };
                    log.wait_durable(lsn).unwrap();
                    last = last.max(lsn);
                }
            })
        };
        let threads: Vec<_> = (0..2).map(append).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        Arc::try_unwrap(log).unwrap().close().unwrap();
        let (_, found) = open(&device);
        assert!(found.iter().any(|(_, record)| record[0] == 16 + 7 + 1));
    });
}

/// One thread leads flights for itself; the other's records are carried though it never waits.
#[test]
fn a_callback_is_called_though_others_lead() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let notes = Arc::new(Notes::default());
        let leading = writers(1, &notes, &log, 2);
        let called = Arc::new(AtomicU64::new(0));
        let flag = called.clone();
        let lsn = log.append(b"called").unwrap();
        let callback = move |result: Result<(), LogError>| {
            result.unwrap();
            flag.store(1, Ordering::SeqCst);
        };
        log.on_durable(lsn, Box::new(callback));
        leading.into_iter().for_each(|writer| writer.join().unwrap());
        while called.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
    });
}

/// A thread may have the callback in its hands when the log ends.
#[test]
fn the_end_of_a_log_waits_for_callbacks() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let called = Arc::new(AtomicU64::new(0));
        let flag = called.clone();
        let lsn = log.append(b"called").unwrap();
        let callback = move |_| {
            thread::yield_now();
            flag.store(1, Ordering::SeqCst);
        };
        log.on_durable(lsn, Box::new(callback));
        let leader = {
            let log = log.clone();
            thread::spawn(move || drop(log.append(b"led").and_then(|lsn| log.wait_durable(lsn))))
        };
        log.stop();
        log.wait_callers();
        assert_eq!(called.load(Ordering::SeqCst), 1, "the wait has ended before");
        leader.join().unwrap();
    });
}

/// Whatever becomes of a record, its callback has returned after a wait for it and one for the
/// threads that call back. Callbacks may wait for those themselves, and append.
#[test]
fn a_wait_for_callers_outlasts_the_callbacks() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        if random(2) == 0 {
            let fault = [SimulatedFault::Append, SimulatedFault::Sync][random(2) as usize];
            device.fail(fault, 1 + random(3));
        }
        let commit = |thread: u64| {
            let log = log.clone();
            thread::spawn(move || {
                for number in 0..2 {
                    let Ok(lsn) = log.append(&record(thread, number)) else { return };
                    let returned = Arc::new(AtomicU64::new(0));
                    let (within, flag) = (log.clone(), returned.clone());
                    let callback = move |_| {
                        if thread == 0 {
                            within.wait_callers();
                            let lsn = within.append(b"again");
                            lsn.into_iter().for_each(|lsn| within.on_durable(lsn, Box::new(drop)));
                        }
                        thread::yield_now();
                        flag.store(1, Ordering::SeqCst);
                    };
                    log.on_durable(lsn, Box::new(callback));
                    drop(log.wait_durable(lsn));
                    log.wait_callers();
                    assert_eq!(returned.load(Ordering::SeqCst), 1, "the wait has ended before");
                }
            })
        };
        let threads: Vec<_> = (0..3).map(commit).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Threads that fill the ring anew the moment that a part of it comes free.
#[test]
fn a_ring_is_filled_as_it_comes_free() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let fill = |thread: u64| {
            let log = log.clone();
            thread::spawn(move || {
                let mut appended = 0;
                while appended < 4 {
                    match log.try_append(&[&record(thread, 1)]) {
                        Ok(_) => appended += 1,
                        Err(LogError::Busy { .. }) => thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        };
        let threads: Vec<_> = (0..2).map(fill).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        Arc::try_unwrap(log).unwrap().close().unwrap();
        assert_eq!(open(&device).1.len(), 8);
    });
}

/// A record of which a flush was requested becomes durable, although no thread waits for it, and no
/// other record or request follows.
#[test]
fn a_requested_flush_takes_all_that_was_appended_before_it() {
    check(|| {
        let device = device();
        let (log, _) = open(&device);
        let request = |log: &Log| {
            let lsn = log.append(b"gathers").unwrap();
            log.request_flush(lsn);
            lsn
        };
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let log = Arc::clone(&log);
                thread::spawn(move || {
                    request(&log);
                    request(&log)
                })
            })
            .collect();
        for newest in threads.into_iter().map(|thread| thread.join().unwrap()) {
            while log.durable() <= newest {
                thread::yield_now();
            }
        }
    });
}
