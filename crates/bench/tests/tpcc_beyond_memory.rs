//! TPC-C on a pool much smaller than its data. Checks the consistency conditions after each run. It
//! runs on the default backend, which is exmap if the kernel module is loaded.
//!
//! `make lab` runs this in its guests. `workload/tpcc/tests.rs` tests that planted faults violate
//! the conditions.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use vellum_bench::engine::{Setting, VELLUM};
use vellum_bench::workload::tpcc::Scale;
use vellum_bench::workload::{Plan, Tpcc, Work};

/// Bytes of the pool.
const POOL: u64 = 2 << 20;

/// A tenth of the specification's warehouse: 13 MB of keys and values.
fn small() -> Tpcc {
    Tpcc { warehouses: 2, scale: Scale::off_spec(10_000, 300), seed: 11 }
}

/// Whether this process maps a surface of the module, by the kernel's list.
fn exmap_is_mapped() -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.ends_with("/dev/exmap"))
}

/// Bytes that this process had read from storage, by the kernel's count.
fn read_bytes() -> Option<u64> {
    let io = fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.parse().ok()
}

#[test]
fn conditions_hold_though_pages_come_and_go_all_the_time() {
    let tpcc = small();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut setting = Setting::new(directory.path(), POOL);
    setting.tables = tpcc.tables();
    let engine = (VELLUM.open)(&setting).unwrap();
    let has_module = Path::new("/sys/module/vellum").exists();
    assert_eq!(exmap_is_mapped(), has_module, "a pool of a fixed size chooses exmap");
    println!("the pool is {}on exmap", if has_module { "" } else { "not " });

    tpcc.load(&*engine).unwrap();
    engine.settle().unwrap();
    let file = fs::metadata(directory.path().join("data.vellum")).unwrap().len();
    assert!(file > 4 * POOL, "{file} bytes fit the pool too well");

    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    for threads in [1, 2, 4] {
        let before = read_bytes();
        let plan = Plan { threads, seconds: 3.0, seed: threads as u64 };
        let measured = tpcc.run(&*engine, &plan).unwrap();
        println!("{threads} threads: {} transactions", measured.operations);
        measured
            .counts
            .iter()
            .for_each(|(kind, count)| *kinds.entry(kind.clone()).or_default() += count);
        for condition in tpcc.check(&*engine).unwrap() {
            println!("holds: {condition}");
        }
        // The check reads all tables but items and stock once. On tmpfs the kernel counts nothing.
        if let (Some(before), Some(after)) = (before, read_bytes())
            && after > 0
        {
            assert!(after - before > 2 * POOL, "{} bytes were read", after - before);
        }
    }
    println!("{kinds:?}");
    for kind in ["new_order", "payment", "order_status", "delivery", "stock_level"] {
        assert!(kinds.get(kind).is_some_and(|count| *count > 0), "no {kind}: {kinds:?}");
    }
    assert_eq!(exmap_is_mapped(), has_module);
}
