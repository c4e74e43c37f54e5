//! `vellum sim`: simulated crashes of stores, from seeds.

use crate::error::Outcome;

const HELP: &str = "\
Examples:
  vellum sim --seeds 1000                   the seeds 1 to 1000
  vellum sim --seeds 1000 --from 5001       the next ones
  vellum sim --seed 17                      one seed, and what happened with it
  vellum sim --seed 17 --story              every step of it
  vellum sim --plants                       the bugs that can be planted
  vellum sim --plant no-write-rule --seeds 100

A seed decides all: what the workload does, how large the store, its pool and its log are, where the
power fails or the process is killed, what is lost, torn or written elsewhere, and which operations
fail. After each crash the store is recovered, also through crashes of the recovery, and compared
with what must be there. The even seeds run the workload 'mixed', any operations, compared with a
model; the odd ones run 'shop', transactions that keep rules. The exit code is 1 if a seed fails.

With --plant the store has a bug, and the exit code is 1 if no seed finds it.

This command is in builds with the feature 'sim' alone, because they have the bugs:
  cargo xtask sim --seeds 1000              builds it, and runs it";

/// Crash simulated stores, and compare what they recover with what must be there
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Run this seed, and say what happened
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,

    /// Run so many seeds
    #[arg(long, value_name = "N", default_value = "100")]
    seeds: u64,

    /// The first seed
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "seed")]
    from: u64,

    /// The workload, 'mixed' or 'shop' [default: the seed chooses]
    #[arg(long, value_name = "NAME")]
    workload: Option<String>,

    /// Plant this bug
    #[arg(long, value_name = "NAME")]
    plant: Option<String>,

    /// List the bugs that can be planted
    #[arg(long)]
    plants: bool,

    /// Show every step of the seed
    #[arg(long, requires = "seed")]
    story: bool,

    /// Threads, each of which runs seeds
    #[arg(long, value_name = "N", default_value = "1", value_parser = threads)]
    jobs: u32,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

fn threads(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 1..=1024) => Ok(count),
        _ => Err("write a number from 1 to 1024".into()),
    }
}

#[cfg(not(feature = "sim"))]
mod work {
    use super::Arguments;
    use crate::error::{Failure, Outcome};

    pub fn run(arguments: &Arguments) -> Outcome {
        // The simulator alone reads them.
        let Arguments { seed, seeds, from, workload, plant, plants, story, jobs, json } = arguments;
        let _ = (seed, seeds, from, workload, plant, plants, story, jobs, json);
        Err(Failure::message(
            "this build has no simulator, because one with it has planted bugs: run 'cargo xtask \
             sim' in the source tree, with the same arguments",
        ))
    }
}

#[cfg(feature = "sim")]
mod work {
    use std::panic;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Instant;

    use serde_json::{Value, json};
    use vellum_sim::{Failure as Wrong, PLANTS, Plant, Report, Settings, Workload};

    use super::Arguments;
    use crate::error::{Failure, Outcome};
    use crate::interrupt;
    use crate::output::{Output, columns};
    use crate::progress::{Progress, Unit};

    /// The most failing seeds that are shown.
    const FAILURES_MAX: usize = 10;

    /// What came of many seeds.
    #[derive(Default)]
    struct Sum {
        report: Report,
        seeds: u64,
        /// Seeds, and what is wrong.
        failures: Vec<(u64, Wrong)>,
    }

    pub fn run(arguments: &Arguments) -> Outcome {
        if arguments.plants {
            return list(arguments.json);
        }
        let settings = settings(arguments)?;
        // A panic of the store is a failure of its seed, and is reported as that.
        panic::set_hook(Box::new(|_| ()));
        match arguments.seed {
            Some(seed) => one(seed, &settings, arguments),
            None => many(&settings, arguments),
        }
    }

    fn settings(arguments: &Arguments) -> Outcome<Settings> {
        let workload = match &arguments.workload {
            None => None,
            Some(name) => {
                let found = Workload::ALL.into_iter().find(|workload| workload.name() == name);
                let names = Workload::ALL.map(Workload::name).join("' and '");
                let unknown = || format!("there is no workload '{name}', but '{names}'");
                Some(found.ok_or_else(|| Failure::message(unknown()))?)
            }
        };
        let plant = match &arguments.plant {
            None => None,
            Some(name) => {
                let unknown =
                    || format!("there is no bug '{name}': 'vellum sim --plants' lists them");
                Some(Plant::named(name).ok_or_else(|| Failure::message(unknown()))?)
            }
        };
        Ok(Settings { workload, plant })
    }

    fn list(as_json: bool) -> Outcome {
        let mut output = Output::new();
        if as_json {
            let plants = PLANTS
                .iter()
                .map(|plant| json!({ "name": plant.name, "what": plant.what, "seed": plant.seed }));
            output.line(&Value::from_iter(plants).to_string())?;
            return output.finish();
        }
        let rows = PLANTS.iter().map(|plant| vec![plant.name.into(), plant.seed.to_string()]);
        let rows: Vec<_> = [vec!["bug".into(), "seed".into()]].into_iter().chain(rows).collect();
        let meanings = [""].into_iter().chain(PLANTS.iter().map(|plant| plant.what));
        for (row, what) in columns(&rows).iter().zip(meanings) {
            output.line(format!("{row}  {what}").trim_end())?;
        }
        output.finish()
    }

