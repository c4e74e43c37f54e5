//! The engines of a run, by name.

use anyhow::{Context as _, Result};

use super::{Factory, vellum};

/// Vellum with its default options.
pub const VELLUM: Factory =
    Factory { name: "vellum", about: "direct I/O, no log", direct: true, open: vellum::open };

/// The engines of a run.
#[derive(Clone, Debug)]
pub struct Engines(Vec<Factory>);

impl Engines {
    /// Vellum and `peers`.
    pub fn new(peers: &[Factory]) -> Engines {
        Engines(std::iter::once(VELLUM).chain(peers.iter().copied()).collect())
    }

    /// The engines with these names, and Vellum always; all if there are no names.
    ///
    /// # Errors
    /// As [`get`](Engines::get).
    pub fn only(self, names: &[String]) -> Result<Engines> {
        if names.is_empty() {
            return Ok(self);
        }
        names.iter().try_for_each(|name| self.get(name).map(drop))?;
        let wanted = |factory: &Factory| {
            factory.name == VELLUM.name || names.iter().any(|name| name == factory.name)
        };
        Ok(Engines(self.0.into_iter().filter(wanted).collect()))
    }

    /// All of them, Vellum first.
    pub fn all(&self) -> &[Factory] {
        &self.0
    }

    /// The engine of that name.
    ///
    /// # Errors
    /// Says which names there are, and how to get the peers.
    pub fn get(&self, name: &str) -> Result<Factory> {
        let found = self.0.iter().find(|factory| factory.name == name).copied();
        found.with_context(|| {
            let names: Vec<&str> = self.0.iter().map(|factory| factory.name).collect();
            format!(
                "no engine '{name}' here, only {}; build with --features peers (rocksdb: \
                 --features rocksdb) for the others",
                names.join(", ")
            )
        })
    }
}
