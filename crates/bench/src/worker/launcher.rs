//! Starts worker processes.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

/// A program and the arguments by which it becomes a worker.
#[derive(Clone, Debug)]
pub struct Launcher {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
}

impl Launcher {
    /// This program, with its hidden command.
    ///
    /// # Errors
    /// If the program's file is not known.
    pub fn this_program() -> Result<Launcher> {
        let program = std::env::current_exe().context("finding this program's own file")?;
        Ok(Launcher::new(program, &[super::NAME]))
    }

    /// Another program, which must call [`main`](super::main).
    pub fn new(program: PathBuf, arguments: &[&str]) -> Launcher {
        let arguments = arguments.iter().map(OsString::from).collect();
        Launcher { program, arguments, environment: Vec::new() }
    }

    /// Sets an environment variable for the worker.
    pub fn env(mut self, name: &str, value: &str) -> Launcher {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// The command, its streams connected to this process.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}