    /// The command that runs a seed again.
    fn replay(seed: u64, settings: &Settings) -> String {
        let mut command = format!("vellum sim --seed {seed}");
        let workload = settings.workload.map(|workload| workload.name());
        let plant = settings.plant.map(|plant| plant.name);
        for (option, value) in [("workload", workload), ("plant", plant)] {
            if let Some(value) = value {
                command.push_str(&format!(" --{option} {value}"));
            }
        }
        command
    }

    fn one(seed: u64, settings: &Settings, arguments: &Arguments) -> Outcome {
        let start = Instant::now();
        let (outcome, story) = match arguments.story {
            true => vellum_sim::run_with_story(seed, settings),
            false => (vellum_sim::run(seed, settings), Vec::new()),
        };
        let mut result = Sum { seeds: 1, ..Sum::default() };
        match outcome {
            Ok(report) => result.report = report,
            Err(wrong) => result.failures.push((seed, wrong)),
        }
        let mut output = Output::new();
        if arguments.json {
            let mut value = result.json(settings, start);
            if arguments.story {
                value["story"] = story.into();
            }
            output.line(&value.to_string())?;
        } else {
            for line in &story {
                output.line(line)?;
            }
            let workload = settings.workload_of(seed).name();
            match result.failures.first() {
                Some((_, wrong)) => output.line(&format!("seed {seed} ({workload}): {wrong}"))?,
                None => {
                    output.line(&format!("seed {seed} ({workload}): nothing is wrong"))?;
                    result.print(&mut output)?;
                }
            }
        }
        output.finish()?;
        result.outcome(settings)
    }

    fn many(settings: &Settings, arguments: &Arguments) -> Outcome {
        interrupt::watch()?;
        let start = Instant::now();
        let end = arguments.from.saturating_add(arguments.seeds);
        let progress = Progress::new("seeds", Unit::Items, arguments.seeds);
        let (next, is_found) = (AtomicU64::new(arguments.from), AtomicBool::new(false));
        let result = Mutex::new(Sum::default());
        let lock = || result.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let work = || {
            while !interrupt::signal_came() && !is_found.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= end {
                    break;
                }
                let outcome = vellum_sim::run(seed, settings);
                let mut result = lock();
                result.seeds += 1;
                match outcome {
                    Ok(report) => result.report.add(&report),
                    Err(wrong) => {
                        result.failures.push((seed, wrong));
                        is_found.fetch_or(settings.plant.is_some(), Ordering::Relaxed);
                    }
                }
                drop(result);
                progress.advance(1);
            }
        };
        std::thread::scope(|scope| {
            (0..arguments.jobs).for_each(|_| drop(scope.spawn(work)));
        });
        progress.finish();
        let mut result = result.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        result.failures.sort_by_key(|(seed, _)| *seed);
        let mut output = Output::new();
        if arguments.json {
            output.line(&result.json(settings, start).to_string())?;
        } else {
            let shown = result.failures.len().min(FAILURES_MAX);
            for (seed, wrong) in &result.failures[..shown] {
                output.line(&format!("seed {seed}: {wrong}"))?;
            }
            output.line(&format!("{} seeds in {:.1?}", result.seeds, start.elapsed()))?;
            result.print(&mut output)?;
        }
        output.finish()?;
        result.outcome(settings)
    }

    impl Sum {
        fn rows(&self) -> [(&'static str, u64); 8] {
            let report = &self.report;
            [
                ("crashes", report.crashes),
                ("failed recoveries", report.failed_recoveries),
                ("crashes with named damage", report.damaged),
                ("logs cut off", report.cut_off),
                ("changes", report.changes),
                ("commits", report.commits),
                ("conflicts", report.conflicts),
                ("refused operations", report.refused),
            ]
        }

        fn print(&self, output: &mut Output) -> Outcome {
            let rows = self.rows().map(|(name, count)| vec![name.into(), count.to_string()]);
            columns(&rows).iter().try_for_each(|line| output.line(line))
        }

        fn json(&self, settings: &Settings, start: Instant) -> Value {
            let failures = self.failures.iter().map(|(seed, wrong)| {
                json!({
                    "seed": seed,
                    "workload": settings.workload_of(*seed).name(),
                    "what": wrong.to_string(),
                    "replay": replay(*seed, settings),
                })
            });
            let mut value = json!({
                "seeds": self.seeds,
                "seconds": start.elapsed().as_secs_f64(),
                "plant": settings.plant.map(|plant| plant.name),
                "trace": format!("{:016x}", self.report.trace),
                "failures": Value::from_iter(failures),
            });
            for (name, count) in self.rows() {
                value[name.replace(' ', "_")] = count.into();
            }
            value
        }

        /// Whether the command succeeds: a planted bug must be found, and nothing else.
        fn outcome(&self, settings: &Settings) -> Outcome {
            match (self.failures.first(), settings.plant) {
                (None, None) | (Some(_), Some(_)) => Ok(()),
                (None, Some(plant)) => Err(Failure::message(format!(
                    "{} seeds have not found the planted bug '{}'",
                    self.seeds, plant.name
                ))),
                (Some((seed, wrong)), None) => Err(Failure::message(format!(
                    "{} of {} seeds fail, first {seed}: {wrong}; replay it with '{}'",
                    self.failures.len(),
                    self.seeds,
                    replay(*seed, settings)
                ))),
            }
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When a seed fails, or none finds a planted bug.
pub fn run(arguments: &Arguments) -> Outcome {
    work::run(arguments)
}
