//! Some seeds of each workload. `cargo xtask sim --seeds N` runs many.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

use vellum_sim::{Report, Settings, Workload, run};

fn report_of(workload: Workload, seeds: impl Iterator<Item = u64>) -> Report {
    let settings = Settings { workload: Some(workload), plant: None };
    let mut all = Report::default();
    for seed in seeds {
        match run(seed, &settings) {
            Ok(report) => all.add(&report),
            Err(failure) => panic!(
                "seed {seed}: {failure}; replay it with 'cargo xtask sim --seed {seed} --workload \
                 {}'",
                workload.name()
            ),
        }
    }
    all
}

/// The first seed, and how many: fewer than `cargo xtask sim` runs.
fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |value| value.parse().unwrap())
    };
    let first = number("VELLUM_SEED", 1);
    first..first + number("VELLUM_SIM_SEEDS", 10)
}

#[test]
fn stores_that_crash_have_what_they_must_have() {
    let report = report_of(Workload::Mixed, seeds());
    assert!(report.crashes > 100 && report.changes > 500, "{report:?}");
    assert!(report.damaged > 0 && report.refused > 0 && report.conflicts > 0, "{report:?}");
    assert!(report.backups > 10, "{report:?}");
}

#[test]
fn the_books_of_a_shop_that_crashes_balance() {
    let report = report_of(Workload::Shop, seeds());
    assert!(report.crashes > 100 && report.commits > 200, "{report:?}");
    assert!(report.conflicts > 0, "{report:?}");
}

/// Otherwise no failure could be replayed.
#[test]
fn a_seed_does_the_same_each_time() {
    let seeds = [
        (Workload::Mixed, 3),
        (Workload::Mixed, 4),
        (Workload::Mixed, 6),
        (Workload::Mixed, 8),
        (Workload::Shop, 5),
    ];
    for (workload, seed) in seeds {
        let [one, other] = [(); 2].map(|()| report_of(workload, seed..=seed));
        assert_eq!(one, other, "{} {seed}", workload.name());
        let another = report_of(workload, seed + 10..=seed + 10);
        assert_ne!(one.trace, another.trace);
    }
}
