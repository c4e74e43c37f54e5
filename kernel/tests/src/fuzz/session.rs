//! A run of the fuzzer: its counters, its last operations, and its end.

use std::collections::VecDeque;
use std::env;
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::counters::{self, Memory};
use crate::random::Random;
use crate::threads;

/// Memory that the kernel takes once for operations that the first round did not have: 3 MiB after
/// 9 rounds, and no more after 34.
const ONCE_KIB: u64 = 6 << 10;

/// The number of last operations that a failure shows.
const SHOWN: usize = 40;

fn variable<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

/// Rounds, each with its own seed, until the time is over.
#[derive(Debug)]
pub(crate) struct Rounds {
    next: u64,
    begin: Instant,
    time: Duration,
    /// `VELLUM_STEPS`: one round with so many steps.
    steps: Option<u64>,
    done: u64,
    /// The memory after the first round: by then the kernel has taken the memory that it takes once
    /// and keeps.
    memory: Option<Memory>,
}

impl Rounds {
    /// For `VELLUM_SECONDS`, or else for so many, or a part of them where `VELLUM_SHORT` is set,
    /// from `VELLUM_SEED`, or else from the clock.
    pub(crate) fn new(seconds: u64) -> Self {
        let given = variable("VELLUM_SECONDS");
        let seconds = given.unwrap_or_else(|| u64::from(threads::rounds(seconds as u32)));
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos());
        let next = variable("VELLUM_SEED").unwrap_or(clock as u64);
        println!("VELLUM_SEED={next}");
        let (begin, time) = (Instant::now(), Duration::from_secs(seconds));
        Self { next, begin, time, steps: variable("VELLUM_STEPS"), done: 0, memory: None }
    }

    /// The next round, if there is time for it. There is at least one.
    pub(crate) fn next(&mut self, steps: u64) -> Option<Session> {
        match self.done > 0 && self.begin.elapsed() >= self.time {
            true => None,
            false => self.next_over_time(steps),
        }
    }

    /// The next round, however late it is, unless `VELLUM_STEPS` asks for one only.
    pub(crate) fn next_over_time(&mut self, steps: u64) -> Option<Session> {
        if self.done == 1 {
            counters::assert_no_exmaps();
            counters::assert_no_morsels();
            self.memory = Some(Memory::now());
        }
        if self.done > 0 && self.steps.is_some() {
            return None;
        }
        let seed = self.next;
        self.next = Random::new(seed).number();
        self.done += 1;
        let without = env::var("VELLUM_WITHOUT").unwrap_or_default();
        let without = without.split(',').map(str::to_owned).collect();
        Some(Session {
            random: Random::new(seed),
            seed,
            steps: self.steps.unwrap_or(steps),
            step: 0,
            subject: String::new(),
            begin: Instant::now(),
            log: VecDeque::new(),
            without,
        })
    }

    /// Prints the number of rounds. Fails unless all memory is free again.
    #[track_caller]
    pub(crate) fn end(&self) {
        println!("{} rounds, {:.0} s", self.done, self.begin.elapsed().as_secs_f64());
        counters::assert_no_exmaps();
        counters::assert_no_morsels();
        if let Some(memory) = &self.memory {
            memory.assert_back_but(ONCE_KIB);
        }
    }
}

/// One round.
#[derive(Debug)]
pub(crate) struct Session {
    /// Its numbers.
    pub(crate) random: Random,
    seed: u64,
    steps: u64,
    step: u64,
    /// The subject of the step's operations.
    pub(crate) subject: String,
    begin: Instant,
    log: VecDeque<String>,
    without: Vec<String>,
}

impl Session {
    /// Begins a step, if there is one more.
    pub(crate) fn step(&mut self) -> bool {
        self.step += 1;
        self.step <= self.steps
    }

    /// How many steps the round has.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether it is time for the work of every so many steps.
    pub(crate) fn every(&self, steps: u64) -> bool {
        self.step.is_multiple_of(steps)
    }

    /// One of several operations, by weight, without those that `VELLUM_WITHOUT` names.
    pub(crate) fn choose<T: Copy>(&mut self, operations: &[(u64, &'static str, T)]) -> T {
        let total: u64 = operations.iter().map(|(weight, ..)| weight).sum();
        loop {
            let mut at = self.random.below(total);
            for (weight, name, operation) in operations {
                if at >= *weight {
                    at -= weight;
                    continue;
                }
                if self.without.iter().any(|without| without == name) {
                    break;
                }
                return *operation;
            }
        }
    }

    /// Notes the current operation.
    pub(crate) fn note(&mut self, what: String) {
        if self.log.len() == SHOWN {
            self.log.pop_front();
        }
        self.log.push_back(format!("step {}, {}: {what}", self.step, self.subject));
    }
}

impl Drop for Session {
    /// After a panic, prints the last operations, and how to repeat the round.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        println!("the last operations:");
        self.log.iter().for_each(|line| println!("  {line}"));
        let seconds = self.begin.elapsed().as_secs_f64();
        println!("{seconds:.1} s into the round; to repeat it:");
        println!("VELLUM_SEED={} VELLUM_STEPS={}", self.seed, self.step);
    }
}
