//! scratch
use std::time::Instant;
use vellum_bench::engine::{Factory, Setting, VELLUM};
use vellum_bench::workload::{Lookup, Plan, Scan, Work, Ycsb, ycsb::Kind};
use vellum_bench_peers::*;

#[test]
fn measure() {
    let threads: usize = std::env::var("T").map_or(1, |v| v.parse().unwrap());
    let n: u64 = std::env::var("N").map_or(500_000, |v| v.parse().unwrap());
    let mib: u64 = std::env::var("MIB").map_or(512, |v| v.parse().unwrap());
    let dir = std::env::var("DIR").unwrap_or("/tmp".into());
    let seconds: f64 = std::env::var("S").map_or(1.0, |v| v.parse().unwrap());
    let what = std::env::var("W").unwrap_or("lookup,ycsb".into());
    for spec in std::env::var("E").unwrap().split(' ') {
        let mut parts = spec.split(',');
        let name = parts.next().unwrap();
        let factory: Factory =
            if name == "vellum" { VELLUM } else { *ALL.iter().find(|f| f.name == name).unwrap() };
        let directory = tempfile::tempdir_in(&dir).unwrap();
        let mut setting =
            Setting::new(directory.path(), if factory.direct { mib << 20 } else { mib << 17 });
        for part in parts {
            let (k, v) = part.split_once('=').unwrap();
            setting.options.insert(k.into(), v.into());
        }
        let plan = Plan { threads, seconds, seed: 1 };
        let mut line = format!("{spec:40}");
        if what.contains("lookup") || what.contains("scan") {
            let engine = (factory.open)(&setting).unwrap();
            let lookup = Lookup { entries: n, batch: 1 };
            let t = Instant::now();
            lookup.load(&*engine).unwrap();
            engine.settle().unwrap();
            line += &format!(" load {:.1}s", t.elapsed().as_secs_f64());
            if what.contains("lookup") {
                lookup.run(&*engine, &plan).unwrap();
                for batch in [1, 32] {
                    let m = Lookup { batch, ..lookup }.run(&*engine, &plan).unwrap();
                    line += &format!(" get{batch} {:.0}k p99 {}ns", m.rate() / 1e3, m.latency.p99);
                }
            }
            if what.contains("scan") {
                for backward in [false, true] {
                    let m = Scan { entries: n, length: n.min(100_000), backward }
                        .run(&*engine, &plan)
                        .unwrap();
                    line += &format!(" scan{} {:.0}k", backward as u8, m.rate() / 1e3);
                }
            }
        }
        if what.contains("ycsb") {
            for kind in [Kind::A, Kind::B, Kind::C, Kind::E, Kind::F] {
                let directory = tempfile::tempdir_in(&dir).unwrap();
                setting.directory = directory.path().to_path_buf();
                setting.tables = vec!["usertable".into()];
                let engine = (factory.open)(&setting).unwrap();
                let ycsb = Ycsb { kind, records: n / 10 };
                ycsb.load(&*engine).unwrap();
                engine.settle().unwrap();
                let m = ycsb.run(&*engine, &plan).unwrap();
                line += &format!(" {kind:?} {:.1}k", m.rate() / 1e3);
            }
        }
        println!("{line}");
    }
}
