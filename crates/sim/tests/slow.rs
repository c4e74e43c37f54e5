//! A log whose device takes its time, driven by hand: what a slow device shows to one thread.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_log::{Log, LogError, LogOptions, Lsn, Pilot, SimulatedDevice, SimulatedOptions};

/// Whose turn it is: the flight at this place, or the log's thread, if there is no such flight.
type Turns = Arc<Mutex<VecDeque<usize>>>;

struct Slow {
    device: Arc<SimulatedDevice>,
    log: Log,
    pilot: Pilot,
    turns: Turns,
    /// The numbers of records that are durable, in the order in which the log said so.
    durable: Arc<Mutex<Vec<u32>>>,
}

const NO_TIME: Duration = Duration::ZERO;

impl Slow {
    fn new() -> Slow {
        let options = SimulatedOptions { in_flight: 2, ..SimulatedOptions::default() };
        let device = Arc::new(SimulatedDevice::new(options));
        let opened =
            Log::open_without_thread(device.clone(), &LogOptions::default(), None, |_| Ok(()));
        let (log, _): (Log, _) = opened.map_err(|error: LogError| error).unwrap();
        let turns = Turns::default();
        let of_log = turns.clone();
        let choose = move |count: usize| {
            let planned = of_log.lock().unwrap().pop_front();
            planned.unwrap_or(0).min(count - 1)
        };
        let pilot = log.slow_down(Box::new(choose));
        Slow { device, log, pilot, turns, durable: Arc::default() }
    }

    fn append(&self, number: u32) -> Lsn {
        self.log.append(&number.to_le_bytes()).unwrap()
    }

    /// Appends a record, and notes when it is durable.
    fn append_then(&self, number: u32) -> Lsn {
        let (lsn, durable) = (self.append(number), self.durable.clone());
        let note = move |done: Result<(), LogError>| {
            done.unwrap();
            durable.lock().unwrap().push(number);
        };
        self.log.on_durable(lsn, Box::new(note));
        lsn
    }

    /// No time passes, but these have a turn.
    fn turns(&self, turns: &[usize]) {
        for turn in turns {
            self.turns.lock().unwrap().push_back(*turn);
            self.pilot.pass(NO_TIME);
        }
    }

    fn durable(&self) -> Vec<u32> {
        self.durable.lock().unwrap().clone()
    }

    /// The records that a loss of power at any time from now on cannot take.
    fn records_left(&self) -> usize {
        let records_after = |_| {
            let mut count = 0;
            let crashed = Arc::new(self.device.crash());
            Log::open_without_thread(crashed, &LogOptions::default(), None, |_| {
                count += 1;
                Ok::<_, LogError>(())
            })
            .unwrap();
            // The next crash is another one.
            self.device.random_below(1);
            count
        };
        (0..40).map(records_after).min().unwrap()
    }
}

#[test]
fn a_flight_that_overtakes_another_is_acknowledged_after_it() {
    let slow = Slow::new();
    slow.append_then(1);
    // The log's thread begins a flight, and then the second one.
    slow.turns(&[0]);
    slow.append_then(2);
    slow.turns(&[1]);
    // The second flight is written, synced and lands, while the first one waits.
    slow.turns(&[1, 1, 1]);
    assert_eq!((slow.durable(), slow.records_left()), (vec![], 0));
    slow.turns(&[0]);
    assert_eq!((slow.durable(), slow.records_left()), (vec![], 0), "it is not synced");
    slow.turns(&[0, 0]);
    assert_eq!((slow.durable(), slow.records_left()), (vec![1, 2], 2));
    assert!(!slow.pilot.is_busy());
}

#[test]
fn a_caller_that_waits_has_time_pass_until_its_record_is_durable() {
    let slow = Slow::new();
    slow.append_then(1);
    slow.turns(&[0]);
    let lsn = slow.append(2);
    assert_eq!(slow.log.durable(), Lsn(0));
    slow.log.wait_durable(lsn).unwrap();
    assert!(slow.log.durable() > lsn);
    assert_eq!((slow.durable(), slow.records_left()), (vec![1], 2));
}

#[test]
fn a_millisecond_is_one_of_the_simulation() {
    let slow = Slow::new();
    let lsn = slow.append(1);
    slow.log.request_flush(lsn);
    for _ in 0..9 {
        slow.pilot.pass(Duration::from_micros(100));
    }
    std::thread::sleep(Duration::from_millis(2));
    slow.turns(&[0, 0, 0, 0]);
    assert!(slow.pilot.is_busy() && slow.log.durable() <= lsn, "records gather");
    slow.pilot.pass(Duration::from_micros(100));
    slow.turns(&[0, 0, 0]);
    assert!(!slow.pilot.is_busy() && slow.log.durable() > lsn);
}

#[test]
fn a_log_that_ends_waits_for_what_is_in_flight() {
    let slow = Slow::new();
    slow.append_then(1);
    slow.turns(&[0]);
    slow.append(2);
    slow.log.stop();
    assert!(!slow.pilot.is_busy() && !slow.pilot.takes_records());
    assert_eq!((slow.durable(), slow.records_left()), (vec![1], 1));
}
