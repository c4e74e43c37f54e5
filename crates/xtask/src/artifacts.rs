//! The files that cargo builds, and their paths.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cargo_metadata::{Artifact, Message};

use crate::workspace::{Outcome, cargo};

/// All that tests need, in one build: test programs, programs and libraries. A build of fewer
/// packages has other features, and would build again what they share.
const WHOLE: [&str; 9] = [
    "build",
    "--quiet",
    "--workspace",
    "--lib",
    "--bins",
    "--tests",
    "--examples",
    "--features",
    "vellum-cli/sim",
];

/// The variable that tells tests, and chores that build programs for tests, in which folder the
/// files of the whole build lie, so that they need not build them again.
pub const BUILT: &str = "VELLUM_BUILT";

/// The files of a build.
#[derive(Debug, Default)]
pub struct Artifacts(Vec<Artifact>);

/// A program with the tests of one target: of a library, of a binary, or one of `tests/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// The package and the target, such as `vellum-pool/device_file`: several packages may have a
    /// target of one name.
    pub name: String,
    /// The program.
    pub path: PathBuf,
    /// The package's own folder, in which cargo runs its tests.
    pub folder: PathBuf,
}

/// The program whose tests wait for seconds until files are at rest, and hardly use a processor.
const WAITING: &str = "vellum-preload/preload";

impl TestProgram {
    /// The arguments of the program on this machine and in guests.
    pub fn arguments(&self) -> &'static [&'static str] {
        if self.name == WAITING { &["--test-threads=16"] } else { &[] }
    }
}

impl Artifacts {
    /// Builds with the arguments of `cargo`, such as `["build", "--release"]`.
    ///
    /// # Errors
    /// When the build fails; cargo has printed why.
    pub fn build(root: &Path, arguments: &[&str]) -> Outcome<Self> {
        let mut command = cargo(root);
        command.args(arguments).args(["--message-format", "json-render-diagnostics"]);
        let output = command.stderr(Stdio::inherit()).output();
        let output = output.map_err(|error| format!("cargo does not run: {error}"))?;
        if !output.status.success() {
            return Err(format!("it does not build: {}", output.status));
        }
        Self::read(&output.stdout)
    }

    /// Builds every test program, program and library of the workspace.
    ///
    /// # Errors
    /// As for [`Artifacts::build`].
    pub fn whole(root: &Path) -> Outcome<Self> {
        Self::build(root, &WHOLE)
    }

    fn read(messages: &[u8]) -> Outcome<Self> {
        let mut artifacts = Vec::new();
        for message in Message::parse_stream(messages) {
            let message = message.map_err(|error| format!("cargo's messages: {error}"))?;
            if let Message::CompilerArtifact(artifact) = message {
                artifacts.push(artifact);
            }
        }
        Ok(Self(artifacts))
    }

    /// The path of the built file of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, name: &str) -> Outcome<PathBuf> {
        let mut files = self.0.iter().flat_map(|artifact| &artifact.filenames);
        files
            .rfind(|file| file.file_name() == Some(name))
            .map(|file| file.clone().into_std_path_buf())
            .ok_or_else(|| format!("cargo's messages do not name {name}"))
    }

    /// The programs that have tests, in the order of their names.
    pub fn test_programs(&self) -> Vec<TestProgram> {
        let tests = self.0.iter().filter(|artifact| artifact.profile.test);
        let mut programs: Vec<TestProgram> = tests.filter_map(test_program).collect();
        programs.sort_by(|a, b| a.name.cmp(&b.name));
        programs
    }
}

fn test_program(artifact: &Artifact) -> Option<TestProgram> {
    let path = artifact.executable.clone()?.into_std_path_buf();
    let folder = artifact.manifest_path.parent()?;
    // `path+file:///home/vellum/crates/pool#vellum-pool@0.1.0`, or `...pool#0.1.0` where the
    // package has the name of its folder.
    let id = artifact.package_id.repr.rsplit('#').next()?;
    let package = id.split_once('@').map_or_else(|| folder.file_name(), |(name, _)| Some(name))?;
    let name = format!("{package}/{}", artifact.target.name.replace('-', "_"));
    Some(TestProgram { name, path, folder: folder.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of cargo's about one file.
    fn artifact(id: &str, folder: &str, name: &str, test: bool, file: &str) -> String {
        let executable = if test { format!("\"{file}\"") } else { "null".to_owned() };
        let message = r#"{"reason":"compiler-artifact","package_id":"ID","features":[],
            "manifest_path":"FOLDER/Cargo.toml","fresh":true,"filenames":["FILE"],
            "target":{"kind":["lib"],"crate_types":["lib"],"name":"NAME","src_path":"/a.rs",
            "edition":"2024","doc":true,"doctest":false,"test":true},
            "profile":{"opt_level":"0","debuginfo":2,"debug_assertions":true,
            "overflow_checks":true,"test":TEST},"executable":PROGRAM}"#;
        let message = message.replace('\n', "").replace("ID", id).replace("FOLDER", folder);
        let message = message.replace("FILE", file).replace("NAME", name);
        message.replace("TEST", &test.to_string()).replace("PROGRAM", &executable) + "\n"
    }

    #[test]
    fn built_files_are_found_in_cargo_s_messages() {
        let id = "path+file:///v/crates/capi#vellum-capi@0.1.0";
        let said = artifact(id, "/v/crates/capi", "vellum", false, "/t/debug/libvellum.so");
        let built = Artifacts::read(said.as_bytes()).unwrap();
        assert_eq!(built.find("libvellum.so"), Ok(PathBuf::from("/t/debug/libvellum.so")));
        assert!(built.find("vellum.so").is_err());
        assert_eq!(built.test_programs(), []);
    }

    #[test]
    fn programs_with_tests_are_named_by_package_and_target() {
        let pool = "path+file:///v/crates/pool#vellum-pool@0.1.0";
        let xtask = "path+file:///v/crates/xtask#0.1.0";
        let said = artifact(xtask, "/v/crates/xtask", "xtask", true, "/t/debug/deps/xtask-1")
            + &artifact(pool, "/v/crates/pool", "vellum-pool", true, "/t/debug/deps/pool-2");
        let programs = Artifacts::read(said.as_bytes()).unwrap().test_programs();
        let named = |name: &str, path: &str, folder: &str| TestProgram {
            name: name.to_owned(),
            path: path.into(),
            folder: folder.into(),
        };
        let expected = [
            named("vellum-pool/vellum_pool", "/t/debug/deps/pool-2", "/v/crates/pool"),
            named("xtask/xtask", "/t/debug/deps/xtask-1", "/v/crates/xtask"),
        ];
        assert_eq!(programs, expected);
    }
}
