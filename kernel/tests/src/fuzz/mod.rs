//! A fuzzer for the module: sequences of calls from a seed, with a model of which process may see
//! which page.
//!
//! Each page that an owner has written is full of the owner's mark. A load must find that mark, or
//! other contents that the interface allows: zeros, or on a fresh frame of an exmap the earlier
//! contents of that exmap. It must never find another owner's mark, nor the numbers of frames.
//!
//! | variable | meaning |
//! |---|---|
//! | `VELLUM_SECONDS` | how long |
//! | `VELLUM_SEED` | begins with this round |
//! | `VELLUM_STEPS` | one round, of so many steps |
//! | `VELLUM_WITHOUT` | operations to be left out, by name, with commas between them |

mod exmap_steps;
mod exmaps;
mod files;
mod holds;
mod marks;
mod morsel_steps;
mod morsels;
mod ring;
mod rush;
pub(crate) mod session;
mod together;
mod walks;

use session::{Rounds, Session};

use crate::{counters, morsel, persistent};

/// Steps of a round.
const STEPS: u64 = 400;
/// Steps of each thread in a round of several.
const STEPS_TOGETHER: u64 = 200;
/// Steps between two self-checks of the module.
const CHECK: u64 = 50;
/// Once in so many steps a subject is replaced, or the device is mounted again.
const SELDOM: u64 = 80;

/// Sequences of one thread. Every result is known.
pub fn sequences(seconds: u64) {
    let has_device = persistent::is_there();
    if has_device {
        persistent::format();
    }
    let mut rounds = Rounds::new(seconds);
    while let Some(mut session) = rounds.next(STEPS) {
        Subjects::new(&mut session, has_device).round(&mut session);
    }
    rounds.end();
}

/// Rounds of several threads and processes. The owner of a page knows its contents.
pub fn together(seconds: u64) {
    let mut rounds = Rounds::new(seconds);
    while let Some(mut session) = rounds.next(STEPS_TOGETHER) {
        session.step();
        let round = match session.random.below(8) {
            0..2 if morsel::is_mounted() => together::with_morsel,
            2..5 if morsel::is_mounted() => rush::with_morsel,
            5 => together::with_exmap,
            _ => rush::with_exmap,
        };
        round(&mut session);
    }
    rounds.end();
}

/// The subject of a round.
struct Subjects {
    number: u64,
    exmaps: Vec<exmaps::Subject>,
    /// The last one is on the device, if there is one.
    morsels: Vec<morsels::Subject>,
    has_device: bool,
}

impl Subjects {
    fn new(session: &mut Session, has_device: bool) -> Self {
        let mut subjects = Self { number: 0, exmaps: Vec::new(), morsels: Vec::new(), has_device };
        for _ in 0..2 {
            subjects.add_exmap(session);
        }
        if morsel::is_mounted() {
            subjects.add_morsel(session, 0, false);
            subjects.add_morsel(session, 0, false);
        }
        if has_device {
            let last = subjects.morsels.len();
            subjects.add_morsel(session, last, true);
        }
        subjects
    }

    fn add_exmap(&mut self, session: &mut Session) {
        self.number += 1;
        self.exmaps.push(exmaps::Subject::new(session, self.number));
    }

    fn add_morsel(&mut self, session: &mut Session, index: usize, is_on_device: bool) {
        self.number += 1;
        let subject = morsels::Subject::new(session, self.number, is_on_device);
        self.morsels.insert(index, subject);
    }

    fn round(mut self, session: &mut Session) {
        while session.step() {
            let all = self.exmaps.len() + self.morsels.len();
            let index = session.random.below(all as u64) as usize;
            session.subject = match index.checked_sub(self.exmaps.len()) {
                None => format!("exmap {index}"),
                Some(index) => format!("Morsel {index}"),
            };
            if session.random.one_in(SELDOM) {
                self.replace(session, index);
            } else if let Some(exmap) = self.exmaps.get_mut(index) {
                let operation = session.choose(&exmap_steps::OPERATIONS);
                operation(exmap, session);
            } else {
                let index = index - self.exmaps.len();
                let operation = session.choose(&morsel_steps::OPERATIONS);
                operation(&mut self.morsels[index], session);
            }
            if session.every(CHECK) {
                counters::assert_exmaps_are_sound();
                counters::assert_morsels_are_sound();
            }
        }
    }

    /// Replaces a subject by a new one, or mounts the device again and finds its Morsels.
    fn replace(&mut self, session: &mut Session, index: usize) {
        let Some(of_morsels) = index.checked_sub(self.exmaps.len()) else {
            self.exmaps.remove(index);
            self.add_exmap(session);
            return;
        };
        let is_on_device = self.has_device && of_morsels + 1 == self.morsels.len();
        if is_on_device && session.random.one_in(2) {
            session.note("mount again".to_owned());
            self.morsels[of_morsels].leave();
            persistent::again();
            self.morsels[of_morsels].return_to();
        } else {
            drop(self.morsels.remove(of_morsels));
            self.add_morsel(session, of_morsels, is_on_device);
        }
    }
}
