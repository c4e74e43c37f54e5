//! How long tests with random steps run, and with which seeds.

/// How often a test repeats its random steps: once, or `soak` times with `VELLUM_SOAK=1`.
pub fn rounds(soak: u32) -> u32 {
    if std::env::var_os("VELLUM_SOAK").is_some() { soak } else { 1 }
}

/// The seed of a test's random choices, from `VELLUM_SEED` if that is set. Printed, so that a
/// failure can be replayed.
pub fn seed(default: u64) -> u64 {
    let given = std::env::var("VELLUM_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or(default);
    println!("VELLUM_SEED={seed}");
    seed
}
