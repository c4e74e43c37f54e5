//! Tests of the threads without a device: each allocated page is freed once, by the right
//! interface.

use std::collections::HashMap;
use std::sync::Mutex;

use anyhow::bail;
use vellum_testing::patience::PATIENCE;

use super::*;
use crate::exmap::pattern::Claimed;

const PAGES: u64 = 1 << 15;

/// Records which pages are present, and which interface populated them.
#[derive(Default)]
struct Fake {
    state: Mutex<State>,
    /// Frames of the pool; 0 is as many as wanted.
    frames: usize,
    /// Calls after which there are only errors; 0 is never.
    breaks_after: usize,
}

#[derive(Default)]
struct State {
    there: HashMap<u64, usize>,
    touched: u64,
    brought: u64,
    taken: HashMap<(usize, usize), u64>,
    calls: usize,
}

impl PageMemory for Fake {
    fn populator(&self, interface: usize) -> Result<Box<dyn Populator + '_>> {
        Ok(Box::new(FakeHand { fake: self, interface }))
    }

    fn touch(&self, page: u64) {
        let mut state = self.state.lock().unwrap();
        assert!(state.there.contains_key(&page));
        state.touched += 1;
    }
}

struct FakeHand<'a> {
    fake: &'a Fake,
    interface: usize,
}

impl FakeHand<'_> {
    fn call(&self, state: &mut State) -> Result<()> {
        state.calls += 1;
        if self.fake.breaks_after > 0 && state.calls > self.fake.breaks_after {
            bail!("broken");
        }
        Ok(())
    }
}

impl Populator for FakeHand<'_> {
    fn bring(&mut self, pages: &mut Vec<u64>, refused: &mut Vec<u64>) -> Result<()> {
        assert!(pages.len() <= BATCH);
        let mut state = self.fake.state.lock().unwrap();
        self.call(&mut state)?;
        let room = match self.fake.frames {
            0 => pages.len(),
            frames => frames.saturating_sub(state.there.len()).min(pages.len()),
        };
        refused.extend(pages.drain(room..));
        for page in pages.iter() {
            assert!(
                state.there.insert(*page, self.interface).is_none(),
                "page {page} was populated twice"
            );
        }
        state.brought += pages.len() as u64;
        Ok(())
    }

    fn take(&mut self, pages: &[u64]) -> Result<()> {
        let mut state = self.fake.state.lock().unwrap();
        self.call(&mut state)?;
        for page in pages {
            let from = state.there.remove(page).expect("a present page");
            *state.taken.entry((from, self.interface)).or_default() += 1;
        }
        Ok(())
    }
}

fn plan(threads: usize, pattern: Pattern, strategy: Strategy) -> Plan {
    Plan::new(threads, pattern, strategy, 8192)
}

/// Runs it, and checks that all allocated pages were freed and counted. On a busy machine a run may
/// be too short for what the test needs: then another one lasts four times as long.
fn done(fake: impl Fn() -> Fake, plan: Plan, is_enough: fn(&Tally) -> bool) -> (Tally, State) {
    let mut time = Duration::from_millis(30);
    loop {
        let (fake, states, plan) = (fake(), Claimed::new(PAGES), plan.lasting(time));
        let tally = run(&fake, &states, PAGES, &plan).unwrap();
        let state = fake.state.into_inner().unwrap();
        assert!(state.there.is_empty() && tally.seconds > 0.0, "{plan:?}");
        assert_eq!(tally.pages, state.brought, "{plan:?}");
        assert_eq!(state.touched, if plan.touch { tally.pages } else { 0 });
        assert_eq!(states.count(), 0);
        if tally.pages > 0 && is_enough(&tally) {
            return (tally, state);
        }
        assert!(time < PATIENCE, "{plan:?}: {tally:?}");
        time *= 4;
    }
}

#[test]
fn every_page_that_comes_goes_by_the_right_lane() {
    for pattern in Pattern::ALL {
        for strategy in
            [Strategy::Local, Strategy::TwoInterfaces, Strategy::Remote, Strategy::Mixed]
        {
            let (tally, state) = done(Fake::default, plan(2, pattern, strategy), |_| true);
            assert_eq!(tally.refused, 0);
            let taken = state.taken;
            let count = |which: fn(usize, usize) -> bool| -> u64 {
                taken.iter().filter(|((from, by), _)| which(*from, *by)).map(|(_, n)| n).sum()
            };
            let (same, second, total) =
                (count(|from, by| from == by), count(|from, by| by == from + 2), tally.pages);
            assert!(taken.keys().all(|(from, by)| *from < 2 && *by < 4));
            match strategy {
                Strategy::Local => assert_eq!(same, total),
                Strategy::TwoInterfaces => assert_eq!(second, total),
                Strategy::Remote => assert_eq!(same, 0),
                Strategy::Mixed => assert_eq!(same, total / 2, "{taken:?}"),
            }
        }
    }
}

#[test]
fn pages_without_memory_are_refused_and_not_counted() {
    let fake = || Fake { frames: 700, ..Fake::default() };
    let plan = plan(2, Pattern::Random, Strategy::Remote).untouched();
    done(fake, plan, |tally| tally.refused > 0);
}

#[test]
fn few_free_threads_and_one_queue_do_as_well() {
    let plan = Plan {
        freers: 1,
        queues: 1,
        queued: 1000,
        ..plan(4, Pattern::Sequential, Strategy::Remote)
    };
    done(Fake::default, plan, |_| true);
}

#[test]
fn an_error_of_one_thread_ends_all() {
    for strategy in [Strategy::Local, Strategy::Remote, Strategy::Mixed] {
        let fake = Fake { breaks_after: 5, ..Fake::default() };
        let plan = plan(2, Pattern::Random, strategy).lasting(3 * PATIENCE);
        let start = Instant::now();
        let error = run(&fake, &Claimed::new(PAGES), PAGES, &plan).unwrap_err();
        assert_eq!(error.to_string(), "broken");
        assert!(start.elapsed() < PATIENCE);
    }
}
