//! What cargo has built, and where it lies.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::{Outcome, cargo};

/// Cargo's messages of a build.
pub struct Artifacts(String);

impl Artifacts {
    /// Builds what the arguments name.
    ///
    /// # Errors
    /// When it does not build; cargo has said why.
    pub fn build(root: &Path, arguments: &[&str]) -> Outcome<Self> {
        let mut command = cargo(root);
        command.args(["build", "--message-format", "json-render-diagnostics"]).args(arguments);
        let output = command.stderr(Stdio::inherit()).output();
        let output = output.map_err(|error| format!("cargo does not run: {error}"))?;
        match output.status.success() {
            true => Ok(Self(String::from_utf8_lossy(&output.stdout).into_owned())),
            false => Err(format!("it does not build: {}", output.status)),
        }
    }

    /// The path of a built file in messages such as `{"filenames":["/target/liba.so"],...}`.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn find(&self, name: &str) -> Outcome<PathBuf> {
        let ending = format!("/{name}");
        let mut words = self.0.split('"').filter(|word| word.ends_with(&ending));
        words
            .next_back()
            .map(PathBuf::from)
            .ok_or_else(|| format!("cargo does not say where {name} is"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_built_is_found_in_what_cargo_says() {
        let said = Artifacts(
            "{\"filenames\":[\"/t/debug/liba.so\",\"/t/debug/liba.a\"]}\n\
                    {\"filenames\":[\"/t/debug/tool\"],\"executable\":\"/t/debug/tool\"}\n"
                .to_owned(),
        );
        assert_eq!(said.find("liba.so"), Ok(PathBuf::from("/t/debug/liba.so")));
        assert_eq!(said.find("tool"), Ok(PathBuf::from("/t/debug/tool")));
        assert!(said.find("a.so").is_err());
    }
}
