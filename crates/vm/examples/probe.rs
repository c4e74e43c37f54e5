//! Prints what this machine offers and what a page costs on each backend:
//! `cargo run --release --example probe`.

use vellum_vm::SurfaceError;
use vellum_vm::probe::{self, cost};

fn main() -> Result<(), SurfaceError> {
    print!("{}", probe::facilities());
    println!("\nns per page, median (min..max)");
    println!(
        "{:<16} {:>7} {:>5} {:>26} {:>30}",
        "backend", "threads", "batch", "populate", "release"
    );
    let backends = probe::backends();
    for (threads, batch) in [(1, 1), (2, 1), (1, 64), (2, 64), (1, 512), (2, 512)] {
        let setting = cost::Setting { threads, batch, ..cost::Setting::default() };
        let costs = cost::measure(&backends, setting)?;
        for cost in &costs {
            println!(
                "{:<16} {threads:>7} {batch:>5} {:>26} {:>30}",
                cost.backend,
                show(cost.populate_ns),
                show(cost.release_ns)
            );
        }
        if let [plain, .., best] = costs.as_slice() {
            let ratio = plain.release_ns.median / best.release_ns.median;
            println!("{:<16} releases {ratio:.1} times as fast", best.backend);
        }
    }
    Ok(())
}

fn show(spread: cost::Spread) -> String {
    format!("{:.0} ({:.0}..{:.0})", spread.median, spread.min, spread.max)
}
